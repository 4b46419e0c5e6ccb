"""Options that say which hosts a job has."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ascend_moe_train.cluster.hostfile import Hosts

SYSTEMS = ("auto", "slurm", "kubernetes", "modelarts")


def host_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--hostfile, --hosts-from and --slots."""
    function = click.option("--slots", type=int, help="With --hosts-from: NPUs, or ranks, of each host.")(function)
    function = click.option(
        "--hosts-from",
        type=click.Choice(SYSTEMS),
        help="Take the hosts that this batch system names in the environment; auto takes the first that does.",
    )(function)
    return click.option("--hostfile", type=click.Path(path_type=Path), help="The hosts, one line each.")(function)


def hosts_of(hostfile: Path | None, hosts_from: str | None, slots: int | None) -> "Hosts":
    """The hosts of these options. Raises ConfigError: neither or both are given, or what reading them raises."""
    from ascend_moe_train.cluster.hostfile import read_hostfile
    from ascend_moe_train.cluster.hosts_environment import hosts_from as named_by
    from ascend_moe_train.errors import ConfigError

    if (hostfile is None) == (hosts_from is None):
        raise ConfigError("give --hostfile FILE, or --hosts-from slurm, kubernetes, modelarts or auto")
    if hostfile is None:
        return named_by(None if hosts_from == "auto" else hosts_from, slots=slots)
    if slots is not None:
        raise ConfigError(f"--slots {slots}: a hostfile has slots= in each line")
    return read_hostfile(hostfile)
