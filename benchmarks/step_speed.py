"""Training step of a model against Hugging Face's on torch, and of the wider one against the guide's own layer.

    python -m benchmarks.step_speed [--models demo wide] [--rounds 1] [--steps 3]

Two models: the demo's against Mixtral, and one with hidden 512 and 64 experts of width 256, of which a token has 8,
against Qwen3-MoE, and against the layer that the guide shows, a loop over experts that are given all tokens (the rung
`one_by_one` of `amt bench ablate`, in MindSpore's own operators). All train on the same 8 x 256 random tokens a step,
fp32, AdamW, clipping, on the same cores. One process has all of them, two ranks half of them each: data parallel ones
of the demo, expert parallel ones of the wider model.

Each variant has processes of its own, one variant at a time; with more rounds, they take turns. The peers run in the
environment of PEER_PYTHON (`make bench` makes it). Figures are medians over rounds of a run's median step, after two
steps that warm up, or of one step if it takes more than two seconds; peers have a thread for each core; memory is the
most that its processes have had together. FLOP/s are model FLOPs. The peak is the faster of NumPy's sgemm and that of
MindSpore's oneDNN, with all cores.

Where the time goes is measured in one more run of one process, around each kernel of ours; the rest is MindSpore's own.
Writes step_speed and step_parts, .md and .json, and of the wider model step_speed_wide and step_parts_wide.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ascend_moe_train.bench.ladder import START
from ascend_moe_train.config import RunConfig, load_run
from ascend_moe_train.model.counts import training_flops_per_token
from benchmarks.peer_model import peer_model
from benchmarks.ranks_orders import Order, Reply
from benchmarks.ranks_workers import Workers, peers_of, ranks_of
from benchmarks.report import Row, machine, write_results

HERE = Path(__file__).parent
RUN = HERE.parent / "examples" / "demo.yaml"
WARM_STEPS = 2
SLOW_STEP_S = 2.0  # from there on noise is small beside what is shown, and steps are minutes of everybody's time
TWO_RANKS = ("batch.micro_sequences=4",)
WIDE = (
    "model.hidden=512",
    "model.num_layers=2",
    "model.qk_norm=head",
    "model.moe.num_experts=64",
    "model.moe.top_k=8",
    "model.moe.ffn=256",
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A run, how its pages are called, how two ranks share it, and the slow way that it is measured against: of both a
    name, of the one keys, of the other its order."""

    title: str
    ending: str
    keys: tuple[str, ...]
    two_ranks: tuple[str, tuple[str, ...]]
    slow: tuple[str, Order]


