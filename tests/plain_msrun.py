"""MindSpore's own msrun, as a user starts it, with workers that are processes of MindSpore; the doctor on its logs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ascend_moe_train.cluster.msrun import free_port
from ascend_moe_train.doctor.diagnose import diagnose
from ascend_moe_train.doctor.verdict import Verdict
from tests.launched import environment
from tests.mistakes import Fault
from tests.stand_in import ROOT, descendants

WORKER = ROOT / "tests" / "msrun_worker.py"
LONGEST_S = 240.0  # a busy machine takes a minute to import MindSpore
RANKS = 2
# How long the scheduler misses a worker, and a worker the others in a collective: 30 s each unless set.
TIMEOUTS: Mapping[str, str] = {"MS_NODE_TIMEOUT": "8", "MS_CPU_COMM_OP_TIMEOUT": "12"}


def verdict_of_msrun(
    folder: Path, fault: Fault, *options: str, port: int | None = None, linger_s: float = 3.0
) -> Verdict:
    """What the doctor says of a job of two workers with a fault.

    The job is ended `linger_s` after its workers, as the scheduler may wait for minutes, with nothing more to say.
    """
    logs = folder / "logs"
    logs.mkdir()
    words = {
        "worker_num": RANKS,
        "local_worker_num": RANKS,
        "master_addr": "127.0.0.1",
        "master_port": port or free_port(),
        "join": True,
        "log_dir": logs,
        "cluster_time_out": 60,
    }
    given = [f"--{name}={value}" for name, value in words.items()]
    fault = {"folder": str(folder), **fault}
    variables = {name: value for name, value in environment().items() if not name.startswith(("GLOG_", "MS_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", "")])
    python_path = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    with (logs / "msrun.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "mindspore.parallel.cluster.run", *given, *options, str(WORKER), json.dumps(fault)],
            cwd=folder,
            env={**variables, **TIMEOUTS, "PATH": path, "PYTHONPATH": python_path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _wait(process, logs, linger_s)
    finally:
        _end(process)
    return diagnose([logs])


def _wait(process: "subprocess.Popen[bytes]", logs: Path, linger_s: float) -> None:
    """Until msrun has ended, or for `linger_s` after its workers have."""
    deadline_s = time.monotonic() + LONGEST_S
    gone_s: float | None = None
    while process.poll() is None:
        now_s = time.monotonic()
        assert now_s < deadline_s, (logs / "msrun.log").read_text(errors="replace")[-4000:]
        started = (logs / f"worker_{RANKS - 1}.log").exists()
        if not started or any(map(_is_worker, descendants(process.pid))):
            gone_s = None
        elif gone_s is None:
            gone_s = now_s
        elif now_s - gone_s > linger_s:
            return
        time.sleep(0.2)


def _is_worker(pid: int) -> bool:
    """Whether a process is a worker, and not the scheduler, which runs the same program."""
    with contextlib.suppress(OSError):
        return b"MS_ROLE=MS_WORKER\0" in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
