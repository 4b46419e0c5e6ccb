"""The selftest's checks find what is wrong: a kernel, a verb, losses. Kernels of an NPU are stood in for."""

import math
from functools import cache
from typing import Any

import mindspore as ms
import numpy as np
import pytest

from ascend_moe_train.model.kernels.portable import PortableKernels
from ascend_moe_train.model.kernels.rounded import RoundedKernels
from ascend_moe_train.parallel.comm import Array, Group, How, LocalComm, Partition, Wire
from ascend_moe_train.selftest.collective_graph import host_graph_results
from ascend_moe_train.selftest.collective_host import host_results
from ascend_moe_train.selftest.curve import STEPS, golden_losses
from ascend_moe_train.selftest.curve_steps import Curve
from ascend_moe_train.selftest.kernel_cases import CASES, Case, cases_of
from ascend_moe_train.selftest.kernels import FLOORS, compared, judge
from ascend_moe_train.selftest.reference import Outputs, computed
from ascend_moe_train.selftest.results import Finding
from ascend_moe_train.selftest.training import finding
from ascend_moe_train.train.metrics import Smoother, StepMeter, StepRecord
from tests.ascend_stand_ins import StandInKernels

Tensor = Any


@cache
def reference(name: str, case: Case) -> Outputs:
    ms.set_context(device_target="CPU")
    return computed(name, case, ["fp32", "fp16", "bf16"])


class WrongKernels(PortableKernels):
    """Nearly right, as an operator with a wrong option is."""

    def rope(self, x_BSHZ: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        return super().rope(x_BSHZ, cos_BSZ, sin_BSZ) * 1.00001

    def permute(self, x_TD: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        return super().permute(x_TD, row_TK, source_R * 0)

    def square_sum(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such operator")


def look(kernels: Any, name: str, precision: str = "fp32") -> Finding:
    return compared(kernels, name, precision, reference)


@pytest.mark.parametrize("name", ["rope", "sort_by_expert", "adamw"])
def test_portable_kernels_are_as_good_as_themselves(name: str) -> None:
    found = look(PortableKernels(), name)
    assert found.problems == []
    assert found.figures["ratio"] is None or found.figures["ratio"] == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize("name", ["rope", "permute"])
def test_a_wrong_kernel_is_found(name: str) -> None:
    found = look(WrongKernels(), name)
    assert len(found.problems) >= len(cases_of(name))
    assert "odd sizes, idle expert, result: error 1" in found.problems[0] or name == "permute"


def test_a_kernel_that_is_wrong_by_more_than_its_precision_is_found_in_half_precision() -> None:
    class Wrong(PortableKernels):
        def rope(self, x_BSHZ: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
            return PortableKernels().rope(x_BSHZ, cos_BSZ, sin_BSZ) * 1.002

    assert look(RoundedKernels(PortableKernels(), ms.float16), "rope", "fp16").problems == []
    assert look(RoundedKernels(Wrong(), ms.float16), "rope", "fp16").problems


@pytest.mark.parametrize("name", ["grouped_matmul", "combine", "attention", "adamw"])
def test_kernels_of_an_npu_are_compared_in_the_same_way(name: str) -> None:
    assert look(StandInKernels(), name).problems == []


def test_errors_are_judged_by_those_of_the_portable_kernel() -> None:
    exact, usual = [np.array([1.0, 2.0])], [np.array([1.0, 2.0 + 4e-3])]
    good = judge([np.array([1.0, 2.0 - 7e-3])], exact, usual, "case", FLOORS["fp16"])
    bad = judge([np.array([1.0, 2.0 - 9e-3])], exact, usual, "case", FLOORS["fp16"])
    nan = judge([np.array([1.0, np.nan])], exact, usual, "case", FLOORS["fp16"])
    assert (good[0].share <= 1, bad[0].share <= 1, nan[0].share <= 1) == (True, False, False)
    assert bad[0].bound == pytest.approx(4e-3)
    right, wrong = np.array([1, 2]), np.array([1, 3])
    assert judge([right], [right], [right], "case", 1.0)[0].share == 0
    assert judge([wrong], [right], [right], "case", 1.0)[0].share == math.inf


def test_the_reference_has_every_precision() -> None:
    found = reference("rope", CASES["odd sizes, idle expert"])
    assert set(found) == {"fp64", "fp32", "fp16", "bf16"}
    apart = {name: float(np.abs(each[0] - found["fp64"][0]).max()) for name, each in found.items()}
    assert 0 == apart["fp64"] < apart["fp32"] < apart["fp16"] < apart["bf16"]


class WrongSums(LocalComm):
    """A rank too many in every sum, and a group under another name."""

    def all_reduce(
        self, group: Group, x: Array, how: How = "sum", wire: Wire | None = None, out: Array | None = None
    ) -> Array:
        return super().all_reduce(group, (x * 2).astype(x.dtype), how, wire, out)

    def split(self, name: str, partition: Partition) -> Group:
        group = super().split(name, partition)
        return Group(name="else", ranks=group.ranks, index=group.index) if name == "alone" else group


def test_a_wrong_verb_is_found() -> None:
    wrong = host_results(WrongSums(), "all_reduce")["wrong"]
    assert any(each.startswith("all_reduce world float32") for each in wrong)
    assert any(each.startswith("split: ") for each in wrong)
    assert host_results(LocalComm(), "all_reduce")["wrong"] == []
    assert host_graph_results(LocalComm(), "broadcast")["wrong"] == []


def records(losses: list[float]) -> list[StepRecord]:
    meter = StepMeter(total_steps=STEPS, flops_per_token=1.0, peak_flops_per_s=None, smoother=Smoother())
    return [
        meter.record(
            step=step,
            loss=loss,
            aux_loss=1.0,
            z_loss=0.0,
            lr=1e-3,
            grad_norm=1.0,
            tokens=100,
            step_s=4.0 if step == 1 else 0.5,
            counts_LE=np.ones((1, 2), np.int64),
            dropped=0,
            loss_scale=None,
            skipped=False,
        )
        for step, loss in enumerate(losses, 1)
    ]


def test_losses_are_compared_with_the_golden_ones() -> None:
    golden = golden_losses()
    found = finding(Curve(records(golden), 0.25), golden, 1e-5)
    assert found.problems == []
    assert (found.figures["first step, s"], found.figures["step, s"]) == (4.0, 0.5)
    assert (found.figures["tokens/s"], found.figures["checkpoint, s"]) == (200.0, 0.25)


@pytest.mark.parametrize("factor", [1 + 3e-5, math.nan])
def test_a_golden_loss_that_is_another_is_found(factor: float) -> None:
    golden = golden_losses()
    changed = [loss * factor if step == 7 else loss for step, loss in enumerate(golden)]
    found = finding(Curve(records(golden), 0.0), changed, 1e-5)
    assert [each.split(":")[0] for each in found.problems] == ["step 8"]
