"""Names of files that are no text, or steer a terminal; files that are none; archives that no program wrote."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from ascend_moe_train.cli.main import MAX_COMPLAINT, main
from ascend_moe_train.cluster.evidence import Failed, keep_evidence
from ascend_moe_train.doctor.diagnose import diagnose
from ascend_moe_train.doctor.keep import kept_verdict
from ascend_moe_train.doctor.reading import VERDICT_NAME
from ascend_moe_train.doctor.series import read_rows
from ascend_moe_train.errors import DataError
from ascend_moe_train.plain_text import plain
from tests.profile_folders import write_torch

FULL = "OSError: [Errno 28] No space left on device\n"
NOT_UTF8 = os.fsdecode(b"rank-0\xff.log")
STEERING = "a\x1b]0;b\x07\n[red]\u202e.log"
Captured = pytest.CaptureFixture[str]


def shown(arguments: list[str], capfd: Captured) -> tuple[int, str]:
    """The exit code, and all that reached the screen, which holds nothing that steers it."""
    code = main(arguments)
    out, err = capfd.readouterr()
    assert all(each.isprintable() for each in (out + err).replace("\n", ""))
    return code, out + err


@pytest.mark.parametrize("name", [NOT_UTF8, STEERING])
def test_names_of_logs(name: str, tmp_path: Path, capfd: Captured) -> None:
    (tmp_path / name).write_text(FULL)
    for paths in ([str(tmp_path)], [str(tmp_path / name)]):
        code, text = shown(["doctor", *paths], capfd)
        assert code == 1
        assert plain(name) in text
        code, text = shown(["doctor", *paths, "--json"], capfd)
        assert plain(name) in json.loads(text)["sources"][0]["name"]
    assert shown(["doctor", str(tmp_path), "--html", str(tmp_path / "page.html")], capfd)[0] == 1
    code, text = shown(["doctor", str(tmp_path / f"no{name}")], capfd)
    assert (code, text.count("\n")) == (2, 1)


def test_what_is_kept_of_a_failure_with_such_a_name(tmp_path: Path) -> None:
    message = f"error: rank 0 failed: {NOT_UTF8}: {FULL}"
    assert kept_verdict(tmp_path, tmp_path / "logs", "1", message) is not None
    assert json.loads((tmp_path / "logs" / VERDICT_NAME).read_text())["fault"] is True
    failed = Failed(rank=None, exit_code=1, message=message, views=[], stacks={})
    folder = keep_evidence(tmp_path / "logs", failed, run_id="1", checkpoint_step=None)
    assert r"rank-0\udcff.log" in (folder / "message.txt").read_text()


@pytest.mark.parametrize("name", ["a\x1b[31m[red]<script>", os.fsdecode(b"\xff")])
def test_names_of_captures(name: str, tmp_path: Path, capfd: Captured) -> None:
    write_torch(tmp_path / name, 0)
    for verb in (["show"], ["check"], ["compare", str(tmp_path / name)]):
        assert shown(["profile", *verb, str(tmp_path / name), "--no-cache"], capfd)[0] in (0, 1)
    assert plain(name)[:4] in shown(["profile", "show", str(tmp_path / name), "--no-cache"], capfd)[1]


def test_pipes_are_not_waited_for(tmp_path: Path, capfd: Captured) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    for path in (tmp_path / "pipe.log", Path("/dev/zero")):
        code, text = shown(["doctor", str(path)], capfd)
        assert (code, text.count("\n")) == (2, 1)
        assert "is no regular file" in text
    output = write_torch(tmp_path / "capture", 0)
    os.mkfifo(output.parent / "profiler_info_3.json")
    code, text = shown(["profile", "show", str(tmp_path / "capture")], capfd)
    assert code == 2
    assert "profiler_info_3.json: is no regular file" in text


def header(kind: bytes, content: bytes, size_bytes: int | None = None) -> bytes:
    """A header of an archive, with what belongs to it, which may be less than it says."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, len(content) if size_bytes is None else size_bytes
    padding = -len(content) % tarfile.BLOCKSIZE
    return info.tobuf(tarfile.GNU_FORMAT) + content + b"\0" * padding


@pytest.mark.parametrize(
    "content",
    [
        b"\x1f\x8b\x08",
        b"\xfd7zXZ\0" + b"x" * 99,
        header(tarfile.XHDTYPE, b"11 a=bcdef\n") * 3000,
        header(tarfile.GNUTYPE_LONGNAME, b"long") * 3000,
        header(tarfile.XHDTYPE, b"", 2**33),
        header(tarfile.GNUTYPE_LONGLINK, b"", 2**33),
        header(tarfile.REGTYPE, b"text", 2**40),
        header(tarfile.CONTTYPE, b"text", 2**60),
        header(tarfile.GNUTYPE_SPARSE, b"text", 2**40),
        header(tarfile.XHDTYPE, b"22 GNU.sparse.map=1,x\n") + header(tarfile.REGTYPE, b"text"),
    ],
)
def test_archives_that_no_program_wrote(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"not a whole tar archive|unpacks to more than 67,108,864 bytes"):
        diagnose([tmp_path / "a.tar"])


