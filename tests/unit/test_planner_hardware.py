"""The hardware catalogue, clusters, and a user's own figures."""

from pathlib import Path

import pytest

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.planner.collectives import Span, collective_s, span
from ascend_moe_train.planner.efficiency import efficiencies, efficiency_of
from ascend_moe_train.planner.hardware import catalogue, find_device, parse_cluster
from ascend_moe_train.planner.plan import Plan


def test_every_device_is_whole_and_every_figure_has_a_source() -> None:
    devices = catalogue()
    assert {
        "910B1",
        "910B2",
        "910B3",
        "910B4",
        "910C",
        "A100",
        "A100-40GB",
        "H100",
        "H800",
        "H200",
        "B200",
        "cpu",
    } <= set(devices)
    for name, device in devices.items():
        assert device.name == name
        assert device.efficiency in efficiencies()
        assert device.memory_bytes > 1e9
        figures = 3 + len(device.peak_flops_per_s) + 2 * 3
        assert len(device.sources) == figures
        assert all(source.strip() for source in device.sources.values())


def test_cube_peaks_not_totals() -> None:
    peaks = {name: find_device(name).peak("bf16") / 1e12 for name in ("910B2", "910B3", "910B4")}
    assert peaks == {"910B2": 353.9, "910B3": 294.9, "910B4": 245.8}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("910B", "910B2"),
        ("Ascend910B", "910B2"),
        ("ascend 910b3", "910B3"),
        ("Ascend910B-280T", "910B4-1"),
        ("Ascend910C-die", "910C"),
        ("A100-80GB", "A100"),
        ("a100_40gb", "A100-40GB"),
        ("H100-96GB", "H100-96GB"),
    ],
)
def test_aliases(name: str, wanted: str) -> None:
    assert find_device(name).name == wanted


def test_a_mesh_gives_a_group_its_links() -> None:
    """claims.md, 1: a pair has 28 GB/s, eight devices 196; any pair behind a switch has everything."""
    mesh, switched = find_device("910B2").inside, find_device("A100").inside
    assert [mesh.rate(size) / 1e9 for size in (2, 4, 8)] == [28, 84, 196]
    assert [switched.rate(size) / 1e9 for size in (2, 8)] == [300, 300]


def test_clusters() -> None:
    cluster = parse_cluster(" 64x910B ")
    assert (cluster.num_devices, cluster.num_nodes, cluster.name) == (64, 8, "64x910B2")
    assert parse_cluster("4*A100").devices_per_node == 4
    assert parse_cluster("32×910C").num_nodes == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "64x910B"),
        ("64", "64x910B"),
        ("x910B", "64x910B"),
        ("-8x910B", "64x910B"),
        ("8.5x910B", "64x910B"),
        ("0x910B", "from 1 to"),
        ("99999999999x910B", "from 1 to"),
        ("9" * 40 + "x910B", "64x910B"),
        ("70xA100", "use 64 or 72"),
        ("8xA101", "did you mean A100"),
        ("8x910D", "did you mean 910"),
        ("8xgalaxy", "there are"),
        ("8x" + "z" * 1000, "there are"),
        ("8x\n910B\n8x910B", "not"),
    ],
)
def test_wrong_clusters_say_what_is_right(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_own_figures_override_and_add(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "910B2: {memory_bytes: 60e9, inside: {bytes_per_s: 25e9}}\n"
        "mine: {like: A100, devices_per_node: 4, peak_flops_per_s: {bf16: 200e12}}\n"
    )
    devices = catalogue(path)
    assert devices["910B2"].memory_bytes == 60e9
    assert devices["910B2"].inside.rate(8) == 7 * 25e9
    mine = parse_cluster("8xmine", devices)
    assert (mine.num_nodes, mine.device.peak("bf16"), mine.device.peak("fp16")) == (2, 200e12, 312e12)
    assert catalogue()["910B2"].inside.rate(8) == 196e9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 910B2\n", "mapping"),
        ("910B2: 5\n", "mapping of figures"),
        ("910B2: {memory: 5}\n", "did you mean 'memory_bytes'"),
        ("910B2: {memory_bytes: -1}\n", "positive"),
        ("910B2: {memory_bytes: lots}\n", "positive"),
        ("910B2: {memory_bytes: true}\n", "positive"),
        ("910B2: {inside: 28e9}\n", "mapping"),
        ("910B2: {inside: {rate: 28e9}}\n", "unknown key"),
        ("910B2: {peak_flops_per_s: {bf17: 1e14}}\n", "did you mean 'bf16'"),
        ("new: {memory_bytes: 5e9}\n", "not known"),
        ("new: {like: [1]}\n", "name of a device"),
        ("a: &x {memory_bytes: 1}\n", "anchors"),
    ],
)
def test_wrong_figures_say_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        catalogue(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_precision_is_named() -> None:
    with pytest.raises(ConfigError, match="no fp8 matrix products"):
        find_device("910B2").peak("fp8")


def test_groups_follow_the_order_of_ranks() -> None:
    plan = Plan(num_devices=128, stage_layers=(1, 1), pp=2, tp=4, cp=2, ep=16, etp=2)
    wanted = {
        "tp": Span(4, 4),
        "cp": Span(2, 2),
        "dp": Span(8, 1),
        "dp x cp": Span(16, 2),
        "etp": Span(2, 2),
        "ep": Span(16, 4),
        "edp": Span(2, 1),
        "pp": Span(2, 1),
    }
    assert {axis: span(plan, axis, 8) for axis in wanted} == wanted


def test_collectives() -> None:
    cluster, share = parse_cluster("64x910B"), efficiencies()["ascend"]

    def takes(verb: str, group: Span, size_bytes: float = 1e9) -> float:
        return collective_s(verb, size_bytes, group, cluster, share)

    assert takes("all_reduce", Span(1, 1)) == takes("all_reduce", Span(8, 8), 0) == 0
    assert takes("all_reduce", Span(8, 8)) == pytest.approx(2 * takes("all_gather", Span(8, 8)), rel=0.01)
    assert takes("all_to_all", Span(2, 2)) > takes("all_to_all", Span(8, 8))
    assert takes("all_to_all", Span(16, 8)) > 2 * takes("all_to_all", Span(8, 8))
    assert takes("all_gather", Span(8, 1)) > takes("all_gather", Span(64, 8))
    small, large = takes("all_gather", Span(8, 8), 1e3), takes("all_gather", Span(8, 8), 1e9)
    assert 1e9 / large > 100 * (1e3 / small)


def test_what_was_measured_on_a_device_replaces_its_class(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("mine:\n  like: cpu\n  efficiency: {product: 0.9, operator_s: 1e-6, hidden: 0}\n")
    device = catalogue(path)["mine"]
    found = efficiency_of(device.efficiency, device.own_efficiency)
    assert (found.product, found.operator_s, found.hidden) == (0.9, 1e-6, 0.0)
    assert found.vector == efficiencies()["cpu"].vector
    assert not catalogue()["cpu"].own_efficiency


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{produkt: 0.9}", "efficiency: unknown key 'produkt': did you mean 'product'?"),
        ("{product: 1.2}", "efficiency.product 1.2 must be a share"),
        ("{product: 0}", "efficiency.product 0 must be a share"),
        ("{operator_s: -1}", "efficiency.operator_s -1 must be a positive number"),
        ("0.9", "efficiency must be a mapping"),
    ],
)
def test_measured_shares_are_checked(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"mine: {{like: cpu, efficiency: {text}}}\n")
    with pytest.raises(ConfigError) as caught:
        catalogue(path)
    assert says in str(caught.value)
