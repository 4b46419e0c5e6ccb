"""The databases that profilers write instead of text: one per rank, and the collectives' own. Pure.

Opened read-only; only the tables below are asked for, with statements of ours.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ascend_moe_train.errors import ProfileError
from ascend_moe_train.profile.kernels import Kernels, plain_kind
from ascend_moe_train.profile.tables import CUBE_CORES, PIPES, Cache, Collective, Link, Step
from ascend_moe_train.profile.text import MAX_US

MAX_STAMP_NS = 2**62
MAX_CACHES = 1000
_PARTS = "step, computing, communication_not_overlapped, overlapped, free, stage, bubble, preparing"
_STEPS = f"SELECT {_PARTS} FROM StepTraceTime"
_CLUSTER_STEPS = f"SELECT \"index\", {_PARTS} FROM ClusterStepTraceTime WHERE type = 'rank'"
_TIMES = (
    "SELECT step, hccl_op_name, group_name, start_timestamp, elapse_time, transit_time, wait_time, "
    "synchronization_time, idle_time FROM CommAnalyzerTime"
)
_WIDTHS = (
    "SELECT step, hccl_op_name, group_name, transport_type, SUM(size), SUM(time) FROM (SELECT DISTINCT step, "
    "hccl_op_name, group_name, transport_type, transit_size AS size, transit_time AS time FROM CommAnalyzerBandwidth) "
    "GROUP BY 1, 2, 3, 4"
)
_MATRIX = (
    "SELECT group_name, src_rank, dst_rank, transport_type, SUM(transit_size), SUM(transit_time) "
    "FROM CommAnalyzerMatrix WHERE hccl_op_name LIKE '%-total' GROUP BY 1, 2, 3, 4"
)
_KERNELS = """
SELECT n.value, o.value, c.value, s.value, d.value, t.startNs, t.endNs, t.globalTaskId
FROM COMPUTE_TASK_INFO k JOIN TASK t ON t.globalTaskId = k.globalTaskId
LEFT JOIN STRING_IDS n ON n.id = k.name LEFT JOIN STRING_IDS o ON o.id = k.opType
LEFT JOIN STRING_IDS c ON c.id = k.taskType LEFT JOIN STRING_IDS s ON s.id = k.inputShapes
LEFT JOIN STRING_IDS d ON d.id = k.inputDataTypes ORDER BY t.startNs
"""
_COLLECTIVES = """
SELECT n.value, g.value, c.startNs, c.endNs FROM COMMUNICATION_OP c
LEFT JOIN STRING_IDS n ON n.id = c.opName LEFT JOIN STRING_IDS g ON g.id = c.groupName ORDER BY c.startNs
"""
_CACHE = "SELECT c.llcId, s.value, c.hitRate, c.throughput FROM LLC c LEFT JOIN STRING_IDS s ON s.id = c.mode"
_RATIOS = "SELECT p.globalTaskId, s.value, p.value FROM TASK_PMU_INFO p JOIN STRING_IDS s ON s.id = p.name"


class Database:
    """One file. All of its methods raise ProfileError for what is no such database."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._connection = path, connection
        self.tables = {str(name) for (name,) in self._ask("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def has(self, *tables: str) -> bool:
        """Whether all of them are there."""
        return self.tables.issuperset(tables)

    def steps(self) -> list[Step]:
        """StepTraceTime, which has what step_trace_time.csv has."""
        return [self._step(row, "StepTraceTime") for row in self._ask(_STEPS)]

    def cluster_steps(self) -> dict[int, list[Step]]:
        """ClusterStepTraceTime, by rank."""
        found: dict[int, list[Step]] = {}
        for rank, *row in self._ask(_CLUSTER_STEPS):
            if str(rank).isdecimal() and len(str(rank)) < 8:
                found.setdefault(int(rank), []).append(self._step(row, "ClusterStepTraceTime"))
        return found

    def _step(self, row: Sequence[Any], table: str) -> Step:
        step, computing, exposed, overlapped, free, stage, bubble, preparing = row
        parts = [self._us(value, table) for value in (computing, exposed, overlapped, free)]
        is_possible = isinstance(preparing, int | float) and 0 <= preparing <= parts[0] + parts[1] + parts[3]
        return Step(
            step=str(step if step is not None else ""),
            computing_us=parts[0],
            exposed_us=parts[1],
            overlapped_us=parts[2],
            free_us=parts[3],
            source=f"{self.path.name}: {table}",
            preparing_us=preparing if is_possible else None,
            stage_written_us=self._us(stage, table),
            bubble_written_us=self._us(bubble, table),
        )

    def collectives(self) -> list[Collective]:
        """CommAnalyzerTime with CommAnalyzerBandwidth, which have what communication.json has."""
        widths: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = {}
        if self.has("CommAnalyzerBandwidth"):
            for step, name, group, transport, size, time in self._ask(_WIDTHS):
                if size or time:
                    both = self._us(size, "CommAnalyzerBandwidth"), self._us(time, "CommAnalyzerBandwidth")
                    widths.setdefault((step, name, group), {})[str(transport)] = both
        found = []
        for step, name, group, start, *times in self._ask(_TIMES):
            if name == "Total Op Info":
                continue
            elapse, transit, wait, sync, idle = (self._us(value, "CommAnalyzerTime") for value in times)
            plain = str(name)
            found.append(
                Collective(
                    step=str(step or "").removeprefix("step"),
                    name=plain if "@" in plain else f"{plain}@{group}",
                    kind=plain_kind(plain),
                    group=str(group or ""),
                    start_ns=self._stamp((start or 0) * 1000, "CommAnalyzerTime"),
                    elapse_ms=elapse,
                    transit_ms=transit,
                    wait_ms=wait,
                    sync_ms=sync,
                    idle_ms=idle,
                    links=widths.get((step, name, group), {}),
                )
            )
        return found

    def links(self) -> list[Link]:
        """CommAnalyzerMatrix, its totals."""
        return [
            Link(
                group=str(group or ""),
                source=int(source),
                target=int(target),
                transport=str(transport),
                size_mb=self._us(size, "CommAnalyzerMatrix"),
                time_ms=self._us(time, "CommAnalyzerMatrix"),
            )
            for group, source, target, transport, size, time in self._ask(_MATRIX)
            if str(source).isdecimal() and str(target).isdecimal()
        ]

    def read_kernels(self, kernels: Kernels) -> None:
        """TASK with COMPUTE_TASK_INFO, COMMUNICATION_OP and, where there, TASK_PMU_INFO."""
        sums_of_task = {}
        has_ratios = self.has("TASK_PMU_INFO")
        for name, kind, core, shapes, dtypes, start, end, task in self._ask(_KERNELS):
            start_ns, duration_us = self._span(start, end, "TASK")
            kernels.rows += 1
            key = (str(kind or name), str(core or ""), str(shapes or "").strip('"'), str(dtypes or ""))
            sums = kernels.add(key, str(name), start_ns, duration_us)
            if has_ratios:
                sums_of_task[task] = (sums, duration_us, key[1] in CUBE_CORES)
        if has_ratios:
            self._read_ratios(sums_of_task)
            kernels.has_ratios = bool(sums_of_task)
        if self.has("COMMUNICATION_OP"):
            for name, group, start, end in self._ask(_COLLECTIVES):
                start_ns, duration_us = self._span(start, end, "COMMUNICATION_OP")
                plain = str(name or "")
                kernels.rows += 1
                kernels.add_collective(
                    plain if "@" in plain or not group else f"{plain}@{group}", "", start_ns, duration_us
                )

    def _read_ratios(self, sums_of_task: dict[Any, Any]) -> None:
        places = {
            f"{prefix}_{pipe}_ratio": (prefix == "aic", index)
            for prefix in ("aic", "aiv")
            for index, pipe in enumerate(PIPES)
        }
        measured = set()
        for task, name, value in self._ask(_RATIOS):
            found = sums_of_task.get(task)
            place = places.get(str(name))
            if found is None or place is None or found[2] != place[0] or not isinstance(value, int | float):
                continue
            sums, duration_us, _ = found
            sums.pipes_us[place[1]] += min(max(float(value), 0.0), 100.0) * duration_us
            if task not in measured:
                measured.add(task)
                sums.measured_us += duration_us

    def caches(self) -> list[Cache]:
        """The table LLC, whose rates are percentages, by cache and direction."""
        samples: dict[str, list[tuple[float, float]]] = {}
        for number, mode, rate, load in self._ask(_CACHE):
            is_number = isinstance(rate, int | float) and isinstance(load or 0.0, int | float)
            if is_number and 0 <= rate <= 100 and 0 <= (load or 0.0) < 1e12 and len(samples) < MAX_CACHES:
                name = f"LLC {number} {str(mode or '').capitalize()}".strip()
                samples.setdefault(name, []).append((rate / 100, float(load or 0.0)))
        found = []
        for name, rows in sorted(samples.items()):
            rates, total = [rate for rate, _ in rows], sum(load for _, load in rows)
            found.append(
                Cache(
                    kind=name,
                    samples=len(rows),
                    mean=sum(rates) / len(rates),
                    low=min(rates),
                    high=max(rates),
                    weighted=sum(rate * load for rate, load in rows) / total if total > 0 else None,
                    source=f"{self.path.name}: LLC",
                )
            )
        return found

    def _span(self, start: Any, end: Any, table: str) -> tuple[int, float]:
        start_ns = self._stamp(start, table)
        duration_us = (self._stamp(end, table) - start_ns) / 1e3
        if not 0 <= duration_us < MAX_US:
            raise ProfileError(f"{self.path}: {table}: an interval from {start} to {end} cannot be")
        return start_ns, duration_us

    def _stamp(self, value: Any, table: str) -> int:
        if not isinstance(value, int | float) or not 0 <= value < MAX_STAMP_NS:
            raise ProfileError(f"{self.path}: {table}: {str(value)[:40]!r} is no time stamp")
        return int(value)

    def _us(self, value: Any, table: str) -> float:
        if value is None:
            return 0.0
        if not isinstance(value, int | float) or not -1e-3 <= value < MAX_US:
            raise ProfileError(f"{self.path}: {table}: {str(value)[:40]!r} is no possible number")
        return max(0.0, float(value))

    def _ask(self, statement: str) -> Iterator[Sequence[Any]]:
        try:
            yield from self._connection.execute(statement)
        except (sqlite3.Error, OverflowError) as error:
            raise ProfileError(f"{self.path}: {error}") from None
        except UnicodeDecodeError:  # of names in the schema, or of sqlite's own message about them
            raise ProfileError(f"{self.path}: is damaged: a name in it is no text") from None


@contextmanager
def opened(path: Path) -> Iterator[Database]:
    """The database, for reading only. Raises ProfileError."""
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error as error:
        raise ProfileError(f"{path}: {error}") from None
    with closing(connection):
        connection.text_factory = lambda content: content.decode("utf-8", "replace")
        yield Database(path, connection)
