"""Does a stage's list of actions. Pure."""

from collections.abc import Callable, Iterable
from typing import Protocol

from ascend_moe_train.parallel.schedule import Action, Kind


class Work(Protocol):
    """What the actions of one stage do, each for a micro-batch and one of this stage's chunks. What is received, made
    and still needed is kept by the implementation. A send must not wait until it is received."""

    def forward(self, micro: int, chunk: int) -> None:
        """The forward pass, from the batch or from what was received."""

    def backward(self, micro: int, chunk: int) -> None:
        """The backward pass, from the loss or from what was received. If `weight` is called too, only as far as the
        gradient of the input."""

    def weight(self, micro: int, chunk: int) -> None:
        """The rest of the backward pass: the gradients of the weights."""

    def send_forward(self, micro: int, chunk: int) -> None:
        """The output of the chunk, to the next stage."""

    def recv_forward(self, micro: int, chunk: int) -> None:
        """The input of the chunk, from the previous stage."""

    def send_backward(self, micro: int, chunk: int) -> None:
        """The gradient of the chunk's input, to the previous stage."""

    def recv_backward(self, micro: int, chunk: int) -> None:
        """The gradient of the chunk's output, from the next stage."""


def run(actions: Iterable[Action], work: Work) -> None:
    """Does the actions in their order. What one of them raises ends it."""
    calls: dict[Kind, Callable[[int, int], None]] = {
        Kind.FORWARD: work.forward,
        Kind.BACKWARD: work.backward,
        Kind.WEIGHT: work.weight,
        Kind.SEND_FORWARD: work.send_forward,
        Kind.RECV_FORWARD: work.recv_forward,
        Kind.SEND_BACKWARD: work.send_backward,
        Kind.RECV_BACKWARD: work.recv_backward,
    }
    for each in actions:
        calls[each.kind](each.micro, each.chunk)
