"""Sizes and inputs for every kernel of model/kernels/protocol.py, where the shape letters are. Pure.

Tests compare the portable kernels with fp64 NumPy oracles on these inputs; `amt selftest` compares a device's kernels
with the portable ones on them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.model.config import ClampedSwiGLUConfig, MoEConfig
from ascend_moe_train.model.counts import expert_capacity

Array = NDArray[Any]
EPS = 1e-5
WINDOW = 20
CLAMP, GROUPED_CLAMP = ClampedSwiGLUConfig(alpha=1.7, limit=3.0), ClampedSwiGLUConfig(alpha=1.7, limit=1.1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, and how assignments are spread over experts."""

    name: str
    B: int = 2
    S: int = 70
    H: int = 4
    G: int = 2
    Z: int = 6
    D: int = 19
    F: int = 13
    E: int = 5
    K: int = 2
    V: int = 33
    experts: tuple[int, ...] = (0, 1, 3, 4)
    documents: int = 3
    capacity_factor: float | None = None
    by_probability: bool = False

    @property
    def T(self) -> int:
        return self.B * self.S

    @property
    def moe(self) -> MoEConfig:
        return MoEConfig(
            num_experts=self.E,
            top_k=self.K,
            ffn=1,
            capacity_factor=self.capacity_factor,
            drop_policy="probability" if self.by_probability else "position",
        )

    @property
    def capacity(self) -> int | None:
        if self.capacity_factor is None:
            return None
        return expert_capacity(self.capacity_factor, self.T, self.K, self.E)

    @property
    def rows(self) -> int:
        return self.T * self.K if self.capacity is None else min(self.T * self.K, self.E * self.capacity)


CASES = {
    case.name: case
    for case in (
        Case(name="odd sizes, idle expert"),
        Case(name="one token", B=1, S=1, H=1, G=1, Z=2, D=1, F=1, E=1, K=1, V=1, experts=(0,), documents=1),
        Case(name="one expert", B=1, S=131, H=2, G=1, Z=16, D=64, F=32, experts=(3,), documents=1, capacity_factor=2.0),
        Case(name="drops", S=33, H=3, G=3, Z=34, D=40, F=32, E=3, experts=(0, 1, 1), capacity_factor=0.5),
        Case(name="drops by probability", S=33, H=3, G=1, D=16, F=48, capacity_factor=0.5, by_probability=True),
    )
}


# As small as a device may refuse, but without the sums of nothing that "one token" has, whose gradients are rounding.
FEW_TOKENS = Case(name="one token, small sizes", B=1, S=1, H=2, G=1, Z=8, D=16, F=16, E=2, K=1, V=9, experts=(1,))

# What `amt selftest` compares: every kernel in the first two; those that see where tokens go also with all tokens
# sent to one expert, where not all fit.
FOR_ALL = (CASES["odd sizes, idle expert"], FEW_TOKENS)
FOR_ROUTED = (*FOR_ALL, CASES["one expert"])


