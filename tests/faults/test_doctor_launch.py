"""Fourteen faults in jobs of `amt launch`: the launcher asks the doctor, whose verdict is kept with the run's logs.

Ranks are the trainer where the fault is one of training, else stand-ins that take steps together through MPI.

A wrong rank table is no fault here: `amt launch` takes none, as ranks find each other through MPI or msrun's scheduler,
and on CPUs nothing else reads one. For msrun itself see test_doctor_msrun.py.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from ascend_moe_train.doctor.diagnose import diagnose
from ascend_moe_train.doctor.rule import is_doable
from tests.clock_shim import has_compiler
from tests.faulty import Failed, launched, taken_port
from tests.launched import launched as launched_well
from tests.mistakes import Fault
from tests.small_run import write_run

SLOW = pytest.mark.slow
RANKS = 2
STEPS = ("run.steps=8", "run.eval_every=8", "checkpoint.every=2", "batch.micro_sequences=2")
SKEW_S = 600


def assert_told(failed: Failed, group: str, causes: set[str], ranks: Sequence[int]) -> None:
    cause = failed.cause
    assert (cause["group"], cause["ranks"]) == (group, list(ranks)), failed.errors
    assert cause["id"] in causes
    assert cause["remedies"] and all(is_doable(remedy["do"]) for remedy in cause["remedies"])
    assert "doctor: " in failed.errors


@pytest.mark.parametrize(
    ("what", "group", "causes"),
    [
        ("kill", "peer_crash", {"amt-killed"}),
        ("want_memory", "oom_host", {"py-memory"}),
        ("import_missing", "version_mismatch", {"py-import"}),
        ("write_to_full_disk", "disk", {"disk-full"}),
        ("leave", "data", {"amt-done-early"}),
        pytest.param("sleep", "hccl_nccl_timeout", {"amt-stalled"}, marks=SLOW),
        pytest.param("stop", "stopped", {"amt-stopped"}, marks=SLOW),
    ],
)
def test_a_fault_of_one_rank(what: str, group: str, causes: set[str], tmp_path: Path, small_corpus: Path) -> None:
    """Kill, memory limit, import error, full disk, uneven steps, a slow rank, SIGSTOP."""
    fault = {"stand_in": True, "rank": 1, "what": what, "seconds": 100}
    failed = launched(RANKS, write_run(tmp_path, small_corpus), fault)
    assert_told(failed, group, causes, [1])


def test_an_address_of_a_rank_is_in_use(tmp_path: Path, small_corpus: Path) -> None:
    with taken_port() as port:
        fault = {"stand_in": True, "rank": 1, "what": "bind_taken", "port": port}
        failed = launched(RANKS, write_run(tmp_path, small_corpus), fault)
    assert_told(failed, "port_conflict", {"address-in-use"}, [1])


def test_no_port_for_mpi(tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that lets few ports through, which another job has. No rank has started."""
    with taken_port() as port:
        monkeypatch.setenv("MPIEXEC_PORT_RANGE", f"{port}:{port}")
        failed = launched(RANKS, write_run(tmp_path, small_corpus), {"stand_in": True})
    assert_told(failed, "port_conflict", {"mpi-port"}, [])


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
def test_a_clock_that_is_wrong(tmp_path: Path, small_corpus: Path) -> None:
    """Rank 1's clock is ahead by ten minutes, and rank 0 is killed: ranks are judged by one clock, the launcher's, so
    that a wrong one is no cause and misleads nobody."""
    fault: Fault = {"stand_in": True, "rank": 1, "what": "skew", "seconds": SKEW_S, "then": {"rank": 0, "what": "kill"}}
    failed = launched(RANKS, write_run(tmp_path, small_corpus), fault)
    assert_told(failed, "peer_crash", {"amt-killed"}, [0])


@SLOW
def test_the_scheduler_s_port_is_taken(tmp_path: Path, small_corpus: Path) -> None:
    """Between the moment that the launcher found it free and msrun's start."""
    with taken_port() as port:
        failed = launched(
            RANKS,
            write_run(tmp_path, small_corpus),
            {"scheduler_port": port},
            "parallel.deadlines.compile_s=60",
            "parallel.zero_stage=0",
            starter="msrun",
        )
    assert_told(failed, "port_conflict", {"ms-scheduler-port"}, [])


@SLOW
def test_another_configuration(tmp_path: Path, small_corpus: Path) -> None:
    """A learning rate that only rank 1 has: nothing would fail, and weights would drift apart."""
    failed = launched(RANKS, write_run(tmp_path, small_corpus), {"rank": 1, "set": "optim.lr=0.02"}, *STEPS)
    assert_told(failed, "collective_mismatch", {"amt-other-config"}, [1])
    assert "optim.lr is 0.02 here and 0.01 there" in failed.errors


@SLOW
def test_a_weight_that_is_not_finite(tmp_path: Path, small_corpus: Path) -> None:
    fault = {"rank": 1, "phase": "step", "step": 4, "what": "nan", "weight": "layers.0.moe.experts.w2"}
    settings = (*STEPS, "guard.max_bad_steps=2", "parallel.zero_stage=0")
    failed = launched(RANKS, write_run(tmp_path, small_corpus), fault, *settings)
    assert_told(failed, "nan_overflow_loss", {"nan-origin", "amt-not-finite"}, [1])
    assert "weight layers.0.moe.experts.w2 on rank 1" in failed.errors


@SLOW
def test_damaged_checkpoints(tmp_path: Path, small_corpus: Path) -> None:
    """All of them: with one that is whole, training goes on from there. Every rank meets the same."""
    run_yaml = write_run(tmp_path, small_corpus)
    launched_well(RANKS, run_yaml, *STEPS, "run.steps=6")
    shutil.rmtree(tmp_path / "run" / "logs")
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/*"):
        if path.suffix != ".json":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    failed = launched(RANKS, run_yaml, {}, *STEPS)
    assert_told(failed, "checkpoint", {"amt-no-checkpoint"}, [])


@SLOW
def test_a_slow_rank(tmp_path: Path, small_corpus: Path) -> None:
    """It computes longer than its like, and nothing fails: the run's logs tell, when somebody asks."""
    fault = {"rank": 1, "phase": "compile", "step": 1, "what": "slow data", "seconds": 1.0}
    done = launched(RANKS, write_run(tmp_path, small_corpus), fault, *STEPS, "guard.straggler_window=4")
    assert done.code == 0, done.errors
    cause = diagnose([tmp_path / "run"]).cause
    assert cause is not None
    assert (cause.rule.id, cause.rule.group, cause.ranks) == ("amt-slow", "slow", (1,))
