"""1-bit Adam beside Adam: validation loss, bytes and time, on the same data from the same weights.

    python -m benchmarks.onebit [--whole] [--seeds 1] [--steps 200] [--ranks 2] [--models moe dense] [--set KEY=VALUE]

A small Mixture-of-Experts model and a dense one on the demo corpus, one optimizer after the other for each seed, in
processes of the launcher. Second moments are fixed after `--warm-up` of the steps (0.15, the paper's share). Losses are
those of the last validation. Volume: payload of dense gradients or momenta over the whole run, Adam's over 1-bit
Adam's, beside 1 / (w + (1 - w) / 32) for a share w of warm-up (the paper's 16 is for fp16). The corpus is the demo's
(`make corpora/stdlib/manifest.json`). With --whole, 3 seeds of 2,000 steps (hours), which say something of convergence:
onebit.json and onebit.md. Otherwise a short run, which shows that both train, and bytes: onebit_short.json and .md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.config import RunConfig, load_run
from ascend_moe_train.parallel.cuts import GROUP_AXES
from benchmarks.report import machine, write_results

HERE = Path(__file__).parent
RUN = HERE.parent / "examples" / "demo.yaml"
SIZES = ("model.preset=tiny", "model.vocab_size=2048", "data.seq_len=64", "batch.global_sequences=8")
MODELS = {"moe": (), "dense": ("model.moe=null",)}
OPTIMIZERS = ("adamw", "onebit_adam")
WHOLE, SHORT = (3, 2000), (1, 200)  # seeds, steps


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one run."""

    loss: float
    step_s: float


def settings(model: str, ranks: int, seed: int, steps: int, warm_up: int, optimizer: str) -> list[str]:
    """Overrides of the demo's run file."""
    found = [*SIZES, *MODELS[model], f"run.seed={seed}", f"run.steps={steps}", f"run.eval_every={steps}"]
    found += ["run.eval_sequences=256", f"batch.micro_sequences={8 // ranks}", "run.sample_prompt=null"]
    found += [f"checkpoint.every={steps}", "run.tensorboard=false"]
    if optimizer == "onebit_adam":
        found += ["parallel.compress.method=onebit_adam", f"parallel.compress.warmup_updates={warm_up}"]
    return found


def train(overrides: list[str], ranks: int) -> Found:
    """One run, from its start to its end."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word for each in (*overrides, f"run.dir={folder}/run") for word in ("--set", each)]
        amt = [sys.executable, "-c", "from ascend_moe_train.cli.main import run; run()"]
        command = [*amt, "launch", "--ranks", str(ranks), "train", str(RUN), "--json", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(overrides)} on {ranks} ranks: exit code {done.returncode}\n{done.stderr[-2000:]}")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [record["step_s"] for record in records if record["kind"] == "step"]
    losses = [record["loss"] for record in records if record["kind"] == "eval"]
    return Found(loss=losses[-1], step_s=statistics.median(steps[len(steps) // 2 :]))


def volume(config: RunConfig, ranks: int, warm_up: int) -> tuple[float, float]:
    """(bytes of a step of Adam over one of momenta, those of the whole run), of dense weights on a rank."""
    from ascend_moe_train.parallel.buckets import share_of
    from ascend_moe_train.parallel.comm import Group
    from ascend_moe_train.parallel.mesh import mesh_of
    from ascend_moe_train.parallel.shards import placements
    from ascend_moe_train.parallel.zero_costs import ZeroPlan, zero_traffic

    world = Group(name="_".join(GROUP_AXES["dense"]), ranks=tuple(range(ranks)), index=0)
    placed = placements(config.model, mesh_of(config, ranks), 0)
    shares = [
        share_of(name, each, group=world, form="whole") for name, each in placed.items() if each.gradient == "dense"
    ]
    plan = ZeroPlan(
        stage=0,
        shares=tuple(shares),
        names=tuple(share.name for share in shares),
        world=Group(name="world", ranks=world.ranks, index=0),
        uses={},
        bucket_bytes=config.parallel.bucket_bytes,
        compress=config.parallel.compress,
    )
    sizes = [
        # an all_reduce goes both ways, as an all_to_all and an all_gather of a part do
        sum(
            size * (2 if verb == "all_reduce" else ranks if verb == "all_gather" else 1)
            for (verb, group), (_, size) in zero_traffic(plan, 1, sends_momenta=sends).items()
            if group == world.name
        )
        for sends in (False, True)
    ]
    steps = config.run.steps
    whole = steps * sizes[0] / (warm_up * sizes[0] + (steps - warm_up) * sizes[1])
    return sizes[0] / sizes[1], whole


def main() -> None:
    """Runs it and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.onebit")
    parser.add_argument("--whole", action="store_true", help="3 seeds of 2,000 steps")
    parser.add_argument("--seeds", type=int, help="default 1")
    parser.add_argument("--steps", type=int, help="default 200")
    parser.add_argument("--ranks", type=int, nargs="+", help="default 2, with --whole 2 and 4")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--warm-up", type=float, default=0.15)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    asked = parser.parse_args()
    asked.seeds = asked.seeds or (WHOLE if asked.whole else SHORT)[0]
    asked.steps = asked.steps or (WHOLE if asked.whole else SHORT)[1]
    asked.ranks = asked.ranks or ([2, 4] if asked.whole else [2])
    warm_up = round(asked.warm_up * asked.steps)
    rows = [row(model, ranks, asked, warm_up) for model in asked.models for ranks in asked.ranks]
    formula = 1 / (asked.warm_up + (1 - asked.warm_up) / 32)
    notes = [
        f"1 / (w + (1 - w) / 32) with w {asked.warm_up}: {formula:.2f}. Ranks of one CPU talk through memory: what the "
        "time of a step is there says nothing of a network."
    ]
    title, text = "1-bit Adam beside Adam", __doc__.partition("\n\n")[2] if __doc__ else None
    write_results(HERE / ("onebit" if asked.whole else "onebit_short"), title, text, rows, notes, machine())


def row(model: str, ranks: int, asked: argparse.Namespace, warm_up: int) -> dict[str, Any]:
    """Of all seeds."""
    found: dict[str, list[Found]] = {optimizer: [] for optimizer in OPTIMIZERS}
    keys: list[str] = []
    for seed in range(1, asked.seeds + 1):
        for optimizer in OPTIMIZERS:
            keys = [*settings(model, ranks, seed, asked.steps, warm_up, optimizer), *asked.overrides]
            found[optimizer].append(train(keys, ranks))
            print(model, ranks, "ranks, seed", seed, optimizer, found[optimizer][-1], flush=True)
    ratios = [one.loss / other.loss for one, other in zip(found["onebit_adam"], found["adamw"], strict=True)]
    times = [one.step_s / other.step_s for one, other in zip(found["onebit_adam"], found["adamw"], strict=True)]
    of_step, of_run = volume(load_run(RUN, keys), ranks, warm_up)
    return {
        "model": model,
        "ranks": ranks,
        "loss of Adam, by seed": ", ".join(f"{each.loss:.4f}" for each in found["adamw"]),
        "of 1-bit Adam": ", ".join(f"{each.loss:.4f}" for each in found["onebit_adam"]),
        "1-bit over Adam": f"{min(ratios):.4f} to {max(ratios):.4f}",
        "bytes of a step, Adam over 1-bit": f"{of_step:.1f}",
        "of the run": f"{of_run:.2f}",
        "time of a step, 1-bit over Adam": f"{statistics.median(times):.2f}",
    }


if __name__ == "__main__":
    main()
