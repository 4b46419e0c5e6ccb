"""Layers of experts over ranks against the fp64 oracle of the whole: outputs, gradients, drops, figures, order, bytes.

Shape letters: see expert_cases.py.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.parallel.comm import LocalComm
from ascend_moe_train.parallel.places import token_order
from tests.model_run import uniform
from tests.oracle.arrays import F64
from tests.oracle.differences import relative_error
from tests.parity.expert_cases import (
    CASES,
    DISPATCHED,
    EVEN,
    HIDDEN,
    NUM_EXPERTS,
    SKEWED,
    TWINS,
    Case,
    Expected,
    crossing,
    expected,
    own_tokens,
    own_weight,
    receive_rows,
    rows_between,
)
from tests.parity.expert_worker import NOISE_SEED, layer_results
from tests.ranks import run_ranks

TOLERANCE = 1e-5
# of one layer with rows in fp16, whose rounding is 2^-11
FP16_TOLERANCE = 4e-3
DEADLINE_S = 600.0
# what a number may move by on its way, of the largest of its row; where fp32 and fp64 fall on two sides of a boundary,
# they differ by so much
STEPS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 1.0 / 127.0}
FP32 = [name for name, case in CASES.items() if case.precision == "fp32"]
WHOLE = [name for name, case in CASES.items() if case.wire is None]
ROUNDED = [name for name in CASES if name not in WHOLE]
ROUTINGS = (EVEN, SKEWED)
# what `make test` runs on 4 ranks: a case of every kind of exchange, of room and of cuts
QUICK = {"ep4", "ep4, bound", "ep4 in two steps, bound", "ep2 x etp2, bound", "tp2, ep2 x edp2, capacity"}
# and does not on 2: what is bound on 4, another number of chunks, the simplest way to fewer bits
SLOW = {"ep2, bound", "ep2, top-1, 4 chunks", "ep2, bf16 wire"}
BOTH = pytest.mark.parametrize("routing", ROUTINGS)


def is_slow(name: str) -> bool:
    return name in SLOW if CASES[name].ranks == 2 else name not in QUICK


def each(names: Iterable[str]) -> Any:
    """Parameters of a test; those that are slow are marked."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize("name", [pytest.param(n, marks=slow) if is_slow(n) else n for n in names])


@cache
def launched(ranks: int, *, slow: bool) -> list[Any]:
    names = [name for name, case in CASES.items() if case.ranks == ranks and is_slow(name) == slow]
    return run_ranks(ranks, "tests.parity.expert_worker:on_rank", names, deadline_s=DEADLINE_S)


def found(name: str, routing: str) -> list[dict[str, Any]]:
    """By rank."""
    return [result[name][routing] for result in launched(CASES[name].ranks, slow=is_slow(name))]


@cache
def wanted(name: str, routing: str) -> Expected:
    case = CASES[name]
    noise_UD: F64 | None = None
    if case.moe_config.jitter > 0:
        noise_UD = uniform((case.num_tokens * case.ranks, HIDDEN), NOISE_SEED * 8191, case.moe_config.jitter)
    return expected(case, routing, noise_UD)


def whole(name: str, routing: str, key: str) -> Any:
    case, results = CASES[name], found(name, routing)
    x_UD = np.zeros((case.num_tokens * case.ranks, HIDDEN), results[0][key].dtype)
    for rank, result in enumerate(results):
        x_UD[own_tokens(case, rank)] = result[key]
    return x_UD


def gathered(name: str, routing: str, weight: str) -> F64:
    """A weight's gradient: parts put together, and what several ranks have of one part added up."""
    mesh = CASES[name].mesh
    total: F64 = np.zeros(wanted(name, routing).grads[weight].shape)
    for rank, result in enumerate(found(name, routing)):
        index = own_weight(weight, mesh.coordinates(rank), mesh)
        assert (index is None) == (weight not in result["grads"])
        if index is not None:
            total[index] += result["grads"][weight]
    return total


def pairs(name: str, routing: str) -> dict[str, tuple[Any, Any]]:
    """What was found, and what should be."""
    right = wanted(name, routing)
    both = {
        "y": (whole(name, routing, "y"), right.output.y_TD),
        "dx": (whole(name, routing, "dx"), right.dx_UD),
    } | {weight: (gathered(name, routing, weight), grad) for weight, grad in right.grads.items()}
    for rank, result in enumerate(found(name, routing)):
        both[f"balance of rank {rank}"] = (result["balance"], np.array([right.balance]))
        both[f"z of rank {rank}"] = (result["z"], np.array([right.z]))
    return both


