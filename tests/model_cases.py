"""Small models that meet every option of a model, with a batch and weights.

Every pair of values of two options of experts meets at least once, and every pair of two other options.

Shape letters: see model/kernels/protocol.py.
"""

from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np

from ascend_moe_train.model.config import ModelConfig, MoEConfig, RopeConfig
from tests.oracle.arrays import F64, I64
from tests.oracle.moe import MoEOutput
from tests.oracle.transformer import Inputs, inputs, transformer
from tests.oracle.weights import random_params
from tests.pairwise import Choice, pairwise

BATCH, LENGTH, VOCAB = 3, 14, 37

GATES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, not normalised": {"normalize_topk": False},
    "softmax after top-k": {"score_order": "after_topk"},
    "sigmoid": {"score": "sigmoid"},
    "sigmoid, not normalised": {"score": "sigmoid", "normalize_topk": False},
}
DROPS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "by position": {"capacity_factor": 0.6},
    "by probability": {"capacity_factor": 0.7, "drop_policy": "probability"},
}
CHOICES: dict[str, dict[str, Any]] = {
    "2 of 5": {"num_experts": 5, "top_k": 2},
    "1 of 4": {"num_experts": 4, "top_k": 1, "num_groups": 2, "top_groups": 1},
    "3 of 6": {"num_experts": 6, "top_k": 3, "num_groups": 3, "top_groups": 2, "groups_by": "best_two"},
}
# One letter a layer: M holds experts, D is dense.
LAYERS: dict[str, dict[str, Any]] = {
    letters: {"dense_layers": tuple(i for i, letter in enumerate(letters) if letter == "D")}
    for letters in ("M", "DM", "MM")
}
ROPES = (
    RopeConfig(),
    RopeConfig(theta=500.0, fraction=0.8, scaling="linear", factor=4.0),
    RopeConfig(scaling="llama3", factor=4.0, original_positions=20, low_freq_factor=0.5, high_freq_factor=3.0),
    RopeConfig(
        scaling="yarn",
        factor=3.0,
        original_positions=64,
        beta_fast=8.0,
        beta_slow=0.5,
        truncate=False,
        mscale=0.5,
        mscale_all_dim=2.0,
    ),
)
MODEL_FACTORS: dict[str, tuple[Any, ...]] = {
    "documents": (False, True),
    "heads": ((4, 2), (4, 4), (3, 1)),
    "head_dim": (None, 10),
    "qk_norm": ("none", "head", "full"),
    "norm_eps": (1e-5, 1e-1),
    "tie_embeddings": (False, True),
    "rope": ROPES,
}
MOE_FACTORS: dict[str, tuple[Any, ...]] = {
    "kernels": ("portable", "native"),
    "layers": tuple(LAYERS),
    "gates": tuple(GATES),
    "drops": tuple(DROPS),
    "choice": tuple(CHOICES),
    "balance_bias_rate": (None, 0.01),
    "shared_ffn": (0, 8),
    "routed_scale": (1.0, 2.5),
    "aux_loss_coef": (0.1, 0.4),
    "aux_loss_scope": ("sequence", "batch", "model"),
    "z_loss_coef": (0.0, 0.2),
    "jitter": (0.0, 0.3),
    "force_balance": (False, True),
}
DENSE = "no experts"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is built and what it is fed. Quick ones together have every value of every option."""

    name: str
    kernels: str
    config: ModelConfig
    has_documents: bool
    is_quick: bool = True


def is_possible(choice: Choice) -> bool:
    """With even loads the balance loss is constant, and one normalised gate is too: the router would learn nothing."""
    has_bias, is_after = choice["balance_bias_rate"] is not None, choice["gates"] == "softmax after top-k"
    return not (choice["force_balance"] and choice["choice"] == "1 of 4") and not (has_bias and is_after)


def _moe(choice: Choice) -> MoEConfig:
    own = {name: value for name, value in choice.items() if name in MoEConfig.model_fields}
    groups = CHOICES[choice["choice"]] | LAYERS[choice["layers"]] | GATES[choice["gates"]] | DROPS[choice["drops"]]
    return MoEConfig(ffn=12, **groups, **own)


def _case(number: int, choice: Choice, is_quick: bool) -> Case:
    num_heads, num_kv_heads = choice["heads"]
    has_experts = choice.get("layers", DENSE) != DENSE
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden=24,
        num_layers=len(choice["layers"]) if has_experts else 2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn=20,
        moe=_moe(choice) if has_experts else None,
        **{name: choice[name] for name in ("head_dim", "qk_norm", "norm_eps", "tie_embeddings", "rope")},
    )
    words = (choice["layers"], choice["gates"], choice["drops"]) if has_experts else (DENSE,)
    name = f"{number}: {choice['kernels']}, {', '.join(words)}"
    return Case(
        name=name, kernels=choice["kernels"], config=config, has_documents=choice["documents"], is_quick=is_quick
    )


def _cases() -> dict[str, Case]:
    of_experts = pairwise(MOE_FACTORS, is_possible)
    of_experts += [{"kernels": kernels} for kernels in MOE_FACTORS["kernels"]]
    of_models = pairwise(MODEL_FACTORS, lambda _: True)
    assert len(of_models) <= len(of_experts)
    cases: dict[str, Case] = {}
    met: set[tuple[str, str]] = set()
    for number, (a, b) in enumerate(zip(of_experts, cycle(of_models), strict=False)):
        values = {(name, repr(value)) for name, value in (a | b).items()}
        case = _case(number, a | b, is_quick=not values <= met)
        cases[case.name], met = case, met | values
    # one without experts, and one with experts of which no document takes the places of another
    others = [
        next(name for name, case in cases.items() if case.config.moe is None),
        next(
            name
            for name, case in cases.items()
            if case.has_documents and case.config.moe is not None and case.config.moe.capacity_factor is None
        ),
    ]
    return cases | {name: replace(cases[name], is_quick=True) for name in others}


CASES = _cases()


def batch(case: Case, seed: int = 0) -> Inputs:
    """Random tokens; some targets are not counted; documents, if any, have unequal lengths and their own positions."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCAB, (BATCH, LENGTH))
    targets = np.where(generator.random(tokens.shape) < 0.2, -1, generator.integers(0, VOCAB, tokens.shape))
    if not case.has_documents:
        return inputs(tokens, targets)
    starts = generator.random(tokens.shape) < 0.25
    starts[:, 0] = False
    return inputs(tokens, targets, np.cumsum(starts, axis=1), _positions(starts))


