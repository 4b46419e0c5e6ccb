"""What `amt plan` predicts of layouts against what they take on this machine: step time, and memory of every rank.

    python -m benchmarks.predicted [--steps 6] [--rounds 10] [--only NAME,...] [--again] [--set KEY=VALUE ...]

`amt bench calibrate` for one rank with all cores, and later for a rank on each core; after each the demo's model, on
the demo's corpus (`make corpora/stdlib/manifest.json`), trained for some steps in each layout of so many ranks, as
`amt bench step` does, whose step is the median of the later half; the fastest stands beside it. Nothing of a layout
goes into its prediction but its run file. Layouts with more ranks than cores count for memory only. What is measured
is kept in build/predicted, from where an interrupted run goes on; --again measures anew. Writes predicted.json and
predicted.md.
"""

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.bench import calibrate, probes
from ascend_moe_train.bench import step as step_bench
from ascend_moe_train.bench.measured import Measured, keep, kept_for
from ascend_moe_train.bench.result import machine
from ascend_moe_train.cli.environment import prepare_environment
from ascend_moe_train.cluster.cores import num_cores
from ascend_moe_train.config import RunConfig
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.planner.hardware import Cluster, catalogue, find_device
from ascend_moe_train.planner.scored import Scored
from benchmarks.report import write_results

HERE = Path(__file__).parent
RUN = HERE.parent / "examples" / "demo.yaml"
BUILD = HERE.parent / "build" / "predicted"
DEVICE = "here"
MEMORY_STEPS = 4  # where only memory counts
TWO_LAYERS = "model.num_layers=2"  # more ranks than cores compile one after another


@dataclass(frozen=True, kw_only=True)
class Layout:
    """So many ranks, and what of the run file is changed for them."""

    ranks: int
    keys: tuple[str, ...]

    @property
    def is_timed(self) -> bool:
        """Whether every rank has a core of its own."""
        return self.ranks <= num_cores()


def layout(ranks: int, micro: int, *keys: str) -> Layout:
    """With micro-batches of `micro` sequences."""
    return Layout(ranks=ranks, keys=(f"batch.micro_sequences={micro}", *keys))


