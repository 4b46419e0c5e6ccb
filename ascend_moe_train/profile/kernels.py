"""Kernels of a device added up by type and shapes, from kernel_details.csv and op_summary_*.csv. Pure."""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ascend_moe_train.errors import ProfileError
from ascend_moe_train.profile.tables import COLLECTIVE_CORES, CUBE_CORES, PIPES, KernelGroup
from ascend_moe_train.profile.text import MAX_US, MISSING, Sheet, bad_cell, number, stamp_ns

MAX_GROUPS = 50_000  # beyond, shapes are no longer told apart
MAX_NAMES = 50_000
OTHERS = "(others)"
_COLLECTIVE = re.compile(
    r"(?:^|/)(?:hcom_|(?:AllReduce|AllGather|ReduceScatter|AlltoAll\w*|Broadcast|Send|Receive)-op\d)"
)
_COUNTERS = ("write_cache", "r0_read_cache", "r1_read_cache")


@dataclass
class Sums:
    """Of one group of kernels, while its rows come in."""

    count: int = 0
    total_us: float = 0.0
    least_us: float = MAX_US
    most_us: float = 0.0
    wait_us: float = 0.0
    measured_us: float = 0.0
    pipes_us: list[float] = field(default_factory=lambda: [0.0] * len(PIPES))
    cube_measured_us: float = 0.0
    cube_us: float = 0.0


class Kernels:
    """All kernels of one rank: groups of the computing ones, and every start, end and name of both kinds."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str, str, str], Sums] = {}
        self.rows = 0
        self.starts, self.ends, self.names = array("q"), array("q"), array("l")
        self.comm_starts, self.comm_ends, self.comm_names = array("q"), array("q"), array("l")
        self.comm_steps: list[str] = []
        self.name_list: list[str] = []
        self._name_ids: dict[str, int] = {}
        self.cache_hits = self.cache_misses = 0.0
        self.has_ratios = False

    def name_id(self, name: str) -> int:
        """A number for the name; the same for all beyond MAX_NAMES."""
        if (found := self._name_ids.get(name)) is None:
            if len(self._name_ids) >= MAX_NAMES:
                name = OTHERS
            found = self._name_ids.setdefault(name, len(self._name_ids))
            if found == len(self.name_list):
                self.name_list.append(name)
        return found

    def group(self, key: tuple[str, str, str, str]) -> Sums:
        """The sums of a type, core, shapes and data types."""
        if (found := self.groups.get(key)) is None:
            if len(self.groups) >= MAX_GROUPS:
                key = (OTHERS, key[1], "", "")
            found = self.groups.setdefault(key, Sums())
        return found

    def add(self, key: tuple[str, str, str, str], name: str, start_ns: int, duration_us: float) -> Sums:
        """One computing kernel. Returns its group's sums, for what else is known of it."""
        sums = self.group(key)
        sums.count += 1
        sums.total_us += duration_us
        if duration_us < sums.least_us:
            sums.least_us = duration_us
        if duration_us > sums.most_us:
            sums.most_us = duration_us
        self.starts.append(start_ns)
        self.ends.append(start_ns + round(duration_us * 1000))
        self.names.append(self.name_id(name))
        return sums

    def add_collective(self, name: str, step: str, start_ns: int, duration_us: float) -> None:
        """One collective."""
        self.comm_starts.append(start_ns)
        self.comm_ends.append(start_ns + round(duration_us * 1000))
        self.comm_names.append(self.name_id(name))
        self.comm_steps.append(step)

    def take(self, others: "Kernels") -> None:
        """Adds all computing kernels of another collection."""
        for key, each in others.groups.items():
            sums = self.group(key)
            sums.count += each.count
            sums.total_us += each.total_us
            sums.least_us = min(sums.least_us, each.least_us)
            sums.most_us = max(sums.most_us, each.most_us)
        self.starts.extend(others.starts)
        self.ends.extend(others.ends)
        self.names.extend(self.name_id(others.name_list[name]) for name in others.names)
        self.rows += others.rows

    def table(self) -> tuple[KernelGroup, ...]:
        """The groups, longest first."""
        found = [
            KernelGroup(
                type=key[0],
                core=key[1],
                shapes=key[2],
                dtypes=key[3],
                count=each.count,
                total_us=each.total_us,
                min_us=each.least_us,
                max_us=each.most_us,
                wait_us=each.wait_us,
                measured_us=each.measured_us,
                pipes_us=tuple(each.pipes_us) if each.measured_us else (),
                cube_measured_us=each.cube_measured_us,
                cube_us=each.cube_us,
            )
            for key, each in self.groups.items()
        ]
        return tuple(sorted(found, key=lambda each: -each.total_us))


def is_collective(core: str, name: str) -> bool:
    """Whether a row is a collective; at Level0 only its name says so."""
    return core in COLLECTIVE_CORES or (core in MISSING and _COLLECTIVE.search(name) is not None)


