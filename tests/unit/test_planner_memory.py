"""The planner's memory against closed forms of the literature, and what must hold between plans."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.counts import num_parameters
from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.parallel.schedule import bounds
from ascend_moe_train.planner.cpu_graph import (
    AGAIN_BYTES,
    COLLECTIVES_BYTES,
    DATA_BYTES,
    EXPERT_BYTES,
    LAYER_BYTES,
    graph_bytes,
)
from ascend_moe_train.planner.hardware import parse_cluster
from ascend_moe_train.planner.layers import Slice, block_cost
from ascend_moe_train.planner.memory import activations, in_flight_bound, memory_of, stage_parameters, states_of
from ascend_moe_train.planner.plan import BALANCED, ENGINES, Imbalance, Job, Plan
from ascend_moe_train.planner.summing import reduced_bytes, summed_bytes
from ascend_moe_train.presets import PRESETS

PAPER = replace(ENGINES["megatron"], flash=False, dropout=True, selective=frozenset({"scores"}), shares_inputs=False)


def gpt(layers: int, hidden: int, heads: int, seq_len: int, micro: int = 1) -> Job:
    model = ModelConfig(
        vocab_size=51200, hidden=hidden, num_layers=layers, num_heads=heads, num_kv_heads=heads, ffn=4 * hidden
    )
    return Job(model=model, seq_len=seq_len, global_sequences=micro * 64, engine=PAPER, plain_ffn=True)


def zero(parameters: float, size: int, stage: int, engine: str = "zero") -> float:
    job = Job(
        model=PRESETS["tiny"](),
        seq_len=64,
        global_sequences=64,
        engine=ENGINES[engine],
    )
    states = states_of(job, parameters, size, stage)
    return states.weights + states.gradients + states.optimizer


@pytest.mark.parametrize("size", [1, 2, 4, 64])
def test_states_are_those_of_zero(size: int) -> None:
    """Rajbhandari et al. (2020), figure 1, whose 12 bytes of states are K."""
    assert zero(1e9, size, 0) == 16e9
    assert zero(1e9, size, 1) == pytest.approx((4 + 12 / size) * 1e9, rel=1e-12)
    assert zero(1e9, size, 2) == pytest.approx((2 + 14 / size) * 1e9, rel=1e-12)
    assert zero(1e9, size, 3) == pytest.approx(16e9 / size, rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 8, 128])
def test_megatron_needs_6_and_12_through_d_bytes(size: int) -> None:
    assert zero(1e9, size, 1, "megatron") == pytest.approx((6 + 12 / size) * 1e9, rel=1e-12)
    assert zero(1e9, size, 0, "megatron") == 18e9


def test_64_billion_parameters_go_from_64_to_22_gb() -> None:
    """The pair of figures behind "1T on 64 cards": MP16 x DP4, 4 billion parameters on a device."""
    assert zero(64e9 / 16, 4, 0) / 1e9 == 64
    assert zero(64e9 / 16, 4, 2) / 1e9 == 22


def test_1t_does_not_fit_on_64_devices() -> None:
    rows = {1: (16000, 4187.5, 2218.75, 250), 8: (2000, 687.5, 468.75, 250), 16: (1000, 437.5, 343.75, 250)}
    for cut, wanted in rows.items():
        assert [zero(1e12 / cut, 64 // cut, stage) / 1e9 for stage in range(4)] == pytest.approx(wanted)
    assert [zero(1e12 / 64, 1, stage) / 1e9 for stage in range(4)] == [250] * 4


@pytest.mark.parametrize(
    ("pp", "ep", "wanted"),
    [
        (4, 8, (71.2, 37.5, 31.9, 26.2)),
        (8, 8, (35.6, 28.6, 27.4, 26.2)),
        (2, 8, (142.4, 55.3, 40.8, 26.2)),
        (2, 32, (67.7, 36.6, 31.4, 26.2)),
        (1, 64, (110.4, 47.3, 36.8, 26.2)),
    ],
)
def test_experts_are_replicated_over_their_own_ranks(pp: int, ep: int, wanted: tuple[float, ...]) -> None:
    """A model of 105 billion parameters, 99.7 of them in experts, on 64 devices: GB of states."""
    dense, experts = 5.34e9 / pp, 99.66e9 / (pp * ep)
    found = [(zero(dense, 64 // pp, stage) + zero(experts, 64 // (pp * ep), stage)) / 1e9 for stage in range(4)]
    assert found == pytest.approx(wanted, abs=0.11)


@pytest.mark.parametrize(("hidden", "heads", "seq_len", "micro"), [(6144, 64, 2048, 4), (512, 8, 128, 1)])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_activations_are_those_of_korthikanti(hidden: int, heads: int, seq_len: int, micro: int, tp: int) -> None:
    """Equations 1, 2 and 4 to 6 of arXiv 2205.05198, exactly."""
    job = gpt(2, hidden, heads, seq_len, micro)
    s, b, h, a = seq_len, micro, hidden, heads
    whole = block_cost(job, Slice(tp, False, 1, "ring", 1, 1, micro), 0).kept_bytes
    split = block_cost(job, Slice(tp, True, 1, "ring", 1, 1, micro), 0).kept_bytes
    assert whole["none"] == pytest.approx(s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp)), rel=1e-14)
    assert whole["selective"] == pytest.approx(s * b * h * (10 + 24 / tp), rel=1e-14)
    assert whole["full"] == 2 * s * b * h
    assert split["none"] == pytest.approx(s * b * h / tp * (34 + 5 * a * s / h), rel=1e-14)
    assert split["selective"] == pytest.approx(s * b * h * 34 / tp, rel=1e-14)


def test_first_stage_holds_a_micro_batch_for_each_stage() -> None:
    """Section 4.2.3: the first stage keeps all layers' worth of activations, L / p layers of p micro-batches."""
    job = gpt(16, 512, 8, 128)
    cut = Slice(2, True, 1, "ring", 1, 1, 1)
    layer = block_cost(job, cut, 0).kept_bytes["none"]
    plan = Plan.even(job, 8, pp=4, tp=2, sequence_parallel=True)
    assert activations(job, plan, 0, 1.0)["activations"] == 16 * layer
    assert activations(job, plan, 3, 1.0)["activations"] == 4 * layer
    interleaved = Plan.even(job, 8, pp=4, tp=2, sequence_parallel=True, chunks=2, schedule="interleaved")
    assert activations(job, interleaved, 0, 1.0)["activations"] == 16 * layer * (1 + 3 / (4 * 2))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble", "interleaved"])
