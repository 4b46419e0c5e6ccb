"""How ranks are started on this machine by MindSpore's msrun: its arguments and the environment. Pure.

msrun starts each rank's guard (see `guard`) with the first `python` on PATH, and one process more, the scheduler, by
which ranks find each other. It has no hostfile: on several hosts it is started on each.
"""

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ascend_moe_train.cluster.mpiexec import missing, python
from ascend_moe_train.errors import ConfigError

MASTER = "127.0.0.1"
_MODULE = "mindspore.parallel.cluster.run"
_DEVICES = Path("/dev")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One host of several: its number, how many ranks all have together, and the address of the first."""

    number: int
    world: int
    master: str


def num_devices() -> int:
    """NPUs of this host that the driver shows."""
    return sum(entry.name.removeprefix("davinci").isdigit() for entry in _DEVICES.glob("davinci[0-9]*"))


def check_devices(ranks: int, found: int) -> None:
    """Raises ConfigError: more ranks than NPUs."""
    if not 1 <= ranks <= found:
        raise ConfigError(f"--ranks {ranks}: this host has {found} NPUs (/dev/davinci*), and each rank needs one")


def command_line(
    ranks: int, program: Sequence[str], *, log_folder: Path, port: int, meet_s: int, node: Node | None = None
) -> list[str]:
    """What starts a program on all ranks of this host: a script for `python`, or that word and what it is to run.

    Without a `node` it is the only host. `meet_s` is how long ranks wait for each other. Each rank has its number in
    RANK_ID; what rank i prints goes to worker_i.log in `log_folder`. Raises ConfigError: MindSpore is not installed.
    """
    if importlib.util.find_spec("mindspore") is None:
        raise missing("mindspore")
    options = {
        "worker_num": ranks if node is None else node.world,
        "local_worker_num": ranks,
        "master_addr": MASTER if node is None else node.master,
        "master_port": port,
        **({} if node is None else {"node_rank": node.number}),
        "log_dir": log_folder,
        "join": True,
        "cluster_time_out": meet_s,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    return [*python(), "-m", _MODULE, *words, *program]


def guarded(rank_command: Sequence[str]) -> list[str]:
    """The program that runs a rank below a guard of its own."""
    # by this name: msrun takes any other for a script
    return ["python", "-P", "-m", "ascend_moe_train.cluster.guard", *rank_command]


def path_variable(given: Mapping[str, str]) -> str:
    """PATH on which `python` is the running interpreter. Raises ConfigError: it has not that name."""
    folder = Path(sys.executable).parent
    path = os.pathsep.join([str(folder), *filter(None, [given.get("PATH")])])
    found = shutil.which("python", path=path)
    if found is None or not Path(found).samefile(sys.executable):
        raise ConfigError(f"msrun needs '{folder / 'python'}', which is not there: make it a link to {sys.executable}")
    return path


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind((MASTER, 0))
        return int(probe.getsockname()[1])
