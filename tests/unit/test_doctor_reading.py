"""What the doctor reads: packed, archived, rotated, in several encodings; hostile files end with a word."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from ascend_moe_train.cluster.output import unsteered
from ascend_moe_train.doctor.clock import Moment, common_day, moment_of, on_one_scale, shown_time
from ascend_moe_train.doctor.diagnose import diagnose, matcher
from ascend_moe_train.doctor.event import Actor
from ascend_moe_train.doctor.prefix import actor_of_file, split
from ascend_moe_train.doctor.reading import BLOCK_BYTES, blocks
from ascend_moe_train.doctor.scan import MAX_EVENTS, scan
from ascend_moe_train.errors import DataError
from tests.doctored import told, verdict_on

FULL = "OSError: [Errno 28] No space left on device\n"


def cause_at(*paths: Path) -> str:
    verdict = diagnose(paths)
    return verdict.cause.rule.id if verdict.cause is not None else ""


def test_packed_and_rotated(tmp_path: Path) -> None:
    (tmp_path / "worker_3.log.2.gz").write_bytes(gzip.compress(FULL.encode()))
    verdict = diagnose([tmp_path])
    assert verdict.cause is not None
    assert (verdict.cause.rule.id, verdict.cause.ranks) == ("disk-full", (3,))


@pytest.mark.parametrize("name", ["logs.tar", "logs.tar.gz"])
def test_archives(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as archive:
        info = tarfile.TarInfo("node_1/rank_5.log")
        info.size = len(FULL)
        archive.addfile(info, io.BytesIO(FULL.encode()))
        link = tarfile.TarInfo("etc")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    verdict = diagnose([tmp_path / name])
    assert verdict.cause is not None
    assert verdict.cause.ranks == (5,)


def test_pipe() -> None:
    verdict = diagnose([], pipe=io.BytesIO(FULL.encode()))
    assert verdict.cause is not None
    assert str(verdict.cause.events[0].place) == "stdin:1"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "gb18030"])
def test_encodings(encoding: str) -> None:
    text = f"第一行没有问题\n磁盘：{FULL}"
    verdict = verdict_on({"a.log": text.encode(encoding)})
    assert verdict.cause is not None
    assert verdict.cause.events[0].text == "磁盘：OSError: [Errno 28] No space left on device"


def test_what_is_no_log_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "core").write_bytes(b"\0" * 5000 + FULL.encode())
    (tmp_path / "weights.bin").write_text(FULL)
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "away").symlink_to("/proc")
    assert cause_at(tmp_path) == ""


def test_damaged_files_are_said(tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(FULL.encode() * 9000)[:-20])
    verdict = diagnose([tmp_path])
    assert verdict.evidence.sources[0].problem
    assert verdict.cause is not None
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(FULL.encode("utf-16") * 9000)[:-20])
    verdict = diagnose([tmp_path])
    assert verdict.evidence.sources[0].problem
    assert verdict.cause is not None
    (tmp_path / "b.tar").write_bytes(b"no tar at all")
    with pytest.raises(DataError, match=r"b\.tar: not a whole tar archive"):
        diagnose([tmp_path / "b.tar"])
    with pytest.raises(DataError, match="there is no such file or folder"):
        diagnose([tmp_path / "nothing"])


def test_long_lines() -> None:
    line = "x" * 9_000_000
    assert told({"a.log": f"{line} ERROR {line}\n{FULL}"})[0] == "disk-full"
    assert told({"a.log": f"[ERROR] {'(' * 3_000_000}\n"})[0] == "unknown-error"


def test_lines_without_times_are_looked_at_a_few_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def counted(line: str) -> Moment | None:
        nonlocal looked
        looked += 1
        return moment_of(line)

    monkeypatch.setattr("ascend_moe_train.doctor.scan.moment_of", counted)
    verdict = verdict_on({"a.log": "2026-03-01 10:00:00 begin\n" + FULL * 2000})
    assert looked < 4 * 2000
    assert [event.moment is not None for event in verdict.evidence.events[:2]] == [True, True]


def test_of_many_lines_of_a_rule_the_first_and_the_last_are_kept() -> None:
    lines = [f"2026-03-01 10:{n // 60:02d}:{n % 60:02d} {FULL}" for n in range(3 * MAX_EVENTS)]
    lines.append(FULL)  # without a time: that of the line before
    found = [
        scan("a.log", Actor(), ["".join(lines[:at]).encode(), "".join(lines[at:]).encode()], matcher())
        for at in (5, 100)
    ]
    for each in found:
        assert each.counts["disk-full"] == 3 * MAX_EVENTS + 1
        assert [event.place.line for event in each.events] == [*range(1, MAX_EVENTS + 1), 3 * MAX_EVENTS + 1]
        first, *_, last = (event.moment for event in each.events)
        assert first is not None
        assert last is not None
        assert last.seconds - first.seconds == 3 * MAX_EVENTS - 1


def test_many_lines_before_a_new_start_are_over() -> None:
    content = f"--- start 1\n{FULL * 3 * MAX_EVENTS}--- start 2\nall is well\n"
    found = scan("a.log", Actor(), [content.encode()], matcher())
    assert [event.rule.id for event in found.events if event.rule.role != "fact"] == []


def test_figures_of_steps_are_read_however_they_are_written() -> None:
    lines = "step:[ 20/ 90000], Loss: 2.5, LR: 1.0e-4, per_step_time: 812ms\nSTEP 21 | lm loss: nan | x_grad_norm 3\n"
    found = scan("a.log", Actor(), [f"{lines}step 22 floss: 1\n".encode()], matcher())
    assert [(step, line, repr(figures)) for step, line, figures in found.losses] == [
        (20, 1, "{'loss': 2.5, 'lr': 0.0001, 'step_ms': 812.0}"),
        (21, 2, "{'loss': nan, 'grad_norm': 3.0}"),
    ]


def test_a_single_line_in_small_pieces_is_cut_into_blocks() -> None:
    class Trickle(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            return self.read(min(size or 0, 2**16))

    content = b"x" * (2 * BLOCK_BYTES + 5) + b"\ny\nz"
    found = list(blocks(Trickle(content), lambda problem: None))
    assert b"".join(found) == content
    assert [len(each) for each in found[:2]] == [BLOCK_BYTES, BLOCK_BYTES]
    assert found[2:] == [b"xxxxx\ny\n", b"z"]


def test_escapes_are_taken_out() -> None:
    verdict = verdict_on({"a.log": "\x1b[31mOSError: [Errno 28] No space left on device\x1b[0m\x07\n"})
    assert verdict.cause is not None
    assert verdict.cause.events[0].text == unsteered(FULL.strip())


def test_a_new_start_ends_what_was_before() -> None:
    assert told({"rank-00000.log": f"--- start 1\n{FULL}--- start 2\nall is well\n"})[0] == ""


@pytest.mark.parametrize(
    ("name", "actor"),
    [
        ("log/worker_12.log", Actor(part="rank", rank=12)),
        ("logs/rank-00003.log", Actor(part="rank", rank=3)),
        ("rank_4/net.log.1.gz", Actor(part="rank", rank=4)),
        ("attempt_0/7/stderr.log", Actor(part="rank", rank=7)),
        ("node_2/plog/plog-4711_2026.log", Actor(pid=4711, host="node_2")),
        ("device-5/device-88_1.log", Actor(pid=88, device=5)),
        ("scheduler.log", Actor(part="scheduler")),
        ("dmesg.txt", Actor(part="kernel")),
        ("train.log", Actor()),
    ],
)
def test_names_of_files(name: str, actor: Actor) -> None:
    assert actor_of_file(name) == actor


@pytest.mark.parametrize(
    ("line", "rank", "pid", "text"),
    [
        ("[rank3]: hello", 3, None, "hello"),
        ("worker_2.log: [ERROR] ME(77:1,Main):x", 2, 77, "[ERROR] ME(77:1,Main):x"),
        ("node1/rank9: hello", 9, None, "hello"),
        ("[1,6]<stderr>: hello", 6, None, "hello"),
        ("error: rank 2 in step 3: hello", 2, None, "hello"),
        ("[E1 x.cpp] [Rank 5] hello", 5, None, "[E1 x.cpp] [Rank 5] hello"),
        ("EI0006: [PID: 99] hello", None, 99, "EI0006: [PID: 99] hello"),
        (
            "[ERROR] 2026 (PID:5, Device:3, RankID:3) ERR02200",
            3,
            5,
            "[ERROR] 2026 (PID:5, Device:3, RankID:3) ERR02200",
        ),
    ],
)
def test_who_says_a_line(line: str, rank: int | None, pid: int | None, text: str) -> None:
    actor, _, said = split(line, Actor())
    assert (actor.rank, actor.pid, said) == (rank, pid, text)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("[ERROR] HCCL(1,p):2026-03-01-10:20:30.624.966 [x]", "2026-03-01 10:20:30"),
        ("2026-03-01 10:20:30,218 - x", "2026-03-01 10:20:30"),
        ("[E301 10:20:30.428029551 x.cpp:1]", "2026-03-01 10:20:30"),
        ("Mar  1 10:20:30 host kernel: x", "2026-03-01 10:20:30"),
        ("Sun Mar  1 10:20:30 2026 x", "2026-03-01 10:20:30"),
        ("10:20:30 rank 3", "2026-03-01 10:20:30"),
    ],
)
def test_times(line: str, shown: str) -> None:
    moment = moment_of(line)
    noon = moment_of("2026-03-01 12:00:00")
    assert moment is not None
    assert noon is not None
    at_s = on_one_scale(moment, common_day([noon]))
    assert at_s is not None
    assert shown_time(at_s) == shown


def test_no_times() -> None:
    assert [moment_of(text) for text in ("", "a: b", "2026-13-45 10:00:00", "version 12:34")] == [None] * 4
    assert on_one_scale(Moment(kind="up", seconds=3.0), 0.0) is None


def test_an_error_after_many_plain_lines() -> None:
    log = "step 7 loss 2.5\n" * 30_000 + "Traceback (most recent call last):\nKeyError: 'x'\n"
    assert told({"a.log": log})[0] == "py-exception"


def test_records_of_a_run_are_no_logs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00000.log").write_text("step 1\n")
    (tmp_path / "run.json").write_text(
        '{"system": "Linux-6.18-x86_64-with-glibc2.36", "starts_from": "a checkpoint"}\n'
    )
    for name in ("tokenizer.json", "manifest.json", "launcher.json", "failure.json", "doctor.json"):
        (tmp_path / name).write_text(
            '{"message": "error: rank 1 failed in step 3: OSError: No space left on device"}\n'
        )
    verdict = diagnose([tmp_path])
    assert (verdict.cause, [source.name for source in verdict.evidence.sources]) == (None, ["logs/rank-00000.log"])
