"""What ranks hold, share and own of random models on random meshes, against slices written by hand."""

import re
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ascend_moe_train.model.adapters import adapter_shapes
from ascend_moe_train.model.config import ModelConfig, MTPConfig
from ascend_moe_train.model.counts import buffer_shapes, parameter_shapes
from ascend_moe_train.parallel.cuts import ROWS, row_of
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.parallel.shards import (
    Box,
    Placement,
    box_view,
    boxes,
    flat_part,
    owned,
    part_size,
    placements,
    repeat_groups,
    take,
)
from ascend_moe_train.presets import PRESETS, tiny
from tests.parallel_cases import Layout, layouts, local_value

Array = NDArray[Any]
Placed = list[dict[str, Placement]]


def shapes_of(layout: Layout) -> dict[str, tuple[int, ...]]:
    adapted = adapter_shapes(layout.model, layout.lora) if layout.lora is not None else {}
    return {**parameter_shapes(layout.model), **adapted, **buffer_shapes(layout.model)}


def placed(layout: Layout) -> Placed:
    return [
        placements(layout.model, layout.mesh, rank, sequence_parallel=layout.sequence_parallel, lora=layout.lora)
        for rank in range(layout.mesh.world_size)
    ]


def numbered(shape: tuple[int, ...]) -> Array:
    """Each element is its own number."""
    return np.arange(prod(shape)).reshape(shape)


def cells(box: Box) -> Any:
    return np.ix_(*(range(start, stop) for start, stop in box.ranges))


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_local_tensors_are_the_slices_they_should_be(layout: Layout) -> None:
    shapes = shapes_of(layout)
    for rank, found in enumerate(placed(layout)):
        assert list(found) == list(shapes)
        at = layout.mesh.coordinates(rank)
        for name, placement in found.items():
            expected = local_value(name, numbered(shapes[name]), layout.model, layout.mesh, at)
            np.testing.assert_array_equal(take(numbered(shapes[name]), placement), expected, err_msg=name)
            assert (placement.local_shape, placement.local_size) == (expected.shape, expected.size)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_every_element_is_owned_once(layout: Layout) -> None:
    found = placed(layout)
    for name, shape in shapes_of(layout).items():
        owners = np.zeros(shape, int)
        for rank in found:
            for box in owned(rank[name]):
                owners[cells(box)] += 1
        assert (owners == 1).all(), name


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_groups_and_replicas(layout: Layout) -> None:
    found = placed(layout)
    ranks_of_keys = {rank: group for group in repeat_groups(layout.model, layout.mesh) for rank in group}
    for name, shape in shapes_of(layout).items():
        local = [take(numbered(shape), rank[name]) for rank in found]
        holders = np.bincount(np.concatenate([each.ravel() for each in local]), minlength=prod(shape))
        for rank, (each, placement) in enumerate(zip(local, (each[name] for each in found), strict=True)):
            assert placement.group[placement.index] == rank
            assert all(np.array_equal(local[other], each) for other in placement.group)
            expected = np.full(each.shape, placement.replicas)
            if (repeated := placement.repeated) is not None:
                rows = slice(repeated.start, repeated.stop)
                assert rank in repeated.ranks == ranks_of_keys[rank]
                assert all(np.array_equal(local[other][rows], each[rows]) for other in repeated.ranks)
                expected[rows] *= len(repeated.ranks)
            np.testing.assert_array_equal(holders[each], expected, err_msg=name)


@settings(max_examples=200, deadline=None)
@given(layouts(), st.integers(0, 2**32 - 1))
def test_boxes_are_the_flat_range(layout: Layout, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rank = int(generator.integers(layout.mesh.world_size))
    for name, placement in placed(layout)[rank].items():
        value = numbered(placement.shape)
        local = take(value, placement).ravel()
        start, stop = sorted(int(number) for number in generator.integers(0, local.size + 1, 2))
        part, found = local[start:stop], boxes(placement, start, stop)
        assert len(found) <= (2 * value.ndim - 1) * max(1, prod(map(len, placement.intervals)))
        seen = np.zeros(part.size, int)
        for box in found:
            np.testing.assert_array_equal(box_view(part, start, box, placement), value[cells(box)], err_msg=name)
            box_view(seen, start, box, placement)[...] += 1
        assert (seen == 1).all(), name


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 50), st.integers(1, 12))
def test_flat_parts_are_equal_but_for_what_fills_up_the_last(size: int, n: int) -> None:
    parts = [flat_part(size, n, index) for index in range(n)]
    assert [number for part in parts for number in range(*part)] == list(range(size))
    per = part_size(size, n)
    assert per * n - size in range(n)
    padded = np.concatenate([np.arange(size), np.full(per * n - size, -1)]).reshape(n, per)
    for row, part in zip(padded, parts, strict=True):
        assert row[row >= 0].tolist() == list(range(*part))


