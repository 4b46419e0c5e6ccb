"""`amt plan`: what it prints and writes; one line for what cannot be planned."""

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train import strict_yaml
from ascend_moe_train.cli.main import main
from ascend_moe_train.config import load_run
from ascend_moe_train.parallel.mesh import mesh_of

RUN = """\
run: {dir: runs/x, steps: 600}
model: {preset: tiny, num_layers: 4, moe: {aux_loss_scope: batch}}
data: {train: [{path: corpora/a}], tokenizer: tokenizer.json, seq_len: 64}
batch: {global_sequences: 32, micro_sequences: 4}
optim: {lr: 0.001}
parallel: {tp: 3, bucket_bytes: 1000, reduce_dtype: bf16}
"""
LARGE = ("--model", "mixtral_8x7b", "--cluster", "16x910B", "--global-sequences", "64")
MEDIUM = ("--model", "deepseek_v2_lite", "--cluster", "8x910B", "--global-sequences", "16")
LITTLE = ("--seq-len", "63", "--set", "model.num_layers=1")
TINY = ("--model", "tiny", "--cluster", "8xcpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(text_of(capsys, *arguments, "--json"))


def test_the_table_and_what_goes_with_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, *LARGE, "--top", "3")
    lines = text.splitlines()
    assert lines[0].startswith("mixtral_8x7b: 46.7 B parameters (12.9 B active), 64 sequences of 4,096 tokens a step")
    assert "predicted, not measured" in lines[1]
    heads = lines[3].split()
    assert heads[:2] == ["#", "dp"]
    assert {"memory", "step", "tokens/s", "MFU", "bubble", "exposed"} <= set(heads)
    assert [line.split()[0] for line in lines[4:7]] == ["1", "2", "3"]
    for words in ("memory on each device of a stage", "bound by: ", "would change it: ", "too big: ", "slower: "):
        assert words in text


def test_json_has_all_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json_of(capsys, *LARGE)
    best = shown["plans"][0]
    assert sum(best["items_s"].values()) == pytest.approx(best["step_s"])
    assert best["tokens_per_s"] == pytest.approx(64 * 4096 / best["step_s"])
    assert max(sum(stage.values()) for stage in best["stages_bytes"]) == pytest.approx(best["peak_bytes"])
    assert best["plan"]["pp"] * best["plan"]["dp"] * best["plan"]["cp"] * best["plan"]["tp"] == 16


def test_a_run_file_keeps_what_is_not_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, "--model", "run.yaml", "--cluster", "8xcpu", "--out", "planned.yaml")
    assert text.endswith("planned.yaml: written; to run it: amt launch --ranks 8 train planned.yaml\n")
    run = load_run(folder / "planned.yaml")
    mesh_of(run, 8)
    before = strict_yaml.read_file(folder / "run.yaml").value
    after = strict_yaml.read_file(folder / "planned.yaml").value
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    for section in ("model", "optim"):
        assert after[section] == before[section]
    assert after["data"] == before["data"]
    text_of(capsys, "--model", "run.yaml", "--cluster", "8xcpu", "--engine", "zero", "--out", "other.yaml")
    for each in (run, load_run(folder / "other.yaml")):
        assert (each.parallel.bucket_bytes, each.parallel.reduce_dtype) == (1000, "bf16")
    assert run.batch.global_sequences == 32
    assert text_of(capsys, "check", "planned.yaml", "--cluster", "8xcpu").splitlines()[1].startswith("fits: ")


