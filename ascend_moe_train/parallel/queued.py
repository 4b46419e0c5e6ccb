"""Collectives by a thread of their own, so that this one may go on meanwhile.

Pure.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ascend_moe_train.parallel.comm import Comm, Group, ObservedComm


class _Job:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.done = call, threading.Event()
        self.result: Any = None
        self.failure: BaseException | None = None


class QueuedComm(ObservedComm):
    """All calls of `inner` are made by one thread, one after the other, in the order in which they are asked for: every
    rank of a group must ask in the same order. The verbs wait for theirs, `begin` does not.

    `on_wait` is told for which call, as verb and group, a caller has waited, and for how many seconds. Once a call has
    failed no other is made: all who wait get what it raised. The thread ends with the process.
    """

    def __init__(
        self,
        inner: Comm,
        on_wait: Callable[[str, Group, float], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self._on_wait, self._clock = on_wait, clock
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        threading.Thread(target=self._work, name="collectives", daemon=True).start()

    def begin(self, verb: str, group: Group, call: Callable[[], Any]) -> Callable[[], Any]:
        """Has the thread make a call of `inner`. What is returned waits for it, and returns or raises what it did.
        Arrays that the call reads or writes are its own until then."""
        job = _Job(call)
        self._jobs.put(job)

        def wait() -> Any:
            start_s = self._clock()
            job.done.wait()
            if self._on_wait is not None:
                self._on_wait(verb, group, self._clock() - start_s)
            if job.failure is not None:
                raise job.failure
            return job.result

        return wait

    def _observe(self, verb: str, group: Group, payload: int, call: Callable[[], Any]) -> Any:
        return self.begin(verb, group, call)()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if self._failure is None:
                try:
                    job.result = job.call()
                except BaseException as error:  # it belongs to who waits
                    self._failure = error
            job.failure = self._failure
            job.done.set()
