"""Times a training step of Hugging Face Mixtral in the demo shape: one JSON line. Needs torch, not this project.

usage: python step_transformers.py EXPERTS_IMPLEMENTATION THREADS STEPS FLOPS_PER_TOKEN
"""

import json
import resource
import statistics
import sys
import time

import torch
from transformers import MixtralConfig, MixtralForCausalLM

SEQUENCES, SEQ_LEN = 8, 256


def main(implementation: str, threads: int, steps: int, flops_per_token: float) -> None:
    """Prints median step time, tokens/s, model FLOP/s and peak memory of `steps` steps after two that warm up."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=SEQ_LEN,
        output_router_logits=True,
        experts_implementation=implementation,
    )
    model = MixtralForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds = []
    for _ in range(steps + 2):
        tokens = torch.randint(0, config.vocab_size, (SEQUENCES, SEQ_LEN))
        start_s = time.perf_counter()
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start_s)
    median_s = statistics.median(seconds[2:])
    per_step = SEQUENCES * SEQ_LEN
    figures = {
        "name": f"transformers Mixtral, experts {implementation}, {threads} {'thread' if threads == 1 else 'threads'}",
        "step_s": median_s,
        "tokens_per_s": per_step / median_s,
        "flops_per_s": per_step / median_s * flops_per_token,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
