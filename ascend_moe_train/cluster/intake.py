"""What ranks print, once it has come to the launcher: kept, shown, or taken for the last words of a rank. Pure."""

import re
from typing import Protocol

from ascend_moe_train.cluster.member import Member
from ascend_moe_train.cluster.output import NoScreen, RankLogs, Screen

_ABORT = re.compile(r"Abort\((\d{1,19})\) ")  # what MPICH prints before it ends all ranks


class LineSink(Protocol):
    """Where the lines of all ranks go."""

    def take(self, member: Member, text: str, *, is_error: bool) -> None:
        """A line, of a rank whose slot of the board has just been read."""


class Intake:
    """The launcher's own: logs and screen."""

    def __init__(self, logs: RankLogs, screen: Screen) -> None:
        self._logs, self._screen = logs, screen
        self.screen_error: OSError | None = None

    def mute(self) -> None:
        """From now on lines are kept, and not shown."""
        self._screen = NoScreen()

    def take(self, member: Member, text: str, *, is_error: bool) -> None:
        """See LineSink."""
        self._logs.line(member.rank, text)
        if is_error and (found := _ABORT.match(text)) is not None:
            member.abort = (int(found[1]), text)
        failure = member.status.failure if member.status is not None else None
        if is_error and failure is not None:
            if text != f"error: {failure.line}":
                member.last_lines.append(text)
            return
        try:
            self._screen.line(member.rank, text, is_error=is_error)
        except OSError as error:
            self.screen_error = error
            self.mute()
