"""What to do next, ranked by what it could gain; each tied to figures and to keys of a run file. Pure.

Gains are estimates in ms a step, of one change alone; the rule of each is in docs/profile.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from ascend_moe_train.profile.across import MIN_SHARE, KindCost, Stage, Straggler, expert_rows
from ascend_moe_train.profile.layout import Layout
from ascend_moe_train.profile.metrics import Figure, memory_bound_share
from ascend_moe_train.profile.numbers import counted
from ascend_moe_train.profile.operators import core_time_ms, type_times_ms
from ascend_moe_train.profile.tables import CUBE_CORES, PIPES, VECTOR_CORES, Rank

GOOD_MAC = 0.8  # of the cube's time in arithmetic, what well-fed matrix products reach
GOOD_FREE = 0.02
MIN_IMBALANCE = 1.1

# kind of group -> what it is, and the keys that change it
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "DP": (
        "gradients and weights among data-parallel ranks",
        ("parallel.overlap", "parallel.bucket_bytes", "parallel.reduce_dtype", "parallel.zero_stage"),
    ),
    "EP": (
        "tokens travelling to experts and back",
        ("parallel.ep", "parallel.expert_wire", "parallel.expert_chunks", "parallel.hierarchical_ranks"),
    ),
    "TP": ("collectives of tensor parallelism", ("parallel.tp", "parallel.sequence_parallel")),
    "CP": ("collectives of context parallelism", ("parallel.cp", "parallel.context")),
    "PP": ("messages between stages", ("parallel.pp", "parallel.chunks", "parallel.schedule")),
    "embedding": (
        "gradients of the tied embedding, between the first and the last stage",
        ("model.tie_embeddings", "parallel.pp", "parallel.reduce_dtype"),
    ),
    "model": ("collectives across a whole replica", ("parallel.pp", "parallel.tp")),
    "world": ("collectives of all ranks", ("run.log_every",)),
    "unknown": (
        "collectives whose group has no name in the capture",
        ("parallel.overlap", "parallel.bucket_bytes", "parallel.reduce_dtype"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """`gain_ms` a step; `figures` are what it rests on, `keys` of our run files what to change."""

    title: str
    gain_ms: float
    figures: tuple[str, ...]
    keys: tuple[str, ...]
    action: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What advice is made from."""

    ranks: tuple[Rank, ...]
    figures: tuple[Figure, ...]
    layout: Layout
    stages: tuple[Stage, ...]
    stragglers: tuple[Straggler, ...]
    kinds: tuple[KindCost, ...]

    @property
    def step_ms(self) -> float:
        """The longest rank's step."""
        return max((rank.e2e_us for rank in self.ranks), default=0.0) / 1e3

    def worst(self, name: str) -> Figure | None:
        """The largest of a figure over ranks."""
        known = [each for each in self.figures if each.name == name and each.value is not None]
        return max(known, key=lambda each: each.value or 0.0, default=None)


def advise(evidence: Evidence) -> list[Advice]:
    """Largest gain first; what gains less than MIN_SHARE of the step is left out."""
    rules = (_stages, _bubble, _kinds, _free, _stragglers, _experts, _cube, _vector, _ai_cpu, _preparing)
    found = [each for rule in rules for each in rule(evidence)]
    return sorted((each for each in found if each.gain_ms >= MIN_SHARE * evidence.step_ms), key=lambda a: -a.gain_ms)


def imbalance_ms(stages: Sequence[Stage]) -> float:
    """What the slowest stage computes beyond the mean of all: the step ends so much earlier when they are equal."""
    times = [each.computing_ms for each in stages]
    return max(times) - mean(times) if times else 0.0


def _stages(evidence: Evidence) -> Iterator[Advice]:
    stages = evidence.stages
    if not stages or imbalance_ms(stages) <= 0:
        return
    slow = max(stages, key=lambda each: each.computing_ms)
    fast = min(stages, key=lambda each: each.computing_ms)
    facts = [
        f"stage {slow.stage} ({_ranks(slow.ranks)}) computes {slow.computing_ms:.1f} ms a step, stage {fast.stage} "
        f"({_ranks(fast.ranks)}) {fast.computing_ms:.1f} ms: {slow.computing_ms - fast.computing_ms:.1f} ms more"
    ]
    if fast.p2p_ms is not None and fast.p2p_wait_ms is not None:
        facts.append(
            f"so {_ranks(fast.ranks)} spend {fast.p2p_ms:.1f} ms a step ({100 * fast.p2p_ms / evidence.step_ms:.0f} %) "
            f"in messages between stages, {fast.p2p_wait_ms:.1f} ms of it waiting"
            + (
                f"; the file's own column Bubble says {fast.bubble_written_ms:.0f}"
                if fast.bubble_written_ms is not None and fast.bubble_written_ms < 0.1 * fast.p2p_ms
                else ""
            )
        )
    elif slow.bubble_written_ms is not None and fast.bubble_written_ms is not None:
        facts.append(
            f"as written, stage {slow.stage} waits {slow.bubble_written_ms:.1f} ms to receive, stage {fast.stage} "
            f"{fast.bubble_written_ms:.1f} ms"
        )
    more = _differences(evidence.ranks, slow, fast)
    if more:
        facts.append(f"stage {slow.stage} has more of: {more}")
    yield Advice(
        title="the pipeline's stages do not compute equally long",
        gain_ms=imbalance_ms(stages),
        figures=tuple(facts),
        keys=("parallel.stage_layers", "parallel.chunks"),
        action="set parallel.stage_layers to cost, which counts embedding and head, or list fewer layers for stage "
        f"{slow.stage}",
    )


