"""Gradients of some layers of a model, with blocks that run again before their backward pass and without."""

import json
import os
from dataclasses import replace
from functools import cache
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
import pytest

from ascend_moe_train.model.chunk import Chunk, ChunkGradient, KeepingForward, RecomputedGradient, chunk_gradient
from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.selftest.kernel_cases import normal
from tests.model_cases import CASES as MODEL_CASES
from tests.model_cases import batch, firm_params
from tests.model_run import CompiledModel, kernels, moe_layers, noise
from tests.ranks import run_ranks

B, S, D, V = 2, 6, 8, 16
# a dense layer between two with experts; router noise; an embedding that is the head too
CONFIG = ModelConfig.model_validate_json(
    json.dumps(
        {
            "vocab_size": V,
            "hidden": D,
            "num_layers": 3,
            "num_heads": 2,
            "num_kv_heads": 1,
            "ffn": 12,
            "tie_embeddings": True,
            "moe": {
                "num_experts": 3,
                "top_k": 2,
                "ffn": 6,
                "dense_layers": [1],
                "aux_loss_coef": 0.1,
                "z_loss_coef": 0.1,
                "jitter": 0.1,
            },
        }
    )
)
SEED = 7


def model(num_recomputed: int, first: int = 0) -> Transformer:
    made = Transformer(CONFIG, kernels("portable"), S)
    made.initialize(SEED)
    for layer in range(first, first + num_recomputed):
        made.layers[layer].is_recomputed = True
    return made


def inputs() -> list[Any]:
    """x_TD, gradient of the output, scale, and what a micro-batch has."""
    tokens = np.random.default_rng(SEED).integers(0, V, (B, S + 1)).astype(np.int32)
    segment = np.sort(np.random.default_rng(SEED).integers(0, 2, (B, S)), axis=1).astype(np.int32)
    position = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
    batch = (tokens[:, :-1], tokens[:, 1:], segment, position)
    floats = (normal((B * S, D), 1), normal((B * S, D), 2), np.array([3.0], np.float32))
    last = (np.array([0.5, 0.25], np.float32), np.array([SEED], np.int32))
    return [ms.Tensor(np.ascontiguousarray(x)) for x in (*floats, *batch, *last)]


def same_bits(x: Any, y: Any) -> bool:
    return bool(x.asnumpy().tobytes() == y.asnumpy().tobytes())


def gradients(
    layers: tuple[int, int], num_recomputed: int, wanted: list[str] | None, *, of_input: bool, is_given: bool = False
) -> list[bytes]:
    """The bits of all results of a chunk's gradient; `wanted` are the weights, None all that are in the chunk."""
    made = model(num_recomputed, layers[0])
    is_first, is_last = layers[0] == 0, layers[1] == CONFIG.num_layers
    inside = (*(f"layers.{layer}." for layer in range(*layers)), *(("embed.",) if is_first or is_last else ()))
    inside += ("norm.",) if is_last else ()
    names = [name for name, _ in made.weights() if name.startswith(inside)] if wanted is None else wanted
    weights = [p for name, p in made.weights() if name in names]
    chunk = Chunk(made, layers, is_first=is_first, is_last=is_last)
    cell = chunk_gradient(chunk, weights, of_input=of_input, is_given=is_given)
    assert isinstance(cell, RecomputedGradient if num_recomputed else ChunkGradient)
    given: list[Any] = []
    if is_given:
        x_TD, _, _, *others = inputs()
        y_TD, *given = KeepingForward(chunk, num_recomputed)(x_TD, *others)
        assert same_bits(y_TD, chunk(x_TD, *others)[0])
    dx_TD, figures, counts_LE, found = cell(*inputs(), *given)
    assert len(found) == len(weights)
    assert dx_TD.shape == ((B * S, D) if of_input and not is_first else (1,))
    return [x.asnumpy().tobytes() for x in (dx_TD, figures, counts_LE, *found)]


# layers, how many of them run again, weights whose gradients are wanted, whether the input's is
CASES: list[tuple[tuple[int, int], int, list[str] | None, bool]] = [
    ((0, 3), 3, None, False),
    ((0, 3), 1, None, False),
    ((0, 2), 2, ["layers.1.ffn.w2.weight", "layers.0.moe.experts.w13"], True),
    ((1, 2), 1, None, True),
    ((1, 3), 1, ["norm.weight", "embed.weight"], False),
    ((1, 3), 2, [], True),
]


QUICK = (1, 3, 4)


def on_rank(cases: list[int]) -> dict[int, bool]:
    """Of each of these cases whether the bits are the same, after a graph that must not matter: a model that is called
    twice, with two layers of experts that drop by position."""
    before = next(
        case
        for case in MODEL_CASES.values()
        if (moe := case.config.moe) is not None
        and case.kernels == "portable"
        and (moe.capacity_factor is not None, moe.drop_policy) == (True, "position")
        and len(moe_layers(case.config)) == 2
    )
    fed = batch(before)
    fed = replace(fed, noise_TD=noise(before.config, fed, SEED))
    params = firm_params(before.config, fed)
    CompiledModel(before.config, kernels("portable"), params, num_positions=fed.tokens_BS.shape[1]).run(fed, SEED)
    found = {}
    for case in cases:
        layers, count, wanted, of_input = CASES[case]
        everything_kept = gradients(layers, 0, wanted, of_input=of_input)
        found[case] = gradients(layers, count, wanted, of_input=of_input) == everything_kept
        if layers[1] < CONFIG.num_layers:  # the last stage has no forward pass of its own
            found[case] &= gradients(layers, count, wanted, of_input=of_input, is_given=True) == everything_kept
    return found


@cache
def are_same(cases: tuple[int, ...]) -> dict[int, bool]:
    """From a process of its own, in which no gradient of recomputed blocks was made before the other graph."""
    found = run_ranks(1, "tests.unit.test_chunk:on_rank", list(cases), deadline_s=600)[0]
    return {int(case): is_same for case, is_same in found.items()}


@pytest.mark.parametrize("case", QUICK)
def test_blocks_that_run_again_give_the_same_bits(case: int) -> None:
    assert are_same(QUICK)[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in range(len(CASES)) if case not in QUICK])
def test_more_blocks_that_run_again_give_the_same_bits(case: int) -> None:
    assert are_same(tuple(range(len(CASES))))[case]


def test_blocks_that_run_again_come_first() -> None:
    made = model(1, first=1)
    with pytest.raises(ValueError, match="layers 0 to 2: those that are recomputed come before the others"):
        chunk_gradient(Chunk(made, (0, 3), is_first=True, is_last=True), [], of_input=False)
