"""Whether a run fits into the memory of this machine: without this, the system kills one that does not. Pure."""

import ctypes
from contextlib import suppress
from pathlib import Path

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import TrainingError
from ascend_moe_train.model.adapters import num_adapter_parameters
from ascend_moe_train.model.counts import num_parameters
from ascend_moe_train.units import format_bytes

_WEIGHT_BYTES = 4  # fp32
_TRAINED_BYTES = 12  # its gradient and both moments
_TOKEN_BYTES = 16  # the four int32 arrays of a batch


def least_bytes(config: RunConfig) -> int:
    """What a run holds at the least: weights, gradients, moments and one step's tokens; no activations."""
    weights = num_parameters(config.model)
    trained = weights if config.lora is None else num_adapter_parameters(config.model, config.lora)
    return _WEIGHT_BYTES * weights + _TRAINED_BYTES * trained + _TOKEN_BYTES * config.tokens_per_step


def free_bytes() -> int | None:
    """Memory that a process can still get, with swap; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kibibytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
        free = 1024 * (kibibytes["MemAvailable"] + kibibytes["SwapFree"])
    except (OSError, ValueError, LookupError):
        return None
    try:
        return min(free, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no limit is the word "max"
        return free


def check_memory(config: RunConfig) -> None:
    """Raises TrainingError for a run that cannot fit."""
    needed, free = least_bytes(config), free_bytes()
    if free is not None and needed > free:
        raise TrainingError(
            f"this run needs at least {format_bytes(needed)} of memory, {format_bytes(free)} are free: "
            f"{num_parameters(config.model):,} parameters with gradients and moments, and "
            f"{config.tokens_per_step:,} tokens per step"
        )


def give_back_free() -> None:
    """Gives the system what the C library keeps of memory that is free again, where it can do that (glibc). Compiling a
    graph leaves much of it, in pieces too small for tensors."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
