"""SIGTERM and Ctrl-C end a run after the step in hand, with a checkpoint. Pure."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(kw_only=True)
class StopRequest:
    """`signal_number` is what arrived, None while nothing has."""

    signal_number: int | None = None


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Notes the first SIGTERM or SIGINT; a second one acts as if nothing were installed."""
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        for known, handler in before.items():
            signal.signal(known, handler)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
