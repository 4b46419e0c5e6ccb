"""Hosts that are lost are left out and remembered, spares take their places, fewer go on in another layout."""

import json
from pathlib import Path

import pytest

from ascend_moe_train.cluster.evidence import Failed
from ascend_moe_train.cluster.host_pool import HostPool
from ascend_moe_train.cluster.hostfile import Host
from ascend_moe_train.config import load_run
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.planner.hardware import parse_cluster
from ascend_moe_train.planner.other_size import settings_on
from tests.small_run import write_run

HOSTS = [Host(name=name, address=name, slots=2) for name in ("a", "b", "c", "d")]


def names(pool: HostPool) -> list[str]:
    return [host.name for host in pool.active]


def failed(host: str | None = None, lost: tuple[str, ...] = ()) -> Failed:
    return Failed(rank=0, exit_code=1, message="error: x", views=(), stacks={}, host=host, lost=lost)


def test_a_spare_takes_the_place_of_a_lost_host(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "bad.json"
    pool = HostPool(HOSTS, 1, path)
    assert names(pool) == ["a", "b", "c"]
    assert pool.after(failed("b", lost=("b",))) == [f"host b is left out (it was lost; {path}): d takes its place"]
    assert names(pool) == ["a", "d", "c"]
    assert pool.after(failed(None, lost=("a",))) == [
        f"host a is left out (it was lost; {path}), and there is no spare: 2 are left"
    ]
    assert names(pool) == ["d", "c"]
    listed = json.loads(path.read_text())
    assert [(each["name"], each["why"]) for each in listed["hosts"]] == [("b", "it was lost"), ("a", "it was lost")]
    again = HostPool(HOSTS, 1, path)
    assert (names(again), again.left_out, again.size) == (["c", "d"], ["a", "b"], 3)


def test_two_failures_in_a_row_make_a_host_bad_if_there_is_a_spare(tmp_path: Path) -> None:
    pool = HostPool(HOSTS, 1, tmp_path / "bad.json")
    assert pool.after(failed("a")) == pool.after(failed("b")) == []
    assert names(pool) == ["a", "b", "c"]
    assert len(pool.after(failed("b"))) == 1 and names(pool) == ["a", "d", "c"]
    assert pool.after(failed("d")) == pool.after(failed("d")) == pool.after(failed("d")) == []
    assert names(pool) == ["a", "d", "c"]


def test_the_last_host_cannot_be_left_out(tmp_path: Path) -> None:
    pool = HostPool(HOSTS[:1], 0, tmp_path / "bad.json")
    with pytest.raises(ConfigError, match=r"host a is left out \(it was lost\), and no other is left"):
        pool.after(failed("a", lost=("a",)))
    with pytest.raises(ConfigError, match=r"bad.json: all 1 hosts are on it: remove those that are good again"):
        HostPool(HOSTS[:1], 0, tmp_path / "bad.json")


@pytest.mark.parametrize("spares", [-1, 4, 100])
def test_a_number_of_spares_that_is_impossible(spares: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--spares {spares}: of 4 hosts, 0 to 3 can be spares"):
        HostPool(HOSTS, spares, tmp_path / "bad.json")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format_version": 1}', '{"format_version": 1, "hosts": [{"name": 3}]}']
)
def test_a_list_that_is_none_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ConfigError, match=r"bad.json: is no list of bad hosts \(.*\): remove it$"):
        HostPool(HOSTS, 0, tmp_path / "bad.json")


def test_a_run_goes_on_over_fewer_ranks_in_a_layout_that_is_possible(tmp_path: Path, small_corpus: Path) -> None:
    run_yaml = write_run(tmp_path, small_corpus)
    written = ("parallel.ep=4", "parallel.zero_stage=1", "parallel.expert_wire=int8", "batch.micro_sequences=1")
    run = load_run(run_yaml, written)
    assert settings_on(run, parse_cluster("4xcpu")) == []
    for count in (2, 1):
        settings = settings_on(run, parse_cluster(f"{count}xcpu"))
        other = load_run(run_yaml, (*written, *settings))
        mesh_of(other, count)
        assert (other.model, other.batch.global_sequences) == (run.model, run.batch.global_sequences)
    with pytest.raises(ConfigError, match="3 devices"):
        settings_on(run, parse_cluster("3xcpu"))
