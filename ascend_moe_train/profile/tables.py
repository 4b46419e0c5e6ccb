"""What is known of a profiled run, in the same tables whatever tool wrote it. Pure.

Durations are microseconds (_us) or, for single collectives, milliseconds (_ms) as the files have them; time stamps are
integer nanoseconds (_ns), since microseconds since 1970 have only a quarter of a microsecond left in a double. Sizes
are decimal megabytes of payload for collectives; memory is in the megabytes that the writer has (see docs/profile.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

PIPES = ("mac", "vec", "scalar", "mte1", "mte2", "mte3", "fixpipe")
CUBE_CORES = frozenset({"AI_CORE", "MIX_AIC"})
VECTOR_CORES = frozenset({"AI_VECTOR_CORE", "MIX_AIV"})
COLLECTIVE_CORES = frozenset({"HCCL", "COMMUNICATION"})


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one rank. `bubble_written_us` and `stage_written_us` are what the writer says, in its own definition;
    `preparing_us` is None where it was not measured, or is longer than the step."""

    step: str
    computing_us: float
    exposed_us: float
    overlapped_us: float
    free_us: float
    source: str
    preparing_us: float | None = None
    stage_written_us: float | None = None
    bubble_written_us: float | None = None

    @property
    def e2e_us(self) -> float:
        """Computing, exposed communication and free time together."""
        return self.computing_us + self.exposed_us + self.free_us

    @property
    def communication_us(self) -> float:
        """Exposed and overlapped."""
        return self.exposed_us + self.overlapped_us


@dataclass(frozen=True, kw_only=True)
class KernelGroup:
    """Compute kernels of one type, core and shapes. `pipes_us` has, for each of PIPES, ratio x duration added up over
    `measured_us` of kernels that have ratios; `cube_us` is cube utilisation x duration over `cube_measured_us`."""

    type: str
    core: str
    shapes: str
    dtypes: str
    count: int
    total_us: float
    min_us: float
    max_us: float
    wait_us: float
    measured_us: float = 0.0
    pipes_us: tuple[float, ...] = ()
    cube_measured_us: float = 0.0
    cube_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective or message of one rank. `name` has the group behind an @ where the writer says it; `kind` is
    `allReduce`, `batchSendRecv` and so on. None is not collected. `links` has megabytes and milliseconds by transport.
    """

    step: str
    name: str
    kind: str
    group: str
    start_ns: int
    elapse_ms: float
    transit_ms: float | None = None
    wait_ms: float | None = None
    sync_ms: float | None = None
    idle_ms: float | None = None
    exposed_ms: float | None = None
    links: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What went from one rank of a group to another, added up."""

    group: str
    source: int
    target: int
    transport: str
    size_mb: float
    time_ms: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of one component (PTA, GE, APP, MindSpore ...): the peaks, and the curve as (ns, reserved) of at most a few
    hundred points, each the peak around it."""

    component: str
    rows: int
    peak_reserved_mb: float
    peak_allocated_mb: float
    curve: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Owner:
    """An operator's memory that was alive at the peak."""

    name: str
    size_mb: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Hit rates as fractions. `kind` is `LLC 0 Read` (sampled counters of the device) or `L2` (pooled counters of
    kernels); `weighted` is weighted by throughput where there is one."""

    kind: str
    samples: int
    mean: float
    low: float
    high: float
    weighted: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the host keeps up: `gaps_us` between kernels, and of these the part in which the next kernel had not been
    launched when the one before it ended. `delay_us` is the median from launch to start."""

    kernels: int
    gaps_us: float
    host_bound_us: float
    delay_us: float
    source: str


@dataclass(frozen=True, kw_only=True)
class HostCall:
    """A call of the host, added up."""

    level: str
    name: str
    total_us: float
    count: int


@dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """A communication group: what it is called, which ranks it has."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something with a start and an end, for a timeline."""

    name: str
    lane: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What a rank did, in equal bins from `start_ns` on: shares of 0 to 100 of each bin."""

    start_ns: int
    bin_ns: int
    computing: tuple[int, ...]
    communication: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Rank:
    """All of one rank. Empty tables were not collected; `sources` says which file each came from. `iterations_us` are
    whole steps as the device counted them (graph mode), `written` figures of the writer's own that are in no table."""

    rank: int
    writer: str
    folder: str
    level: str | None = None
    metrics: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, GroupInfo] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    kernels: tuple[KernelGroup, ...] = ()
    collectives: tuple[Collective, ...] = ()
    links: tuple[Link, ...] = ()
    memory: tuple[Memory, ...] = ()
    modules: tuple[Memory, ...] = ()
    owners: tuple[Owner, ...] = ()
    caches: tuple[Cache, ...] = ()
    launch: Launch | None = None
    host_calls: tuple[HostCall, ...] = ()
    spans: tuple[Span, ...] = ()
    lane: Lane | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    iterations_us: tuple[float, ...] = ()
    written: Mapping[str, float] = field(default_factory=dict)

    @property
    def computing_us(self) -> float:
        """Mean over steps."""
        return _mean([each.computing_us for each in self.steps])

    @property
    def e2e_us(self) -> float:
        """Mean over steps."""
        return _mean([each.e2e_us for each in self.steps])

    @property
    def exposed_us(self) -> float:
        """Mean over steps."""
        return _mean([each.exposed_us for each in self.steps])

    @property
    def free_us(self) -> float:
        """Mean over steps."""
        return _mean([each.free_us for each in self.steps])

    @property
    def overlapped_us(self) -> float:
        """Mean over steps."""
        return _mean([each.overlapped_us for each in self.steps])

    @property
    def num_steps(self) -> int:
        """At least 1: what has no steps is taken as one."""
        return max(1, len(self.steps))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
