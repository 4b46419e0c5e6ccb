"""What a rank did when, slimmed for timelines. Pure."""

from collections.abc import Sequence

import numpy as np

from ascend_moe_train.profile.intervals import Intervals
from ascend_moe_train.profile.kernels import Kernels
from ascend_moe_train.profile.tables import Collective, Lane, Span

MAX_SPANS = 2000  # of each kind, the longest
BINS = 400


def spans_of(kernels: Kernels, collectives: Sequence[Collective]) -> tuple[Span, ...]:
    """The longest kernels and the longest collectives, in the order of time."""
    starts, ends = np.frombuffer(kernels.starts, np.int64), np.frombuffer(kernels.ends, np.int64)
    sizes = ends - starts
    longest = np.argsort(-sizes, kind="stable")[:MAX_SPANS]
    found = [
        Span(
            name=kernels.name_list[kernels.names[place]],
            lane="kernels",
            start_ns=int(starts[place]),
            duration_ns=int(sizes[place]),
        )
        for place in longest.tolist()
        if starts[place] > 0
    ]
    timed = sorted((each for each in collectives if each.start_ns > 0), key=lambda each: -each.elapse_ms)[:MAX_SPANS]
    found += [
        Span(name=each.name, lane="collectives", start_ns=each.start_ns, duration_ns=round(each.elapse_ms * 1e6))
        for each in timed
    ]
    return tuple(sorted(found, key=lambda each: (each.start_ns, each.name)))


def lane_of(kernels: Kernels, collectives: Sequence[Collective]) -> Lane | None:
    """Shares of computing and of exposed communication in BINS equal bins; None without time stamps."""
    timed = [each for each in collectives if each.start_ns > 0]
    starts = np.array([each.start_ns for each in timed], np.int64)
    ends = starts + np.array([round(each.elapse_ms * 1e6) for each in timed], np.int64)
    computing = Intervals.union(kernels.starts, kernels.ends)
    order = np.argsort(starts, kind="stable")
    communication = Intervals.merged(starts[order], ends[order])
    both = [each for each in (computing, communication) if len(each.starts) and each.starts[0] > 0]
    if not both:
        return None
    first, last = min(int(each.starts[0]) for each in both), max(int(each.ends[-1]) for each in both)
    bin_ns = max(1, -(-(last - first) // BINS))
    edges = first + bin_ns * np.arange(BINS + 1, dtype=np.int64)
    used = computing.common_ns(edges[:-1], edges[1:])
    moved = np.minimum(communication.common_ns(edges[:-1], edges[1:]), bin_ns - used)
    return Lane(
        start_ns=first,
        bin_ns=bin_ns,
        computing=tuple(np.round(100 * used / bin_ns).astype(int).tolist()),
        communication=tuple(np.round(100 * moved / bin_ns).astype(int).tolist()),
    )
