"""What happens to gradients between the backward pass and the update. Shape letters: P parameters (tensors)."""

from typing import Any, Protocol

Tensor = Any


class Reduction(Protocol):
    """Called inside graphs; `grads` are in the order of the optimizer's weights, or of what stands for them."""

    def of_micro(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What of a micro-batch's gradients is summed."""

    def of_step(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the optimizer is given, from the sums."""

    def counted(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What of these counts in norms: no element that another process counts."""

    def across(self, figures: Tensor, square_P: Tensor, grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Figures (5,) of the whole step, and the squared norms of whole gradients of all tensors, from those of what
        `counted` returns of `grads`.

        The figures are cross entropy, that of multi-token prediction, load-balancing and z loss, dropped assignments.
        """

    def publish(self, done: Tensor) -> Tensor:
        """Brings updated weights to where the model reads them, once the update `done` is over."""


class LocalReduction:
    """Everything is here already."""

    def of_micro(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As they are."""
        return grads

    def of_step(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As they are."""
        return grads

    def counted(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """All of them."""
        return grads

    def across(self, figures: Tensor, square_P: Tensor, grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """As they are."""
        return figures, square_P

    def publish(self, done: Tensor) -> Tensor:
        """Nothing to do."""
        return done
