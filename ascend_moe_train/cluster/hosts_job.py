"""A job whose ranks are on several hosts: agents are reached, made ready, supervised, and left. Pure."""

import contextlib
import math
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

from ascend_moe_train.cluster import msrun
from ascend_moe_train.cluster.evidence import Failed
from ascend_moe_train.cluster.frames import Task
from ascend_moe_train.cluster.host_words import shown
from ascend_moe_train.cluster.hostfile import Host
from ascend_moe_train.cluster.hosts_hub import HostsHub
from ascend_moe_train.cluster.intake import Intake
from ascend_moe_train.cluster.launch import LOG_FOLDER, MSRUN_FOLDER
from ascend_moe_train.cluster.links import Link, Links, agent_words, is_here
from ascend_moe_train.cluster.mpiexec import find_mpiexec, hosts_command_line, rank_command
from ascend_moe_train.cluster.output import RankLogs, Screen
from ascend_moe_train.cluster.remote import Reason, RemoteError
from ascend_moe_train.cluster.supervise import TICK_S, Outcome, Supervision, stop_signals, with_problems
from ascend_moe_train.cluster.variables import Starter
from ascend_moe_train.cluster.verdict import EXIT_USER_ERROR, Deadlines
from ascend_moe_train.errors import ConfigError

READY_S = 60.0  # for Python to start on a busy host
# What another host would not mend, and no second try either.
_MISTAKES: frozenset[Reason] = frozenset({"unresolved", "unknown key", "changed key", "unchecked key", "denied"})


@dataclass(frozen=True, kw_only=True)
class HostsJob:
    """What to run where; `tasks` are by host. A host that says nothing for `silence_s` is lost."""

    hosts: Sequence[Host]
    tasks: Sequence[Task]
    deadlines: Deadlines
    silence_s: float
    run_id: str
    log_folder: Path

    def run(self, screen: Screen) -> Outcome:
        """Runs the job to its end, on the main thread. Whatever happens, no process is left on a host that can be
        reached; on others the agents end their ranks.

        Raises OSError: nobody reads the output any more.
        """
        logs = RankLogs(self.log_folder, self.run_id)
        with contextlib.ExitStack() as stack:
            intake = Intake(logs, screen)
            stack.callback(logs.close)
            found_signals = stack.enter_context(stop_signals())
            links = stack.enter_context(Links())
            reached = self._reached(links, found_signals)
            if isinstance(reached, Outcome):
                return reached
            hub = stack.enter_context(HostsHub(reached, self.tasks, intake, self.silence_s))
            problem = self._not_ready(hub, found_signals)
            if problem is not None:
                return problem
            hub.start()
            outcome = Supervision(self, hub, hub, intake, found_signals).run()
            if outcome.failed is not None:
                lost = tuple(host.name for host in hub.lost)
                outcome = replace(outcome, failed=replace(outcome.failed, host=self._host_of(outcome), lost=lost))
        return with_problems(outcome, intake, logs)

    def _host_of(self, outcome: Outcome) -> str | None:
        """That of the rank that failed first."""
        rank = None if outcome.failed is None else outcome.failed.rank
        firsts = {task.first_rank: host.name for task, host in zip(self.tasks, self.hosts, strict=True)}
        return None if rank is None else firsts[max(first for first in firsts if first <= rank)]

    def _reached(self, links: Links, found_signals: Sequence[int]) -> list[Link] | Outcome:
        """Connections to all hosts, or why there are none."""
        opened: list[Future[Link]] = links.open(self.hosts)
        while not all(each.done() for each in opened):
            if found_signals:
                return Outcome(exit_code=128 + found_signals[0])
            time.sleep(TICK_S)
        errors = [error for each in opened if isinstance(error := each.exception(), RemoteError)]
        mistakes = [error for error in errors if error.reason in _MISTAKES]
        if mistakes:
            return Outcome(exit_code=EXIT_USER_ERROR, message="\n".join(f"error: {error}" for error in mistakes))
        if errors:
            return _lost({error.host.name: error.detail for error in errors})
        return [each.result() for each in opened]

    def _not_ready(self, hub: HostsHub, found_signals: Sequence[int]) -> Outcome | None:
        """What keeps agents from starting ranks; None once all can."""
        until_s = time.monotonic() + READY_S
        while not all(host.ready is not None for host in hub.hosts):
            refusals = [f"error: host {host.name}: {host.refusal}" for host in hub.hosts if host.refusal is not None]
            if refusals:
                return Outcome(exit_code=EXIT_USER_ERROR, message="\n".join(refusals))
            if hub.lost:
                return _lost({host.name: host.lost or "" for host in hub.lost})
            if found_signals:
                return Outcome(exit_code=128 + found_signals[0])
            if time.monotonic() > until_s:
                late = [host.name for host in hub.hosts if host.ready is None]
                return _lost(dict.fromkeys(late, f"its agent is not ready after {READY_S:g} s"))
            hub.poll(TICK_S)
        return None


