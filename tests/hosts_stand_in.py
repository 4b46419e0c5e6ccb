"""Two hosts that are this machine under two addresses: their agents are child processes, and all else is as it is over
SSH. Ranks are the stand-ins of `tests.stand_in`."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.stand_in import ROOT, TIMEOUT_S, Fault, Launched

AGENT = "ascend_moe_train.cluster.agent"
LAUNCHER = "import sys; from tests.hosts_stand_in import run_launcher; run_launcher(sys.argv[1:])"
SLOTS = 2
STEP_S = 6.0
SILENCE_S = 8.0


def run_launcher(arguments: list[str]) -> None:
    """The launcher process: folder of the run, module and arguments of a rank, fields of tasks to change."""
    from dataclasses import replace

    from ascend_moe_train.cluster.hostfile import Host
    from ascend_moe_train.cluster.hosts_job import make_hosts_job
    from ascend_moe_train.cluster.output import PlainScreen
    from ascend_moe_train.cluster.verdict import Deadlines

    folder, module, changes, *rest = arguments
    hosts = [Host(name=f"host{n}", address=f"127.0.0.{n}", slots=SLOTS) for n in (2, 3)]
    job = make_hosts_job(
        hosts,
        module,
        rest,
        Deadlines(compile_s=TIMEOUT_S, step_s=STEP_S, save_s=TIMEOUT_S),
        run_dir=Path(folder),
        silence_s=SILENCE_S,
        started_s=time.time(),
        environment={"OF_THE_LAUNCHER": "yes"},
    )
    changed = [task.model_copy(update=json.loads(changes)) for task in job.tasks]
    outcome = replace(job, tasks=changed).run(PlainScreen())
    if outcome.message is not None:
        print(outcome.message, file=sys.stderr)
    if outcome.failed is not None:
        facts = {"rank": outcome.failed.rank, "host": outcome.failed.host, "lost": outcome.failed.lost}
        (Path(folder) / "failed.json").write_text(json.dumps(facts))
    sys.exit(outcome.exit_code)


def launch_on_hosts(folder: Path, module: str, *arguments: str, changes: dict[str, Any] | None = None) -> Launched:
    """Starts a launcher of any module on both hosts."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), module, json.dumps(changes or {}), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    return Launched(process, 2 * SLOTS, folder)


def launch(folder: Path, *faults: Fault, steps: int = 1000) -> Launched:
    """Starts a launcher of stand-ins on both hosts."""
    return launch_on_hosts(folder, "tests.stand_in", json.dumps([str(folder), steps, faults]))
