"""The proofs that a conversion makes of itself, its resuming, its memory: each broken on purpose once."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.checkpoint import convert_import, huggingface_weights, store
from ascend_moe_train.checkpoint.convert_export import export_folder
from ascend_moe_train.checkpoint.convert_import import import_folder
from ascend_moe_train.checkpoint.convert_target import ExportOptions
from ascend_moe_train.checkpoint.huggingface import Entry, join_block
from ascend_moe_train.checkpoint.stream_output import Job
from ascend_moe_train.cli import main as cli
from ascend_moe_train.errors import CheckpointError
from scripts.make_synthetic_hf import config_of, make
from tests.hf_folders import golden_folder, golden_model, read_folder, same_tensors, silent, write_folder

QWEN3 = "qwen3_moe_tiny"
PARTIAL = ".out.partial"
FILE_BYTES = 8_000  # several files for the tiny model


def run_import(source: Path, out: Path, progress: Callable[[int, int], None] = silent) -> Any:
    return import_folder(source, out, max_file_bytes=FILE_BYTES, progress=progress)


def run_export(source: Path, out: Path, progress: Callable[[int, int], None] = silent) -> Any:
    return export_folder(source, out, ExportOptions(), max_shard_bytes=FILE_BYTES, progress=progress)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return golden_folder(tmp_path / "hf", QWEN3, shards=2)


def names_beside(source: Path) -> list[str]:
    return sorted(path.name for path in source.parent.iterdir())


def test_a_wrong_arrangement_is_noticed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up swapped: right shapes, every byte written, and not what it should be."""

    def swapped(entry: Entry, parts: list[Any], out: Any) -> None:
        join_block(entry, parts[::-1], out)

    monkeypatch.setattr(convert_import, "join_block", swapped)
    with pytest.raises(CheckpointError, match=r"hf/model-0.*experts.*(gate|up)_proj.*sums along axis 0 differ"):
        run_import(source, source.parent / "out")
    assert names_beside(source) == ["hf"]


