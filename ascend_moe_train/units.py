"""Figures for people: bytes, seconds, FLOP/s and counts as short text. Pure."""

import math

UNKNOWN = "n/a"


def format_bytes(value_bytes: float) -> str:
    """Decimal units: 1_500_000_000 -> '1.50 GB'."""
    return _scaled(value_bytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_flops_per_s(value_flops_per_s: float) -> str:
    """70.6e9 -> '70.6 GFLOP/s'."""
    return _scaled(value_flops_per_s, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s", "EFLOP/s"))


def format_count(value: float) -> str:
    """Parameters, tokens: 30_500_000_000 -> '30.5 B'."""
    return _scaled(value, ("", "k", "M", "B", "T"))


def format_seconds(value_s: float) -> str:
    """0.042 -> '42 ms', 7.5 -> '7.5 s', 200 -> '3:20', 7384 -> '2:03:04'."""
    if not math.isfinite(value_s):
        return UNKNOWN
    if value_s < 1:
        return f"{value_s * 1e3:.3g} ms"
    if value_s < 59.95:
        return f"{value_s:.1f} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def format_share(value: float | None, digits: int = 1) -> str:
    """0.531 -> '53.1 %'; None -> 'n/a'."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value * 100:.{digits}f} %"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    """Three significant digits with the largest unit that leaves at least 1."""
    if not math.isfinite(value):
        return UNKNOWN
    power = 0
    # Rounding to three digits first, so that 999_999 becomes 1.00 M and not 1000 k.
    while abs(float(f"{value:.3g}")) >= 1000 and power < len(units) - 1:
        value /= 1000
        power += 1
    if power == 0 and value == int(value):
        return f"{int(value)} {units[0]}".rstrip()
    size = abs(float(f"{value:.3g}"))
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{value:.{digits}f} {units[power]}".rstrip()
