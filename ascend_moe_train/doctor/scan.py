"""One source of logs, line by line, to the events in it. Pure."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from ascend_moe_train.cluster.output import unsteered
from ascend_moe_train.doctor.clock import Moment, moment_of
from ascend_moe_train.doctor.event import Actor, Event, Place, Scanned
from ascend_moe_train.doctor.matcher import Match, Matcher
from ascend_moe_train.doctor.prefix import split
from ascend_moe_train.doctor.reading import text_of
from ascend_moe_train.doctor.rule import Rule
from ascend_moe_train.doctor.wording import complains, complaint, is_general, warns

MAX_LINE_BYTES = 8192  # what is looked at of a line
MAX_QUOTED = 600
MAX_EVENTS = 60  # of one rule in one source, and the last one
MAX_FACTS = 2000
MAX_PLAIN = 20_000  # lines of one source that only hold figures, or nothing, and are looked at
EDGE_BYTES = 65_536
LOOK_BACK_BYTES = 8192
NEW_START = "f-start"
WARNING = "WARNING"
MAX_CONTINUED = 3  # lines of one message

# General words count in lines that complain, in warnings where something else is wrong, and in what is short enough to
# be somebody's own words.
MAX_OWN_WORDS = 20

_STEP = re.compile(r"(?i)\b(?:global[_ ]?step|step|iteration|iter)\b\W{0,6}(\d{1,9})")
_FIELD = re.compile(  # of lower case; the first letters alone pass most places by
    r"(?=[acegilnps])(?<![^\W_])(lm loss|load_balancing_loss|aux[_ ]loss|loss[_ ]scale|loss|grad[_ ]norm|global[_ ]norm"
    r"|learning rate|lr|per_step_time|elapsed time per iteration \(ms\)|step|iteration"
    r"|number of skipped iterations|number of nan iterations"
    r"|param[_ ]?hash|checksum)\b\W{1,16}([-+]?(?:\d[\d.]{0,30}(?:e[-+]?\d{1,4})?|nan|inf))"
)
_OWN_MESSAGE = re.compile(
    rb"[A-Z][A-Z0-9]\d{4}: |ERR\d{5}|(?:\w{1,60}\.){0,8}\w{1,60}(?:Error|Exception|Interrupt)\b|Traceback"
)
_NAMES = {
    "lm loss": "loss",
    "load_balancing_loss": "aux_loss",
    "aux loss": "aux_loss",
    "loss scale": "loss_scale",
    "grad norm": "grad_norm",
    "global_norm": "grad_norm",
    "global norm": "grad_norm",
    "learning rate": "lr",
    "per_step_time": "step_ms",
    "elapsed time per iteration (ms)": "step_ms",
    "iteration": "step",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nans",
}


def scan(name: str, actor: Actor, blocks: Iterable[bytes], matcher: Matcher) -> Scanned:
    """The events of a source whose name says that `actor` wrote it."""
    scanner = _Scanner(name, actor, matcher)
    for block in blocks:
        scanner.take(block)
    return scanner.finished()


class _Line(NamedTuple):
    """A line that rules match: where it begins in its block, and what `split` made of it."""

    start: int
    number: int
    whole: str
    actor: Actor
    level: str
    text: str


class _Scanner:
    def __init__(self, name: str, actor: Actor, matcher: Matcher) -> None:
        self.found = Scanned(name=name, actor=actor)
        self._actor, self._matcher = actor, matcher
        self._num_plain = 0
        self._last_events: dict[str, Event] = {}
        self._late: dict[str, tuple[_Line, Match]] = {}  # of rules with many events, the last in this block
        self._tail = b""
        self._doubtful: list[Event] = []
        self._searched = 0  # up to where in the block times have been looked for
        self._timed: tuple[int, Moment] | None = None  # where that was when the last was found, and which
        self._warnings: list[Event] = []

    def take(self, block: bytes) -> None:
        """Whole lines."""
        found, matcher = self.found, self._matcher
        self._searched, self._timed = 0, None
        if found.num_lines == 0:
            found.first = _first_moment(block[:EDGE_BYTES].split(b"\n"))
        at, counted, line = 0, 0, found.num_lines
        while (hit := matcher.anything.search(block, at)) is not None:
            start = block.rfind(b"\n", 0, hit.start()) + 1
            end = block.find(b"\n", hit.end())
            end = len(block) if end < 0 else end
            line += block.count(b"\n", counted, start)
            counted, at = start, end + 1
            self._look(block, start, end, line + 1)
            if at >= len(block):
                break
        self._take_late(block)
        found.num_lines += block.count(b"\n")
        found.num_bytes += len(block)
        self._tail = (self._tail + block[-EDGE_BYTES:])[-EDGE_BYTES:]

    def finished(self) -> Scanned:
        """All that was found, in the order of lines."""
        found = self.found
        self._read_tail()
        if found.num_lines <= MAX_OWN_WORDS and not found.steps:  # steps are a log's, not somebody's own words
            for event in self._doubtful:
                self._keep(event)
        if any(event.rule.role not in ("fact", "benign") for event in found.events):
            for event in self._warnings:
                self._keep(event)
        kept = {(event.rule.id, event.place.line) for event in found.events}
        last = [each for each in self._last_events.values() if (each.rule.id, each.place.line) not in kept]
        found.events = sorted([*found.events, *last], key=lambda event: event.place.line)
        return found

    def _read_tail(self) -> None:
        """What the end of a source tells: its last line and time, and the last steps."""
        found = self.found
        lines = [text_of(raw[:MAX_LINE_BYTES]) for raw in self._tail.split(b"\n") if raw.strip()]
        found.is_cut = bool(self._tail) and not self._tail.endswith(b"\n")
        found.last = _first_moment([line.encode("utf-8", "replace") for line in reversed(lines)])
        found.last_text = unsteered(lines[-1])[:MAX_QUOTED] if lines else ""
        for text in lines:
            if (step := _STEP.search(text[:MAX_QUOTED])) is not None:
                found.steps.append((int(step[1]), moment_of(text)))

    def _look(self, block: bytes, start: int, end: int, number: int) -> None:
        """At a line with a known text, an error or a loss. One without the first two holds figures at most, and is
        looked at only as long as there were few."""
        raw = block[start : min(end, start + MAX_LINE_BYTES)]
        if self._num_plain >= MAX_PLAIN and not self._matcher.is_serious(raw):
            return
        whole = unsteered(text_of(raw)).strip()
        if "loss" in (lower := whole.lower()):
            self._losses(lower, number)
        if not self._matcher.is_serious(whole.encode("utf-8", "replace")):
            self._num_plain += 1
            return
        line = _Line(start, number, whole, *split(whole, self._actor))
        matches = self._matcher.matches(line.text, line.level)
        self._num_plain += not matches
        for match in matches:
            if self._is_over(match.rule):
                self.found.counts[match.rule.id] += 1
                self._late[match.rule.id] = (line, match)
            else:
                self._take_event(self._event(block, line, match), line)

    def _is_over(self, rule: Rule) -> bool:
        """Whether only the last line of a rule is still of interest. With general words it depends on the line whether
        it counts at all."""
        most = MAX_FACTS if rule.role == "fact" else MAX_EVENTS
        return self.found.counts.get(rule.id, 0) >= most and not is_general(rule)

    def _event(self, block: bytes, line: _Line, match: Match) -> Event:
        is_warning = line.level == WARNING or warns(line.text)
        return Event(
            rule=match.rule,
            actor=line.actor,
            place=Place(source=self.found.name, line=line.number),
            text=line.text[:MAX_QUOTED],
            moment=moment_of(line.whole) or self._moment_before(block, line.start),
            values=match.values,
            is_warning=not match.rule.alone
            and (is_warning or (not line.level and _continues_a_warning(block, line.start))),
        )

    def _take_event(self, event: Event, line: _Line) -> None:
        """One of general words counts in a line that complains, later in a warning, or in somebody's own words."""
        if not is_general(event.rule):
            self._keep(event)
        elif event.is_warning:
            self._warnings = [*self._warnings, event][:MAX_OWN_WORDS]
        elif complains(line.text):
            self._keep(event)
        elif complaint(line.text) == line.text:
            self._doubtful = [*self._doubtful, event][:MAX_OWN_WORDS]

    def _take_late(self, block: bytes) -> None:
        """Makes the events that have turned out to be the last of their rules in a block."""
        self._searched, self._timed = 0, None
        for line, match in sorted(self._late.values(), key=lambda late: late[0].start):
            self._last_events[match.rule.id] = self._event(block, line, match)
        self._late.clear()

    def _moment_before(self, block: bytes, start: int) -> Moment | None:
        """The time of the nearest line before, for one that has none, such as a traceback's; no line is looked at
        twice, however many have none."""
        lines = block[max(self._searched, start - LOOK_BACK_BYTES) : start].split(b"\n")
        self._searched = start
        if (found := _first_moment(reversed(lines))) is not None:
            self._timed = (start, found)
        if self._timed is None or start - self._timed[0] > LOOK_BACK_BYTES:
            return None
        return self._timed[1]

    def _keep(self, event: Event) -> None:
        counts, rule = self.found.counts, event.rule
        if rule.id == NEW_START:  # what an earlier start of the same run said is over
            self.found.events.clear()
            self.found.losses.clear()
            self._last_events.clear()
            self._late.clear()
            counts.clear()
            self.found.start = event.values.get("id", "")
            return
        counts[rule.id] = counts.get(rule.id, 0) + 1
        most = MAX_FACTS if rule.role == "fact" else MAX_EVENTS
        if counts[rule.id] <= most:
            self.found.events.append(event)
        else:
            self._last_events[rule.id] = event

    def _losses(self, line: str, number: int) -> None:
        """Figures of a step, as MindFormers and Megatron print them; without a step they are no record."""
        fields = {_NAMES.get(name, name.replace(" ", "_")): value for name, value in _FIELD.findall(line)}
        if "step" not in fields or not any("loss" in name for name in fields):
            return
        try:
            figures = {name: float(value) for name, value in fields.items()}
        except ValueError:
            return
        self.found.losses.append((int(figures.pop("step")), number, figures))


def _continues_a_warning(block: bytes, start: int) -> bool:
    """Whether a line without a level of its own belongs to a warning of several lines, which begins a few lines before.

    What has a time, a code or an exception at its beginning is no part of another message.
    """
    end = block.find(b"\n", start)
    line = block[start : min(len(block) if end < 0 else end, start + MAX_QUOTED)]
    before = block[max(0, start - LOOK_BACK_BYTES) : start].split(b"\n")[-1 - MAX_CONTINUED : -1]
    for each in (line, *reversed(before)):
        if each.startswith(b"["):
            return each.startswith(b"[WARNING]")
        if not each.strip() or _OWN_MESSAGE.match(each) is not None or _first_moment([each]) is not None:
            return False
    return False


def _first_moment(lines: Iterable[bytes]) -> Moment | None:
    for raw in lines:
        if (moment := moment_of(text_of(raw[:MAX_QUOTED]))) is not None:
            return moment
    return None
