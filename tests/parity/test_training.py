"""Every layout trains as one process does: losses, gradients, norms, weights, drops and balance biases."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.counts import moe_layers
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.parallel.recomputed import passes, runs_again
from ascend_moe_train.parallel.traffic import model_sent
from ascend_moe_train.train.persist import FIRST, SECOND
from tests.oracle.differences import relative_error
from tests.parity.layouts import COMPOSED, NAMED, STEPS, Case
from tests.parity.train_worker import train
from tests.ranks import run_ranks

TOLERANCE = 1e-5
# of a whole model: what five steps of rounding have made of the moments. Nothing else has it
MOMENTS_TOLERANCE = 1e-4
MOST_CASES = {2: 5, 4: 3, 8: 4}
Array = NDArray[Any]


@cache
def reference(case: Case) -> dict[str, Any]:
    return train(case)


def assembled(by_rank: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Whole tensors from what the ranks own, every element from one rank."""
    found = {}
    for name, shape in shapes.items():
        value, times = np.full(shape, np.nan), np.zeros(shape, np.int64)
        for pieces in by_rank:
            for piece in pieces.get(name, []):
                at = tuple(slice(*each) for each in piece["box"])
                value[at] = piece["value"]
                times[at] += 1
        assert (times == 1).all(), name
        found[name] = value
    return found


def assert_equal_to_one_process(case: Case, by_rank: Sequence[Mapping[str, Any]]) -> None:
    expected = reference(case.reference)
    for rank, result in enumerate(by_rank):
        for step, (found, wanted) in enumerate(zip(result["figures"], expected["figures"], strict=True), 1):
            where = f"rank {rank}, step {step}"
            for name in ("loss", "mtp_loss", "total_loss", "aux_loss", "z_loss", "grad_norm"):
                assert found[name] == pytest.approx(wanted[name], rel=TOLERANCE), f"{where}: {name}"
            assert found["num_dropped"] == wanted["num_dropped"], where
            np.testing.assert_array_equal(found["counts_LE"], wanted["counts_LE"], err_msg=where)
            assert found["squares"] == pytest.approx(wanted["squares"], rel=2 * TOLERANCE), where
            assert found["applied"]
    for after in (1, STEPS):
        key = str(after - 1)
        one = {name: pieces[0]["value"] for name, pieces in expected["pieces"][key].items()}
        many = assembled(
            [result["pieces"][key] for result in by_rank], {name: value.shape for name, value in one.items()}
        )
        # after the first step, first moments are the clipped gradients times 1 - beta1; second ones are their squares
        errors = {
            name: relative_error(*(np.sqrt(x) if name.startswith(SECOND) else x for x in (many[name], one[name])))
            for name in one
        }
        is_late = after == STEPS
        wrong = {
            name: error
            for name, error in errors.items()
            if error > (MOMENTS_TOLERANCE if is_late and name.startswith((FIRST, SECOND)) else TOLERANCE)
        }
        assert wrong == {}, f"after step {after}"