@BOTH
@each(WHOLE)
def test_outputs_and_gradients(name: str, routing: str) -> None:
    tolerance = TOLERANCE if name in FP32 else FP16_TOLERANCE
    errors = {key: relative_error(*pair) for key, pair in pairs(name, routing).items()}
    wrong = {key: error for key, error in errors.items() if not error < tolerance}
    assert wrong == {}


@BOTH
@each(ROUNDED)
def test_rows_in_fewer_bits(name: str, routing: str) -> None:
    """As the oracle with the same roundings; without them most numbers would be others."""
    wire = CASES[name].wire
    assert wire is not None
    for key, (found, right) in pairs(name, routing).items():
        off = np.abs(found - right) / np.abs(right).max()
        assert off.max() < 2.0 * STEPS[wire], key
        # sums of a node are rounded, where the oracle rounds what is summed
        is_alike = CASES[name].precision == "fp32" and CASES[name].dedup != "sums"
        assert (off > TOLERANCE).mean() < 0.4 or not is_alike, key


@BOTH
@each(CASES)
def test_drops_are_those_of_the_whole(name: str, routing: str) -> None:
    case, plan = CASES[name], wanted(name, routing).output.dispatch
    dropped_UK = ~plan.kept_N.reshape(-1, case.moe_config.top_k)
    per_rank = [int(dropped_UK[own_tokens(case, rank)].sum()) for rank in range(case.ranks)]
    assert [int(result["dropped"][0]) for result in found(name, routing)] == per_rank
    can_drop = case.moe_config.capacity_factor is not None or case.receive_factor is not None
    assert (plan.dropped > 0) == can_drop


@BOTH
@each(CASES)
def test_counts_are_those_of_the_whole_on_every_rank(name: str, routing: str) -> None:
    case, expert_UK = CASES[name], wanted(name, routing).output.routing.expert_TK
    rows = case.sequences * case.mesh.dp if case.moe_config.aux_loss_scope == "sequence" else 1
    counts_BE = [np.bincount(row, minlength=NUM_EXPERTS).tolist() for row in expert_UK.reshape(rows, -1)]
    assert [result["counts"].tolist() for result in found(name, routing)] == [counts_BE] * case.ranks


def test_skewed_routing_is_extreme() -> None:
    assert wanted("ep2, top-1", SKEWED).output.dispatch.count_E.tolist() == [0, 0, 0, 0, 0, 24, 0, 0]
    assert wanted("ep4", SKEWED).output.dispatch.count_E[[0, 5]].tolist() == [0, 48]


@BOTH
def test_half_precision_is_that_of_one_process(routing: str) -> None:
    """Bit for bit: rows do not depend on who computes them."""
    name = "ep2, fp16"
    alone = layer_results(CASES[name], LocalComm())[routing]
    for key in ("y", "dx"):
        assert whole(name, routing, key).dtype == np.float16
        assert np.array_equal(whole(name, routing, key), alone[key]), key


@BOTH
@each(TWINS)
def test_another_way_gives_the_same_bits(name: str, routing: str) -> None:
    """Rows in chunks, or by way of their node, are those of one exchange; outputs and all gradients too."""
    for mine, other in zip(found(name, routing), found(TWINS[name], routing), strict=True):
        assert len(mine["calls"]) > len(other["calls"])
        for key in set(other) - {"calls", "grads"}:
            assert np.array_equal(mine[key], other[key]), key
        for weight, grad in other["grads"].items():
            assert np.array_equal(mine["grads"][weight], grad), weight


def test_experts_see_their_tokens_in_order() -> None:
    """As they lie in one process, without those turned away."""
    results = launched(4, slow=False)
    for name in DISPATCHED:
        plan, mesh = wanted(name, EVEN).output.dispatch, CASES[name].mesh
        token_M = plan.assignment_M // CASES[name].moe_config.top_k
        by_expert = np.split(token_M, np.cumsum(plan.count_E)[:-1])
        local = NUM_EXPERTS // mesh.ep
        for rank, result in enumerate(results):
            first = mesh.coordinates(rank).ep * local
            mine = by_expert[first : first + local]
            seen, rows = result[name]["dispatched"], np.concatenate(mine)
            assert seen["counts"].tolist() == [len(tokens) for tokens in mine]
            assert seen["rows"][: len(rows), 0].tolist() == rows.tolist()
            assert not seen["rows"][len(rows) :].any()


