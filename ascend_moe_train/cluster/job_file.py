"""What a launcher leaves in the folder of its run for `amt launch status`, `logs` and `stop`. Pure."""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.part import Part

JOB_FILE = "launcher.json"  # within the folder of logs
LAUNCH_LOG = "launch.log"  # beside it: what a launcher in the background prints
_MAX_BYTES = 2**20
_FORMAT_VERSION = 1
_START_FIELD = 19  # of /proc/PID/stat, counted after the name: clock ticks from the system's start to the process's


class JobFacts(Part):
    """A launcher: its process, where and since when (UTC) it runs or ran, and how it ended, if it did."""

    format_version: int
    host: str
    pid: Annotated[int, Field(gt=0)]
    started_ticks: Annotated[int, Field(ge=0)]
    since: str
    command: tuple[str, ...]
    exit_code: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether its process would be on this machine."""
        return self.host == socket.gethostname()

    @property
    def is_running(self) -> bool:
        """Whether it runs on this machine: a process of its id that was started when it was."""
        return self.exit_code is None and self.is_here and _started_ticks(self.pid) == self.started_ticks


class JobFile:
    """The file of one launcher, this process."""

    def __init__(self, log_folder: Path, command: Sequence[str]) -> None:
        self._path = log_folder / JOB_FILE
        self._facts = JobFacts(
            format_version=_FORMAT_VERSION,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ticks=_started_ticks(os.getpid()) or 0,
            since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            command=tuple(command),
        )

    def begin(self) -> None:
        """It runs. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _write(self._path, self._facts)

    def end(self, exit_code: int) -> None:
        """It has ended. Raises OSError."""
        _write(self._path, self._facts.model_copy(update={"exit_code": exit_code}))


def read_job(log_folder: Path) -> JobFacts:
    """The last launcher of a run. Raises ConfigError: there was none, or the file is none of ours."""
    path = log_folder / JOB_FILE
    try:
        with path.open("rb") as file:
            return JobFacts.model_validate_json(file.read(_MAX_BYTES + 1))
    except FileNotFoundError:
        raise ConfigError(f"{log_folder.parent}: no amt launch has run here ({path} is missing)") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(
            f"{path}: is none of amt launch ({'.'.join(map(str, first['loc']))}: {first['msg']})"
        ) from None


def ask_to_stop(job: JobFacts) -> None:
    """Has a launcher end its run as Ctrl-C does. Raises ConfigError: it does not run here."""
    if not job.is_here:
        raise ConfigError(f"the launcher runs on host {job.host}, stop it there")
    if job.is_running:
        try:
            os.kill(job.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        else:
            return
    raise ConfigError(f"the launcher (process {job.pid}) does not run any more")


def _started_ticks(pid: int) -> int | None:
    """When a process was started; None for one that is not there, or has ended and is not waited for."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[_START_FIELD - 1])


def _write(path: Path, facts: JobFacts) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(facts.model_dump(mode="json"), indent=2) + "\n")
    aside.replace(path)
