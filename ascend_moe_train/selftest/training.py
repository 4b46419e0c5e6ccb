"""The run of curve.py on one process or on several ranks: its losses, what goes on from its checkpoint, its times."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ascend_moe_train.checkpoint.store import CHECKPOINTS
from ascend_moe_train.selftest.curve import MORE, SAVED_AFTER, TOLERANCE, golden_losses, run_of
from ascend_moe_train.selftest.curve_steps import Curve, continued, trainer_of, unbroken
from ascend_moe_train.selftest.names import GO_ON, LOSSES, ONE_GOES_ON, RANKS_GO_ON
from ascend_moe_train.selftest.results import Figures, Finding
from ascend_moe_train.train.ranks import alone, join
from ascend_moe_train.train.session import set_device
from ascend_moe_train.train.trainer import Trainer

# By device and precision: how far a loss may be from that of one CPU process in fp32, relative. Those of Ascend are
# what other sums and half precision may do to twenty steps; they have not been tried there.
TOLERANCES = {
    ("cpu", "fp32"): TOLERANCE,
    ("cpu", "fp16"): 1e-3,
    ("ascend", "fp32"): 1e-3,
    ("ascend", "bf16"): 1e-2,
}
ALONE, TOGETHER = "one_process", "ranks"


def looker(asked: dict[str, Any]) -> Callable[[str], Finding]:
    """See worker.KINDS. Checkpoints of all processes are in one `folder`, beside the corpus."""
    device = set_device(asked["device"])
    site = _Site(Path(asked["folder"]), asked["precision"], int(asked["ranks"]), device)
    tolerance, golden = TOLERANCES[device, asked["precision"]], golden_losses()
    later = golden[SAVED_AFTER : SAVED_AFTER + MORE]
    checks: dict[str, Callable[[], Finding]] = {
        LOSSES: lambda: finding(unbroken(site.own), golden, tolerance),
        GO_ON: lambda: finding(site.goes_on(site.own, site.own_name), later, tolerance),
        RANKS_GO_ON: lambda: finding(site.goes_on(site.own, ALONE), later, tolerance),
        ONE_GOES_ON: lambda: finding(site.one_goes_on(), later, tolerance) if site.is_first else Finding(),
    }
    return lambda name: checks[name]()


class _Site:
    """The trainers of this process."""

    def __init__(self, folder: Path, precision: str, num_ranks: int, device: str) -> None:
        self._folder, self._run = folder, {"precision": precision, "device": device}
        self.own_name = (ALONE if num_ranks == 1 else TOGETHER) + ("" if precision == "fp32" else f"_{precision}")
        parallel = {} if num_ranks == 1 else layout(num_ranks)
        config = run_of(self.own_name, parallel, num_ranks, folder, **self._run)
        ranks = alone(config) if num_ranks == 1 else join(config)
        self.is_first = ranks.is_first
        self.own = trainer_of(config, ranks)

    def goes_on(self, trainer: Trainer, saved: str) -> Curve:
        """The steps after those that were saved under a name."""
        return continued(trainer, self._folder / saved / CHECKPOINTS)

    def one_goes_on(self) -> Curve:
        """One rank by itself, from what all have saved."""
        config = run_of("from_ranks", {}, 1, self._folder, **self._run)
        return self.goes_on(trainer_of(config, alone(config)), self.own_name)


def finding(curve: Curve, golden: Sequence[float], tolerance: float) -> Finding:
    """Losses against those they should be, and times."""
    apart = [abs(record.loss / wanted - 1) for record, wanted in zip(curve.records, golden, strict=True)]
    problems = [
        f"step {record.step}: loss {record.loss:.6g}, not {wanted:.6g} ({away:.1e} apart, allowed is {tolerance:.0e})"
        for record, wanted, away in zip(curve.records, golden, apart, strict=True)
        if not away <= tolerance
    ]
    figures: Figures = {"largest difference": max(apart), "allowed": tolerance, **times(curve)}
    return Finding(problems=problems, figures=figures)


def layout(num_ranks: int) -> dict[str, Any]:
    """Section `parallel` in which every kind of exchange is: experts over pairs, weights shared out over all."""
    return {"ep": 2 if num_ranks % 2 == 0 else 1, "zero_stage": 3}


def times(curve: Curve) -> Figures:
    """As the trainer measures its steps; the first of a process compiles."""
    steps_s = [record.step_s for record in curve.records]
    later_s = steps_s[1:]
    tokens = curve.records[-1].tokens
    return {
        "first step, s": steps_s[0],
        "step, s": statistics.median(later_s),
        "slowest later step, s": max(later_s),
        "tokens/s": tokens / statistics.median(later_s),
        "checkpoint, s": curve.checkpoint_s,
        "memory, bytes": float(curve.records[-1].memory_bytes),
    }
