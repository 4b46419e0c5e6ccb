"""A Hugging Face folder of Qwen3-MoE's shape with random bfloat16 weights, for benchmarks and tests of conversion.

    python -m scripts.make_synthetic_hf OUT [--layers 6] [--experts 32] [--hidden 2048] [--shard-mb 500]

The default is 2.0 GB in five files: 6 layers of 32 experts, each as large as one of Qwen3-30B-A3B. They are written
by the safetensors library, not by the code that they are to test.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

POOL = 2**25  # random numbers; every tensor is a stretch of them from a random start


def config_of(*, layers: int, experts: int, hidden: int, vocab_size: int = 8192) -> dict[str, Any]:
    """The config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "moe_intermediate_size": 3 * hidden // 8,
        "norm_topk_prob": True,
        "num_attention_heads": hidden // 128,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "num_hidden_layers": layers,
        "num_key_value_heads": max(1, hidden // 512),
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
    }


def shapes_of(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order in which published files have them."""
    hidden, head, ffn = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        yield f"{place}.input_layernorm.weight", (hidden,)
        yield f"{place}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{place}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{place}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{place}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{place}.self_attn.q_norm.weight", (head,)
        yield f"{place}.self_attn.k_norm.weight", (head,)
        yield f"{place}.post_attention_layernorm.weight", (hidden,)
        yield f"{place}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield f"{place}.mlp.experts.{expert}.gate_proj.weight", (ffn, hidden)
            yield f"{place}.mlp.experts.{expert}.up_proj.weight", (ffn, hidden)
            yield f"{place}.mlp.experts.{expert}.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def make(out: Path, config: dict[str, Any], *, shard_bytes: int, seed: int = 1) -> None:
    """Writes config.json, the shards and the index into `out`, which is made."""
    out.mkdir(parents=True)
    random = np.random.default_rng(seed)
    pool = (random.standard_normal(POOL, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room_bytes = shard_bytes
    for name, shape in shapes_of(config):
        size_bytes = 2 * int(np.prod(shape))
        if size_bytes > room_bytes and shards[-1]:
            shards.append({})
            room_bytes = shard_bytes
        shards[-1][name] = shape
        room_bytes -= size_bytes
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {}
        for name, shape in shard.items():
            count = int(np.prod(shape))
            start = int(random.integers(0, POOL - count))
            content[name] = pool[start : start + count].reshape(shape)
        save_file(content, out / file, {"format": "pt"})
        files |= dict.fromkeys(shard, file)
    total_bytes = sum(2 * int(np.prod(shape)) for _, shape in shapes_of(config))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--shard-mb", type=int, default=500)
    given = parser.parse_args()
    config = config_of(layers=given.layers, experts=given.experts, hidden=given.hidden)
    make(given.out, config, shard_bytes=given.shard_mb * 10**6)


if __name__ == "__main__":
    main()
