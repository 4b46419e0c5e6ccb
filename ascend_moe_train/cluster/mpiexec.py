"""How ranks are started on this machine: mpiexec of the mpich wheel, its arguments and the environment. Pure."""

import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from ascend_moe_train.cluster import variables
from ascend_moe_train.cluster.cores import num_cores
from ascend_moe_train.errors import ConfigError

# More ranks on a core only wait for each other: MPI's processes spin.
MAX_RANKS_PER_CORE = 8
MIN_RANKS_ALLOWED = 16

PACKAGE_ROOT = Path(__file__).parents[2]
_LAUNCH = "HYDRA_LAUNCH:"
_PROXY_WORD = re.compile(r"[A-Za-z0-9._:\[\]-]+")
# What an MPI that we are started under has set for us, and would mislead the one that we start; and our own.
_FOREIGN = ("PMI_", "PMIX_", "HYDRA_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_", "MS_ROLE", "RANK_ID", "RANK_SIZE", "AMT_")


def check_ranks(ranks: int) -> None:
    """Raises ConfigError: a number of ranks that this machine cannot run."""
    cores = num_cores()
    most = max(MIN_RANKS_ALLOWED, MAX_RANKS_PER_CORE * cores)
    if not 1 <= ranks <= most:
        raise ConfigError(f"--ranks {ranks}: must be 1 to {most} on this machine, which has {cores} cores")


def find_mpiexec() -> Path:
    """The mpiexec that belongs to the running interpreter's MPI. Raises ConfigError: the extra is not installed."""
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        raise missing("mpich") from None
    if importlib.util.find_spec("mpi4py") is None:
        raise missing("mpi4py")
    places = [Path(str(file.locate())) for file in files if file.name == "mpiexec"]
    places.append(Path(sysconfig.get_path("scripts")) / "mpiexec")
    found = next((place for place in places if os.access(place, os.X_OK)), None)
    if found is None:
        raise missing(f"mpiexec of mpich ({places[0]})")
    return found.resolve()


def command_line(mpiexec: Path, ranks: int, rank_command: Sequence[str]) -> list[str]:
    """What starts all ranks: each `rank_command` below a guard of its own.

    All are on this machine, whatever a batch system or the name of the host would suggest to mpiexec.
    """
    guard = [*python(), "-m", "ascend_moe_train.cluster.guard"]
    here = ["-launcher", "fork", "-rmk", "user", "-localhost", "127.0.0.1"]
    return [str(mpiexec), *here, "-n", str(ranks), *guard, *rank_command]


def hosts_command_line(
    mpiexec: Path, address: str, slots_by_node: Sequence[int], rank_command: Sequence[str]
) -> list[str]:
    """What starts ranks on several hosts, run on one that others reach at `address`: it prints the command of a proxy
    for each host and waits for them (`proxy_words`). Ranks get the environment of their proxy, not that of mpiexec.

    The names of hosts are labels here, which nobody looks up.
    """
    guard = [*python(), "-m", "ascend_moe_train.cluster.guard"]
    labels = ",".join(f"node-{node}:{slots}" for node, slots in enumerate(slots_by_node))
    how = ["-launcher", "manual", "-rmk", "user", "-localhost", address, "-hosts", labels, "-genvnone"]
    return [str(mpiexec), *how, "-n", str(sum(slots_by_node)), *guard, *rank_command]


def proxy_words(line: str) -> list[str] | None:
    """The arguments of a proxy in a line of `hosts_command_line`'s output; None in any other."""
    mark, *words = line.split() or [""]
    return words[1:] if mark == _LAUNCH and words else None


def proxy_command(mpiexec: Path, words: Sequence[str]) -> list[str]:
    """What starts the ranks of this host. Raises ConfigError: no arguments of a proxy."""
    if not all(_PROXY_WORD.fullmatch(word) for word in words):
        raise ConfigError(f"these are no arguments of MPI's proxy: {' '.join(words)[:200]!r}")
    return [str(mpiexec.with_name("hydra_pmi_proxy")), *words]


def python() -> list[str]:
    """The running interpreter, with nothing imported from the working directory."""
    return [sys.executable, "-P"]


def rank_command(module: str, arguments: Sequence[str]) -> list[str]:
    """What a rank runs: a module.

    Not below mpi4py's runner, which aborts MPI at an exception: mpiexec then kills all ranks before anybody can see
    which of them it was.
    """
    return [*python(), "-m", module, *arguments]


def rank_environment(ranks: int, given: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of every rank: the one given, threads that share the cores, and `extra`.

    What the user has set of these stays. Threads that wait sleep: with several ranks there is always work for the core.
    MindSpore's memory comes in huge pages, as NumPy's does: sums and gathers of 16 MB in a graph then take up to a
    third less time (`python -m benchmarks collectives`, and the same with `GLIBC_TUNABLES=`).
    """
    chosen = {
        "OMP_NUM_THREADS": str(max(1, num_cores() // ranks)),
        "OMP_WAIT_POLICY": "passive",
        "GLOG_v": "3",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "PYTHONUNBUFFERED": "1",
    }
    kept = {name: value for name, value in given.items() if not name.startswith(_FOREIGN)}
    environment = {**chosen, **kept, variables.RANKS: str(ranks), **extra}
    if not is_installed():
        paths = [str(PACKAGE_ROOT), *filter(None, [kept.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def is_installed() -> bool:
    """Whether this package is where the interpreter finds it by itself, and not a working copy."""
    return PACKAGE_ROOT in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}


def missing(what: str) -> ConfigError:
    """That of an installation without the extra."""
    return ConfigError(f"{what} is not installed: ranks need the extra: pip install 'ascend-moe-train[train]'")
