"""One process of a peer: a Hugging Face model in torch's DistributedDataParallel with gloo, or alone.

Needs torch and transformers, not this project's dependencies.
"""

import os
import resource
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ranks_orders import Order, Reply, serve


class Training:
    """A model of transformers' class `family`, and its optimizer, with one implementation of the experts."""

    def __init__(self, family: str, experts: str, sizes: dict[str, int], ranks: int) -> None:
        torch.manual_seed(0)
        config_class, model_class = (getattr(transformers, f"{family}{part}") for part in ("Config", "ForCausalLM"))
        config = config_class(**sizes, output_router_logits=True, experts_implementation=experts)
        self.vocab_size = config.vocab_size
        self.module = model_class(config).train()
        self.model: Any = DistributedDataParallel(self.module) if ranks > 1 else self.module
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def run(self, steps: int, sequences: int, seq_len: int) -> Reply:
        """Trains on random tokens."""
        step_s = []
        for _ in range(steps):
            tokens = torch.randint(0, self.vocab_size, (sequences, seq_len))
            start_s = time.monotonic()
            self.model(tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            step_s.append(time.monotonic() - start_s)
        return {"step_s": step_s, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main(rank: int, ranks: int, path: str) -> None:
    """Serves until the benchmark is done."""
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = Path(path).with_name("store")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    training = cache(lambda family, experts, sizes: Training(family, experts, dict(sizes), ranks))

    def obey(order: Order) -> Reply:
        torch.set_num_threads(order.get("threads", max(1, len(os.sched_getaffinity(0)) // ranks)))
        chosen = training(order["family"], order["experts"], tuple(order["sizes"].items()))
        return chosen.run(order["steps"], order["sequences"], order["seq_len"])

    serve(path, rank, {"torch": torch.__version__, "transformers": transformers.__version__}, obey)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
