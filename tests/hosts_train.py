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
from ascend_moe_train.cluster.job_file import read_job
from ascend_moe_train.cluster.launch import LOG_FOLDER
from ascend_moe_train.cluster.output import START_LINE
from ascend_moe_train.errors import ConfigError
from tests.lab import Lab, LabHost
from tests.launched import environment
from tests.small_run import write_run
from tests.stand_in import command_of, program_of

RANK = "ascend_moe_train.cli.rank_main"
AGENT = "ascend_moe_train.cluster.agent"
SILENCE_S = 10
MOST_S = 3000.0  # of a run, however busy the machine is
SETTINGS = (
    "run.eval_every=1000",
    "checkpoint.every=5",
    "batch.micro_sequences=1",
    "parallel.ep=2",
    "model.moe.capacity_factor=null",  # what is dropped depends on the layout
    "parallel.restarts.pause_s=0.1",
    "parallel.restarts.longest_pause_s=1.0",
    f"parallel.deadlines.host_s={SILENCE_S}",
)
AMT = (sys.executable, "-c", "from ascend_moe_train.cli.main import run; run()")


def all_processes() -> list[int]:
    """Of this machine."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def processes(host: LabHost) -> list[int]:
    """All that run in a host's network, but what holds it."""
    return [pid for pid in all_processes() if pid != host.space.process.pid and is_on(host, pid)]


def is_on(host: LabHost, pid: int) -> bool:
    """Whether a process runs in a host's network."""
    try:
        return Path(f"/proc/{host.space.process.pid}/ns/net").samefile(f"/proc/{pid}/ns/net")
    except OSError:
        return False


def all_ranks() -> dict[int, int]:
    """The rank that each process is, by process id; those that have ended and are not waited for are none."""
    found = {}
    for pid in all_processes():
        if program_of(command_of(pid)) == RANK:
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                found[pid] = int(next(word for word in variables if word.startswith("AMT_RANK=")).partition("=")[2])
    return found


def ranks(host: LabHost) -> dict[int, int]:
    """Process ids by number of the ranks of a host."""
    return {rank: pid for pid, rank in all_ranks().items() if is_on(host, pid)}


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
        folder.mkdir(exist_ok=True)
        self.lab, self.folder, self.run_dir = lab, folder, folder / "run"
        self._end_s = time.monotonic() + MOST_S
        (folder / "hosts").write_text(lab.hostfile(slots))
        run_yaml = write_run(folder, corpus)
        given = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
        hosts = ["--hostfile", str(folder / "hosts"), "--env", "UCX_TLS"]
        self._options = [*hosts, *options, "train", str(run_yaml), "--json", *given]
        self._log = folder / "said"
        with self._log.open("w") as said:
            self.process = subprocess.Popen(
                self.words(*self._options), env=self.environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def words(self, *arguments: str) -> list[str]:
        """`amt launch` at the switch."""
        return self.lab.switch.inside(*AMT, "launch", *arguments)

    def done(self, verb: str, *more: str) -> str:
        """What `amt launch status`, `logs` or `stop` prints of this run."""
        words = self.words(verb, str(self.run_dir), *more)
        return subprocess.run(words, env=self.environment(), capture_output=True, text=True, check=False).stdout

    def environment(self) -> dict[str, str]:
        """That of the user whose keys the hosts know."""
        # UCX knows that both hosts are one machine, and would go around the network between them
        own = {**environment(), "HOME": str(self.lab.home), "UCX_TLS": "tcp,self"}
        own.pop("SSH_AUTH_SOCK", None)
        return own

    @property
    def said(self) -> str:
        """What it has shown."""
        return self._log.read_text()

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint, 0 without one."""
        return max(steps(self.run_dir / CHECKPOINTS), default=0)

    def failures(self) -> list[dict[str, Any]]:
        """The evidence of each failure until now."""
        folder = self.run_dir / LOG_FOLDER / "failures"
        found = sorted((path.parent for path in folder.glob("*/failure.json")), key=lambda path: int(path.name))
        return [json.loads((path / "failure.json").read_text()) for path in found]

    @property
    def step(self) -> int:
        """The last that the ranks which run now have recorded; 0 before their first."""
        path = self.run_dir / LOG_FOLDER / "rank-00000.log"
        name, _, text = (path.read_text() if path.exists() else "").rpartition(START_LINE)[2].partition("\n")
        if any(failure["start"] == name for failure in self.failures()):
            return 0
        records = [line for line in text.splitlines() if line.startswith('{"kind":"step"')]
        return int(json.loads(records[-1])["step"]) if records else 0

    def active(self, but: Sequence[LabHost] = ()) -> list[LabHost]:
        """The two hosts with two ranks each, once there are, of all hosts but some."""
        hosts: list[LabHost] = []
        while len(hosts) != 2:
            self.pause()
            pids = all_ranks()
            hosts = [host for host in self.lab.hosts if host not in but and sum(is_on(host, pid) for pid in pids) == 2]
        return hosts

    def wait_for_step(self, step: int) -> None:
        """Returns once the ranks that run now have recorded it."""
        while self.step < step:
            self.pause()

    @property
    def is_running(self) -> bool:
        """Whether the launcher runs, in the background too."""
        if self.process.poll() is None:
            return True
        with contextlib.suppress(ConfigError):
            return read_job(self.run_dir / LOG_FOLDER).is_running
        return False

    def pause(self) -> None:
        """A moment in which the launcher does not end."""
        assert self.is_running and time.monotonic() < self._end_s, self.said
        time.sleep(0.02)

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(MOST_S)

    def starts(self) -> list[tuple[str, int | None]]:
        """Every start by its name, with the step that it said to be next; None for one that ended before."""
        found: list[tuple[str, int | None]] = []
        for line in (self.run_dir / LOG_FOLDER / "rank-00000.log").read_text().splitlines():
            if line.startswith(START_LINE):
                found.append((line.removeprefix(START_LINE), None))
            elif line.endswith(" is next"):
                found[-1] = (found[-1][0], int(line.split()[-3]))
        return found

    def assert_nothing_lost(self) -> None:
        """Each start after a failure went on right behind the checkpoint that was the newest then."""
        starts = self.starts()
        number = {name: n for n, (name, _) in enumerate(starts)}
        for failure in self.failures():
            following = starts[number[failure["start"]] + 1 :][:1] if failure["start"] in number else []
            for name, step in following:
                assert step in (None, 1 + (failure["checkpoint_step"] or 0)), (failure, name, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        elif self.is_running:
            kill(read_job(self.run_dir / LOG_FOLDER).pid)
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
