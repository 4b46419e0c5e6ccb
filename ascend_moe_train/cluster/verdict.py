"""Which rank failed first, and how: decided from what the launcher sees of all ranks at one moment. Pure."""

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ascend_moe_train.cluster.board import Failure, Phase, Status

EXIT_STALLED = 124  # as timeout(1) has it
EXIT_USER_ERROR = 2
# A rank that was asked to stop ends with these once its work is saved: 128 + SIGINT or SIGTERM.
EXITS_STOPPED = (130, 143)

STOPPED_S = 5.0  # a batch system may stop a whole job, and us with it, and let all go on within this
SAME_MOMENT_S = 0.3  # what else failed within this may have failed before
SAME_MISTAKE_S = 2.0  # a user's mistake is met by all ranks, each in its own time
DYING_S = 3.0  # what a rank that has given up may take to end
EARLY_END_S = 1.0  # what ranks may differ by in their ends
PAUSE_S = 2.0  # a turn of a loop that takes longer was stopped itself
JOIN_S = 120.0  # what all processes together may take to start


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long a rank may make no progress while others wait for it: the section `parallel.deadlines` of a run."""

    compile_s: float
    step_s: float
    save_s: float

    def of(self, phase: Phase) -> tuple[str, float]:
        """Key and seconds of a phase."""
        if phase in ("starting", "compile"):
            return "compile_s", self.compile_s
        return ("save_s", self.save_s) if phase == "saving" else ("step_s", self.step_s)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank's process ended: with an exit code, or by a signal; with neither if nobody saw it, as what would have
    was `lost_with` it. `at_s` is when."""

    at_s: float
    code: int | None = None
    signal_number: int | None = None
    lost_with: str = "the process that watched over it"

    @property
    def was_lost(self) -> bool:
        """Whether nobody saw it."""
        return self.code is None and self.signal_number is None

    @property
    def exit_code(self) -> int:
        """As a shell reports it; 1 if nobody saw it."""
        if self.signal_number is not None:
            return 128 + self.signal_number
        return 1 if self.code is None else self.code


