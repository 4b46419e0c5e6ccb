"""`prepare`: sources, splits, reuse, interruption; the tokenizer; the command line around it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ascend_moe_train.cli.data import command
from ascend_moe_train.data import prepare as prepare_module
from ascend_moe_train.data.indexed import IndexedDataset
from ascend_moe_train.data.manifest import read_manifest
from ascend_moe_train.data.prepare import Prepared, prepare
from ascend_moe_train.data.sources import find_files, read_documents
from ascend_moe_train.data.tokenizer import load_tokenizer
from ascend_moe_train.errors import DataError

VOCAB_SIZE = 280


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Twelve text files in a folder with what is to be left out: hidden files, byte code, an empty file."""
    root = tmp_path / "texts"
    for number in range(12):
        path = root / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {number}: ünïcode 文字 <|endoftext|> \t{'more words ' * number}\n", encoding="utf-8")
    (root / "empty.txt").touch()
    (root / ".hidden").write_bytes(b"\xff")
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "x.pyc").write_bytes(b"\xff")
    return root


def run(source: Path | str, out: Path, **arguments: object) -> Prepared:
    settings = {"vocab_size": VOCAB_SIZE, "valid_fraction": 0.25} | arguments
    return prepare(sources=[str(source)], out=out, **settings)  # type: ignore[arg-type]  # one helper for all settings


def read_split(out: Path, split: str) -> list[str]:
    """The documents of a split as text, each checked to end with the only end-of-document token in it."""
    tokenizer = load_tokenizer(out / "tokenizer.json")
    dataset = IndexedDataset(out / split)
    documents = [dataset.document(number).tolist() for number in range(dataset.num_documents)]
    for document in documents:
        assert document.index(tokenizer.eod_id) == len(document) - 1
    return [tokenizer.decode(document[:-1]) for document in documents]


def test_every_document_is_in_one_split_unchanged(texts: Path, tmp_path: Path) -> None:
    manifest = run(texts, tmp_path / "out").manifest
    wanted = sorted(path.read_text(encoding="utf-8") for path in texts.glob("part*/*.txt"))
    splits = {split: read_split(tmp_path / "out", split) for split in ("train", "valid")}
    assert sorted(splits["train"] + splits["valid"]) == wanted
    assert splits["valid"]
    for split, documents in splits.items():
        record = manifest.splits[split]
        dataset = IndexedDataset(tmp_path / "out" / split)
        assert record.documents == len(documents)
        assert record.bytes == sum(len(document.encode()) for document in documents)
        assert record.tokens == dataset.num_tokens
        assert record.max_token_id == dataset.max_token_id() < manifest.vocab_size
    assert manifest.empty_documents == 1
    assert read_manifest(tmp_path / "out") == manifest


