"""What a report says about a run beyond its metrics: size of the model, peak of the device, versions. Pure."""

import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ascend_moe_train.cluster.cores import num_cores
from ascend_moe_train.errors import MetricsError
from ascend_moe_train.train.metrics import first_problem, replace_file

FILE_NAME = "run.json"
MAX_BYTES = 2**20
PACKAGES = ("ascend-moe-train", "mindspore", "numpy", "mpi4py", "tokenizers", "safetensors", "pydantic")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts that hold for a whole run. `flops_per_token` counts forward and backward; an unknown peak is None."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    total_steps: int
    parameters: int
    active_parameters: int
    flops_per_token: float
    peak_flops_per_s: float | None
    peak_source: str
    versions: dict[str, str]


_RUN_INFO = TypeAdapter(RunInfo)


def versions() -> dict[str, str]:
    """Versions of the packages that matter and of the machine below them; packages that are not there are left out."""
    found = {"python": platform.python_version(), "system": platform.platform(), "processor": processor()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_run_info(run_dir: Path, info: RunInfo) -> None:
    """Writes `run.json` into the run's folder, whole or not at all. Raises MetricsError."""
    replace_file(run_dir / FILE_NAME, [_RUN_INFO.dump_json(info, indent=1)])


def read_run_info(run_dir: Path) -> RunInfo | None:
    """What `run.json` says; None without the file. Raises MetricsError naming file and field."""
    path = run_dir / FILE_NAME
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MetricsError(f"{path}: {error.strerror or error}") from None
    if len(text) > MAX_BYTES:
        raise MetricsError(f"{path}: longer than {MAX_BYTES} bytes")
    try:
        return _RUN_INFO.validate_json(text)
    except ValidationError as error:
        raise MetricsError(f"{path}: {first_problem(error)}") from None


def processor() -> str:
    """Model name and number of usable cores."""
    name = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            name = value.strip()
            break
    return f"{name}, {num_cores()} cores"