@dataclass(frozen=True, kw_only=True)
class RankView:
    """What is known of a rank: `idle_s` since it last did anything, `stopped_s` for how long a signal has held it."""

    rank: int
    pid: int | None
    status: Status | None
    idle_s: float
    stopped_s: float | None = None
    stop_signal: int = signal.SIGSTOP
    ending: Ending | None = None

    @property
    def phase(self) -> Phase:
        """Its phase; `starting` before it has said anything."""
        return "starting" if self.status is None else self.status.phase

    @property
    def waits(self) -> bool:
        """Whether it is inside a collective."""
        return self.ending is None and self.status is not None and bool(self.status.verb)

    @property
    def is_finished(self) -> bool:
        """Whether its work is done, or stopped and saved, even if its process is still there."""
        good = self.ending is None or self.ending.code in (0, *EXITS_STOPPED)
        return good and self.phase == "done"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The rank that failed first. `text` follows its name; `settle_s` is how long to wait for what may change this."""

    rank: int
    text: str
    exit_code: int
    settle_s: float = 0.0
    everybody: bool = False  # all ranks say the same, so that naming one would mislead


def judge(views: Sequence[RankView], deadlines: Deadlines, now_s: float, *, stopping: bool) -> Verdict | None:
    """The verdict on the ranks as they are, or None while nothing is wrong. `stopping`: all were asked to stop."""
    return _failed(views, now_s, stopping) or _stopped(views) or _stalled(views, deadlines)


def place(view: RankView) -> str:
    """Where a rank is, in words that follow those of what it does."""
    status = view.status
    if status is None:
        return "while starting"
    words = {
        "starting": "while starting",
        "compile": "while compiling",
        "step": f"in step {status.step}",
        "evaluating": f"in the validation after step {status.step}",
        "saving": f"while saving step {status.step}",
        "done": f"after its last step {status.step}",
    }[status.phase]
    return f"{words}, {collective(status)}" if status.verb else words


def collective(status: Status) -> str:
    """The collective that a rank is in."""
    return f"in {status.verb} over {status.group} (collective {status.sequence})"


def ending_words(ending: Ending) -> str:
    """How a process ended."""
    if ending.signal_number is not None:
        return f"was killed by signal {ending.signal_number} ({_signal_name(ending.signal_number)})"
    if ending.was_lost:
        return f"was lost, with {ending.lost_with},"
    return f"ended with exit code {ending.code}"


def _failed(views: Sequence[RankView], now_s: float, stopping: bool) -> Verdict | None:
    times = {view.rank: at_s for view in views if (at_s := _failed_at_s(view, views, now_s, stopping)) is not None}
    if not times:
        return None
    found = sorted((view for view in views if view.rank in times), key=lambda view: times[view.rank])
    view = _origin(found)
    failure = _failure(view)
    if failure is None:
        assert view.ending is not None
        return _ended(view, view.ending)
    code = EXIT_USER_ERROR if failure.is_user_error else 1
    code = (view.ending.exit_code or code) if view.ending is not None else code
    if not failure.is_user_error:
        words = f"failed {place(view)}: {failure.line}"
        return Verdict(rank=view.rank, text=words, exit_code=code, settle_s=SAME_MOMENT_S)
    everybody = len(found) == len(views) and all((f := _failure(each)) and f.line == failure.line for each in found)
    text = failure.line if everybody else f"{place(view)}: {failure.line}"
    settle_s = 0.0 if everybody else SAME_MISTAKE_S
    return Verdict(rank=view.rank, text=text, exit_code=code, settle_s=settle_s, everybody=everybody)


def _origin(found: Sequence[RankView]) -> RankView:
    """The first of those that failed; or the rank whose error it quotes, as ranks do that wait for another's part."""
    first = found[0]
    line = said.line if (said := _failure(first)) is not None else ""
    for view in found[1:]:
        quoted = _failure(view)
        if quoted is not None and len(quoted.line) < len(line) and line.endswith(f": {quoted.line}"):
            return view
    return first


def _failure(view: RankView) -> Failure | None:
    return view.status.failure if view.status is not None else None


def _ended(view: RankView, ending: Ending) -> Verdict:
    early = ", and not all ranks are done" if ending.code in (0, *EXITS_STOPPED) else ""
    words = f"{ending_words(ending)} {place(view)}{early}"
    return Verdict(rank=view.rank, text=words, exit_code=ending.exit_code or 1, settle_s=SAME_MOMENT_S)


def _failed_at_s(view: RankView, views: Sequence[RankView], now_s: float, stopping: bool) -> float | None:
    """When a rank failed; None if it did not."""
    ending, failure = view.ending, _failure(view)
    if ending is None:
        return failure.at_s if failure is not None and now_s - failure.at_s > DYING_S else None
    if view.is_finished or (stopping and ending.signal_number == signal.SIGTERM):
        return None
    if ending.code in (0, *EXITS_STOPPED) and failure is None:
        # what keeps no slot ends like this, and so do all its ranks
        early = now_s - ending.at_s > EARLY_END_S and any(each.ending is None for each in views)
        return ending.at_s if early and not stopping else None
    # a clock that is not ours, or a slot that somebody wrote, does not make a failure older than it can be
    return min(failure.at_s, ending.at_s) if failure is not None else ending.at_s


def _stopped(views: Sequence[RankView]) -> Verdict | None:
    held = [view for view in views if view.ending is None and view.stopped_s is not None]
    view = max(held, key=lambda each: each.stopped_s or 0.0, default=None)
    if view is None or view.stopped_s is None or view.stopped_s < STOPPED_S:
        return None
    return Verdict(rank=view.rank, text=_stop_words(view), exit_code=EXIT_STALLED)


def _stop_words(view: RankView) -> str:
    name = _signal_name(view.stop_signal)
    return f"was stopped by {name} {place(view)}, and did not go on for {view.stopped_s or 0.0:.0f} s"


