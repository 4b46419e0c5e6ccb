"""Records, expert load and the JSONL file."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.errors import MetricsError
from ascend_moe_train.parallel.spans import CommTotal, StepComm
from ascend_moe_train.train import metrics
from ascend_moe_train.train.metrics import EvalRecord, JsonlWriter, Smoother, StepMeter, StepRecord, read_records

COUNTS_LE = np.array([[6, 2, 0, 0], [2, 2, 2, 2]])


def meter(**changes: Any) -> StepMeter:
    settings: dict[str, Any] = {
        "total_steps": 10,
        "flops_per_token": 100.0,
        "peak_flops_per_s": 1000.0,
        "smoother": Smoother(),
    }
    return StepMeter(**(settings | changes))


def step(number: int, by: StepMeter | None = None, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": number,
        "loss": 2.5,
        "aux_loss": 0.01,
        "z_loss": 0.0,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "tokens": 8,
        "step_s": 2.0,
        "counts_LE": COUNTS_LE,
        "dropped": 4,
        "loss_scale": None,
        "skipped": False,
    }
    return (by or meter()).record(**(values | changes))


def evaluation(number: int) -> EvalRecord:
    return EvalRecord.from_loss(step=number, loss=math.log(8), tokens=100, bytes_per_token=1.5)


def write(path: Path, *records: StepRecord | EvalRecord) -> None:
    with JsonlWriter(path, first_step=1) as writer:
        for record in records:
            writer.write(record)


def test_expert_load() -> None:
    load = metrics.expert_load(COUNTS_LE)
    assert load.cv == pytest.approx((math.sqrt(6) / 2, 0))
    assert load.max_over_mean == (3, 1)
    assert load.dead == (2, 0)
    assert load.share == ((0.75, 0.25, 0, 0), (0.25, 0.25, 0.25, 0.25))


def test_expert_load_without_layers_or_assignments() -> None:
    assert metrics.expert_load(np.zeros((0, 0), np.int64)) == ((), (), (), ())
    load = metrics.expert_load(np.zeros((1, 4), np.int64))
    assert math.isnan(load.cv[0]) and math.isnan(load.max_over_mean[0])
    assert load.dead == (4,) and load.share == ()


def test_step_record_figures() -> None:
    record = step(3)
    assert (record.tokens_per_s, record.model_flops_per_s, record.mfu) == (4, 400, 0.4)
    assert record.drop_rate == 4 / 16
    assert record.eta_s == pytest.approx(7 * 2.0)
    assert record.memory_bytes > 2**20


def test_unknown_peak_is_not_guessed() -> None:
    assert step(1, meter(peak_flops_per_s=None)).mfu is None


def test_what_collectives_took_is_listed_on_demand(tmp_path: Path) -> None:
    calls = (CommTotal(verb="all_reduce", group="dp_cp", calls=2, payload_bytes=8, total_s=0.25),)
    comm = StepComm(total_s=0.25, exposed_s=0.125, calls=calls)
    totals, listed, alone = step(1, comm=comm), step(2, meter(lists_comm=True), comm=comm), step(3)
    assert [(each.comm_s, each.comm_exposed_s, each.comm_bytes, each.comm) for each in (totals, listed, alone)] == [
        (0.25, 0.125, 8, ()),
        (0.25, 0.125, 8, calls),
        (None, None, None, ()),
    ]
    write(tmp_path / "metrics.jsonl", totals, listed, alone)
    assert list(read_records(tmp_path / "metrics.jsonl")) == [totals, listed, alone]


def test_large_model_records_load_now_and_then() -> None:
    counts_LE = np.ones((16, 256), np.int64)
    recorded = [number for number in range(1, 30) if step(number, counts_LE=counts_LE).load]
    assert recorded == [1, 8, 16, 24]


def test_smoother() -> None:
    smoother = Smoother(decay=0.5)
    assert math.isnan(smoother.update(math.nan))
    assert smoother.update(4.0) == 4.0
    assert smoother.update(math.inf) == 4.0
    assert smoother.update(1.0) == pytest.approx((0.5 * 4 + 1) / 1.5)
    again = Smoother(**dataclasses.asdict(smoother))
    assert again.update(2.0) == smoother.update(2.0)


def test_evaluation() -> None:
    record = evaluation(1)
    assert record.perplexity == pytest.approx(8)
    assert record.bits_per_byte == pytest.approx(3 / 1.5)
    without = EvalRecord.from_loss(step=1, loss=1e4, tokens=1, bytes_per_token=None)
    assert without.bits_per_byte is None and without.perplexity == math.inf
    assert math.isnan(EvalRecord.from_loss(step=1, loss=math.nan, tokens=1, bytes_per_token=None).perplexity)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    records: list[metrics.Record] = [
        step(1),
        evaluation(1),
        step(2, loss_scale=65536.0),
        step(3, counts_LE=np.zeros((0, 0), np.int64)),
    ]
    write(path, *records)
    assert list(read_records(path)) == records


def test_not_finite_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1, loss=math.nan, grad_norm=math.inf, skipped=True))
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert line["loss"] is None and line["grad_norm"] is None
    (record,) = read_records(path)
    assert math.isnan(record.loss)


@pytest.mark.parametrize("cut", [1, 2, 50])
def test_resume_drops_cut_line_and_later_steps(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2), evaluation(2), step(3), evaluation(3), step(4))
    path.write_bytes(path.read_bytes()[:-cut])
    with JsonlWriter(path, first_step=3) as writer:
        writer.write(step(3))
    assert [(type(record), record.step) for record in read_records(path)] == [
        (StepRecord, 1),
        (StepRecord, 2),
        (EvalRecord, 2),
        (StepRecord, 3),
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_after_a_cut_keeps_lines_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2))
    path.write_bytes(path.read_bytes()[:-1])
    with JsonlWriter(path, first_step=3) as writer:
        writer.write(step(3))
    assert [record.step for record in read_records(path)] == [1, 2, 3]


def test_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1))
    write(path)
    assert list(read_records(path)) == []


def test_written_lines_survive_kill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import os, pathlib, signal\nfrom ascend_moe_train.train.metrics import EvalRecord, JsonlWriter\n"
        f"writer = JsonlWriter(pathlib.Path({str(path)!r}), first_step=1)\n"
        "writer.write(EvalRecord.from_loss(step=1, loss=1.0, tokens=1, bytes_per_token=None))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=Path.cwd(), check=False)
    assert done.returncode == -signal.SIGKILL
    assert [record.step for record in read_records(path)] == [1]


GOOD = json.loads(metrics._RECORD.dump_json(step(1)))
EVAL = json.loads(metrics._RECORD.dump_json(evaluation(1)))


@pytest.mark.parametrize(
    ("lines", "where", "says"),
    [
        (["not json"], 1, "Invalid JSON"),
        (["[1]"], 1, "an object"),
        (["{}"], 1, "kind"),
        ([json.dumps(EVAL | {"kind": "x"})], 1, "kind"),
        ([json.dumps(EVAL | {"step": -1})], 1, "step"),
        ([json.dumps(EVAL | {"step": 10**400})], 1, "step"),
        ([json.dumps(EVAL | {"step": True})], 1, "step"),
        ([json.dumps(EVAL | {"loss": "1"})], 1, "loss"),
        ([json.dumps(EVAL | {"extra\n\x1b[2J": 1})], 1, "extra"),
        ([json.dumps(EVAL), json.dumps(EVAL)], 2, "step 1 after step 1"),
        ([json.dumps(GOOD), json.dumps(GOOD | {"step": 2, "load": [[1.0]]})], 2, "other layers or experts"),
        ([json.dumps(GOOD | {"load": [[2.0]]})], 1, "load.0.0"),
        ([json.dumps(GOOD | {"load": [[1.0], []]})], 1, "differs by layer"),
        ([json.dumps(GOOD | {"load": [[0] * 2**17] * 3})], 1, "load has 3 x 131072 values"),
        (["[" * 100_000], 1, "recursion"),
        ([b"\xff\xfe{}".decode("latin-1")], 1, "Invalid JSON"),
        ([""], 1, "Invalid JSON"),
    ],
)
def test_hostile_line_is_one_line_error(tmp_path: Path, lines: list[str], where: int, says: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="latin-1")
    for act in (lambda: list(read_records(path)), lambda: JsonlWriter(path, first_step=9)):
        with pytest.raises(MetricsError) as caught:
            act()
        message = str(caught.value)
        assert message.startswith(f"{path} line {where}: ") and says in message
        assert message.isprintable() and len(message) < 400
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_endless_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "metrics.jsonl"
    path.write_text("1" * 1001)
    with pytest.raises(MetricsError, match="line 1: longer than 1000 bytes"):
        list(read_records(path))


def test_unusable_path(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="is no regular file"):
        JsonlWriter(tmp_path, first_step=1)
    with pytest.raises(MetricsError, match="No such file"):
        list(read_records(tmp_path / "none.jsonl"))


def test_a_full_disk_is_one_line_also_when_the_file_is_closed(tmp_path: Path) -> None:
    with (
        Path("/dev/full").open("ab") as full,
        pytest.raises(MetricsError, match=r"metrics\.jsonl: No space left on device"),
        JsonlWriter(tmp_path / "metrics.jsonl", first_step=1) as writer,
    ):
        writer.write(step(1))
        os.dup2(full.fileno(), writer._file.fileno())
        writer.write(step(2))
    assert [record.step for record in read_records(tmp_path / "metrics.jsonl")] == [1]
