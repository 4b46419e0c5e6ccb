"""What libraries read from the environment while MindSpore is imported. Called before that."""

import os


def prepare_environment() -> None:
    """Set what the user has not set.

    MindSpore logs errors only. OpenMP threads that wait for work sleep: if they spun, as they do by default, they would
    take the cores from MindSpore's own threads and from other processes (a step took twice as long).
    """
    os.environ.setdefault("GLOG_v", "3")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
