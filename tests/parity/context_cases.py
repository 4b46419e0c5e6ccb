"""Attention of small sequences that several ranks share, and what the fp64 oracle makes of the whole.

Shape letters: see model/kernels/protocol.py; A all places of a sequence.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ascend_moe_train.parallel.places import own_places, starts
from tests.oracle.arrays import F64, I64
from tests.oracle.attention import attention, attention_vjp

Context = Literal["ring", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention on `ranks` ranks, with `documents` in each sequence."""

    name: str
    ranks: int
    context: Context
    seq_len: int = 24
    heads: int = 4
    kv_heads: int = 2
    size: int = 6
    value_size: int = 6
    documents: int = 3
    window: int | None = None
    has_sinks: bool = False
    kernels: str = "native"
    precision: str = "fp32"

    @property
    def sequences(self) -> int:
        return 2

    def rows(self, rank: int) -> Any:
        """The places of a sequence that a rank has."""
        return own_places(self.seq_len, self.ranks, rank)


_MLA: dict[str, Any] = {"kv_heads": 4, "value_size": 5}
_FEW: dict[str, Any] = {"kv_heads": 1, "has_sinks": True, "kernels": "portable"}
_OPTIONS: tuple[tuple[Context, str, dict[str, Any]], ...] = (
    ("ring", "plain", {}),
    ("ring", "values of another size", {**_MLA, "documents": 1}),
    ("ring", "window and sinks", {"window": 3, **_FEW}),
    ("ring", "fp16", {"precision": "fp16", "has_sinks": True, "window": 15}),
    ("ulysses", "values of another size", {**_MLA, "window": 7}),
    ("ulysses", "few heads", _FEW),
    ("ulysses", "fp16", {"precision": "fp16"}),
)
CASES = {
    case.name: case
    for ranks in (2, 4)
    for context, name, options in _OPTIONS
    for case in [Case(name=f"{context} {ranks}, {name}", ranks=ranks, context=context, **options)]
}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Of whole sequences, and the gradient of the output."""

    q_BAHZ: F64
    k_BAGZ: F64
    v_BAGY: F64
    dout_BAHY: F64
    sink_H: F64
    segment_BA: I64
    start_BA: Any


def data(case: Case) -> Data:
    """In the numbers of the case's precision, so that rounding of inputs is no part of the comparison."""
    generator = np.random.default_rng(11)
    dtype = np.float16 if case.precision == "fp16" else np.float32

    def normal(*shape: int) -> F64:
        return generator.standard_normal(shape).astype(dtype).astype(np.float64)

    B, A = case.sequences, case.seq_len
    segment_BA = np.sort(generator.integers(0, case.documents, (B, A)), axis=1)
    return Data(
        q_BAHZ=normal(B, A, case.heads, case.size),
        k_BAGZ=normal(B, A, case.kv_heads, case.size),
        v_BAGY=normal(B, A, case.kv_heads, case.value_size),
        dout_BAHY=normal(B, A, case.heads, case.value_size),
        sink_H=generator.standard_normal(case.heads).astype(np.float32).astype(np.float64),
        segment_BA=segment_BA,
        start_BA=starts(segment_BA.astype(np.int32)),
    )


def expected(case: Case) -> dict[str, F64]:
    """Output and gradients of whole sequences."""
    given = data(case)
    inputs = given.q_BAHZ, given.k_BAGZ, given.v_BAGY, given.segment_BA, case.window
    sink_H = given.sink_H if case.has_sinks else None
    dq, dk, dv, dsink = attention_vjp(given.dout_BAHY, *inputs, sink_H)
    return {"out": attention(*inputs, sink_H), "dq": dq, "dk": dk, "dv": dv, "dsink": dsink}
