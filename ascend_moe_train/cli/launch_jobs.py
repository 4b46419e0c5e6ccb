"""`amt launch status`, `logs` and `stop`, for a launcher in the background or in another terminal."""

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ascend_moe_train.errors import ConfigError

if TYPE_CHECKING:
    from ascend_moe_train.cluster.job_file import JobFacts

JOB = click.argument("job", type=click.Path(path_type=Path))
TICK_S = 0.2
BEGIN_S = 120.0  # for a launcher in the background to check its run


@click.command("status")
@JOB
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(job: Path, as_json: bool) -> int:
    """Show how the run in folder JOB fares: 0 while it runs or once it is done, 1 if it ended otherwise."""
    facts, found = _facts(job)
    if as_json:
        click.echo(json.dumps(found))
    else:
        for name, value in found.items():
            click.echo(f"{name.replace('_', ' '):<16} {'-' if value is None else value}")
    return 0 if found["state"] == "running" or facts.exit_code == 0 else 1


@click.command("logs")
@JOB
@click.option("--rank", type=click.IntRange(0), help="What this rank printed; else what the launcher shows.")
@click.option("--lines", type=click.IntRange(1), default=50, help="How many of the last.")
@click.option("--follow", is_flag=True, help="Go on until the run ends.")
def logs(job: Path, rank: int | None, lines: int, follow: bool) -> None:
    """Print the last lines of a log of the run in folder JOB."""
    from ascend_moe_train.cluster.job_file import LAUNCH_LOG
    from ascend_moe_train.cluster.output import log_name

    facts, _ = _facts(job)
    path = _log_folder(job) / (LAUNCH_LOG if rank is None else log_name(rank))
    if not path.is_file():
        why = "the launcher shows it elsewhere (it was started without --detach)" if rank is None else "no such rank"
        raise ConfigError(f"{path}: there is no such log: {why}")
    with path.open(errors="replace") as file:
        for line in deque(file, lines):
            click.echo(line, nl=False)
        for line in _followed(file, facts) if follow else ():
            click.echo(line, nl=False)


@click.command("stop")
@JOB
def stop(job: Path) -> None:
    """End the run in folder JOB after the step in hand, saved, as Ctrl-C does; returns once it has ended."""
    from ascend_moe_train.cluster.job_file import ask_to_stop, read_job

    facts = read_job(_log_folder(job))
    ask_to_stop(facts)
    while facts.is_running:
        time.sleep(TICK_S)
    code = read_job(_log_folder(job)).exit_code
    click.echo(f"ended with exit code {'unknown' if code is None else code}")


def detach(words: Sequence[str], run_dir: Path) -> int:
    """Starts `amt` with these words in the background; returns once its ranks are being started, or it has failed."""
    from ascend_moe_train.cluster.job_file import LAUNCH_LOG, read_job

    folder = _log_folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-P", "-c", "from ascend_moe_train.cli.main import run; run()"]
    with (folder / LAUNCH_LOG).open("ab") as log:
        log.write(f"--- start {time.strftime('%Y-%m-%dT%H:%M:%S')}\n".encode())
        log.flush()
        begin = log.tell()
        child = subprocess.Popen(
            [*program, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=_environment(),
        )
    until_s = time.monotonic() + BEGIN_S
    while child.poll() is None and time.monotonic() < until_s:
        try:
            if read_job(folder).pid == child.pid:
                click.echo(f"started in the background, process {child.pid}: amt launch status {run_dir}")
                return 0
        except ConfigError:
            pass
        time.sleep(TICK_S)
    with (folder / LAUNCH_LOG).open(errors="replace") as file:
        file.seek(begin)
        click.echo(file.read(), nl=False, err=True)
    code = child.poll()
    if code is None:
        raise ConfigError(f"process {child.pid} has not begun within {BEGIN_S:g} s: see {folder / LAUNCH_LOG}")
    return code


def _environment() -> dict[str, str]:
    """This package may be a working copy that the interpreter does not find by itself."""
    from ascend_moe_train.cluster.mpiexec import PACKAGE_ROOT, is_installed

    if is_installed():
        return dict(os.environ)
    paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _log_folder(job: Path) -> Path:
    from ascend_moe_train.cluster.launch import LOG_FOLDER

    return job / LOG_FOLDER


def _facts(job: Path) -> tuple["JobFacts", dict[str, Any]]:
    """The launcher of a run, and how both fare."""
    from ascend_moe_train.checkpoint.store import CHECKPOINTS, steps
    from ascend_moe_train.cluster.evidence import FAILURES
    from ascend_moe_train.cluster.job_file import read_job
    from ascend_moe_train.train.metrics import StepRecord, read_records

    facts = read_job(_log_folder(job))
    state = "running" if facts.is_running else "ended" if facts.exit_code is not None else "gone"
    if state == "gone" and not facts.is_here:
        state = f"unknown: on host {facts.host}"
    metrics, failures = job / "metrics.jsonl", _log_folder(job) / FAILURES
    records = read_records(metrics) if metrics.is_file() else iter(())
    last = next(iter(deque((record for record in records if isinstance(record, StepRecord)), 1)), None)
    return facts, {
        "state": state,
        "exit_code": facts.exit_code,
        "host": facts.host,
        "process": facts.pid,
        "since": facts.since,
        "step": None if last is None else last.step,
        "loss": None if last is None else last.loss,
        "tokens_per_s": None if last is None else last.tokens_per_s,
        "checkpoint_step": max(steps(job / CHECKPOINTS), default=None),
        "failures": sum(entry.name.isdecimal() for entry in failures.iterdir()) if failures.is_dir() else 0,
    }


def _followed(file: Any, facts: "JobFacts") -> Iterator[str]:
    """Lines as they come, until the launcher has ended."""
    while True:
        was_running = facts.is_running
        yield from file
        if not was_running:
            return
        time.sleep(TICK_S)
