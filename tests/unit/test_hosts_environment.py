"""Hosts that a batch system names."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from ascend_moe_train.cluster.hosts_environment import SYSTEMS, hosts_from
from ascend_moe_train.errors import ConfigError

SLURM = {"SLURM_JOB_NODELIST": "n[01-02,04],login,r[1-2]x[1-2]", "SLURM_NTASKS_PER_NODE": "8"}
SLURM_NAMES = ["n01", "n02", "n04", "login", "r1x1", "r1x2", "r2x1", "r2x2"]
VOLCANO = {"VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job", "MS_LOCAL_WORKER": "8"}
VOLCANO_NAMES = ["job-worker-0.job", "job-worker-1.job"]


def complaint(given: Mapping[str, str], system: str | None = None, slots: int | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        hosts_from(system, given, slots=slots)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 400
    return str(raised.value)


@pytest.mark.parametrize(
    ("given", "names", "slots"),
    [
        (SLURM, SLURM_NAMES, 8),
        (SLURM | {"SLURM_GPUS_PER_NODE": "npu:4"}, SLURM_NAMES, 4),
        ({"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "16(x2)"}, ["a", "b"], 16),
        (VOLCANO, VOLCANO_NAMES, 8),
        (
            {"VC_MASTER_HOSTS": "j-master-0.j", "VC_WORKER_HOSTS": "j-worker-0.j", "LOCAL_WORLD_SIZE": "8"},
            ["j-master-0.j", "j-worker-0.j"],
            8,
        ),
        (
            {"MASTER_ADDR": "job-master-0", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "8"},
            ["job-master-0", "job-worker-0", "job-worker-1"],
            8,
        ),
        (
            {"PET_MASTER_ADDR": "job-node-0-0.job", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"},
            ["job-node-0-0.job", "job-node-0-1.job"],
            4,
        ),
        (VOLCANO | {"MA_NUM_GPUS": "4", "MA_VJ_NAME": "job"}, VOLCANO_NAMES, 4),
        (
            {"MA_VJ_NAME": "job", "MA_TASK_NAME": "worker", "MA_NUM_HOSTS": "2", "MA_NUM_GPUS": "8"},
            VOLCANO_NAMES,
            8,
        ),
    ],
)
def test_batch_systems_are_read(given: dict[str, str], names: list[str], slots: int) -> None:
    hosts = hosts_from(None, given)
    assert [host.name for host in hosts] == names
    assert [host.address for host in hosts] == names
    assert hosts.slots == slots
    assert hosts_from(None, given, slots=2).slots == 2


def test_an_mpijob_has_a_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("job-worker-0.job slots=8\njob-worker-1.job slots=8\n")
    assert [
        host.name for host in hosts_from("kubernetes", {"OMPI_MCA_orte_default_hostfile": str(file)})
    ] == VOLCANO_NAMES


def test_only_the_system_that_is_named_is_asked() -> None:
    assert [host.name for host in hosts_from("kubernetes", SLURM | VOLCANO)] == VOLCANO_NAMES
    assert "none of SLURM_JOB_NODELIST names them" in complaint(VOLCANO, "slurm")
    assert set(SYSTEMS) == {"slurm", "kubernetes", "modelarts"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "no hosts in the environment"),
        ({"SLURM_JOB_NODELIST": "a"}, "give --slots"),
        ({"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "8,4"}, "SLURM_TASKS_PER_NODE '8,4': must be one"),
        ({"SLURM_JOB_NODELIST": "a", "SLURM_NTASKS_PER_NODE": "0"}, "slots=0 is not allowed"),
        (SLURM | {"SLURM_JOB_NODELIST": "ok,$(reboot)"}, "SLURM_JOB_NODELIST, column 4: '$(reboot)' is no host"),
        (SLURM | {"SLURM_JOB_NODELIST": "a;rm -rf /"}, "is no host"),
        (SLURM | {"SLURM_JOB_NODELIST": "-oProxyCommand=x"}, "is no host"),
        (SLURM | {"SLURM_JOB_NODELIST": "a\nb"}, "'a\\nb' is no host"),
        (SLURM | {"SLURM_JOB_NODELIST": "a[1-"}, "'[' without ']'"),
        (SLURM | {"SLURM_JOB_NODELIST": "a[1-9999999]"}, "16,384 at most"),
        (
            SLURM | {"SLURM_JOB_NODELIST": "a[1-9999],b[1-9999]"},
            "column 11: 'b[1-9999]' are 9,999 hosts: 6,385 at most",
        ),
        (SLURM | {"SLURM_JOB_NODELIST": "a,b,a"}, "'a' is there twice"),
        (SLURM | {"SLURM_JOB_NODELIST": "a,localhost"}, "loopback"),
        (VOLCANO | {"VC_WORKER_HOSTS": "a,`id`"}, "VC_WORKER_HOSTS, column 3: '`id`' is no host"),
        ({"MASTER_ADDR": "x-master-0", "PET_NNODES": "1e9", "PET_NPROC_PER_NODE": "8"}, "PET_NNODES=1e9"),
        ({"MASTER_ADDR": "$(x)-master-0", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}, "is no host"),
        ({"MASTER_ADDR": "10.0.0.1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}, "no hosts in the environment"),
        (
            {"MA_VJ_NAME": "a;b", "MA_TASK_NAME": "w", "MA_NUM_HOSTS": "2", "MA_NUM_GPUS": "8"},
            "MA_VJ_NAME, column 1: 'a;b-w-0.a;b' is no host",
        ),
        ({"OMPI_MCA_orte_default_hostfile": "/nowhere/hosts"}, "/nowhere/hosts: there is no such hostfile"),
    ],
)
def test_environments_that_cannot_be_used(given: dict[str, str], words: str) -> None:
    assert words in complaint(given)


def test_the_option_is_checked() -> None:
    assert "slots=0 is not allowed" in complaint(SLURM, slots=0)
