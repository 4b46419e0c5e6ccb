"""The status board: what a rank writes is read whole or not at all, whatever else is in the file."""

import os
import random
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascend_moe_train.cluster import variables
from ascend_moe_train.cluster.board import PHASES, Board, Slot
from ascend_moe_train.cluster.rank import Unwatched, progress_from, run_id
from ascend_moe_train.errors import ConfigError

ROOT = Path(__file__).parents[2]
HEADER_BYTES, SLOT_BYTES, FAILURE_OFFSET = 64, 1024, 512


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "board"


def overwrite(path: Path, offset: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(raw)


def test_what_a_rank_writes_is_read(path: Path) -> None:
    board = Board.create(path, 3)
    assert board.read() == (None, None, None)
    slot = Slot.open(path, 1)
    start = board.read_one(1)
    assert start is not None and (start.phase, start.step, start.verb, start.failure) == ("starting", 0, "", None)
    slot.phase("step", 17)
    before_s = time.monotonic()
    slot.enter("all_to_all", "ep", 1201)
    status = board.read()[1]
    assert status is not None and board.read()[0] is board.read()[2] is None
    assert (status.pid, status.phase, status.step) == (os.getpid(), "step", 17)
    assert (status.verb, status.group, status.sequence) == ("all_to_all", "ep", 1201)
    assert before_s <= status.entered_s <= time.monotonic()
    slot.leave()
    after = board.read_one(1)
    assert after is not None and (after.verb, after.group, after.sequence) == ("", "", 1201)
    assert after.updates == status.updates + 1
    slot.phase("saving")
    assert (saving := board.read_one(1)) is not None and (saving.phase, saving.step) == ("saving", 17)


def test_the_first_failure_stays_and_is_one_line(path: Path) -> None:
    board, slot = Board.create(path, 1), Slot.open(path, 0)
    slot.fail("ValueError:\n  ü\t\x1b[31m" + "x" * 1000, is_user_error=False)
    slot.fail("what follows", is_user_error=True)
    status = board.read_one(0)
    assert status is not None and status.failure is not None
    assert status.failure.line.startswith("ValueError: ü ?[31mxxx") and 300 < len(status.failure.line) <= 480
    assert not status.failure.is_user_error


WRITER = """
import sys
from pathlib import Path
from ascend_moe_train.cluster.board import Slot
slot = Slot.open(Path(sys.argv[1]), 0)
print("ready", flush=True)
number = 0
while True:
    number += 1
    slot.phase("step", number)
    slot.enter(f"verb {number}", f"group {number}", number)
"""


def test_no_half_written_slot_is_ever_seen(path: Path) -> None:
    board = Board.create(path, 1)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        last, end_s, seen = 0, time.monotonic() + 20.0, set[int]()
        while len(seen) < 300 and time.monotonic() < end_s:
            status = board.read_one(0)
            assert status is not None and status.updates >= last
            last = status.updates
            seen.add(last)
            if status.sequence:
                assert status.verb == f"verb {status.sequence}" and status.group == f"group {status.sequence}"
                assert status.step - status.sequence in (0, 1)
        assert len(seen) == 300
    finally:
        writer.kill()
        writer.communicate()


def test_a_slot_that_is_damaged_stands_for_what_it_said_before(path: Path) -> None:
    board, slot = Board.create(path, 1), Slot.open(path, 0)
    slot.phase("step", 5)
    before = board.read_one(0)
    for offset in range(0, 100, 7):
        overwrite(path, HEADER_BYTES + offset, b"\xa5")
        assert board.read_one(0) == before
    slot.phase("step", 6)
    assert (after := board.read_one(0)) is not None and after.step == 6


def sealed(record: bytes) -> bytes:
    return struct.pack("<I", zlib.crc32(record)) + record


STATE = "<QQQQIB32s64s"


@pytest.mark.parametrize(
    "numbers",
    [(2**64 - 1, 0, 0, 0, 1, 0), (1, 2**63, 0, 0, 1, 0), (1, 1, 1, 1, 0, 0), (1, 1, 1, 1, 1, len(PHASES))],
)
def test_impossible_values_are_not_believed(numbers: tuple[int, ...], path: Path) -> None:
    board = Board.create(path, 1)
    overwrite(path, HEADER_BYTES, sealed(struct.pack(STATE, *numbers, b"v", b"g")))
    assert board.read() == (None,)


def test_names_cannot_steer_a_terminal(path: Path) -> None:
    board = Board.create(path, 1)
    overwrite(path, HEADER_BYTES, sealed(struct.pack(STATE, 1, 1, 1, 1, 1, 2, b"\x1b[2J\xff\n", b"a\0b\r")))
    assert (status := board.read_one(0)) is not None
    assert (status.verb, status.group) == ("?[2J\N{REPLACEMENT CHARACTER}?", "a?b?")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), seals=st.booleans())
def test_random_content_is_read_without_an_error(seed: int, seals: bool, tmp_path: Path) -> None:
    generator = random.Random(seed)
    path = tmp_path / "board"
    board = Board.create(path, 2)
    overwrite(path, HEADER_BYTES, generator.randbytes(2 * SLOT_BYTES))
    if seals:
        overwrite(path, HEADER_BYTES, sealed(generator.randbytes(struct.calcsize(STATE))))
        overwrite(path, HEADER_BYTES + FAILURE_OFFSET, sealed(generator.randbytes(struct.calcsize("<Q?H480s"))))
    for status in board.read():
        if status is not None:
            assert status.phase in PHASES and f"{status.verb}{status.group}".isprintable()
            assert status.failure is None or status.failure.line.isprintable()


HEADER = struct.pack("<8sII", b"AMTBOARD", 1, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no status board of a launcher"),
        (bytes(2000), "is no status board of a launcher"),
        (struct.pack("<8sII", b"AMTBOARD", 2, 1) + bytes(2000), "is no status board of a launcher"),
        (struct.pack("<8sII", b"AMTBOARD", 1, 2**32 - 1) + bytes(2000), "is no status board of a launcher"),
        (HEADER + bytes(2000), "is no status board of 1 ranks: it has 2016 bytes"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Board.open(path)
    with pytest.raises(ConfigError, match=message):
        Slot.open(path, 0)


def test_places_without_a_board_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("none", "No such file"), ("", "Is a directory"), ("pipe", "is no status board")):
        with pytest.raises(ConfigError, match=message):
            Slot.open(tmp_path / name, 0)


def test_a_rank_finds_its_slot_by_the_variables(path: Path) -> None:
    board = Board.create(path, 2)
    progress_from({variables.BOARD: str(path), variables.RANK: "1"}).phase("compile", 0)
    assert [status and status.phase for status in board.read()] == [None, "compile"]
    assert isinstance(progress_from({}), Unwatched)
    assert (run_id({}), run_id({variables.RUN_ID: "x"})) == (None, "x")


@pytest.mark.parametrize("rank", ["", "-1", "x", "1e3", "9" * 5000, "2", "٣"])
def test_a_rank_that_does_not_exist_is_refused(rank: str, path: Path) -> None:
    Board.create(path, 2)
    with pytest.raises(ConfigError):
        progress_from({variables.BOARD: str(path), variables.RANK: rank})


def test_a_process_that_nobody_watches_says_nothing() -> None:
    nobody = Unwatched()
    nobody.phase("step", 1)
    nobody.enter("all_reduce", "dp", 0)
    nobody.leave()
    nobody.fail("x", is_user_error=True)
