"""The README's commands, typed one after the other in an empty folder, as a newcomer does. Training is cut short, in
one layer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.docs_commands import commands
from scripts.docs_pages import ROOT
from scripts.docs_regions import PROGRAMS

SHORT = ("--set", "run.steps=4", "--set", "optim.warmup_steps=1", "--set", "model.num_layers=1")
# What `make demo` runs, and what stands for a user's own notes.
FIRST = (
    ("amt", "data", "prepare", "--corpus", "python-stdlib", "--out", "corpora/stdlib", "--vocab-size", "2048"),
    ("amt", "train", "examples/demo.yaml"),
)


def typed(page: str) -> list[tuple[str, ...]]:
    text = Path(ROOT, page).read_text(encoding="utf-8")
    return [line.words for line in commands(text) if line.words[0] == "amt"]


def test_both_readmes_have_the_same_commands() -> None:
    assert typed("README.md") == typed("README.zh-CN.md")
    verbs = {words[1] for words in typed("README.md")}
    assert verbs >= {"data", "train", "generate", "launch", "mesh", "plan", "convert", "profile", "doctor"}


@pytest.mark.slow
def test_the_readmes_commands_run(tmp_path: Path) -> None:
    for part in ("examples", "docs"):
        shutil.copytree(ROOT / part, tmp_path / ("notes" if part == "docs" else part))
    for words in (*FIRST, *typed("README.md")):
        done = subprocess.run(
            [*PROGRAMS["amt"], *words[1:], *(SHORT if "train" in words else ())],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "GLOG_v": "3"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        has_fault = words[1] == "doctor"  # of the sample: the exit code says that there is one
        assert done.returncode == int(has_fault), (words, done.stdout[-1000:], done.stderr[-1000:])
