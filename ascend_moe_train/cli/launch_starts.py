"""What `amt launch` starts, the first time and after failures: ranks on this machine, or on the hosts that are good."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ascend_moe_train.cli.config import whole_run
from ascend_moe_train.errors import ConfigError

if TYPE_CHECKING:
    from ascend_moe_train.cluster.evidence import Failed
    from ascend_moe_train.cluster.hostfile import Host
    from ascend_moe_train.cluster.hosts_job import HostsJob
    from ascend_moe_train.cluster.restarts import Started
    from ascend_moe_train.cluster.supervise import Job
    from ascend_moe_train.cluster.variables import Starter
    from ascend_moe_train.config import RunConfig

RANK_MODULE = "ascend_moe_train.cli.rank_main"
CLUSTERS: Mapping[str, str] = {"mpiexec": "cpu", "msrun": "910B"}  # what a layout for fewer hosts is planned for

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options before the command that is launched."""

    ranks: int | None
    hostfile: Path | None
    hosts_from: str | None
    slots: int | None
    spares: int
    env: tuple[str, ...]
    starter: str
    restarts: int | None
    dry_run: bool
    detach: bool

    @property
    def is_here(self) -> bool:
        """Whether no hosts are named."""
        return self.hostfile is None and self.hosts_from is None

    def words(self) -> list[str]:
        """The words of `amt` that ask the same of a launcher that is to stay in the foreground and run."""
        given: dict[str, object] = {
            "--ranks": self.ranks,
            "--hostfile": self.hostfile,
            "--hosts-from": self.hosts_from,
            "--slots": self.slots,
            "--spares": self.spares or None,
            "--starter": self.starter,
            "--restarts": self.restarts,
        }
        words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
        return ["launch", *words, *(word for name in self.env for word in ("--env", name))]


class Starts(Protocol):
    """One start after the other. `config` and `ranks` are those of the last."""

    config: "RunConfig"
    ranks: int

    def __call__(self, failed: "Failed | None", say: Say) -> "Started":
        """The next start, after a failure if there was one. Raises ConfigError: none is possible."""

    def shown(self) -> list[str]:
        """The commands of a first start, as a shell would take them."""


class HereStarts:
    """All ranks on this machine."""

    def __init__(self, asked: Asked, run_yaml: Path, overrides: tuple[str, ...]) -> None:
        """Raises ConfigError: no number of ranks, or more than there are NPUs."""
        from ascend_moe_train.cluster.mpiexec import rank_command

        if asked.ranks is None:
            raise ConfigError("--ranks or --hostfile is missing: say how many ranks, or on which hosts")
        for option, given in {"--slots": asked.slots, "--spares": asked.spares, "--env": asked.env}.items():
            if given:
                raise ConfigError(f"{option} has no effect without --hostfile: leave it out")
        self.config, self.ranks, self._started_s = whole_run(run_yaml, overrides), asked.ranks, time.time()
        self._starter = _starter(asked, self.config)
        self._command = rank_command(RANK_MODULE, _arguments(run_yaml, overrides))

    def __call__(self, failed: "Failed | None", say: Say) -> "Job":
        """See Starts."""
        from ascend_moe_train.cluster.launch import make_job
        from ascend_moe_train.cluster.of_run import deadlines_of, npu_variables

        return make_job(
            self.ranks,
            self._command,
            deadlines_of(self.config),
            run_dir=Path(self.config.run.dir),
            starter=self._starter,
            started_s=self._started_s,
            given=os.environ | npu_variables(self.config),
        )

    def shown(self) -> list[str]:
        """See Starts."""
        from ascend_moe_train.cluster.launch import shown_command

        return [shown_command(self(None, lambda line: None))]


