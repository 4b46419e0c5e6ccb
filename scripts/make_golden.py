"""Golden files for parity with Hugging Face transformers: tiny random models, their outputs and their gradients.

Run from the root of the repository where torch and transformers are installed (the package needs neither):

    python -m scripts.make_golden

Each file tests/golden/hf_<case>.safetensors holds, in fp32 from a computation in fp64:

    weight.<name>   weights under the names of published files, as `save_pretrained` writes them
    grad.<name>     gradients of `loss` under the names that transformers keeps in memory (experts fused)
    tokens, labels  (B, S) int64; labels[:, s] is the target of tokens[:, s], -1 where not counted
    logits          (B, S, V)
    cross_entropy, aux_loss, loss    loss = cross_entropy + router_aux_loss_coef * aux_loss

and as metadata one entry, `made_of` (several would be written in random order): JSON of `config` (the model's
config.json), `transformers` and `torch` (their versions).
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

SEED = 20260
GOLDEN = Path(__file__).parent.parent / "tests" / "golden"

_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "router_aux_loss_coef": 0.2,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
_QWEN3 = {**_SHAPE, "num_experts": 8, "intermediate_size": 40, "moe_intermediate_size": 12, "head_dim": 12}

# Written to tests/golden.
GOLDEN_CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "mixtral_tiny": ("Mixtral", {**_SHAPE, "num_local_experts": 4, "intermediate_size": 24}),
        "qwen3_moe_tiny": ("Qwen3Moe", {**_QWEN3, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    }
)
# Compared live only, where transformers is installed: what the golden files leave out.
LIVE_CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "mixtral_tied_wide_heads": (
            "Mixtral",
            {
                **_SHAPE,
                "num_local_experts": 5,
                "intermediate_size": 16,
                "head_dim": 10,
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            },
        ),
        "qwen3_moe_normalised_with_a_dense_layer": (
            "Qwen3Moe",
            {**_QWEN3, "norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]},
        ),
        "qwen3_moe_every_second_layer": ("Qwen3Moe", {**_QWEN3, "decoder_sparse_step": 2}),
    }
)


def compute(family: str, options: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Build the model from a fixed seed; return (tensors, metadata) of a golden file."""
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    tensors = {f"weight.{name}": value for name, value in _published(model).items()}
    tensors |= _run(model.double())
    made_of = {
        "config": model.config.to_dict(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    return {name: _stored(value) for name, value in tensors.items()}, {"made_of": json.dumps(made_of, sort_keys=True)}


def _published(model: Any) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def _run(model: Any) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, model.config.vocab_size, (2, 17))
    labels = tokens.clone()
    labels[0, 5:8] = -100
    out = model(input_ids=tokens, labels=labels, output_router_logits=True)
    cross_entropy = out.loss - model.config.router_aux_loss_coef * out.aux_loss
    out.loss.backward()
    # transformers shifts the labels by one inside the loss; here each token stands beside its own target.
    targets = torch.full_like(labels, -1)
    targets[:, :-1] = torch.where(labels[:, 1:] == -100, -1, labels[:, 1:])
    return {
        "tokens": tokens,
        "labels": targets,
        "logits": out.logits,
        "cross_entropy": cross_entropy,
        "aux_loss": out.aux_loss,
        "loss": out.loss,
        **{f"grad.{name}": parameter.grad for name, parameter in model.named_parameters()},
    }


def _stored(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().contiguous()
    return value.float() if value.is_floating_point() else value


def main() -> None:
    """Write every golden file."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, (family, options) in GOLDEN_CASES.items():
        tensors, metadata = compute(family, options)
        save_file(tensors, GOLDEN / f"hf_{name}.safetensors", metadata=metadata)


if __name__ == "__main__":
    main()
