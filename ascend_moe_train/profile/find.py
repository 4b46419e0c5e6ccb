"""What a folder holds: a source for each rank, whatever tool wrote it, with the files by kind. Pure.

Of the same rank the newest capture is taken, of several exports the newest, of an export in slices all slices.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ascend_moe_train.errors import ProfileError
from ascend_moe_train.profile.text import read_json

MAX_DEPTH = 6
NO_DEVICE: tuple[None] = (None,)
MAX_FOLDERS = 20_000
OUTPUT = "ASCEND_PROFILER_OUTPUT"
OPPROF_FILES = ("OpBasicInfo.csv", "PipeUtilization.csv", "L2Cache.csv")  # of msprof op
OWN = "amt train"  # of a run of ours on CPUs; see write.py
ANALYZE = "analyze"  # of msprof, beside MSPROF_OUTPUT
MSPROF_OUTPUT = "mindstudio_profiler_output"
CLUSTER_OUTPUT = "cluster_analysis_output"

# kind of file -> what its name begins with, the first that there is
KINDS: Mapping[str, tuple[str, ...]] = {
    "steps": ("step_trace_time.csv",),
    "kernels": ("kernel_details.csv", "op_summary.csv", "task_time.csv"),
    "operators": ("op_statistic.csv",),
    "communication": ("communication.json",),
    "matrix": ("communication_matrix.json",),
    "trace": ("trace_view.json", "msprof.json"),
    "memory": ("memory_record.csv",),
    "modules": ("npu_module_mem.csv",),
    "owners": ("operator_memory.csv",),
    "l2_cache": ("l2_cache.csv",),
    "host": ("api_statistic.csv",),
    "iterations": ("step_trace.csv", "step_trace.json"),
    "database": ("ascend_pytorch_profiler.db", "ascend_mindspore_profiler.db", "msprof.db"),
    "collectives_database": ("analysis.db", "communication_analyzer.db"),
}
_FILE = re.compile(r"(?P<stem>[a-z][a-z0-9_]*?)(?:_slice_\d+)?(?P<stamp>(?:_\d+)*)\.(?P<type>csv|json|db)(?:\.gz)?")
_STAMP = re.compile(r"_(\d{14,20})(?:_|$)")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE)
_INFO = re.compile(r"profiler_info(?:_(\d{1,6}))?\.json")
_OLD = re.compile(
    r"(?:step_trace_raw|hccl_raw|aicore_intermediate|flops_summary)_(\d{1,6})(?:_|\.)|ascend_cluster_analyse_.*_(\d{1,6})\.csv"
)

Files = Mapping[str, tuple[Path, ...]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one rank's files are. `device` is set where files hold several devices; `stamp` is when it was written."""

    rank: int | None
    writer: str
    folder: Path
    files: Files
    device: str | None = None
    stamp: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def paths(self) -> list[Path]:
        """All files."""
        return [path for each in self.files.values() for path in each]


def find_sources(folder: Path) -> tuple[list[Source], list[Path]]:
    """Sources by rank, and folders of msprof-analyze's cluster output. Raises ProfileError when there is none."""
    if not folder.is_dir():
        what = "is no folder: name the one that the profiler wrote" if folder.exists() else "does not exist"
        raise ProfileError(f"{folder}: {what}")
    found: list[Source] = []
    clusters: list[Path] = []
    for place in _folders(folder):
        if place.name == CLUSTER_OUTPUT or (place / "cluster_step_trace_time.csv").is_file():
            clusters.append(place)
        else:
            found += _sources_in(place)
    if not found and not clusters:
        raise ProfileError(
            f"{folder}: holds no profiler output: looked for {OUTPUT}, PROF_*, OPPROF_*, {CLUSTER_OUTPUT} and the "
            "files of MindSpore 1.x, six folders deep"
        )
    return _numbered(found), clusters


def _folders(root: Path) -> Iterator[Path]:
    """The folder and those below, without links, breadth bounded."""
    for count, (name, inner, _) in enumerate(os.walk(root)):
        place = Path(name)
        depth = len(place.relative_to(root).parts)
        inner[:] = [] if place.name.startswith("device_") else sorted(each for each in inner if each != ANALYZE)
        if depth >= MAX_DEPTH or (place / OUTPUT).is_dir():
            inner[:] = [OUTPUT] if (place / OUTPUT).is_dir() else []
        if count >= MAX_FOLDERS:
            raise ProfileError(f"{root}: holds more than {MAX_FOLDERS} folders: name the one that the profiler wrote")
        yield place


def _sources_in(place: Path) -> list[Source]:
    if place.name.startswith("device_"):
        return _old_msprof(place)
    if place.name == MSPROF_OUTPUT:
        return _msprof(place)
    own = tuple(path for name in OPPROF_FILES if (path := place / name).is_file())
    if own:
        return [Source(rank=None, writer="msprof op", folder=place, files={"kernel": own})]
    files = files_by_kind(place)
    if set(files) - {"database", "iterations"} or any(
        path.name.startswith("ascend_") for path in files.get("database", ())
    ):
        return [_framework(place, files)]
    if files.get("database") and not (place / MSPROF_OUTPUT).is_dir():
        return [Source(rank=None, writer="msprof", folder=place, files=files, stamp=_stamp(place.name))]
    return _mindspore_1(place)


def files_by_kind(place: Path) -> Files:
    """Of each kind of file the newest, with all of its slices."""
    by_name: dict[str, dict[tuple[int, ...], list[Path]]] = {}
    for path in sorted(place.iterdir()):
        if (match := _FILE.fullmatch(path.name)) and path.is_file():
            stamp = tuple(int(each) for each in match["stamp"].split("_")[1:])
            by_name.setdefault(f"{match['stem']}.{match['type']}", {}).setdefault(stamp, []).append(path)
    files = {}
    for kind, names in KINDS.items():
        name = next((each for each in names if each in by_name), None)
        if name is not None:
            files[kind] = tuple(_without_doubles(by_name[name][max(by_name[name])]))
    return files


