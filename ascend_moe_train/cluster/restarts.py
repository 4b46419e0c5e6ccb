"""A job that is started again when it fails, from its newest checkpoint, with pauses in between. Pure."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ascend_moe_train.cluster.evidence import Failed, keep_evidence
from ascend_moe_train.cluster.output import Screen
from ascend_moe_train.cluster.supervise import TICK_S, Outcome, stop_signals
from ascend_moe_train.cluster.verdict import EXIT_USER_ERROR


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often in a row a job is started again without a new checkpoint, and the pauses before that: the first, twice
    as long each time, at most the longest. The section `parallel.restarts` of a run."""

    at_most: int
    pause_s: float
    longest_pause_s: float

    def pause_before(self, number: int) -> float:
        """Seconds before the restart of this number, from 1."""
        return float(min(self.longest_pause_s, self.pause_s * 2.0 ** min(number - 1, 60)))


class Started(Protocol):
    """One start of a job."""

    @property
    def run_id(self) -> str:
        """Its name in the logs."""

    @property
    def log_folder(self) -> Path | None:
        """Where its logs are."""

    def run(self, screen: Screen) -> Outcome:
        """To its end."""


def run_with_restarts(
    start: Callable[[Failed | None, Callable[[str], None]], Started],
    screen: Screen,
    restarts: Restarts,
    checkpoint_step: Callable[[], int | None],
    doctored: Callable[[Started, str], str | None] = lambda started, message: None,
) -> Outcome:
    """Runs what `start` makes (told of the failure before, if any, and how to remark on it) until it ends well, or as
    asked, or by a user's mistake, or has failed once too often. Evidence of each failure is kept beside its logs.

    `checkpoint_step` is the step of the newest checkpoint, None without one: a restart counts until there is a newer.
    `doctored` is told of a start that failed, with its message, and says what more there is to say.
    Raises as `start` and `run` do.
    """
    failed: Failed | None = None
    known, count = checkpoint_step(), 0
    while True:
        started = start(failed, lambda line: _say(screen, line))
        outcome = started.run(screen)
        failed = outcome.failed
        if failed is None:
            return outcome
        step = checkpoint_step()
        lines = [outcome.message, _kept(started, failed, step), doctored(started, outcome.message or "")]
        outcome = replace(outcome, message="\n".join(filter(None, lines)))
        if failed.exit_code == EXIT_USER_ERROR or restarts.at_most == 0:
            return outcome
        if step is not None and step > (-1 if known is None else known):
            known, count = step, 0
        if count >= restarts.at_most:
            words = f"given up after {_times(count)} in a row without a new checkpoint (parallel.restarts.at_most)"
            return replace(outcome, message=f"{outcome.message}\n{words}")
        count += 1
        pause_s = restarts.pause_before(count)
        whence = "the beginning" if step is None else f"the checkpoint of step {step}"
        _say(
            screen, f"{outcome.message}\nrestart {count} of at most {restarts.at_most} in {pause_s:g} s, from {whence}"
        )
        if (number := _pause(pause_s)) is not None:
            return Outcome(exit_code=128 + number)


def _kept(started: Started, failed: Failed, step: int | None) -> str | None:
    """What there is to say of the evidence."""
    if started.log_folder is None or failed.exit_code == EXIT_USER_ERROR:
        return None
    try:
        folder = keep_evidence(started.log_folder, failed, run_id=started.run_id, checkpoint_step=step)
    except OSError as error:
        return f"{started.log_folder}: no evidence of the failure is kept: {error.strerror}"
    return f"evidence: {folder}"


def _say(screen: Screen, text: str) -> None:
    for line in text.splitlines():
        screen.line(0, line, is_error=True)


def _times(count: int) -> str:
    return "1 restart" if count == 1 else f"{count} restarts"


def _pause(seconds: float) -> int | None:
    """Waits; the signal that asked for a stop meanwhile."""
    until_s = time.monotonic() + seconds
    with stop_signals() as found:
        while time.monotonic() < until_s and not found:
            time.sleep(min(TICK_S, max(0.0, until_s - time.monotonic())))
    return found[0] if found else None
