"""Data parallel training in every stage of ZeRO, on several processes, is the training of one process."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.parallel.comm import LocalComm
from tests.oracle.differences import relative_error
from tests.parity.zero_cases import ALONE, CASES, ON_FOUR, ON_TWO, Case
from tests.parity.zero_worker import run_case, squares_of_shares
from tests.ranks import run_ranks

DEADLINE_S = 1800.0
TOLERANCE = 1e-5
# Of what gradients travel in: the largest relative error of rounding, and half the smallest number.
ROUNDOFF = {"fp16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134)}

ON = {2: [case.name for case in ON_TWO], 4: [case.name for case in ON_FOUR]}
# every stage, small buckets, moments on the host, adapters, what is rounded on its way in both kinds of sums
QUICK = {
    CASES[name].name
    for name in (
        "2 ranks, stage 0, 2 micro",
        "2 ranks, stage 1, 2 micro, offload_optimizer True",
        "2 ranks, stage 2, 2 micro, bucket_bytes 300",
        "2 ranks, stage 3, 1 micro, bucket_bytes 300, offload_optimizer True, model tied",
        "2 ranks, stage 3, 2 micro, has_adapters True",
        "2 ranks, stage 0, 1 micro, reduce_dtype bf16",
        "2 ranks, stage 2, 1 micro, reduce_dtype fp16",
    )
}
ROUNDED = [name for name in ON[2] if "reduce_dtype" in CASES[name].options]


def each(names: Iterable[str]) -> Any:
    """Parameters of a test; those that are slow are marked."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=slow) for n in names])


@cache
def of_ranks(ranks: int, quick: bool) -> list[dict[str, Any]]:
    """Results of all such cases on so many ranks, of each rank: one start of processes."""
    names = [name for name in ON[ranks] if (name in QUICK) == quick]
    return run_ranks(ranks, "tests.parity.zero_worker:on_rank", names, deadline_s=DEADLINE_S)


def results(case: Case) -> list[dict[str, Any]]:
    return [each[case.name] for each in of_ranks(case.ranks, case.name in QUICK)]


ONE_PROCESS = {case.reference.name: case.reference for case in (ALONE, *CASES.values())}


@cache
def of_one_process(name: str) -> dict[str, Any]:
    return run_case(ONE_PROCESS[name], LocalComm())


def whole(parts: list[dict[str, Any]], kind: str) -> Any:
    """A tensor from what its owners have of it, without the zeros at the end."""
    shape = parts[0]["shape"]
    flat = np.full(int(np.prod(shape)), np.nan, np.float32)
    for part in parts:
        flat[part["start"] : part["stop"]] = part[kind].reshape(-1)[: part["stop"] - part["start"]]
    return flat.reshape(shape)


def assert_equal_steps(expected: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Figures and squares of all steps on each rank, and weights and moments after them."""
    for rank in found:
        assert rank["steps"] == [pytest.approx(each, rel=TOLERANCE) for each in expected["steps"]]
        assert rank["squares"] == [pytest.approx(each, rel=TOLERANCE) for each in expected["squares"]]
        assert all(each["applied"] for each in rank["steps"])
    assert found[0]["state"]["owned"].keys() == expected["state"]["owned"].keys()
    for tensor, one in expected["state"]["owned"].items():
        parts = [rank["state"]["owned"][tensor] for rank in found]
        for kind in ("weight", "first", "second"):
            assert relative_error(whole(parts, kind), whole([one], kind)) < TOLERANCE, (tensor, kind)


@each(name for name in CASES if name not in ROUNDED)
def test_steps_equal_those_of_one_process(name: str) -> None:
    case = CASES[name]
    assert_equal_steps(of_one_process(case.reference.name), results(case))


def test_alone_there_is_nothing_to_share() -> None:
    found = run_case(ALONE, LocalComm())
    assert_equal_steps(of_one_process(ALONE.reference.name), [found])
    assert (found["skipped"], found["same"], found["refilled"]) == ([0.0, 0.0], True, True)
    assert (found["sent"], found["bytes"]) == ({}, found["expected_bytes"])
    tensors = found["state"]["owned"].items()
    assert all(np.array_equal(found["state"]["read"][tensor], owned["weight"]) for tensor, owned in tensors)


@each(ROUNDED)
def test_gradients_are_rounded_once_on_their_way(name: str) -> None:
    """Each element of each rank is, and of an all_reduce the sum too: a tensor's error is at most `relative` times the
    sum of the norms of what the ranks bring, and what is too small is off by `least` at most."""
    case = CASES[name]
    relative, least = ROUNDOFF[case.options["reduce_dtype"]]
    times = 2.01 if case.options["zero_stage"] == 0 else 1.0
    exact, found = of_one_process(case.reference.name), results(case)[0]
    assert found["steps"][0]["loss"] == pytest.approx(exact["steps"][0]["loss"], rel=TOLERANCE)
    brought = squares_of_shares(case)
    errors = []
    for tensor, square in exact["squares"][0].items():
        norm, size = square**0.5, exact["state"]["owned"][tensor]["weight"].size
        bound = relative * sum(each[tensor] ** 0.5 for each in brought) + case.ranks * size**0.5 * least
        errors.append(abs(found["squares"][0][tensor] ** 0.5 - norm) / norm)
        assert errors[-1] * norm < times * bound + TOLERANCE * norm, tensor
    assert max(errors) > TOLERANCE


@each(CASES)
def test_what_the_model_reads_is_what_the_owners_have(name: str) -> None:
    found = results(CASES[name])
    for tensor in found[0]["state"]["owned"]:
        owners = whole([rank["state"]["owned"][tensor] for rank in found], "weight")
        for rank in found:
            read = rank["state"]["read"][tensor]
            if read.shape == owners.shape:
                np.testing.assert_array_equal(read, owners, tensor)
            else:
                np.testing.assert_array_equal(read, rank["state"]["owned"][tensor]["weight"], tensor)


@each(CASES)
def test_padding_stays_zero(name: str) -> None:
    for rank in results(CASES[name]):
        for tensor, part in rank["state"]["owned"].items():
            for kind in ("weight", "first", "second"):
                assert not part[kind].reshape(-1)[part["stop"] - part["start"] :].any(), (tensor, kind)


@each(CASES)
def test_a_skipped_step_changes_no_bit(name: str) -> None:
    for rank in results(CASES[name]):
        assert rank["skipped"] == [0.0, 0.0]
        assert rank["same"]


@each(CASES)
def test_ranks_make_the_same_calls_in_every_step(name: str) -> None:
    found = results(CASES[name])
    first = found[0]["calls"][0]
    assert len(first) > 0
    assert [rank["calls"] for rank in found] == [[first] * len(found[0]["calls"])] * len(found)


@each(CASES)
def test_traffic_is_the_closed_form(name: str) -> None:
    for rank in results(CASES[name]):
        if CASES[name].has_adapters:  # the formula is an upper bound there
            assert rank["sent"].keys() == rank["expected_sent"].keys()
            assert all(value <= rank["expected_sent"][key] for key, value in rank["sent"].items())
        else:
            assert rank["sent"] == rank["expected_sent"]


@each(CASES)
def test_memory_is_the_closed_form(name: str) -> None:
    for rank in results(CASES[name]):
        assert rank["bytes"] == rank["expected_bytes"]


@each(CASES)
def test_weights_follow_parts_that_come_from_elsewhere(name: str) -> None:
    assert all(rank["refilled"] for rank in results(CASES[name]))
