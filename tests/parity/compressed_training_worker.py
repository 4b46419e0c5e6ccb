"""What each rank does for test_compressed_training.py: short runs of the trainer whose gradients are compressed."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from ascend_moe_train.checkpoint.store import CHECKPOINTS
from ascend_moe_train.config import RunConfig, load_run
from ascend_moe_train.parallel.comm import RecordingComm
from ascend_moe_train.parallel.mesh import num_micro
from ascend_moe_train.parallel.zero_costs import zero_bytes, zero_sent
from ascend_moe_train.selftest.curve_steps import save, trainer_of
from ascend_moe_train.train.ranks import Ranks, join
from ascend_moe_train.train.stop import StopRequest
from ascend_moe_train.train.trainer import Trainer

STEPS, WARM_UP, SAVED = 7, 3, (2, 5)
METHODS = {
    "none": (),
    "int8": ("parallel.compress.method=int8", "parallel.compress.block=64"),
    "powersgd": ("parallel.compress.method=powersgd", "parallel.compress.rank=2"),
    "onebit_adam": ("parallel.compress.method=onebit_adam", f"parallel.compress.warmup_updates={WARM_UP}"),
}
SUMS = ("dp_cp", "edp", "all_reduce world")  # of dense weights, of experts, and of figures


def on_rank(argument: list[str]) -> dict[str, Any]:
    """Of a method and of none: figures of each step, of a method the same from each checkpoint on, notes, payloads and
    bytes beside the formulas; and what is said when a checkpoint has nothing of what was lost."""
    folder, method = argument
    found = {each: runs(folder, each) for each in ("none", method)}
    notes: list[str] = []
    _trainer(_config(folder, method, "elsewhere"), notes, saved_in=_config(folder, "none"), step=SAVED[0])
    return {**found, "from another": notes}


def runs(folder: str, method: str) -> dict[str, Any]:
    """Of one method."""
    config = _config(folder, method)
    notes: list[str] = []
    told: list[str] = []
    trainer = _trainer(config, notes)
    figures = [each for count in (2, 3, 2) for each in _unbroken(trainer, count, told)]
    plan, passes = trainer.sharded.plan, num_micro(config.batch, trainer.ranks.mesh)
    expected = zero_sent(plan, passes, sends_momenta=trainer.sharded.momenta is not None)
    states = [*trainer.optimizer.weights, *trainer.optimizer.first, *trainer.optimizer.second]
    kept_bytes = sum(each.asnumpy().nbytes for each in (*states, *trainer.sharded.remembered.values()))
    continued = {}
    for step in SAVED if method != "none" else ():
        other = _trainer(_config(folder, method, f"from {step}"), [], saved_in=config, step=step)
        continued[str(step)] = list(_steps(other, STEPS - step))
    return {
        "figures": figures,
        "continued": continued,
        "notes": notes,
        "told": told,
        "sent": _sent(trainer),
        "expected": {" ".join(key): size for key, (_, size) in expected.items()},
        "kept_bytes": kept_bytes,
        "expected_bytes": zero_bytes(plan, num_micro=1).total,
    }


def _config(folder: str, method: str, where: str = "first") -> RunConfig:
    overrides = (f"run.dir={folder}/{method} {where}", "data.valid=[]", "batch.micro_sequences=1", "run.steps=50")
    return load_run(Path(folder) / "run.yaml", [*overrides, *METHODS[method]])


def _trainer(config: RunConfig, notes: list[str], saved_in: RunConfig | None = None, step: int = 0) -> Trainer:
    ranks = join(config)
    ranks = replace(ranks, comm=RecordingComm(ranks.comm))
    if saved_in is not None and ranks.is_first:
        name = f"step-{step:08d}"
        target = Path(config.run.dir) / CHECKPOINTS / name
        shutil.copytree(Path(saved_in.run.dir) / CHECKPOINTS / name, target, dirs_exist_ok=True)
    ranks.wait_for_all()
    return trainer_of(config, ranks, notes.append)


def _unbroken(trainer: Trainer, count: int, told: list[str]) -> list[tuple[float, float]]:
    """So many steps, and a checkpoint after them."""
    found = list(_steps(trainer, count, told))
    save(trainer, keep=9)
    return found


def _steps(trainer: Trainer, count: int, told: list[str] | None = None) -> Iterator[tuple[float, float]]:
    for info in islice(trainer.steps(trainer.meter(None), StopRequest()), count):
        if told is not None and info.warning is not None:
            told.append(info.warning)
        yield info.record.loss, info.record.grad_norm


def _sent(trainer: Trainer) -> dict[str, int]:
    """Payloads of one more step, by verb, group and content."""
    recording = _recording(trainer.ranks)
    before = len(recording.calls)
    list(_steps(trainer, 1))
    found: dict[str, int] = {}
    for call in recording.calls[before:]:
        key = f"{call.verb} {call.group} {call.content}"
        if f"{call.verb} {call.group}".endswith(SUMS):
            found[key] = found.get(key, 0) + call.payload_bytes
    return found


def _recording(ranks: Ranks) -> RecordingComm:
    assert isinstance(ranks.comm, RecordingComm)
    return ranks.comm