@pytest.mark.parametrize(("pp", "num_micro"), [(2, 1), (4, 8), (8, 3)])
def test_in_flight_is_that_of_the_schedule(name: str, pp: int, num_micro: int) -> None:
    chunks = 2 if name == "interleaved" else 1
    wanted = bounds(name, pp, num_micro, chunks)  # type: ignore[arg-type]  # one of the four names
    found = [in_flight_bound(name, pp, num_micro, chunks, stage) for stage in range(pp)]  # type: ignore[arg-type]  # same
    assert tuple(found) == wanted


@pytest.mark.parametrize("name", ["tiny", "deepseek_v3", "qwen3_235b_a22b", "llama3_8b", "gpt_oss_120b"])
def test_one_device_has_the_whole_model(name: str) -> None:
    job = Job(model=PRESETS[name](), seq_len=4096, global_sequences=8)
    assert sum(stage_parameters(job, Plan.even(job, 1), 0)) == num_parameters(job.model)


MOE = Job(model=PRESETS["qwen3_30b_a3b"](), seq_len=4096, global_sequences=256, engine=ENGINES["megatron"])


@settings(max_examples=60, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 8]),
    dp=st.sampled_from([2, 4, 8]),
    engine=st.sampled_from(["ours", "megatron", "zero"]),
)
def test_more_zero_and_more_devices_need_no_more(pp: int, tp: int, ep: int, dp: int, engine: str) -> None:
    job = replace(MOE, engine=ENGINES[engine])
    cluster = parse_cluster("64x910B")

    def peak(stage: int, size: int) -> float:
        num_devices = pp * tp * size * 8
        choices = {"tp": tp, "ep": ep, "zero_stage": stage, "sequence_parallel": tp > 1}
        return memory_of(
            job, cluster.of(num_devices), Plan.even(job, num_devices, pp=pp, **choices), BALANCED
        ).peak_bytes

    sizes = [peak(stage, dp) for stage in range(4)]
    assert sizes[1] <= sizes[0] * (1 if engine != "ours" else 1.2)
    assert sizes[3] <= sizes[2] <= sizes[1]
    for stage in range(4):
        assert peak(stage, 2 * dp) <= peak(stage, dp)