class HostStarts:
    """Ranks on all slots of hosts, each time those that are good then, in a layout that is possible there."""

    def __init__(self, asked: Asked, run_yaml: Path, overrides: tuple[str, ...]) -> None:
        """Raises ConfigError: what the hosts, the spares or the list of bad hosts cannot be."""
        from ascend_moe_train.cli.hosts import hosts_of
        from ascend_moe_train.cluster.host_pool import BAD_HOSTS, HostPool
        from ascend_moe_train.cluster.launch import LOG_FOLDER
        from ascend_moe_train.cluster.of_run import npu_variables

        if asked.ranks is not None:
            option = "--hosts-from" if asked.hostfile is None else "--hostfile"
            raise ConfigError(f"--ranks {asked.ranks}: with {option} there is a rank on each slot of its hosts")
        self._run_yaml, self._overrides, self._started_s = run_yaml, overrides, time.time()
        self._written = self.config = whole_run(run_yaml, overrides)
        self._starter = _starter(asked, self.config)
        self._environment = _passed_on(asked.env) | npu_variables(self.config)
        bad_list = Path(self.config.run.dir) / LOG_FOLDER / BAD_HOSTS
        hosts = hosts_of(asked.hostfile, asked.hosts_from, asked.slots)
        self._pool = HostPool(hosts.hosts, asked.spares, bad_list)
        self.ranks = sum(host.slots for host in self._pool.active)
        known = ", ".join(self._pool.left_out)
        self._run_id = ""  # of the last start
        self._remarks = [f"left out, as they were bad before ({bad_list}): {known}"] if known else []

    def __call__(self, failed: "Failed | None", say: Say) -> "HostsJob":
        """See Starts."""
        from ascend_moe_train.cluster.hosts_job import make_hosts_job
        from ascend_moe_train.cluster.of_run import deadlines_of
        from ascend_moe_train.train.run_lock import unlock

        if failed is not None:
            self._remarks += self._pool.after(failed)
            unlock(Path(self.config.run.dir), self._run_id)
        hosts, settings = self._layout()
        if settings:
            self._remarks.append(f"goes on with {len(hosts)} hosts and --set {' --set '.join(settings)}")
        self.config = whole_run(self._run_yaml, (*self._overrides, *settings))
        self.ranks = sum(host.slots for host in hosts)
        for line in self._remarks:
            say(line)
        self._remarks = []
        job = make_hosts_job(
            hosts,
            RANK_MODULE,
            _arguments(self._run_yaml, (*self._overrides, *settings)),
            deadlines_of(self.config),
            run_dir=Path(self.config.run.dir),
            silence_s=self.config.parallel.deadlines.host_s,
            started_s=self._started_s,
            starter=self._starter,
            environment=self._environment,
        )
        self._run_id = job.run_id
        return job

    def shown(self) -> list[str]:
        """See Starts."""
        from ascend_moe_train.cluster.hosts_job import shown_commands

        return shown_commands(self(None, lambda line: None))

    def _layout(self) -> tuple[list["Host"], list[str]]:
        """As many of the good hosts as a layout can be had for, and what has to be set for it."""
        from ascend_moe_train.planner.hardware import parse_cluster
        from ascend_moe_train.planner.other_size import settings_on

        active = list(self._pool.active)
        problem: ConfigError | None = None
        if len(active) == self._pool.size:
            return active, []  # as it is written
        for count in range(len(active), 0, -1):
            try:
                ranks = sum(host.slots for host in active[:count])
                settings = settings_on(self._written, parse_cluster(f"{ranks}x{CLUSTERS[self._starter]}"))
                whole_run(self._run_yaml, (*self._overrides, *settings))
            except ConfigError as error:
                problem = problem or error
            else:
                return active[:count], settings
        raise problem or ConfigError("no host is left")


def _arguments(run_yaml: Path, overrides: tuple[str, ...]) -> list[str]:
    settings = [word for override in overrides for word in ("--set", override)]
    return ["train", "--json", *settings, "--", str(run_yaml)]


def _starter(asked: Asked, config: "RunConfig") -> "Starter":
    """Raises ConfigError: a run on NPUs that has more ranks than this host has of them, unless nothing is run."""
    from ascend_moe_train.cluster.msrun import check_devices, num_devices
    from ascend_moe_train.cluster.of_run import is_for_npus

    is_ascend = is_for_npus(config)
    if is_ascend and asked.ranks is not None and not asked.dry_run:
        check_devices(asked.ranks, num_devices())
    if asked.starter == "mpiexec" or (asked.starter == "auto" and not is_ascend):
        return "mpiexec"
    return "msrun"


def _passed_on(names: tuple[str, ...]) -> dict[str, str]:
    """Variables that ranks on all hosts are to have as this process has them. Raises ConfigError: one is not set."""
    for name in names:
        if name not in os.environ:
            raise ConfigError(f"--env {name[:80]}: is not set here")
    return {name: os.environ[name] for name in names}
