"""What is said when a run has failed: the rank and why, where all were, and where to read on. Pure."""

import signal
from collections.abc import Sequence
from pathlib import Path

from ascend_moe_train.cluster.output import labelled
from ascend_moe_train.cluster.verdict import RankView, Verdict, ending_words, place

MAX_ROWS = 32


def failure_report(
    verdict: Verdict, views: Sequence[RankView], last_lines: Sequence[str], log_folder: Path | None
) -> str:
    """Several lines, the first of which names the rank, what it was at, and how it failed."""
    if verdict.everybody:
        return f"error: {verdict.text}"
    lines = [f"error: rank {verdict.rank} {verdict.text}"]
    view = views[verdict.rank]
    if view.ending is not None and view.ending.signal_number == signal.SIGKILL:
        lines.append("  (who sent that is not known: where memory is short, the system does; dmesg tells)")
    lines += table(views, verdict.rank)
    lines += [labelled(verdict.rank, line) for line in last_lines]
    if log_folder is not None:
        lines.append(f"what each rank printed: {log_folder}")
    return "\n".join(lines)


def around(views: Sequence[RankView], rank: int) -> Sequence[RankView]:
    """Of many ranks, as many as a report shows, a given one among them."""
    start = max(0, min(rank - MAX_ROWS // 2, len(views) - MAX_ROWS))
    return views[start : start + MAX_ROWS]


def table(views: Sequence[RankView], first: int) -> list[str]:
    """Where every rank was, one line each, as wide as they need; of many, those around the first."""
    shown = around(views, first)
    rows = [("rank", "pid", "idle", "")] + [_row(view) for view in shown]
    widths = [*(max(len(row[column]) for row in rows) for column in range(3)), 0]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    hidden = len(views) - len(shown)
    return [f"  {line}".rstrip() for line in lines] + ([f"  and {hidden} more ranks"] if hidden else [])


def _row(view: RankView) -> tuple[str, str, str, str]:
    pid = "-" if view.pid is None else str(view.pid)
    words = place(view)
    if view.ending is not None:
        words = f"{ending_words(view.ending)} {words}"
    elif view.stopped_s is not None:
        words = f"stopped {words}"
    return str(view.rank), pid, f"{view.idle_s:.1f} s", words