def test_deeper_recomputation_keeps_less() -> None:
    sizes = []
    job = replace(MOE, engine=ENGINES["ours"])
    for policy in ("none", "selective", "full"):
        plan = Plan.even(job, 16, tp=2, ep=8, sequence_parallel=True, recompute=policy)
        sizes.append(memory_of(job, parse_cluster("16x910B"), plan).stages[0].items["activations"])
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_inputs_of_blocks_that_are_kept(schedule: ScheduleName) -> None:
    """One for each block and micro-batch in flight but the one whose backward pass makes its own; none on the last
    stage, whose forward pass is part of its backward pass."""
    job = replace(MOE, engine=ENGINES["ours"])
    plan = Plan.even(job, 32, pp=4, ep=8, recompute="full", schedule=schedule)
    sizes = [
        [stage.items["activations"] for stage in memory_of(job, parse_cluster("32x910B"), each).stages]
        for each in (plan, replace(plan, recompute_kept="block_inputs"))
    ]
    one = 4096 * job.model.hidden * job.activation_bytes
    num_micro = plan.num_micro(job)
    alive = [num_micro if schedule == "gpipe" else 4 - stage for stage in range(4)]
    wanted = [(alive[stage] - 1) * plan.stage_layers[stage] * one for stage in range(3)]
    assert [more - less for less, more in zip(*sizes, strict=True)] == pytest.approx([*wanted, 0.0])


def test_items_are_the_whole() -> None:
    memory = memory_of(MOE, parse_cluster("64x910B"), Plan.even(MOE, 64, pp=4, ep=8, zero_stage=1))
    assert len(memory.stages) == 4
    for stage in memory.stages:
        assert stage.total_bytes == sum(stage.items.values())
        assert min(stage.items.values()) >= 0
    assert memory.peak_bytes == memory.stages[memory.fullest].total_bytes


def test_offload_moves_states_to_the_host() -> None:
    cluster = parse_cluster("16x910B")
    here = memory_of(MOE, cluster, Plan.even(MOE, 16, ep=16, zero_stage=1))
    away = memory_of(MOE, cluster, Plan.even(MOE, 16, ep=16, zero_stage=1, offload_optimizer=True))
    assert here.host_bytes == 0 < away.host_bytes
    assert away.peak_bytes < here.peak_bytes
    assert away.stages[0].items["optimizer"] == 0


@pytest.mark.parametrize(("copies", "wanted"), [((0, 0), 4), ((2, 2), 10), ((3, 3), 14), ((3, 4), 18)])
def test_logits_of_a_loss(copies: tuple[int, int], wanted: int) -> None:
    """Bytes of each logit that tp cuts: fused; Megatron's in place; torch's on whole logits, and on parts."""
    job = replace(MOE, engine=replace(ENGINES["megatron"], fp32_logits=copies))
    plan = Plan.even(job, 8, tp=2)
    without = replace(job, engine=replace(job.engine, fp32_logits=(0, 0)))
    more = activations(job, plan, 0, 1.0)["loss"] - activations(without, plan, 0, 1.0)["loss"]
    assert more == pytest.approx((wanted - 4) * 4096 * job.model.vocab_size / 2)


def test_outputs_that_are_kept() -> None:
    """One for each micro-batch in flight, of every stage that sends; tp cuts them with sequence parallelism."""
    job = replace(MOE, engine=replace(ENGINES["megatron"], keeps_outputs=True))
    stream = 4096 * job.model.hidden * job.activation_bytes
    for is_split in (False, True):
        plan = Plan.even(job, 32, pp=4, tp=2, sequence_parallel=is_split)
        more = [
            activations(job, plan, stage, 1.0)["activations"] - activations(MOE, plan, stage, 1.0)["activations"]
            for stage in range(4)
        ]
        one = stream / 2 if is_split else stream
        assert more == pytest.approx([4 * one, 3 * one, 2 * one, 0.0])


def test_what_is_cached_goes_when_the_device_is_full() -> None:
    cluster, roomy = parse_cluster("64xA100-80GB"), parse_cluster("64xA100-40GB")
    for each in (cluster, roomy):
        for stage in memory_of(MOE, each, Plan.even(MOE, 64, ep=8)).stages:
            room = max(0.0, each.device.memory_bytes - stage.total_bytes)
            assert 0 <= stage.cached_bytes <= room
    loose = replace(MOE, engine=replace(MOE.engine, has_buffers=False))
    plan = Plan.even(MOE, 64, pp=4, ep=8)
    held, cached = (memory_of(job, cluster, plan).stages[0] for job in (MOE, loose))
    assert 0 < held.cached_bytes < cached.cached_bytes
    assert all(stage.cached_bytes == 0 for stage in memory_of(MOE, parse_cluster("64x910B"), plan).stages)