MODELS: Mapping[str, Model] = {
    "demo": Model(
        title="the demo model",
        ending="",
        keys=(),
        two_ranks=("dp2", ()),
        slow=("ours, portable kernels", {"overrides": ["run.kernels=portable"]}),
    ),
    "wide": Model(
        title="a wider model",
        ending="_wide",
        keys=WIDE,
        two_ranks=("ep2", ("parallel.ep=2",)),
        slow=(
            "the guide's layer: each expert given all tokens",
            {"overrides": [*WIDE, *START], "put_in": "one_by_one"},
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row: how many processes, what they are told, and whether they are a peer's."""

    name: str
    order: Order
    processes: int = 1
    is_peer: bool = False

    def workers(self, timeout_s: float) -> Workers:
        """Not started yet."""
        if self.is_peer:
            return peers_of(self.name, self.processes, "benchmarks.ranks_ddp", timeout_s)
        return ranks_of(self.name, self.processes, "benchmarks.ranks_train", timeout_s)


def variants(model: Model, config: RunConfig) -> list[Variant]:
    """Ours first."""
    native, cores = [*model.keys, "run.kernels=native"], len(os.sched_getaffinity(0))
    name, keys = model.two_ranks
    two: Order = {"overrides": [*native, *TWO_RANKS, *keys]}
    found = [
        Variant(name="ours, one process", order={"overrides": native}),
        Variant(name=f"ours, two ranks, {name}", order=two, processes=2),
        Variant(name=model.slow[0], order=model.slow[1]),
    ]
    peer = {"sequences": config.batch.global_sequences, **peer_model(config)}
    for experts in ("eager", "grouped_mm"):
        name = f"transformers {peer['family']}, {experts}"
        found.append(Variant(name=name, order={**peer, "experts": experts, "threads": cores}, is_peer=True))
    return found


def run(variant: Variant, steps: int, timeout_s: float) -> dict[str, float]:
    """Seconds of the median step of the slowest process, and bytes of all."""
    with variant.workers(timeout_s) as workers:
        warm: Sequence[Reply] = workers.ask({**variant.order, "steps": WARM_STEPS})
        is_slow = max(reply["step_s"][-1] for reply in warm) > SLOW_STEP_S
        replies: Sequence[Reply] = workers.ask({**variant.order, "steps": 1 if is_slow else steps})
    slowest_s = [max(each) for each in zip(*(reply["step_s"] for reply in replies), strict=True)]
    return {"step_s": statistics.median(slowest_s), "bytes": sum(reply["peak_bytes"] for reply in replies)}


def sgemm() -> dict[str, float]:
    """FLOP/s by library."""
    command = [sys.executable, "-m", "benchmarks.sgemm"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE.parent)
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def measure(model: Model, rounds: int, steps: int, timeout_s: float) -> float:
    """Writes the page of a model; the peak that it is measured against."""
    config = load_run(RUN, model.keys)
    found: dict[str, list[dict[str, float]]] = {}
    peaks: list[dict[str, float]] = []
    each_round = variants(model, config)
    for number in range(rounds):
        peaks.append(sgemm())
        for variant in each_round[:: 1 if number % 2 == 0 else -1]:
            found.setdefault(variant.name, []).append(run(variant, steps, timeout_s))
            print(f"{variant.name}: {1e3 * found[variant.name][-1]['step_s']:.0f} ms", flush=True)
        peaks.append(sgemm())
    rates = {library: max(each[library] for each in peaks) for library in peaks[0]}
    peak = max(rates.values())
    tokens = config.tokens_per_step
    flops = tokens * training_flops_per_token(config.model, config.data.seq_len)
    middle_s = {each.name: statistics.median(one["step_s"] for one in found[each.name]) for each in each_round}
    best_peer_s = min(middle_s[each.name] for each in each_round if each.is_peer)
    rows: list[Row] = [
        {
            "variant": each.name,
            "tokens/s": round(tokens / middle_s[each.name]),
            "against the best peer": round(best_peer_s / middle_s[each.name], 2),
            "GFLOP/s": round(flops / middle_s[each.name] / 1e9, 1),
            "share of the peak": round(flops / middle_s[each.name] / peak, 2),
            "peak memory, MB": round(statistics.median(one["bytes"] for one in found[each.name]) / 1e6),
        }
        for each in each_round
    ]
    said = ", ".join(f"{library} {rate / 1e9:.0f}" for library, rate in rates.items())
    lowest = min(max(each.values()) for each in peaks) / 1e9
    notes = [
        f"sgemm of 2048 x 2048 with all cores, GFLOP/s: {said}; the peak is the largest of {len(peaks)} measurements "
        f"before and after, the lowest of which was {lowest:.0f}.",
        f"{rounds} round{'s' if rounds > 1 else ''} of {steps} steps, one if it takes over {SLOW_STEP_S:g} s.",
    ]
    write_results(
        HERE / f"step_speed{model.ending}", f"Training step of {model.title}", __doc__, rows, notes, machine()
    )
    return peak


def parts(model: Model, peak: float, steps: int, timeout_s: float) -> None:
    """Where the time of a step of one process goes: writes that page."""
    config = load_run(RUN, model.keys)
    order = {"overrides": [*model.keys, "run.kernels=native"]}
    with ranks_of("parts", 1, "benchmarks.step_parts", timeout_s) as workers:
        workers.ask({**order, "steps": WARM_STEPS})
        reply = workers.ask({**order, "steps": steps})[0]
    whole_s = sum(reply["step_s"])
    flops = steps * config.tokens_per_step * training_flops_per_token(config.model, config.data.seq_len)
    found = {"the whole step": whole_s, **reply["parts_s"], "for comparison, its model FLOPs at the peak": flops / peak}
    rows: list[Row] = [
        {"part": part, "ms a step": round(1e3 * part_s / steps, 1), "share of the step": round(part_s / whole_s, 3)}
        for part, part_s in found.items()
    ]
    title = f"Where the time of a step of {model.title} goes"
    write_results(HERE / f"step_parts{model.ending}", title, __doc__, rows, [f"{steps} steps."], machine())


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_speed")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of one answer")
    given = parser.parse_args()
    for name in given.models:
        peak = measure(MODELS[name], given.rounds, given.steps, given.timeout)
        parts(MODELS[name], peak, given.steps, given.timeout)


if __name__ == "__main__":
    main()
