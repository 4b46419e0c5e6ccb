"""All ranks on one time line, as a Chrome trace for ui.perfetto.dev. Pure."""

from collections.abc import Iterator
from typing import Any

from ascend_moe_train.profile.analysis import Analysis

_LANES = ("kernels", "collectives", "critical path")


def merged_trace(analysis: Analysis) -> dict[str, Any]:
    """A process for each rank, with its longest kernels and collectives; clocks aligned, 0 is the first of all spans.

    Format: "Trace Event Format" of the Chromium project, complete events ("ph": "X"), times in microseconds.
    """
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(analysis), *_events(analysis)]}


def _names(analysis: Analysis) -> Iterator[dict[str, Any]]:
    for rank in analysis.ranks:
        stage = analysis.layout.stages.get(rank.rank)
        name = f"rank {rank.rank}" + ("" if stage is None else f", stage {stage}")
        yield {"ph": "M", "name": "process_name", "pid": rank.rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank.rank, "args": {"sort_index": rank.rank}}
        for place, lane in enumerate(_LANES):
            yield {"ph": "M", "name": "thread_name", "pid": rank.rank, "tid": place, "args": {"name": lane}}


def _events(analysis: Analysis) -> Iterator[dict[str, Any]]:
    offsets = analysis.matching.offsets_ns
    starts = [span.start_ns - offsets.get(rank.rank, 0) for rank in analysis.ranks for span in rank.spans]
    first_ns = min(starts, default=0)
    for rank in analysis.ranks:
        for span in rank.spans:
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.lane,
                "pid": rank.rank,
                "tid": _LANES.index(span.lane),
                "ts": (span.start_ns - offsets.get(rank.rank, 0) - first_ns) / 1e3,
                "dur": span.duration_ns / 1e3,
            }
    for part in analysis.path:
        yield {
            "ph": "X",
            "name": part.what,
            "cat": "critical path",
            "pid": part.rank,
            "tid": _LANES.index("critical path"),
            "ts": (part.start_ms * 1e6 + analysis.path_start_ns - first_ns) / 1e3,
            "dur": (part.end_ms - part.start_ms) * 1e3,
        }
