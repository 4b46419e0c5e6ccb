"""Golden files for parity with Hugging Face transformers: tiny random models, their outputs and their gradients.

Run from the root of the repository where torch and transformers are installed (the package needs neither):

    python -m scripts.make_golden

Each file tests/golden/hf_<case>.safetensors holds, in fp32 from a computation in fp64:

    weight.<name>   weights under the names of published files, as `save_pretrained` writes them
    grad.<name>     gradients of `loss` under the names that transformers keeps in memory (experts fused)
    tokens, labels  (B, S) int64; labels[:, s] is the target of tokens[:, s], -1 where not counted
    logits          (B, S, V)
    cross_entropy, loss    the loss is the cross entropy, plus MTP_COEF times that of multi-token prediction,
    aux_loss               and where transformers knows a balance loss, plus router_aux_loss_coef * aux_loss
    generated       (B, S) int64; the first PROMPT tokens of `tokens`, and what greedy generation adds to them

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
from transformers.modeling_layers import MtpModel

SEED = 20260
BATCH, PROMPT, GENERATED = 2, 8, 32
MTP_COEF = 0.3
GOLDEN = Path(__file__).parent.parent / "tests" / "golden"

_DENSE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
_SHAPE = {**_DENSE, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.2, "experts_implementation": "eager"}
_QWEN3 = {**_SHAPE, "num_experts": 8, "moe_intermediate_size": 12, "head_dim": 12}
_DEEPSEEK = {
    **_SHAPE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 32,
    },
}
_GROUPS = {"n_group": 4, "topk_group": 2}
_DEEPSEEK_V3 = {**_DEEPSEEK, **_GROUPS, "q_lora_rank": 14, "n_shared_experts": 1, "num_nextn_predict_layers": 0}
_GLM4 = {
    **_SHAPE,
    "attention_bias": True,
    "use_qk_norm": True,
    "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
_DOTS1 = {
    **_SHAPE,
    "head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_GPT_OSS = {
    **_SHAPE,
    "head_dim": 8,
    "num_local_experts": 4,
    "intermediate_size": 12,
    "sliding_window": 6,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "truncate": False,
    },
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# Written to tests/golden.
GOLDEN_CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "mixtral_tiny": ("Mixtral", {**_SHAPE, "num_local_experts": 4, "intermediate_size": 24}),
        "qwen3_moe_tiny": ("Qwen3Moe", {**_QWEN3, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
        "llama_tiny": ("Llama", {**_DENSE, "rope_parameters": _LLAMA3}),
        "qwen3_tiny": ("Qwen3", {**_DENSE, "head_dim": 12, "tie_word_embeddings": True}),
        "olmoe_tiny": ("Olmoe", {**_SHAPE, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 12}),
        "glm4_moe_tiny": ("Glm4Moe", _GLM4),
        "gpt_oss_tiny": ("GptOss", _GPT_OSS),
        "dots1_tiny": ("Dots1", _DOTS1),
        "deepseek_v2_tiny": ("DeepseekV2", {**_DEEPSEEK, "n_shared_experts": 2}),
        "deepseek_v3_tiny": ("DeepseekV3", _DEEPSEEK_V3),
        "deepseek_v3_mtp_tiny": (
            "DeepseekV3",
            {
                **_DEEPSEEK_V3,
                "first_k_dense_replace": 0,
                "num_hidden_layers": 1,
                "num_nextn_predict_layers": 1,
                "moe_intermediate_size": 8,
            },
        ),
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
        "qwen3_biased": ("Qwen3", {**_DENSE, "attention_bias": True}),
        "llama_biased_yarn": (
            "Llama",
            {
                **_DENSE,
                "attention_bias": True,
                "head_dim": 12,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "beta_fast": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
        ),
        "deepseek_v2_groups": (
            "DeepseekV2",
            {
                **_DEEPSEEK,
                **_GROUPS,
                "topk_method": "group_limited_greedy",
                "q_lora_rank": 14,
                "n_shared_experts": 1,
                "routed_scaling_factor": 2.0,
                "first_k_dense_replace": 0,
            },
        ),
        "deepseek_v3_two_tokens_further": (
            "DeepseekV3",
            {**_DEEPSEEK_V3, "norm_topk_prob": False, "num_hidden_layers": 1, "num_nextn_predict_layers": 2},
        ),
        "glm4_moe_plain": ("Glm4Moe", {**_GLM4, "attention_bias": False, "use_qk_norm": False, "head_dim": 8}),
        "gpt_oss_windows_everywhere": (
            "GptOss",
            {**_GPT_OSS, "attention_bias": False, "layer_types": ["sliding_attention"] * 2, "swiglu_alpha": 1.0},
        ),
    }
)


def compute(family: str, options: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Build the model from a fixed seed; return (tensors, metadata) of a golden file."""
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{family}Config")(**options)
    # a block of multi-token prediction is published as one more layer
    depth = options.get("num_nextn_predict_layers", 0)
    config.num_hidden_layers += depth
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    config.num_hidden_layers -= depth
    further = _further(model, depth) if depth else None
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *(further.named_parameters() if further else ())]:
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    tensors = {f"weight.{name}": value for name, value in _published(model, further).items()}
    tensors |= _run(model.double(), further.double() if further else None)
    made_of = {
        "config": model.config.to_dict(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    return {name: _stored(value) for name, value in tensors.items()}, {"made_of": json.dumps(made_of, sort_keys=True)}


def _further(model: Any, depth: int) -> Any:
    """The blocks of multi-token prediction, whose decoder layers are the last ones of the model."""
    further = MtpModel(model, depth).eval()
    for k, layer in enumerate(further.layers):
        layer.mtp_block = model.model.layers[model.config.num_hidden_layers + k]
        layer.eh_proj.weight.data.normal_(0.0, model.config.initializer_range)
    return further


def _own_parameters(model: Any, further: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters of the blocks of multi-token prediction that no layer of the model has, under published names."""
    found = {}
    for k, layer in enumerate(further.layers if further else ()):
        prefix = f"model.layers.{model.config.num_hidden_layers + k}"
        for theirs, published in (("post_norm", "shared_head.norm"), ("enorm", "enorm"), ("hnorm", "hnorm")):
            found[f"{prefix}.{published}.weight"] = getattr(layer, theirs).weight
        found[f"{prefix}.eh_proj.weight"] = layer.eh_proj.weight
    return found


def _published(model: Any, further: Any) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors") | _own_parameters(model, further)


def _further_loss(model: Any, further: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over depths of the loss of multi-token prediction, each over as many targets as the model has
    (DeepSeek-V3, equations 24 and 25)."""
    hidden = model.model(input_ids=tokens).last_hidden_state
    loss = 0.0
    for k in range(len(further.layers)):
        position = torch.arange(k + 1, tokens.shape[1])[None]
        hidden = further.forward_layer(k, hidden[:, :-1], position, None, input_ids=tokens[:, k + 1 :])
        targets = labels[:, k + 2 :].reshape(-1)
        logits = model.lm_head(hidden[:, :-1]).flatten(0, 1)
        loss += torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return loss / len(further.layers) / (labels[:, 1:] != -100).sum()


def _run(model: Any, further: Any) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, PROMPT + GENERATED))
    labels = tokens.clone()
    labels[0, 5:8] = -100
    has_balance = "router_aux_loss_coef" in type(model.config).__dataclass_fields__
    balance = {"output_router_logits": True} if has_balance else {}
    out = model(input_ids=tokens, labels=labels, **balance)
    loss = out.loss + MTP_COEF * _further_loss(model, further, tokens, labels) if further else out.loss
    loss.backward()
    # transformers shifts the labels by one inside the loss; here each token stands beside its own target.
    targets = torch.full_like(labels, -1)
    targets[:, :-1] = torch.where(labels[:, 1:] == -100, -1, labels[:, 1:])
    results = {"tokens": tokens, "labels": targets, "logits": out.logits, "loss": loss, "cross_entropy": out.loss}
    if balance:
        results |= {"aux_loss": out.aux_loss}
        results["cross_entropy"] = out.loss - model.config.router_aux_loss_coef * out.aux_loss
    prompt = tokens[:, :PROMPT]
    results["generated"] = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # else tokens that look like padding are masked
        max_new_tokens=GENERATED,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    parameters = dict(model.named_parameters()) | _own_parameters(model, further)
    return results | {f"grad.{name}": parameter.grad for name, parameter in parameters.items()}


def _stored(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone(memory_format=torch.contiguous_format)
    return value.float() if value.is_floating_point() else value


def main() -> None:
    """Write every golden file."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, (family, options) in GOLDEN_CASES.items():
        tensors, metadata = compute(family, options)
        save_file(tensors, GOLDEN / f"hf_{name}.safetensors", metadata=metadata)


if __name__ == "__main__":
    main()