def _differences(ranks: Sequence[Rank], slow: Stage, fast: Stage) -> str:
    """The operators that make the difference, where both stages have kernels."""
    one = type_times_ms(rank for rank in ranks if rank.rank in slow.ranks)
    other = type_times_ms(rank for rank in ranks if rank.rank in fast.ranks)
    if not one or not other:
        return ""
    more = sorted(((one[kind] - other.get(kind, 0.0), kind) for kind in one), reverse=True)[:4]
    return ", ".join(f"{kind} (+{time_ms:.1f} ms)" for time_ms, kind in more if time_ms > 0)


def _bubble(evidence: Evidence) -> Iterator[Advice]:
    waits = [each.p2p_wait_ms for each in evidence.stages if each.p2p_wait_ms is not None]
    if not waits:
        return
    rest = mean(waits) - imbalance_ms(evidence.stages)
    yield Advice(
        title="the pipeline's bubble",
        gain_ms=rest / 2,
        figures=(
            f"ranks wait {mean(waits):.1f} ms a step for messages between stages, "
            f"{imbalance_ms(evidence.stages):.1f} ms of it by unequal stages",
        ),
        keys=("batch.micro_sequences", "batch.global_sequences", "parallel.schedule", "parallel.chunks"),
        action="twice the micro-batches halve it (smaller batch.micro_sequences or larger batch.global_sequences), "
        "parallel.schedule interleaved or zero_bubble too",
    )


def _kinds(evidence: Evidence) -> Iterator[Advice]:
    for each in evidence.kinds:
        if each.exposed_ms is None:
            continue
        moving_ms = max(0.0, each.exposed_ms - (each.wait_ms or 0.0))
        words, keys = _KINDS[each.kind]
        waited = f", {each.wait_ms:.1f} ms of it waiting for other ranks" if each.wait_ms is not None else ""
        yield Advice(
            title=f"exposed communication: {words}",
            gain_ms=moving_ms,
            figures=(
                f"{counted(each.count, 'collective')} a step ({', '.join(each.operators[:4])}): "
                f"{each.elapse_ms:.1f} ms, {each.exposed_ms:.1f} ms of it with nothing computed meanwhile{waited}",
            )
            + ((f"{each.size_mb:.0f} MB a rank and step",) if each.size_mb else ()),
            keys=keys,
            action="hide it behind compute, send fewer bytes, or over fewer ranks",
        )


def _free(evidence: Evidence) -> Iterator[Advice]:
    free = evidence.worst("free")
    if free is None or free.value is None:
        return
    times = [rank.free_us / 1e3 for rank in evidence.ranks if rank.steps]
    facts = [
        f"devices do nothing for {mean(times):.1f} ms a step (rank {free.rank}: {100 * free.value:.1f} %)",
    ]
    bound = evidence.worst("host_bound")
    if bound is not None and bound.value is not None:
        facts.append(f"rank {bound.rank} waits for launches for {100 * bound.value:.1f} % of the step")
    yield Advice(
        title="the device waits for the host",
        gain_ms=max(0.0, mean(times) - GOOD_FREE * evidence.step_ms),
        figures=tuple(facts),
        keys=("ascend.jit_level", "ascend.bind_cores", "batch.micro_sequences", "run.log_every"),
        action="compile whole graphs (ascend.jit_level O2), bind threads (ascend.bind_cores), larger micro-batches",
    )


def _stragglers(evidence: Evidence) -> Iterator[Advice]:
    for each in evidence.stragglers[:5]:
        is_tokens = each.cause.startswith("more tokens")
        keys = ("model.moe.aux_loss_coef", "model.moe.capacity_factor") if is_tokens else ("ascend.bind_cores",)
        yield Advice(
            title=f"rank {each.rank} is late among its peers",
            gain_ms=each.delay_ms,
            figures=(
                f"it came last {counted(each.times, 'time')}, {each.delay_ms:.1f} ms a step; than the median "
                f"of its peers it computes {each.computing_ms:+z.1f} ms and waits {each.free_ms:+z.1f} ms",
            ),
            keys=keys,
            action=each.cause,
        )


