"""A compiled model that gives everything the oracles give: logits, losses, routing counts and every gradient.

Shape letters: see model/kernels/protocol.py.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from numpy.typing import NDArray

from ascend_moe_train.errors import TrainingError
from ascend_moe_train.model.config import LoraConfig, ModelConfig
from ascend_moe_train.model.kernels.constants import numbers
from ascend_moe_train.model.kernels.select import choose
from ascend_moe_train.model.lora import apply_lora
from ascend_moe_train.model.router import uniform_noise
from ascend_moe_train.model.transformer import Transformer
from tests.ascend_stand_ins import StandInKernels
from tests.oracle.differences import relative_error
from tests.oracle.transformer import Inputs, Output

Array = NDArray[Any]

KERNEL_SETS = ("portable", "native")
NO_NOISE = -1


def kernels(name: str) -> Any:
    """The kernel set, Ascend's with stand-ins for its operators, or the test is skipped where it cannot be built."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    if name == "ascend":
        return StandInKernels()
    try:
        return choose("cpu", name)
    except TrainingError as reason:
        pytest.skip(str(reason))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run gave. Losses and gradients are means over the counted targets, without the loss scale."""

    logits_BSV: Array
    total: float
    cross_entropy: float
    balance: float
    z: float
    counts_LE: Array
    dropped: int
    grads: dict[str, Array]


class _Graph(nn.Cell):
    def __init__(self, model: Transformer, trained: list[Any]) -> None:
        super().__init__()
        self.model = model
        weights = ms.ParameterTuple(trained)
        self.run = ops.value_and_grad(self.figures, None, weights, has_aux=True)

    def figures(
        self, scale: Any, tokens: Any, targets: Any, segment: Any, position: Any, weight: Any, seed: Any
    ) -> Any:
        x_TD, _, _ = self.model.hidden_states(tokens, segment, position, seed)
        total, ce, _, aux, z, counts_LE, dropped = self.model(tokens, targets, segment, position, weight, seed)
        return total * scale, total, ce, aux, z, counts_LE, dropped, self.model.logits(x_TD)

    def construct(self, *inputs: Any) -> Any:
        return self.run(*inputs)


class CompiledModel:
    """A model of `config` with the weights of `params`, with `lora` adapters among them, which then alone have
    gradients. It compiles once per shape of the batch."""

    def __init__(
        self,
        config: ModelConfig,
        kernel_set: Any,
        params: Mapping[str, Array],
        num_positions: int,
        lora: LoraConfig | None = None,
        put_in: Callable[[Transformer], None] | None = None,
    ) -> None:
        model = Transformer(config, kernel_set, num_positions)
        if put_in is not None:
            put_in(model)
        if lora is not None:
            apply_lora(model, config, lora, seed=0)
        trained = [(name, parameter) for name, parameter in model.weights() if parameter.requires_grad]
        self.names = [name for name, _ in trained]
        tensors = [*model.weights(), *model.buffers()]
        assert {name for name, _ in tensors} == set(params)
        for name, parameter in tensors:
            assert parameter.shape == params[name].shape, name
            parameter.set_data(ms.Tensor(params[name].astype(np.float32)))
        self._graph = _Graph(model, [parameter for _, parameter in trained])

    def run(self, batch: Inputs, noise_seed: int = NO_NOISE, loss_scale: float = 1.0) -> Result:
        """`batch.noise_TD` is not read: the model makes its own from `noise_seed`."""
        integers = (batch.tokens_BS, batch.targets_BS, batch.segment_BS, batch.position_BS)
        weight = np.array([1.0 / max(1, int((batch.targets_BS >= 0).sum())), 1.0], np.float32)
        figures, grads = self._graph(
            ms.Tensor(np.array([loss_scale], np.float32)),
            *(ms.Tensor(x.astype(np.int32)) for x in integers),
            ms.Tensor(weight),
            ms.Tensor(np.array([noise_seed], np.int32)),
        )
        _, total, ce, balance, z, counts_LE, dropped, logits = (x.asnumpy().copy() for x in figures)
        return Result(
            logits_BSV=logits.reshape(*batch.tokens_BS.shape, -1),
            total=float(total[0]),
            cross_entropy=float(ce[0]),
            balance=float(balance[0]),
            z=float(z[0]),
            counts_LE=counts_LE,
            dropped=int(dropped[0]),
            grads={name: g.asnumpy().copy() / loss_scale for name, g in zip(self.names, grads, strict=True)},
        )


def errors(found: Result, expected: Output, grads: Mapping[str, Array]) -> dict[str, float]:
    """Relative error of the logits, of each loss, and of each gradient, by name."""
    return {
        "logits": relative_error(found.logits_BSV, expected.logits_BSV),
        "cross_entropy": relative_error(found.cross_entropy, expected.cross_entropy),
        "balance": relative_error(found.balance, expected.balance),
        "z": relative_error(found.z, expected.z),
        "total": relative_error(found.total, expected.total),
    } | {f"d {name}": relative_error(found.grads[name], grad) for name, grad in grads.items()}


class _Noise(nn.Cell):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.rows, self.columns = shape[0], int(np.prod(shape[1:]))

    def construct(self, seed: Any, amplitude: Any) -> Any:
        return uniform_noise(numbers(self.rows), self.columns, seed, amplitude)


@cache
def _noise_graph(shape: tuple[int, ...]) -> _Noise:
    return _Noise(shape)


def uniform(shape: tuple[int, ...], seed: int, amplitude: float) -> Array:
    """`router.uniform_noise`, compiled."""
    integer, number = np.array([seed], np.int32), np.array([amplitude], np.float32)
    return _noise_graph(shape)(ms.Tensor(integer), ms.Tensor(number)).asnumpy().reshape(shape)


def moe_layers(config: ModelConfig) -> list[int]:
    """Numbers of the layers that hold experts; blocks of multi-token prediction are numbered on."""
    depth = config.mtp.depth if config.mtp is not None else 0
    return [layer for layer in range(config.num_layers + depth) if config.is_moe(layer)]


def noise(config: ModelConfig, batch: Inputs, noise_seed: int) -> dict[int, Array]:
    """The jitter of every MoE layer for the oracle."""
    if config.moe is None or config.moe.jitter == 0.0:
        return {}
    shape, jitter = (batch.tokens_BS.size, config.hidden), config.moe.jitter
    return {layer: uniform(shape, noise_seed * 8191 + layer, jitter) for layer in moe_layers(config)}
