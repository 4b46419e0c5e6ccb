"""Packed files that hold a thousand times what they seem to: read up to a limit, with a word, in little memory."""

import gzip
import io
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.errors import ProfileError
from ascend_moe_train.profile.text import Sheet, read_json
from ascend_moe_train.profile.trace_stream import events
from ascend_moe_train.unpacked import ALWAYS_BYTES, MAX_RATIO, Allowance, TooMuch, unpacked, unpacked_file
from tests.fuzzed_logs import tar

MIB = 2**20
FULL = b"OSError: [Errno 28] No space left on device\n"


def bomb(first: bytes, fill: bytes) -> bytes:
    """About 1 MB that unpacks to 1 GB."""
    part = fill * (16 * MIB // len(fill))
    return gzip.compress(first) + gzip.compress(part) * 64


def test_the_doctor_reads_a_bomb_up_to_a_limit_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank_3.log.gz"
    path.write_bytes(bomb(FULL, b" " * 1024))
    size = path.stat().st_size
    assert size < 1.2 * MIB
    tracemalloc.start()
    try:
        assert main(["doctor", str(path)]) == 1
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * MIB
    said = capsys.readouterr().out
    assert f"rank_3.log.gz: unpacks to more than {MAX_RATIO * size:,} bytes" in said.replace("\n", " ")
    assert f"{size:,} packed ones" in said
    assert "disk" in said  # what came before is told all the same


def test_many_bombs_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = gzip.compress(b" " * (ALWAYS_BYTES + 1))
    for rank in range(5):
        (tmp_path / f"rank_{rank}.log.gz").write_bytes(whole)
    (tmp_path / "train.log").write_bytes(FULL)
    assert main(["doctor", str(tmp_path)]) == 1
    assert "rank_2.log.gz: unpacks to more than" in (said := capsys.readouterr().out)
    assert "+2" in said


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_archives_that_are_bombs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pack: Callable[[bytes], bytes]
) -> None:
    name = "logs.tar.gz" if pack is gzip.compress else "logs.tar.xz"
    (tmp_path / name).write_bytes(pack(tar({"a.log": FULL, "b.log": b" " * (ALWAYS_BYTES + 1)})))
    assert main(["doctor", str(tmp_path / name)]) != 0
    said = capsys.readouterr().err
    assert f"{name}: unpacks to more than {ALWAYS_BYTES:,} bytes" in said
    assert len(said.strip().splitlines()) == 1


def test_packed_files_of_an_archive_share_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = gzip.compress(FULL + b" " * (ALWAYS_BYTES // 2))
    (tmp_path / "logs.tar").write_bytes(tar({f"rank_{rank}.log.gz": half for rank in range(3)}))
    assert main(["doctor", str(tmp_path / "logs.tar")]) == 1
    said = capsys.readouterr().out
    assert "rank_0.log.gz: unpacks" not in said
    assert "rank_1.log.gz: unpacks to more than" in said


@pytest.mark.parametrize(
    ("read", "first", "again"),
    [
        (lambda path: list(Sheet(path).rows()), b"a,b\n", b"1,%b\n" % (b" " * MIB)),
        (read_json, b"", b" " * MIB),
        (lambda path: list(events(path)), b"[", b'{"name": "%b"},' % (b"x" * MIB)),
    ],
)
def test_profiles_that_are_bombs_are_refused(
    tmp_path: Path, read: Callable[[Path], object], first: bytes, again: bytes
) -> None:
    path = tmp_path / "table.csv.gz"
    path.write_bytes(gzip.compress(first + again * (ALWAYS_BYTES // MIB + 1)))
    with pytest.raises(ProfileError, match=rf"table\.csv\.gz: .*unpacks to more than {ALWAYS_BYTES:,} bytes"):
        read(path)


def test_what_is_packed_as_logs_are_is_read_whole(tmp_path: Path) -> None:
    text = b"".join(b"%d of a line that others are like\n" % number for number in range(3 * ALWAYS_BYTES // 40))
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(text, 1))
    with unpacked_file(path) as stream:
        assert stream.read() == text


def test_exactly_the_limit_is_read() -> None:
    packed = gzip.compress(b"x" * ALWAYS_BYTES)
    allowance = Allowance(len(packed))
    assert allowance.most_bytes == ALWAYS_BYTES
    assert len(unpacked(io.BytesIO(packed), allowance).read()) == ALWAYS_BYTES
    with pytest.raises(TooMuch, match="packed ones"):
        unpacked(io.BytesIO(gzip.compress(b"x")), allowance).read()