def test_rows_have_the_room_that_was_predicted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = "{train: [{path: x}], tokenizer: y, seq_len: 4096}"
    (folder / "olmoe.yaml").write_text(f"model: {{preset: olmoe_1b_7b}}\ndata: {data}\nrun: {{dir: r, steps: 1}}\n")
    arguments = ("--model", "olmoe.yaml", "--cluster", "8x910B", "--global-sequences", "64", "--precision", "bf16")
    shorter = ("--set", "optim.warmup_steps=0", "--out", "planned.yaml")
    predicted = json_of(capsys, *arguments, *shorter, "--imbalance", "1.4")["plans"][0]
    check = ("check", "planned.yaml", "--cluster", "8x910B")
    assert load_run(folder / "planned.yaml").parallel.receive_factor == 1.4
    # whatever else might be unbalanced: room is taken, filled or not
    judged = json_of(capsys, *check, "--imbalance", "3")
    assert judged["fits"] and judged["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=1e-4)
    assert main(["plan", *check, "--set", "parallel.receive_factor=null"]) == 2
    said = capsys.readouterr().err
    assert "room for 8 times the rows that a rank sends (parallel.receive_factor null): 1.5 is typical" in said


@pytest.mark.parametrize("sequences", [8, 16, 64])
@pytest.mark.parametrize("layers", [1, 4, 5])
@pytest.mark.parametrize("ranks", [2, 6, 8])
def test_every_planned_run_can_be_one(
    folder: Path, capsys: pytest.CaptureFixture[str], ranks: int, layers: int, sequences: int
) -> None:
    settings = ("--set", f"model.num_layers={layers}", "--global-sequences", str(sequences))
    arguments = ["plan", "--model", "run.yaml", "--cluster", f"{ranks}xcpu", "--out", "planned.yaml", *settings]
    if main(arguments) == 0:
        run = load_run(folder / "planned.yaml")
        mesh_of(run, ranks)
        assert run.model.num_layers == layers
    else:
        assert ranks == 6  # with which 8 sequences cannot be shared out in every way
        assert not (folder / "planned.yaml").exists()


def test_any_number_of_processes_has_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Machines of accelerators are had whole, processes are not; of them there are no published runs."""
    arguments = ("--model", "run.yaml", "--cluster", "7xcpu", "--global-sequences", "14", "--out", "planned.yaml")
    text = text_of(capsys, *arguments, "--set", "model.num_layers=3")
    assert "cpu MoE: time n/a (no published runs), memory n/a (no published runs)" in text
    run = load_run(folder / "planned.yaml")
    assert mesh_of(run, 7).dp == 7
    assert main(["plan", "--model", "tiny", "--cluster", "12x910B"]) == 2
    assert "12 are not whole nodes: use 8 or 16" in capsys.readouterr().err


def test_recomputation_is_planned_and_judged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--set", "model.hidden=512", "--set", "data.seq_len=16384", "--set", "model.num_layers=8")
    run = ("--model", "run.yaml", "--cluster", "1xsmall", "--hardware", "small.yaml", *settings)
    smallest = ("--set", "batch.micro_sequences=1", "--set", "parallel.tp=1", "--cluster", "1xcpu")
    plain = json_of(capsys, "check", "run.yaml", *settings, *smallest)
    room_bytes = plain["peak_bytes"] - 0.5 * plain["stages_bytes"][0]["activations"]
    (folder / "small.yaml").write_text(f"small: {{like: cpu, memory_bytes: {room_bytes}}}\n")
    text_of(capsys, *run, "--out", "planned.yaml")
    planned = load_run(folder / "planned.yaml")
    assert planned.recompute.policy != "none"
    checked = json_of(capsys, "check", "planned.yaml", "--cluster", "1xsmall", "--hardware", "small.yaml")
    assert checked["fits"]
    assert checked["plan"]["recompute"] == planned.recompute.policy
    assert checked["plan"]["recompute_layers"] == planned.recompute.layers


@pytest.mark.parametrize("system", ["mindspore", "mindformers", "mindspeed-llm", "megatron"])
def test_export(folder: Path, capsys: pytest.CaptureFixture[str], system: str) -> None:
    text = text_of(capsys, *MEDIUM, "--export", system)
    assert "8 " in text.splitlines()[0]
    assert all(line.isprintable() for line in text.splitlines())


ONE_BIT = "compress.method=onebit_adam,compress.warmup_updates=50"
DENSE = RUN.replace("preset: tiny, num_layers: 4, moe: {aux_loss_scope: batch}", "preset: demo, moe: null").replace(
    "parallel: {tp: 3, bucket_bytes: 1000, reduce_dtype: bf16}", "parallel: {bucket_bytes: 10000000}"
)


def test_one_reason_is_said_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "olmoe_1b_7b", "--cluster", "8x910B", "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (reason,) = [line for line in lines if "aux_loss_scope" in line]
    assert reason.startswith("  pp 2, 4, 8: 3, parallel.pp is impossible with model.moe.aux_loss_scope 'model'")


def test_what_is_allowed_is_tried_and_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose step is the sum of its gradients; on slow links 1-bit Adam is the fastest."""
    (folder / "slow.yaml").write_text("slow: {like: cpu, inside: {bytes_per_s: 1e6}, across: {bytes_per_s: 1e6}}\n")
    (folder / "dense.yaml").write_text(DENSE)
    slow = ("--model", "dense.yaml", "--cluster", "8xslow", "--hardware", "slow.yaml", "--seq-len", "16")
    assert "onebit" not in text_of(capsys, *slow)
    wide = text_of(capsys, *slow, "--allow", "reduce_dtype=bf16", "--allow", ONE_BIT)
    assert wide.splitlines()[-1] == "tried, and not in plan 1: reduce_dtype bf16"
    text = text_of(capsys, *slow, "--allow", ONE_BIT, "--out", "planned.yaml")
    assert "compress onebit_adam: gradients 1/" in text and "of error feedback on each device" in text
    run = load_run(folder / "planned.yaml")
    assert (run.parallel.compress.method, run.parallel.compress.warmup_updates) == ("onebit_adam", 50)
    shown = json_of(capsys, "check", "planned.yaml", "--cluster", "8xslow", "--hardware", "slow.yaml")
    assert shown["plan"]["techniques"] == {"compress": "onebit_adam", "bucket_bytes": 10000000}
    sent, before = (
        {each["content"]: each["payload_bytes"] for each in shown[name]} for name in ("sent", "sent_in_warm_up")
    )
    assert 0 < sent["momenta 1-bit"] < before["gradients"] / 4 and "gradients" not in sent
    # what a run file has is tried without being allowed
    assert json_of(capsys, "--model", "planned.yaml", *slow[2:])["plans"][0]["plan"]["techniques"]["compress"]


def test_page_and_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text_of(capsys, *MEDIUM, "--html", "plan.html", "--trace", "plan.json")
    page = (folder / "plan.html").read_text()
    assert page.count("<svg") == 3
    assert "<script" not in page
    assert "http" not in page.replace('http-equiv="Content-Security-Policy"', "")
    events = json.loads((folder / "plan.json").read_text())["traceEvents"]
    passes = [event for event in events if event.get("cat") == "pass"]
    assert {event["name"] for event in passes} >= {"forward", "backward"}
    assert min(event["dur"] for event in passes) > 0


@pytest.mark.parametrize("objective", ["memory", "cost"])
def test_objectives(folder: Path, capsys: pytest.CaptureFixture[str], objective: str) -> None:
    plain = json_of(capsys, *LARGE)["plans"][0]
    other = json_of(capsys, *LARGE, "--objective", objective)
    best = other["plans"][0]
    if objective == "memory":
        assert best["peak_bytes"] <= plain["peak_bytes"]
        assert best["step_s"] <= 1.1 * plain["step_s"]
    else:
        devices = int(other["cluster"].split("x")[0])
        assert devices * best["step_s"] <= 16 * plain["step_s"] * (1 + 1e-9)


def test_fewest_devices_and_largest_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = json_of(capsys, *LARGE, "--objective", "devices")
    assert small["cluster"] in {"8x910B2", "16x910B2"}
    text = text_of(capsys, *LARGE, "--objective", "model")
    assert float(text.split(": ")[1].split()[0]) > 46.7


def test_sweep(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("sweep", *MEDIUM, "--vary", "devices", "--over", "4,8,16")
    rows = json_of(capsys, *arguments)
    assert [row["cluster"] for row in rows] == ["4x910B2", "8x910B2", "16x910B2"]
    speeds = [row["tokens_per_s"] for row in rows if row["fits"]]
    assert len(speeds) >= 2
    assert speeds == sorted(speeds)
    assert text_of(capsys, *arguments[:-1], "8").startswith("predicted, not measured\n")


@pytest.mark.parametrize(
    ("vary", "over"),
    [
        ("seq-len", "2048,4096"),
        ("imbalance", "1,3"),
        ("link", "0.5,1"),
        ("cluster", "8xA100,8xH100"),
        ("micro-sequences", "1,2"),
    ],
)
def test_what_can_be_varied(folder: Path, capsys: pytest.CaptureFixture[str], vary: str, over: str) -> None:
    rows = json_of(capsys, "sweep", *MEDIUM, "--vary", vary, "--over", over)
    assert [row[vary] for row in rows] == over.split(",")


def test_a_run_that_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "big.yaml").write_text(
        RUN.replace("preset: tiny, num_layers: 4, moe: {aux_loss_scope: batch}", "preset: llama3_8b")
    )
    code = main(["plan", "check", "big.yaml", "--cluster", "1xA100", "--set", "parallel.tp=1"])
    assert code == 2
    assert "stage 0 needs" in capsys.readouterr().err


REFUSED = {
    "no model": (("--cluster", "8xcpu"), "--model is missing"),
    "no cluster": (("--model", "tiny"), "--cluster is missing"),
    "empty model": (("--model", "", "--cluster", "8xcpu"), "is no preset"),
    "unknown preset": (("--model", "tinny", "--cluster", "8xcpu"), "did you mean tiny?"),
    "part of a preset": (("--model", "qwen3_30b", "--cluster", "8xcpu"), "did you mean qwen3_30b_a3b?"),
    "no such run file": (("--model", "no.yaml", "--cluster", "8xcpu"), "no.yaml: cannot be read"),
    "folder of nothing": (("--model", ".", "--cluster", "8xcpu"), "no checkpoint here"),
    "run file of a list": (("--model", "list.yaml", "--cluster", "8xcpu"), "mapping of sections"),
    "run file that is no YAML": (("--model", "bad.yaml", "--cluster", "8xcpu"), "bad.yaml"),
    "no number": (("--model", "tiny", "--cluster", "cpu"), "NUMBERxDEVICE"),
    "no device": (("--model", "tiny", "--cluster", "8"), "NUMBERxDEVICE"),
    "empty cluster": (("--model", "tiny", "--cluster", ""), "NUMBERxDEVICE"),
    "no devices": (("--model", "tiny", "--cluster", "0xcpu"), "from 1 to"),
    "fewer than none": (("--model", "tiny", "--cluster", "-8xcpu"), "NUMBERxDEVICE"),
    "half a device": (("--model", "tiny", "--cluster", "8.5xcpu"), "NUMBERxDEVICE"),
    "too many devices": (("--model", "tiny", "--cluster", "10000000xcpu"), "from 1 to 1,000,000"),
    "absurdly many": (("--model", "tiny", "--cluster", "9" * 500 + "xcpu"), "NUMBERxDEVICE"),
    "unknown device": (("--model", "tiny", "--cluster", "8x910Z"), "did you mean 910"),
    "part of a node": (("--model", "tiny", "--cluster", "12xA100"), "use 8 or 16"),
    "no sequence": ((*TINY, "--seq-len", "0"), "--seq-len 0"),
    "negative sequences": ((*TINY, "--global-sequences", "-4"), "--global-sequences -4"),
    "absurd sequences": ((*TINY, "--seq-len", "99999999999999999999"), "fewer than"),
    "words for a number": ((*TINY, "--seq-len", "long"), "'long' is not a valid integer"),
    "precision of nobody": ((*TINY, "--precision", "fp4"), "there are fp32"),
    "precision of others": ((*TINY, "--precision", "bf16"), "cpu has no bf16"),
    "unknown engine": ((*TINY, "--engine", "deepspeed"), "there are ours"),
    "imbalance below balance": ((*TINY, "--imbalance", "0.5"), "from 1 (balanced)"),
    "imbalance of nothing": ((*TINY, "--imbalance", "nan"), "from 1 (balanced)"),
    "endless imbalance": ((*TINY, "--imbalance", "inf"), "from 1 (balanced)"),
    "unknown objective": ((*TINY, "--objective", "speed"), "there are throughput"),
    "no plans": ((*TINY, "--top", "0"), "from 1 to 100"),
    "too many plans": ((*TINY, "--top", "1000"), "from 1 to 100"),
    "unknown system": ((*TINY, "--export", "deepspeed"), "there are mindspore"),
    "run without data": ((*TINY, "--out", "x.yaml"), "a run needs data"),
    "out in no folder": (("--model", "run.yaml", "--cluster", "8xcpu", "--out", "no/x.yaml"), "there is no folder"),
    "out over a folder": (("--model", "run.yaml", "--cluster", "8xcpu", "--out", "."), "is a folder"),
    "page in no folder": ((*TINY, "--html", "no/x.html"), "--html no/x.html: there is no folder no"),
    "trace over a folder": ((*TINY, "--trace", "."), "--trace .: is a folder"),
    "data of nothing": ((*TINY, "--data", "."), "no corpus"),
    "unknown key": ((*TINY, "--set", "model.heads=4"), "--set model.heads=4"),
    "impossible model": ((*TINY, "--set", "model.hidden=33"), "does not divide by num_heads"),
    "no devices file": ((*TINY, "--hardware", "no.yaml"), "no.yaml"),
    "devices file of a word": ((*TINY, "--hardware", "word.yaml"), "word.yaml"),
    "figures that are words": ((*TINY, "--hardware", "device.yaml"), "positive number"),
    "model that is too big": (("--model", "deepseek_v3", "--cluster", "8x910B"), "Smallest cluster that works"),
    "sequences that do not divide": (
        ("--model", "run.yaml", "--cluster", "6xcpu", "--global-sequences", "5", *LITTLE),
        "6 devices",
    ),
    "check without a file": (("check", "no.yaml", "--cluster", "8xcpu"), "no.yaml"),
    "check of what is impossible": (("check", "run.yaml", "--cluster", "8xcpu"), "parallel.tp 3"),
    "sweep of nothing": (("sweep", *TINY, "--vary", "devices", "--over", ","), "0 values"),
    "sweep of words": (("sweep", *TINY, "--vary", "devices", "--over", "4,many"), "'many'"),
    "sweep of the unknown": (("sweep", *TINY, "--vary", "price", "--over", "1"), "there are devices"),
    "allowed key of nobody": ((*TINY, "--allow", "reduce_dtpe=bf16"), "did you mean reduce_dtype?"),
    "allowed key without a value": ((*TINY, "--allow", "overlap"), "overlap has no value"),
    "allowed value of nobody": ((*TINY, "--allow", "expert_wire=int4"), "'fp16', 'bf16' or 'int8', got int4"),
    "allowed number out of bounds": (
        (*TINY, "--allow", "compress.method=powersgd,compress.rank=0"),
        "compress.rank: Input should be greater than or equal to 1, got 0",
    ),
    "allowed to others": ((*TINY, "--engine", "megatron", "--allow", "overlap=true"), "not of megatron"),
    "too much allowed": ((*TINY, *("--allow", "overlap=true") * 5), "given 5 times"),
    "overlap on devices": (
        ("--model", "tiny", "--cluster", "8x910B", "--allow", "overlap=true"),
        "parallel.overlap true is for ranks that talk through MPI, on CPUs, not for 8x910B2",
    ),
    "check of what cannot be compressed": (
        ("check", "run.yaml", "--cluster", "6xcpu", "--set", "parallel.compress.method=int8"),
        "compress.method 'int8' with tp 3",
    ),
    "options before a verb": ((*TINY, "sweep"), "comes after `sweep`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_line_for_what_cannot_be_planned(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, words = REFUSED[case]
    (folder / "list.yaml").write_text("[1, 2]\n")
    (folder / "bad.yaml").write_text("run: {a: [}\n")
    (folder / "word.yaml").write_text("fast\n")
    (folder / "device.yaml").write_text("mine: {like: cpu, memory_bytes: much}\n")
    before = sorted(path.name for path in folder.iterdir())
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
    assert sorted(path.name for path in folder.iterdir()) == before


def test_there_are_enough_of_them() -> None:
    assert len(REFUSED) >= 40
