"""Section `ascend` of a run, told to MindSpore before anything is on the device."""

from functools import cache
from typing import Any

import mindspore

from ascend_moe_train.train.config import AscendConfig

GIB = 2**30


@cache  # MindSpore takes each of them once in a process, and ranks select their device before they meet and after
def apply_settings(settings: AscendConfig, ms: Any = mindspore) -> None:
    """Tells `ms`, which tests replace; the same again has no effect. What goes by environment is in
    cluster/ascend_environment.py. Raises MindSpore's RuntimeError: other settings than before in this process.
    """
    ms.set_context(jit_config={"jit_level": settings.jit_level})
    # without it MindSpore is not called: it would take away what the user has set in the environment
    if settings.deterministic:
        ms.set_deterministic(True)
    if settings.memory_limit_bytes is not None:
        ms.runtime.set_memory(max_size=f"{settings.memory_limit_bytes / GIB:.6f}GB")
    ms.device_context.ascend.op_debug.execute_timeout(settings.op_timeout_s)
    if settings.bind_cores:
        ms.runtime.set_cpu_affinity(True)