def test_the_same_sources_give_the_same_files_wherever_they_lie(texts: Path, tmp_path: Path) -> None:
    run(texts, tmp_path / "out")
    moved = texts.rename(tmp_path / "moved")
    run(moved, tmp_path / "deep" / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.json", "manifest.json"}
    for name in names - {"manifest.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "deep" / "out" / name).read_bytes()


def test_globs_files_and_folders_name_files_once(texts: Path, tmp_path: Path) -> None:
    found = find_files([f"{texts}/part*/1*.txt", str(texts), str(texts / "part0" / "0.txt")], None, tmp_path / "out")
    assert [file.name for file in found[:3]] == ["part1/1.txt", "part1/10.txt", "part2/11.txt"]
    assert len(found) == 13
    recursive = find_files([f"{texts}/**/*.txt"], None, tmp_path / "out")
    assert len(recursive) == 13


def test_jsonl_reads_the_named_field_of_each_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [{"body": f"document {number} é", "text": "no"} for number in range(9)]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n\n{"body": ""}\n')
    manifest = run(path, tmp_path / "out", field="body").manifest
    read = read_split(tmp_path / "out", "train") + read_split(tmp_path / "out", "valid")
    assert sorted(read) == [line["body"] for line in lines]
    assert manifest.empty_documents == 1


def test_no_validation_split_when_none_is_asked_for(texts: Path, tmp_path: Path) -> None:
    manifest = run(texts, tmp_path / "out", valid_fraction=0).manifest
    assert set(manifest.splits) == {"train"}
    assert not (tmp_path / "out" / "valid.idx").exists()


def test_a_small_share_still_holds_one_document_out(texts: Path, tmp_path: Path) -> None:
    manifest = run(texts, tmp_path / "out", valid_fraction=1e-12).manifest
    assert manifest.splits["valid"].documents == 1


def test_of_a_single_text_the_end_is_held_out(tmp_path: Path) -> None:
    lines = [f"line {number} of one book\n" for number in range(200)]
    (tmp_path / "book.txt").write_text("".join(lines))
    manifest = run(tmp_path / "book.txt", tmp_path / "out", valid_fraction=0.25).manifest
    (train,), (valid,) = (read_split(tmp_path / "out", split) for split in ("train", "valid"))
    assert train + valid == "".join(lines)
    assert valid.splitlines(keepends=True) == lines[-len(valid.splitlines()) :]
    assert 0.25 <= len(valid) / len(train + valid) < 0.26
    assert [manifest.splits[split].documents for split in ("train", "valid")] == [1, 1]


def test_a_single_conversation_or_line_has_no_end_to_hold_out(tmp_path: Path) -> None:
    (tmp_path / "line.txt").write_text("one line without an end")
    with pytest.raises(DataError, match="no document is left for the train split, 1 in all"):
        run(tmp_path / "line.txt", tmp_path / "out")


def test_a_document_larger_than_the_share_is_not_held_out(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(40)]
    for path in paths:
        path.write_text(f"file {path.stem}")
    source, out = f"{tmp_path}/*.txt", tmp_path / "out"
    before = run(source, out).manifest.splits["valid"].documents
    held_out = read_split(out, "valid")[0]
    (tmp_path / f"{held_out.split()[1]}.txt").write_text("large " * 1000)
    splits = run(source, out, force=True).manifest.splits
    assert splits["valid"].documents == before - 1
    assert splits["train"].bytes > 6000


def test_the_tokenizer_learns_from_the_training_split_only(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"{number}" + "abcdefgh "[number] * 2000)
    run(f"{tmp_path}/*.txt", tmp_path / "out", vocab_size=400, valid_fraction=1e-12)
    (held_out,) = read_split(tmp_path / "out", "valid")
    letter = held_out[1]
    vocabulary = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    assert letter * 2 not in vocabulary
    assert all(other * 2 in vocabulary for other in set("abcdef") - {letter})


def test_a_given_tokenizer_is_copied_and_used(texts: Path, tmp_path: Path) -> None:
    run(texts, tmp_path / "first")
    given = tmp_path / "first" / "tokenizer.json"
    manifest = run(texts, tmp_path / "second", tokenizer=given, vocab_size=None).manifest
    assert (tmp_path / "second" / "tokenizer.json").read_bytes() == given.read_bytes()
    assert manifest.vocab_size == load_tokenizer(given).vocab_size
    assert (tmp_path / "second" / "train.bin").read_bytes() == (tmp_path / "first" / "train.bin").read_bytes()


def test_a_complete_output_is_reused_and_another_refused(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run(texts, out)
    written = (out / "manifest.json").stat().st_mtime_ns
    again = run(texts, out)
    assert (first.reused, again.reused) == (False, True)
    assert again.manifest == first.manifest
    assert (out / "manifest.json").stat().st_mtime_ns == written
    with pytest.raises(DataError, match="made with vocab_size 280, asked for is 290"):
        run(texts, out, vocab_size=290)
    (texts / "part0" / "0.txt").write_text("changed")
    with pytest.raises(DataError, match="the sources have changed since it was made"):
        run(texts, out)
    replaced = run(texts, out, force=True)
    assert not replaced.reused
    assert "changed" in read_split(out, "train") + read_split(out, "valid")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_a_damaged_output_is_not_reused(texts: Path, tmp_path: Path) -> None:
    run(texts, tmp_path / "out")
    with (tmp_path / "out" / "train.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"train\.bin: missing or not the \d+ bytes that were written"):
        run(texts, tmp_path / "out")


def test_an_empty_output_folder_is_used(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert not run(texts, tmp_path / "out").reused


@pytest.mark.parametrize("stage", ["reading", "training the tokenizer", "tokenising train", "tokenising valid"])
@pytest.mark.parametrize("replaced", [False, True])
def test_an_interruption_leaves_nothing_or_what_was_there(
    texts: Path, tmp_path: Path, stage: str, replaced: bool
) -> None:
    out = tmp_path / "new" / "out"
    before = run(texts, out).manifest if replaced else None

    def interrupt(now: str, done_bytes: int, total_bytes: int) -> None:
        assert 0 <= done_bytes <= total_bytes
        if now == stage and done_bytes > total_bytes / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(texts, out, vocab_size=290, force=True, progress=interrupt)
    assert read_manifest(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == (["new", "texts"] if replaced else ["texts"])
    assert not replaced or [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_full_disk_is_one_line_and_leaves_nothing(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(prepare_module, "write_synced", full)
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be written: No space left on device"):
        run(texts, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


KILLED = """
import os, sys
from ascend_moe_train.cli.main import main
from ascend_moe_train.data import prepare
number, source, out = sys.argv[1:]
prepare.write_synced = lambda path, data: os.kill(os.getpid(), int(number))
main(["data", "prepare", "--source", source, "--out", out, "--vocab-size", "280", "--valid-fraction", "0.25"])
"""


def killed_run(number: signal.Signals, texts: Path, out: Path) -> int:
    """The exit code of a preparation that gets a signal just before its output is complete."""
    arguments = [sys.executable, "-c", KILLED, str(number.value), str(texts), str(out)]
    return subprocess.run(arguments, check=False).returncode


def test_a_termination_removes_what_was_half_written(texts: Path, tmp_path: Path) -> None:
    assert killed_run(signal.SIGTERM, texts, tmp_path / "made" / "out") == 143
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_after_a_kill_the_output_is_absent_and_the_next_run_cleans_up(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "out"
    assert killed_run(signal.SIGKILL, texts, out) == -signal.SIGKILL
    assert not out.exists()
    assert len(list(out.parent.iterdir())) == 1
    assert not run(texts, out).reused
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_second_preparation_of_the_same_output_is_refused(texts: Path, tmp_path: Path) -> None:
    def start_another(stage: str, done_bytes: int, total_bytes: int) -> None:
        if stage == "training the tokenizer":
            run(texts, tmp_path / "out")

    with pytest.raises(DataError, match="another process is preparing it now"):
        run(texts, tmp_path / "out", progress=start_another)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_file_names_that_are_not_utf8_are_fine(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"in\xff")
    folder.mkdir()
    for name in (b"a\xfe.txt", b"b.txt"):
        (folder / os.fsdecode(name)).write_text("some text")
    prepared = run(folder, tmp_path / "out")
    assert [source.name for source in prepared.manifest.sources] == ["a\N{REPLACEMENT CHARACTER}.txt", "b.txt"]
    assert run(folder, tmp_path / "out").reused


def test_the_standard_library_is_a_corpus_of_this_size(tmp_path: Path) -> None:
    files = find_files([], "python-stdlib", tmp_path / "out")
    names = [file.name for file in files]
    assert {"os.py", "json/decoder.py", "pydoc_data/topics.py"} <= set(names)
    assert not any("test" in Path(name).parts[:-1] or "site-packages" in name for name in names)
    assert 9e6 < sum(file.path.stat().st_size for file in files) < 16e6
    assert all(len(list(read_documents(file, "text"))) == 1 for file in files)


def test_command_prints_json_and_stays_silent_otherwise(texts: Path, tmp_path: Path) -> None:
    arguments = ["prepare", "--source", str(texts), "--out", str(tmp_path / "out"), "--vocab-size", "280", "--json"]
    results = [CliRunner().invoke(command, arguments, catch_exceptions=False) for _ in range(2)]
    shown = [json.loads(result.stdout) for result in results]
    assert [result.stderr for result in results] == ["", ""]
    assert [one["reused"] for one in shown] == [False, True]
    assert shown[0]["splits"]["train"]["documents"] + shown[0]["splits"]["valid"]["documents"] == 12


def test_command_says_what_it_wrote_and_what_it_reused(texts: Path, tmp_path: Path) -> None:
    arguments = ["prepare", "--source", str(texts), "--out", str(tmp_path / "out"), "--vocab-size", "280"]
    first, second = (CliRunner().invoke(command, arguments, catch_exceptions=False).stdout for _ in range(2))
    assert "written. 13 files, 1 empty ones left out; vocabulary of 280, trained here." in first
    assert "reused" in second


def test_inspect_counts_documents_tokens_and_bytes(texts: Path, tmp_path: Path) -> None:
    manifest = run(texts, tmp_path / "out").manifest
    result = CliRunner().invoke(command, ["inspect", str(tmp_path / "out"), "--json"], catch_exceptions=False)
    described = {Path(one["prefix"]).name: one for one in json.loads(result.stdout)}
    assert set(described) == {"train", "valid"}
    for split, one in described.items():
        record = manifest.splits[split]
        assert (one["documents"], one["tokens"], one["text_bytes"]) == (record.documents, record.tokens, record.bytes)
        assert one["bin_bytes"] == record.tokens * np.dtype(one["token_type"]).itemsize
    (tmp_path / "out" / "manifest.json").unlink()
    prefix = str(tmp_path / "out" / "train")
    foreign = CliRunner().invoke(command, ["inspect", prefix, "--json"], catch_exceptions=False)
    assert json.loads(foreign.stdout) == [described["train"] | {"text_bytes": None}]
    shown = CliRunner().invoke(command, ["inspect", prefix], catch_exceptions=False).stdout.splitlines()
    assert shown[1].split()[:2] == [prefix, str(described["train"]["documents"])]
    assert shown[1].endswith("n/a")
