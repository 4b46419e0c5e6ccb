"""Tensors from one pipeline stage to another, between graphs. Shape letters: see model/kernels/protocol.py."""

from collections.abc import Mapping
from typing import Any, Protocol

import mindspore as ms
import numpy as np

from ascend_moe_train.parallel.comm import Collectives, Comm, Group, Operator, Tensor
from ascend_moe_train.parallel.schedule import SENDS, Kind


class Messages(Protocol):
    """Of one shape and dtype. A send does not wait until it is received; those in a group arrive in their order."""

    def send(self, group: Group, peer: int, x_TD: Tensor) -> None:
        """To `peer`, a place in the group."""

    def recv(self, group: Group, peer: int) -> Tensor:
        """What `peer` sends."""


class HostMessages:
    """Through arrays of the host. bf16 has none in NumPy: for CPUs, whose precisions are fp32 and fp16."""

    def __init__(self, comm: Comm, shape: tuple[int, ...], dtype: Any) -> None:
        self._comm, self._shape, self._dtype = comm, shape, dtype

    def send(self, group: Group, peer: int, x_TD: Tensor) -> None:
        """See Messages."""
        self._comm.send(group, x_TD.asnumpy(), peer)

    def recv(self, group: Group, peer: int) -> Tensor:
        """See Messages."""
        return ms.Tensor.from_numpy(self._comm.recv(group, self._shape, self._dtype, peer))


class DeviceMessages:
    """By the device's own operators: nothing passes through the host. `ends` are the group and the place in it of the
    other end, by kind of message."""

    def __init__(
        self,
        collectives: Collectives,
        ends: Mapping[Kind, tuple[Group, int]],
        shape: tuple[int, ...],
        dtype: Any,
    ) -> None:
        self._calls: dict[tuple[bool, str, int], Operator] = {}
        for kind, (group, peer) in ends.items():
            if group.size > 1:
                is_send = kind in SENDS
                call = collectives.send(group, peer) if is_send else collectives.recv(group, peer, shape, dtype)
                self._calls[is_send, group.name, peer] = call
        self._token = ms.Tensor(np.zeros(1, np.float32))

    def send(self, group: Group, peer: int, x_TD: Tensor) -> None:
        """See Messages."""
        self._calls[True, group.name, peer](x_TD)

    def recv(self, group: Group, peer: int) -> Tensor:
        """See Messages."""
        return self._calls[False, group.name, peer](self._token)
