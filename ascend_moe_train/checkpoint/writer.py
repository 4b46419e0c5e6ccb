"""Writes checkpoints in a thread, so that training goes on while the disk works."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ascend_moe_train.checkpoint import store


class AsyncWriter:
    """One checkpoint at a time is on its way to the disk; a failed write is raised by the next call.

    An interrupt (Ctrl-C) of a waiting call leaves the write in flight: it goes on, and a later call waits for it. At
    the latest the interpreter waits when it exits, so a write is cut only by a kill, which `store` is made for.
    Hashing and writing release the interpreter lock.
    """

    def __init__(self, *, keep: int) -> None:
        """`keep`: how many checkpoints stay, at least 1."""
        self._keep = keep
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Path] | None = None

    def submit(
        self, root: Path, step: int, tensors: Mapping[str, np.ndarray[Any, Any]], meta: Mapping[str, Any]
    ) -> None:
        """Starts to write; waits first while an earlier write is in flight. Arguments as of `store.save`.

        The arrays and `meta` are not copied: hand over copies that nobody changes any more.

        Raises:
            CheckpointError: the earlier write failed; the new one has not been started.
        """
        self.wait()
        self._in_flight = self._executor.submit(store.save, root, step, tensors, meta, keep=self._keep)

    def wait(self) -> Path | None:
        """Returns once nothing is in flight: the folder just written, or None when there was nothing to wait for.

        Raises:
            CheckpointError: the write failed. Raised once.
        """
        write = self._in_flight
        if write is None:
            return None
        wait([write])
        self._in_flight = None
        return write.result()

    def close(self) -> None:
        """Waits for the last write and ends the thread.

        Raises:
            CheckpointError: the last write failed.
        """
        try:
            self.wait()
        finally:
            self._executor.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
