"""What libraries read from the environment while MindSpore is imported. Called before that."""

import os

from ascend_moe_train.errors import ConfigError

CACHE = "MS_COMPILER_CACHE_ENABLE"


def prepare_environment() -> None:
    """Set what the user has not set.

    MindSpore logs errors only. OpenMP threads that wait for work sleep: if they spun, as they do by default, they would
    take the cores from MindSpore's own threads and from other processes (a step took twice as long).

    Raises ConfigError: MindSpore's cache of compiled graphs is on. It finds a graph by how many were compiled before it
    in the process, and takes another model's for it without a word (docs/log.md, 2026-11-30).
    """
    if os.environ.get(CACHE) == "1":
        raise ConfigError(
            f"{CACHE} 1: this cache of MindSpore takes graphs of other runs for those of this one: unset it"
        )
    os.environ.setdefault("GLOG_v", "3")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
