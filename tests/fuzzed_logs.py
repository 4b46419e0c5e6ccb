"""Logs of real and made-up failures, damaged in every way that we could think of, as files that a folder holds.

`python -m tests.fuzzed_logs FIRST COUNT [FOLDER_OF_CASES]` puts so many through the doctor.
"""

import bz2
import gzip
import io
import json
import random
import re
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ascend_moe_train.doctor.diagnose import diagnose
from ascend_moe_train.doctor.page import page
from ascend_moe_train.doctor.rule import LANGS, rule_book
from ascend_moe_train.doctor.words import as_json, verdict_lines
from ascend_moe_train.errors import UserError
from scripts.doctor_case import cases
from tests.healthy import healthy_log

Draw = random.Random
Damage = Callable[[Draw, bytes], bytes]
Files = dict[str, bytes]

MOST_DAMAGES = 3
HUGE_BYTES = 300_000
NAMES = (
    "worker_0.log",
    "worker_1.log",
    "rank_3/x.log",
    "scheduler.log",
    "msrun.log",
    "dmesg",
    "plog/plog-7_1.log",
    "device-2/device-9.log",
    "node-1/rank-00002.log",
    "metrics.jsonl",
    "run/metrics.jsonl",
    "npu-smi.txt",
    "log\n\x1b[31m\u202e.log",
    "日志 0.log.1",
)
BITS = (
    b"rank[",
    b"SeqNum=",
    b"\xff\xfe",
    b"\0",
    b"{who}",
    b"{step}{means}",
    b"-9",
    b"loss: nan",
    b"9" * 40,
    b"\x1b[2J\x1b[31m",
    b"\r",
    b"\xe2\x80\xae",
    b"--- start 20990101T000000-1\n",
    b"Traceback (most recent call last):\n",
    b"step: 99999999999999999999 loss: 1e999\n",
    b'{"kind":"step","step":-1,"loss":null}\n{"kind":"step","step":3,"loss":1e400,"load_cv":[[]]}\n',
)
TIMES = (b"2026-13-45-99:99:99.999.999", b"0000-00-00-00:00:00", b"2099-12-31-23:59:60.000.001", b"Feb 31 24:61:61")
RANKS = (b"-1", b"99999999", b"18446744073709551616", b"4294967295", b"007", b"")


def cut(draw: Draw, text: bytes) -> bytes:
    """Its beginning or its end."""
    at = draw.randrange(len(text) + 1)
    return text[:at] if draw.random() < 0.5 else text[at:]


def noise(draw: Draw, text: bytes) -> bytes:
    """Bytes that mean nothing, somewhere."""
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.randbytes(draw.randrange(200)) + text[at:]


