"""Memory and time of one micro-batch forward and backward under each policy of section `recompute`, in one run.

    python -m benchmarks.recompute [--rounds 1] [--calls 5] [--kernels native ...] [--set KEY=VALUE ...]

The demo model with eight layers, one sequence of 2048 random tokens, fp32, no optimizer; each set of kernels that is
named, native or portable. Every measurement has a process of its own. Memory is the most that it has while the graph
runs the first time, beyond what it has once the graph is compiled: what is kept and worked on between forward and
backward pass, and all gradients, which are the same under every policy. Time is the median of further calls in the
same process. Against none: the median of the ratios of each round to policy `none` with the same kernels, with the
lowest and the highest. Rounds go through the policies forwards and backwards in turn. Writes recompute.json and
recompute.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.config import RunConfig, load_run
from benchmarks.report import machine, write_results

HERE = Path(__file__).parent
RUN = HERE.parent / "examples" / "demo.yaml"
MODEL = ("model.num_layers=8", "data.seq_len=2048", "batch.global_sequences=1", "batch.micro_sequences=1")
POLICIES: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("recompute.policy=selective",),
    "full, 4 of 8 layers": ("recompute.policy=full", "recompute.layers=4"),
    "full": ("recompute.policy=full",),
}
KERNELS = ("native", "portable")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one process."""

    memory_bytes: int
    call_s: float
    compile_s: float


def memory_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(config: RunConfig, calls: int) -> Found:
    """In this process, which must be fresh."""
    import mindspore as ms
    import numpy as np

    from ascend_moe_train.data.loader import Batch
    from ascend_moe_train.model.chunk import Chunk, chunk_gradient
    from ascend_moe_train.parallel.recompute import apply_recompute
    from ascend_moe_train.train.session import build_model
    from ascend_moe_train.train.step import batch_tensors

    model, _, _ = build_model(config)
    apply_recompute(model, config)
    model.initialize(config.run.seed)
    chunk = Chunk(model, (0, len(model.layers)), is_first=True, is_last=True)
    cell = chunk_gradient(chunk, [p for _, p in model.weights()], of_input=False)
    shape = (config.batch.micro_sequences, config.data.seq_len)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).astype(np.int32)
    position = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    batch = Batch(tokens_BS=tokens, targets_BS=tokens, segment_BS=np.zeros_like(tokens), position_BS=position)
    last = (np.array([1.0 / tokens.size, 1.0], np.float32), np.array([1], np.int32))
    inputs = [*(ms.Tensor(np.ones(1, np.float32)) for _ in range(3)), *batch_tensors(batch), *map(ms.Tensor, last)]
    start_s = time.perf_counter()
    cell.compile(*inputs)
    compile_s, before = time.perf_counter() - start_s, memory_bytes("VmRSS")
    times_s = []
    for _ in range(calls + 1):
        start_s = time.perf_counter()
        cell(*inputs)[1].asnumpy()
        times_s.append(time.perf_counter() - start_s)
    return Found(
        memory_bytes=memory_bytes("VmHWM") - before, call_s=statistics.median(times_s[1:]), compile_s=compile_s
    )


def measured_apart(keys: Sequence[str], calls: int, timeout_s: float) -> Found:
    """In a process of its own."""
    command = [sys.executable, "-m", "benchmarks.recompute", "--calls", str(calls), "--one"]
    command += [argument for key in keys for argument in ("--set", key)]
    environment = {**os.environ, "GLOG_v": "3"}
    done = subprocess.run(
        command, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True
    )
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def row_of(kernels: str, policy: str, found: Mapping[tuple[str, str], list[Found]]) -> dict[str, Any]:
    """One row of the table."""
    own, none = found[kernels, policy], found[kernels, "none"]
    ratios = [each.call_s / base.call_s for each, base in zip(own, none, strict=True)]
    memory = statistics.median(each.memory_bytes for each in own)
    compile_s = [each.compile_s / base.compile_s for each, base in zip(own, none, strict=True)]
    return {
        "kernels": kernels,
        "policy": policy,
        "memory, MB": round(memory / 1e6),
        "memory against none": round(memory / statistics.median(each.memory_bytes for each in none), 2),
        "time against none": round(statistics.median(ratios), 2),
        "lowest to highest": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "time to compile against none": round(statistics.median(compile_s), 2),
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--calls", type=int, default=5, help="that are timed, of one process")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["native"], help="portable ones take minutes")
    parser.add_argument("--set", dest="keys", action="append", default=[], metavar="KEY=VALUE", help="of the run")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="of one process")
    parser.add_argument("--one", action="store_true", help="measure in this process, and print what was found")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(vars(measure(load_run(RUN, (*MODEL, *given.keys)), given.calls))))
        return
    pairs = [(kernels, policy) for kernels in given.kernels for policy in POLICIES]
    found: dict[tuple[str, str], list[Found]] = {pair: [] for pair in pairs}
    for number in range(given.rounds):
        for kernels, policy in pairs[:: 1 if number % 2 == 0 else -1]:
            keys = (f"run.kernels={kernels}", *POLICIES[policy], *given.keys)
            found[kernels, policy].append(measured_apart(keys, given.calls, given.timeout))
            print(f"round {number + 1}: {kernels}, {policy}: {found[kernels, policy][-1]}", flush=True)
    rows = [row_of(kernels, policy, found) for kernels, policy in pairs]
    notes = [f"{given.rounds} rounds of {given.calls} calls; load of the machine at the end {os.getloadavg()[0]:.1f}."]
    write_results(HERE / "recompute", "Recomputation", __doc__, rows, notes, machine())


if __name__ == "__main__":
    main()
