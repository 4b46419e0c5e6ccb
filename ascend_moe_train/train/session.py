"""From a run configuration to a model on a device."""

from typing import Any

import mindspore as ms

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import TrainingError
from ascend_moe_train.model.kernels.ascend import AscendKernels
from ascend_moe_train.model.kernels.constants import DTYPES
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.kernels.rounded import RoundedKernels
from ascend_moe_train.model.kernels.select import choose
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.train.ascend_settings import apply_settings
from ascend_moe_train.train.config import AscendConfig, RunConfigPart
from ascend_moe_train.train.memory import check_memory


def set_device(wanted: str, settings: AscendConfig = AscendConfig()) -> str:  # noqa: B008  # it is frozen
    """Selects graph mode on the device that `run.device` asks for, and returns its name. On Ascend, with `settings`.

    Raises TrainingError: Ascend is asked for and not there.
    """
    has_ascend = bool(ms.hal.is_available("Ascend"))
    if wanted == "ascend" and not has_ascend:
        raise TrainingError("run.device 'ascend': MindSpore finds no Ascend device here; use 'auto' or 'cpu'")
    device = "ascend" if has_ascend and wanted != "cpu" else "cpu"
    ms.set_context(mode=ms.GRAPH_MODE)
    target = "Ascend" if device == "ascend" else "CPU"
    # once something has run on a device, MindSpore refuses to have it set, even to what it is
    if ms.get_context("device_target") != target:
        ms.set_device(target)
    if device == "ascend":
        apply_settings(settings)
    return device


def build_kernels(run: RunConfigPart, device: str) -> Kernels:
    """The kernels of a run, of its precision. Raises TrainingError for bf16 on a CPU."""
    if device == "cpu" and run.precision == "bf16":
        raise TrainingError("run.precision 'bf16': this device is 'cpu', which trains in 'fp32' or 'fp16'")
    if device == "ascend" and run.kernels == "auto":
        return AscendKernels(DTYPES[run.precision])
    kernels = choose(device, run.kernels)
    return kernels if run.precision == "fp32" else RoundedKernels(kernels, DTYPES[run.precision])


def build_model(config: RunConfig) -> tuple[Transformer, Kernels, str]:
    """The model of a run with weights still zero, its kernels, and the device's name.

    Raises TrainingError: a device that is not there, or whose memory the run cannot fit into.
    """
    device = set_device(config.run.device, config.ascend)
    if device == "cpu":
        check_memory(config)
    kernels = build_kernels(config.run, device)
    return Transformer(config.model, kernels, config.data.seq_len), kernels, device


def copy_into(parameter: Any, value: Any) -> None:
    """Fills a parameter from an array of the same shape."""
    parameter.set_data(ms.Tensor(value))
