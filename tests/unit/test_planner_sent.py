"""What plans say of bytes, memory and refusals is what the run has: closed forms of `parallel`, rank by rank."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.model.counts import moe_layers
from ascend_moe_train.parallel.compress_costs import TwoStageSizes, low_rank_bytes
from ascend_moe_train.parallel.config import CompressConfig
from ascend_moe_train.parallel.expert_sizes import expected_nodes
from ascend_moe_train.parallel.mesh import mesh_of, num_micro
from ascend_moe_train.parallel.sharing import zero_plan_of
from ascend_moe_train.parallel.traffic import model_sent
from ascend_moe_train.parallel.zero_costs import zero_bytes, zero_sent
from ascend_moe_train.planner import wires
from ascend_moe_train.planner.brings import technique_lines
from ascend_moe_train.planner.collectives import collective_s
from ascend_moe_train.planner.hardware import Cluster, parse_cluster
from ascend_moe_train.planner.judge import judged
from ascend_moe_train.planner.layers import kind_of
from ascend_moe_train.planner.memory import memory_of
from ascend_moe_train.planner.plan import BALANCED, Imbalance, Job, Plan, check
from ascend_moe_train.planner.run_file import plan_of_run
from ascend_moe_train.planner.scored import scored
from ascend_moe_train.planner.sent import compressed, moved_bytes, run_of, sent_bytes
from ascend_moe_train.planner.step_time import time_of
from ascend_moe_train.planner.techniques import PLAIN, Techniques
from ascend_moe_train.presets import PRESETS
from tests.parity.layouts import COMPOSED, MODELS, NAMED, run_config

ONE_BIT = Techniques(compress=CompressConfig(method="onebit_adam", block=256))
INT8 = Techniques(compress=CompressConfig(method="int8", block=256), bucket_bytes=2**20)
POWER = Techniques(compress=CompressConfig(method="powersgd"), bucket_bytes=2**20)
WIRED: dict[str, tuple[int, dict[str, Any]]] = {
    "ep4, int8, nodes of 2": (4, {"ep": 4, "expert_wire": "int8", "hierarchical_ranks": 2}),
    "ep2, fp16, chunks": (4, {"ep": 2, "expert_wire": "fp16", "expert_chunks": 2, "reduce_dtype": "fp16"}),
    "cp2, one bit": (4, {"cp": 2, "ep": 2, "compress": {"method": "onebit_adam"}, "bucket_bytes": 8192}),
    "powersgd": (4, {"compress": {"method": "powersgd", "rank": 2}}),
}


def runs() -> Iterator[tuple[str, RunConfig, int]]:
    """A training of every layout of the parity tests, and of techniques."""
    for case in {case.layout: case for case in (*NAMED, *COMPOSED)}.values():
        yield case.name, case.run(), case.num_ranks
    batch = {"global_sequences": 8, "micro_sequences": 2}
    for name, (ranks, parallel) in WIRED.items():
        yield name, run_config(MODELS["deepseek"], batch, parallel), ranks


@pytest.mark.parametrize(("name", "run", "ranks"), [pytest.param(*each, id=each[0]) for each in runs()])
def test_bytes_of_a_plan_are_those_of_all_ranks_of_the_run(name: str, run: RunConfig, ranks: int) -> None:
    mesh = mesh_of(run, ranks)
    job = Job(model=run.model, seq_len=run.data.seq_len, global_sequences=run.batch.global_sequences, precision="fp32")
    plan = plan_of_run(run, ranks)
    assert run_of(job, plan).parallel == run.parallel.model_copy(
        update={"stage_layers": plan.stage_layers if run.parallel.pp > 1 else "even"}
    )
    moe = run.model.moe
    assert moe is not None
    layers = len(moe_layers(run.model))
    accepted = [job.tokens_per_step * moe.top_k] * layers
    nodes = plan.nodes[1] if plan.nodes is not None else 1
    crossing = [round(job.tokens_per_step * expected_nodes(moe.num_experts, moe.top_k, nodes))] * layers
    of_model = model_sent(run, mesh, accepted, crossing)
    for in_warm_up in (False, True):
        expected: dict[tuple[str, ...], float] = {tuple(k): n for k, n in of_model.items()}
        for rank in range(ranks):
            zero = zero_plan_of(run, mesh, rank)
            for key, (_, size) in zero_sent(zero, num_micro(run.batch, mesh), sends_momenta=not in_warm_up).items():
                expected[key] = expected.get(key, 0) + size
        found = sent_bytes(job, plan, in_warm_up=in_warm_up)
        assert {key: ranks * size for key, size in found.items()} == pytest.approx(expected)
        assert moved_bytes(job, plan, found).keys() == found.keys()


def job_of(preset: str = "demo", sequences: int = 64) -> Job:
    return Job(model=PRESETS[preset](), seq_len=256, global_sequences=sequences, precision="fp32")


def dense_shapes(job: Job, plan: Plan) -> list[list[tuple[int, ...]]]:
    """Of each compressed bucket."""
    run = run_of(job, plan)
    zero = zero_plan_of(run, mesh_of(run, plan.num_devices), 0)
    return [[zero.trained[i].shape for i in b] for b in zero.buckets.reduced if zero.is_compressed(b)]


@pytest.mark.parametrize("techniques", [ONE_BIT, INT8, POWER])
def test_memory_has_what_compression_remembers(techniques: Techniques) -> None:
    job, cluster = job_of(), parse_cluster("4xcpu")
    plain = Plan.even(job, 4, micro_sequences=4)
    plan = replace(plain, techniques=techniques)
    buckets = dense_shapes(job, plan)
    assert len(buckets) > (techniques.bucket_bytes == 2**20)
    lost = 0
    for shapes in buckets:
        if techniques is POWER:
            lost += low_rank_bytes(shapes, techniques.compress.rank)[1]
        else:
            size = sum(map(prod, shapes))
            lost += TwoStageSizes(size=size, ranks=4, block=256).lost_bytes
    found, before = (memory_of(job, cluster, each).stages[0].items["optimizer"] for each in (plan, plain))
    assert found - before == lost > 0
    run, mesh = run_of(job, plan), mesh_of(run_of(job, plan), 4)
    assert found == zero_bytes(zero_plan_of(run, mesh, 0), 2).optimizer


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """Verb, bytes and size of the group of each collective of rows and gradients that is timed."""
    found: list[tuple[str, float, int]] = []
    inner = collective_s

    def told(verb: str, size_bytes: float, group: Any, *others: Any, **more: Any) -> float:
        found.append((verb, size_bytes, group.size))
        return inner(verb, size_bytes, group, *others, **more)

    monkeypatch.setattr(wires, "collective_s", told)
    return found


SUMMED = [
    (PLAIN, "gradients"),
    (Techniques(reduce_dtype="bf16"), "gradients bf16"),
    (INT8, "gradients int8"),
    (POWER, "gradients powersgd"),
    (ONE_BIT, "momenta 1-bit"),
]


@pytest.mark.parametrize(("techniques", "content"), SUMMED)
def test_sums_of_gradients_are_timed_with_the_bytes_that_are_sent(
    techniques: Techniques, content: str, timed: list[tuple[str, float, int]]
) -> None:
    demo, cluster = job_of(), parse_cluster("8xcpu")
    job = replace(demo, model=demo.model.model_copy(update={"moe": None}))
    time_of(job, cluster, plan := Plan.even(job, 8, techniques=techniques), BALANCED)
    found: dict[str, float] = {}
    for verb, size_bytes, n in timed:
        found[verb] = found.get(verb, 0.0) + size_bytes / (n if verb == "all_gather" else 1)
    # calls that are alike are timed once
    alike = {key[0]: calls for key, (calls, _) in compressed(job, plan)[0].items()} if techniques.is_compressed else {}
    sent = {key[0]: size for key, size in sent_bytes(job, plan).items() if key[1:] == ("dp_cp", content)}
    assert {verb: size * alike.get(verb, 1) for verb, size in found.items()} == pytest.approx(sent)


@pytest.mark.parametrize(
    "techniques",
    [
        PLAIN,
        Techniques(expert_wire="int8"),
        Techniques(expert_wire="fp16", expert_chunks=2),
        Techniques(expert_wire="bf16", hierarchical_ranks=2),
    ],
)
def test_rows_are_timed_with_the_bytes_that_are_sent(
    techniques: Techniques, timed: list[tuple[str, float, int]]
) -> None:
    """Once there and once back, for a layer of each kind."""
    job, cluster = job_of(), parse_cluster("8xcpu")
    plan = Plan.even(job, 8, ep=4, techniques=techniques)
    time_of(job, cluster, plan, BALANCED)
    kinds = {kind_of(job, layer) for layer in range(job.model.num_layers) if job.model.is_moe(layer)}
    of_layer = sum(size_bytes for verb, size_bytes, _ in timed if verb == "all_to_all") / len(kinds)
    sent = sum(size for key, size in sent_bytes(job, plan).items() if key[2].startswith("expert rows"))
    passes = 2 * plan.num_micro(job) * techniques.expert_chunks
    assert of_layer * len(moe_layers(job.model)) * passes == pytest.approx(sent)


def test_refusals_are_those_of_the_configuration() -> None:
    job = job_of()
    for choices in ({"tp": 2}, {"pp": 2}, {"zero_stage": 1}, {"offload_optimizer": True}):
        plan = Plan.even(job, 4, techniques=ONE_BIT, **choices)
        with pytest.raises(ConfigError) as error:
            plan.parallel()
        key, value = next(iter(choices.items()))
        assert str(error.value) == check(job, plan)
        assert f"compress.method 'onebit_adam' with {key} {value}" in str(error.value)
    assert "expert_wire 'int8' has no effect with ep 1" in str(
        check(job, Plan.even(job, 4, techniques=Techniques(expert_wire="int8")))
    )


def lines_of(job: Job, cluster: Cluster, plan: Plan) -> str:
    return "\n".join(technique_lines(job, cluster, Imbalance(), scored(job, cluster, plan, Imbalance())))


def test_what_techniques_bring_is_said() -> None:
    job, cluster = job_of(), parse_cluster("8xcpu")
    plan = Plan.even(job, 8, micro_sequences=8, ep=8)
    assert lines_of(job, cluster, plan) == ""
    one_bit = lines_of(
        job, cluster, replace(plan, techniques=Techniques(compress=CompressConfig(method="onebit_adam")))
    )
    assert one_bit.startswith("compress onebit_adam: gradients 1/30.7 after the warm-up, ")
    assert "in all w + (1 - w)/30.7 of that" in one_bit and "of error feedback on each device" in one_bit
    wired = Techniques(expert_wire="int8", hierarchical_ranks=2)
    rows, nodes = lines_of(job, cluster, replace(plan, techniques=wired)).splitlines()
    assert rows.startswith("expert_wire int8: expert rows 1/3.94, ")
    assert nodes.startswith("hierarchical_ranks 2: expert rows int8 x 1.43, ")
    early = lines_of(job, cluster, replace(plan, techniques=Techniques(overlap=True)))
    assert early.startswith("overlap: +") and early.endswith(" shorter")


def test_a_run_that_its_ranks_would_refuse_is_refused() -> None:
    run = run_of(job_of(), Plan.even(job_of(), 8, techniques=Techniques(overlap=True)))
    assert judged(run, parse_cluster("8xcpu"), Imbalance(), "run").complaint is None
    with pytest.raises(ConfigError, match="overlap true is for ranks that talk through MPI, on CPUs, not for 8x910B2"):
        judged(run, parse_cluster("8x910B"), Imbalance(), "run")