def changed_bytes(draw: Draw, text: bytes) -> bytes:
    """Some bytes are others."""
    found = bytearray(text)
    for _ in range(len(found) // 50 + 1):
        if found:
            found[draw.randrange(len(found))] = draw.randrange(256)
    return bytes(found)


def bits(draw: Draw, text: bytes) -> bytes:
    """Texts that mean something, where they do not belong."""
    for _ in range(draw.randint(1, 5)):
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice(BITS) + text[at:]
    return text


def wrong_times(draw: Draw, text: bytes) -> bytes:
    """Times that no clock shows."""
    return re.sub(rb"20\d\d-\d\d-\d\d[- T]\d\d:\d\d:\d\d", lambda found: draw.choice(TIMES), text)


def wrong_ranks(draw: Draw, text: bytes) -> bytes:
    """Ranks that no job has."""
    return re.sub(rb"(?i)(rank[^0-9\n]{0,4})\d+", lambda found: found[1] + draw.choice(RANKS), text)


def wrong_numbers(draw: Draw, text: bytes) -> bytes:
    """Digits that are others."""
    return re.sub(rb"\d", lambda found: str(draw.randrange(10)).encode(), text)


def mixed_lines(draw: Draw, text: bytes) -> bytes:
    """Lines in another order, some missing, some twice."""
    lines = text.split(b"\n")
    return b"\n".join(draw.choices(lines, k=len(lines)))


def one_line(draw: Draw, text: bytes) -> bytes:
    """A line without an end, many times over."""
    flat = text.replace(b"\n", b" ") or b"x"
    return flat * (draw.randrange(HUGE_BYTES) // len(flat) + 1)


def colours(draw: Draw, text: bytes) -> bytes:
    """What steers a terminal, between words."""
    return re.sub(rb" ", lambda found: b" " if draw.random() < 0.7 else b" \x1b[1;31m", text)


def other_ends(draw: Draw, text: bytes) -> bytes:
    """Ends of lines as elsewhere."""
    return text.replace(b"\n", draw.choice((b"\r\n", b"\r", b"\0", b"\n\n", b"\x0b", b"\xe2\x80\xa8")))


def other_letters(draw: Draw, text: bytes) -> bytes:
    """Another encoding, of all or of a part."""
    name = draw.choice(("utf-16", "utf-16-le", "utf-32", "gb18030", "utf-8-sig", "utf-7", "cp037"))
    found = text.decode(errors="replace").encode(name, errors="replace")
    return found if draw.random() < 0.7 else text[: len(text) // 2] + found[len(found) // 2 :]


def prefixed(draw: Draw, text: bytes) -> bytes:
    """Who says a line stands before it."""
    forms = ("[rank{}]: ", "{}: ", "[1,{}]<stdout>: ", "worker_{}.log: ", "node-1/rank{}: ", "[default{}]:")
    form = draw.choice(forms)
    return b"\n".join(form.format(draw.randrange(9)).encode() + line for line in text.split(b"\n"))


DAMAGES: tuple[Damage, ...] = (
    cut,
    noise,
    changed_bytes,
    bits,
    wrong_times,
    wrong_ranks,
    wrong_numbers,
    mixed_lines,
    one_line,
    colours,
    other_ends,
    other_letters,
    prefixed,
)


def own_texts() -> list[bytes]:
    """Lines of the rules' own cases."""
    return [f"{case}\n".encode() for rule in rule_book().rules.values() for case in rule.cases]


def texts_of(folder: Path) -> list[bytes]:
    """Logs of cases (scripts/doctor_case.py)."""
    return [text.encode() for case in cases(folder) for _, text in case.files]


def fuzzed(draw: Draw, texts: Sequence[bytes]) -> Files:
    """Some damaged logs under names, some of them packed."""
    found: Files = {}
    for _ in range(draw.randint(1, 4)):
        parts = draw.choices(texts, k=draw.randint(1, 6))
        if draw.random() < 0.2:
            parts.append(healthy_log(draw.randrange(10**6)).encode())
        if draw.random() < 0.05:
            parts = [draw.randbytes(draw.randrange(5000))]
        text = b"".join(parts)
        for damage in draw.sample(DAMAGES, draw.randint(0, MOST_DAMAGES)):
            text = damage(draw, text)
        found[draw.choice(NAMES)] = text
    return _packed(draw, found)


def _packed(draw: Draw, files: Files) -> Files:
    """As they are, or packed, once or more often, whole or damaged."""
    kind = draw.randrange(6)
    if kind == 0:
        return {f"{name}.gz": _maybe_cut(draw, gzip.compress(text, 1)) for name, text in files.items()}
    if kind == 1:
        inner = {f"{name}.gz": gzip.compress(text, 1) for name, text in files.items()}
        ending, pack = draw.choice(((".tar", bytes), (".tar.gz", gzip.compress), (".tar.bz2", bz2.compress)))
        whole = tar({**files, **inner, "inner.tar": tar(files)})
        return {f"logs{ending}": _maybe_cut(draw, pack(whole))}
    if kind == 2:  # a name that promises something else
        return {f"{name}{draw.choice(('.gz', '.tar', '.tgz', '.tar.xz'))}": text for name, text in files.items()}
    return files


def _maybe_cut(draw: Draw, packed: bytes) -> bytes:
    chance = draw.random()
    return packed if chance < 0.5 else cut(draw, packed) if chance < 0.75 else changed_bytes(draw, packed)


def tar(files: Mapping[str, bytes]) -> bytes:
    """An archive that is not packed."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return whole.getvalue()


def judged(files: Mapping[str, bytes]) -> str:
    """The doctor's verdict on files, in all of its forms; the id of the cause, or why it refused. AssertionError: a
    form that is not well made."""
    with tempfile.TemporaryDirectory() as name:
        paths = []
        for inner, text in files.items():
            path = Path(name) / inner
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
            paths.append(path)
        try:
            verdict = diagnose(paths if any(path.name.find(".t") >= 0 for path in paths) else [Path(name)])
        except UserError as error:
            assert "\n" not in str(error)
            return "refused"
    book = rule_book()
    for lang in LANGS:
        assert len(verdict_lines(verdict, book, lang, with_all=True)) >= 2
        assert "</html>" in page(verdict, book, lang)
    assert json.loads(json.dumps(as_json(verdict, book), allow_nan=False))["confidence"] in ("high", "medium", "low")
    shown = "\n".join(verdict_lines(verdict, book))
    assert "\x1b" not in shown and "\r" not in shown and "\0" not in shown
    return "nothing" if verdict.cause is None else verdict.cause.rule.id


def main(arguments: Sequence[str]) -> int:
    """Says how many there were, and prints what went wrong."""
    first, count = int(arguments[0]), int(arguments[1])
    texts = [*own_texts(), *(texts_of(Path(arguments[2])) if len(arguments) > 2 else [])]
    outcomes: dict[str, int] = {}
    num_bad, longest_s = 0, 0.0
    for seed in range(first, first + count):
        files = fuzzed(random.Random(seed), texts)
        since_s = time.process_time()
        try:
            outcome = judged(files)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        except Exception:
            num_bad += 1
            print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
        longest_s = max(longest_s, time.process_time() - since_s)
    refused, nothing = outcomes.get("refused", 0), outcomes.get("nothing", 0)
    print(
        f"{count} folders, {num_bad} with a trace, {refused} refused, {nothing} without a fault, {len(outcomes) - 2} "
        f"causes named, {longest_s:.1f} s of processor time at the most"
    )
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