DEMO = Job(model=PRESETS["demo"](), seq_len=256, global_sequences=8, precision="fp32")


def test_where_every_device_has_all_experts_rows_are_as_many_however_uneven() -> None:
    """Only ranks that share experts out can have more rows than others."""
    cluster = parse_cluster("2xcpu")
    uneven = Imbalance(expected=1.5, worst=3.0)
    for ep, is_more in ((1, False), (2, True)):
        plan = Plan.even(DEMO, 2, ep=ep, micro_sequences=4)
        even = memory_of(DEMO, cluster, plan, BALANCED).peak_bytes
        assert (memory_of(DEMO, cluster, plan, uneven).peak_bytes > even) == is_more


def test_on_a_cpu_gradients_come_as_activations_go() -> None:
    """Of one micro-batch they count only where they are more than what the passes need; of several there are sums."""
    cluster, parameters = parse_cluster("1xcpu"), num_parameters(DEMO.model)
    one, four = (Plan.even(DEMO, 1, micro_sequences=micro) for micro in (8, 2))
    assert memory_of(DEMO, cluster, one, BALANCED).stages[0].items["gradients"] == 0
    assert memory_of(DEMO, cluster, four, BALANCED).stages[0].items["gradients"] >= 4 * parameters
    few = replace(DEMO, global_sequences=1)
    small = memory_of(few, cluster, Plan.even(few, 1), BALANCED).stages[0].items
    assert sum(small[name] for name in ("gradients", "activations", "working", "loss")) >= 4 * parameters


@pytest.mark.parametrize(("stage", "copies"), [(0, 1.0), (1, 2.2), (2, 2.2), (3, 1.6)])
def test_what_sums_gradients_on_a_cpu(stage: int, copies: float) -> None:
    """A bucket and copies of what is summed; sums over micro-batches stand for one of them where weights are whole."""
    one, four = (Plan.even(DEMO, 2, zero_stage=stage, micro_sequences=micro) for micro in (4, 1))
    parameters = 10**9
    copy, bucket = 4 * parameters, one.techniques.bucket_bytes
    assert summed_bytes(DEMO, one, parameters, 0) == pytest.approx(copies * copy + bucket)
    assert summed_bytes(DEMO, four, parameters, 0) == pytest.approx((copies - (stage < 3)) * copy + bucket)
    assert summed_bytes(DEMO, one, 1000, 0) == pytest.approx((copies + 1) * 4 * 1000)
    alone = Plan.even(DEMO, 1, micro_sequences=8)
    assert summed_bytes(DEMO, alone, parameters, parameters) == 0.0


@pytest.mark.parametrize(("stage", "share"), [(0, 1.0), (2, 1.0), (3, 0.5)])
def test_what_a_backward_pass_ends_with_on_a_cpu(stage: int, share: float) -> None:
    """Gradients, in stage 3 this rank's, and what the last block needs."""
    plan = Plan.even(DEMO, 2, zero_stage=stage, micro_sequences=4)
    assert reduced_bytes(plan, 1000, 500, 1e6) == 1e6 + 4 * 1500 * share


def test_a_graph_on_a_cpu_grows_with_its_layers_and_what_is_in_them() -> None:
    """Each collective adds to every layer, the first one to the graph; a pipeline's stages have two graphs."""

    def of(ranks: int, recomputed: int = 0, layers: int = 4, **axes: Any) -> float:
        return graph_bytes(Plan.even(DEMO, ranks, micro_sequences=8 // ranks, **axes), layers, recomputed)

    assert of(1) == 4 * LAYER_BYTES and of(1, layers=8) == 8 * LAYER_BYTES
    assert of(1, 4, recompute="full") == 4 * (LAYER_BYTES + AGAIN_BYTES)
    assert of(2) == 4 * (LAYER_BYTES + DATA_BYTES) + COLLECTIVES_BYTES
    assert of(2, ep=2) == of(2) + 4 * EXPERT_BYTES
    assert of(2, tp=2) == 4 * LAYER_BYTES + COLLECTIVES_BYTES
    assert of(2, pp=2, layers=2) == 2 * 2 * LAYER_BYTES
