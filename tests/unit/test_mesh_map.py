"""`amt mesh`: the map as text, as JSON and as a file; one line for what cannot be spread."""

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.config import load_run
from ascend_moe_train.model.counts import num_parameters
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.parallel.mesh_map import columns
from ascend_moe_train.parallel.shards import placements, repeat_groups

RUN = """\
run: {dir: runs/x, steps: 600}
model:
  {preset: demo, num_kv_heads: 2, attention: {bias: all}}
data: {train: [{path: corpora/a}], valid: [{path: corpora/b}], tokenizer: tokenizer.json, seq_len: 128}
batch: {global_sequences: 12, micro_sequences: 2}
parallel: {tp: 4, ep: 2, etp: 2, reduce_dtype: bf16}
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["mesh", *arguments]) == 0
    return capsys.readouterr().out


def test_tokens_that_cross_once(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    parallel = "parallel={ep: 8, hierarchical_ranks: 2, dedup_tokens: copies}"
    words = ("--set", parallel, "--set", "batch.global_sequences=16")
    rows = "send (512, 256) token rows each to the ranks of their experts and back"
    once = "once to each of 4 nodes (1.86 of 2 if all experts are equally likely)"
    assert f"ep: groups of 8 {rows}, {once}" in text_of(capsys, run_yaml, "--ranks", "8", *words).splitlines()


def test_text(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = text_of(capsys, run_yaml, "--ranks", "8").splitlines()
    assert lines[0] == (f"{run_yaml} on 8 ranks: pp 1 x dp 2 x cp 1 x tp 4; for experts pp 1 x edp 2 x ep 2 x etp 2")
    assert lines[1] == "A step: 12 sequences = 2 dp ranks x 3 micro-batches x 2"
    assert "   6   0   1   0   2    1   1    0" in lines
    assert "tp: groups of 4 sum activations (256, 256) around attention and feed-forward" in lines
    # a quarter of the 256 tokens of a micro-batch, to 2 experts each
    at = lines.index("ep: groups of 2 send (128, 256) token rows each to the ranks of their experts and back")
    assert lines[at + 1 : at + 5] == ["    0 2", "    1 3", "    4 6", "    5 7"]
    at = lines.index("tp neighbours: groups of 2 sum the gradients of key and value rows that all of them hold")
    assert lines[at + 1 : at + 5] == ["    0 1", "    2 3", "    4 5", "    6 7"]
    # a router of 8 x 256 in each of 4 layers
    reduced = "sum partial gradients: 8.19 k elements (bf16, 16.4 kB) of each, in buckets of 26.2 MB"
    assert f"dp x cp x tp: groups of 8 {reduced}" in lines
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line}
    assert rows["layers.*.attn.qkv.bias"] == ("4 384 dim 0 by tp (q | k | v), k | v on 2 ranks each 128 dense 2")
    assert rows["layers.*.attn.out.bias"] == "4 256 first tp rank only 256 dense 2"
    assert rows["layers.*.moe.experts.w13"] == (
        "4 8 x 256 x 1024 dim 0 by ep (experts), dim 2 by etp (gate | up) 4 x 256 x 512 expert 2"
    )
    assert rows["norm.weight"] == "1 256 whole 256 dense 8"


def test_json_has_every_group_and_tensor(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown: dict[str, Any] = json.loads(
        text_of(capsys, run_yaml, "--ranks", "24", "--json", "--set", "parallel.zero_stage=1")
    )
    config, mesh = load_run(Path(run_yaml)), Mesh.make(24, tp=4, ep=2, etp=2)
    assert shown["ranks"][13] == {"rank": 13, **vars(mesh.coordinates(13))}
    groups = {each["along"]: [tuple(ranks) for ranks in each["ranks"]] for each in shown["groups"]}
    assert groups.pop("tp neighbours") == repeat_groups(config.model, mesh)
    assert groups == {" x ".join(axes): mesh.groups(axes) for axes in EXPECTED_GROUPS}
    placed = placements(config.model, mesh, 0)
    assert sum(each["count"] for each in shown["tensors"]) == len(placed)
    assert shown["batch"]["micro_batches"] == 1
    assert shown["parameters"] == {
        "all": num_parameters(config.model),
        "on_rank_0": sum(each.local_size for each in placed.values()),
        "updated_by_rank_0": sum(each.part[1] - each.part[0] for each in placed.values()),
    }


EXPECTED_GROUPS = [("tp",), ("ep",), ("etp",), ("dp", "cp"), ("dp", "cp", "tp"), ("edp",)]


def test_many_ranks_in_a_few_lines(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = text_of(
        capsys, run_yaml, "--ranks", "768", "--set", "batch.global_sequences=1536", "--set", "parallel.pp=2"
    ).splitlines()
    assert "Tensors and sizes are those of a stage that holds every layer: pp does not cut layers here" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith("dp x cp: groups of 96 sum dense gradients"))
    assert lines[at + 1 : at + 3] == ["    0 4 ... 380", "    1 5 ... 381"]
    assert lines[at + 5] == "    and 4 more (--json has all)"


def test_adapters_alone_are_reduced(run_yaml: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "lora.yaml"
    path.write_text(
        RUN.replace("steps: 600", f"steps: 600, init_from: {tmp_path}").replace("tp: 4, ep: 2, etp: 2, ", "")
    )
    arguments = ["--set", "lora={r: 4, targets: [attn.out]}"]
    config = load_run(path, arguments[1:])
    assert config.lora is not None
    lines = text_of(capsys, str(path), "--ranks", "2", *arguments).splitlines()
    # 4 layers of (4, 256) and (256, 4)
    assert any(line.startswith("dp x cp: groups of 2 sum dense gradients: 8.19 k elements") for line in lines)
    assert not any(line.startswith("edp: ") for line in lines)


def test_one_rank(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, run_yaml, "--ranks", "1", "--set", "parallel={}")
    assert "\nNo groups: one rank does it all\n\ntensor " in text


def test_out_writes_what_is_printed(run_yaml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--json"]):
        out = tmp_path / "map"
        assert text_of(capsys, run_yaml, "--ranks", "4", "--out", str(out), *more) == out.read_text()


MISTAKES = [
    (["--ranks", "6"], "6 ranks do not divide by parallel pp 1 x cp 1 x tp 4 = 4: use 4 or 8 ranks"),
    (["--ranks", "0"], "ranks 0 is not allowed: must be from 1 to 1048576"),
    (["--ranks", "many"], "Invalid value for '--ranks': 'many' is not a valid integer."),
    ([], "Missing option '--ranks'."),
    (["--ranks", "20"], "batch.global_sequences 12 does not divide by dp 5 x batch.micro_sequences 2 = 10 (dp is 20"),
    (["--ranks", "4", "--out", "/absent/x"], "--out /absent/x: there is no folder /absent"),
    (["--ranks", "4", "--out", "/"], "--out /: is a folder, a file is needed"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mesh", run_yaml, *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {message}")
    assert output.err.count("\n") == 1


def test_columns() -> None:
    rows = [("name", "count", "said"), ("a", "10", "x"), ("longer", "5", "")]
    assert list(columns(rows)) == ["name    count  said", "a          10  x", "longer      5"]
