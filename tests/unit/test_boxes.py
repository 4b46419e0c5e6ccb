"""Boxes against brute force: cutting, flat ranges, intersection, and whether boxes cover a tensor just once."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_moe_train import boxes
from ascend_moe_train.boxes import Box
from tests.many_writers import cut_at_random

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes_within(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in bounds)


def numbers(shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Each element's number in row-major order."""
    return np.arange(prod(shape)).reshape(shape)


def elements(box: Box, shape: tuple[int, ...]) -> list[int]:
    return boxes.view(numbers(shape), box, boxes.whole(shape)).ravel().tolist()


@given(st.data())
def test_intersection(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    one, other = data.draw(boxes_within(shape)), data.draw(boxes_within(shape))
    common = boxes.intersection(one, other)
    expected = set(elements(one, shape)) & set(elements(other, shape))
    assert (set() if common is None else set(elements(common, shape))) == expected
    assert common is None or boxes.volume(common) == len(expected) > 0


@given(st.data())
def test_cut_keeps_the_order(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    box, most = data.draw(boxes_within(shape)), data.draw(st.integers(1, 40))
    pieces = list(boxes.cut(box, most))
    assert [number for piece in pieces for number in elements(piece, shape)] == elements(box, shape)
    assert all(boxes.volume(piece) <= most for piece in pieces)
    # two neighbours could only be one piece if that were too large, or no box
    assert len(pieces) <= max(1, 2 * boxes.volume(box) // most + prod(stop - start for start, stop in box[:-1]))


@given(st.data())
def test_flat_boxes(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    found = list(boxes.flat_boxes(shape, start, stop))
    assert [number for box in found for number in elements(box, shape)] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(boxes.volume(box) for box in found)


def brute_force_covers(shape: tuple[int, ...], given_boxes: list[Box]) -> bool:
    times = np.zeros(shape, int)
    for box in given_boxes:
        boxes.view(times, box, boxes.whole(shape))[...] += 1
    return bool((times == 1).all())


@given(st.data())
def test_a_partition_covers(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    pieces = list(cut_at_random(rng, boxes.whole(shape), data.draw(st.integers(1, 30))))
    assert brute_force_covers(shape, pieces)
    assert boxes.cover_problem(shape, pieces) is None
    without = data.draw(st.integers(0, len(pieces) - 1))
    holed = pieces[:without] + pieces[without + 1 :]
    assert boxes.cover_problem(shape, holed) is not None
    assert boxes.cover_problem(shape, [*pieces, pieces[without]]) == "its pieces overlap"
    # moved, but not larger or smaller
    moved = tuple(
        (a + by, b + by)
        for (a, b), size in zip(pieces[without], shape, strict=True)
        for by in [data.draw(st.integers(-a, size - b))]
    )
    assert (boxes.cover_problem(shape, [*holed, moved]) is None) == (moved == pieces[without])


@given(st.data())
def test_any_boxes(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), max_size=3).map(tuple))
    drawn = data.draw(st.lists(boxes_within(shape).filter(boxes.volume), max_size=6))
    assert (boxes.cover_problem(shape, drawn) is None) == brute_force_covers(shape, drawn)


@pytest.mark.parametrize(
    ("shape", "given_boxes", "problem"),
    [
        ((), [()], None),
        ((), [], "its pieces leave out 1 of 1 elements"),
        ((), [(), ()], "its pieces overlap"),
        ((0, 3), [], None),
        ((0, 3), [((0, 0), (0, 3))], None),
        ((0, 3), [((0, 0), (0, 3))] * 2, "2 pieces of a tensor without elements"),
        ((0, 3), [((0, 1), (0, 3))], "box [0:1, 0:3] is not within the shape [0, 3]"),
        ((2, 3), [((0, 2), (0, 3)), ((1, 1), (0, 3))], "box [1:1, 0:3] is empty"),
        ((2, 3), [((0, 2), (0, 4))], "box [0:2, 0:4] is not within the shape [2, 3]"),
        ((2, 3), [((0, 2),)], "box [0:2] is not within the shape [2, 3]"),
        ((2**48,) * 32, [((0, 2**48),) * 32], None),
        # as many elements as there should be, with a hole as large as the overlap, in one dim or in two
        ((4,), [((0, 2),), ((1, 3),)], "its pieces overlap"),
        ((2, 2), [((0, 1), (0, 1)), ((1, 2), (1, 2)), ((0, 1), (0, 2))], "its pieces overlap"),
    ],
)
def test_cover_problem(shape: tuple[int, ...], given_boxes: list[Box], problem: str | None) -> None:
    assert boxes.cover_problem(shape, given_boxes) == problem
