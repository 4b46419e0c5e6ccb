"""Malformed configs, corpora, tokenizers and checkpoints through the commands themselves.

Each gives one line on stderr and exit code 2, and leaves the folder as it was. Most cases are the tables of the unit
tests, which say what the line must be; here they go through the command line.
"""

import hashlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.huggingface import tensor_shapes
from ascend_moe_train.cli import generate
from ascend_moe_train.cli.main import main
from ascend_moe_train.config import run_to_dict
from ascend_moe_train.model.counts import parameter_shapes
from ascend_moe_train.train.state import TrainingState
from tests import damage
from tests.faults import test_checkpoint_damage as damaged
from tests.small_run import small_run, write_run
from tests.unit import test_config as configs
from tests.unit import test_data_malformed as corpora

ROOT = Path(__file__).parents[2]
Files = dict[str, str]


def snapshot(folder: Path) -> Files:
    """What is in a folder: a checksum of each file, the target of each link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file() and path.stat().st_size < 2**20:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "something else"
    return found


Check = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs a command in tmp_path that must be refused, and returns its line."""
    monkeypatch.chdir(tmp_path)

    def check(*arguments: object) -> str:
        before = snapshot(tmp_path)
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1 and printed.err.endswith("\n")
        assert code == 2
        assert snapshot(tmp_path) == before
        return printed.err.removeprefix("error: ").rstrip("\n")

    return check


def sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


@pytest.mark.parametrize("verb", [("config", "check"), ("train",)])
@pytest.mark.parametrize(("override", "message"), configs.OVERRIDE_MISTAKES)
def test_overrides(verb: tuple[str, ...], override: str, message: str, refused: Check, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(configs.GOOD)
    assert message in refused(*verb, "run.yaml", "--set", override)


@pytest.mark.parametrize(("old", "new", "message"), configs.FILE_MISTAKES)
def test_run_files(old: str, new: str, message: str, refused: Check, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(configs.GOOD.replace(old, new))
    assert message in refused("train", "run.yaml")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"\x00", b"{", b"[" * 5000, b"run: *a", b"\x80\x04pickle", b"a: b: c"]
)
def test_what_is_no_yaml(content: bytes, refused: Check, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    assert refused("config", "check", "run.yaml").startswith("run.yaml")


@pytest.mark.parametrize("case", corpora.PREPARE)
def test_sources_and_tokenizers(case: str, refused: Check, tmp_path: Path) -> None:
    files, changes, message = corpora.PREPARE[case]
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        path = Path(os.path.normpath(tmp_path / "in" / name))
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
    options = {"source": "in", "out": "out", "vocab_size": corpora.VOCAB_SIZE} | changes
    arguments: list[object] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        arguments += [] if value is None else [flag] if value is True else [flag, value]
    assert re.search(message, refused("data", "prepare", *arguments))


# validation takes what there is
IN_SPLIT = [
    (s, case)
    for s in ("train", "valid")
    for case in corpora.SHARDS
    if (s, case) != ("valid", "fewer tokens than a sequence")
]


@pytest.mark.parametrize(("split", "case"), IN_SPLIT)
def test_shards(split: str, case: str, refused: Check, tmp_path: Path, small_corpus: Path) -> None:
    idx, tokens, message = corpora.SHARDS[case]
    for name, content in (("c.idx", idx), ("c.bin", tokens)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
    write_run(tmp_path, small_corpus)
    found = refused("train", "run.yaml", *sets(f"data.{split}=[{{path: c}}]", "data.seq_len=4"))
    assert re.search(message, found)


RUNS: dict[str, tuple[str, str]] = {
    "corpus that is not there": ("data.train.0.path=absent", "absent.idx: no such file"),
    "corpus with a name too long": (f"data.train.0.path={'x' * 300}", "File name too long"),
    "corpus that is a device": ("data.train.0.path=/dev/null", "null"),
    "corpus without a name": ("data.train.0.path=''", "train.idx: no such file"),
    "corpus in this folder": ("data.train.0.path=.", "train.idx: no such file"),
    "tokenizer that is not there": ("data.tokenizer=absent.json", "absent.json: no such file"),
    "tokenizer that is a folder": ("data.tokenizer=.", "tokenizer"),
    "tokenizer with a name too long": (f"data.tokenizer={'x' * 300}", "File name too long"),
    "tokenizer that is a run file": ("data.tokenizer=run.yaml", "run.yaml: not a Hugging Face tokenizer.json"),
    "tokenizer beyond the model": ("model.vocab_size=299", "299"),
    "more tokens a sequence than there are": (
        "data.seq_len=100000",
        "one sequence of data.seq_len 100000 needs 100001",
    ),
    "run.dir below a file": ("run.dir=run.yaml/run", "run.dir run.yaml/run: Not a directory"),
    "run.dir that is a file": ("run.dir=run.yaml", "run.dir run.yaml: "),
    "run.dir with a name too long": (f"run.dir={'x' * 300}", "File name too long"),
    "run.dir in a folder of the system": ("run.dir=/proc/amt/run", "run.dir /proc/amt/run: No such file"),
    "NUL in run.dir": ('run.dir="a\\0b"', "run.dir"),
    "NUL in a corpus": ('data.train.0.path="a\\0b"', "data.train"),
    "NUL in the tokenizer": ('data.tokenizer="a\\0b"', "data.tokenizer"),
    "half a surrogate pair to sample from": ('run.sample_prompt="\\ud800"', "sample_prompt"),
    "Ascend on a machine without": ("run.device=ascend", "run.device 'ascend': MindSpore finds no Ascend device here"),
}


@pytest.mark.parametrize("case", RUNS)
def test_what_a_run_names(case: str, refused: Check, tmp_path: Path, small_corpus: Path) -> None:
    change, message = RUNS[case]
    write_run(tmp_path, small_corpus)
    assert message in refused("train", "run.yaml", *sets(change))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n", "metrics.jsonl line 1: "),
        (b'{"kind": "step"}\n', "metrics.jsonl line 1: step: Field required"),
        (b"\xff\n", "metrics.jsonl line 1: "),
        (b"[" * 10**5 + b"\n", "metrics.jsonl line 1: "),
    ],
)
def test_metrics_of_the_run_before(
    content: bytes, message: str, refused: Check, tmp_path: Path, small_corpus: Path
) -> None:
    write_run(tmp_path, small_corpus)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(content)
    assert message in refused("train", "run.yaml")


