"""Which kernels a run uses."""

import logging
from pathlib import Path

from ascend_moe_train.errors import TrainingError
from ascend_moe_train.model.kernels import build
from ascend_moe_train.model.kernels.native import NativeKernels
from ascend_moe_train.model.kernels.portable import PortableKernels
from ascend_moe_train.model.kernels.protocol import Kernels

logger = logging.getLogger(__name__)


def choose(device: str, wanted: str) -> Kernels:
    """The kernels for `device` (`cpu` or `ascend`); `wanted` is `auto`, `portable` or `native`.

    `auto` takes the native ones where they can be built, and logs why when they cannot; those of Ascend, which know
    their precision, are chosen in `train.session`. Raises TrainingError when `native` is wanted and impossible.
    """
    if wanted == "portable" or (wanted == "auto" and device != "cpu"):
        return PortableKernels()
    if device != "cpu":
        raise TrainingError(f"run.kernels 'native' needs run.device 'cpu', got '{device}': use 'auto' or 'portable'")
    try:
        path: Path = build.library()
    except build.NoLibraryError as reason:
        if wanted == "native":
            raise TrainingError(f"run.kernels 'native' is not possible: {reason}; use 'auto' or 'portable'") from reason
        logger.warning("native kernels are not available, portable ones are used: %s", reason)
        return PortableKernels()
    return NativeKernels(path)
