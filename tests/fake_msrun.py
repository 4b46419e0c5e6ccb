"""In the place of MindSpore's msrun, for hosts of a lab: it takes the same options, says the same lines and ends as the
real one does (MindSpore 2.10.0), but starts no scheduler.

`python -m tests.fake_msrun JSON` is a rank for it: steps without a collective. `install` puts it where
`python -m mindspore.parallel.cluster.run` finds it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from ascend_moe_train.cluster.rank import progress

ARGUMENTS = "arguments.json"  # in the folder of msrun's logs: the options that it was given
RANK = "tests.fake_msrun"
PAUSE_S = 0.02
FAULT_STEP = 3
BROKEN = "broken"  # in the folder of the run: the number of the node whose msrun does not start, or -1
_ROOT = Path(__file__).parents[1]
_WHOLE = ("worker_num", "local_worker_num", "master_port", "node_rank", "cluster_time_out")
_TEXTS = ("master_addr", "log_dir", "join")


def install(folder: Path) -> str:
    """Makes a package `mindspore` in this folder that has nothing else; PYTHONPATH with which it is found."""
    package = folder / "mindspore" / "parallel" / "cluster"
    package.mkdir(parents=True)
    for each in (package, package.parent, package.parent.parent):
        (each / "__init__.py").touch()
    (package / "run.py").write_text("import sys\nfrom tests.fake_msrun import run_msrun\nrun_msrun(sys.argv[1:])\n")
    return os.pathsep.join([str(folder), str(_ROOT)])


def run_msrun(words: list[str]) -> None:
    """Starts the workers of this node, looks once a second how they are, and ends all when one has ended badly."""
    parser = argparse.ArgumentParser()
    for name in _WHOLE:
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in _TEXTS:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("task_script")
    parser.add_argument("task_script_args", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    folder = Path(given.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ARGUMENTS).write_text(json.dumps(vars(given) | {"host": os.uname().nodename}))
    if int((folder.parents[2] / BROKEN).read_text()) == given.node_rank:
        sys.exit("RuntimeError: Failed to convert master address")
    os.environ.update(MS_WORKER_NUM=str(given.worker_num), RANK_SIZE=str(given.worker_num), MS_ROLE="MS_WORKER")
    os.environ.update(MS_SCHED_HOST=given.master_addr, MS_SCHED_PORT=str(given.master_port))
    command = [given.task_script, *given.task_script_args]
    workers = []
    for local_rank in range(given.local_worker_num):
        rank = given.node_rank * given.local_worker_num + local_rank
        log = folder / f"worker_{rank}.log"
        print(
            f"Start worker process with rank id:{rank}, log file:{log}. Environment variable [RANK_ID={rank}] is "
            f"exported. Execute command: {' '.join(command)}",
            flush=True,
        )
        environment = {**os.environ, "RANK_ID": str(rank), "MS_NODE_ID": str(rank), "DEVICE_ID": str(local_rank)}
        with log.open("w") as file:
            workers.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True))
    _join(workers, folder)


def _join(workers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    while any(worker.poll() is None for worker in workers):
        for worker in workers:
            if worker.poll():
                print(f"Worker process {worker.pid} exit with exception. Error code: {worker.returncode}.", flush=True)
                for other in workers:
                    other.kill()
                sys.exit(
                    f"RuntimeError: Distributed job exited with exception. Please check logs in directory: {folder}."
                )
        time.sleep(1)


def run_rank(folder: str, steps: int, faults: list[dict[str, Any]]) -> NoReturn:
    """A rank, that msrun's variables number."""
    rank, watched = int(os.environ["RANK_ID"]), progress()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    watched.phase("compile", 0)
    for step in range(1, steps + 1):
        watched.phase("step", step)
        print(f"step {step}", flush=True)
        for fault in faults:
            if (fault["rank"], FAULT_STEP) == (rank, step):
                sys.exit(fault["code"])
        (Path(folder) / f"rank-{rank}").write_text(str(step))
        if asked:
            watched.phase("done")
            sys.exit(143)
        time.sleep(PAUSE_S)
    watched.phase("done")
    sys.exit(0)


if __name__ == "__main__":
    run_rank(*json.loads(sys.argv[1]))
