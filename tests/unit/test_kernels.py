"""Every kernel of every kernel set against fp64 oracles: results, gradients, odd sizes, bad numbers, equal bits.

All kernels of a set run in one compiled graph per case, because compiling is most of the time.
"""

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from ascend_moe_train.selftest.kernel_cases import CASES, INPUTS, Array, Case, normal, routing
from ascend_moe_train.selftest.kernel_graph import Update, one_kernel
from tests.kernel_checks import Check, check, places
from tests.model_run import kernels
from tests.oracle.differences import relative_error

TOLERANCE = 1e-5
SETS = ("portable", "native", "ascend")
# native kernels, which are code of their own, have all cases in `make test`
FEW = ("odd sizes, idle expert", "drops by probability")
EACH = pytest.mark.parametrize(
    ("kernel_set", "case"),
    [
        pytest.param(kernel_set, case, marks=[pytest.mark.slow] * (kernel_set != "native" and case not in FEW))
        for kernel_set in SETS
        for case in CASES
    ],
)


class Results(nn.Cell):
    """The results of all kernels, each from its own inputs."""

    def __init__(self, kernels: Any, checks: dict[str, Check]) -> None:
        super().__init__()
        self.kernels = nn.CellList([one_kernel(kernels, name, each.given.constants) for name, each in checks.items()])

    def construct(self, inputs: Any) -> Any:
        return tuple([self.kernels[i](inputs[i]) for i in range(len(self.kernels))])


class AllKernels(nn.Cell):
    """Results and gradients of every check, and what `sort_by_expert` and `square_sum` give."""

    def __init__(self, kernels: Any, case: Case, checks: dict[str, Check]) -> None:
        super().__init__()
        self.kernels = kernels
        self.sort_options = (case.E, case.capacity, case.by_probability)
        self.results = Results(kernels, checks)
        self.gradients = ops.GradOperation(sens_param=True)

    def construct(self, inputs: Any, weights: Any, expert_TK: Any, gate_TK: Any) -> Any:
        E, capacity, by_probability = self.sort_options
        placed = self.kernels.sort_by_expert(expert_TK, gate_TK, E, capacity, by_probability)
        results = self.results(inputs)
        gradients = self.gradients(self.results)(inputs, weights)
        return results, gradients, placed, self.kernels.square_sum(inputs[0][0])


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a compiled graph gave, by kernel."""

    results: dict[str, Array]
    gradients: dict[str, tuple[Array, ...]]
    placed: tuple[Array, ...]
    square_sum: Array

    def bits(self) -> list[bytes]:
        gradients = [gradient for each in self.gradients.values() for gradient in each]
        return [x.tobytes() for x in (*self.results.values(), *gradients, *self.placed, self.square_sum)]


@cache
def graph(kernel_set: str, case_name: str) -> tuple[dict[str, Check], AllKernels]:
    case = CASES[case_name]
    checks = {name: check(name, case) for name in INPUTS}
    return checks, AllKernels(kernels(kernel_set), case, checks)


def run(kernel_set: str, case_name: str, poison: float | None = None) -> Run:
    """Run the graph, with `poison` in one place of every floating input if given."""
    checks, net = graph(kernel_set, case_name)
    inputs = [[x.copy() for x in each.given.arrays] for each in checks.values()]
    if poison is not None:
        for x in (x for each in inputs for x in each if x.dtype == np.float32):
            x.reshape(-1)[x.size // 4] = poison
    results, gradients, placed, square_sum = net(
        ms.mutable(tuple(tuple(ms.Tensor(x) for x in each) for each in inputs)),
        ms.mutable(tuple(ms.Tensor(each.given.weight) for each in checks.values())),
        *(ms.Tensor(x) for x in routing(CASES[case_name])),
    )
    return Run(
        results={name: results[i].asnumpy().copy() for i, name in enumerate(checks)},
        gradients={
            name: tuple(gradients[i][j].asnumpy().copy() for j in each.given.wrt)
            for i, (name, each) in enumerate(checks.items())
        },
        placed=tuple(x.asnumpy().copy() for x in placed),
        square_sum=square_sum.asnumpy().copy(),
    )


@cache
def clean_run(kernel_set: str, case_name: str) -> Run:
    return run(kernel_set, case_name)


@pytest.mark.parametrize("kernel", INPUTS)
@EACH
def test_result_and_gradients_equal_the_oracle(kernel_set: str, case: str, kernel: str) -> None:
    expected, found = graph(kernel_set, case)[0][kernel], clean_run(kernel_set, case)
    assert relative_error(found.results[kernel], expected.result) < TOLERANCE
    assert len(found.gradients[kernel]) == len(expected.gradients)
    for gradient, wanted in zip(found.gradients[kernel], expected.gradients, strict=True):
        assert relative_error(gradient, wanted) < TOLERANCE


@EACH
def test_assignments_are_placed_as_the_oracle_places_them(kernel_set: str, case: str) -> None:
    for found, expected in zip(clean_run(kernel_set, case).placed, places(CASES[case]), strict=True):
        np.testing.assert_array_equal(found, expected)


@EACH
def test_square_sum(kernel_set: str, case: str) -> None:
    x = next(iter(graph(kernel_set, case)[0].values())).given.arrays[0].astype(np.float64)
    assert relative_error(clean_run(kernel_set, case).square_sum, np.array([(x * x).sum()])) < TOLERANCE


@EACH
def test_same_input_gives_the_same_bits(kernel_set: str, case: str) -> None:
    assert run(kernel_set, case).bits() == clean_run(kernel_set, case).bits()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("kernel_set", SETS)
def test_bad_numbers_are_never_lost(kernel_set: str, poison: float) -> None:
    with np.errstate(invalid="ignore"):
        found = run(kernel_set, "odd sizes, idle expert", poison)
    for name, result in found.results.items():
        assert not np.isfinite(result).all(), f"{name} lost it in the result"
    for name, gradients in found.gradients.items():
        if name in ("embed", "permute", "rope", "split", "add_by_expert"):
            continue  # linear in all of their floating inputs: their gradients do not depend on these
        for gradient in gradients:
            assert not np.isfinite(gradient).all(), f"{name} lost it in a gradient"
    assert not np.isfinite(found.square_sum).all()


@pytest.mark.parametrize("kernel_set", SETS)
def test_adamw_updates_in_place_and_a_skipped_step_changes_no_bit(kernel_set: str) -> None:
    lr, beta1, beta2, eps, decay, scale = 1e-2, 0.9, 0.95, 1e-8, 3e-3, 0.25
    first_state = [ms.Tensor(np.abs(normal((1003,), seed))) for seed in (31, 32, 33)]
    update, grad = Update(kernels(kernel_set), first_state), normal((1003,), 34)
    weight, first, second = (x.astype(np.float64) for x in update.state())
    live = np.array([lr, beta1, beta2, 1 - beta1, 1 - beta2, eps, decay, scale], np.float32)
    update(ms.Tensor(grad), ms.Tensor(live)).asnumpy()
    g = grad.astype(np.float64) * scale
    first, second = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
    expected = weight - lr * first / (np.sqrt(second) + eps) - decay * weight, first, second
    after = update.state()
    for found, wanted in zip(after, expected, strict=True):
        assert relative_error(found, wanted) < TOLERANCE
    keep = np.array([0, 1, 1, 0, 0, 1, 0, 0], np.float32)
    grad[:3] = np.nan, np.inf, -np.inf
    update(ms.Tensor(grad), ms.Tensor(keep)).asnumpy()
    assert [x.tobytes() for x in update.state()] == [x.tobytes() for x in after]
