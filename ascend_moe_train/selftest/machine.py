"""The device and what is needed to use it, as MindSpore finds them."""

from typing import Any

import mindspore as ms

from ascend_moe_train.model.kernels import build
from ascend_moe_train.selftest.results import Finding
from ascend_moe_train.train.session import set_device


def looker(asked: dict[str, Any]) -> Any:
    """See worker.KINDS."""

    def look(name: str) -> Finding:
        device = set_device(asked["device"])
        return Finding(figures={"device": device, "devices": _num_devices(device), "native kernels": _native()})

    return look


def _num_devices(device: str) -> float:
    return float(ms.device_context.ascend.device_count()) if device == "ascend" else 1.0


def _native() -> str:
    """`yes`, or why C kernels cannot be built."""
    try:
        build.library()
    except build.NoLibraryError as reason:
        return str(reason)
    return "yes"
