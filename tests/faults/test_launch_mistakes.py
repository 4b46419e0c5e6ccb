"""What keeps a run from starting is one line of the launcher, before any rank is started."""

from pathlib import Path

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.train.run_lock import locked
from tests.small_run import write_run

# Overrides, and what the line says; {run} is the run's folder.
MISTAKES = {
    "folder that cannot be made": (
        ("run.dir={folder}/run.yaml/run",),
        "run.dir {folder}/run.yaml/run: Not a directory",
    ),
    "no tokenizer": (("data.tokenizer=absent.json",), "absent.json: no such file"),
    "sequences longer than the corpus": (("data.seq_len=100000",), "one sequence of data.seq_len 100000 needs 100001"),
    "more stages than layers": (("parallel.pp=2",), "parallel.pp 2: the model has 1 layers"),
    "ranks that do not divide": (("parallel.tp=4",), "2 ranks do not divide by parallel"),
    "sequences that do not divide": (("batch.micro_sequences=4",), "batch.global_sequences 4 does not divide by dp 2"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    case: str, tmp_path: Path, small_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, expected = MISTAKES[case]
    run_yaml = write_run(tmp_path, small_corpus)
    settings = [word for each in overrides for word in ("--set", each.format(folder=tmp_path))]
    assert main(["launch", "--ranks", "2", "train", str(run_yaml), *settings]) == 2
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1
    assert line.startswith("error: ") and expected.format(folder=tmp_path) in line
    assert list(tmp_path.iterdir()) == [run_yaml]


def test_a_folder_that_a_run_trains_into_is_left_alone(
    tmp_path: Path, small_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_yaml = write_run(tmp_path, small_corpus)
    with locked(tmp_path / "run"):
        before = sorted((tmp_path / "run").rglob("*"))
        assert main(["launch", "--ranks", "2", "train", str(run_yaml)]) == 2
        assert capsys.readouterr().err.endswith("another process is training into it\n")
        assert sorted((tmp_path / "run").rglob("*")) == before
