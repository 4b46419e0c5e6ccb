"""Faults of training in figures of steps, and that healthy ones give none."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_moe_train.doctor.diagnose import diagnose
from tests.doctored import told

STEPS = 120
Change = Callable[[int], dict[str, object]]


def record(step: int, noise: random.Random) -> dict[str, object]:
    """A healthy step: the loss falls with noise, the rest stays."""
    return {
        "kind": "step",
        "step": step,
        "loss": 2.0 + 6.0 * math.exp(-step / 30) + noise.gauss(0, 0.05),
        "aux_loss": 1.0 + noise.random() / 50,
        "grad_norm": 1.0 + noise.random(),
        "lr": 1e-3,
        "step_s": 0.5 + noise.random() / 20,
        "loss_scale": None,
        "skipped": False,
        "load_cv": [0.3, 0.2 + noise.random() / 10],
        "dead_experts": [0, 0],
        "drop_rate": 0.01,
        "memory_bytes": 10**9 + step * 1000,
    }


def write(folder: Path, change: Change, steps: int = STEPS) -> Path:
    noise = random.Random(1)
    lines = [json.dumps(record(step, noise) | change(step)) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def cause_of(folder: Path) -> str:
    cause = diagnose([folder]).cause
    return cause.rule.id if cause is not None else ""


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda step: {}, ""),
        (lambda step: {"loss": None, "grad_norm": None} if step > 90 else {}, "nan-began"),
        (lambda step: {"skipped": step > 95, "loss_scale": 2.0 ** (16 - max(0, step - 95))}, "overflow-steps"),
        (lambda step: {"grad_norm": None, "skipped": True, "loss_scale": 65536.0} if step < 4 else {}, ""),
        (lambda step: {"loss": 7.0} if step > 80 else {}, "spike"),
        (lambda step: {"loss": 7.0} if step == 80 else {}, ""),
        (lambda step: {"loss": 2.2 + abs(step - 60) / 60}, "diverged"),
        (lambda step: {"grad_norm": 1.05**step}, "norm-drift"),
        (lambda step: {"dead_experts": [0, 3]} if step > 60 else {}, "dead-experts"),
        (lambda step: {"load_cv": [0.3, 2.0]} if step > 60 else {}, "unbalanced"),
        (lambda step: {"aux_loss": 1.25}, "aux-stuck"),
        (lambda step: {"drop_rate": 0.3} if step > 60 else {}, "drops"),
        (lambda step: {"step_s": 0.5 + step / 200}, "slow-drift"),
        (lambda step: {"memory_bytes": 10**9 + step * 10**7}, "memory-creep"),
    ],
)
def test_figures(tmp_path: Path, change: Change, cause: str) -> None:
    assert cause_of(write(tmp_path, change)) == cause


def test_where_it_began(tmp_path: Path) -> None:
    verdict = diagnose([write(tmp_path, lambda step: {"loss": None} if step > 90 else {})])
    assert verdict.cause is not None
    assert verdict.cause.values["step"] == "91"
    assert str(verdict.cause.events[0].place).endswith("metrics.jsonl:91")
    assert verdict.confidence == "high"


def test_short_and_damaged_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"kind": "step"}\n[1]\n\xff\xfe\n{"kind": "step", "step": 1, "loss": "x"}\n'
    )
    assert cause_of(tmp_path) == ""
    assert cause_of(write(tmp_path, lambda step: {}, steps=3)) == ""


def test_lines_of_mindformers() -> None:
    line = (
        "2026-03-01 10:00:00 - Epoch:[  1/  2], step:[{s:5}/ 5000], loss: {l}, per_step_time: "
        "900ms, lr: 1e-5, global_norm: [1.2]\n"
    )
    good = "".join(line.format(s=step, l=3.0) for step in range(1, 50))
    assert told({"worker_0.log": good}) == ("", [])
    assert told({"worker_0.log": good + line.format(s=50, l="nan")})[0] in ("nan-loss", "nan-began")


def test_one_rank_is_apart_in_lines_of_megatron() -> None:
    line = (
        " iteration {s:8}/    5000 | elapsed time per iteration (ms): 812.5 | learning rate: "
        "1.5E-04 | lm loss: 2.5E+00 | loss scale: 1.0 | grad norm: {n} | number of skipped "
        "iterations:   0 |\n"
    )
    files: dict[str, str | bytes] = {
        f"rank_{rank}.log": "".join(
            line.format(s=step, n="1.9" if rank == 2 and step > 7 else "1.2") for step in range(12)
        )
        for rank in range(4)
    }
    assert told(files) == ("desync", [2])
