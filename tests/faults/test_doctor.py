"""The doctor on real failures: ranks with real MPI of which one is killed, crashes, stops, stalls, raises, leaves."""

import json
import signal
from pathlib import Path

import pytest

from ascend_moe_train.doctor.keep import LAUNCHER_LOG, kept_verdict
from ascend_moe_train.doctor.reading import VERDICT_NAME
from tests.stand_in import Fault, launch

SLOW = pytest.mark.slow


def verdict_of(folder: Path, errors: str) -> dict[str, object]:
    """What is kept of the doctor's verdict."""
    log = (folder / "logs" / "rank-00002.log").read_text()
    line = kept_verdict(folder, folder / "logs", log.split()[2], errors)
    assert line is not None
    assert line.startswith("doctor: rank 2: ")
    cause = json.loads((folder / "logs" / VERDICT_NAME).read_text())["cause"]
    assert isinstance(cause, dict)
    return cause


@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        ({"what": "signal", "number": signal.SIGKILL}, {"amt-killed"}),
        ({"what": "raise"}, {"py-exception", "amt-failed"}),
        ({"what": "refuse"}, {"disk-full"}),
        pytest.param({"what": "signal", "number": signal.SIGSTOP}, {"amt-stopped"}, marks=SLOW),
        pytest.param({"what": "crash"}, {"amt-killed", "kernel-segfault"}, marks=SLOW),
        pytest.param({"what": "exit", "code": 3}, {"amt-ended"}, marks=SLOW),
        pytest.param({"what": "exit", "code": 0}, {"amt-ended"}, marks=SLOW),
        pytest.param({"what": "abort"}, {"amt-mpi"}, marks=SLOW),
        pytest.param({"what": "stall"}, {"amt-stalled"}, marks=SLOW),
        pytest.param({"what": "finish"}, {"amt-done-early"}, marks=SLOW),
        pytest.param({"what": "other collective"}, {"amt-stalled"}, marks=SLOW),
    ],
)
def test_real_failures(fault: Fault, causes: set[str], tmp_path: Path) -> None:
    with launch(4, tmp_path, {"rank": 2, **fault}) as launched:
        launched.wait_for_step(2)
        assert launched.wait() != 0
    found = verdict_of(tmp_path, launched.errors)
    assert found["id"] in causes
    assert found["ranks"] == [2]


def test_a_verdict_is_not_read_again(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-00002.log").write_text("--- start 20260301T100000-1\nKeyError: 'x'\n")
    assert verdict_of(tmp_path, "error: rank 2 failed in step 3: KeyError: 'x'\n  table")["id"] == "py-exception"
    (logs / "rank-00002.log").write_text("--- start 20260301T110000-1\nall is well\n")
    assert kept_verdict(tmp_path, logs, "20260301T110000-1", "nothing") is None
    assert (logs / LAUNCHER_LOG).read_text().count("--- start") == 2
