"""The ladder of `amt bench ablate` as data: what stands on what, which keys it changes, what is left out and why."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from ascend_moe_train.bench.ladder import BY_NAME, RUNGS, START, Case, cases, chosen, start_of
from ascend_moe_train.bench.wire import group_size, sent_bytes
from ascend_moe_train.config import RunConfig, load_run
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.config import GroupName
from ascend_moe_train.parallel.mesh import Mesh, mesh_of
from tests.small_run import write_run

STEPS = 6
DROPLESS = ("model.moe.capacity_factor=null",)


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    return write_run(tmp_path, tmp_path / "no-corpus")


def made(run_yaml: Path, ranks: int, *overrides: str, steps: int = STEPS) -> dict[str, Case]:
    given = load_run(run_yaml, overrides)
    start = start_of(given, ranks, steps)
    config = load_run(run_yaml, (*overrides, *start))

    def refused(words: Sequence[str]) -> str | None:
        try:
            load_run(run_yaml, (*overrides, *words))
        except ConfigError as error:
            return str(error)
        return None

    return {case.rung.name: case for case in cases(RUNGS, config, ranks, steps, start, refused)}


def config_of(run_yaml: Path, case: Case, *overrides: str) -> RunConfig:
    return load_run(run_yaml, (*overrides, *case.overrides))


def test_each_rung_stands_on_one_before_it_and_none_on_one_that_is_beside() -> None:
    seen: list[str] = []
    for rung in RUNGS:
        assert (rung.on in seen) if seen else rung.on is None, rung.name
        assert rung.on is None or not BY_NAME[rung.on].beside, rung.name
        seen.append(rung.name)
    assert len(set(seen)) == len(seen)


def test_every_key_that_a_rung_changes_is_set_at_the_start() -> None:
    at_start = [word.partition("=")[0] for word in START]
    for rung in RUNGS:
        for change in rung.changes:
            key = change.partition("=")[0]
            assert any(key == each or key.startswith(f"{each}.") for each in at_start), key


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rung_is_a_run_that_so_many_ranks_can_do(run_yaml: Path, ranks: int) -> None:
    given = (*DROPLESS, "model.moe.num_experts=8")
    found = made(run_yaml, ranks, *given)
    assert {name: case.why_not for name, case in found.items() if case.why_not is not None} == {}
    for case in found.values():
        mesh_of(config_of(run_yaml, case, *given), ranks)


def test_rungs_have_what_those_below_have(run_yaml: Path) -> None:
    found = made(run_yaml, 2, *DROPLESS)
    first = config_of(run_yaml, found["one_by_one"], *DROPLESS)
    assert (first.run.kernels, first.parallel.ep, first.parallel.bucket_bytes) == ("portable", 1, 1)
    recompute = config_of(run_yaml, found["recompute"], *DROPLESS)
    assert (recompute.run.kernels, recompute.parallel.ep, recompute.parallel.overlap) == ("auto", 2, True)
    assert (recompute.parallel.reduce_dtype, recompute.recompute.policy) == ("bf16", "selective")
    zero = config_of(run_yaml, found["zero3"], *DROPLESS)
    assert (zero.parallel.zero_stage, zero.recompute.policy) == (3, "selective")
    signs = config_of(run_yaml, found["onebit_adam"], *DROPLESS)
    assert (signs.parallel.compress.warmup_updates, signs.parallel.reduce_dtype) == (STEPS // 2, "fp32")


def test_what_the_run_file_says_of_a_technique_does_not_reach_the_first_rung(run_yaml: Path) -> None:
    given = (
        *DROPLESS,
        "parallel.compress.method=int8",
        "parallel.overlap=true",
        "recompute.policy=full",
        "parallel.ep=4",
        "parallel.hierarchical_ranks=2",
        "parallel.dedup_tokens=copies",
        "parallel.expert_wire=int8",
    )
    first = config_of(run_yaml, made(run_yaml, 2, *given)["one_by_one"], *given)
    assert (first.parallel.compress.method, first.parallel.overlap) == ("none", False)
    assert first.recompute.policy == "none"


def test_slow_links_reach_every_rung(run_yaml: Path) -> None:
    given = (*DROPLESS, "parallel.slow_links.latency_s=0.001")
    for case in made(run_yaml, 2, *given).values():
        links = config_of(run_yaml, case, *given).parallel.slow_links
        assert links is not None and links.latency_s == 0.001


def test_a_rung_over_one_that_is_left_out_stands_on_the_next_below(run_yaml: Path) -> None:
    found = made(run_yaml, 1, *DROPLESS)
    assert found["buckets"].why_not == "one rank talks to nobody"
    assert found["recompute"].on == "kernels"
    assert config_of(run_yaml, found["recompute"], *DROPLESS).run.kernels == "auto"
    with_capacity = made(run_yaml, 2)
    assert with_capacity["one_by_one"].why_not == "model.moe.capacity_factor drops tokens"
    assert with_capacity["grouped"].on is None and with_capacity["grouped"].why_not is None


def test_what_cannot_be_is_left_out_with_the_reason(run_yaml: Path) -> None:
    dense = made(run_yaml, 2, "model.moe=null")
    assert dense["expert_parallel"].why_not == dense["grouped"].why_not == "the model has no experts"
    assert dense["kernels"].why_not is None and dense["kernels"].on is None
    halves = made(run_yaml, 2, *DROPLESS, "run.precision=fp16")
    assert halves["one_by_one"].why_not == "run.precision is fp16"
    odd = made(run_yaml, 3, *DROPLESS, "batch.global_sequences=6", "batch.micro_sequences=2")
    assert odd["expert_parallel"].why_not == "ranks and experts have no common divisor"
    cut = made(run_yaml, 2, *DROPLESS, "parallel.tp=2")
    assert {cut[name].why_not for name in ("int8", "powersgd", "onebit_adam")} == {"pp or tp cuts what is compressed"}
    single = made(run_yaml, 4, *DROPLESS)["expert_chunks"]
    assert single.why_not is not None and "the 1 experts of a rank" in single.why_not
    ascend = made(run_yaml, 2, *DROPLESS, "run.device=ascend")
    assert ascend["overlap"].why_not == "for ranks on CPUs"
    assert ascend["reduce_bf16"].on == "expert_parallel"


def test_batch_and_length_are_made_to_fit(run_yaml: Path) -> None:
    config = config_of(run_yaml, made(run_yaml, 4, *DROPLESS, steps=50)["grouped"], *DROPLESS)
    assert (config.batch.micro_sequences, config.run.steps) == (1, 50)
    with pytest.raises(ConfigError, match=r"batch\.global_sequences 4 does not divide by the 3 data parallel ranks"):
        made(run_yaml, 3)
    with pytest.raises(ConfigError, match="--ranks 3: pp x cp x tp of the run are 2"):
        made(run_yaml, 3, "parallel.tp=2")


def test_rungs_are_chosen_by_name_in_their_order() -> None:
    assert [rung.name for rung in chosen(("overlap", "grouped"))] == ["grouped", "overlap"]
    assert chosen(()) == RUNGS
    with pytest.raises(ConfigError, match="--rungs 'overlapp' is not a rung: did you mean 'overlap'"):
        chosen(("overlapp",))


def test_every_group_has_a_size(run_yaml: Path) -> None:
    config = load_run(run_yaml, (*DROPLESS, "parallel.ep=4", "parallel.hierarchical_ranks=2"))
    mesh = Mesh.make(8, pp=2, ep=4)
    found = {name: group_size(name, config, mesh) for name in get_args(GroupName)}
    assert found["world"] == 8 and found["stage"] == found["dp_cp_tp"] == found["ep"] == 4
    assert (found["ep inside nodes"], found["ep across nodes"], found["edp"], found["pp forward"]) == (2, 2, 1, 2)
    assert (found["ends"], found["dp"], found["loss"], found["kv_heads"]) == (8, 4, 8, 1)


def test_what_is_sent_follows_from_the_payload() -> None:
    assert sent_bytes("all_reduce", 800, 4) == 2 * sent_bytes("reduce_scatter", 800, 4) == 1200
    assert sent_bytes("all_gather", 100, 4) == 300
    assert sent_bytes("all_to_all_v", 800, 4) == 600
    assert sent_bytes("send", 800, 2) == 800 and sent_bytes("recv", 0, 2) == 0