def made_checkpoint(folder: Path, corpus: Path, *, moments: bool = True) -> Path:
    """A sound checkpoint of step 7 of the small run in `folder`, made without training."""
    config = small_run(folder, corpus)
    shapes = {f"model.{name}": shape for name, shape in tensor_shapes(config.model).items()}
    for name, shape in parameter_shapes(config.model).items() if moments else ():
        shapes |= {f"optim.first.{name}": shape, f"optim.second.{name}": shape}
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    meta = {"config": run_to_dict(config), "state": TrainingState(step=7).model_dump(mode="json")}
    return store.save(folder / "run" / "checkpoints", 7, tensors, meta, keep=1)


def set_meta(**changes: Any) -> damage.Damage:
    return damage.edit(lambda content: content["meta"].update(changes))


def set_config(section: str, **changes: Any) -> damage.Damage:
    return damage.edit(lambda content: content["meta"]["config"][section].update(changes))


def drop(key: str) -> damage.Damage:
    return damage.edit(lambda content: content["meta"].pop(key))


SHARD = "tensors-00000.safetensors"
# What is done to it, and what `amt generate` and `amt train` say; None where it does not concern them.
CHECKPOINTS: dict[str, tuple[damage.Damage, str | None, str | None]] = {
    "no configuration": (drop("config"), "model", "meta.config is missing"),
    "configuration that is a list": (set_meta(config=[]), "config", "meta.config is missing"),
    "configuration without a model": (damage.edit(lambda c: c["meta"]["config"].pop("model")), "model", "model."),
    "key of another program": (set_config("model", extra=1), "extra", "model.extra = 1, this run has None"),
    "more layers than tensors": (set_config("model", num_layers=10**4), "too few", "model.num_layers = 10000"),
    "another hidden size": (
        set_config("model", hidden=64),
        "the config asks for [300, 64]",
        "model.hidden = 64, this run has 32",
    ),
    "vocabulary of a trillion": (
        set_config("model", vocab_size=10**12),
        "has shape [300, 32]",
        "model.vocab_size = 1000000000000",
    ),
    "no state": (drop("state"), None, "meta.state is missing"),
    "state of another step": (set_meta(state={"step": 8}), None, "meta.state.step is 8, the checkpoint's 7"),
    "state with a scale of zero": (set_meta(state={"step": 7, "loss_scale": {"scale": 0.0}}), None, "loss_scale.scale"),
    "tensor of another name": (damage.flip(SHARD, 12), "header does not match", "none of 1 checkpoints can be read"),
    "damaged tensor": (damage.flip(SHARD, -3), None, "none of 1 checkpoints can be read"),
    "cut shard": (damage.truncate(SHARD, 9), "its manifest says", "none of 1 checkpoints can be read"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json: missing", "none of 1"),
}


COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "--checkpoint", "run/checkpoints", "--prompt", "a"),
    "train": ("train", "run.yaml"),
}
SAYINGS = [
    (verb, case, message)
    for case, (_, *messages) in CHECKPOINTS.items()
    for verb, message in zip(COMMANDS, messages, strict=True)
    if message is not None
]


