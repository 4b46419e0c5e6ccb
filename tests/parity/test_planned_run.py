"""What `amt plan --out` writes is trained by `amt launch` as it is."""

import json
from pathlib import Path

import pytest

from ascend_moe_train.cli.main import main
from tests.launched import launched
from tests.small_run import make_corpus, write_run

RANKS = 8
STEPS = 2


@pytest.mark.slow
def test_a_planned_run_is_launched_without_edits(tmp_path: Path) -> None:
    run_yaml = write_run(tmp_path, make_corpus(tmp_path))
    planned = tmp_path / "planned.yaml"
    shorter = ("--set", f"run.steps={STEPS}", "--set", "optim.warmup_steps=1", "--set", "run.log_every=1")
    assert main(["plan", "--model", str(run_yaml), "--cluster", f"{RANKS}xcpu", "--out", str(planned), *shorter]) == 0
    launched(RANKS, planned)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == [1, 2]