def _stalled(views: Sequence[RankView], deadlines: Deadlines) -> Verdict | None:
    alive = [view for view in views if view.ending is None]
    waiting = [view for view in alive if view.waits]
    running = [view for view in alive if not view.waits and not view.is_finished]
    late = [view for view in running if view.idle_s > _allowed_s(view, waiting, running, deadlines)]
    if late:
        return _stall(max(late, key=lambda view: view.idle_s), _others_wait(waiting), deadlines)
    if running or not alive:
        return None
    if waiting:
        quiet_s = min(view.idle_s for view in waiting)
        limit_s = max(deadlines.of(view.phase)[1] for view in waiting)
        return _deadlock(views, waiting, deadlines) if quiet_s > limit_s else None
    view = max(alive, key=lambda view: view.idle_s)
    is_late = view.idle_s > deadlines.of(view.phase)[1]
    return _stall(view, ": its work is done, and its process does not end", deadlines) if is_late else None


def _allowed_s(
    view: RankView,
    waiting: Sequence[RankView],
    running: Sequence[RankView],
    deadlines: Deadlines,
) -> float:
    """How long a rank outside collectives may be idle: as long as it likes if nobody waits for it.

    Two or more ranks of which none waits, and none does anything, all wait for something that we do not see.
    """
    limit_s = deadlines.of(view.phase)[1]
    if view.status is None and view.pid is None:
        return min(limit_s, JOIN_S)
    if view.phase == "starting":
        return limit_s
    if waiting:
        return limit_s if max(each.idle_s for each in waiting) > limit_s else float("inf")
    all_idle = len(running) > 1 and all(each.idle_s > deadlines.of(each.phase)[1] for each in running)
    return limit_s if all_idle else float("inf")


def _others_wait(waiting: Sequence[RankView]) -> str:
    status = waiting[0].status if waiting else None
    return f": {rank_list(waiting)} {_wait(waiting)} {collective(status)}" if status is not None else ""


def _deadlock(views: Sequence[RankView], waiting: Sequence[RankView], deadlines: Deadlines) -> Verdict:
    """Everybody who is not done waits: somebody ended too early, or is in another collective than the others."""
    finished = [view for view in views if view.is_finished or view.ending is not None]
    if finished and finished[0].ending is not None and not finished[0].is_finished:
        return _ended(finished[0], finished[0].ending)
    if finished:
        words = f"was done {place(finished[0])}{_others_wait(waiting)}"
        return Verdict(rank=finished[0].rank, text=words, exit_code=EXIT_STALLED)
    calls = {view.rank: (s.verb, s.group, s.sequence) for view in waiting if (s := view.status) is not None}
    usual = Counter(calls.values()).most_common(1)[0][0]
    odd = [view for view in waiting if calls[view.rank] != usual]
    if not odd:
        last = min(waiting, key=lambda view: view.idle_s)
        return _stall(last, ", to which it came last: no rank gets out of it", deadlines)
    first = min(odd, key=lambda view: calls[view.rank][2])
    return _stall(first, _others_wait([view for view in waiting if calls[view.rank] == usual]), deadlines)


def _stall(view: RankView, reason: str, deadlines: Deadlines) -> Verdict:
    if view.stopped_s is not None:
        return Verdict(rank=view.rank, text=f"{_stop_words(view)}{reason}", exit_code=EXIT_STALLED)
    key, limit_s = deadlines.of(view.phase)
    words = f"made no progress for {view.idle_s:.0f} s {place(view)}{reason} (parallel.deadlines.{key} is {limit_s:g})"
    return Verdict(rank=view.rank, text=words, exit_code=EXIT_STALLED)


def rank_list(views: Sequence[RankView], most: int = 8) -> str:
    """Such as `rank 3` or `ranks 0, 1, 3`."""
    names = [str(view.rank) for view in views[:most]] + (["..."] if len(views) > most else [])
    return f"{'rank' if len(views) == 1 else 'ranks'} {', '.join(names)}"


def _wait(views: Sequence[RankView]) -> str:
    return "waits" if len(views) == 1 else "wait"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else "a signal without a name"
