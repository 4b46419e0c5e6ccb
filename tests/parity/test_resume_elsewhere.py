"""A run that was saved under one layout goes on under any other as if nothing had been."""

import json
import shutil
from pathlib import Path

import pytest

from ascend_moe_train.checkpoint.layout import folder_name
from tests.launched import launched
from tests.small_run import run_to_end, small_run, write_run

SAVED_AFTER, MORE = 4, 10
TOLERANCE = 1e-5
# Eight sequences a step, four at once over all ranks, whatever the layout: jitter, drops and balance depend on that.
COMMON = (
    f"run.steps={SAVED_AFTER + MORE}",
    "data.valid=[]",
    "batch.global_sequences=8",
    f"checkpoint.every={SAVED_AFTER}",
    "checkpoint.keep=99",
    "model.num_layers=1",
)
ONE = (*COMMON, "batch.micro_sequences=4")
# Ranks, and overrides; `batch.micro_sequences` is that of one dp rank.
ELSEWHERE = {
    "tp2": (2, ("parallel.tp=2", "batch.micro_sequences=4")),
    "ep4": (4, ("parallel.ep=4", "batch.micro_sequences=1")),
    "1 rank": (1, ("batch.micro_sequences=4",)),
    "tp2 x ep2 x zero3": (
        8,
        ("parallel.tp=2", "parallel.ep=2", "parallel.zero_stage=3", "batch.micro_sequences=1"),
    ),
    "zero2": (2, ("parallel.zero_stage=2", "batch.micro_sequences=2")),
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path) -> list[float]:
    """Losses of one process."""
    return run_to_end(small_run(tmp_path_factory.mktemp("unbroken"), small_corpus, *ONE)).losses


# Ranks of the run that is saved, and its overrides.
SAVED = {2: ("batch.micro_sequences=2",), 4: ("batch.micro_sequences=1",)}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small_corpus: Path) -> Path:
    """The folder of a run of two ranks, or of four, ep 2 and edp 2, of which only the first checkpoint is left."""
    folder = tmp_path_factory.mktemp("saved")
    overrides = ("parallel.ep=2", "parallel.zero_stage=1", *SAVED[request.param])
    launched(request.param, write_run(folder, small_corpus), *COMMON, *overrides)
    for path in (folder / "run" / "checkpoints").iterdir():
        if path.name != folder_name(SAVED_AFTER):
            shutil.rmtree(path)
    return folder


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if ELSEWHERE[name][0] > 1 else ()) for name in ELSEWHERE]
)
def test_a_saved_run_goes_on_under_another_layout(
    layout: str, saved: Path, unbroken: list[float], tmp_path: Path, small_corpus: Path
) -> None:
    num_ranks, overrides = ELSEWHERE[layout]
    shutil.copytree(saved / "run", tmp_path / "run")
    launched(num_ranks, write_run(tmp_path, small_corpus), *COMMON, *overrides)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, SAVED_AFTER + MORE + 1))
    assert [line["loss"] for line in lines] == pytest.approx(unbroken, rel=TOLERANCE)
