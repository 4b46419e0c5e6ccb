"""Whether the doctor's time is linear in what it reads: logs made to be slow, of doubling sizes.

`python -m benchmarks.doctor_hostile` writes benchmarks/doctor_hostile.md.
"""

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ascend_moe_train.doctor.diagnose import diagnose
from ascend_moe_train.doctor.rule import rule_book
from ascend_moe_train.doctor.words import verdict_lines

PAGE = Path(__file__).with_suffix(".md")
SIZES_BYTES = tuple(2**18 * times for times in (1, 2, 4, 8))
# What is repeated until the size is reached; without an end of a line it is a single line.
PATTERNS: Mapping[str, bytes] = MappingProxyType(
    {
        "one line of half a pattern": b"[ERROR] remote rank:[",
        "lines of half a pattern": b"[ERROR] HCCL(1,p): remote rank:[1], remote rank:[\n",
        "one line of dotted names": b"a.b_",
        "lines of dotted names": b"a." * 300 + b"Error\n",
        "one line of losses": b"loss 2.5 step 1 ",
        "lines of losses": b"step: 1 loss: 2.5 lm loss: 1e5 grad norm: 1 lr: 1e-4 loss scale: 1.0\n",
        "one line of digits": b"1234567890",
        "lines of times": b"2026-13-45-99:99:99.1.2 2026-03-01-10:00:00.1.2 Feb 31 24:61:61\n",
        "warnings and what continues them": b"[WARNING] ME(1:2,M):\nlibx.so: cannot open shared object file\n",
        "exceptions without times": b"KeyError: 'x'\n",
        "errors after errors": b"error: error: error: error of error: x\n",
        "paths": b"/a" * 200 + b" No space left on device\n",
        "brackets": b"[[[[((((",
        "escapes": b"\x1b[31m\x1b[",
        "starts of runs": b"--- start 20260301T000000-1\nKeyError: 'x'\n",
        "ranks": b"[rank7]: remote rank:[9] local rank:[8], tag[AllReduce_1]\n",
        "empty lines": b"\n",
        "zero bytes": b"x\0",
        "words of general rules": b"[ERROR] x: out of memory no space left link down is invalid timed out nan\n",
    }
)


def took_s(pattern: bytes, num_bytes: int) -> float:
    """Processor time for a log of one pattern, read, judged and told."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rank_0.log").write_bytes(pattern * (num_bytes // len(pattern)))
        since_s = time.process_time()
        verdict_lines(diagnose([Path(folder)]), rule_book(), with_all=True)
        return time.process_time() - since_s


def main() -> None:
    """Measures and writes the page."""
    took_s(b"x\n", 1000)  # rules are compiled once
    heads = [f"{size // 2**10} KiB" for size in SIZES_BYTES]
    lines = [
        "# Time of `amt doctor` on hostile logs",
        "",
        f"`python -m benchmarks.doctor_hostile`, on {os.cpu_count()} cores that other jobs may use too. Processor time",
        "in seconds for logs of one pattern. The last column is the time of the largest log by that of the second",
        "largest: 2 where time is linear, 4 where it is quadratic, less where most of a log is passed over.",
        "",
        f"| log | {' | '.join(heads)} | growth |",
        "| --- |" + " --- |" * (len(heads) + 1),
    ]
    for name, pattern in PATTERNS.items():
        times = [took_s(pattern, size) for size in SIZES_BYTES]
        lines.append(f"| {name} | {' | '.join(f'{each:.2f}' for each in times)} | {times[-1] / times[-2]:.1f} |")
    text = "\n".join([*lines, ""])
    PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
