"""What commands that work for a while share: a progress bar, a clean end when they are stopped, tables."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click

from ascend_moe_train.plain_text import plain

EXIT_TERMINATED = 143  # 128 + SIGTERM, as a shell reports it
_UPDATES_PER_STAGE = 200


@contextmanager
def progress_bar(*, silent: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error that goes away when done; nothing when that is no terminal.

    It is told the stage, the bytes done and the bytes in all, from any thread.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=silent or not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        shown = ("", 0)

        def progress(stage: str, done_bytes: int, total_bytes: int) -> None:
            nonlocal shown
            if stage != shown[0] or done_bytes - shown[1] >= total_bytes / _UPDATES_PER_STAGE:
                shown = (stage, done_bytes)
                bar.update(task, description=stage, completed=done_bytes, total=total_bytes)

        yield progress


@contextmanager
def stop_cleanly() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that nothing half-written is left under its name."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as they need, the first to the left, the others to the right, whole lines even in a pipe."""
    printable = [tuple(map(plain, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*printable, strict=True)]
    for first, *others in printable:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        click.echo("  ".join([first.ljust(widths[0]), *cells]))
