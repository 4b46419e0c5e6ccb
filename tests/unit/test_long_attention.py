"""Portable attention of sequences of more than one block: against the fp64 oracle, and the memory that it takes."""

import os
import subprocess
import sys
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from ascend_moe_train.model.kernels.long_attention import BLOCK_QUERIES, SHORT_QUERIES
from ascend_moe_train.selftest.kernel_cases import normal
from tests.model_run import kernels
from tests.oracle.attention import attention, attention_vjp
from tests.oracle.differences import relative_error
from tests.rules.source import ROOT

TOLERANCE = 1e-5
B, H, G, Z, Y = 2, 4, 2, 8, 6
# the last block is not whole
LONG = SHORT_QUERIES + BLOCK_QUERIES // 4
# prints what the process takes beyond what it had before the graph ran, in MiB
MEASURE = """
import sys
import mindspore as ms
from ascend_moe_train.model.kernels.portable import PortableKernels
from tests.unit.test_long_attention import Net, tensors

def kibibytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

ms.set_context(mode=ms.GRAPH_MODE)
inputs, net = tensors(int(sys.argv[1])), Net(PortableKernels(), None)
net.compile(*inputs)
before = kibibytes("VmRSS:")
for x in net(*inputs):
    x.asnumpy()
print((kibibytes("VmHWM:") - before) // 1024)
"""


class Net(nn.Cell):
    """Output and gradients."""

    def __init__(self, kernel_set: Any, window: int | None) -> None:
        super().__init__()
        self.kernels, self.window = kernel_set, window
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def attend(self, q: Any, k: Any, v: Any, sink: Any, segment: Any) -> Any:
        return self.kernels.attention(q, k, v, segment, self.window, sink)

    def construct(self, q: Any, k: Any, v: Any, sink: Any, segment: Any, dout: Any) -> Any:
        gradients = self.gradient(self.attend)(q, k, v, sink, segment, dout)
        return self.attend(q, k, v, sink, segment), *gradients[:4]


def arrays(length: int) -> list[Any]:
    segment = np.sort(np.random.default_rng(1).integers(0, 3, (B, length)), axis=1).astype(np.int32)
    shapes = ((B, length, H, Z), (B, length, G, Z), (B, length, G, Y), (H,), (B, length, H, Y))
    q, k, v, sink, dout = (normal(shape, 50 + i) for i, shape in enumerate(shapes))
    return [q, k, v, sink, segment, dout]


def tensors(length: int) -> list[Any]:
    return [ms.Tensor(x) for x in arrays(length)]


@pytest.mark.parametrize("window", [None, 300])
def test_blocks_equal_the_oracle(window: int | None) -> None:
    q, k, v, sink, segment, dout = arrays(LONG)
    found = [x.asnumpy() for x in Net(kernels("portable"), window)(*tensors(LONG))]
    expected = attention(q, k, v, segment, window, sink), *attention_vjp(dout, q, k, v, segment, window, sink)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < TOLERANCE


@pytest.mark.slow
def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    def taken_mib(length: int) -> int:
        command = [sys.executable, "-c", MEASURE, str(length)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
        return int(done.stdout)

    shorter, longer = taken_mib(2048), taken_mib(8192)
    assert longer < 4 * 1.25 * shorter