def _experts(evidence: Evidence) -> Iterator[Advice]:
    """Rows of grouped matmuls among peers."""
    for group in evidence.layout.peers([rank.rank for rank in evidence.ranks]):
        members = [rank for rank in evidence.ranks if rank.rank in group]
        rows = {rank.rank: found for rank in members if (found := expert_rows(rank)) is not None}
        if len(rows) < 2 or max(rows.values()) < MIN_IMBALANCE * mean(rows.values()):
            continue
        busiest = max(rows, key=lambda rank: rows[rank])
        time_ms = sum(
            each.total_us / 1e3 / rank.num_steps
            for rank in members
            if rank.rank == busiest
            for each in rank.kernels
            if "grouped" in each.type.lower()
        )
        yield Advice(
            title="experts are not equally busy",
            gain_ms=time_ms * (1 - mean(rows.values()) / rows[busiest]),
            figures=(
                f"rank {busiest} has {rows[busiest] / mean(rows.values()):.2f} times the mean of the token rows of "
                f"{_ranks(tuple(rows))}; its grouped matmuls take {time_ms:.1f} ms a step",
            ),
            keys=("model.moe.aux_loss_coef", "model.moe.balance_bias_rate", "model.moe.capacity_factor"),
            action="balance the router (auxiliary loss or biases), or bound experts by a capacity factor",
        )


def _cube(evidence: Evidence) -> Iterator[Advice]:
    groups = [each for rank in evidence.ranks for each in rank.kernels if each.core in CUBE_CORES and each.pipes_us]
    measured = sum(each.measured_us for each in groups)
    if not measured:
        return
    mac = sum(each.pipes_us[PIPES.index("mac")] for each in groups) / measured
    mte2 = sum(each.pipes_us[PIPES.index("mte2")] for each in groups) / measured
    with_kernels = [rank for rank in evidence.ranks if rank.kernels]
    time_ms = mean(core_time_ms(rank, cube=True) for rank in with_kernels)
    yield Advice(
        title="matrix products do not keep the cube cores at arithmetic",
        gain_ms=time_ms * max(0.0, 1 - mac / GOOD_MAC),
        figures=(
            f"kernels on cube cores take {time_ms:.1f} ms a step; mac ratio {mac:.2f} (good: {GOOD_MAC}), "
            f"loading (mte2) {mte2:.2f}, weighted by time",
        ),
        keys=("batch.micro_sequences", "parallel.tp", "parallel.ep"),
        action="larger products: larger micro-batches, fewer ways of tensor parallelism, more tokens for each expert",
    )


def _vector(evidence: Evidence) -> Iterator[Advice]:
    groups = [each for rank in evidence.ranks for each in rank.kernels if each.core in VECTOR_CORES]
    bound = memory_bound_share(groups)
    with_kernels = [rank for rank in evidence.ranks if rank.kernels]
    if bound is None or not with_kernels:
        return
    time_ms = mean(core_time_ms(rank, cube=False) for rank in with_kernels)
    names = sorted(_vector_times(with_kernels).items(), key=lambda item: -item[1])[:4]
    yield Advice(
        title="element-wise operators are bound by memory",
        gain_ms=time_ms * bound / 2,
        figures=(
            f"vector kernels take {time_ms:.1f} ms a step, {100 * bound:.0f} % of it bound by loading: "
            + ", ".join(f"{kind} {each:.1f} ms" for kind, each in names),
        ),
        keys=("ascend.graph_kernel_flags", "run.precision", "run.kernels"),
        action="fuse them (ascend.graph_kernel_flags, fused kernels), and avoid casts; two fused into one halve it",
    )


def _vector_times(ranks: Sequence[Rank]) -> dict[str, float]:
    found: dict[str, float] = {}
    for rank in ranks:
        for each in rank.kernels:
            if each.core in VECTOR_CORES:
                found[each.type] = found.get(each.type, 0.0) + each.total_us / 1e3 / rank.num_steps / len(ranks)
    return found


def _ai_cpu(evidence: Evidence) -> Iterator[Advice]:
    times: dict[str, float] = {}
    for rank in evidence.ranks:
        for each in rank.kernels:
            if each.core == "AI_CPU":
                times[each.type] = max(times.get(each.type, 0.0), each.total_us / 1e3 / rank.num_steps)
    if times:
        longest = sorted(times.items(), key=lambda item: -item[1])[:4]
        yield Advice(
            title="operators run on the AI CPU",
            gain_ms=sum(times.values()),
            figures=(", ".join(f"{kind} {time_ms:.2f} ms a step" for kind, time_ms in longest),),
            keys=("run.precision", "run.kernels"),
            action="give them a data type that the AI cores have (int32 instead of int64), or another operator",
        )


def _preparing(evidence: Evidence) -> Iterator[Advice]:
    worst = evidence.worst("preparing")
    if worst is not None and worst.value is not None and worst.value > 0.05 * evidence.step_ms:
        yield Advice(
            title="the device starts late in the step",
            gain_ms=worst.value,
            figures=(f"rank {worst.rank} gets its first kernel {worst.value:.1f} ms after the step began on the host",),
            keys=("data.train", "run.log_every"),
            action="load the next batch while the step runs, and copy it without waiting",
        )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:6]))
    return f"ranks {shown}{f' and {len(ranks) - 6} more' if len(ranks) > 6 else ''}"
