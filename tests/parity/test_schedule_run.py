"""Schedules on real ranks, with pauses for passes, idle as long as the timeline says."""

from collections.abc import Iterator
from typing import Any

import pytest

from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.parallel.schedule import COMPUTE, schedule
from ascend_moe_train.parallel.timeline import EqualStages, simulate
from tests.ranks import run_ranks

NUM_STAGES = 4
# passes long enough that what a busy machine adds to them and to messages stays well below 5 % of the idle time
CASES: dict[ScheduleName, dict[str, Any]] = {
    "1f1b": {"num_micro": 5, "chunks": 1, "durations_s": {"forward_s": 0.15, "backward_s": 0.3}},
    "interleaved": {"num_micro": 4, "chunks": 2, "durations_s": {"forward_s": 0.15, "backward_s": 0.3}},
    "zero_bubble": {
        "num_micro": 5,
        "chunks": 1,
        "durations_s": {"forward_s": 0.35, "backward_s": 0.35, "weight_s": 0.35},
    },
}
TOLERANCE = 0.05


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, list[Any]]]:
    """By schedule, what each rank returns."""
    cases = [{"name": name, **case} for name, case in CASES.items()]
    found = run_ranks(NUM_STAGES, "tests.parity.schedule_worker:mpi_paused", cases, deadline_s=120)
    yield {name: [of_rank[place] for of_rank in found] for place, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_idle_as_simulated(name: ScheduleName, results: dict[str, list[Any]]) -> None:
    of_ranks, case = results[name], CASES[name]
    assert [each["wrong"] for each in of_ranks] == [[]] * NUM_STAGES
    spans_s = [each["spans_s"] for each in of_ranks]
    first_s = min(spans[0][0] for spans in spans_s)
    step_s = max(spans[-1][1] for spans in spans_s) - first_s
    busy_s = sum(end_s - start_s for spans in spans_s for start_s, end_s in spans)
    actions = schedule(name, NUM_STAGES, case["num_micro"], case["chunks"])
    simulated = simulate(actions, EqualStages(**case["durations_s"]))
    assert step_s == pytest.approx(simulated.step_s, rel=TOLERANCE)
    assert 1 - busy_s / step_s / NUM_STAGES == pytest.approx(simulated.bubble_share, rel=TOLERANCE)
    for found, stage in zip(spans_s, simulated.spans, strict=True):
        expected_s = [span.start_s for span in stage if span.action.kind in COMPUTE]
        assert [start_s - first_s for start_s, _ in found] == pytest.approx(expected_s, abs=TOLERANCE * step_s)
