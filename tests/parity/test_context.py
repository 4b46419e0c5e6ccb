"""Attention of sequences that ranks share equals that of whole sequences: outputs, gradients, payloads, order."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.oracle.arrays import F64
from tests.oracle.differences import relative_error
from tests.parity.context_cases import CASES, Case, expected
from tests.ranks import run_ranks

TOLERANCE, FP16_TOLERANCE = 1e-5, 2e-2
DEADLINE_S = 600.0


# On two ranks everything is quick; of what is as on two, four ranks have it in `make test-all`.
SLOW = ("ring 4, values of another size", "ring 4, fp16", "ulysses 4, values of another size", "ulysses 4, fp16")
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)


@cache
def all_found(ranks: int, slow: bool) -> list[Any]:
    names = [name for name, case in CASES.items() if case.ranks == ranks and (name in SLOW) == slow]
    return run_ranks(ranks, "tests.parity.context_worker:on_rank", names, deadline_s=DEADLINE_S)


def found(name: str) -> list[dict[str, Any]]:
    return [result[name] for result in all_found(CASES[name].ranks, name in SLOW)]


def whole(case: Case, key: str) -> F64:
    """Put together by places; the ranks' gradients of sinks are added up."""
    results = [result[key].astype(np.float64) for result in found(case.name)]
    if key == "dsink":
        total: F64 = np.sum(results, axis=0)
        return total
    sequences: F64 = np.full((case.sequences, case.seq_len, *results[0].shape[2:]), np.nan)
    for rank, result in enumerate(results):
        sequences[:, case.rows(rank)] = result
    return sequences


@EACH
def test_output_and_gradients_are_those_of_whole_sequences(name: str) -> None:
    case = CASES[name]
    tolerance = TOLERANCE if case.precision == "fp32" else FP16_TOLERANCE
    errors = {
        key: relative_error(whole(case, key), value)
        for key, value in expected(case).items()
        if key != "dsink" or case.has_sinks
    }
    assert {key: error for key, error in errors.items() if not error < tolerance} == {}


@EACH
def test_order_is_the_same_on_every_rank(name: str) -> None:
    first, *others = [result["calls"] for result in found(name)]
    assert others == [first] * len(others)


@EACH
def test_bytes_are_those_of_the_formula(name: str) -> None:
    """The docstrings of Ring and UlyssesKernels."""
    case = CASES[name]
    n, itemsize = case.ranks, 4 if case.precision == "fp32" else 2
    tokens = case.sequences * case.seq_len // n
    seen: dict[tuple[str, str], int] = {}
    for verb, group, payload_bytes in found(name)[0]["calls"]:
        seen[verb, group] = seen.get((verb, group), 0) + payload_bytes
    if case.context == "ring":
        kv = tokens * case.kv_heads * (case.size + case.value_size)
        assert seen == {("all_to_all_v", "cp"): (2 * (n - 1) * itemsize + n * 4) * kv}
        return
    kv_heads = max(n, case.kv_heads)
    per_token = (case.heads + kv_heads) * (case.size + case.value_size)
    assert seen == {
        ("all_to_all", "cp"): 2 * tokens * per_token * itemsize,
        ("all_gather", "cp"): 4 * tokens,
    }
