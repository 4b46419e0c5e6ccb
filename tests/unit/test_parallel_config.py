"""Section `parallel`: what of it a model and its batch allow, and the one line that each mistake gives."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_moe_train.config import RunConfig, load_run
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.model.config import ModelConfig, MoEConfig
from ascend_moe_train.parallel.config import ParallelConfig, check_parallel
from ascend_moe_train.parallel.mesh import Mesh, mesh_of
from ascend_moe_train.parallel.shards import placements
from ascend_moe_train.train.config import BatchConfig

RUN = """\
run: {dir: runs/x, steps: 600}
model: {preset: demo}
data: {train: [{path: corpora/a}], valid: [{path: corpora/b}], tokenizer: tokenizer.json}
batch: {global_sequences: 16, micro_sequences: 4}
"""


def load(tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return load_run(path, overrides)


def test_one_rank_is_the_default(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert mesh_of(config, 1) == Mesh.make(1)
    assert mesh_of(config, 4).dp == 4


def test_mesh_of_a_run(tmp_path: Path) -> None:
    config = load(tmp_path, "parallel={tp: 2, ep: 4, etp: 2, sequence_parallel: true, zero_stage: 3}")
    assert mesh_of(config, 8) == Mesh.make(8, tp=2, ep=4, etp=2)
    with pytest.raises(ConfigError, match=r"^12 ranks do not divide by parallel pp 1 x ep 4 x etp 2 = 8: use 8 or 16"):
        mesh_of(config, 12)
    with pytest.raises(ConfigError, match=r"global_sequences 16 does not divide by dp 8 x batch.micro_sequences 4"):
        mesh_of(config, 16)


MISTAKES = [
    (["tp=3"], "parallel.tp 3: model.num_heads 8 does not divide by it: use 2 or 4"),
    (["tp=16"], "parallel.tp 16: model.num_heads 8 does not divide by it: use 8"),
    (["ep=3"], "parallel.ep 3: model.moe.num_experts 8 does not divide by it: use 2 or 4"),
    (["etp=3"], "parallel.etp 3: model.moe.ffn 512 does not divide by it: use 2 or 4"),
    (["cp=3"], "parallel.cp 3: data.seq_len 256 does not divide into 2 x 3 pieces: use 2 or 4"),
    (["context=ulysses"], "parallel: context 'ulysses' has no effect with cp 1: leave it out, or set cp"),
    (["tp=0"], "parallel.tp: 0 is not allowed: must be greater than 0"),
    (["tp=2000000"], "parallel.tp: 2000000 is not allowed: must be at most 1048576"),
    (["dp=2"], "unknown key 'parallel.dp' (value 2): parallel has pp, cp, tp, ep, etp, "),
    (["zero_stage=4"], "parallel.zero_stage: 4 is not allowed: must be 0, 1, 2 or 3"),
    (
        ["reduce_dtype=bf61"],
        "parallel.reduce_dtype: \"bf61\" is not allowed: must be 'fp32', 'bf16' or 'fp16' (did you",
    ),
    (["deadlines.step_s=0"], "parallel.deadlines.step_s: 0 is not allowed: must be greater than 0"),
    (["slow_links={}"], "parallel.slow_links: without latency_s or bytes_per_s it has no effect: set one, or leave"),
    (["slow_links.latency_s=1", "slow_links.groups=[]"], "parallel.slow_links: groups [] has no effect: name some"),
    (["slow_links.latency_s=1", "slow_links.groups=[edq]"], 'parallel.slow_links.groups.0: "edq" is not all'),
    (["slow_links.latency_s=61"], "parallel.slow_links.latency_s: 61 is not allowed: must be at most 60"),
    (["sequence_parallel=true"], "parallel: sequence_parallel true needs tp ranks to split tokens over, and tp is 1"),
    (["receive_factor=2.0"], "parallel: receive_factor 2.0 has no effect with ep 1: leave it out"),
    (["expert_wire=int8"], "parallel: expert_wire 'int8' has no effect with ep 1: leave it out"),
    (
        ["ep=2", "expert_wire=fp32"],
        "parallel.expert_wire: \"fp32\" is not allowed: must be 'fp16', 'bf16' or 'int8'",
    ),
    (["expert_chunks=2"], "parallel: expert_chunks 2 has no effect with ep 1: leave it out"),
    (["ep=2", "expert_chunks=0"], "parallel.expert_chunks: 0 is not allowed: must be greater than 0"),
    (
        ["ep=2", "expert_chunks=3"],
        "parallel.expert_chunks 3: the 4 experts of a rank (model.moe.num_experts 8 / ep 2) do not divide by it: use 2 "
        "or 4",
    ),
    (
        ["ep=2", "expert_chunks=2", "zero_stage=3"],
        "parallel: expert_chunks 2 with zero_stage 3 would put all weights of a rank's experts together for each "
        "chunk: use zero_stage 2, or leave it out",
    ),
    (["ep=2", "receive_factor=0.5"], "parallel.receive_factor: 0.5 is not allowed: must be at least 1"),
    (
        ["ep=4", "hierarchical_ranks=3"],
        "parallel: hierarchical_ranks 3 does not cut the 4 ranks of ep 4 x etp 1 into nodes of several ep ranks each: "
        "use 2",
    ),
    (
        ["ep=4", "etp=4", "hierarchical_ranks=4"],
        "parallel: hierarchical_ranks 4 does not cut the 16 ranks of ep 4 x etp 4 into nodes of several ep ranks each: "
        "use 8",
    ),
    (["ep=2", "hierarchical_ranks=2"], "parallel: hierarchical_ranks 2 does not cut the 2 ranks of ep 2 x etp 1 into"),
    (
        ["ep=4", "dedup_tokens=copies"],
        "parallel: dedup_tokens 'copies' needs nodes: set hierarchical_ranks, or leave it out",
    ),
    (
        ["ep=4", "hierarchical_ranks=2", "dedup_tokens=sums", "expert_chunks=2"],
        "parallel: dedup_tokens 'sums' with expert_chunks 2 would send a token to a node once for each chunk: use "
        "expert_chunks 1, or leave dedup_tokens out",
    ),
    (
        ["ep=4", "hierarchical_ranks=2", "dedup_tokens=sum"],
        "parallel.dedup_tokens: \"sum\" is not allowed: must be 'copies' or 'sums' (did you mean 'sums'?)",
    ),
]


@pytest.mark.parametrize(("settings_made", "message"), MISTAKES)
def test_mistakes(settings_made: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, *(f"parallel.{each}" for each in settings_made))
    assert str(error.value).partition(": ")[2].startswith(message)
    assert "\n" not in str(error.value)


OTHER_SECTIONS = [
    (["parallel.ep=2", "model.moe=null"], "parallel.ep 2: the model has no experts (model.moe is null): use 1"),
    (["parallel.etp=2", "model.moe=null"], "parallel.etp 2: the model has no experts (model.moe is null): use 1"),
    (
        ["parallel.tp=2", "model.qk_norm=full"],
        "parallel.tp 2: model.qk_norm 'full' is one norm over all heads, which cannot be cut: use 1",
    ),
    (
        ["parallel={ep: 2, receive_factor: 2.0}", "model.moe.capacity_factor=1.0"],
        "parallel.receive_factor 2.0 has no effect with model.moe.capacity_factor 1.0: set one of them to null",
    ),
    (
        ["parallel={ep: 2, expert_wire: fp16}", "run.precision=fp16"],
        "parallel.expert_wire 'fp16' has no effect with run.precision 'fp16', whose rows have 2 bytes already: leave "
        "it out, or use 'int8'",
    ),
    (
        ["parallel.tp=4", "data.seq_len=255", "batch.micro_sequences=2"],
        "parallel.tp 4: the 510 tokens of a micro-batch on one rank do not divide by it: use 2",
    ),
    (
        ["parallel={cp: 16, context: ulysses}"],
        "parallel.cp 16: context 'ulysses' shares out model.num_heads 8, which does not divide by it: use 8",
    ),
    (
        ["parallel={cp: 4, tp: 4, context: ulysses}"],
        "parallel.cp 4: context 'ulysses' shares out model.num_heads 2 (on each of tp 4), which does not divide by it: "
        "use 2",
    ),
    (
        [
            "parallel={cp: 3, context: ulysses}",
            "data.seq_len=252",
            "model={preset: demo, num_heads: 6, num_kv_heads: 2, head_dim: 32}",
        ],
        "parallel.cp 3: context 'ulysses' shares out model.num_kv_heads 2, which neither divides by it nor divides it: "
        "use 2 or 6",
    ),
    (
        ["parallel.slow_links.latency_s=1", "run.device=ascend"],
        "parallel.slow_links is for ranks on CPUs, run.device is 'ascend': leave it out",
    ),
    (
        ["parallel.tp=2", "lora={}", "run.init_from=x"],
        "parallel.tp 2 is impossible with lora, whose adapters are not cut: use 1",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), OTHER_SECTIONS)
def test_what_other_sections_forbid(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, *overrides)
    assert str(error.value).partition(": ")[2] == message


def test_tokens_stay_whole_where_nothing_splits_them(tmp_path: Path) -> None:
    odd = ["parallel.tp=4", "data.seq_len=255", "batch.micro_sequences=2", "model.moe=null"]
    assert load(tmp_path, *odd).parallel.tp == 4
    with pytest.raises(ConfigError, match="tokens of a micro-batch"):
        load(tmp_path, *odd, "parallel.sequence_parallel=true")


def model_of(heads: int, kv_heads: int, width: int, experts: int) -> ModelConfig:
    """`width` stands for all that is divided by tp or etp besides the heads."""
    return ModelConfig(
        vocab_size=2 * width,
        hidden=4,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=2,
        ffn=width,
        moe=MoEConfig(num_experts=experts, top_k=1, ffn=width, shared_ffn=width, dense_layers=(0,)),
    )


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.integers(1, 6), st.data())
def test_what_is_allowed_can_be_cut_and_what_is_advised_is_allowed(
    kv_heads: int, of_each: int, width: int, experts: int, data: st.DataObject
) -> None:
    model = model_of(kv_heads * of_each, kv_heads, width, experts)
    sizes = {axis: data.draw(st.integers(1, 6), axis) for axis in ("tp", "ep", "etp")}
    batch, seq_len = BatchConfig(global_sequences=1, micro_sequences=1), 12
    for _ in range(4):
        try:
            check_parallel(ParallelConfig.model_validate(sizes), model, None, batch, seq_len)
        except ValueError as error:
            refused = re.fullmatch(r"parallel\.(\w+) (\d+): .*: use (\d+)(?: or \d+)?", str(error))
            assert refused is not None
            axis, size, advised = refused.groups()
            mesh = Mesh.make(sizes["tp"] * sizes["ep"] * sizes["etp"], **sizes)
            if "tokens" not in str(error):
                with pytest.raises(ValueError, match="cannot be shared out"):
                    placements(model, mesh, 0)
            assert sizes[axis] == int(size)
            sizes[axis] = int(advised)
        else:
            placements(model, Mesh.make(sizes["tp"] * sizes["ep"] * sizes["etp"], **sizes), 0)
            return
    pytest.fail("each size is corrected once")