@pytest.mark.parametrize("is_header", [False, True])
def test_bytes_that_read_back_as_others_are_noticed(
    is_header: bool, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # threads write: one of them gets the tenth number of its kind, whatever the others do at that moment
    real, numbers = os.pwrite, count(1)
    chosen = 2 if is_header else 10

    def faulty(descriptor: int, data: Any, offset: int) -> int:
        if (offset == 0) != is_header or next(numbers) != chosen:
            return real(descriptor, data, offset)
        changed = bytearray(data)
        changed[len(changed) // 2] ^= 1
        return real(descriptor, bytes(changed), offset)

    monkeypatch.setattr(os, "pwrite", faulty)
    what = "header" if is_header else "tensor '.*'"
    with pytest.raises(CheckpointError, match=rf"tensors-\d+\.safetensors: {what}: reads back as other bytes"):
        run_import(source, source.parent / "out")
    assert names_beside(source) == ["hf"]


def test_a_tensor_that_nobody_reads_is_noticed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_weights.Ledger, "add", lambda self, name, size_bytes: None)
    with pytest.raises(CheckpointError, match=r"tensor '.*': 0 of \d+ bytes were read"):
        run_import(source, source.parent / "out")
    assert names_beside(source) == ["hf"]


def test_a_tensor_that_nobody_writes_is_noticed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = convert_import._job
    monkeypatch.setattr(
        convert_import,
        "_job",
        lambda entry, body: (
            Job(tensors=(), chunks=lambda: iter(())) if entry.ours == "norm.weight" else real(entry, body)
        ),
    )
    with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight' was not written"):
        run_import(source, source.parent / "out")


def test_a_damaged_checkpoint_is_not_exported(source: Path) -> None:
    out = source.parent / "out"
    run_import(source, out)
    file = min(out.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=rf"{file.name}: tensor '.*': sha256 does not match the manifest"):
        run_export(out, source.parent / "back")
    assert names_beside(source) == ["hf", "out"]


def test_a_failed_check_leaves_nothing(source: Path) -> None:
    def check(folder: Path) -> None:
        assert store.load(folder)
        raise CheckpointError("logits differ")

    with pytest.raises(CheckpointError, match="logits differ"):
        import_folder(source, source.parent / "out", progress=silent, check=check)
    assert names_beside(source) == ["hf"]


class Interrupt:
    """Ctrl-C once so many bytes are done."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if done_bytes > self._share * total_bytes:
            raise KeyboardInterrupt


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_an_interrupted_import_goes_on(source: Path, share: float) -> None:
    out = source.parent / "out"
    with pytest.raises(KeyboardInterrupt):
        run_import(source, out, Interrupt(share))
    assert names_beside(source) == [PARTIAL, "hf"]
    finished = (source.parent / PARTIAL / "journal.jsonl").read_text().count("\n") - 1
    converted = run_import(source, out)
    assert 0 < converted.files_reused == finished < converted.files
    assert names_beside(source) == ["hf", "out"]
    run_import(source, source.parent / "whole")
    assert store.load(out)[1] == store.load(source.parent / "whole")[1]
    same_tensors(store.load(out)[0], store.load(source.parent / "whole")[0])


def test_files_are_finished_one_after_another(source: Path) -> None:
    """With one thread, an interruption finds at most one file unfinished."""
    for share in (0.3, 0.5, 0.8):
        out = source.parent / "out"
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patched:
            patched.setattr("ascend_moe_train.checkpoint.convert_write.num_workers", lambda block_bytes: 1)
            run_import(source, out, Interrupt(share))
        files = {path.name for path in (source.parent / PARTIAL).glob("*.safetensors")}
        lines = (source.parent / PARTIAL / "journal.jsonl").read_text().splitlines()[1:]
        assert len(files - {json.loads(line)["file"] for line in lines}) <= 1


def test_an_interrupted_export_goes_on(source: Path) -> None:
    ours, out = source.parent / "ours", source.parent / "out"
    run_import(source, ours)
    with pytest.raises(KeyboardInterrupt):
        run_export(ours, out, Interrupt(0.7))
    converted = run_export(ours, out)
    assert 0 < converted.files_reused < converted.files
    same_tensors(read_folder(out), golden_model(QWEN3)[1])


def test_a_finished_file_that_was_damaged_meanwhile_is_made_again(source: Path) -> None:
    out = source.parent / "out"
    with pytest.raises(KeyboardInterrupt):
        run_import(source, out, Interrupt(0.7))
    lines = (source.parent / PARTIAL / "journal.jsonl").read_text().splitlines()
    file = source.parent / PARTIAL / json.loads(lines[1])["file"]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert run_import(source, out).files_reused == len(lines) - 2
    assert store.load(out)


@pytest.mark.parametrize("journal", [b"", b"nonsense\n", b'{"made_from": "other"}\n', b'{"made_from": 3}\n'])
def test_a_useless_journal_means_a_new_start(source: Path, journal: bytes) -> None:
    out = source.parent / "out"
    with pytest.raises(KeyboardInterrupt):
        run_import(source, out, Interrupt(0.7))
    (source.parent / PARTIAL / "journal.jsonl").write_bytes(journal)
    assert run_import(source, out).files_reused == 0
    assert store.load(out)


def test_another_source_means_a_new_start(source: Path) -> None:
    out = source.parent / "out"
    with pytest.raises(KeyboardInterrupt):
        run_import(source, out, Interrupt(0.7))
    file = min(source.glob("*.safetensors"))
    os.utime(file, ns=(1, 1))
    assert run_import(source, out).files_reused == 0


def test_one_process_at_a_time(source: Path) -> None:
    folder = source.parent / PARTIAL
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(CheckpointError, match=r"\.out\.partial: another process is making it now"):
            run_import(source, source.parent / "out")
    finally:
        os.close(descriptor)
    run_import(source, source.parent / "out")


def test_a_full_disk_keeps_what_is_finished(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = os.pwrite, [40]

    def full(descriptor: int, data: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"No space left on device; \d+ finished files stay in .*partial"):
            run_import(source, source.parent / "out")
    assert run_import(source, source.parent / "out").files_reused > 0


@pytest.mark.parametrize("good_calls", [0, 2])
def test_a_disk_that_cannot_hold_on_to_data(source: Path, monkeypatch: pytest.MonkeyPatch, good_calls: int) -> None:
    real, left = os.fsync, [good_calls]

    def broken(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".safetensors":
            left[0] -= 1
            if left[0] < 0:
                raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(CheckpointError, match=r"cannot write .*tensors-\d+\.safetensors: Input/output error"):
        run_import(source, source.parent / "out")
    assert names_beside(source) == ([PARTIAL, "hf"] if good_calls else ["hf"])


def test_too_little_space_is_said_at_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("ascend_moe_train.checkpoint.stream_output.shutil.disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"[\d.]+ kB are to be written, 10 B are free$"):
        run_import(source, source.parent / "out")
    assert names_beside(source) == ["hf"]


def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    config = config_of(layers=2, experts=8, hidden=512, vocab_size=512)
    make(tmp_path / "hf", config, shard_bytes=2 * 10**6)
    command = [sys.executable, "-m", "tests.slow_import", str(tmp_path / "hf"), str(tmp_path / "out")]
    with subprocess.Popen(command) as process:
        journal = tmp_path / PARTIAL / "journal.jsonl"
        deadline = time.monotonic() + 60
        while not (journal.exists() and journal.read_text().count("\n") > 2):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    converted = import_folder(tmp_path / "hf", tmp_path / "out", max_file_bytes=2 * 10**6, progress=silent)
    assert converted.files_reused >= 2
    export_folder(tmp_path / "out", tmp_path / "back", ExportOptions(), progress=silent)
    same_tensors(read_folder(tmp_path / "back"), read_folder(tmp_path / "hf"))


def test_memory_goes_by_the_largest_tensor(tmp_path: Path) -> None:
    """A model of 45 MB whose largest tensors are an expert of 0.6 MB, and an embedding that is only passed on."""
    make(tmp_path / "hf", config_of(layers=2, experts=32, hidden=768, vocab_size=4096), shard_bytes=20 * 10**6)
    sizes = sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    tracemalloc.start()
    try:
        import_folder(tmp_path / "hf", tmp_path / "out", progress=silent)
        importing_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        export_folder(tmp_path / "out", tmp_path / "back", ExportOptions(), progress=silent)
        exporting_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sizes > 80 * 10**6
    assert importing_bytes < 20 * 10**6
    assert exporting_bytes < 20 * 10**6


def test_terminal_output(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(source.parent / "out")
    assert cli.main(["convert", "import", str(source), out]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith(f"{out}: qwen3_moe, ") and "read back" in said.out
    assert cli.main(["convert", "export", out, f"{out}-back", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tensors_written"] == len(golden_model(QWEN3)[1])
    assert cli.main(["convert", "import", str(source), f"{out}-logits", "--verify", "nothing"]) == 2


def test_zero_sized_output_is_possible(tmp_path: Path) -> None:
    """Nothing of the kind is published, but a header may say it: the config refuses it by its shape."""
    config, tensors = golden_model(QWEN3)
    tensors["model.norm.weight"] = np.zeros((0,), tensors["model.norm.weight"].dtype)
    folder = write_folder(tmp_path / "hf", config, tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[0\]"):
        run_import(folder, tmp_path / "out")
