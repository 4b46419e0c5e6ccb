"""A launcher of ranks on several hosts: unless others are given two, that are this machine under two addresses. Their
agents are child processes, and all else is as it is over SSH. Ranks are the stand-ins of `tests.stand_in`."""

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
HERE = {"host2": "127.0.0.2", "host3": "127.0.0.3"}


def run_launcher(arguments: list[str]) -> None:
    """The launcher process: folder of the run, hosts by name, module of a rank, fields of tasks to change, and the
    rank's arguments."""
    from dataclasses import replace

    from ascend_moe_train.cluster.hostfile import Host
    from ascend_moe_train.cluster.hosts_job import make_hosts_job
    from ascend_moe_train.cluster.output import PlainScreen
    from ascend_moe_train.cluster.verdict import Deadlines

    folder, addresses, module, changes, *rest = arguments
    hosts = [Host(name=name, address=address, slots=SLOTS) for name, address in json.loads(addresses).items()]
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


def launcher_command(
    folder: Path, addresses: dict[str, str], module: str, *arguments: str, changes: dict[str, Any] | None = None
) -> list[str]:
    """The words of a launcher of any module on hosts, whose tasks are changed."""
    given = [str(folder), json.dumps(addresses), module, json.dumps(changes or {}), *arguments]
    return [sys.executable, "-c", LAUNCHER, *given]


def launch_on_hosts(folder: Path, module: str, *arguments: str, changes: dict[str, Any] | None = None) -> Launched:
    """Starts a launcher of any module on both hosts."""
    process = subprocess.Popen(
        launcher_command(folder, HERE, module, *arguments, changes=changes),
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
