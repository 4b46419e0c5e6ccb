"""A `Comm` whose links are slower than they are: to try on one machine what a slow network would do to a run.

Pure.
"""

import time
from collections.abc import Callable, Collection
from typing import Any

from ascend_moe_train.parallel.comm import Comm, Group, ObservedComm


class SlowComm(ObservedComm):
    """Makes every call last `latency_s` and its payload at `bytes_per_s`, from its start on; what takes longer by
    itself takes no longer. None is no limit of bytes, and all groups.

    A message leaves once its time is over, and `recv` is no slower for itself. `split`, and groups of one rank, move
    nothing. `clock` is in seconds from whenever; `sleep` waits for so many.
    """

    def __init__(
        self,
        inner: Comm,
        *,
        latency_s: float,
        bytes_per_s: float | None = None,
        groups: Collection[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._latency_s, self._bytes_per_s, self._groups = latency_s, bytes_per_s, groups
        self._clock, self._sleep = clock, sleep

    def delay_s(self, verb: str, group: Group, payload: int) -> float:
        """How long a call lasts at least."""
        is_free = verb in ("split", "recv") or group.size == 1
        if is_free or (self._groups is not None and group.name not in self._groups):
            return 0.0
        return self._latency_s + (0.0 if self._bytes_per_s is None else payload / self._bytes_per_s)

    def _observe(self, verb: str, group: Group, payload: int, call: Callable[[], Any]) -> Any:
        end_s = self._clock() + self.delay_s(verb, group, payload)
        if verb == "send":
            self._wait_until(end_s)
        result = call()
        self._wait_until(end_s)
        return result

    def _wait_until(self, end_s: float) -> None:
        if (left_s := end_s - self._clock()) > 0:
            self._sleep(left_s)
