"""A rank's side of the launcher: where the trainer and the communication layer say what they are at. Pure."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol

from ascend_moe_train.cluster import variables
from ascend_moe_train.cluster.board import MAX_SLOTS, Phase, Slot
from ascend_moe_train.errors import ConfigError

_SHARED_MEMORY = "/dev/shm/mpich_shm_"
_SHARED_MEMORY_IN_USE = Path("/proc/self/fd")


class Progress(Protocol):
    """`Slot` under a launcher, `Unwatched` without one."""

    def phase(self, name: Phase, step: int | None = None) -> None:
        """The rank begins something; `step` counts from 1, is 0 before the first, and stays as it is if None."""

    def enter(self, verb: str, group: str, sequence: int) -> None:
        """The rank comes to a collective, where it may have to wait."""

    def leave(self) -> None:
        """The rank has left the collective."""

    def fail(self, line: str, *, is_user_error: bool) -> None:
        """The rank gives up, for the reason that `line` says."""


class Unwatched:
    """What a process that nobody watches tells its whereabouts to."""

    def phase(self, name: Phase, step: int | None = None) -> None:
        """Nothing."""

    def enter(self, verb: str, group: str, sequence: int) -> None:
        """Nothing."""

    def leave(self) -> None:
        """Nothing."""

    def fail(self, line: str, *, is_user_error: bool) -> None:
        """Nothing."""


@cache
def progress() -> Progress:
    """The one place where this process says what it is at. Raises ConfigError as `progress_from` does."""
    return progress_from(os.environ)


def progress_from(environment: Mapping[str, str]) -> Progress:
    """The slot that the launcher's variables name. Raises ConfigError: they name none."""
    board = environment.get(variables.BOARD)
    if board is None:
        return Unwatched()
    rank = environment.get(variables.RANK, "")
    if not (rank.isascii() and rank.isdecimal()) or len(rank) > len(str(MAX_SLOTS)):
        raise ConfigError(f"{variables.RANK} '{rank}': must be the number of a rank; it is set by 'amt launch'")
    first = environment.get(variables.FIRST_RANK, "0")
    if not (first.isascii() and first.isdecimal()) or len(first) > len(str(MAX_SLOTS)) or int(first) > int(rank):
        raise ConfigError(f"{variables.FIRST_RANK} '{first}': must be a rank up to {rank}; it is set by 'amt launch'")
    return Slot.open(Path(board), int(rank) - int(first))


def run_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """The name of this start, the same on every rank; None without a launcher."""
    return environment.get(variables.RUN_ID)


def started_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """When the launcher was started, in seconds since 1970; None without one. Raises ConfigError: no such number."""
    given = environment.get(variables.STARTED)
    try:
        found = None if given is None else float(given)
    except ValueError:
        found = math.nan
    if found is not None and not math.isfinite(found):
        raise ConfigError(f"{variables.STARTED} '{given}': must be seconds since 1970; it is set by 'amt launch'")
    return found


def is_by_msrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the ranks meet by MindSpore's own means rather than by MPI."""
    return environment.get(variables.STARTER) == "msrun"


def unlink_shared_memory() -> None:
    """Takes the name of MPI's shared memory away once all ranks of this machine have it open (after a barrier).

    It then goes away with the last rank, however that ends. MPICH itself removes it only at a regular end, and what it
    leaves in /dev/shm (megabytes each time) takes memory until the machine starts anew.
    """
    for entry in _SHARED_MEMORY_IN_USE.iterdir():
        with suppress(OSError):  # closed meanwhile, or another rank was first
            target = entry.readlink()
            if str(target).startswith(_SHARED_MEMORY):
                target.unlink()
