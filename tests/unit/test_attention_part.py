"""Attention to some of the keys: each kernel set against the fp64 oracle, and the oracle against whole attention."""

import os
from functools import cache
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from numpy.typing import NDArray

from ascend_moe_train.model.kernels.long_attention import BLOCK_QUERIES
from ascend_moe_train.model.kernels.rounded import RoundedKernels
from tests.model_run import kernels
from tests.oracle.arrays import F64, Flags
from tests.oracle.attention import attention, attention_part, attention_part_vjp, attention_vjp, visible
from tests.oracle.differences import relative_error

TOLERANCE = 1e-5
SETS = ("portable", "native")
# B, S, J, H, G, Z, Y
SIZES = {
    "values of another size": (2, 70, 45, 4, 2, 6, 9),
    "more than one block": (1, BLOCK_QUERIES + 30, 33, 2, 1, 16, 8),
    "one query": (2, 1, 17, 3, 3, 4, 4),
}


def normal(generator: np.random.Generator, *shape: int) -> F64:
    return generator.standard_normal(shape).astype(np.float32).astype(np.float64)


@cache
def inputs(name: str) -> dict[str, Any]:
    """With queries that see nothing: some among others, the first of sequence 0, and all of a block."""
    B, S, J, H, G, Z, Y = SIZES[name]
    generator = np.random.default_rng(1)
    first_BS = np.sort(generator.integers(0, J, (B, S)), axis=1)
    past_BS = np.sort(np.minimum(J, first_BS + generator.integers(-3, J // 2, (B, S))), axis=1)
    past_BS[0, : S // 2] = np.minimum(past_BS[0, : S // 2], first_BS[0, 0])
    given: dict[str, Any] = {
        "q": normal(generator, B, S, H, Z),
        "k": normal(generator, B, J, G, Z),
        "v": normal(generator, B, J, G, Y),
        "first": first_BS.astype(np.int32),
        "past": np.maximum(past_BS, 0).astype(np.int32),
        "dout": normal(generator, B, S, H, Y),
    }
    # output and logarithms of all keys together, of which these are some
    out, log_sum = attention_part(given["q"], given["k"], given["v"], seen(given))
    others = np.log(generator.uniform(0.5, 2.0, log_sum.shape))
    total = np.logaddexp(log_sum, others)
    share = np.exp(log_sum - total).transpose(0, 2, 1)[..., None]
    given["out"] = share * out + (1.0 - share) * normal(generator, B, S, H, Y)
    given["log_sum"] = total
    return given


def seen(given: dict[str, Any]) -> Flags:
    key_J = np.arange(given["k"].shape[1])
    flags: Flags = (key_J >= given["first"][:, :, None]) & (key_J < given["past"][:, :, None])
    return flags


class _Both(nn.Cell):
    def __init__(self, kernels: Any) -> None:
        super().__init__()
        self.kernels = kernels

    def construct(self, dout: Any, dot: Any, log_sum: Any, q: Any, k: Any, v: Any, first: Any, past: Any) -> Any:
        result = self.kernels.attention_part(q, k, v, first, past)
        return result, self.kernels.attention_part_gradient(dout, dot, log_sum, q, k, v, first, past)


def run(kernel_set: Any, given: dict[str, Any], dtype: Any = np.float32) -> list[NDArray[Any]]:
    """Output, logarithms, dq, dk, dv."""
    dot_BHS = np.einsum("bshy,bshy->bhs", given["dout"], given["out"])
    floats = [ms.Tensor(x.astype(np.float32)) for x in (given["dout"], dot_BHS, given["log_sum"])]
    floats += [ms.Tensor(given[name].astype(dtype)) for name in ("q", "k", "v")]
    result, gradients = _Both(kernel_set)(*floats, ms.Tensor(given["first"]), ms.Tensor(given["past"]))
    return [x.asnumpy().copy() for x in (*result, *gradients)]


@cache
def found(kernel_set: str, name: str) -> list[NDArray[Any]]:
    return run(kernels(kernel_set), inputs(name))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kernel_set", SETS)
def test_output_and_logarithms_equal_the_oracle(kernel_set: str, name: str) -> None:
    given = inputs(name)
    out, log_sum = attention_part(given["q"], given["k"], given["v"], seen(given))
    found_out, found_log_sum = found(kernel_set, name)[:2]
    sees_BHS = np.isfinite(log_sum)
    assert sees_BHS.any()
    assert name == "one query" or not sees_BHS.all()
    np.testing.assert_allclose(found_log_sum[sees_BHS], log_sum[sees_BHS], rtol=0, atol=TOLERANCE)
    assert (found_log_sum[~sees_BHS] <= -1e29).all()
    assert np.isfinite(found_out).all()
    sees_BSH = sees_BHS.transpose(0, 2, 1)
    assert relative_error(found_out[sees_BSH], out[sees_BSH]) < TOLERANCE


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kernel_set", SETS)
def test_gradients_equal_the_oracle(kernel_set: str, name: str) -> None:
    given = inputs(name)
    dout, out, log_sum, q, k, v = (given[key] for key in ("dout", "out", "log_sum", "q", "k", "v"))
    right = attention_part_vjp(dout, out, log_sum, q, k, v, seen(given))
    for gradient, expected in zip(found(kernel_set, name)[2:], right, strict=True):
        assert relative_error(gradient, expected) < TOLERANCE


def test_rounded_kernels_round_what_comes_in_and_nothing_that_goes_out() -> None:
    base, given = kernels("portable"), inputs("values of another size")
    narrow = {**given, **{name: given[name].astype(np.float16).astype(np.float64) for name in ("q", "k", "v")}}
    rounded, plain = run(RoundedKernels(base, ms.float16), given, np.float16), run(base, narrow)
    for one, other in zip(rounded, plain, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def test_parts_of_the_oracle_make_up_whole_attention() -> None:
    generator = np.random.default_rng(2)
    q, k, v = normal(generator, 2, 12, 4, 6), normal(generator, 2, 12, 2, 6), normal(generator, 2, 12, 2, 5)
    dout, segment = normal(generator, 2, 12, 4, 5), np.sort(generator.integers(0, 3, (2, 12)), axis=1)
    keys = [slice(0, 4), slice(4, 9), slice(9, 12)]
    flags = [visible(segment, 7)[:, :, part] for part in keys]
    parts = [attention_part(q, k[:, part], v[:, part], flag) for part, flag in zip(keys, flags, strict=True)]
    log_sum = np.logaddexp.reduce([part[1] for part in parts])
    out = sum(part[0] * np.exp(part[1] - log_sum).transpose(0, 2, 1)[..., None] for part in parts)
    assert relative_error(out, attention(q, k, v, segment, 7)) < 1e-12
    gradients = [
        attention_part_vjp(dout, out, log_sum, q, k[:, part], v[:, part], flag)
        for part, flag in zip(keys, flags, strict=True)
    ]
    joined = (sum(each[0] for each in gradients), *(np.concatenate([g[i] for g in gradients], 1) for i in (1, 2)))
    for found_gradient, expected in zip(joined, attention_vjp(dout, q, k, v, segment, 7)[:3], strict=True):
        assert relative_error(found_gradient, expected) < 1e-12
