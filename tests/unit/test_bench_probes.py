"""Fits of what ranks measure of a machine: made-up times of a known machine give that one back, to the planner too."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.bench import probe_rank, runs
from ascend_moe_train.bench.calibrate import (
    Asked,
    calibrate_result,
    check_name,
    comm_result,
    dispatch_result,
    dispatch_sizes,
    hardware_text,
    work_result,
)
from ascend_moe_train.bench.probe_rank import Prober
from ascend_moe_train.bench.probes import (
    PLANNED_VERBS,
    VERBS,
    CommTime,
    DispatchSizes,
    Probed,
    WorkTime,
    alpha_beta,
    core_share,
    entry,
    group_sizes,
    grouped_share,
    line,
    link,
    probed_json,
    product_share,
    read_probed,
)
from ascend_moe_train.bench.result import read_result
from ascend_moe_train.cli.main import main
from ascend_moe_train.cluster.output import Screen
from ascend_moe_train.cluster.supervise import Job, Outcome
from ascend_moe_train.config import load_run
from ascend_moe_train.errors import ConfigError, MetricsError
from ascend_moe_train.parallel import comm
from ascend_moe_train.parallel.comm import LocalComm
from ascend_moe_train.planner.block_time import product_s
from ascend_moe_train.planner.collectives import Span, collective_s
from ascend_moe_train.planner.efficiency import efficiencies, efficiency_of
from ascend_moe_train.planner.hardware import Device, LinkClass, catalogue, find_device, parse_cluster
from ascend_moe_train.planner.layers import Product
from tests.model_run import kernels
from tests.small_run import write_run

PEAK = 4e10
LINK = LinkClass(name="memory", topology="switched", bytes_per_s=3e9, latency_s=2e-5, knee_bytes=1.0)
SIZES_BYTES = (2**10, 2**14, 2**20)
PRODUCTS = ((64, 64, 64), (256, 512, 128), (2048, 512, 256), (1024, 1024, 1024))
OWN = replace(
    efficiencies()["cpu"],
    product=0.9,
    product_knee=20.0,
    core=0.4,
    core_knee=128.0,
    vector=0.5,
    inside=1.0,
    operator_s=3e-6,
    grouped=1.5,
)
EXPERTS = 8
OUTLIER = 5.0  # times as long in a round in which something else ran


def known_device() -> Device:
    return replace(find_device("cpu"), inside=LINK, devices_per_node=4, peak_flops_per_s={"fp32": PEAK})


def comm_times() -> tuple[CommTime, ...]:
    cluster = replace(parse_cluster("4xcpu"), device=known_device())

    def taken_s(verb: str, size: int, payload: int) -> float:
        whole = payload * (size if verb == "all_gather" else 1)
        return collective_s(verb, whole, Span(size, size), cluster, OWN)

    return tuple(
        CommTime(verb=verb, size=size, payload_bytes=payload, rounds_s=(OUTLIER * each, each))
        for verb in PLANNED_VERBS
        for size in (2, 4)
        for payload in SIZES_BYTES
        if (each := taken_s(verb, size, payload))
    )


def work_times() -> tuple[WorkTime, ...]:
    found = []
    for m, n, k in PRODUCTS:
        each = product_s(Product("experts", m, n, k), known_device(), PEAK, OWN)
        flops, alone = 2.0 * m * n * k, OWN.operator_s + each
        found.append(WorkTime(kind="product", name="matmul", shape=(m, n, k), work=flops, rounds_s=(alone,)))
        times = product_s(Product("experts", m, n, k, EXPERTS), known_device(), PEAK, OWN) / OWN.grouped
        grouped = EXPERTS * flops, (OWN.operator_s + times,)
        found.append(WorkTime(kind="grouped", name="experts", shape=(m, n, k), work=grouped[0], rounds_s=grouped[1]))
    for keys in (128, 512, 1024):
        flops = 512.0 * keys * keys
        each = flops / (PEAK * OWN.core * keys / (keys + OWN.core_knee))
        found.append(WorkTime(kind="attention", name="attention", shape=(keys, 8, 32), work=flops, rounds_s=(each,)))
    found.append(WorkTime(kind="vector", name="add", shape=(8,), work=1e6, rounds_s=(1e6 / 5e9,)))
    found.append(WorkTime(kind="operator", name="add", shape=(8,), work=0.0, rounds_s=(9.0, OWN.operator_s)))
    return tuple(found)


def probed() -> Probed:
    return Probed(
        ranks=4,
        threads=1,
        kernels="native",
        memory_bytes=4 * 2**30,
        copy_bytes_per_s=1e10,
        comm=comm_times(),
        work=work_times(),
    )


SIZES = DispatchSizes(tokens=24, top_k=2, num_experts=4, hidden=16, ffn=8)
ASKED = Asked(ranks=4, rounds=2, out=Path("out"))


def test_a_line_is_found_and_has_no_negative_part() -> None:
    assert line([0, 10, 1000], [2, 3, 102]) == pytest.approx((2, 0.1))
    assert line([1, 2, 3], [1, 3, 5])[0] == 0
    assert line([1, 2, 3], [5, 4, 3])[1] == 0


def test_the_link_is_that_of_the_planner() -> None:
    latency_s, bytes_per_s = link(comm_times())
    assert [latency_s, bytes_per_s] == pytest.approx([LINK.latency_s, LINK.bytes_per_s], rel=1e-3)
    pairs = [each for each in comm_times() if (each.verb, each.size) == ("all_reduce", 2)]
    alpha_s, beta_s = alpha_beta(pairs)
    assert alpha_s == pytest.approx(1.25 * LINK.latency_s, rel=1e-3) and 1 / beta_s == pytest.approx(3e9, rel=1e-3)


def test_products_and_attention_are_those_of_the_planner() -> None:
    product, knee = product_share(work_times(), PEAK, OWN.operator_s)
    assert product == pytest.approx(OWN.product, rel=0.02) and knee == pytest.approx(OWN.product_knee, abs=1)
    assert grouped_share(work_times(), PEAK, OWN.operator_s, knee) == pytest.approx(OWN.grouped * product, rel=0.02)
    core, core_knee = core_share(work_times(), PEAK)
    assert core == pytest.approx(OWN.core, rel=0.02) and core_knee == pytest.approx(OWN.core_knee, abs=8)


def test_the_planner_reads_the_machine_and_predicts_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "hardware.yaml"
    path.write_text(hardware_text(probed(), "here", "amt bench calibrate"))
    cluster = parse_cluster("4xhere", catalogue(path))
    device = cluster.device
    assert (device.devices_per_node, device.memory_bytes, device.memory_bytes_per_s) == (4, 4 * 2**30, 1e10)
    own = efficiency_of(device.efficiency, device.own_efficiency)
    assert (own.operator_s, own.vector) == (OWN.operator_s, 0.5)
    for each in comm_times():
        whole = each.payload_bytes * (each.size if each.verb == "all_gather" else 1)
        assert collective_s(each.verb, whole, Span(each.size, each.size), cluster, own) == pytest.approx(
            each.best_s, rel=0.01
        )
    for work in work_times():
        if work.kind not in ("product", "grouped"):
            continue
        m, n, k = work.shape
        if work.kind == "product":
            predicted = product_s(Product("experts", m, n, k), device, device.peak("fp32"), own)
            assert own.operator_s + predicted == pytest.approx(work.best_s, rel=0.02)
        if work.kind == "grouped":
            predicted = product_s(Product("experts", m, n, k, EXPERTS), device, device.peak("fp32"), own) / own.grouped
            assert own.operator_s + predicted == pytest.approx(work.best_s, rel=0.02)


def test_small_products_do_not_make_large_ones_fast() -> None:
    """On one core that is as fast at every size, a product is its FLOPs and the start of an operator."""
    flat = [each for each in work_times() if each.kind not in ("product", "grouped")]
    for m, n, k in ((64, 64, 64), (128, 128, 128), (256, 256, 256), (2048, 1024, 256)):
        flops = 2.0 * m * n * k
        taken_s = (OWN.operator_s + flops / PEAK,)
        flat.append(WorkTime(kind="product", name="matmul", shape=(m, n, k), work=flops, rounds_s=taken_s))
    found = entry(replace(probed(), work=tuple(flat)))
    assert found["peak_flops_per_s"]["fp32"] == pytest.approx(PEAK, rel=0.01)
    assert (found["efficiency"]["product"], found["efficiency"]["product_knee"]) == (pytest.approx(1, rel=0.01), 0)


def test_attention_is_no_faster_than_the_peak_however_long() -> None:
    far = [each for each in work_times() if each.kind == "attention"]
    slow = [replace(each, rounds_s=(each.best_s * (100 if each.shape[0] == 128 else 1),)) for each in far]
    assert core_share(slow, PEAK / 4)[0] <= 1


def test_memory_is_as_fast_as_operators_find_it() -> None:
    fast = [replace(each, rounds_s=(1e6 / 3e10,)) if each.kind == "vector" else each for each in work_times()]
    found = entry(replace(probed(), work=tuple(fast)))
    assert found["memory_bytes_per_s"] == pytest.approx(3e10) and found["efficiency"]["vector"] == 1


def test_groups_divide_the_ranks() -> None:
    assert [group_sizes(ranks) for ranks in (1, 2, 3, 6, 8)] == [[], [2], [3], [2, 6], [2, 4, 8]]


def test_operators_are_measured_in_graphs() -> None:
    found = list(Prober(LocalComm(), kernels("portable"), rounds=1).work_times())
    assert {each.kind for each in found} == {"product", "grouped", "attention", "vector", "operator"}
    assert all(len(each.rounds_s) == 1 and each.best_s > 0 for each in found)
    assert entry(replace(probed(), comm=(), work=tuple(found)))["peak_flops_per_s"]["fp32"] > 0


def test_the_way_through_a_layer_is_measured_and_shown() -> None:
    prober = Prober(LocalComm(), kernels("portable"), rounds=1)
    found = tuple(prober.dispatch_times(SIZES, "portable"))
    steps = ("sort", "permute", "first product", "second product", "combine")
    assert [each.name for each in found] == [f"portable: {step}" for step in steps]
    assert all(each.best_s > 0 and each.shape == (24, 2, 4, 16, 8) for each in found)
    moved = CommTime(verb="all_to_all_v", size=2, payload_bytes=1000, rounds_s=(0.5, 0.25))
    rows = dispatch_result(replace(probed(), comm=(moved,), work=found), ASKED, "amt bench dispatch").rows
    assert rows[-1] == {
        "name": "all_to_all_v over 2 ranks",
        "tokens_per_s": 96.0,
        "best_s": 0.25,
        "median_s": 0.375,
        "bytes_per_s": 2000.0,
    }
    assert rows[2]["flops_per_s"] == pytest.approx(2 * 48 * 16 * 16 / found[2].best_s)


def test_a_run_says_what_its_layers_are(tmp_path: Path) -> None:
    run_yaml = write_run(tmp_path, tmp_path)
    config = load_run(run_yaml)
    assert vars(dispatch_sizes(config)) == {"tokens": 32, "top_k": 2, "num_experts": 4, "hidden": 32, "ffn": 48}
    with pytest.raises(ConfigError, match=r"the model has no experts: model\.moe is null"):
        dispatch_sizes(load_run(run_yaml, ("model.moe=null",)))


def test_every_verb_is_measured_once_for_each_group_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_rank, "group_sizes", lambda ranks: [1])
    monkeypatch.setattr(probe_rank, "SIZES_BYTES", (1024, 4096))
    prober = Prober(LocalComm(), kernels("portable"), rounds=1)

    def once(call: Callable[[], Any], calls: int) -> tuple[float, ...]:
        call()
        return (1.0,)

    monkeypatch.setattr(prober, "slowest", once)
    verbs = [verb for verb in VERBS if verb != "send"]  # needs two
    monkeypatch.setattr(probe_rank, "VERBS", verbs)
    found = [(each.verb, each.payload_bytes) for each in prober.comm_times()]
    with_payload = [verb for verb in verbs if verb not in ("barrier", "split")]
    assert found == [
        *((verb, size) for verb in with_payload for size in (1024, 4096)),
        ("barrier", 0),
        ("split", 0),
    ]
    assert {*verbs, "send", "recv"} == set(comm.VERBS)


def test_what_moves_nothing_has_a_latency_alone() -> None:
    barrier = CommTime(verb="barrier", size=2, payload_bytes=0, rounds_s=(0.5, 0.25))
    found = comm_result(replace(probed(), comm=(*comm_times(), barrier)), ASKED, "amt bench comm")
    row = found.rows[-1]
    assert row["name"] == "barrier 2" and row["alpha_s"] == pytest.approx(0.25)
    assert (row["rate"], row["fitted_rate"]) == (None, None)
    assert "barrier in groups of 2: 250 ms a call." in found.notes


def test_a_single_rank_has_no_link() -> None:
    alone = replace(probed(), ranks=1, comm=())
    assert "inside" not in entry(alone) and "inside" not in entry(alone)["efficiency"]


def test_results_say_what_was_fitted() -> None:
    found = comm_result(probed(), ASKED, "amt bench comm")
    row = found.rows[0]
    assert row["fitted_s"] == pytest.approx(row["best_s"], rel=0.01)
    assert row["median_s"] == pytest.approx((1 + OUTLIER) / 2 * comm_times()[0].best_s)
    assert "all_reduce in groups of 2: 0.025 ms a call, then 3.00 GB/s." in found.notes
    work = work_result(probed(), ASKED, "amt bench gemm").rows
    assert max(share for row in work if isinstance(share := row.get("of_best"), float)) == 1
    rows = {row["figure"]: row for row in calibrate_result(probed(), ASKED, "here", "amt").rows}
    assert rows["inside.bytes_per_s"]["assumed"] == 5e9 and rows["efficiency.inside"]["measured"] == 1
    assert rows["efficiency.product"]["assumed"] == efficiencies()["cpu"].product


def test_the_commands_write_results_and_a_hardware_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(job: Job, screen: Screen) -> Outcome:
        assert job.log_folder is not None
        (job.log_folder.parent / "found.json").write_bytes(probed_json(probed()))
        return Outcome(exit_code=0)

    monkeypatch.setattr(runs, "launch", launch)
    out = tmp_path / "out"
    assert main(["bench", "calibrate", "--ranks", "4", "--rounds", "2", "--name", "box", "--out", str(out)]) == 0
    assert all("<svg" in path.read_text() for path in out.glob("*.html"))
    assert {path.name for path in out.glob("*.json")} == {"comm.json", "gemm.json", "calibrate.json"}
    assert read_result(out / "calibrate.json").settings["threads of a rank"] == 1
    assert "box" in catalogue(out / "hardware.yaml")
    assert "peak_flops_per_s.fp32" in capsys.readouterr().out
    plan = ["plan", "--model", "tiny", "--cluster", "4xbox", "--hardware", str(out / "hardware.yaml")]
    assert main([*plan, "--seq-len", "64", "--global-sequences", "8", "--precision", "fp32"]) == 0
    monkeypatch.setattr(runs, "launch", lambda job, screen: Outcome(exit_code=1, message="error: rank 0 failed"))
    assert main(["bench", "gemm", "--out", str(tmp_path / "gemm")]) == 1
    assert "error: rank 0 failed; what its ranks printed" in capsys.readouterr().err
    assert not (tmp_path / "gemm" / "gemm.json").exists()


@pytest.mark.parametrize("name", ["", "a b", "910B2", "x/y", "é", "x" * 100 + "!"])
def test_a_machine_has_a_plain_name_of_its_own(name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        check_name(name)


def test_wrong_numbers_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["--rounds", "0"], "--rounds 0: must be from 1 to 1,000"),
        (["--ranks", "0"], "--ranks 0: must be"),
    ):
        assert main(["bench", "gemm", *words, "--out", str(tmp_path / "out")]) == 2
        assert says in capsys.readouterr().err
    assert main(["bench", "comm", "--ranks", "1", "--out", str(tmp_path / "out")]) == 2
    assert "error: --ranks 1: collectives are between ranks: must be 2 at the least" in capsys.readouterr().err
    path = tmp_path / "found.json"
    wrong: tuple[Any, ...] = ("{}", "[", probed_json(probed()).decode().replace('"ranks":4', '"ranks":"4"'))
    for text in wrong:
        path.write_text(text)
        with pytest.raises(MetricsError, match=r"found\.json: "):
            read_probed(path)
