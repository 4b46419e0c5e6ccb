"""The planner's search finds what trying everything finds, and says why the rest is out."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.model.config import ModelConfig, MoEConfig, MTPConfig
from ascend_moe_train.parallel.config import CompressConfig
from ascend_moe_train.planner.bounds import PassTimes, busy_s, least_bubble, least_bytes, least_step_s, splits
from ascend_moe_train.planner.hardware import Cluster, parse_cluster
from ascend_moe_train.planner.layers import Slice, effective
from ascend_moe_train.planner.memory import memory_of
from ascend_moe_train.planner.plan import ENGINES, Imbalance, Job, Plan, check
from ascend_moe_train.planner.search import HEAD_ROOM_SLACK, search, search_among
from ascend_moe_train.planner.space import Space
from ascend_moe_train.planner.step_time import time_of
from ascend_moe_train.planner.techniques import PLAIN, Techniques
from ascend_moe_train.presets import PRESETS

IMBALANCE = Imbalance()
IN_INT8 = Techniques(expert_wire="int8", hierarchical_ranks=2, reduce_dtype="bf16")
ONE_BIT = Techniques(compress=CompressConfig(method="onebit_adam"))
BESIDE = Techniques(overlap=True)
MODEL = ModelConfig(
    vocab_size=4096,
    hidden=512,
    num_layers=5,
    num_heads=8,
    num_kv_heads=4,
    ffn=1024,
    moe=MoEConfig(num_experts=8, top_k=2, ffn=512, shared_ffn=256, dense_layers=(0,)),
    mtp=MTPConfig(),
)


def job_of(engine: str = "ours", model: ModelConfig = MODEL, **changes: Any) -> Job:
    sizes = {"seq_len": 1024, "global_sequences": 16, "engine": ENGINES[engine], **changes}
    return Job(model=model, **sizes)


def cluster_of(text: str, memory_bytes: float | None = None) -> Cluster:
    cluster = parse_cluster(text)
    if memory_bytes is None:
        return cluster
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))


def tight(job: Job, devices: str, space: Space, room: float | None) -> Cluster:
    """Devices with so much of the room that the fastest plan needs, counted above what their software takes."""
    cluster = cluster_of(devices)
    if room is None:
        return cluster
    memory = search(job, cluster, space=space, top=1).best[0].memory
    software_bytes = memory.stages[memory.fullest].items["runtime"]
    return cluster_of(devices, software_bytes + room * (memory.peak_bytes - software_bytes))


def all_plans(job: Job, cluster: Cluster, space: Space) -> Iterator[Plan]:
    """Everything, one after the other."""
    times = PassTimes(job, cluster, IMBALANCE, None, space.techniques)
    for cut in space.cuts(job):
        for pp in space.stages(job, cut):
            for schedule, chunks in space.pipelines(pp, job.model.num_layers):
                for layers in splits(times.of(cut), pp, chunks, repeats=job.engine.keeps == "inputs" and pp > 1):
                    base = Plan(
                        num_devices=space.num_devices,
                        stage_layers=layers,
                        pp=pp,
                        schedule=schedule,
                        chunks=chunks,
                        techniques=effective(space.techniques, cut),
                        **cut._asdict(),
                    )
                    yield from variants(job, base, space)


def variants(job: Job, base: Plan, space: Space) -> Iterator[Plan]:
    for zero in space.zero:
        for offload in space.offload:
            for policy in space.recompute:
                layers = (None,) if policy == "none" else (None, *range(1, max(base.stage_layers)))
                for count in layers:
                    plan = replace(
                        base, zero_stage=zero, offload_optimizer=offload, recompute=policy, recompute_layers=count
                    )
                    yield plan
                    if policy == "full" and base.pp > 1 and job.engine.keeps == "inputs":
                        yield replace(plan, recompute_kept="block_inputs")


def small(job: Job, cluster: Cluster, **limits: Any) -> Space:
    chosen = {"micro": (1, 2), "chunks": (1, 2), "cp": (1, 2), "sequence_parallel": (True, False), **limits}
    return Space.of(job, cluster, **chosen)


@pytest.mark.parametrize(
    ("engine", "devices", "room", "limits"),
    [
        ("ours", "8x910B", None, {"expert_tp": (1, 2), "cp": (1,), "offload": (False,)}),
        ("ours", "4x910B", 0.7, {"expert_tp": (1,), "recompute": ("none", "full")}),
        ("ours", "4x910B", 0.7, {"expert_tp": (1,), "cp": (1,), "techniques": IN_INT8}),
        ("ours", "8x910B", 1.1, {"recompute": ("none", "full"), "techniques": ONE_BIT}),
        ("megatron", "4x910B", 0.6, {"zero": (0, 1), "cp": (1,)}),
        ("megatron", "4xA100", 0.5, {"zero": (0, 1, 3), "tp": (1, 2), "cp": (1,), "micro": (2, 4)}),
    ],
)
def test_the_search_is_as_good_as_trying_everything(
    engine: str, devices: str, room: float | None, limits: dict[str, Any]
) -> None:
    compare_with_everything(job_of(engine), devices, room, limits)


def test_inputs_of_blocks_are_kept_where_that_is_best() -> None:
    """A stage that goes forward again anyway has its blocks do it one by one; brute force agrees."""
    limits = {"pp": (2,), "cp": (1,), "expert_tp": (1,), "offload": (False,), "zero": (0, 1)}
    best = compare_with_everything(job_of(seq_len=8192), "4x910B", 0.5, limits)
    assert (best.recompute, best.recompute_kept) == ("full", "block_inputs")


def compare_with_everything(job: Job, devices: str, room: float | None, limits: dict[str, Any]) -> Plan:
    """The plan that the search finds, which must be as fast as the fastest of all that fit."""
    space = small(job, cluster_of(devices), **limits)
    cluster = tight(job, devices, space, room)
    fastest, count, fitting = float("inf"), 0, 0
    for plan in all_plans(job, cluster, space):
        count += 1
        if check(job, plan) is None and memory_of(job, cluster, plan, IMBALANCE).fits(cluster.device):
            fitting += 1
            fastest = min(fastest, time_of(job, cluster, plan, IMBALANCE).step_s)
    assert fitting
    found = search(job, cluster, space=space, imbalance=IMBALANCE, top=1)
    assert found.best[0].time.step_s == pytest.approx(fastest, rel=1e-12)
    assert found.num_evaluated < count / 2
    return found.best[0].plan


@given(
    busy=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=16).filter(sum),
    num_micro=st.integers(1, 64),
    chunks=st.integers(1, 8),
)
def test_a_bubble_has_a_least_size(busy: list[float], num_micro: int, chunks: int) -> None:
    """Whatever the shares of the stages are."""
    for schedule in ("interleaved", "zero_bubble"):
        even_s = num_micro * sum(busy) / len(busy)
        least_s = least_step_s(busy, num_micro, chunks, schedule, 1.0)
        assert least_bubble(len(busy), num_micro, chunks, schedule) * even_s <= least_s * (1 + 1e-9)


def test_the_least_bubble_is_reached() -> None:
    """By stages each of which ends with the last micro-batch at the same moment."""
    for num_micro, chunks in ((4, 1), (8, 2)):
        busy = [1.0]
        for _ in range(3):
            busy.append(busy[0] - sum(busy) / (chunks * num_micro))
        even_s = num_micro * sum(busy) / len(busy)
        least_s = least_bubble(4, num_micro, chunks, "interleaved") * even_s
        assert least_s == pytest.approx(least_step_s(busy, num_micro, chunks, "interleaved", 1.0), rel=1e-12)


def test_head_room_is_what_trying_everything_finds() -> None:
    job, cluster = job_of("megatron"), cluster_of("4x910B")
    space = small(job, cluster, cp=(1,), zero=(0, 1), expert_tp=(1,), recompute=("none", "full"))
    fastest = search(job, cluster, space=space, top=1).best[0].time.step_s
    least = min(
        memory.peak_bytes
        for plan in all_plans(job, cluster, space)
        if check(job, plan) is None
        and (memory := memory_of(job, cluster, plan, IMBALANCE)).fits(cluster.device)
        and plan.recompute_layers is None
        and time_of(job, cluster, plan, IMBALANCE).step_s <= fastest * HEAD_ROOM_SLACK
    )
    found = search(job, cluster, space=space, objective="memory", top=1)
    assert found.best[0].memory.peak_bytes == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("preset", ["deepseek_v2_lite", "qwen3_30b_a3b", "llama3_8b", "gpt_oss_20b"])
@pytest.mark.parametrize(
    ("engine", "techniques"), [("ours", PLAIN), ("megatron", PLAIN), ("ours", IN_INT8), ("ours", BESIDE)]
)
def test_no_bound_is_above_what_it_bounds(preset: str, engine: str, techniques: Techniques) -> None:
    job = job_of(engine, PRESETS[preset](), seq_len=4096, global_sequences=256)
    cluster = cluster_of("64x910B")
    space, _ = Space.of(job, cluster).without_impossible(job)
    times = PassTimes(job, cluster, IMBALANCE, None, techniques)
    cuts = list(space.cuts(job))
    for cut in cuts[:: len(cuts) // 40 + 1]:
        passes = times.of(cut)
        for pp in space.stages(job, cut):
            repeats = job.engine.keeps == "inputs" and pp > 1
            for schedule, chunks in list(space.pipelines(pp, job.model.num_layers))[::3]:
                for layers in splits(passes, pp, chunks, repeats=repeats):
                    plan = Plan(
                        num_devices=64, stage_layers=layers, pp=pp, schedule=schedule, chunks=chunks, **cut._asdict()
                    )
                    plan = replace(plan, techniques=effective(techniques, cut))
                    step_s = time_of(job, cluster, plan, IMBALANCE).step_s
                    busy = busy_s(passes, layers, pp, repeats=repeats)
                    least_s = least_step_s(busy, plan.num_micro(job), chunks, schedule, passes.slow)
                    assert least_s <= step_s * (1 + 1e-9)
                    assert times.whole_s(cut) * plan.num_micro(job) / pp <= least_s * (1 + 1e-9)
                    peak_bytes = memory_of(job, cluster, plan, IMBALANCE).peak_bytes
                    assert least_bytes(job, cluster, space, cut, pp, (0, False)) <= peak_bytes


@pytest.mark.parametrize("pp", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2])
def test_splits_share_out_all_layers(pp: int, chunks: int) -> None:
    job, cluster = job_of(model=MODEL.model_copy(update={"num_layers": 11})), cluster_of("8x910B")
    passes = PassTimes(job, cluster, IMBALANCE, None).of(Slice(1, False, 1, "ring", 1, 1, 1))
    found = splits(passes, pp, chunks, repeats=True)
    assert found
    for layers in found:
        assert sum(layers) == 11
        assert len(layers) == pp * chunks
        assert min(layers) >= 1


def test_every_plan_that_is_returned_passes_the_check() -> None:
    job, cluster = job_of(), cluster_of("16x910B")
    found = search(job, cluster, top=20)
    assert len({each.layout for each in found.best}) == len(found.best) > 10
    for each in found.best:
        assert check(job, each.plan) is None
        assert each.memory.fits(cluster.device)
        assert sum(each.plan.stage_layers) == job.model.num_layers
    times = [each.time.step_s for each in found.best]
    assert times == sorted(times)


def test_all_plans_are_counted_with_a_reason() -> None:
    job = job_of()
    cluster = tight(job, "8x910B", Space.of(job, cluster_of("8x910B")), 0.9)
    found = search(job, cluster)
    assert found.rejections.total("slower") > 0
    assert found.rejections.total("too_big") > 0
    for kind in ("slower", "too_big", "impossible"):
        for family in found.rejections.listed(kind):
            assert family.count > 0
            assert any(letter.isdigit() for letter in family.reason)


def test_more_than_the_memory_is_named() -> None:
    job = job_of()
    cluster = tight(job, "8x910B", Space.of(job, cluster_of("8x910B")), 0.9)
    found = search(job, cluster)
    assert found.too_big is not None
    assert not found.too_big.memory.fits(cluster.device)
    assert found.too_big.time.step_s < found.best[0].time.step_s


def test_nothing_fits() -> None:
    job = job_of(model=PRESETS["mixtral_8x7b"]())
    found = search(job, cluster_of("1x910B"))
    assert found.best == ()
    assert found.too_big is not None
    assert found.too_big.memory.peak_bytes > 64e9


def test_no_plan_is_possible() -> None:
    with pytest.raises(ConfigError, match=r"3 sequences a step .* 8 devices"):
        search(job_of(global_sequences=3, seq_len=7), cluster_of("8x910B"))


def test_what_is_allowed_is_tried_beside_what_is_there() -> None:
    """And shown where it is used; experts whose devices are in several nodes gain by fewer bits."""
    job, cluster = job_of(model=PRESETS["qwen3_30b_a3b"](), seq_len=4096, global_sequences=256), cluster_of("64x910B")
    space = Space.of(job, cluster, tp=(1,), cp=(1,), pp=(1,), ep=(64,), expert_tp=(1,), micro=(1,), offload=(False,))
    fewer = Techniques(expert_wire="int8", reduce_dtype="bf16")
    plain, both = (search_among(job, cluster, each, space=space) for each in ([PLAIN], [PLAIN, fewer]))
    assert not any(each.plan.techniques.keys for each in plain.best)
    assert both.best[0].plan.techniques == fewer and both.best[0].time.step_s < plain.best[0].time.step_s
    assert [each.layout for each in both.best] == [each.layout for each in plain.best]
    assert both.rejections.total("slower") == plain.rejections.total("slower")
    assert search_among(job, cluster, [PLAIN, ONE_BIT], space=space).best == plain.best  # it has no room
