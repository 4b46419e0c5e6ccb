"""`amt launch --hostfile` on hosts of the lab: a training of the real trainer, looked at and struck from outside."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from ascend_moe_train.checkpoint.store import CHECKPOINTS, steps
from tests.lab import Lab, LabHost
from tests.launched import environment
from tests.small_run import write_run
from tests.stand_in import TIMEOUT_S, command_of, program_of

RANK = "ascend_moe_train.cli.rank_main"
AGENT = "ascend_moe_train.cluster.agent"
SILENCE_S = 10
SETTINGS = (
    "run.eval_every=1000",
    "checkpoint.every=5",
    "batch.micro_sequences=1",
    "parallel.ep=2",
    "parallel.restarts.pause_s=0.1",
    "parallel.restarts.longest_pause_s=1.0",
    f"parallel.deadlines.host_s={SILENCE_S}",
)
AMT = (sys.executable, "-c", "from ascend_moe_train.cli.main import run; run()")


def processes(host: LabHost) -> list[int]:
    """All that run in a host's network, but what holds it."""
    here = Path(f"/proc/{host.space.process.pid}/ns/net").readlink()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and (entry / "ns" / "net").readlink() == here:
                found.append(int(entry.name))
    return sorted(set(found) - {host.space.process.pid})


def ranks(host: LabHost) -> dict[int, int]:
    """Process ids by number of the ranks of a host; those that have ended and are not waited for are none."""
    found = {}
    for pid in processes(host):
        if program_of(command_of(pid)) == RANK:
            with contextlib.suppress(OSError):
                variables = dict(
                    word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in word
                )
                found[int(variables["AMT_RANK"])] = pid
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_agent(host: LabHost) -> None:
    """The one agent of a host is the first process of the bootstrap."""
    kill(min(pid for pid in processes(host) if f"from {AGENT} import main" in command_of(pid)))


def cut_link(lab: Lab, host: LabHost) -> None:
    """Between the host and the switch."""
    lab.switch.run(f"ip link set v{host.number} down\n")


def mend_link(lab: Lab, host: LabHost) -> None:
    """What `cut_link` cut."""
    lab.switch.run(f"ip link set v{host.number} up\n")


def stop_host(host: LabHost) -> None:
    """Nothing on the host runs any more, its sshd neither."""
    for pid in processes(host):
        kill(pid, signal.SIGSTOP)


def wake_host(host: LabHost) -> None:
    """All goes on where it was stopped."""
    for pid in processes(host):
        kill(pid, signal.SIGCONT)


class LabRun:
    """A launcher at the lab's switch, of a small run over all hosts, and what it leaves in `folder`/run."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        corpus: Path,
        *settings: str,
        slots: int = 2,
        options: Sequence[str] = (),
    ) -> None:
        """`settings` are of the form section.key=value, `options` those of `amt launch`."""
        folder.mkdir()
        self.lab, self.folder, self.run_dir = lab, folder, folder / "run"
        (folder / "hosts").write_text(lab.hostfile(slots))
        run_yaml = write_run(folder, corpus)
        given = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
        self._options = ["--hostfile", str(folder / "hosts"), *options, "train", str(run_yaml), "--json", *given]
        self._log = folder / "said"
        with self._log.open("w") as said:
            self.process = subprocess.Popen(
                self.words(*self._options), env=self.environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def words(self, *arguments: str) -> list[str]:
        """`amt launch` at the switch."""
        return self.lab.switch.inside(*AMT, "launch", *arguments)

    def environment(self) -> dict[str, str]:
        """That of the user whose keys the hosts know."""
        own = {**environment(), "HOME": str(self.lab.home)}
        own.pop("SSH_AUTH_SOCK", None)
        return own

    @property
    def said(self) -> str:
        """What it has shown."""
        return self._log.read_text()

    @property
    def num_steps(self) -> int:
        """Recorded until now."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint, 0 without one."""
        return max(steps(self.run_dir / CHECKPOINTS), default=0)

    def failures(self) -> list[dict[str, Any]]:
        """The evidence of each failure until now."""
        folder = self.run_dir / "logs" / "failures"
        found = sorted((path.parent for path in folder.glob("*/failure.json")), key=lambda path: int(path.name))
        return [json.loads((path / "failure.json").read_text()) for path in found]

    def active(self, count: int = 2) -> list[LabHost]:
        """The hosts with ranks, once there are `count` of them with all their ranks."""
        while True:
            hosts = [host for host in self.lab.hosts if len(ranks(host)) == 2]
            if len(hosts) == count:
                return hosts
            self.pause()

    def wait_for_step(self, step: int) -> None:
        """Returns once it is recorded."""
        end_s = time.monotonic() + TIMEOUT_S
        while self.num_steps < step:
            assert time.monotonic() < end_s, self.said
            self.pause()

    def pause(self) -> None:
        """A moment in which the launcher does not end."""
        assert self.process.poll() is None, self.said
        time.sleep(0.01)

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(TIMEOUT_S)

    def starts(self) -> list[tuple[str, int | None]]:
        """Every start by its name, with the step that it said to be next; None for one that ended before."""
        found: list[tuple[str, int | None]] = []
        for line in (self.run_dir / "logs" / "rank-00000.log").read_text().splitlines():
            if line.startswith("--- start "):
                found.append((line.removeprefix("--- start "), None))
            elif line.endswith(" is next"):
                found[-1] = (found[-1][0], int(line.split()[-3]))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        for host in self.lab.hosts:
            wake_host(host)


@contextlib.contextmanager
def lab_of(folder: Path, num_hosts: int) -> Iterator[Lab]:
    """Some hosts, ended afterwards with all that runs on them."""
    folder.mkdir()
    lab = Lab(folder, num_hosts)
    try:
        yield lab
    finally:
        lab.close()
