"""This device's kernels against the portable ones: each kernel in each precision, by a graph of its own per case."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ascend_moe_train.model.kernels.constants import DTYPES
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.selftest.compare import relative_error
from ascend_moe_train.selftest.kernel_cases import Array, Case, Placed, cases_of, inputs_of
from ascend_moe_train.selftest.kernel_graph import outputs
from ascend_moe_train.selftest.reference import EXACT, Outputs, read, what
from ascend_moe_train.selftest.results import Finding
from ascend_moe_train.train.config import RunConfigPart
from ascend_moe_train.train.session import build_kernels, set_device

# Times the error of the portable kernel in the same precision. Sums in another order are that far apart.
MOST_RATIO = 2.0
# Errors of this size are allowed in any case: the unit roundoff; in fp32 sixteen of them, for sums of many.
FLOORS = {"fp32": 2.0**-20, "fp16": 2.0**-11, "bf16": 2.0**-8}


class Worst(NamedTuple):
    """The output that is nearest to its bound, or farthest beyond it."""

    share: float
    where: str
    error: float
    portable: float
    bound: float


def looker(asked: dict[str, Any]) -> Callable[[str], Finding]:
    """See worker.KINDS. A check's name is that of the kernel."""
    device, precision = set_device(asked["device"]), asked["precision"]
    run = RunConfigPart(dir="unused", steps=1, precision=precision, kernels=asked["kernels"])
    kernels, folder = build_kernels(run, device), Path(asked["folder"])

    def look(name: str) -> Finding:
        return compared(kernels, name, precision, lambda each, case: read(folder, each, case))

    return look


def compared(kernels: Kernels, name: str, precision: str, reference: Callable[[str, Case], Outputs]) -> Finding:
    """One kernel in all of its cases; `reference` gives what the portable kernel of a name made of a case."""
    judged = []
    for case in cases_of(name):
        expected, placed = reference(name, case), Placed(*reference("sort_by_expert", case)[EXACT])
        found = outputs(kernels, name, inputs_of(name, case, placed), DTYPES[precision], in_graph=True)
        judged += judge(found, expected[EXACT], expected[precision], case.name, FLOORS[precision])
    problems = [
        f"{each.where}: error {each.error:.1e}, that of the portable kernel is {each.portable:.1e}, allowed is "
        f"{each.bound:.1e}"
        for each in judged
        if not each.share <= 1
    ]
    worst = max(judged, key=lambda each: np.inf if np.isnan(each.share) else each.share)
    ratio = worst.error / worst.portable if worst.portable else None
    figures = {"error": worst.error, "portable error": worst.portable, "ratio": ratio, "allowed": worst.bound}
    return Finding(problems=problems, figures={**figures, "worst at": worst.where})


def judge(
    found: Sequence[Array], exact: Sequence[Array], portable: Sequence[Array], where: str, floor: float
) -> list[Worst]:
    """Every output against its bound; integers must be equal."""
    judged = []
    for number, (each, wanted, usual) in enumerate(zip(found, exact, portable, strict=True)):
        is_exact = wanted.dtype.kind == "i"
        error, expected = relative_error(each, wanted), relative_error(usual, wanted)
        bound = 0.0 if is_exact else max(MOST_RATIO * expected, floor)
        share = error / bound if bound else (0.0 if error == 0 else np.inf)
        judged.append(Worst(share, f"{where}, {what(number)}", error, expected, bound))
    return judged
