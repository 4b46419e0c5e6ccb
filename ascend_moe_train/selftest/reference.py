"""What the portable kernels make of the inputs of kernel_cases.py on this machine's CPU, one operator after the other:
in fp64, which is what all kernels are compared with, and in each precision, which says what error is to be expected."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

from ascend_moe_train.model.kernels.constants import DTYPES
from ascend_moe_train.model.kernels.portable import PortableKernels
from ascend_moe_train.model.kernels.rounded import RoundedKernels
from ascend_moe_train.selftest.compare import relative_error
from ascend_moe_train.selftest.kernel_cases import INPUTS, OTHERS, Array, Case, Placed, cases_of, inputs_of, routing
from ascend_moe_train.selftest.kernel_graph import outputs
from ascend_moe_train.selftest.results import Finding

EXACT = "fp64"
# In fp32, against fp64: what the portable kernels keep to in the tests, against fp64 NumPy.
TOLERANCE = 1e-5

Outputs = dict[str, list[Array]]
"""By precision."""


def looker(asked: dict[str, Any]) -> Callable[[str], Finding]:
    """See worker.KINDS. Every check is a kernel; what it gave is left in `folder` for `read`."""
    ms.set_device("CPU")
    folder, precisions = Path(asked["folder"]), asked["precisions"]

    def look(name: str) -> Finding:
        problems, worst = [], 0.0
        for case in cases_of(name):
            found = computed(name, case, precisions)
            _write(folder, name, case, found)
            for number, (exact, single) in enumerate(zip(found[EXACT], found["fp32"], strict=True)):
                error = relative_error(single, exact)
                worst = max(worst, error)
                if not error <= TOLERANCE:
                    problems.append(f"{case.name}, {what(number)}: error {error:.1e}, allowed is {TOLERANCE:.0e}")
        return Finding(problems=problems, figures={"error": worst})

    return look


def computed(name: str, case: Case, precisions: list[str]) -> Outputs:
    """Results and gradients of a kernel in a case."""
    portable = PortableKernels()
    given = inputs_of(name, case, placed(case))
    found = {EXACT: outputs(portable, name, given, ms.float64, in_graph=False)}
    for precision in {"fp32", *(precisions if name in INPUTS else ())}:
        dtype = DTYPES[precision]
        kernels = portable if precision == "fp32" else RoundedKernels(portable, dtype)
        found[precision] = outputs(kernels, name, given, dtype, in_graph=False)
    return found


@cache
def placed(case: Case) -> Placed:
    """By the portable kernel."""
    given = OTHERS["sort_by_expert"](case, Placed(*routing(case), np.zeros(0)))
    return Placed(*outputs(PortableKernels(), "sort_by_expert", given, ms.float32, in_graph=False))


def what(number: int) -> str:
    """An output in words."""
    return "result" if number == 0 else f"output {number}"


def _path(folder: Path, name: str, case: Case) -> Path:
    return folder / f"{name}.{case.name.replace(' ', '_')}.npz"


def _write(folder: Path, name: str, case: Case, found: Outputs) -> None:
    arrays = {f"{precision}.{number}": x for precision, each in found.items() for number, x in enumerate(each)}
    np.savez(_path(folder, name, case), **arrays)


def read(folder: Path, name: str, case: Case) -> Outputs:
    """What `looker` left. Raises OSError: it did not come so far."""
    found: Outputs = {}
    with np.load(_path(folder, name, case), allow_pickle=False) as arrays:
        for key in arrays.files:
            found.setdefault(key.partition(".")[0], []).append(arrays[key])
    return found
