"""One process of torch.distributed with gloo for collectives.py. Needs torch, not this project's dependencies."""

import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.ranks_orders import Order, Reply, serve


def make_call(verb: str, size_bytes: int) -> Callable[[], object]:
    """The collective at one size, on a buffer of its own."""
    if verb == "all_reduce":
        x = torch.rand(size_bytes // 4).mul_(0)  # in place, again and again: anything else would grow
        return lambda: dist.all_reduce(x)
    x = torch.rand(size_bytes // 4)
    out = torch.empty_like(x)
    return lambda: dist.all_to_all_single(out, x)


def main(rank: int, ranks: int, path: str) -> None:
    """Serves until the benchmark is done."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = Path(path).with_name("store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    ready = cache(lambda verb, size_bytes: make_call(verb, size_bytes))

    def obey(order: Order) -> Reply:
        call = ready(order["verb"], order["size_bytes"])
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(order["calls"]):
            call()
        return {"gloo": time.perf_counter() - start_s}

    serve(path, rank, {"torch": torch.__version__}, obey)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
