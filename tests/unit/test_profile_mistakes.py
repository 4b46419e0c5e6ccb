"""What of a profiler's folder cannot be read is told in one line with file, row and column."""

import gzip
from pathlib import Path

import pytest

from ascend_moe_train.errors import ProfileError
from ascend_moe_train.profile.load import load
from ascend_moe_train.profile.text import MAX_LINE_CHARS
from tests.profile_folders import EXAMPLE, csv_text, step_rows, write_torch


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("step_trace_time.csv", b"", "step_trace_time.csv: is empty: row 1 should name the columns"),
        ("step_trace_time.csv", b"a,b\n1,2\n", "row 1 has no column 'Computing'"),
        ("step_trace_time.csv", b"\x00\xff\x80PNG", "row 1 has no column 'Computing'"),
        ("kernel_details.csv", b"Name,Duration(us)\na,fast\n", "row 2, column 'Duration(us)': 'fast'"),
        ("kernel_details.csv", b"Name,Duration(us)\na,-4\n", "row 2, column 'Duration(us)': '-4'"),
        ("kernel_details.csv", b"Name,Duration(us)\na,NaN\n", "row 2, column 'Duration(us)': 'NaN'"),
        ("kernel_details.csv", b"Name,Duration(us)\na,1e300\n", "row 2, column 'Duration(us)': '1e300'"),
        ("kernel_details.csv", b"Name,Duration(us),Start Time(us)\na,1,x\n", "row 2, column 'Start Time(us)': 'x'"),
        ("communication.json", b'{"step7": ', "communication.json: row 1, column 11"),
        ("communication.json", b"[1]", "'top': is no mapping"),
        ("communication.json", b'{"step7": {"other": {}}}', "has 'other' where 'p2p' or 'collective'"),
        ("trace_view.json", b"what", "trace_view.json: row 1, column 1: is no list of trace events"),
        ("trace_view.json", b'[{"ph": "X"}, {"ph"', "trace_view.json: byte 1: from here on"),
        ("trace_view.json.gz", b"no gzip", "trace_view.json.gz: Not a gzipped file"),
        ("analysis.db", b"no database" * 99, "analysis.db: file is not a database"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    output = write_torch(tmp_path, 0)
    (output / name).write_bytes(content)
    with pytest.raises(ProfileError) as caught:
        load(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cut_gzip_is_told(tmp_path: Path) -> None:
    output = write_torch(tmp_path, 0)
    whole = gzip.compress(csv_text(step_rows(EXAMPLE)).encode())
    (output / "step_trace_time.csv").unlink()
    (output / "step_trace_time.csv.gz").write_bytes(whole[:-9])
    with pytest.raises(ProfileError, match=r"step_trace_time\.csv\.gz: row \d+, column 1"):
        load(tmp_path)
    (output / "step_trace_time.csv.gz").write_bytes(whole)
    assert [each.e2e_us for each in load(tmp_path).ranks[0].steps] == [90.0]


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    output = write_torch(tmp_path, 0)
    (output / "kernel_details.csv").write_text("Name,Duration(us)\n" + "x" * (MAX_LINE_CHARS + 2))
    with pytest.raises(ProfileError, match="a line of more than"):
        load(tmp_path)


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="holds no profiler output"):
        load(tmp_path)
    with pytest.raises(ProfileError, match="does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="is no folder"):
        load(tmp_path / "file")
