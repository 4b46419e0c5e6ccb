"""Training step of the demo model on one rank and on two, layout by layout, against torch's DDP, in one run.

    python -m benchmarks.ranks [--rounds 2] [--steps 3] [--set KEY=VALUE ...]

Every variant trains examples/demo.yaml (native kernels, fp32, AdamW, clipping) on the same 8 x 256 random tokens a
step, however many ranks share them. One rank has all cores (as many OpenMP threads), two have half of them each, as
`amt launch` shares them out, and keep to them; peers are not pinned. The peer is Hugging Face Mixtral in the same
shape: one process with a thread for each core, and DistributedDataParallel with gloo in two processes with half of
them, in the environment of PEER_PYTHON. All processes are started and compiled first, and then take turns of some
steps; those whose turn it is not sleep. The next round goes the other way round. A step ends when the slowest rank has
its results.

Figures are medians over rounds of a turn's median step. Against one: the median of the ratios of each round to one rank
(the peer's: to its one process, same experts), with the lowest and the highest. Time in collectives is taken around
each call of the communication layer on each rank, and is its mean over ranks and steps, as a share of the step; what
the graph does to call it is not in it. Of it, what lies before the last rank has come to that collective is waiting.
The peer's communication overlaps with its backward pass and is not measured. Writes ranks.json and ranks.md.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.config import load_run
from benchmarks.peer_model import peer_model
from benchmarks.ranks_orders import Order, Reply
from benchmarks.ranks_workers import Workers, peers_of, ranks_of
from benchmarks.report import machine, write_results

HERE = Path(__file__).parent
RUN = HERE.parent / "examples" / "demo.yaml"
RANKS = 2
# Number of ranks with sequences of their own, and keys of the run.
LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "dp2": (2, ()),
    "ep2": (2, ("parallel.ep=2",)),
    "tp2": (1, ("parallel.tp=2",)),
    "zero1": (2, ("parallel.zero_stage=1",)),
    "zero2": (2, ("parallel.zero_stage=2",)),
    "zero3": (2, ("parallel.zero_stage=3",)),
}
EXPERTS = ("eager", "grouped_mm")
# of communication, with the decimals that are shown
COLUMNS = {"in collectives": 2, "of it waiting": 2, "collectives a step": 0, "payload, MB a step": 1}
WARM_STEPS = 2
SAME_LOSS = 1e-4  # relative, after all steps


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What takes turns: who runs it on which order, and the name of what it is measured against."""

    workers: Workers
    order: Order
    one: str


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Figures of some steps of a variant. Those of its communication are by column; some variants have none."""

    step_s: float
    communication: Mapping[str, float]
    loss: float | None


def turn_of(replies: Sequence[Reply]) -> Turn:
    """Figures from what the ranks say."""
    slowest_s = [max(each) for each in zip(*(reply["step_s"] for reply in replies), strict=True)]
    communication = communication_of(replies, sum(slowest_s)) if replies[0].get("spans_s") else {}
    return Turn(step_s=statistics.median(slowest_s), communication=communication, loss=replies[0].get("loss"))


def communication_of(replies: Sequence[Reply], all_s: float) -> dict[str, float]:
    """By column of the table. Every collective is one of all ranks, and all come to the same ones in the same order."""
    ranks, steps = len(replies), len(replies[0]["step_s"])
    inside_s = waiting_s = 0.0
    for spans in zip(*(reply["spans_s"] for reply in replies), strict=True):
        last_s = max(start_s for start_s, _ in spans)
        inside_s += sum(end_s - start_s for start_s, end_s in spans) / ranks
        waiting_s += sum(last_s - start_s for start_s, _ in spans) / ranks
    figures = (inside_s / all_s, waiting_s / inside_s, len(replies[0]["spans_s"]) / steps)
    return dict(zip(COLUMNS, (*figures, replies[0]["payload_bytes"] / steps / 1e6), strict=True))


def variants_of(ours: Mapping[int, Workers], peers: Mapping[int, Workers], given: Sequence[str]) -> dict[str, Variant]:
    """All of them by name; `given` are keys of the run for all."""
    config = load_run(RUN, given)
    sequences = config.batch.global_sequences

    def our(workers: Workers, dp: int, keys: Sequence[str]) -> Variant:
        overrides = ["run.kernels=native", *given, f"batch.micro_sequences={sequences // dp}", *keys]
        return Variant(workers=workers, order={"overrides": overrides}, one="1 rank")

    found = {"1 rank": our(ours[1], 1, ())}
    found |= {name: our(ours[RANKS], dp, keys) for name, (dp, keys) in LAYOUTS.items()}
    for experts in EXPERTS:
        one = f"transformers Mixtral, {experts}"
        for count, name in ((1, one), (RANKS, f"{one}, DDP")):
            order = {"experts": experts, "sequences": sequences // count, **peer_model(config)}
            found[name] = Variant(workers=peers[count], order=order, one=one)
    return found


def measure(variants: Mapping[str, Variant], rounds: int, steps: int) -> dict[str, list[Turn]]:
    """The turns of every variant."""
    for name, variant in variants.items():
        print("warming up:", name, flush=True)
        variant.workers.ask({**variant.order, "steps": WARM_STEPS})
    turns: dict[str, list[Turn]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in list(variants)[:: 1 if number % 2 == 0 else -1]:
            turn = turn_of(variants[name].workers.ask({**variants[name].order, "steps": steps}))
            turns[name].append(turn)
            print(f"round {number + 1}: {name} {turn.step_s * 1e3:.0f} ms", flush=True)
    return turns


def row_of(name: str, one: str, turns: Mapping[str, list[Turn]], tokens: int) -> dict[str, Any]:
    """One row of the table."""
    own = turns[name]
    ratios = [base.step_s / turn.step_s for base, turn in zip(turns[one], own, strict=True)]

    def middle(column: str, digits: int) -> float | str:
        found = [turn.communication[column] for turn in own if turn.communication]
        return round(statistics.median(found), digits or None) if found else ""

    return {
        "variant": name if name in (one, f"{one}, DDP") else f"2 ranks, {name}",
        "tokens/s": round(tokens / statistics.median(turn.step_s for turn in own)),
        "against one": round(statistics.median(ratios), 2),
        "lowest to highest": f"{min(ratios):.2f} to {max(ratios):.2f}",
        **{column: middle(column, digits) for column, digits in COLUMNS.items()},
    }


def loss_note(turns: Mapping[str, list[Turn]]) -> str:
    """Whether all layouts trained alike."""
    (one, *others) = [loss for found in turns.values() if (loss := found[-1].loss) is not None]
    apart = max(abs(other - one) / one for other in others)
    alike = "" if apart < SAME_LOSS else ", which is NOT the same training"
    return f"After the last step the losses of two ranks are at most {apart:.1e} (relative) from that of one{alike}."


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of one turn")
    parser.add_argument("--set", dest="keys", action="append", default=[], metavar="KEY=VALUE", help="of the run")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="of one answer")
    given = parser.parse_args()
    config = load_run(RUN, given.keys)
    with ExitStack() as stack:

        def started(make: Callable[..., Workers], kind: str, count: int, module: str) -> Workers:
            return stack.enter_context(make(f"{kind} {count}", count, module, given.timeout))

        peers = {count: started(peers_of, "peer", count, "benchmarks.ranks_ddp") for count in (1, RANKS)}
        ours = {count: started(ranks_of, "ranks", count, "benchmarks.ranks_train") for count in (1, RANKS)}
        versions = {
            key: value for key, value in (ours[1].facts[0] | peers[1].facts[0]).items() if key not in ("rank", "bytes")
        }
        variants = variants_of(ours, peers, given.keys)
        turns = measure(variants, given.rounds, given.steps)
    tokens = config.tokens_per_step
    rows = [row_of(name, variant.one, turns, tokens) for name, variant in variants.items()]
    notes = [f"{given.rounds} rounds of {given.steps} steps of {tokens} tokens.", loss_note(turns)]
    title = "Training step on one rank and on two"
    write_results(HERE / "ranks", title, __doc__, rows, notes, {**machine(), **versions})


if __name__ == "__main__":
    main()
