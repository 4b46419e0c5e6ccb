"""What `amt mesh` shows: who is where, who speaks with whom about what, and how every tensor is cut. Pure."""

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.adapters import adapter_shapes
from ascend_moe_train.parallel.cuts import GROUP_AXES, row_of
from ascend_moe_train.parallel.mesh import DENSE_AXES, EXPERT_AXES, Mesh, mesh_of, num_micro
from ascend_moe_train.parallel.shards import Placement, placements, repeat_groups
from ascend_moe_train.parallel.traffic import exchanges
from ascend_moe_train.units import format_bytes, format_count

MAX_GROUPS_SHOWN = 4
MAX_RANKS_SHOWN = 16  # of one group
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def mesh_map(run: RunConfig, num_ranks: int) -> dict[str, Any]:
    """The map as JSON-able values: axes, batch, parameters, ranks, groups and tensors.

    With pp > 1 tensors and sizes are those of a stage that holds every layer. Raises ConfigError as `mesh_of` does.
    """
    mesh = mesh_of(run, num_ranks)
    parallel = run.parallel
    placed = placements(run.model, mesh, 0, sequence_parallel=parallel.sequence_parallel, lora=run.lora)
    held = [placement for placement in placed.values() if placement.gradient != "none"]
    trained = held if run.lora is None else [placed[name] for name in adapter_shapes(run.model, run.lora)]
    updated = (_length(each.part) if parallel.zero_stage else each.local_size for each in trained)
    return {
        "axes": {axis: mesh.size((axis,)) for axis in (*DENSE_AXES, *EXPERT_AXES)},
        "batch": {
            "global_sequences": run.batch.global_sequences,
            "micro_sequences": run.batch.micro_sequences,
            "micro_batches": num_micro(run.batch, mesh),
        },
        "parameters": {
            "all": sum(prod(each.shape) for each in held),
            "on_rank_0": sum(each.local_size for each in held),
            "updated_by_rank_0": sum(updated),
        },
        "zero_stage": parallel.zero_stage,
        "ranks": [{"rank": rank, **vars(mesh.coordinates(rank))} for rank in range(num_ranks)],
        "groups": list(_groups(run, mesh, trained)),
        "tensors": _tensors(placed, mesh),
    }


def map_text(shown: dict[str, Any], title: str) -> Iterator[str]:
    """The lines of a map."""
    axes, batch = shown["axes"], shown["batch"]
    dense, expert = (" x ".join(f"{axis} {axes[axis]}" for axis in order) for order in (DENSE_AXES, EXPERT_AXES))
    yield f"{title} on {len(shown['ranks']):,} ranks: {dense}; for experts {expert}"
    yield (
        f"A step: {batch['global_sequences']:,} sequences = {axes['dp']:,} dp ranks x {batch['micro_batches']:,} "
        f"micro-batches x {batch['micro_sequences']:,}"
    )
    whole, held, updated = (format_count(number).rstrip() for number in shown["parameters"].values())
    yield f"Parameters: {whole}, rank 0 holds {held} and updates {updated} (zero_stage {shown['zero_stage']})"
    if axes["pp"] > 1:
        yield "Tensors and sizes are those of a stage that holds every layer: pp does not cut layers here"
    yield ""
    names = ("rank", *axes)
    yield from columns([names, *(tuple(str(rank[name]) for name in names) for rank in shown["ranks"])])
    yield ""
    for group in shown["groups"]:
        yield f"{group['along']}: groups of {len(group['ranks'][0]):,} {group['does']}"
        yield from (f"    {_in_words(ranks)}" for ranks in group["ranks"][:MAX_GROUPS_SHOWN])
        if (more := len(group["ranks"]) - MAX_GROUPS_SHOWN) > 0:
            yield f"    and {more:,} more (--json has all)"
    yield "" if shown["groups"] else "No groups: one rank does it all\n"
    rows = [("tensor", "count", "shape", "cut", "on rank 0", "gradient", "replicas")]
    rows += [
        (
            each["name"],
            str(each["count"]),
            _by(each["shape"]),
            each["cut"],
            _by(each["local_shape"]),
            each["gradient"],
            str(each["replicas"]),
        )
        for each in shown["tensors"]
    ]
    yield from columns(rows)


def columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A table with its head in the first row: numbers to the right, words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    are_numbers = [all(cell.isdecimal() for cell in column[1:]) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, are_numbers, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _groups(run: RunConfig, mesh: Mesh, trained: Sequence[Placement]) -> Iterator[dict[str, Any]]:
    """Groups of more than one rank: the axes, what they do together, the ranks of each."""
    for axes, does in (exchanges(run, mesh) | _reductions(run, trained)).items():
        if mesh.size(axes) > 1:
            yield {"along": " x ".join(axes), "does": does, "ranks": mesh.groups(axes)}
    if any(each.repeated is not None for each in trained):
        does = "sum the gradients of key and value rows that all of them hold"
        yield {"along": "tp neighbours", "does": does, "ranks": repeat_groups(run.model, mesh)}


def _reductions(run: RunConfig, trained: Sequence[Placement]) -> dict[tuple[str, ...], str]:
    """What is done with the gradients of a step."""
    dtype, bucket = run.parallel.reduce_dtype, format_bytes(run.parallel.bucket_bytes)
    found = {}
    for kind, axes in GROUP_AXES.items():
        if elements := sum(each.local_size for each in trained if each.gradient == kind):
            count, size = format_count(elements).rstrip(), format_bytes(elements * _ELEMENT_BYTES[dtype])
            found[axes] = f"sum {kind} gradients: {count} elements ({dtype}, {size}) of each, in buckets of {bucket}"
    return found


def _tensors(placed: dict[str, Placement], mesh: Mesh) -> list[dict[str, Any]]:
    """Tensors of the same name but for the layer, shape and cut are one."""
    found: dict[tuple[str, Placement], int] = {}
    for name, placement in placed.items():
        key = (re.sub(r"\.\d+\.", ".*.", name), placement)
        found[key] = found.get(key, 0) + 1
    return [
        {
            "name": name,
            "count": count,
            "shape": placement.shape,
            "cut": _cut(name, placement, mesh),
            "local_shape": placement.local_shape,
            "gradient": placement.gradient,
            "replicas": placement.replicas,
        }
        for (name, placement), count in found.items()
    ]


def _cut(name: str, placement: Placement, mesh: Mesh) -> str:
    row = row_of(name)
    said = [
        f"dim {dim} by {cut.axis} ({cut.of})"
        for dim, cut in enumerate(row.cuts)
        if cut is not None and mesh.size((cut.axis,)) > 1
    ]
    if placement.repeated is not None:
        said.append(f"k | v on {len(placement.repeated.ranks)} ranks each")
    if row.only_first is not None and mesh.size((row.only_first,)) > 1:
        said.append(f"first {row.only_first} rank only")
    return ", ".join(said) or "whole"


def _in_words(ranks: tuple[int, ...]) -> str:
    """`0 2 4 6`; a long group by its first, second and last."""
    if len(ranks) <= MAX_RANKS_SHOWN:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _length(part: tuple[int, int]) -> int:
    return part[1] - part[0]
