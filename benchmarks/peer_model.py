"""A run's model as Hugging Face's: Mixtral, or Qwen3-MoE where heads of queries and keys are normed."""

from typing import Any

from ascend_moe_train.config import RunConfig


def peer_model(config: RunConfig) -> dict[str, Any]:
    """Part of an order to `ranks_ddp.py`: the class, the arguments of its configuration, the length of a sequence."""
    model = config.model
    assert model.moe is not None
    sizes: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "num_experts_per_tok": model.moe.top_k,
        "max_position_embeddings": config.data.seq_len,
    }
    if model.qk_norm == "head":
        family, more = "Qwen3Moe", {"moe_intermediate_size": model.moe.ffn, "num_experts": model.moe.num_experts}
        more |= {"head_dim": model.head_size, "norm_topk_prob": model.moe.normalize_topk}
    else:
        family, more = "Mixtral", {"intermediate_size": model.moe.ffn, "num_local_experts": model.moe.num_experts}
    return {"family": family, "sizes": sizes | more, "seq_len": config.data.seq_len}