def _positions(starts_BS: Any) -> I64:
    positions = np.zeros(starts_BS.shape, np.int64)
    for s in range(1, positions.shape[1]):
        positions[:, s] = np.where(starts_BS[:, s], 0, positions[:, s - 1] + 1)
    return positions


def firm_params(config: ModelConfig, fed: Inputs) -> dict[str, F64]:
    """Weights with which a small error cannot change where a token goes."""
    return next(
        weights for weights in (random_params(config, seed) for seed in range(100)) if _firm(weights, config, fed)
    )


def _firm(weights: dict[str, F64], config: ModelConfig, fed: Inputs) -> bool:
    generator = np.random.default_rng(1)
    shape = (fed.tokens_BS.size, config.hidden)
    layers = sorted(transformer(weights, config, fed).moe_layers)
    # each token for itself: equal beginnings of documents are equal in float64, but not always in fp32
    near = {i: fed.noise_TD.get(i, 1.0) * (1.0 + 1e-4 * generator.standard_normal(shape)) for i in layers}
    here, there = (transformer(weights, config, x).moe_layers for x in (fed, replace(fed, noise_TD=near)))
    return all(_same_places(here[i], there[i]) for i in layers)


def _same_places(a: MoEOutput, b: MoEOutput) -> bool:
    return np.array_equal(a.routing.expert_TK, b.routing.expert_TK) and np.array_equal(
        a.dispatch.assignment_M, b.dispatch.assignment_M
    )
