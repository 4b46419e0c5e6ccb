"""A job on two hosts: what fails is named with its host, all ranks end everywhere, nobody is left."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.cluster.links import agent_words
from ascend_moe_train.cluster.mpiexec import PACKAGE_ROOT
from tests.hosts_stand_in import launch, launch_on_hosts
from tests.stand_in import RANK, Fault, Launched

GUARD = "ascend_moe_train.cluster.guard"


def facts(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "failed.json").read_text()))


def agents(launched: Launched) -> list[int]:
    """Of the first and the second host: an agent is the bootstrap's process, with which its ranks begin."""
    mark = "from ascend_moe_train.cluster.agent import main"
    return sorted(pid for pid, words in launched.seen.items() if mark in words)


def test_ranks_of_two_hosts_are_one_job(tmp_path: Path) -> None:
    with launch(tmp_path, steps=3) as launched:
        assert launched.wait() == 0, launched.errors
    assert launched.output == "step 1\nstep 2\nstep 3\n"
    said = sorted(line for line in launched.errors.splitlines() if line.startswith("[rank "))
    assert said == [f"[rank {rank}] step {step}" for rank in (1, 2, 3) for step in (1, 2, 3)]
    logs = [(tmp_path / "logs" / f"rank-0000{rank}.log").read_text().splitlines() for rank in range(4)]
    assert [lines[1:] for lines in logs] == [["step 1", "step 2", "step 3"]] * 4


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ({"what": "signal", "number": signal.SIGKILL}, 137, r"rank 2 was killed by signal 9 \(SIGKILL\) in step 3$"),
        ({"what": "raise"}, 1, "rank 2 failed in step 3: ValueError: bad value$"),
        pytest.param(
            {"what": "stall"},
            124,
            "rank 2 made no progress for 6 s in step 3: ranks 0, 1, 3 wait in all_reduce over world",
            marks=pytest.mark.slow,
        ),
        pytest.param({"what": "refuse"}, 2, "rank 2 in step 3: disk: No space left on device$", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_is_named_with_its_host(fault: Fault, code: int, message: str, tmp_path: Path) -> None:
    with launch(tmp_path, {"rank": 2, **fault}) as launched:
        launched.wait_for_step(2)
        assert len(launched.pids(RANK)) == len(launched.pids(GUARD)) == 4
        assert (launched.wait(), launched.left()) == (code, {}), launched.errors
    first = next(line for line in launched.errors.splitlines() if not line.startswith("[rank "))
    assert re.match(f"error: {message}", first), launched.errors
    assert facts(tmp_path) == {"rank": 2, "host": "host3", "lost": []}


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "its connection ended"),
        pytest.param(signal.SIGSTOP, "nothing was heard of it for 8 s", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_is_lost_is_named(number: int, why: str, tmp_path: Path) -> None:
    with launch(tmp_path) as launched:
        launched.wait_for_step(2)
        os.kill(agents(launched)[1], number)
        assert launched.wait() == 1, launched.errors
        assert launched.left() == {}
    assert f"was lost, with host host3 ({why}), " in launched.errors
    assert facts(tmp_path) == {"rank": 2, "host": "host3", "lost": ["host3"]}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stop_reaches_all_hosts(number: int, tmp_path: Path) -> None:
    with launch(tmp_path) as launched:
        launched.wait_for_step(2)
        launched.process.send_signal(number)
        assert (launched.wait(), launched.left()) == (128 + number, {})
    assert "error" not in launched.errors


def test_nobody_outlives_the_launcher(tmp_path: Path) -> None:
    with launch(tmp_path) as launched:
        launched.wait_for_step(2)
        launched.process.kill()
        assert launched.left() == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.0.0"}, "has ascend-moe-train .*, the launcher 0.0.0: all hosts need the same"),
        ({"folder": "/nowhere"}, "/nowhere: No such file or directory: all hosts need the launcher's working folder"),
    ],
)
def test_a_host_that_cannot_take_part_says_why(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    with launch_on_hosts(tmp_path, RANK, "[]", changes=changes) as launched:
        assert launched.wait() == 2
    # the launcher does not wait for what others may have to say
    assert re.fullmatch(f"(error: host host[23]: {message}\n)+", launched.errors)
    assert not (tmp_path / "failed.json").exists()


@pytest.mark.parametrize(
    "said", [b"", b"\x00\x00\x00\x02{}", b"\xff\xff\xff\xff", b"\x00\x00\x00\x0f" + b'{"kind":"beat"}']
)
def test_an_agent_without_a_task_starts_nothing(said: bytes, tmp_path: Path) -> None:
    given = f"{PACKAGE_ROOT}\n".encode() + said
    done = subprocess.run(agent_words(), input=given, capture_output=True, check=False, timeout=60, cwd=tmp_path)
    assert done.returncode == 125 and done.stderr == b""
    assert list(tmp_path.iterdir()) == []


def test_the_words_of_an_agent_are_always_the_same() -> None:
    assert agent_words()[:3] == [sys.executable, "-P", "-c"]
    assert len(agent_words()) == 4 and agent_words() == agent_words()
