"""How each step of a rank was spent, from step_trace_time.csv or from the intervals themselves. Pure."""

from pathlib import Path

from ascend_moe_train.profile.intervals import Intervals
from ascend_moe_train.profile.kernels import Kernels
from ascend_moe_train.profile.tables import Step
from ascend_moe_train.profile.text import MAX_US, Sheet

US_PER_MS = 1000.0
_COLUMNS = {
    "computing_us": "Computing",
    "exposed_us": "Communication(Not Overlapped)",
    "overlapped_us": "Overlapped",
    "free_us": "Free",
}


def read_step_trace(path: Path, device: str | None = None) -> list[Step]:
    """The rows of step_trace_time.csv. Stage and Bubble are kept as written, under these names. Raises ProfileError."""
    sheet = Sheet(path)
    places = {key: sheet.need(name) for key, name in _COLUMNS.items()}
    step_at, device_at = sheet.find("Step"), sheet.find("Device_id")
    steps = []
    for row, cells in sheet.rows():
        if device is not None and device_at is not None and cells[device_at].strip() != device:
            continue
        steps.append(step_of_cells(sheet, row, cells, places, cells[step_at].strip() if step_at is not None else ""))
    return steps


def step_columns(sheet: Sheet) -> dict[str, int]:
    """Where the parts of a step are. Raises ProfileError without them."""
    return {key: sheet.need(name) for key, name in _COLUMNS.items()}


def step_of_cells(sheet: Sheet, row: int, cells: list[str], places: dict[str, int], step: str) -> Step:
    """One row. A `Preparing` that is longer than the step is none (the first operator was missed)."""
    parts = {key: sheet.number(cells, row, place, _COLUMNS[key]) or 0.0 for key, place in places.items()}
    most = MAX_US * 1e3  # a time stamp instead of a duration is found in Preparing
    preparing_at = sheet.find("Preparing")
    preparing = None
    if preparing_at is not None and cells[preparing_at].strip():
        value = float(cells[preparing_at]) if _is_number(cells[preparing_at]) else -1.0
        e2e_us = parts["computing_us"] + parts["exposed_us"] + parts["free_us"]
        preparing = value if 0 <= value <= min(e2e_us, most) else None
    return Step(
        step=step,
        **parts,
        source=sheet.path.name,
        preparing_us=preparing,
        stage_written_us=sheet.number(cells, row, sheet.find("Stage"), "Stage"),
        bubble_written_us=sheet.number(cells, row, sheet.find("Bubble"), "Bubble"),
    )


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def step_of_kernels(kernels: Kernels, source: str) -> Step | None:
    """One step from all kernels together: unions of intervals, free what is neither between first and last."""
    computing = Intervals.union(kernels.starts, kernels.ends)
    communication = Intervals.union(kernels.comm_starts, kernels.comm_ends)
    return step_of_intervals(computing, communication, source)


def step_of_intervals(computing: Intervals, communication: Intervals, source: str, step: str = "") -> Step | None:
    """See `step_of_kernels`; None without any."""
    both = [each for each in (computing, communication) if len(each.starts)]
    if not both:
        return None
    overlapped_ns = computing.common_with(communication)
    exposed_ns = communication.total_ns - overlapped_ns
    window_ns = int(max(each.ends[-1] for each in both)) - int(min(each.starts[0] for each in both))
    return Step(
        step=step,
        computing_us=computing.total_ns / 1e3,
        exposed_us=exposed_ns / 1e3,
        overlapped_us=overlapped_ns / 1e3,
        free_us=(window_ns - computing.total_ns - exposed_ns) / 1e3,
        source=source,
    )
