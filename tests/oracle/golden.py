"""Golden files and how to read them. scripts/make_golden.py makes them and says what they hold."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from ascend_moe_train.checkpoint.huggingface import config_of_present, from_hf
from ascend_moe_train.checkpoint.huggingface_config import model_config_from_hf
from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.counts import parameter_shapes

Array = NDArray[Any]

PROMPT = 8
FOLDER = Path(__file__).parent.parent / "golden"
HF_CASES = ("mixtral_tiny", "qwen3_moe_tiny")
FAMILY_CASES = (
    *HF_CASES,
    "llama_tiny",
    "qwen3_tiny",
    "olmoe_tiny",
    "glm4_moe_tiny",
    "gpt_oss_tiny",
    "dots1_tiny",
    "deepseek_v2_tiny",
    "deepseek_v3_tiny",
    "deepseek_v3_mtp_tiny",
)
# Endings of the tensors that are no parameters, and so have no gradient.
BUFFERS = ("e_score_correction_bias",)


@dataclass(frozen=True, kw_only=True)
class Golden:
    """What transformers computed, under our names and in our terms. `targets_BS` is -1 where not counted."""

    config: ModelConfig
    weights: Mapping[str, Array]
    grads: Mapping[str, Array]
    tokens_BS: NDArray[np.int64]
    targets_BS: NDArray[np.int64]
    logits_BSV: Array
    cross_entropy: float
    balance: float | None
    """The balance loss before its coefficient; None where transformers computes none."""
    total: float
    generated_BS: NDArray[np.int64]
    """The first PROMPT tokens of `tokens_BS`, and what greedy generation adds to them."""


def read_tensors(case: str) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors and the metadata of a golden file."""
    path = FOLDER / f"hf_{case}.safetensors"
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    return load_file(path), metadata


def golden(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> Golden:
    """Translate the content of a golden file."""
    weights, grads = _below("weight.", tensors), _below("grad.", tensors)
    config = config_of_present(model_config_from_hf(json.loads(metadata["made_of"])["config"]), weights)
    no_grads = {name: np.zeros_like(value) for name, value in weights.items() if name.endswith(BUFFERS)}
    gradients = from_hf(grads | no_grads, config)
    return Golden(
        config=config,
        weights=from_hf(weights, config),
        grads={name: gradients[name] for name in parameter_shapes(config)},
        tokens_BS=tensors["tokens"],
        targets_BS=tensors["labels"],
        logits_BSV=tensors["logits"],
        cross_entropy=float(tensors["cross_entropy"]),
        balance=float(tensors["aux_loss"]) / config.moe.top_k if config.moe and "aux_loss" in tensors else None,
        total=float(tensors["loss"]),
        generated_BS=tensors["generated"],
    )


def _below(prefix: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
