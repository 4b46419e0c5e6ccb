"""Sums that profilers wrote: op_statistic.csv, api_statistic.csv, l2_cache.csv. Pure."""

from pathlib import Path

from ascend_moe_train.profile.tables import HostCall, KernelGroup
from ascend_moe_train.profile.text import MISSING, Sheet

MAX_CALLS = 200


def read_operators(path: Path, device: str | None = None) -> tuple[KernelGroup, ...]:
    """op_statistic.csv, a group for each type and core. Raises ProfileError."""
    sheet = Sheet(path)
    kind, core = sheet.need("OP Type"), sheet.find("Core Type")
    count, total = sheet.need("Count"), sheet.need("Total Time(us)")
    low, high = sheet.find("Min Time(us)"), sheet.find("Max Time(us)")
    device_at = sheet.find("Device_id")
    found = []
    for row, cells in sheet.rows():
        if device is not None and device_at is not None and cells[device_at].strip() != device:
            continue
        found.append(
            KernelGroup(
                type=cells[kind],
                core=cells[core].strip() if core is not None else "",
                shapes="",
                dtypes="",
                count=int(sheet.number(cells, row, count, "Count") or 0),
                total_us=sheet.number(cells, row, total, "Total Time(us)") or 0.0,
                min_us=sheet.number(cells, row, low, "Min Time(us)") or 0.0,
                max_us=sheet.number(cells, row, high, "Max Time(us)") or 0.0,
                wait_us=0.0,
            )
        )
    return tuple(sorted(found, key=lambda each: -each.total_us))


def read_host(path: Path) -> list[HostCall]:
    """api_statistic.csv, the longest calls. Raises ProfileError."""
    sheet = Sheet(path)
    level, name = sheet.find("Level"), sheet.need("API Name")
    total, count = sheet.need("Time(us)"), sheet.need("Count")
    found = []
    for row, cells in sheet.rows():
        found.append(
            HostCall(
                level=cells[level].strip() if level is not None else "",
                name=cells[name],
                total_us=sheet.number(cells, row, total, "Time(us)") or 0.0,
                count=int(sheet.number(cells, row, count, "Count") or 0),
            )
        )
    return sorted(found, key=lambda each: -each.total_us)[:MAX_CALLS]


def read_l2(path: Path, device: str | None = None) -> dict[str, float]:
    """l2_cache.csv: mean hit rate of the rows that have one (none has on 910B), victim rates. Raises ProfileError."""
    sheet = Sheet(path)
    hit, victim = sheet.find("Hit Rate"), sheet.find("Victim Rate")
    device_at = sheet.find("Device_id")
    hits: list[float] = []
    victims: list[float] = []
    rows = 0
    for row, cells in sheet.rows():
        if device is not None and device_at is not None and cells[device_at].strip() != device:
            continue
        rows += 1
        for place, values in ((hit, hits), (victim, victims)):
            if place is not None and cells[place].strip() not in MISSING:
                values.append(sheet.number(cells, row, place, "rate") or 0.0)
    found = {"l2_cache_rows": float(rows), "l2_cache_rows_with_hit_rate": float(len(hits))}
    if hits:
        found["l2_hit_rate_mean_of_rows"] = sum(hits) / len(hits)
    if victims:
        found |= {"l2_victim_rate_mean": sum(victims) / len(victims), "l2_victim_rate_max": max(victims)}
    return found