def plain_kind(name: str) -> str:
    """`allReduce` of `hcom_allReduce__586_0_1@1752...`, and of `Default/AllReduce-op534_0`."""
    found = re.search(r"hcom_([A-Za-z0-9]+?)_", name) or re.search(r"([A-Za-z0-9]+)-op\d", name)
    kind = found[1] if found else name.rpartition("/")[2].partition("@")[0] or name
    return kind[:1].lower() + kind[1:]


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Places of what is read of a row; None for what the file does not have."""

    name: int
    type: int | None
    core: int | None
    start: int | None
    duration: int
    wait: int | None
    step: int | None
    device: int | None
    shapes: int | None
    dtypes: int | None
    cube: int | None
    cube_ratios: tuple[int | None, ...]
    vector_ratios: tuple[int | None, ...]
    counters: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sheet: Sheet) -> "_Columns":
        def ratios(prefix: str) -> tuple[int | None, ...]:
            return tuple(sheet.find(f"{prefix}_{pipe}_ratio") for pipe in PIPES)

        counters = []
        for prefix in ("aic", "aiv"):
            for each in _COUNTERS:
                hit, miss = sheet.find(f"{prefix}_{each}_hit"), sheet.find(f"{prefix}_{each}_miss_allocate")
                if hit is not None and miss is not None:
                    counters.append((hit, miss))
        return cls(
            name=sheet.need("Name", "Op Name", "kernel_name"),
            type=sheet.find("Type", "OP Type", "kernel_type"),
            core=sheet.find("Accelerator Core", "Task Type"),
            start=sheet.find("Start Time(us)", "Task Start Time(us)", "Task Start Time", "task_start(us)"),
            duration=sheet.need("Duration(us)", "Task Duration(us)", "task_time(us)"),
            wait=sheet.find("Wait Time(us)", "Task Wait Time(us)"),
            step=sheet.find("Step Id", "Step ID", "Step"),
            device=sheet.find("Device_id"),
            shapes=sheet.find("Input Shapes"),
            dtypes=sheet.find("Input Data Types"),
            cube=sheet.find("cube_utilization(%)"),
            cube_ratios=ratios("aic"),
            vector_ratios=ratios("aiv"),
            counters=tuple(counters),
        )


def read_kernels(paths: Sequence[Path], kernels: Kernels, device: str | None = None) -> None:
    """Adds the rows of all slices; with `device`, those of this physical device. Raises ProfileError."""
    for path in paths:
        sheet = Sheet(path)
        columns = _Columns.of(sheet)
        has_ratios = any(each is not None for each in (*columns.cube_ratios, *columns.vector_ratios))
        kernels.has_ratios |= has_ratios
        for row, cells in sheet.rows():
            if device is not None and columns.device is not None and cells[columns.device].strip() != device:
                continue
            _add_row(kernels, sheet, columns, row, cells, has_ratios)


def _add_row(kernels: Kernels, sheet: Sheet, at: _Columns, row: int, cells: list[str], has_ratios: bool) -> None:
    path = sheet.path
    name = cells[at.name]
    core = cells[at.core].strip() if at.core is not None else ""
    try:
        duration_us = float(cells[at.duration])
        if not 0 <= duration_us < MAX_US:
            raise bad_cell(path, row, _titled(sheet, at.duration), cells[at.duration])
    except ValueError:
        if cells[at.duration].strip() in MISSING:
            return
        raise bad_cell(path, row, _titled(sheet, at.duration), cells[at.duration]) from None
    start_ns = stamp_ns(cells[at.start], path, row, _titled(sheet, at.start)) if at.start is not None else 0
    kernels.rows += 1
    if is_collective(core, name):
        step = cells[at.step].strip() if at.step is not None else ""
        kernels.add_collective(name, step, start_ns, duration_us)
        return
    kind = cells[at.type].strip() if at.type is not None else ""
    shapes = cells[at.shapes].strip('"') if at.shapes is not None else ""
    dtypes = cells[at.dtypes] if at.dtypes is not None else ""
    key = (name if kind in MISSING else kind, core, "" if shapes in MISSING else shapes, dtypes)
    sums = kernels.add(key, name, start_ns, duration_us)
    if at.wait is not None and (wait := number(cells[at.wait], path, row, "Wait Time(us)")) is not None:
        sums.wait_us += wait
    if has_ratios:
        _add_ratios(sums, sheet, at, row, cells, core, duration_us)
    for hit, miss in at.counters:
        kernels.cache_hits += sheet.number(cells, row, hit, _titled(sheet, hit)) or 0.0
        kernels.cache_misses += sheet.number(cells, row, miss, _titled(sheet, miss)) or 0.0


def _add_ratios(
    sums: Sums, sheet: Sheet, at: _Columns, row: int, cells: list[str], core: str, duration_us: float
) -> None:
    """Ratios of the core that the kernel runs on, weighted by its duration."""
    places = at.cube_ratios if core in CUBE_CORES else at.vector_ratios
    pipes_us = sums.pipes_us
    try:
        for index, place in enumerate(places):
            if place is not None:
                pipes_us[index] += float(cells[place]) * duration_us
        sums.measured_us += duration_us
    except ValueError:
        for index, place in enumerate(places):
            sheet.number(cells, row, place, f"{PIPES[index]}_ratio")  # raises for what is no missing cell
    if at.cube is not None and core in CUBE_CORES:
        share = sheet.number(cells, row, at.cube, "cube_utilization(%)")
        if share is not None:
            sums.cube_measured_us += duration_us
            sums.cube_us += share / 100 * duration_us


def _titled(sheet: Sheet, place: int) -> str:
    return next(name for name, each in sheet.columns.items() if each == place)


def check_sums(kernels: Kernels, path: Path) -> None:
    """Raises ProfileError when ratios were no ratios, so that what they add up to is none."""
    for key, each in kernels.groups.items():
        highest = max(each.pipes_us, default=0.0)
        if not min(each.pipes_us, default=0.0) >= 0 or highest > 1000 * max(each.measured_us, each.total_us) + 1:
            raise ProfileError(f"{path}: {key[0][:60]!r} has pipe ratios that are no ratios")