LAYOUTS: Mapping[str, Layout] = {
    "1 rank": layout(1, 8),
    "1 rank, 4 micro-batches": layout(1, 2),
    "1 rank, selective recompute": layout(1, 8, "recompute.policy=selective"),
    "1 rank, full recompute": layout(1, 8, "recompute.policy=full"),
    "dp 2": layout(2, 4),
    "dp 2, 2 micro-batches": layout(2, 2),
    "dp 2, ZeRO 1": layout(2, 4, "parallel.zero_stage=1"),
    "dp 2, ZeRO 3": layout(2, 4, "parallel.zero_stage=3"),
    "ep 2": layout(2, 4, "parallel.ep=2"),
    "tp 2": layout(2, 8, "parallel.tp=2"),
    "tp 2, sequence parallel": layout(2, 8, "parallel.tp=2", "parallel.sequence_parallel=true"),
    "cp 2, ring": layout(2, 8, "parallel.cp=2"),
    "cp 2, Ulysses": layout(2, 8, "parallel.cp=2", "parallel.context=ulysses"),
    "pp 2, 4 micro-batches": layout(2, 2, "parallel.pp=2"),
    "dp 2 x tp 2, ep 2, 2 layers": layout(4, 4, "parallel.tp=2", "parallel.ep=2", TWO_LAYERS),
    "pp 2 x dp 2, ZeRO 1, 2 layers": layout(4, 2, "parallel.pp=2", "parallel.zero_stage=1", TWO_LAYERS),
    "ep 8, ZeRO 3, 2 layers": layout(8, 1, "parallel.ep=8", "parallel.zero_stage=3", TWO_LAYERS),
}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A layout with what was measured and predicted; memory is of each rank."""

    name: str
    layout: Layout
    found: Measured
    planned: Scored
    memory_bytes: tuple[float, ...]

    @property
    def time_error(self) -> float:
        """Predicted through the median step, less one."""
        return self.planned.time.step_s / self.found.step_s - 1

    @property
    def error_of_best(self) -> float:
        """The same of the fastest step."""
        return self.planned.time.step_s / self.found.best_step_s - 1

    @property
    def measured_bytes(self) -> list[int]:
        """Of each rank."""
        return [rank.peak_bytes for rank in self.found.ranks]

    @property
    def memory_errors(self) -> list[float]:
        """Of each rank."""
        return [planned / own - 1 for planned, own in zip(self.memory_bytes, self.measured_bytes, strict=True)]


def say(line: str) -> None:
    """At once, on standard error."""
    print(line, file=sys.stderr, flush=True)


def calibrated(ranks: int, rounds: int) -> Path:
    """The hardware file of so many ranks at a time, made if it is not there."""
    path = BUILD / f"hardware_{ranks}.yaml"
    if not path.exists():
        say(f"calibrating {ranks} ranks")
        asked = calibrate.Asked(ranks=ranks, rounds=rounds, out=BUILD / f"calibrate_{ranks}")
        found, ended = calibrate.probed(("comm", "work"), asked, say)
        if found is None:
            sys.exit(f"not calibrated: {ended.problem or 'stopped'}")
        (BUILD / f"probed_{ranks}.json").write_bytes(probes.probed_json(found))
        path.write_text(calibrate.hardware_text(found, DEVICE, "python -m benchmarks.predicted"), encoding="utf-8")
    return path


def asked_of(name: str, steps: int, keys: Sequence[str]) -> step_bench.Asked:
    """What `amt bench step` would be told."""
    one = LAYOUTS[name]
    folder = BUILD / name.replace(",", "").replace(" ", "_")
    taken = steps if one.is_timed else MEMORY_STEPS
    return step_bench.Asked(run_yaml=RUN, overrides=(*one.keys, *keys), ranks=one.ranks, steps=taken, out=folder)


def measured(config: RunConfig, asked: step_bench.Asked) -> Measured:
    """Trained, or as it was kept."""
    question = {"run": json.loads(config.model_dump_json()), "ranks": asked.ranks, "steps": asked.steps}
    path = asked.out / "kept.json"
    found = kept_for(path, question)
    if found is None:
        found, ended = step_bench.measure(config, asked, say)
        if found is None:
            sys.exit(f"{asked.out.name}: {ended.problem or 'stopped'}")
        keep(path, question, found)
    return found


def compared(name: str, config: RunConfig, found: Measured, hardware: Path) -> Compared:
    """With the prediction for as many devices as there are ranks."""
    ranks = LAYOUTS[name].ranks
    device = find_device(DEVICE, catalogue(hardware))
    planned = step_bench.predicted(config, Cluster(device=device, num_devices=ranks))
    mesh = mesh_of(config, ranks)
    stages = [mesh.coordinates(rank).pp for rank in range(ranks)]
    memory = tuple(planned.memory.stages[stage].total_bytes for stage in stages)
    return Compared(name=name, layout=LAYOUTS[name], found=found, planned=planned, memory_bytes=memory)


def row_of(each: Compared) -> dict[str, Any]:
    """One row of the table."""
    fullest = max(range(each.layout.ranks), key=each.measured_bytes.__getitem__)
    return {
        "layout": each.name,
        "ranks": each.layout.ranks,
        "step, ms": round(1e3 * each.found.step_s),
        "fastest, ms": round(1e3 * each.found.best_step_s),
        "predicted, ms": round(1e3 * each.planned.time.step_s) if each.layout.is_timed else "",
        "error of time": f"{each.time_error:+.1%}" if each.layout.is_timed else "",
        "memory of the fullest, MB": round(each.measured_bytes[fullest] / 1e6),
        "predicted, MB": round(each.memory_bytes[fullest] / 1e6),
        "error of memory": f"{statistics.fmean(map(abs, each.memory_errors)):.1%}",
    }


def details(each: Compared) -> str:
    """Items of a prediction beside what was measured, on one line each."""
    time = {part: round(1e3 * value, 1) for part, value in each.planned.time.items.items() if value}
    stages = [{k: round(v / 1e6, 1) for k, v in stage.items.items() if v} for stage in each.planned.memory.stages]
    comm = f"comm {1e3 * each.found.comm_s:.1f}, exposed {1e3 * each.found.exposed_s:.1f}"
    return f"{each.name}\n  {comm}; {time}\n  {[round(b / 1e6) for b in each.measured_bytes]} {stages}"


def main() -> None:
    """Measures what is not there yet, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=10, help="of each measurement of the calibration")
    parser.add_argument(
        "--only", metavar="NAME,...", help="some layouts, with a / for a comma in a name; writes nothing"
    )
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    parser.add_argument("--details", action="store_true", help="print the items of each prediction")
    parser.add_argument("--set", dest="keys", action="append", default=[], metavar="KEY=VALUE", help="of the run")
    given = parser.parse_args()
    prepare_environment()
    if given.again:
        shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    names = [name.replace("/", ",") for name in given.only.split(",")] if given.only else list(LAYOUTS)
    found = []
    for name in names:
        asked = asked_of(name, given.steps, given.keys)
        config = step_bench.prepared(asked)
        # calibrated right before what it is to predict: the speed of a shared machine drifts
        hardware = calibrated(min(asked.ranks, num_cores()), given.rounds)
        each = compared(name, config, measured(config, asked), hardware)
        say(f"{row_of(each)}")
        if given.details:
            say(details(each))
        found.append(each)
    timed = [abs(each.time_error) for each in found if each.layout.is_timed]
    of_best = [abs(each.error_of_best) for each in found if each.layout.is_timed]
    memory = [abs(error) for each in found for error in each.memory_errors]
    notes = [
        f"Mean absolute error: time {statistics.fmean(timed):.1%} over {len(timed)} layouts "
        f"({statistics.fmean(of_best):.1%} of the fastest step), "
        f"memory {statistics.fmean(memory):.1%} over {len(memory)} ranks of {len(found)} layouts."
    ]
    say(notes[0])
    if not given.only:
        write_results(
            HERE / "predicted", "Predicted against measured", __doc__, [*map(row_of, found)], notes, machine()
        )


if __name__ == "__main__":
    main()
