"""Memory over time, its peaks and who had it, from memory_record, npu_module_mem and operator_memory. Pure."""

from dataclasses import dataclass, field
from pathlib import Path

from ascend_moe_train.profile.tables import Memory, Owner
from ascend_moe_train.profile.text import Sheet, stamp_ns

MAX_POINTS = 400
MAX_COMPONENTS = 256
MAX_OWNERS = 20
MAX_MB = 1e9
_KB_PER_MB = 1024.0


@dataclass
class _Curve:
    """Peaks of equal stretches of rows; when there are too many, two become one."""

    rows: int = 0
    reserved_mb: float = 0.0
    allocated_mb: float = 0.0
    stretch: int = 1
    points: list[tuple[int, float]] = field(default_factory=list)
    peak_ns: int = 0

    def add(self, at_ns: int, reserved_mb: float, allocated_mb: float) -> None:
        if reserved_mb > self.reserved_mb or not self.rows:
            self.reserved_mb, self.peak_ns = reserved_mb, at_ns
        self.allocated_mb = max(self.allocated_mb, allocated_mb)
        if self.rows % self.stretch == 0:
            self.points.append((at_ns, reserved_mb))
        elif reserved_mb > self.points[-1][1]:
            self.points[-1] = (at_ns, reserved_mb)
        self.rows += 1
        if len(self.points) > 2 * MAX_POINTS:
            halves = zip(self.points[::2], [*self.points[1::2], self.points[-1]], strict=False)
            self.points = [max(pair, key=lambda point: point[1]) for pair in halves]
            self.stretch *= 2


def read_memory(path: Path, device: str | None = None) -> tuple[Memory, ...]:
    """Rows of memory_record.csv or npu_module_mem.csv by component; kilobytes of msprof become megabytes of 2^20 bytes.
    Raises ProfileError."""
    sheet = Sheet(path)
    component = sheet.need("Component")
    stamp = sheet.need("Timestamp(us)")
    in_mb = sheet.find("Total Reserved(MB)")
    reserved = sheet.need("Total Reserved(MB)", "Total Reserved(KB)")
    allocated = sheet.find("Total Allocated(MB)", "Total Allocated(KB)")
    device_at = sheet.find("Device_id")
    unit = 1.0 if in_mb is not None else 1 / _KB_PER_MB
    curves: dict[str, _Curve] = {}
    for row, cells in sheet.rows():
        if device is not None and device_at is not None and cells[device_at].strip() != device:
            continue
        name = cells[component].strip()
        if name not in curves and len(curves) >= MAX_COMPONENTS:
            continue
        at_ns = stamp_ns(cells[stamp], path, row, "Timestamp(us)")
        size = sheet.number(cells, row, reserved, "Total Reserved") or 0.0
        used = sheet.number(cells, row, allocated, "Total Allocated") or 0.0
        curves.setdefault(name, _Curve()).add(at_ns, min(size * unit, MAX_MB), min(used * unit, MAX_MB))
    return tuple(
        Memory(
            component=name,
            rows=each.rows,
            peak_reserved_mb=each.reserved_mb,
            peak_allocated_mb=each.allocated_mb,
            curve=tuple(each.points),
        )
        for name, each in curves.items()
    )


def peak_ns(memory: tuple[Memory, ...]) -> int | None:
    """When the component that operators allocate from had most."""
    of_framework = [each for each in memory if each.component in ("PTA", "MindSpore", "PTA+GE", "MindSpore+GE")]
    points = [point for each in of_framework for point in each.curve]
    return max(points, key=lambda point: point[1])[0] if points else None


def read_owners(path: Path, at_ns: int) -> tuple[Owner, ...]:
    """Operators of operator_memory.csv whose memory was alive at a time, largest first. Raises ProfileError."""
    sheet = Sheet(path)
    name, size = sheet.need("Name"), sheet.need("Size(KB)")
    start, end = sheet.need("Allocation Time(us)"), sheet.find("Release Time(us)")
    sums: dict[str, list[float]] = {}
    for row, cells in sheet.rows():
        text = cells[size].strip()
        if not text or text.startswith("-") or not cells[start].strip():
            continue  # what was allocated before the window has a negative size
        begun = stamp_ns(cells[start], path, row, "Allocation Time(us)")
        ended = cells[end].strip() if end is not None else ""
        if begun > at_ns or (ended and stamp_ns(ended, path, row, "Release Time(us)") <= at_ns):
            continue
        if cells[name] in sums or len(sums) < MAX_COMPONENTS * 16:
            each = sums.setdefault(cells[name], [0.0, 0])
            each[0] += (sheet.number(cells, row, size, "Size(KB)") or 0.0) / _KB_PER_MB
            each[1] += 1
    largest = sorted(sums.items(), key=lambda item: -item[1][0])[:MAX_OWNERS]
    return tuple(Owner(name=key, size_mb=each[0], count=int(each[1])) for key, each in largest)
