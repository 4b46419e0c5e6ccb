"""This process among those that train a run together. Pure: MPI and MindSpore only come with other processes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ascend_moe_train.cluster.rank import Progress, is_by_msrun, progress, run_id, unlink_shared_memory
from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.loader import Batch
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.agree import broadcast_json, exchange_json, max_int, sum_floats
from ascend_moe_train.parallel.comm import Collectives, Comm, Group, LocalComm
from ascend_moe_train.parallel.config import SlowLinksConfig
from ascend_moe_train.parallel.mesh import Mesh, mesh_of
from ascend_moe_train.parallel.places import own_part
from ascend_moe_train.parallel.queued import QueuedComm
from ascend_moe_train.parallel.slow import SlowComm
from ascend_moe_train.parallel.spans import Spans, TimedComm
from ascend_moe_train.parallel.watched import WatchedComm
from ascend_moe_train.train.same_config import check_same_config

if TYPE_CHECKING:
    from ascend_moe_train.parallel.mpi import MpiComm


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """All ranks, and this one's place among them. What its methods return is the same on every rank; all call them."""

    comm: Comm
    device: Collectives | None
    """The device's own verbs, where it has some; else those of `comm` are put into graphs."""
    mesh: Mesh
    data: Group
    """The ranks that train on other sequences at the same time, one for each part of a step's batch."""
    counting: Group
    """The ranks whose losses add up to that of all sequences."""
    progress: Progress
    """Where this rank says what it is at."""
    spans: Spans | None = None
    """What this rank's collectives take and move; None where that is not known."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what a run writes once, and talks to the user."""
        return self.comm.rank == 0

    def own(self, batch: Batch) -> Batch:
        """What of a batch of this rank's sequences is its own part of them."""
        return own_part(batch, self.mesh, self.mesh.coordinates(self.comm.rank))

    def wait_for_all(self) -> None:
        """Returns once all ranks have come here."""
        self.comm.barrier(self.comm.world)

    def total(self, values: list[float]) -> list[float]:
        """Sums of what ranks have of the losses of their sequences: some of the tokens, or nothing on another stage
        than the last."""
        return sum_floats(self.comm, values, self.counting)

    def sum_of_all(self, value: float) -> float:
        """The sum over all ranks."""
        return sum_floats(self.comm, [value])[0]

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self.mesh.coordinates(self.comm.rank).pp

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; JSON only."""
        return exchange_json(self.comm, value)

    def largest(self, value: int) -> int:
        """The largest of all ranks."""
        return max_int(self.comm, value)

    def first_of(self, value: str | None) -> str | None:
        """The value of the lowest rank that has one."""
        return next((each for each in exchange_json(self.comm, value) if each is not None), None)

    def least_of(self, values: list[tuple[int, str]]) -> tuple[int, str] | None:
        """Of all ranks' numbered values the one with the lowest number, of the lowest rank that has it."""
        everyone = [(number, text) for each in exchange_json(self.comm, values) for number, text in each]
        return min(everyone, key=lambda value: value[0], default=None)

    def of_first(self, value: Any) -> Any:
        """The first rank's value; JSON only. The others' are not looked at."""
        return broadcast_json(self.comm, value)


def alone(config: RunConfig) -> Ranks:
    """The only rank of a run. Raises ConfigError for a run that needs several."""
    return _ranks(config, LocalComm())


def join(config: RunConfig) -> Ranks:
    """Meets the other ranks, if `amt launch` started this process with some. Raises ConfigError: they do not fit, or
    have not all the same configuration; TrainingError: a device that is not there."""
    if run_id() is None:
        return alone(config)
    return _by_msrun(config) if is_by_msrun() else _by_mpi(config)


def join_by_mpi() -> Comm:
    """All ranks that `amt launch` started, once they have met; where this one is in a collective, the launcher sees."""
    return WatchedComm(_met(), _on_call)


def _met() -> "MpiComm":
    from ascend_moe_train.parallel.mpi import MpiComm

    comm = MpiComm()
    comm.barrier(comm.world)
    unlink_shared_memory()
    return comm


def _by_mpi(config: RunConfig) -> Ranks:
    comm = _met()
    spans, slowed = Spans(), _slowed(comm, config.parallel.slow_links)
    if config.parallel.overlap:
        if not comm.takes_any_thread:
            raise ConfigError(
                "parallel.overlap true: this MPI is for one thread only (MPI_THREAD_SERIALIZED is missing)"
            )
        timed = WatchedComm(TimedComm(slowed, spans.ran), _on_call)
        return _ranks(config, QueuedComm(timed, spans.waited), spans=spans)

    def on_span(verb: str, group: Group, payload_bytes: int, seconds: float) -> None:
        spans.ran(verb, group, payload_bytes, seconds)
        spans.waited(verb, group, seconds)

    return _ranks(config, WatchedComm(TimedComm(slowed, on_span), _on_call), spans=spans)


def _slowed(comm: Comm, links: SlowLinksConfig | None) -> Comm:
    if links is None:
        return comm
    return SlowComm(comm, latency_s=links.latency_s, bytes_per_s=links.bytes_per_s, groups=links.groups)


def _by_msrun(config: RunConfig) -> Ranks:
    from ascend_moe_train.parallel.native import NativeOps
    from ascend_moe_train.train.session import set_device

    parallel = config.parallel
    for key, value in {"overlap": parallel.overlap, "slow_links": parallel.slow_links}.items():
        if value:
            raise ConfigError(
                f"parallel.{key} is for ranks that talk through MPI, these talk by MindSpore's own means (msrun): "
                "leave it out"
            )
    set_device(config.run.device, config.ascend)
    device = NativeOps()
    return _ranks(config, WatchedComm(device.comm, _on_call), device)


def _on_call(verb: str, group_name: str, number: int, done: bool) -> None:
    if done:
        progress().leave()
    else:
        progress().enter(verb, group_name, number)


def _ranks(config: RunConfig, comm: Comm, device: Collectives | None = None, spans: Spans | None = None) -> Ranks:
    check_same_config(config, comm)
    mesh = mesh_of(config, comm.world.size)
    return Ranks(
        comm=comm,
        device=device,
        mesh=mesh,
        data=comm.split("dp", mesh.groups(("dp",))).carrying("figures"),
        counting=comm.split("loss", mesh.groups(("pp", "dp", "cp"))).carrying("figures"),
        progress=progress(),
        spans=spans,
    )