@pytest.mark.parametrize(("verb", "case", "message"), SAYINGS)
def test_checkpoints(verb: str, case: str, message: str, refused: Check, tmp_path: Path, small_corpus: Path) -> None:
    CHECKPOINTS[case][0](made_checkpoint(tmp_path, small_corpus))
    assert message in refused(*COMMANDS[verb])


def test_a_checkpoint_without_moments_is_no_state_to_go_on_from(
    refused: Check, tmp_path: Path, small_corpus: Path
) -> None:
    made_checkpoint(tmp_path, small_corpus, moments=False)
    assert "tensor 'optim.first." in (line := refused("train", "run.yaml")) and "is missing" in line


@pytest.mark.parametrize("case", damaged.CASES)
def test_damaged_checkpoints_give_no_text(case: str, refused: Check, tmp_path: Path) -> None:
    path = store.save(tmp_path / "root", 200, damaged.TENSORS, {"lr": 0.1}, keep=3, max_file_bytes=60)
    damaged.CASES[case][0](path)
    assert "step-00000200" in refused("generate", "--checkpoint", path, "--prompt", "a")


OPTIONS: dict[str, tuple[dict[str, str], str]] = {
    "no checkpoint there": ({"checkpoint": "absent"}, "absent"),
    "checkpoint that is a file": ({"checkpoint": "run.yaml"}, "run.yaml"),
    "checkpoint with a name too long": ({"checkpoint": "x" * 300}, "File name too long"),
    "output with a name too long": ({"out": "x" * 300}, "File name too long"),
    "empty folder": ({"checkpoint": "empty"}, "empty: no checkpoint here"),
    "negative temperature": ({"temperature": "-1"}, "-1"),
    "temperature that is no number": ({"temperature": "nan"}, "temperature"),
    "nothing of the probability": ({"top-p": "0"}, "0"),
    "more than all of the probability": ({"top-p": "1.5"}, "1.5"),
    "probability that is no number": ({"top-p": "nan"}, "top-p"),
    "no tokens": ({"max-tokens": "0"}, "0"),
    "negative seed": ({"seed": "-1"}, "-1"),
    "seed that is text": ({"seed": "x"}, "x"),
    "output that is a folder": ({"out": "empty"}, "--out empty: is a folder"),
    "output that is a pipe": ({"out": "pipe"}, "--out pipe: is no regular file"),
    "output in no folder": ({"out": "absent/text"}, "--out absent/text: there is no folder absent"),
    "tokenizer that is not there": ({"tokenizer": "absent.json"}, "absent.json: no such file"),
    "tokenizer that is none": ({"tokenizer": "run.yaml"}, "run.yaml: not a Hugging Face tokenizer.json"),
    "prompt that is no text": ({"prompt": os.fsdecode(b"a\xff")}, "--prompt: byte 0xff at byte offset 1"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_generate(case: str, refused: Check, tmp_path: Path, small_corpus: Path) -> None:
    made_checkpoint(tmp_path, small_corpus)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    changes, message = OPTIONS[case]
    options = {"checkpoint": "run/checkpoints", "prompt": "a"} | changes
    assert message in refused("generate", *[word for name, value in options.items() for word in (f"--{name}", value)])


@pytest.mark.parametrize(("given", "message"), [(None, "no standard input"), (9, "more than 8 bytes")])
def test_prompts_from_stdin(given: int | None, message: str, refused: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MAX_PROMPT_BYTES", 8)
    stdin = None if given is None else io.TextIOWrapper(io.BytesIO(b"a" * given))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert message in refused("generate", "--checkpoint", "x", "--prompt", "-")


def test_a_start_that_fails_imports_no_framework(tmp_path: Path, small_corpus: Path) -> None:
    """As processes: exit code, one line, and quick since MindSpore has not been loaded."""
    write_run(tmp_path, small_corpus)
    program = (
        "import sys; from ascend_moe_train.cli.main import main; code = main();"
        "assert 'mindspore' not in sys.modules; sys.exit(code)"
    )
    for change in ("data.train.0.path=absent", "data.tokenizer=absent", "optim.lr=-1", "run.dir=run.yaml"):
        command = [sys.executable, "-c", program, "train", "run.yaml", "--set", change]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
