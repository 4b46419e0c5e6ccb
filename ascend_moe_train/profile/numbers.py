"""Counts as words and as cells of a table. Pure."""


def format_count(count: float) -> str:
    """A count, which is a mean over ranks or steps, to a tenth: `3`, `4.4`."""
    return f"{count:.1f}".removesuffix(".0")


def counted(count: float, noun: str) -> str:
    """`1 step`, `4.4 steps`."""
    shown = format_count(count)
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"
