"""Operators over all ranks: by type, by shape, with what bounds them; and how stages differ in them. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ascend_moe_train.profile.metrics import weighted
from ascend_moe_train.profile.tables import CUBE_CORES, PIPES, KernelGroup, Rank

TOP = 15
PIPE_WORDS = {
    "mac": "cube",
    "vec": "vector",
    "scalar": "scalar",
    "mte1": "L1 (mte1)",
    "mte2": "loading (mte2)",
    "mte3": "storing (mte3)",
    "fixpipe": "storing (fixpipe)",
}


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Kernels of one type, or of one type and shapes; a rank and step, mean over the ranks that have kernels. `share`
    is of all their compute kernels."""

    type: str
    core: str
    shapes: str
    count: float
    total_ms: float
    mean_us: float
    share: float
    bound: str | None
    ratio: float | None


def top_types(ranks: Sequence[Rank]) -> list[Operator]:
    """Longest first; the same type on several cores is one."""
    return _top(ranks, lambda each: (each.type, ""))


def top_shapes(ranks: Sequence[Rank]) -> list[Operator]:
    """Longest first, told apart by the shapes of inputs; none where shapes were not recorded."""
    found = _top(ranks, lambda each: (each.type, each.shapes))
    return found if any(each.shapes for each in found) else []


def _top(ranks: Sequence[Rank], key_of: Callable[[KernelGroup], tuple[str, str]]) -> list[Operator]:
    with_kernels = [rank for rank in ranks if rank.kernels]
    groups: dict[tuple[str, str], list[tuple[KernelGroup, int]]] = defaultdict(list)
    total_us = 0.0
    for rank in with_kernels:
        for each in rank.kernels:
            groups[key_of(each)].append((each, rank.num_steps))
            total_us += each.total_us / rank.num_steps
    found = []
    for (kind, shapes), members in groups.items():
        time_us = sum(each.total_us / steps for each, steps in members)
        count = sum(each.count / steps for each, steps in members)
        main = max(members, key=lambda pair: pair[0].total_us)[0]
        alike = [each for each, _ in members if (each.core in CUBE_CORES) == (main.core in CUBE_CORES)]
        ratios = {pipe: weighted(alike, pipe) or 0.0 for pipe in PIPES}
        pipe = max(ratios, key=lambda name: ratios[name])
        found.append(
            Operator(
                type=kind,
                core="+".join(sorted({each.core for each, _ in members if each.core})),
                shapes=shapes,
                count=count / len(with_kernels),
                total_ms=time_us / 1e3 / len(with_kernels),
                mean_us=time_us / count if count else 0.0,
                share=time_us / total_us if total_us else 0.0,
                bound=PIPE_WORDS[pipe] if ratios[pipe] else None,
                ratio=ratios[pipe] or None,
            )
        )
    return sorted(found, key=lambda each: -each.total_ms)[:TOP]


def type_times_ms(ranks: Iterable[Rank]) -> dict[str, float]:
    """Type -> ms a step, mean over the given ranks that have kernels."""
    with_kernels = [rank for rank in ranks if rank.kernels]
    found: dict[str, float] = defaultdict(float)
    for rank in with_kernels:
        for each in rank.kernels:
            found[each.type] += each.total_us / 1e3 / rank.num_steps / len(with_kernels)
    return dict(found)


def core_time_ms(rank: Rank, *, cube: bool) -> float:
    """Time of kernels on cube cores, or on any other, a step."""
    return (
        sum(each.total_us for each in rank.kernels if (each.core in CUBE_CORES) == cube and each.core)
        / 1e3
        / rank.num_steps
    )
