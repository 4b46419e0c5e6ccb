"""Boxes: rectangular parts of a tensor, [start, stop) of each of its dims. Pure.

Whatever cuts a tensor (a converter, many writers, flat ranges of ZeRO), the parts are boxes in the coordinates of the
whole tensor, and reading them under any other cut is intersection. Elements are counted in row-major order throughout.
"""

import secrets
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from numpy.typing import NDArray

Interval = tuple[int, int]
Box = tuple[Interval, ...]
Shape = tuple[int, ...]

_PRIME = 2**127 - 1  # a Mersenne prime
_MAX_SHOWN = 80


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> Shape:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements; 1 for the box of a scalar."""
    return prod(stop - start for start, stop in box)


def fits(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box lies in a tensor of this shape. It may be empty."""
    return len(box) == len(shape) and all(0 <= a <= b <= size for (a, b), size in zip(box, shape, strict=True))


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes of a tensor have in common; None when that is nothing."""
    common = []
    for (start, stop), (other_start, other_stop) in zip(one, other, strict=True):
        first, last = max(start, other_start), min(stop, other_stop)
        if first >= last:
            return None
        common.append((first, last))
    return tuple(common)


def view(array: NDArray[Any], box: Box, within: Box) -> NDArray[Any]:
    """The part of an array that is `box`, where the array holds the box `within`; no copy."""
    index = [slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, within, strict=True)]
    with_dots: Any = (*index, ...)  # with the dots, what is taken of a scalar is an array too
    part: NDArray[Any] = array[with_dots]
    return part


def cut(box: Box, max_elements: int) -> Iterator[Box]:
    """Cuts a box into boxes of at most `max_elements`, at least 1, in row-major order.

    It is cut along its first dim; where one row is too large, so is each row along the next dim.
    """
    elements = volume(box)
    if elements <= max_elements:
        yield box
        return
    dim, (start, stop) = next((dim, (a, b)) for dim, (a, b) in enumerate(box) if b - a > 1)
    rows = max(1, max_elements // (elements // (stop - start)))
    for first in range(start, stop, rows):
        yield from cut((*box[:dim], (first, min(first + rows, stop)), *box[dim + 1 :]), max_elements)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements [start, stop) of a tensor, counted row by row, as boxes in that order; at most 2 ndim - 1."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = shape[1:]
    row = prod(inner)
    first, skipped = divmod(start, row)
    last, rest = divmod(stop, row)
    if first == last:
        yield from (((first, first + 1), *box) for box in flat_boxes(inner, skipped, rest))
        return
    if skipped:
        yield from (((first, first + 1), *box) for box in flat_boxes(inner, skipped, row))
        first += 1
    if first < last:
        yield ((first, last), *whole(inner))
    yield from (((last, last + 1), *box) for box in flat_boxes(inner, 0, rest))


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` are not a cover of a tensor that has every element just once; None when they are.

    A tensor without elements needs no box, and may have one. Takes time in proportion to the number of boxes.
    """
    elements = prod(shape)
    for box in boxes:
        if not fits(box, shape):
            return f"box {_text(box)} is not within the shape {_short(list(shape))}"
        if elements and not volume(box):
            return f"box {_text(box)} is empty"
    if not elements:
        return f"{len(boxes)} pieces of a tensor without elements" if len(boxes) > 1 else None
    total = sum(volume(box) for box in boxes)
    if total < elements:
        return f"its pieces leave out {elements - total} of {elements} elements"
    if total > elements or not _covers(shape, boxes):
        return "its pieces overlap"
    return None


def _covers(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes within a shape have each of its elements just once.

    The elements of a box are the monomials of prod over dims of (x^stop - x^start) / (x - 1), with another x for each
    dim; so the boxes cover the shape if and only if these polynomials, without their common denominator, add up to that
    of the whole. Compared at a random point modulo a prime, different polynomials agree with a probability below
    ndim * 2^48 / 2^127 (Schwartz, 1980; Zippel, 1979).
    """
    point = [secrets.randbelow(_PRIME) for _ in shape]  # not known to whoever wrote the manifest
    powers: list[dict[int, int]] = [{} for _ in shape]

    def power(dim: int, exponent: int) -> int:
        known = powers[dim]
        if exponent not in known:
            known[exponent] = pow(point[dim], exponent, _PRIME)
        return known[exponent]

    def value(box: Box) -> int:
        product = 1
        for dim, (start, stop) in enumerate(box):
            product = product * (power(dim, stop) - power(dim, start)) % _PRIME
        return product

    return (sum(map(value, boxes)) - value(whole(shape))) % _PRIME == 0


def _text(box: Box) -> str:
    return _short(", ".join(f"{start}:{stop}" for start, stop in box)).join("[]")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
