"""Fourteen faults in jobs of MindSpore's own msrun, with workers that are processes of MindSpore: what the doctor says
of the logs that are left.

msrun's clocks are those of one host here, so that a clock of another host is a worker's own.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from ascend_moe_train.doctor.rule import is_doable, rule_book
from ascend_moe_train.doctor.verdict import Verdict
from tests.clock_shim import has_compiler
from tests.faulty import taken_port
from tests.plain_msrun import verdict_of_msrun

SLOW = pytest.mark.slow
SKEW_S = 600


def assert_told(verdict: Verdict, group: str, causes: set[str], ranks: Sequence[int]) -> None:
    cause = verdict.cause
    assert cause is not None and verdict.is_decided
    assert (cause.rule.group, cause.ranks) == (group, tuple(ranks)), cause
    assert cause.rule.id in causes
    remedies = rule_book().remedies(cause.rule)
    assert remedies and all(is_doable(remedy.do) for remedy in remedies)


@pytest.mark.parametrize(
    ("what", "group", "cause"),
    [
        ("import_missing", "version_mismatch", "py-import"),
        pytest.param("kill", "oom_host", "killed", marks=SLOW),
        pytest.param("stop", "stopped", "frozen", marks=SLOW),
        pytest.param("want_memory", "oom_host", "py-memory", marks=SLOW),
        pytest.param("nan", "nan_overflow_loss", "nan-began", marks=SLOW),
        pytest.param("leave", "data", "uneven-steps", marks=SLOW),
        pytest.param("config", "collective_mismatch", "ring-sender", marks=SLOW),
        pytest.param("load_damaged", "checkpoint", "ms-ckpt-damaged", marks=SLOW),
        pytest.param("write_to_full_disk", "disk", "disk-full", marks=SLOW),
    ],
)
def test_a_fault_of_one_rank(what: str, group: str, cause: str, tmp_path: Path) -> None:
    """Kill, import error, SIGSTOP, memory limit, NaN, uneven steps, another configuration, a damaged checkpoint, a full
    disk."""
    verdict = verdict_of_msrun(tmp_path, {"what": what, "rank": 1}, linger_s=20.0 if what == "stop" else 3.0)
    assert_told(verdict, group, {cause}, [1])


@SLOW
def test_a_slow_rank(tmp_path: Path) -> None:
    """It loads data for longer than the others wait in a collective."""
    verdict = verdict_of_msrun(tmp_path, {"what": "sleep", "rank": 1, "seconds": 60})
    assert_told(verdict, "slow", {"slow-rank"}, [1])


@SLOW
def test_the_scheduler_s_port_is_taken(tmp_path: Path) -> None:
    """No rank is at fault: the scheduler's warning is the cause, and what workers say follows from it."""
    with taken_port() as port:
        verdict = verdict_of_msrun(tmp_path, {}, "--cluster_time_out=15", port=port)
    assert_told(verdict, "port_conflict", {"ms-scheduler-port"}, [])
    assert verdict.cause is not None and verdict.cause.who == "the scheduler"


@SLOW
def test_an_address_of_a_rank_is_in_use(tmp_path: Path) -> None:
    """A server of its own, for metrics or a debugger, that another process has the port of."""
    with taken_port() as port:
        verdict = verdict_of_msrun(tmp_path, {"what": "bind_taken", "rank": 1, "port": port})
    assert_told(verdict, "port_conflict", {"address-in-use"}, [1])


@SLOW
@pytest.mark.parametrize("text", [None, '{"version": "1.0", "server_list": ['])
def test_a_wrong_rank_table(text: str | None, tmp_path: Path) -> None:
    """On CPUs MindSpore reads the table and only warns: ranks keep their numbers and the job goes on, so that no rank
    fails, and the doctor is not sure that it matters."""
    table = tmp_path / "table.json"
    if text is not None:
        table.write_text(text)
    verdict = verdict_of_msrun(tmp_path, {}, f"--rank_table_file={table}")
    assert_told(verdict, "ranktable_hostfile", {"ms-rank-table"}, [])
    assert verdict.confidence == "low"


@SLOW
@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
@pytest.mark.parametrize("killed", [None, 0])
def test_a_clock_that_is_wrong(killed: int | None, tmp_path: Path) -> None:
    """Rank 1 is on a host whose clock is ahead. By itself that ends no run, and is found; where rank 0 is killed, that
    is told, although what rank 1 says bears times of ten minutes later."""
    fault = {"what": "skew", "rank": 1, "seconds": SKEW_S, "killed": killed}
    verdict = verdict_of_msrun(tmp_path, fault)
    offsets_s = verdict.evidence.offsets_s
    assert offsets_s["worker_1.log"] == pytest.approx(SKEW_S, abs=30)
    if killed is None:
        assert_told(verdict, "config_env", {"clocks-differ"}, [1])
    else:
        assert_told(verdict, "oom_host", {"killed"}, [0])


@SLOW
def test_a_job_that_goes_well(tmp_path: Path) -> None:
    """All warnings of MindSpore and msrun are known to be harmless."""
    assert verdict_of_msrun(tmp_path, {}).cause is None
