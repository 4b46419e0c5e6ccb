"""A preflight of the hosts of a lab."""

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

from ascend_moe_train.cluster.hostfile import parse_hostfile
from ascend_moe_train.cluster.preflight.model import Job
from ascend_moe_train.cluster.preflight.run import Verdict, ask_all, judge_all
from ascend_moe_train.cluster.preflight.self_report import code_digest
from tests.lab import Lab
from tests.lab_faults import RUN_FILE, RUN_TEXT, Fault, injected, mend


def report() -> dict[str, Any]:
    """Of the Python of a good host: versions that are documented to go together, and this code."""
    versions = {
        "python": "3.11.7",
        "mindspore": "2.10.0",
        "cann": "8.2.RC1",
        "driver": "25.0.rc1.1",
        "firmware": "7.7.0.1.231",
    }
    fits = [
        {"pair": pair, "verdict": "ok", "found": "", "expected": "", "remedy": "install a newer driver"}
        for pair in ("firmware for driver", "driver for firmware", "CANN with driver")
    ]
    return {
        "versions": {part: {"version": version} for part, version in versions.items()},
        "checks": fits,
        "package": "0.1.0",
        "code": code_digest(),
    }


def preflight(lab: Lab, **job: Any) -> Verdict:
    """Of all hosts, by the test's thread on their switch; `job` adds to what is demanded of them."""
    asked = Job(
        hosts=parse_hostfile(lab.hostfile().encode(), "hosts"),
        python="amt-python",
        master_port=8118,
        code=code_digest(),
        files={RUN_FILE: hashlib.sha256(RUN_TEXT.encode()).hexdigest()},
        folder="/mnt/run/checkpoints",
        need_bytes=16_000_000,
        write_bytes=2**20,
        least_bytes_per_s=1.0,
        **job,
    )
    with lab.switch.entered():
        return judge_all(asyncio.run(ask_all(asked)))


@contextlib.contextmanager
def with_fault(lab: Lab, fault: Fault) -> Iterator[None]:
    """The fault in its host, then all good again: that host, and the one before it, whose NPUs talk to its own."""
    try:
        with injected(fault, lab):
            yield
    finally:
        for host in lab.hosts[max(0, fault.at - 2) : fault.at]:
            mend(lab, host, report())
