"""How fast the doctor reads: logs of 64 ranks, made up, of as many bytes as asked for.

`python -m benchmarks.doctor [MEGABYTES]` writes benchmarks/doctor.md.
"""

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from ascend_moe_train.doctor.diagnose import diagnose

PAGE = Path(__file__).with_suffix(".md")
RANKS = 64
INFO = "[INFO] HCCL({pid},python):2026-03-01-10:{m:02d}:{s:02d}.100.200 [op_base.cc:8] [{pid}]op tag[Sum_{n}] done\n"
STEP = (
    "2026-03-01 10:{m:02d}:{s:02d},100 - INFO - step:[{n:6}/ 90000], loss: 2.5{n}, per_step_time: 812ms, lr: 1.0e-4\n"
)
WARNING = "[WARNING] DISTRIBUTED({pid},7f,p):2026-03-01-10:{m:02d}:{s:02d}.1.2 Topology build timed out., retry({n})\n"
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 7\nValueError: sample 17 has no label\n'
WAIT = "[ERROR] HCCL({pid},python):2026-03-01-10:59:59.1.2 [x] The wait execution of the Notify register times out\n"


def write_logs(folder: Path, num_bytes: int) -> int:
    """A log for each rank: mostly lines that say nothing, some of steps and warnings, a failure at the end."""
    written = 0
    for rank in range(RANKS):
        pid = 1000 + rank
        lines = []
        for n in range(2000):
            m, s = divmod(n, 60)
            line = STEP if n % 20 == 0 else WARNING if n % 50 == 1 else INFO
            lines.append(line.format(pid=pid, m=m, s=s, n=n))
        block = "".join(lines).encode()
        end = TRACE if rank == 17 else WAIT.format(pid=pid)
        with (folder / f"rank_{rank}.log").open("wb") as file:
            for _ in range(max(1, num_bytes // RANKS // len(block))):
                file.write(block)
            file.write(end.encode())
            written += file.tell()
    return written


def main(megabytes: int) -> None:
    """Measures and writes the page."""
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = write_logs(Path(folder), megabytes * 10**6)
        start_s, start_cpu_s = time.monotonic(), _cpu_s()
        verdict = diagnose([Path(folder)])
        took_s, cpu_s = time.monotonic() - start_s, _cpu_s() - start_cpu_s
    assert verdict.cause is not None
    own, children = (
        resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    text = (
        "# Speed of `amt doctor`\n\n"
        f"`python -m benchmarks.doctor {megabytes}`, on {os.cpu_count()} cores that other jobs may use too.\n\n"
        "| logs | lines | time | processor time | peak memory of one process | named |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        f"| {num_bytes / 1e6:,.0f} MB of {RANKS} ranks | {sum(s.num_lines for s in verdict.evidence.sources):,} "
        f"| {took_s:.1f} s | {cpu_s:.1f} s | {max(own, children) / 1e6:.0f} MB "
        f"| {verdict.cause.who_words}: {verdict.cause.rule.id} |\n"
    )
    PAGE.write_text(text, encoding="utf-8")
    print(text)


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
