"""The hosts of a job from what a batch system put into the environment: Slurm, Kubernetes, ModelArts. Pure."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from ascend_moe_train.cluster.host_words import MAX_HOSTS, Place, expand, shown, whole_of
from ascend_moe_train.cluster.hostfile import MAX_BYTES, MAX_SLOTS, Hosts, hosts_of_names, read_hostfile
from ascend_moe_train.errors import ConfigError

NODE_LIST = "SLURM_JOB_NODELIST"
VOLCANO_HOSTS = ("VC_MASTER_HOSTS", "VC_WORKER_HOSTS")  # of Volcano's svc plugin, on ModelArts as well
MPI_HOSTFILE = "OMPI_MCA_orte_default_hostfile"  # of Kubeflow's MPIJob
TORCH_MASTER = ("PET_MASTER_ADDR", "MASTER_ADDR")  # of Kubeflow's PyTorchJob and TrainJob
TORCH_NODES = "PET_NNODES"
MODELARTS_JOB = ("MA_VJ_NAME", "MA_TASK_NAME", "MA_NUM_HOSTS")

# Where the number of NPUs, or of ranks, of each host is found, in this order.
_SLOTS = {
    "slurm": ("SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    "kubernetes": ("MS_LOCAL_WORKER", "LOCAL_WORLD_SIZE", "PET_NPROC_PER_NODE"),
    "modelarts": ("MA_NUM_GPUS",),
}
_PER_NODE = re.compile(r"(?:[A-Za-z0-9_]+:)*([0-9]{1,9})(?:\(x[0-9]{1,9}\))?", re.ASCII)  # 8, npu:8, 8(x4)
_NUMBERED_MASTER = re.compile(r"(?P<before>.*)(?P<kind>master-0|node-0-0)(?P<after>(\..*)?)", re.ASCII)


def hosts_from(system: str | None = None, given: Mapping[str, str] = os.environ, *, slots: int | None = None) -> Hosts:
    """The hosts that a batch system, or the first of SYSTEMS whose variables are there, has given to this job.

    `slots` comes before what the environment says of it. Raises ConfigError: there are none, or they cannot be used.
    """
    if slots is not None:
        whole_of(str(slots), Place(source="--slots"), "slots", 1, MAX_SLOTS)
    for each in (system,) if system else SYSTEMS:
        if (found := SYSTEMS[each](given, slots)) is not None:
            return found
    looked = [NODE_LIST] if system == "slurm" else [*VOLCANO_HOSTS, MPI_HOSTFILE, *TORCH_MASTER, *MODELARTS_JOB]
    if system is None:
        looked.insert(0, NODE_LIST)
    raise ConfigError(f"no hosts in the environment: none of {', '.join(looked)} names them; give --hostfile")


def _slurm(given: Mapping[str, str], slots: int | None) -> Hosts | None:
    if not (text := given.get(NODE_LIST)):
        return None
    names: list[tuple[str, Place]] = []
    for word, place in _listed(text, NODE_LIST):
        names += [(each, place) for each in expand(word, place, MAX_HOSTS - len(names))]
    return hosts_of_names(names, slots or _slots("slurm", given), NODE_LIST)


def _kubernetes(given: Mapping[str, str], slots: int | None) -> Hosts | None:
    names = [each for variable in VOLCANO_HOSTS for each in _listed(given.get(variable, ""), variable)]
    if names:
        return hosts_of_names(names, slots or _slots("kubernetes", given), VOLCANO_HOSTS[1])
    if path := given.get(MPI_HOSTFILE):
        return read_hostfile(Path(path))
    for variable in TORCH_MASTER:
        match = _NUMBERED_MASTER.fullmatch(given.get(variable, ""))
        if match is None or TORCH_NODES not in given:
            continue
        num_hosts = whole_of(given[TORCH_NODES], Place(source=TORCH_NODES), TORCH_NODES, 1, MAX_HOSTS)
        # a PyTorchJob has a master and workers beside it, a TrainJob has nodes of one kind
        kinds = ["master-0", *(f"worker-{number}" for number in range(num_hosts - 1))]
        if match["kind"] == "node-0-0":
            kinds = [f"node-0-{number}" for number in range(num_hosts)]
        place = Place(source=variable)
        return hosts_of_names(
            [(f"{match['before']}{kind}{match['after']}", place) for kind in kinds],
            slots or _slots("kubernetes", given),
            variable,
        )
    return None


def _modelarts(given: Mapping[str, str], slots: int | None) -> Hosts | None:
    if not any(name.startswith("MA_") for name in given):
        return None
    own_slots = slots or _slots("modelarts", given)
    if any(given.get(name) for name in VOLCANO_HOSTS):
        return _kubernetes(given, own_slots)
    job, task, number = map(given.get, MODELARTS_JOB)
    if not (job and task and number):
        return None
    num_hosts = whole_of(number, Place(source=MODELARTS_JOB[2]), MODELARTS_JOB[2], 1, MAX_HOSTS)
    place = Place(source=MODELARTS_JOB[0])
    return hosts_of_names(
        [(f"{job}-{task}-{each}.{job}", place) for each in range(num_hosts)], own_slots, str(place.source)
    )


SYSTEMS: Mapping[str, Callable[[Mapping[str, str], int | None], Hosts | None]] = MappingProxyType(
    {"slurm": _slurm, "modelarts": _modelarts, "kubernetes": _kubernetes}
)


def _slots(system: str, given: Mapping[str, str]) -> int:
    """Raises ConfigError: no variable says it, one says it differently for some hosts, or no number."""
    for name in _SLOTS[system]:
        if not (text := given.get(name)) or text == "auto":
            continue
        match = _PER_NODE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{name} {shown(text)}: must be one whole number for all hosts; give --slots")
        return whole_of(match[1], Place(source=name), "slots", 1, MAX_SLOTS)
    raise ConfigError(f"none of {', '.join(_SLOTS[system])} says how many NPUs a host has: give --slots, such as 8")


def _listed(text: str, variable: str) -> Iterator[tuple[str, Place]]:
    """Words between the commas that stand outside of brackets. Raises ConfigError: too long."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{variable}: longer than {MAX_BYTES:,} characters, which no list of hosts is")
    start = depth = 0
    for index, character in enumerate(f"{text},"):
        depth += (character == "[") - (character == "]")
        if character == "," and (depth == 0 or index == len(text)):
            if word := text[start:index].strip(" "):
                yield word, Place(source=variable, column=start + 1)
            start = index + 1
