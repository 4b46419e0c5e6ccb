"""What of a run's configuration its launch needs. Pure."""

import os

from ascend_moe_train.cluster.ascend_environment import ascend_environment
from ascend_moe_train.cluster.msrun import num_devices
from ascend_moe_train.cluster.verdict import Deadlines
from ascend_moe_train.config import RunConfig


def is_for_npus(config: RunConfig) -> bool:
    """Whether each rank is to have an NPU."""
    return config.run.device == "ascend" or (config.run.device == "auto" and num_devices() > 0)


def npu_variables(config: RunConfig) -> dict[str, str]:
    """Environment variables of ranks on NPUs, none of others. Raises ConfigError as `ascend_environment` does."""
    return dict(ascend_environment(config.ascend, os.environ)) if is_for_npus(config) else {}


def deadlines_of(config: RunConfig) -> Deadlines:
    """How long a rank may do nothing new."""
    given = config.parallel.deadlines
    return Deadlines(compile_s=given.compile_s, step_s=given.step_s, save_s=given.save_s)