@BOTH
@each(CASES)
def test_order_is_the_same_on_every_rank(name: str, routing: str) -> None:
    first, *others = [[call[:2] for call in result["calls"]] for result in found(name, routing)]
    assert others == [first] * len(others)


@BOTH
@each(CASES)
def test_bytes_are_those_of_the_formula(name: str, routing: str) -> None:
    case, output = CASES[name], wanted(name, routing).output
    rows_WW, crossing_WO = rows_between(case, output), None if case.dedup is None else crossing(case, output)
    for rank, result in enumerate(found(name, routing)):
        seen: dict[tuple[str, str], int] = {}
        for verb, group, payload_bytes in result["calls"]:
            seen[verb, group] = seen.get((verb, group), 0) + payload_bytes
        assert seen == formula(case, rank, rows_WW, crossing_WO)


def formula(case: Case, rank: int, rows_WW: Any, crossing_WO: Any) -> dict[tuple[str, str], int]:
    """(verb, group) -> payload in bytes of one layer forward and backward: the docstrings of GlobalFigures, of the
    admissions and of ExpertDispatcher."""
    moe, mesh, E = case.moe_config, case.mesh, NUM_EXPERTS
    row_bytes = HIDDEN * (2 if case.precision == "fp16" else 4)
    sequences = case.sequences * mesh.dp if moe.aux_loss_scope == "sequence" else 1
    found = {("all_reduce", "stage"): 4 * (2 * sequences * E + 1)}
    if moe.capacity_factor is not None:
        by_gate = moe.drop_policy == "probability"
        runs = token_order(mesh, range(case.ranks), case.sequences, case.seq_len).num_runs
        found["all_gather", "stage"] = 4 * 2 * case.num_tokens * moe.top_k if by_gate else 4 * runs * E
    elif mesh.ep * mesh.etp > 1:
        found["all_gather", "ep x etp"] = 4 * E
    n, m = int(rows_WW[rank].sum()), int(rows_WW[:, rank].sum())
    moved_bytes = {None: row_bytes, "bf16": 2 * HIDDEN, "fp16": 2 * HIDDEN + 4, "int8": HIDDEN + 4}[case.wire]
    if case.dedup is not None:
        found |= formula_of_nodes(case, rank, rows_WW, crossing_WO, moved_bytes)
    elif "hierarchical_ranks" in case.parallel:
        q = middle_rows(case, rank, rows_WW)
        found["all_to_all_v", "ep inside nodes"] = 2 * (n + q) * moved_bytes
        found["all_to_all_v", "ep across nodes"] = 2 * (q + m) * moved_bytes
    elif mesh.ep > 1:
        found["all_to_all_v", "ep"] = 2 * (n + m) * moved_bytes
    if mesh.etp > 1:
        assert moe.capacity_factor is None or mesh.ep == 1
        most = mesh.ep * case.num_tokens * min(moe.top_k, E // mesh.ep // case.chunks)
        room = case.chunks * min(receive_rows(case) or most, most)
        found["all_gather", "etp"] = 2 * room * row_bytes
        found["reduce_scatter", "etp"] = 2 * mesh.etp * room * row_bytes
    return found


def formula_of_nodes(
    case: Case, rank: int, rows_WW: Any, crossing_WO: Any, row_bytes: int
) -> dict[tuple[str, str], int]:
    """The docstrings of once_per_node.py. etp is 1, and there is one ep group."""
    size, K = case.parallel["hierarchical_ranks"], case.moe_config.top_k
    node, place = divmod(rank, size)
    m, c = int(crossing_WO[rank].sum()), int(crossing_WO[place::size, node].sum())
    q = int(rows_WW[place::size, node * size : (node + 1) * size].sum())
    across = 2 * (m + (c if case.dedup == "sums" else q)) * row_bytes + 4 * K * (
        2 * m + (c if case.dedup == "sums" else 0)
    )
    assert m <= min(K, case.ranks // size) * case.num_tokens
    return {
        ("all_gather", "ep across nodes"): 4 * (case.ranks // size),
        ("all_to_all_v", "ep across nodes"): across,
        ("all_to_all_v", "ep inside nodes"): 2 * (q + int(rows_WW[:, rank].sum())) * row_bytes,
    }


def middle_rows(case: Case, rank: int, rows_WW: Any) -> int:
    """Rows that pass this rank in two steps: from ranks of its node to ranks with its place in theirs. etp is 1."""
    size = case.parallel["hierarchical_ranks"]
    node, place = divmod(rank, size)
    return int(rows_WW[node * size : (node + 1) * size, place::size].sum())
