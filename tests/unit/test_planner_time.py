"""The planner's step time: the pipeline against the simulated lists, and what must hold between plans."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.config import CorpusConfig, DataConfig
from ascend_moe_train.model.counts import block_flops_per_token, forward_flops_per_token, moe_layers
from ascend_moe_train.parallel.config import ParallelConfig
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.parallel.schedule import schedule
from ascend_moe_train.parallel.timeline import equal_stages, simulate
from ascend_moe_train.parallel.traffic import model_traffic
from ascend_moe_train.planner.block_time import TILE, PassTime, product_s
from ascend_moe_train.planner.efficiency import efficiencies
from ascend_moe_train.planner.hardware import Cluster, parse_cluster
from ascend_moe_train.planner.layers import Product, Slice, block_cost
from ascend_moe_train.planner.memory import activations
from ascend_moe_train.planner.plan import BALANCED, ENGINES, Imbalance, Job, Plan, check
from ascend_moe_train.planner.step_time import pipeline_s, time_of
from ascend_moe_train.presets import PRESETS
from ascend_moe_train.train.config import BatchConfig, RunConfigPart

V3 = Job(model=PRESETS["deepseek_v3"](), seq_len=4096, global_sequences=1024)
MOE = Job(model=PRESETS["qwen3_30b_a3b"](), seq_len=4096, global_sequences=512, engine=ENGINES["megatron"])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(("pp", "num_micro"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 16)])
def test_the_pipeline_is_that_of_the_lists(name: str, pp: int, num_micro: int) -> None:
    """Equal stages: the closed form is what the lists that the trainer runs take."""
    chunks = 2 if name == "interleaved" else 1
    durations = equal_stages(name, chunks, forward_s=1.0, backward_s=2.0, weight_s=1.0)  # type: ignore[arg-type]  # one of the four
    wanted = simulate(schedule(name, pp, num_micro, chunks), durations).step_s  # type: ignore[arg-type]  # one of the four
    one = PassTime(
        forward_s=1 / chunks, backward_s=2 / chunks, weight_s=1 / chunks, forward_parts={}, backward_parts={}
    )
    found = pipeline_s(name, (one,) * (pp * chunks), pp, num_micro)  # type: ignore[arg-type]  # one of the four
    assert found.busy_s == pytest.approx(3 * num_micro)
    assert found.busy_s + found.bubble_s == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("preset", ["llama3_8b", "deepseek_v3", "gpt_oss_120b", "qwen3_30b_a3b"])
def test_products_are_the_models_flops(preset: str) -> None:
    """On one device, products and attention of all blocks are what `model.counts` counts."""
    job = Job(model=PRESETS[preset](), seq_len=4096, global_sequences=8)
    cut = Slice(1, False, 1, "ring", 1, 1, 1)
    for kind in {0, job.model.num_layers - 1}:
        cost = block_cost(job, cut, kind)
        found = sum(product.flops for product in cost.products) + cost.core_flops
        assert found == pytest.approx(4096 * block_flops_per_token(job.model, kind, 4096), rel=1e-6)


def test_items_are_the_step() -> None:
    plan = Plan.even(V3, 256, pp=8, ep=32, zero_stage=1)
    assert check(V3, plan) is None
    found = time_of(V3, parse_cluster("256x910B"), plan)
    assert found.step_s == sum(found.items.values())
    assert min(found.items.values()) >= 0
    assert found.tokens_per_s == pytest.approx(V3.tokens_per_step / found.step_s)
    assert 0 < found.mfu < 1
    assert found.model_flops == 3 * forward_flops_per_token(V3.model, 4096) * V3.tokens_per_step
    assert len(found.passes) == 8


def faster(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    inside = replace(device.inside, bytes_per_s=device.inside.bytes_per_s * factor)
    across = replace(device.across, bytes_per_s=device.across.bytes_per_s * factor)
    return replace(cluster, device=replace(device, inside=inside, across=across))


@settings(max_examples=40, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 4, 16]),
    zero=st.sampled_from([0, 1, 2, 3]),
    name=st.sampled_from(["64x910B", "64xA100", "64xH800", "64x910C"]),
)
def test_a_faster_network_never_slows(pp: int, tp: int, ep: int, zero: int, name: str) -> None:
    plan = Plan.even(MOE, 64, pp=pp, tp=tp, ep=ep, zero_stage=zero, sequence_parallel=tp > 1)
    cluster = parse_cluster(name)
    steps = [time_of(MOE, faster(cluster, factor), plan).step_s for factor in (1, 2, 4)]
    assert steps[0] >= steps[1] >= steps[2]


def test_imbalance_and_crossing_nodes_cost() -> None:
    cluster = parse_cluster("64x910B")
    inside, across = (Plan.even(MOE, 64, ep=ep, zero_stage=1) for ep in (8, 64))
    even = time_of(MOE, cluster, inside, BALANCED)
    skewed = time_of(MOE, cluster, inside, Imbalance(expected=2.0, worst=2.0))
    assert skewed.items["experts"] > 1.5 * even.items["experts"]
    assert time_of(MOE, cluster, across, BALANCED).exposed["ep"] > 2 * even.exposed["ep"]


def test_what_is_kept_decides_about_forward_passes_again() -> None:
    plan = Plan.even(V3, 256, pp=8, ep=32, zero_stage=1)
    cluster = parse_cluster("256x910B")
    ours = time_of(V3, cluster, plan)
    residuals = time_of(replace(V3, engine=replace(V3.engine, keeps="residuals")), cluster, plan)
    assert "recompute" in ours.items
    assert "recompute" not in residuals.items
    assert residuals.step_s < ours.step_s


def test_inputs_of_blocks_that_are_kept_save_a_forward_pass() -> None:
    """And take room: the input of each block for each micro-batch in flight."""
    cluster = parse_cluster("256x910B")
    plan = Plan.even(V3, 256, pp=8, ep=32, zero_stage=1, recompute="full")
    kept = replace(plan, recompute_kept="block_inputs")
    step, saving = time_of(V3, cluster, plan), time_of(V3, cluster, kept)
    for before, after in zip(step.passes[1:-1], saving.passes[1:-1], strict=True):
        assert before.backward_s - after.backward_s == pytest.approx(before.forward_s)
    assert saving.passes[-1] == step.passes[-1]
    blocks = plan.stage_layers[0] * V3.seq_len * V3.model.hidden * V3.activation_bytes
    room = [activations(V3, each, 0, 1.0)["activations"] for each in (plan, kept)]
    assert room[1] - room[0] == pytest.approx((plan.pp - 1) * blocks)


def test_classes_have_possible_efficiencies() -> None:
    for found in efficiencies().values():
        assert 0 < found.product < 1
        assert 0 < found.core < 1
        assert 0 <= found.hidden < 1


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"etp": 2}])
@pytest.mark.parametrize("preset", ["qwen3_30b_a3b", "llama3_8b", "deepseek_v2_lite"])
def test_collectives_of_a_layer_are_those_of_the_engine(preset: str, parallel: dict[str, Any]) -> None:
    """What one layer more puts into the collectives of a step, against `parallel.traffic`, where an all-gather counts
    what each rank gives, and here what it gets. Figures of the routing, which are small, are not counted here."""
    if "etp" in parallel and preset == "llama3_8b":
        return
    totals: list[dict[tuple[str, str], int]] = []
    for layers in (3, 4):
        model = PRESETS[preset]().model_copy(update={"num_layers": layers})
        run = RunConfig(
            run=RunConfigPart(dir="x", steps=200, precision="fp16"),
            model=model,
            data=DataConfig(train=(CorpusConfig(path="x"),), tokenizer="x", seq_len=1024),
            batch=BatchConfig(global_sequences=8, micro_sequences=2),
            parallel=ParallelConfig(**parallel),
        )
        mesh = mesh_of(run, 4)
        totals.append(model_traffic(run, mesh, [0] * len(moe_layers(model))))
    job = Job(model=model, seq_len=1024, global_sequences=8, precision="fp16")
    plan = Plan.even(job, 4, micro_sequences=2, **parallel)
    found: dict[tuple[str, str], float] = {}
    for move in block_cost(job, Slice.of(plan), 3).moves:
        size = getattr(plan, move.axis) if move.verb == "all_gather" else 1
        key = (move.verb, move.axis)
        found[key] = found.get(key, 0.0) + 2 * 4 * plan.num_micro(job) * move.size_bytes / size
    wanted = {key: size - totals[0].get(key, 0) for key, size in totals[1].items() if key[1] in ("tp", "etp")}
    if "etp" in parallel:  # there is room for whatever may come, here for what comes on average
        assert found.keys() == wanted.keys()
    else:
        assert found == {key: size for key, size in wanted.items() if size}


def test_zero_bubble_of_ours_does_forward_passes_twice_again() -> None:
    """As `Stages.passes` counts them."""
    cluster = parse_cluster("256x910B")
    steps = {
        name: time_of(V3, cluster, Plan.even(V3, 256, pp=8, ep=32, zero_stage=1, schedule=name))
        for name in ("1f1b", "zero_bubble")
    }
    again = {name: [each.backward_parts.get("recompute", 0.0) for each in step.passes] for name, step in steps.items()}
    assert again["zero_bubble"][1] == pytest.approx(2 * again["1f1b"][1])
    assert again["zero_bubble"][0] == pytest.approx(again["1f1b"][0])
    assert again["1f1b"][-1] == 0 < again["zero_bubble"][-1]


def test_a_product_fills_whole_rounds_of_cores() -> None:
    """The last round is half empty on average: a tenth of the step for five rounds, whatever the shape; gradients of
    weights have results of their own size, and few tokens do not make those small."""
    device, efficiency = parse_cluster("8xA100").device, replace(efficiencies()["ampere"], product_knee=0.0)
    ideal = Product("head", TILE, 5 * device.num_cores, 4096)
    whole = ideal.flops / (device.peak("bf16") * efficiency.product)
    assert product_s(ideal, device, device.peak("bf16"), efficiency) == pytest.approx(1.1 * whole)
    few = Product("feed-forward", 512, 4096, 16384)
    made, of_input, of_weight = (product_s(each, device, device.peak("bf16"), efficiency) for each in few.passes)
    assert few.flops == few.passes[1].flops == few.passes[2].flops
    assert made > of_input > of_weight


def test_a_collective_hides_behind_its_own_product() -> None:
    """Not behind more than that takes: narrow products hide less of it."""
    engine = replace(ENGINES["megatron"], overlaps=frozenset({"tp"}))
    shares = []
    for hidden in (4096, 8192):
        model = PRESETS["llama3_8b"]().model_copy(
            update={"hidden": hidden, "ffn": 7 * hidden // 2, "num_heads": hidden // 128}
        )
        job = Job(model=model, seq_len=4096, global_sequences=64, engine=engine)
        plan = Plan.even(job, 8, tp=8, sequence_parallel=True)
        alone = replace(job, engine=replace(engine, overlaps=frozenset()))
        cluster = parse_cluster("8x910B")
        shares.append(time_of(job, cluster, plan).items["tp"] / time_of(alone, cluster, plan).items["tp"])
    assert 1 - efficiencies()["ascend"].hidden <= shares[1] < shares[0] < 1


def test_a_ring_sees_the_keys_of_one_rank_at_a_time() -> None:
    job = Job(model=PRESETS["llama3_8b"](), seq_len=32768, global_sequences=64)
    ring, ulysses = (
        time_of(job, parse_cluster("8x910B"), Plan.even(job, 8, cp=8, context=context)).items["attention"]
        for context in ("ring", "ulysses")
    )
    assert ring > ulysses


@pytest.mark.parametrize(
    ("names", "wanted"), [({"core"}, 1), ({"norms"}, 1), ({"core", "norms"}, 2), ({"experts"}, 2), (set(), 0)]
)
def test_what_a_selective_policy_makes_again(names: set[str], wanted: int) -> None:
    """Each part takes its time: attention products even if scores are not stored, experts with their exchange."""
    plan = Plan.even(MOE, 64, ep=8, recompute="selective")
    job = replace(MOE, engine=replace(MOE.engine, selective=frozenset(names)))
    found = time_of(job, parse_cluster("64xA100"), plan).items
    again = found.get("recompute", 0.0)
    assert (again > 0) == (wanted > 0)
    if names == {"core", "norms"}:
        parts = [
            time_of(
                replace(MOE, engine=replace(MOE.engine, selective=frozenset({each}))), parse_cluster("64xA100"), plan
            )
            for each in names
        ]
        assert again == pytest.approx(sum(each.items["recompute"] for each in parts))
    if names == {"experts"}:
        assert again > found["ep"] / 2


def test_gradients_that_are_no_buffer_are_added_for_every_micro_batch() -> None:
    """Read and written whole, however few tokens there were."""
    plan = Plan.even(MOE, 64, ep=8)
    cluster = parse_cluster("64xA100")
    loose = replace(MOE, engine=replace(MOE.engine, has_buffers=False))
    more = time_of(loose, cluster, plan).items["other"] - time_of(MOE, cluster, plan).items["other"]
    cost = block_cost(MOE, Slice.of(plan), 0)
    moved = 2 * MOE.engine.gradient_bytes * (cost.dense + cost.expert) * MOE.model.num_layers * plan.num_micro(MOE)
    assert more == pytest.approx(moved / (cluster.device.memory_bytes_per_s * efficiencies()["ampere"].vector))