def assert_same_order(case: Case, by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Ranks of a stage call the same verbs on their groups in the same order, in every step after the first alike."""
    mesh = mesh_of(case.run(), len(by_rank))
    orders: dict[int, list[Any]] = defaultdict(list)
    for rank, result in enumerate(by_rank):
        verbs = [[tuple(key) for *key, _ in calls] for calls in result["calls"]]
        assert verbs[1:] == verbs[1:2] * (STEPS - 1), case.name
        orders[mesh.coordinates(rank).pp].append(verbs[1])
    for of_stage in orders.values():
        assert all(order == of_stage[0] for order in of_stage), case.name


def assert_payloads_are_as_computed(case: Case, by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Of all ranks together, in every step."""
    config = case.run()
    mesh = mesh_of(config, len(by_rank))
    of_weights = totals(each for result in by_rank for each in result["expected"])
    for step, figures in enumerate(by_rank[0]["figures"]):
        found = totals(each for result in by_rank for each in result["calls"][step])
        # dropped are known of all layers together: that is enough where micro-batches go through all equally often
        accepted = [int(counts.sum()) for counts in figures["counts_LE"]]
        accepted[-1] -= figures["num_dropped"]
        told = sum(result["crossing"][step] for result in by_rank)
        sent = model_sent(config, mesh, accepted, crossing_of(config, told) if told else ())
        expected: dict[tuple[str, ...], int] = {tuple(key): size_bytes for key, size_bytes in sent.items()}
        for key, size_bytes in of_weights.items():
            expected[key] = expected.get(key, 0) + size_bytes
        if figures["num_dropped"] and mesh.pp > 1:
            for each in (found, expected):
                each.pop(("all_to_all_v", "ep", "expert rows"), None)
        wrong = {key: (found.get(key, 0), expected.get(key, 0)) for key in found | expected}
        assert all(one == other for one, other in wrong.values()), f"found and expected: {wrong}"


def crossing_of(config: RunConfig, told: int) -> list[int]:
    """Rows that cross to nodes once, of all layers together, from how many ranks tell each other of in all passes."""
    layers = moe_layers(config.model)
    both = [(passes(config, prefix), runs_again(config, int(prefix.split(".")[1]))) for prefix in layers]
    [times] = {forward + backward * again for (forward, backward), again in both}
    assert told % times == 0
    return [0] * (len(layers) - 1) + [told // times]


def totals(calls: Iterable[Sequence[Any]]) -> dict[tuple[str, ...], int]:
    """By verb, group and content."""
    found: dict[tuple[str, ...], int] = defaultdict(int)
    for *key, size_bytes in calls:
        found[tuple(key)] += size_bytes
    return dict(found)


def check(cases: list[Case]) -> None:
    """Of one number of ranks."""
    of_ranks = run_ranks(
        cases[0].num_ranks, "tests.parity.train_worker:on_rank", [asdict(case) for case in cases], deadline_s=900
    )
    wrong = []
    for number, case in enumerate(cases):
        by_rank = [results[number] for results in of_ranks]
        try:
            assert_equal_to_one_process(case, by_rank)
            assert_same_order(case, by_rank)
            assert_payloads_are_as_computed(case, by_rank)
        except AssertionError as error:
            wrong.append(f"{case.name}: {error}")
    assert not wrong, "\n".join(wrong)


def batches(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """By number of ranks, a few at a time: compiled graphs fill the memory of the processes that go through them."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        number = 1
        while len(found.get(f"{case.num_ranks} ranks, {number}", ())) == MOST_CASES[case.num_ranks]:
            number += 1
        found.setdefault(f"{case.num_ranks} ranks, {number}", []).append(case)
    return found


# Between them and the quick runs of test_reshard.py is every form of parallel.
QUICK = [
    next(case for case in COMPOSED if case.layout == layout)
    for layout in (
        "2 ranks tp2 zero_stage=1",
        "2 ranks cp2 zero_stage=3 context=ulysses",
        "2 ranks etp2 zero_stage=2",
        "2 ranks pp2 zero_stage=1 schedule=zero_bubble",
        "4 ranks cp2 etp2 zero_stage=3 context=ring",
    )
]
FEW, MIXED, EVERY = batches(QUICK), batches(case for case in COMPOSED if case not in QUICK), batches(NAMED)


@pytest.mark.parametrize("batch", FEW)
def test_some_random_layouts_train_as_one_process_does(batch: str) -> None:
    check(FEW[batch])


@pytest.mark.slow
@pytest.mark.parametrize("batch", MIXED)
def test_random_layouts_train_as_one_process_does(batch: str) -> None:
    check(MIXED[batch])


@pytest.mark.slow
@pytest.mark.parametrize("batch", EVERY)
def test_every_layout_trains_as_one_process_does(batch: str) -> None:
    check(EVERY[batch])