def make_hosts_job(
    hosts: Sequence[Host],
    module: str,
    arguments: Sequence[str],
    deadlines: Deadlines,
    *,
    run_dir: Path,
    silence_s: float,
    started_s: float,
    starter: Starter = "mpiexec",
    environment: Mapping[str, str],
) -> HostsJob:
    """What it takes to run a module with arguments as the ranks of all hosts. `environment` is added to what each host
    has by itself. Raises ConfigError: something of it is no text, which alone can be told to others."""
    for text in (*arguments, *environment.values(), str(Path.cwd()), str(run_dir)):
        _check_text(text)
    run_id = f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}"
    slots = tuple(host.slots for host in hosts)
    log_folder = run_dir / LOG_FOLDER
    tasks = [
        Task(
            version=version("ascend-moe-train"),
            world=sum(slots),
            first_rank=first,
            ranks=host.slots,
            node=node,
            slots_by_node=slots,
            module=module,
            arguments=tuple(arguments),
            starter=starter,
            master=hosts[0].address,
            folder=str(Path.cwd()),
            log_folder=str(log_folder / MSRUN_FOLDER),
            environment={**environment, **host.nic_variables},
            run_id=run_id,
            control=f"ascend-moe-train-{run_id}-{secrets.token_hex(8)}",
            started_s=started_s,
            meet_s=math.ceil(deadlines.compile_s),
            silence_s=silence_s,
        )
        for node, (host, first) in enumerate(zip(hosts, accumulate(slots, initial=0), strict=False))
    ]
    return HostsJob(
        hosts=hosts, tasks=tasks, deadlines=deadlines, silence_s=silence_s, run_id=run_id, log_folder=log_folder
    )


def shown_commands(job: HostsJob) -> list[str]:
    """What would be run, for each host the agent and what it starts, as a shell would take it."""
    lines = []
    for host, task in zip(job.hosts, job.tasks, strict=True):
        where = "here" if is_here(host.address) else f"over SSH to {host.address}"
        lines.append(f"# {host.name}: ranks {task.first_rank} to {task.first_rank + task.ranks - 1}, agent {where}")
        lines.append(shlex.join(agent_words()))
        added = [f"{name}={value}" for name, value in sorted(task.environment.items())]
        lines += [shlex.join(["env", *added, *words] if added else words) for words in _starters(task)]
    return lines


def _starters(task: Task) -> list[list[str]]:
    own = rank_command(task.module, task.arguments)
    if task.starter == "msrun":
        node = msrun.Node(number=task.node, world=task.world, master=task.master)
        folder = Path(task.log_folder) / f"node-{task.node}"
        program = msrun.guarded(own)
        # the port is one that is free on the first host then
        return [msrun.command_line(task.ranks, program, log_folder=folder, port=0, meet_s=task.meet_s, node=node)]
    mpiexec = find_mpiexec()
    proxy = [str(mpiexec.with_name("hydra_pmi_proxy")), "--proxy-id", str(task.node)]
    return [hosts_command_line(mpiexec, task.master, task.slots_by_node, own), proxy] if task.node == 0 else [proxy]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{shown(text)}: is no UTF-8 text, which alone can be told to other hosts") from None


def _lost(why_by_host: Mapping[str, str]) -> Outcome:
    message = "\n".join(f"error: host {name}: {why}" for name, why in why_by_host.items())
    failed = Failed(rank=None, exit_code=1, message=message, views=(), stacks={}, lost=tuple(why_by_host))
    return Outcome(exit_code=1, message=message, failed=failed)
