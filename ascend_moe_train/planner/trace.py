"""A simulated step as a Chrome trace, for chrome://tracing or ui.perfetto.dev. Pure."""

from collections.abc import Iterator

from ascend_moe_train.parallel.schedule import COMPUTE, SENT_BY
from ascend_moe_train.parallel.timeline import Timeline

_US = 1e6


def chrome_trace(timeline: Timeline, title: str) -> dict[str, object]:
    """JSON-able: one process for the plan, one thread for each pipeline stage; passes, and waits for messages.

    Format: "Trace Event Format" of the Chromium project, complete events ("ph": "X"), times in microseconds.
    """
    events = [*_names(title, len(timeline.spans)), *_events(timeline)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(title: str, num_stages: int) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}
    for stage in range(num_stages):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}


def _events(timeline: Timeline) -> Iterator[dict[str, object]]:
    for stage, spans in enumerate(timeline.spans):
        for span in spans:
            action = span.action
            if action.kind not in COMPUTE and (action.kind not in SENT_BY or span.end_s <= span.start_s):
                continue
            yield {
                "ph": "X",
                "name": str(action.kind) if action.kind in COMPUTE else f"wait: {action.kind}",
                "cat": "pass" if action.kind in COMPUTE else "wait",
                "pid": 0,
                "tid": stage,
                "ts": span.start_s * _US,
                "dur": (span.end_s - span.start_s) * _US,
                "args": {"micro": action.micro, "chunk": action.chunk},
            }
