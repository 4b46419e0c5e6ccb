"""What each rank does for test_wire_training.py."""

from typing import Any

from tests.parity.layouts import LAYOUTS, Case
from tests.parity.train_worker import on_rank as train_on_rank

# layouts that train nearly as one process does, and how they are trained
WIRED = {
    "ep2 in bf16": ({"ep": 2, "expert_wire": "bf16", "zero_stage": 1}, ("mixtral", "dropless", 1, "none")),
    "ep2 in fp16": ({"ep": 2, "expert_wire": "fp16", "tp": 2}, ("mixtral", "capacity", 1, "selective")),
    "ep2 in int8 and chunks": (
        {"ep": 2, "expert_wire": "int8", "expert_chunks": 2},
        ("mixtral", "dropless", 2, "full"),
    ),
}


def cases() -> dict[str, Case]:
    """By layout; these are added to LAYOUTS."""
    found = {}
    for layout, (parallel, (model, mode, num_micro, recompute)) in WIRED.items():
        LAYOUTS[layout] = (2, parallel)
        found[layout] = Case(layout=layout, model=model, mode=mode, num_micro=num_micro, recompute=recompute)
    return found


def on_rank(layouts: list[str]) -> list[dict[str, Any]]:
    """What `train_worker.train` says of each."""
    all_cases = cases()
    return train_on_rank([vars(all_cases[layout]) for layout in layouts])
