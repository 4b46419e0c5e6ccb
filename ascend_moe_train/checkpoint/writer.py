"""Writes checkpoints in a thread, so that training goes on while the disk works."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from ascend_moe_train.checkpoint import saving
from ascend_moe_train.checkpoint.portion import Portion
from ascend_moe_train.checkpoint.saving import ONLY_WRITER, Writer
from ascend_moe_train.closing import Closing


class AsyncWriter(Closing):
    """One checkpoint at a time is on its way to the disk; a failed write is raised by the next call.

    An interrupt (Ctrl-C) of a waiting call leaves the write in flight: it goes on, and a later call waits for it. At
    the latest the interpreter waits when it exits, so a write is cut only by a kill, which `saving` is made for.
    Hashing and writing release the interpreter lock.

    All writers of a checkpoint call `prepare`, wait for each other (a barrier), and call `submit_part`.
    """

    def __init__(self, *, keep: int, writer: Writer = ONLY_WRITER) -> None:
        """`keep`: how many checkpoints stay, at least 1. `writer`: which of the writers of each checkpoint this is."""
        self._keep, self._writer = keep, writer
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Path] | None = None

    def prepare(self, root: Path, step: int) -> None:
        """Waits for the own earlier write; the first writer then makes the folder that all are to write into.

        Raises:
            CheckpointError: the earlier write failed, or the folder cannot be written.
        """
        self.wait()
        if self._writer.index == 0:
            saving.prepare(root, step, self._writer.count)

    def submit_part(self, root: Path, step: int, portions: Mapping[str, Portion], meta: Mapping[str, Any]) -> None:
        """Starts to write a part of a checkpoint that has been prepared. Arguments as of `saving.save_part`.

        Arrays and `meta` are not copied: hand over copies that nobody changes any more. The write is in flight until
        all of the checkpoint has its final name.

        Raises:
            CheckpointError: an earlier write failed; the new one has not been started.
        """
        self.wait()
        write = partial(saving.save_part, root, step, portions, meta, keep=self._keep, writer=self._writer)
        self._in_flight = self._executor.submit(write)

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
