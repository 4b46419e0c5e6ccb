"""What msprof-analyze merged over ranks, for those of which nothing else is there. Pure."""

from pathlib import Path

from ascend_moe_train.profile.communication import read_cluster_communication
from ascend_moe_train.profile.database import opened
from ascend_moe_train.profile.steps import step_columns, step_of_cells
from ascend_moe_train.profile.tables import Collective, Rank, Step
from ascend_moe_train.profile.text import Sheet

_STEPS = "cluster_step_trace_time.csv"
_COLLECTIVES = "cluster_communication.json"
_DATABASE = "cluster_analysis.db"


def read_cluster_output(place: Path) -> list[Rank]:
    """cluster_analysis_output: a rank for each row of type `rank`. Raises ProfileError."""
    steps: dict[int, list[Step]] = {}
    if (place / _STEPS).is_file():
        steps = _steps(place / _STEPS)
    elif (place / _DATABASE).is_file():
        with opened(place / _DATABASE) as database:
            if database.has("ClusterStepTraceTime"):
                steps = database.cluster_steps()
    path = place / _COLLECTIVES
    collectives: dict[int, list[Collective]] = read_cluster_communication(path) if path.is_file() else {}
    return [
        Rank(
            rank=rank,
            writer="msprof-analyze",
            folder=place.name,
            steps=tuple(steps.get(rank, ())),
            collectives=tuple(collectives.get(rank, ())),
            sources={"steps": _STEPS, **({"collectives": _COLLECTIVES} if rank in collectives else {})},
        )
        for rank in sorted({*steps, *collectives})
    ]


def _steps(path: Path) -> dict[int, list[Step]]:
    sheet = Sheet(path)
    kind, index, step = sheet.need("Type"), sheet.need("Index"), sheet.need("Step")
    places = step_columns(sheet)
    found: dict[int, list[Step]] = {}
    for row, cells in sheet.rows():
        if cells[kind].strip() == "rank" and cells[index].strip().isdecimal() and len(cells[index].strip()) < 8:
            found.setdefault(int(cells[index]), []).append(
                step_of_cells(sheet, row, cells, places, cells[step].strip())
            )
    return found