class Placed(NamedTuple):
    """What `Kernels.sort_by_expert` gives for the routing of a case: row_TK, source_R, counts_E."""

    row: Array
    source: Array
    counts: Array


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a kernel gets. Gradients, of sum(result * weight), are of the inputs `wrt`; `activations` are those inputs
    that come in the precision of a run."""

    arrays: tuple[Array, ...]
    weight: Array
    wrt: tuple[int, ...]
    constants: tuple[Any, ...] = ()
    activations: tuple[int, ...] = (0,)


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Array:
    """fp32 numbers of a normal distribution."""
    return np.random.default_rng(seed).normal(0.0, scale, shape).astype(np.float32)


def routing(case: Case) -> tuple[Array, Array]:
    """Experts and gates of every assignment; gates have many ties."""
    generator = np.random.default_rng(19)
    expert = generator.choice(np.array(case.experts), (case.T, case.K)).astype(np.int32)
    return expert, (generator.integers(1, 9, (case.T, case.K)) / 8).astype(np.float32)


def segments(case: Case) -> Array:
    """Numbers of documents, which never fall along a sequence: (B, S)."""
    return np.sort(np.random.default_rng(10).integers(0, case.documents, (case.B, case.S)), axis=1).astype(np.int32)


def _matmul(case: Case, placed: Placed) -> Inputs:
    x, w, dy = normal((case.T, case.D), 1), normal((case.F, case.D), 2), normal((case.T, case.F), 3)
    return Inputs(arrays=(x, w), weight=dy, wrt=(0, 1))


def _embed(case: Case, placed: Placed) -> Inputs:
    token = np.random.default_rng(4).integers(0, case.V, case.T).astype(np.int32)
    w, dy = normal((case.V, case.D), 5), normal((case.T, case.D), 6)
    return Inputs(arrays=(token, w), weight=dy, wrt=(1,), activations=())


def _rms_norm(case: Case, placed: Placed) -> Inputs:
    x, w, dy = normal((case.T, case.D), 7), normal((case.D,), 8), normal((case.T, case.D), 9)
    return Inputs(arrays=(x, w), constants=(EPS,), weight=dy, wrt=(0, 1))


def _rope(case: Case, placed: Placed) -> Inputs:
    x, dy = normal((case.B, case.S, case.H, case.Z), 11), normal((case.B, case.S, case.H, case.Z), 12)
    # as the plain rotary embedding of Su et al. (2021) has it
    rate = 10_000.0 ** (-np.arange(0, case.Z, 2) / case.Z)
    angle = np.tile(np.arange(case.S)[None, :, None] * rate, (case.B, 1, 1))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return Inputs(arrays=(x, cos, sin), weight=dy, wrt=(0,))


def _attention(case: Case, placed: Placed) -> Inputs:
    q, dy = normal((case.B, case.S, case.H, case.Z), 13), normal((case.B, case.S, case.H, case.Z), 14)
    k, v = normal((case.B, case.S, case.G, case.Z), 15), normal((case.B, case.S, case.G, case.Z), 16)
    return Inputs(arrays=(q, k, v, segments(case)), weight=dy, wrt=(0, 1, 2), activations=(0, 1, 2))


def _attention_to_a_window(case: Case, placed: Placed) -> Inputs:
    """With sinks, and values that are wider than keys."""
    Y = case.Z + 5
    q, dy = normal((case.B, case.S, case.H, case.Z), 30), normal((case.B, case.S, case.H, Y), 31)
    k, v = normal((case.B, case.S, case.G, case.Z), 32), normal((case.B, case.S, case.G, Y), 33)
    arrays = (q, k, v, normal((case.H,), 34), segments(case))
    return Inputs(arrays=arrays, constants=(WINDOW,), weight=dy, wrt=(0, 1, 2, 3), activations=(0, 1, 2))


def _split(case: Case, placed: Placed) -> Inputs:
    sizes = (case.D, 1, case.F)
    x, dy = normal((case.B, case.S, sum(sizes)), 35), normal((case.B, case.S, sum(sizes)), 36)
    return Inputs(arrays=(x,), constants=(sizes,), weight=dy, wrt=(0,))


def _swiglu(case: Case, placed: Placed) -> Inputs:
    h, dy = normal((case.T, 2 * case.F), 17, scale=4), normal((case.T, case.F), 18)
    return Inputs(arrays=(h,), weight=dy, wrt=(0,))


def _clamped_swiglu(case: Case, placed: Placed) -> Inputs:
    h, dy = normal((case.T, 2 * case.F), 38, scale=4), normal((case.T, case.F), 39)
    return Inputs(arrays=(h,), constants=(CLAMP.alpha, CLAMP.limit), weight=dy, wrt=(0,))


def _swiglu_matmul(case: Case, placed: Placed) -> Inputs:
    h, w, dy = normal((case.T, 2 * case.F), 40), normal((case.D, case.F), 41), normal((case.T, case.D), 42)
    return Inputs(arrays=(h, w), weight=dy, wrt=(0, 1))


def _swiglu_grouped_matmul(case: Case, placed: Placed) -> Inputs:
    h, w = normal((case.rows, 2 * case.F), 43), normal((case.E, case.F, case.D), 44)
    arrays = (h, w, placed.counts)
    return Inputs(arrays=arrays, constants=(None,), weight=normal((case.rows, case.D), 45), wrt=(0, 1))


def _clamped_swiglu_grouped_matmul(case: Case, placed: Placed) -> Inputs:
    plain = _swiglu_grouped_matmul(case, placed)
    clamp = (GROUPED_CLAMP.alpha, GROUPED_CLAMP.limit)
    return Inputs(arrays=plain.arrays, constants=(clamp,), weight=plain.weight, wrt=plain.wrt)


def _permute(case: Case, placed: Placed) -> Inputs:
    x, dy = normal((case.T, case.D), 20), normal((case.rows, case.D), 21)
    return Inputs(arrays=(x, placed.row, placed.source), weight=dy, wrt=(0,))


def _combine(case: Case, placed: Placed) -> Inputs:
    y, dout = normal((case.rows, case.D), 22), normal((case.T, case.D), 23)
    return Inputs(arrays=(y, routing(case)[1], placed.row, placed.source), weight=dout, wrt=(0, 1))


def _grouped_matmul(case: Case, placed: Placed) -> Inputs:
    x, w, dy = normal((case.rows, case.D), 24), normal((case.E, case.D, case.F), 25), normal((case.rows, case.F), 26)
    return Inputs(arrays=(x, w, placed.counts), weight=dy, wrt=(0, 1))


def _add_by_expert(case: Case, placed: Placed) -> Inputs:
    x, b, dy = normal((case.rows, case.F), 35), normal((case.E, case.F), 36), normal((case.rows, case.F), 37)
    return Inputs(arrays=(x, b, placed.counts), weight=dy, wrt=(0, 1))


def _cross_entropy(case: Case, placed: Placed) -> Inputs:
    logits, dloss = normal((case.T, case.V), 27, scale=3), normal((case.T,), 28)
    target = np.random.default_rng(29).integers(-1, case.V, case.T).astype(np.int32)
    return Inputs(arrays=(logits, target), weight=dloss, wrt=(0,))


def _square_sum(case: Case, placed: Placed) -> Inputs:
    return Inputs(arrays=(normal((case.T, case.D), 1),), weight=np.zeros(0), wrt=())


def _sort_by_expert(case: Case, placed: Placed) -> Inputs:
    constants = (case.E, case.capacity, case.by_probability)
    return Inputs(arrays=routing(case), constants=constants, weight=np.zeros(0), wrt=())


def _attention_part(case: Case, placed: Placed) -> Inputs:
    """Every query sees some of the keys, of which there are more than queries."""
    q, v = normal((case.B, case.S, case.H, case.Z), 46), normal((case.B, case.S + 9, case.G, case.Z + 5), 47)
    k = normal((case.B, case.S + 9, case.G, case.Z), 48)
    first = np.sort(np.random.default_rng(49).integers(0, case.S, (case.B, case.S)), axis=1).astype(np.int32)
    past = np.full((case.B, case.S), case.S + 9, np.int32)
    return Inputs(arrays=(q, k, v, first, past), weight=np.zeros(0), wrt=())


def _attention_part_gradient(case: Case, placed: Placed) -> Inputs:
    """As if there were other keys, of as much weight, whose output is zero."""
    plain = _attention_part(case, placed)
    dout = normal((case.B, case.S, case.H, case.Z + 5), 50)
    log_sum, dot = np.full((case.B, case.H, case.S), np.log(case.S + 9) + 2.0), normal((case.B, case.H, case.S), 51)
    return Inputs(arrays=(dout, dot, log_sum.astype(np.float32), *plain.arrays), weight=np.zeros(0), wrt=())


def _adamw(case: Case, placed: Placed) -> Inputs:
    """Weight and moments, gradient, and the eight scalars of optim.adamw."""
    weight, grad = normal((case.T, case.D), 52), normal((case.T, case.D), 53)
    first, second = normal((case.T, case.D), 54, 0.1), np.abs(normal((case.T, case.D), 55, 0.1))
    lr, beta1, beta2, eps, decay, scale = 1e-2, 0.9, 0.95, 1e-8, 3e-3, 0.25
    scalars = np.array([lr, beta1, beta2, 1 - beta1, 1 - beta2, eps, decay, scale], np.float32)
    return Inputs(arrays=(weight, first, second, grad, scalars), weight=np.zeros(0), wrt=())


ROUTED = (
    "sort_by_expert",
    "permute",
    "combine",
    "grouped_matmul",
    "swiglu_grouped_matmul",
    "clamped_swiglu_grouped_matmul",
    "add_by_expert",
)
INPUTS: dict[str, Callable[[Case, Placed], Inputs]] = {
    each.__name__.removeprefix("_"): each
    for each in (
        _matmul,
        _embed,
        _rms_norm,
        _rope,
        _attention,
        _attention_to_a_window,
        _split,
        _swiglu,
        _clamped_swiglu,
        _swiglu_matmul,
        _swiglu_grouped_matmul,
        _clamped_swiglu_grouped_matmul,
        _permute,
        _combine,
        _grouped_matmul,
        _add_by_expert,
        _cross_entropy,
    )
}

# Without a gradient of their own, and the same in every precision of a run.
OTHERS: dict[str, Callable[[Case, Placed], Inputs]] = {
    each.__name__.removeprefix("_"): each
    for each in (_sort_by_expert, _square_sum, _attention_part, _attention_part_gradient, _adamw)
}


def cases_of(name: str) -> tuple[Case, ...]:
    """The cases in which `amt selftest` compares a kernel."""
    return FOR_ROUTED if name in ROUTED else FOR_ALL


def inputs_of(name: str, case: Case, placed: Placed) -> Inputs:
    """What a kernel of INPUTS or OTHERS gets in `amt selftest`: numbers that bf16 and fp16 hold exactly, so that errors
    are those of the kernel alone."""
    found = (INPUTS | OTHERS)[name](case, placed)
    if name in ("adamw", "attention_part_gradient"):
        return found
    return replace(found, arrays=tuple(map(_short, found.arrays)), weight=_short(found.weight))


def _short(x: Array) -> Array:
    """fp32 numbers rounded to the eight bits of bf16."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32) if x.dtype == np.float32 else x
