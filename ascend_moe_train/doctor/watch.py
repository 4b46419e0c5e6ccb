"""A run that is still going on: warns of stalls and drifts before a deadline ends it. Pure."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ascend_moe_train.doctor.hypothesis import Hypothesis
from ascend_moe_train.doctor.reading import METRICS_NAME
from ascend_moe_train.doctor.rule import RuleBook
from ascend_moe_train.doctor.series import Series, read_rows
from ascend_moe_train.doctor.training import training
from ascend_moe_train.errors import DataError
from ascend_moe_train.units import format_seconds

STALL_TIMES = 5.0  # steps that a step may take, and what is written between them
LEAST_STALL_S = 10.0
MAX_STEP_S = 86_400.0  # a step that takes longer, or no number of seconds, tells nothing
RECENT = 50  # steps of which the usual time is taken


@dataclass(kw_only=True)
class Watch:
    """What is known of a run, and what was said of it already. `now` tells the time in seconds since 1970."""

    run_dir: Path
    book: RuleBook
    now: Callable[[], float] = time.time
    said: set[str] = field(default_factory=set)

    def look(self) -> list[str]:
        """What is new and worth a word, one line each. Raises DataError: the folder is no run's."""
        path = self.run_dir / METRICS_NAME
        if not path.is_file():
            raise DataError(f"{self.run_dir}: there is no {METRICS_NAME}: not the folder of a run that has begun")
        rows = read_rows(path)
        if not rows:
            return []
        series = Series(source=METRICS_NAME, rows=rows)
        found = [line for each in training([series], self.book) if (line := self._drift(each)) is not None]
        times = [value for row in rows[-RECENT:] if (value := row.figures.get("step_s", math.nan)) < MAX_STEP_S]
        if times and (line := self._stall(rows[-1].step, path.stat().st_mtime, median(times))) is not None:
            found.append(line)
        return found

    def _drift(self, found: Hypothesis) -> str | None:
        if found.rule.id in self.said:
            return None
        self.said.add(found.rule.id)
        remedies = self.book.remedies(found.rule)
        todo = f"; to do: {remedies[0].do}" if remedies else ""
        return f"warning: {found.filled(found.rule.words('en').means)}{todo}"

    def _stall(self, step: int, written_s: float, usual_s: float) -> str | None:
        """That nothing was written for much longer than a step takes, once for each step."""
        quiet_s, name = self.now() - written_s, f"stall after step {step}"
        if quiet_s < max(STALL_TIMES * usual_s, LEAST_STALL_S) or name in self.said:
            return None
        self.said.add(name)
        return (
            f"warning: nothing new for {format_seconds(quiet_s)} after step {step}; a step takes "
            f"{format_seconds(usual_s)}: where each rank stands: amt doctor {self.run_dir / 'logs'}"
        )


def watching(watch: Watch, every_s: float, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Lines as they come, for ever."""
    while True:
        yield from watch.look()
        sleep(every_s)
