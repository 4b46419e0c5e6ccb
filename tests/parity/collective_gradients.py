"""Collectives with gradients, and their order, in graphs on one rank."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.parallel import autodiff
from ascend_moe_train.parallel.comm import Array, Collectives, Comm, Group, Operator, RecordingComm, Tensor
from ascend_moe_train.parallel.host_ops import HostOps

NUM_CALLS = 6
N, D = 4, 3
# rows that each rank (first) sends to each (second): some none, one rank nothing at all
COUNTS = (3 * np.indices((8, 8))[0] + 2 * np.indices((8, 8))[1] + 1) % 4 * (np.arange(8)[:, None] != 1)
ROWS = 20
# port -> (whether the input, and the gradient that comes back, are the same on all ranks of a group)
REPLICATED = {
    "copy": (True, False),
    "reduce": (False, True),
    "split": (True, False),
    "gather": (False, True),
    "gather_sum": (False, False),
    "scatter_sum": (False, False),
    "exchange": (False, False),
    "exchange_rows": (False, False),
}


def counts_of(size: int) -> Array:
    """Of a group."""
    return COUNTS[:size, :size]


def input_rows(port: str, size: int) -> int:
    """Rows of the port's input."""
    return {"split": N * size, "scatter_sum": N * size, "exchange": N * size, "exchange_rows": ROWS}.get(port, N)


def output_rows(port: str, size: int) -> int:
    """Rows of the port's output."""
    return {"gather": N * size, "gather_sum": N * size, "exchange": N * size, "exchange_rows": ROWS}.get(port, N)


def values_of(port: str, group: Group) -> tuple[Array, Array]:
    """The port's input, and the gradient of its output."""
    x_is_same, w_is_same = REPLICATED[port]
    values = []
    for which, is_same, rows in ((0, x_is_same, input_rows), (1, w_is_same, output_rows)):
        generator = np.random.default_rng([which, len(port), 99 if is_same else group.ranks[group.index]])
        values.append(generator.standard_normal((rows(port, group.size), D)).astype(np.float32))
    return values[0], values[1]


class _Adjoint(nn.Cell):
    """(x, w) -> (A x, A' w)."""

    def __init__(self, port: Operator, counts: tuple[Array, ...]) -> None:
        super().__init__()
        self.port = port
        self.counts = tuple(ms.Tensor(each.astype(np.int32)) for each in counts)
        self.gradient = ops.GradOperation(sens_param=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.port(x, self.counts[0], self.counts[1]) if self.counts else self.port(x)

    def construct(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)
        return y, self.gradient(self.forward)(ops.depend(x, y), w)


class _All(nn.Cell):
    """One after the other."""

    def __init__(self, adjoints: list[_Adjoint]) -> None:
        super().__init__()
        self.adjoints = nn.CellList(adjoints)

    def construct(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = []
        last = inputs[0]
        for index, adjoint in enumerate(self.adjoints):
            y, last = adjoint(ops.depend(inputs[2 * index], last), inputs[2 * index + 1])
            results += [y, last]
        return tuple(results)


def gradient_results(collectives: Collectives, group: Group) -> dict[str, dict[str, Array]]:
    """Of each port: x, w, y = A x, dx = A' w."""
    inputs: list[Array] = []
    adjoints: list[_Adjoint] = []
    for port in REPLICATED:
        inputs += values_of(port, group)
        make: Callable[..., Operator] = getattr(autodiff, port)
        counts = counts_of(group.size)
        if port == "exchange_rows":
            adjoints.append(
                _Adjoint(make(collectives, group, ROWS, ROWS), (counts[group.index], counts[:, group.index]))
            )
        else:
            adjoints.append(_Adjoint(make(collectives, group), ()))
    ms.set_context(mode=ms.GRAPH_MODE)
    outputs = [each.asnumpy() for each in _All(adjoints)(*map(ms.Tensor, inputs))]
    return {
        port: {"x": inputs[2 * i], "w": inputs[2 * i + 1], "y": outputs[2 * i], "dx": outputs[2 * i + 1]}
        for i, port in enumerate(REPLICATED)
    }


class Branches(nn.Cell):
    """Three branches with collectives in both directions, which only `in_order` puts in series."""

    def __init__(self, collectives: Collectives, groups: tuple[Group, Group, Group], in_order: Operator) -> None:
        super().__init__()
        self.first, self.second, self.third = (autodiff.gather_sum(collectives, group) for group in groups)
        self.dead = collectives.all_reduce(groups[0], "max")
        self.in_order = in_order

    def construct(self, x: Tensor) -> Tensor:
        a = self.first(x)
        a, to_second = self.in_order(a, x)
        b = self.second(to_second)
        b, to_third = self.in_order(b, x)
        c = self.third(to_third)
        self.dead(x)
        return a.sum() * b.sum() * c.sum()


class _Gradient(nn.Cell):
    def __init__(self, net: nn.Cell) -> None:
        super().__init__()
        self.net = net
        self.run = ops.value_and_grad(net)

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(x)


def unordered(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """What a port must not be."""
    return first, second


def recorded_orders(comm: RecordingComm, groups: tuple[Group, Group, Group], in_order: Operator) -> list[list[str]]:
    """The collectives of some calls of `Branches` and its gradient: verb and group."""
    ms.set_context(mode=ms.GRAPH_MODE)
    net = _Gradient(Branches(HostOps(comm), groups, in_order))
    orders = []
    for call in range(NUM_CALLS):
        comm.calls.clear()
        net(ms.Tensor(np.full((N, D), call, np.float32)))[1].asnumpy()
        orders.append([f"{each.verb} {each.group}" for each in comm.calls])
    return orders


def results(inner: Comm) -> dict[str, Any]:
    """Gradients in the world and in its halves, and orders."""
    comm = RecordingComm(inner)
    n = comm.world.size
    middle = comm.split("half", [tuple(range(n // 2)), tuple(range(n // 2, n))]) if n > 1 else comm.world
    pairs = comm.split("other", [tuple(range(0, n, 2)), tuple(range(1, n, 2))]) if n > 1 else comm.world
    collectives = HostOps(comm)
    found = {name: gradient_results(collectives, group) for name, group in (("world", comm.world), ("half", middle))}
    groups = (comm.world, middle, pairs) if n > 2 else (comm.world,) * 3
    return {
        "gradients": found,
        "orders": recorded_orders(comm, groups, autodiff.InOrder()),
        "groups": {"world": comm.world.ranks, "half": middle.ranks},
    }


def mpi(argument: Any) -> dict[str, Any]:
    """On an MPI rank."""
    from ascend_moe_train.parallel.mpi import MpiComm

    return results(MpiComm())