def _without_doubles(paths: list[Path]) -> Iterator[Path]:
    """A file and the same gzipped are one."""
    names = {path.name for path in paths}
    return (path for path in paths if path.suffix != ".gz" or path.name.removesuffix(".gz") not in names)


def _framework(place: Path, files: Files) -> Source:
    """A folder of torch_npu or MindSpore: profiler_info_<rank>.json and profiler_metadata.json beside the output."""
    home = place.parent if place.name == OUTPUT else place
    rank: int | None = None
    info: Mapping[str, Any] = {}
    for path in sorted(home.glob("profiler_info*.json")):
        if match := _INFO.fullmatch(path.name):
            info = _mapping(path)
            rank = int(match[1]) if match[1] else rank
    if rank is None:
        named = _RANK_IN_NAME.search(home.name)
        databases = [re.search(r"profiler_(\d{1,6})\.db", path.name) for path in files.get("database", ())]
        given = next(filter(None, databases), None) or named
        rank = int(given[1]) if given else None
    metadata = _mapping(home / "profiler_metadata.json") if (home / "profiler_metadata.json").is_file() else {}
    is_mindspore = home.name.endswith("_ascend_ms") or "ms_version" in info or "ms_profiler_info" in info
    return Source(
        rank=rank,
        writer=OWN if OWN in info else "MindSpore" if is_mindspore else "torch_npu",
        folder=home,
        files=files,
        stamp=_stamp(home.name),
        info=info,
        metadata=metadata,
    )


def _mapping(path: Path) -> Mapping[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ProfileError(f"{path}: row 1, column 1: is no mapping of names to values")
    return value


def _stamp(name: str) -> str:
    found = _STAMP.search(name)
    return found[1] if found else ""


def _msprof(place: Path) -> list[Source]:
    """PROF_*/mindstudio_profiler_output, one source for each device folder beside it."""
    home = place.parent
    files = dict(files_by_kind(place))
    for name, kind in (("communication.json", "communication"), ("communication_matrix.json", "matrix")):
        if (home / ANALYZE / name).is_file():
            files[kind] = (home / "analyze" / name,)
    if "database" in (beside := files_by_kind(home)):
        files["database"] = beside["database"]
    if not files:
        return []
    beside_it = [path.name for path in sorted(home.glob("device_*")) if path.is_dir()]
    devices = [name.removeprefix("device_") for name in beside_it]
    return [
        Source(
            rank=_rank_of_device(home / f"device_{device}", device) if device is not None else None,
            writer="msprof",
            folder=home,
            files=files,
            device=device if len(devices) > 1 else None,
            stamp=_stamp(home.name),
        )
        for device in devices or NO_DEVICE
    ]


def _old_msprof(place: Path) -> list[Source]:
    """device_<n>/timeline and summary of 2023, with a file for each iteration."""
    device = place.name.removeprefix("device_")
    files: dict[str, tuple[Path, ...]] = {}
    wanted = {
        "trace": ("timeline", "msprof"),
        "iterations": ("timeline", "step_trace"),
        "kernels": ("summary", "op_summary"),
    }
    for kind, (folder, stem) in wanted.items():
        pattern = re.compile(rf"{stem}_\d+_\d+_\d+\.(json|csv)(\.gz)?")
        paths = [path for path in (place / folder).glob(f"{stem}_*") if pattern.fullmatch(path.name)]
        if paths:
            files[kind] = tuple(sorted(paths, key=lambda path: iteration_of(path)))
    if not files:
        return []
    stamp = _stamp(place.parent.name)
    rank = _rank_of_device(place, device)
    return [Source(rank=rank, writer="msprof, per iteration", folder=place, files=files, stamp=stamp)]


def iteration_of(path: Path) -> int:
    """`msprof_<device>_<model>_<iteration>.json` -> iteration."""
    return int(path.name.partition(".")[0].rpartition("_")[2])


def _rank_of_device(place: Path, device: str) -> int | None:
    """From info.json.<device>, where -1 is unknown; else the device's number."""
    for path in sorted(place.glob("info.json.*")):
        if path.suffix != ".done":
            rank = _mapping(path).get("rank_id")
            if isinstance(rank, int) and 0 <= rank < 10**6:
                return rank
    return int(device) if device.isdecimal() and len(device) < 7 else None


def _mindspore_1(place: Path) -> list[Source]:
    """The folder `profiler` of MindSpore 1.x holds files of several ranks."""
    by_rank: dict[int, list[Path]] = {}
    for path in sorted(place.iterdir()):
        if path.is_file() and (match := _OLD.match(path.name)):
            by_rank.setdefault(int(match[1] or match[2]), []).append(path)
    return [
        Source(rank=rank, writer="MindSpore 1.x", folder=place, files={"old": tuple(paths)})
        for rank, paths in by_rank.items()
    ]


def _numbered(found: list[Source]) -> list[Source]:
    """Of each rank the newest; sources that do not know theirs get the free numbers in order."""
    newest: dict[int, Source] = {}
    for each in found:
        if each.rank is not None and (each.rank not in newest or each.stamp > newest[each.rank].stamp):
            newest[each.rank] = each
    free = (number for number in range(len(found) + len(newest) + 1) if number not in newest)
    unknown = [replace(each, rank=next(free)) for each in found if each.rank is None]
    return sorted([*newest.values(), *unknown], key=lambda each: each.rank or 0)
