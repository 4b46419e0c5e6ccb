"""What a rank holds of a tensor that is saved, between its parameter and the boxes of a checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.boxes import Box
from ascend_moe_train.checkpoint.portion import Piece, Portion
from ascend_moe_train.parallel.shards import Placement, box_view, boxes, owned
from ascend_moe_train.train.session import copy_into

Array = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Elements [start, stop) of the rank's local tensor, in row-major order; the parameter may end with zeros."""

    name: str
    parameter: Any
    placement: Placement
    start: int
    stop: int

    @property
    def boxes(self) -> list[Box]:
        """Where they are in the whole tensor."""
        return [box.ranges for box in boxes(self.placement, self.start, self.stop)]

    def fill_from_boxes(self, arrays: Sequence[Array]) -> None:
        """Fills the parameter from what is in `boxes`."""
        flat = np.zeros(self.stop - self.start, np.float32)
        for box, array in zip(boxes(self.placement, self.start, self.stop), arrays, strict=True):
            box_view(flat, self.start, box, self.placement)[...] = array
        self._fill(flat)

    def portion(self) -> Portion:
        """Copies of what this rank answers for."""
        # asnumpy is the parameter's own memory, which later steps change
        flat = self.parameter.asnumpy().reshape(-1)
        pieces = (Piece(box.ranges, np.array(self._view(flat, box))) for box in owned(self.placement))
        return Portion(self.placement.shape, tuple(pieces))

    def like(self, name: str, parameter: Any) -> "Held":
        """The same elements of another tensor of the same shape."""
        return Held(name=name, parameter=parameter, placement=self.placement, start=self.start, stop=self.stop)

    def _view(self, flat: Array, box: Any) -> Array:
        return box_view(flat, self.start, box, self.placement)

    def _fill(self, flat: Array) -> None:
        value = np.zeros(self.parameter.size, np.float32)
        value[: flat.size] = flat
        copy_into(self.parameter, value.reshape(self.parameter.shape))


def renamed(prefix: str, held: Sequence[Held]) -> Iterator[Held]:
    """Under the names of a checkpoint."""
    return (each.like(prefix + each.name, each.parameter) for each in held)
