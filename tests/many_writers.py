"""Checkpoints that several writers make: tensors cut into random boxes, dealt out to writers in threads."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train import boxes
from ascend_moe_train.boxes import Box
from ascend_moe_train.checkpoint import saving
from ascend_moe_train.checkpoint.portion import Piece, Portion
from ascend_moe_train.checkpoint.saving import Writer

Array = NDArray[Any]
Portions = Mapping[str, Portion]


def cut_at_random(rng: np.random.Generator, box: Box, pieces: int) -> Iterator[Box]:
    """Cuts a box by planes, again and again, into at most so many."""
    dims = [dim for dim, (start, stop) in enumerate(box) if stop - start > 1]
    if pieces < 2 or not dims:
        yield box
        return
    dim = int(rng.choice(dims))
    start, stop = box[dim]
    middle = int(rng.integers(start + 1, stop))
    first = int(rng.integers(1, pieces))
    yield from cut_at_random(rng, (*box[:dim], (start, middle), *box[dim + 1 :]), first)
    yield from cut_at_random(rng, (*box[:dim], (middle, stop), *box[dim + 1 :]), pieces - first)


def deal(tensors: Mapping[str, Array], num_writers: int, seed: int = 0, pieces: int = 5) -> list[dict[str, Portion]]:
    """For each writer its portions: every tensor in random boxes, each of them a view that some writer holds."""
    rng = np.random.default_rng(seed)
    held: list[dict[str, list[Piece]]] = [{} for _ in range(num_writers)]
    for name, array in tensors.items():
        everything = boxes.whole(array.shape)
        for box in cut_at_random(rng, everything, pieces):
            piece = Piece(box, boxes.view(array, box, everything))
            held[int(rng.integers(num_writers))].setdefault(name, []).append(piece)
    return [{name: Portion(tensors[name].shape, tuple(own)) for name, own in each.items()} for each in held]


def save_together(
    root: Path,
    step: int,
    portions: Sequence[Portions],
    meta: Mapping[str, Any],
    *,
    keep: int = 9,
    deadline_s: float = 20.0,
    **options: Any,
) -> Path:
    """Writes a checkpoint with a thread for each writer."""
    saving.prepare(root, step, len(portions))

    def write(index: int) -> Path:
        writer = Writer(index=index, count=len(portions), deadline_s=deadline_s)
        return saving.save_part(root, step, portions[index], meta, keep=keep, writer=writer, **options)

    with ThreadPoolExecutor(len(portions)) as pool:
        folders = set(pool.map(write, range(len(portions))))
    assert len(folders) == 1
    return folders.pop()


def names_in(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def save(root: Path, step: int, portions: Portions, index: int, count: int, deadline_s: float = 20.0) -> Path:
    writer = Writer(index=index, count=count, deadline_s=deadline_s)
    return saving.save_part(root, step, portions, {"step": step}, keep=2, writer=writer)


def outcomes(
    root: Path, portions: list[dict[str, Portion]], absent: int | None = None, deadline_s: float = 20.0
) -> Any:
    """Saves step 3 with a thread for each writer but the absent one; what each of them returned or raised."""
    saving.prepare(root, 3, len(portions))
    with ThreadPoolExecutor(len(portions)) as pool:
        futures: list[Future[Path] | None] = [
            None if index == absent else pool.submit(save, root, 3, portions[index], index, len(portions), deadline_s)
            for index in range(len(portions))
        ]
    return [None if future is None else future.exception() or future.result() for future in futures]


def assert_given_up(root: Path, others: Sequence[str] = ()) -> None:
    """Nothing is there but what was there, and, where no reader looks, what tells the writers."""
    assert names_in(root) == [".tmp-step-00000003", *others]
    assert all(name.startswith("part-") for name in names_in(root / ".tmp-step-00000003") if name != "save.json")
