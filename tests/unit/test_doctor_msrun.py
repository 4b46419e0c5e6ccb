"""What msrun, its scheduler and its workers tell together of a rank without a word; logs that repeat others; clocks."""

import pytest

from tests.doctored import told, verdict_on

MSRUN = (
    "[ERROR] ME(10:1,MainProcess):2026-03-01-10:00:09.100.000 [_api.py:1] Worker process {pid} exit with exception. "
)
WAITS = (
    "[ERROR] DISTRIBUTED(21,7f,python):2026-03-01-10:00:08.1.1 [x.cc:1] RunRingAllReduce] Ring AllGather wait {what}.\n"
)
ALIVE = "[WARNING] DISTRIBUTED(20,7f,python):2026-03-01-10:00:05.1.1 x] Cluster currently has 2 alive nodes.\n"
MISSED = (
    "[ERROR] DISTRIBUTED(20,7f,python):2026-03-01-10:00:08.1.1 [x.cc:1] UpdateTopoState] The node: 1 is timed out. x\n"
)
LEFT = (
    "[WARNING] DISTRIBUTED(20,7f,python):2026-03-01-10:00:04.1.1 [x.cc:1] ProcessUnregister] Node 1 has unregistered.\n"
)


def node(rank: int) -> str:
    return (
        f"[WARNING] DISTRIBUTED({21 + 2 * rank},7f,python):2026-03-01-10:00:01.1.1 [x.cc:1] PostProcess] "
        f"This node {rank} rank id: {rank}\n"
    )


def job(scheduler: str, *, repeats: bool = False) -> dict[str, str | bytes]:
    """Rank 0 gave up waiting, and its end was the first that msrun saw."""
    worker = node(0) + WAITS.format(what="receiving [1,11] failed")
    printed = worker + node(1) if repeats else ""
    return {
        "worker_0.log": worker,
        "worker_1.log": node(1) + "step 5\n",
        "scheduler.log": ALIVE + scheduler,
        "msrun.log": printed + MSRUN.format(pid=21) + "Error code: 1.\n",
    }


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize(
    ("scheduler", "cause"),
    [(MISSED, "frozen"), (LEFT, "uneven-steps"), (ALIVE, "slow-rank"), (LEFT + MISSED, "uneven-steps")],
)
def test_a_rank_without_a_word(scheduler: str, cause: str, repeats: bool) -> None:
    assert told(job(scheduler, repeats=repeats)) == (cause, [1])


def test_a_worker_that_ends_itself_was_not_killed() -> None:
    files = job(MISSED) | {
        "worker_0.log": node(0) + "[WARNING] DISTRIBUTED(21,7f,python):x operator()] Kill this process with SIGTERM.\n",
        "msrun.log": MSRUN.format(pid=21) + "Error code: -15.\n",
    }
    assert told(files) == ("frozen", [1])
    files["worker_0.log"] = node(0)
    assert told(files) == ("killed", [0])


def test_a_rank_that_was_seen_to_end_was_not_slow() -> None:
    files = job(ALIVE) | {"msrun.log": MSRUN.format(pid=23) + "Error code: -9.\n"}
    assert told(files) == ("killed", [1])


def test_a_launcher_s_output_alone_tells_ranks() -> None:
    printed = node(0) + node(1)
    said = "[ERROR] DISTRIBUTED(21,7f,python):2026-03-01-10:00:08.1.1 x] Memcpy error, errorno(34), dest size is 32, "
    files: dict[str, str | bytes] = {"msrun.log": f"{printed}{said}src size is 48\n"}
    assert told(files) == ("ring-sender", [1])


def test_what_a_launcher_repeats_is_the_rank_s() -> None:
    error = "OSError: [Errno 98] Address already in use\n"
    files: dict[str, str | bytes] = {"launcher.log": f"error: rank 1 failed in step 3: {error}  rank   pid\n"}
    assert told(files) == ("address-in-use", [1])
    assert told({"launcher.log": f"said: {error}", "rank-00001.log": f"of {error}"}) == ("address-in-use", [1])


def losses(nan_from: int) -> str:
    return "".join(f"step {step}, loss: {'nan' if step >= nan_from else 3.1}\n" for step in range(1, 9))


def test_the_rank_whose_loss_was_lost_first() -> None:
    files: dict[str, str | bytes] = {"worker_0.log": losses(6), "worker_1.log": losses(5), "msrun.log": losses(4)}
    verdict = verdict_on(files)
    assert verdict.cause is not None
    assert (verdict.cause.rule.id, verdict.cause.ranks) == ("nan-began", (1,))
    assert str(verdict.cause.events[0].place) == "worker_1.log:5"
    assert told({"worker_0.log": losses(5), "worker_1.log": losses(5)}) == ("nan-began", [])


def stamped(minute: int) -> str:
    return "".join(f"2026-03-01 10:{minute:02d}:{step:02d} step {step}\n" for step in range(1, 9))


def test_a_clock_that_is_far_ahead() -> None:
    files: dict[str, str | bytes] = {"worker_0.log": stamped(0), "worker_1.log": stamped(12)}
    verdict = verdict_on(files)
    assert verdict.cause is not None
    assert (verdict.cause.rule.id, verdict.cause.ranks, verdict.confidence) == ("clocks-differ", (1,), "low")
    assert verdict.cause.filled(verdict.cause.rule.words("en").means).startswith(
        "the clock of rank 1 is 720 s ahead of"
    )
    files["worker_0.log"] = stamped(0) + "OSError: [Errno 28] No space left on device\n"
    assert told(files) == ("disk-full", [0])
    assert told({"worker_0.log": stamped(0), "worker_1.log": stamped(0)}) == ("", [])