def test_names_in_archives(tmp_path: Path, capfd: Captured) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in (f"../../{STEERING}", f"/{NOT_UTF8}"):
            info = tarfile.TarInfo(name)
            info.size = len(FULL)
            archive.addfile(info, io.BytesIO(FULL.encode()))
    code, text = shown(["doctor", str(tmp_path / "a.tar"), "--json"], capfd)
    assert code == 1
    assert len(json.loads(text)["sources"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ('"step": 1, "loss": 1' + "0" * 400, 1),
        ('"step": 1, "load_cv": 5, "dead_experts": {"a": 1}', 1),
        ('"step": 1' + "0" * 400, 0),
        ('"step": -1, "loss": 2.0', 0),
        ('"step": 1, "loss": 1e999, "step_s": -1e308, "grad_norm": []', 1),
    ],
)
def test_figures_that_cannot_be(fields: str, count: int, tmp_path: Path, capfd: Captured) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "step", {fields}}}\n')
    assert len(read_rows(tmp_path / "metrics.jsonl")) == count
    for arguments in (["doctor", str(tmp_path)], ["doctor", "watch", "--once", str(tmp_path)]):
        assert shown(arguments, capfd)[0] in ((0, 1) if count else (0, 2))


@pytest.mark.parametrize(
    "options",
    [
        ["doctor", "LOG", "--html", "LOG"],
        ["doctor", "LOG", "--html", "LINK"],
        ["profile", "show", "CAPTURE", "--html", "SAME", "--trace", "SAME"],
        [
            "profile",
            "show",
            "CAPTURE",
            "--trace",
            "CAPTURE/host_1000_20260101120000000_ascend_pt/ASCEND_PROFILER_OUTPUT/kernel_details.csv",
        ],
        ["preflight", "--hostfile", "HOSTS", "--html", "HOSTS"],
        ["preflight", "--hostfile", "HOSTS", "--html", "SAME", "--rank-table", "SAME"],
        ["preflight", "--hostfile", "HOSTS", "--hardware-out", "SAME"],
        ["preflight", "--hostfile", "HOSTS", "--timeout", "nan"],
        ["preflight", "--hostfile", "HOSTS", "--max-offset", "nan"],
        ["preflight", "--hostfile", "HOSTS", "--min-write", "inf"],
        ["preflight", "--hostfile", "HOSTS", "--python", ""],
        ["preflight", "--hostfile", "HOSTS", "--folder", ""],
    ],
)
def test_what_is_read_is_not_written(options: list[str], tmp_path: Path, capfd: Captured) -> None:
    (tmp_path / "LOG").write_text(FULL)
    (tmp_path / "LINK").symlink_to("LOG")
    (tmp_path / "HOSTS").write_text("127.0.0.1 slots=1 port=1\n")
    write_torch(tmp_path / "CAPTURE", 0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = [str(tmp_path / each) if each.split("/")[0].isupper() else each for each in options]
    code, text = shown(given, capfd)
    assert (code, text.count("\n")) == (2, 1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_no_standard_input(monkeypatch: pytest.MonkeyPatch, capfd: Captured) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert shown(["doctor", "-"], capfd) == (2, "error: -: there is no standard input\n")


@pytest.mark.parametrize("code", ["9" * 100_000, "EI\u0660\u0660\u0660\u0666", STEERING, NOT_UTF8, ""])
def test_codes_that_are_none(code: str, capfd: Captured) -> None:
    result, text = shown(["doctor", "explain", code], capfd)
    assert (result, text.count("\n")) == (2, 1)
    assert len(text) < 300


def test_a_long_complaint_is_cut(capfd: Captured) -> None:
    assert len(shown(["x" * 100_000], capfd)[1]) <= MAX_COMPLAINT + len("error: \n")


@pytest.mark.parametrize("step_s", ["1" + "0" * 400, "null", "1e300", "NaN"])
def test_no_stall_by_a_time_that_is_none(step_s: str, tmp_path: Path, capfd: Captured) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "step", "step": 1, "step_s": {step_s}}}\n')
    assert shown(["doctor", "watch", "--once", str(tmp_path)], capfd) == (0, "")


def test_results_of_benchmarks_steer_nothing(tmp_path: Path, capfd: Captured) -> None:
    evil = "\x1b]0;a\x07|<img src=x onerror=alert(1)>\n# b"
    columns = [{"key": "name", "head": evil}, {"key": "v", "head": evil, "shows": "number"}]
    shared = {"kind": "step", "title": evil, "command": evil, "notes": [evil], "machine": {evil: evil}, "made_at": evil}
    result = {**shared, "columns": columns, "rows": [{"name": evil, "v": 1.0}], "settings": {evil: evil}}
    path, out = tmp_path / "a.json", tmp_path / "out"
    path.write_text(json.dumps(result))
    assert shown(["bench", "compare", str(path), str(path), "--out", str(out)], capfd)[0] == 0
    page, text = (out / "compare.html").read_text(), (out / "compare.md").read_text()
    assert "<img" not in page
    assert "\x1b" not in page + text
    assert "\n# b" not in text
    path.write_text(json.dumps({**result, "columns": []}))
    os.mkfifo(tmp_path / "pipe")
    for wrong in (path, tmp_path / "pipe", tmp_path):
        code, said = shown(["bench", "compare", str(wrong), str(wrong), "--out", str(out)], capfd)
        assert (code, said.count("\n")) == (2, 1)
