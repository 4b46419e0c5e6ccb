"""The norm of a summed gradient from sketches of its summands."""

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from ascend_moe_train.parallel.buckets import Share
from ascend_moe_train.parallel.comm import Group
from ascend_moe_train.parallel.sketch import Sketch, signs_of
from ascend_moe_train.parallel.zero_costs import SKETCH_COLUMNS

SHAPES = {"embedding": (300, 40), "projection": (128, 96), "norm": (40,)}
BUCKETS = ((0, 2), (1,))
RANKS = 4


class Sketched(nn.Cell):
    """Tensors one by one, as a tuple of them would be compiled anew each time."""

    def __init__(self, sketch: Sketch) -> None:
        super().__init__()
        self.sketch = sketch

    def construct(self, *grads: Any) -> Any:
        return self.sketch(grads)


@pytest.fixture(scope="module")
def sketch() -> Sketched:
    group = Group(name="dp_cp", ranks=tuple(range(RANKS)), index=0)
    shares = [
        Share(name=name, shape=shape, weight=1.0, gradient="dense", group=group, form="whole")
        for name, shape in SHAPES.items()
    ]
    return Sketched(Sketch(BUCKETS, shares))


def gradients(seed: int, rows: int) -> list[Any]:
    """Of which only some rows of matrices are not zero, as of an embedding."""
    rng = np.random.default_rng(seed)
    found = [rng.standard_normal(shape) for shape in SHAPES.values()]
    found[0][rows:] = 0
    return found


def sketched(sketch: Sketched, grads: list[Any]) -> Any:
    return sketch(*(ms.Tensor(each, ms.float32) for each in grads)).asnumpy()


def test_it_is_the_sum_of_rows_with_signs(sketch: Sketched) -> None:
    grads = gradients(0, 300)
    expected = np.zeros(SKETCH_COLUMNS)
    for bucket in BUCKETS:
        flat = np.concatenate([grads[i].ravel() for i in bucket])
        rows = np.pad(flat, (0, -flat.size % SKETCH_COLUMNS)).reshape(-1, SKETCH_COLUMNS)
        expected += signs_of(list(SHAPES)[bucket[0]], len(rows)) @ rows
    np.testing.assert_allclose(sketched(sketch, grads), expected, rtol=1e-5, atol=1e-4)


def test_the_sum_of_sketches_has_the_norm_of_the_sum(sketch: Sketched) -> None:
    of_squares = []
    for seed in range(60):
        ranks = [gradients(RANKS * seed + rank, 4 + seed) for rank in range(RANKS)]
        square = sum(float(np.sum(np.sum(each, 0) ** 2)) for each in zip(*ranks, strict=True))
        summed = np.sum([sketched(sketch, each) for each in ranks], 0)
        of_squares.append(float(np.sum(summed**2)) / square)
    assert np.mean(of_squares) == pytest.approx(1, abs=0.03)
    assert np.std(of_squares) < 1.5 * np.sqrt(2 / SKETCH_COLUMNS)


def test_a_number_that_is_not_finite_is_seen(sketch: Sketched) -> None:
    grads = gradients(0, 300)
    grads[1][5, 5] = np.nan
    assert np.isnan(np.sum(sketched(sketch, grads)))