def gradients(model: ModelConfig, *, sequence_parallel: bool, **axes: int) -> dict[str, str]:
    """By name without layer, of the last layer that has it."""
    found = placements(model, Mesh.make(8, **axes), 0, sequence_parallel=sequence_parallel)
    return {re.sub(r"^(layers|mtp)\.\d+\.", "", name): placement.gradient for name, placement in found.items()}


LATENT = {f"attn.{name}.weight" for name in ("q_down", "kv_down", "q_latent_norm", "kv_latent_norm")}
WEIGHTS = {"moe.experts.w13", "moe.experts.w2"}


@pytest.mark.parametrize(
    ("preset", "partial", "expert", "none"),
    [
        ("deepseek_v3", LATENT | {"moe.router.weight"}, WEIGHTS, {"moe.router.balance_bias"}),
        ("gpt_oss_20b", {"moe.router.weight", "moe.router.bias"}, WEIGHTS | {f"{w}_bias" for w in WEIGHTS}, set()),
    ],
)
def test_whose_gradients_are_parts(preset: str, partial: set[str], expert: set[str], none: set[str]) -> None:
    """A weight that tp ranks use on their own heads or tokens has a part of its gradient on each."""
    model = PRESETS[preset]()
    between = {"attn_norm.weight", "ffn_norm.weight", "norm.weight"}
    for sequence_parallel in (False, True):
        kinds = gradients(model, sequence_parallel=sequence_parallel, tp=4, ep=2)
        expected = {"partial": partial | (between if sequence_parallel else set()), "expert": expert, "none": none}
        for kind, names in expected.items():
            assert {name for name, found in kinds.items() if found == kind} == names
    assert "partial" not in gradients(model, sequence_parallel=False, ep=2).values()


def test_norms_of_heads_and_of_merged_tokens() -> None:
    model = PRESETS["qwen3_30b_a3b"]().model_copy(update={"mtp": MTPConfig()})
    heads = {"attn.q_norm.weight", "attn.k_norm.weight"}
    merged = {"merge.weight", "embed_norm.weight", "hidden_norm.weight"}
    for sequence_parallel in (False, True):
        kinds = gradients(model, sequence_parallel=sequence_parallel, tp=2)
        partial = {name for name, kind in kinds.items() if kind == "partial"}
        assert heads <= partial
        assert merged & partial == (merged if sequence_parallel else set())


def test_fewer_key_heads_than_ranks() -> None:
    """4 query heads of width 8 and 2 key heads on 4 ranks: ranks 2 and 3 both hold key head 1."""
    placement = placements(tiny(), Mesh.make(8, tp=4), 7)["layers.0.attn.qkv.weight"]
    assert placement.intervals == (((24, 32), (40, 48), (56, 64)), ((0, 32),))
    assert placement.repeated is not None
    assert (placement.repeated.start, placement.repeated.stop, placement.repeated.ranks) == (8, 24, (6, 7))
    assert (placement.group, placement.replicas) == ((3, 7), 2)
    first, second = (placements(tiny(), Mesh.make(4, tp=4), rank)["layers.0.attn.qkv.weight"] for rank in (2, 3))
    assert [box.ranges[0] for box in owned(first)] == [(16, 24), (40, 48), (56, 64)]
    assert [box.ranges[0] for box in owned(second)] == [(24, 32)]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_cut_whole(preset: str) -> None:
    """Bytes that a mesh of many ranks owns add up to those of the published model."""
    model = PRESETS[preset]()
    tp = 1 if model.qk_norm == "full" else 2
    mesh = Mesh.make(8, tp=tp, ep=4 if model.moe is not None else 1)
    total = sum(
        prod(box.shape)
        for rank in range(8)
        for placement in placements(model, mesh, rank).values()
        for box in owned(placement)
    )
    assert total == sum(map(prod, (parameter_shapes(model) | buffer_shapes(model)).values()))


def test_every_row_is_needed() -> None:
    """A row that is never the first to fit some tensor of some model would be wrong without a test to see it."""
    mla = PRESETS["deepseek_v3"]().model_copy(update={"mtp": MTPConfig()})
    names = {"layers.0.attn.qkv.lora_a", "layers.0.attn.qkv.lora_b"}
    for model in (mla, *(preset() for preset in PRESETS.values())):
        names |= {*parameter_shapes(model), *buffer_shapes(model)}
    assert {row_of(name) for name in names} == set(ROWS)


def test_mistakes_of_callers() -> None:
    with pytest.raises(ValueError, match=r"layers.0.attn.gate: no row of parallel/cuts.py says how it is cut"):
        row_of("layers.0.attn.gate")
    with pytest.raises(ValueError, match=r"tokens: 64 cannot be shared out to tp 3"):
        placements(tiny(), Mesh.make(3, tp=3), 0)
    placement = placements(tiny(), Mesh.make(2, tp=2), 0)["head.weight"]
    box = boxes(placement, 10, 20)[0]
    for start, size in ((11, 20), (0, 19), (10, 9)):
        with pytest.raises(ValueError, match="elements 10 to 19 are not in"):
            box_view(np.zeros(size), start, box, placement)
