"""The live table and its plain form."""

import io
import math
from collections import deque

import numpy as np
import pytest
from rich.console import Console

from ascend_moe_train.parallel.spans import StepComm
from ascend_moe_train.train.live import LiveView, plain_line, sparkline
from tests.unit.test_metrics import evaluation, meter, step


def plain() -> Console:
    return Console(file=io.StringIO(), width=40)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_line_has_every_figure() -> None:
    line = plain_line(step(3), 10)
    for text in ("step 3/10", "loss 2.5000", "smoothed 2.5000", "lr 1.00e-03", "grad norm 1.5", "tokens/s 4"):
        assert text in line
    for text in ("model 400 FLOP/s", "MFU 40.0 %", "load cv 0.61", "max/mean 3.00", "dead 2", "dropped 25.0 %"):
        assert text in line
    assert "memory " in line and "left 14.0 s" in line


def test_unknown_is_not_available() -> None:
    assert "MFU n/a" in plain_line(step(1, meter(peak_flops_per_s=None)), 10)
    line = plain_line(step(1, loss=math.nan, step_s=0.0, counts_LE=np.zeros((1, 4), np.int64)), 10)
    assert "loss nan" in line and "tokens/s n/a" in line


def test_dense_model_has_no_expert_figures() -> None:
    assert "load cv" not in plain_line(step(1, counts_LE=np.zeros((0, 0), np.int64)), 10)


def test_multi_token_prediction_is_shown_where_there_is_some() -> None:
    assert "mtp loss 3.2500" in plain_line(step(1, mtp_loss=3.25), 10)
    assert "mtp" not in plain_line(step(1), 10)


def test_waiting_for_other_ranks_is_shown_where_it_is_known() -> None:
    assert "waits 25.0 %" in plain_line(step(1, comm=StepComm(total_s=1.5, exposed_s=0.5, calls=())), 10)
    assert "waits" not in plain_line(step(1), 10)


def test_without_terminal_one_line_every_log_every() -> None:
    console = plain()
    with LiveView(total_steps=7, log_every=3, console=console) as view:
        for number in range(1, 8):
            view.show(step(number, loss=math.nan, skipped=True) if number == 5 else step(number))
        view.show(evaluation(7))
        view.note("checkpoint [saved]")
    lines = printed(console).splitlines()
    assert [line.split()[1] for line in lines[:5]] == ["1/7", "3/7", "5/7", "6/7", "7/7"]
    assert "SKIPPED" in lines[2]
    assert lines[5].startswith("validation after step 7: loss 2.0794")
    assert lines[6:] == ["checkpoint [saved]"]
    assert "\x1b" not in printed(console)


@pytest.mark.parametrize("width", [30, 80, 160])
def test_terminal_shows_table_in_place(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm"})
    with LiveView(total_steps=4, log_every=1, console=console) as view:
        for number in range(1, 4):
            view.show(step(number))
        view.show(evaluation(3))
    shown = printed(console)
    for text in ("compiling", "3", "smoothed", "MFU", "dropped", "validation @ 3", "bits/byte"):
        assert text in shown
    assert "\x1b[?25h" in shown


def test_sparkline() -> None:
    assert sparkline(deque([3.0, math.nan, 1.0])) == "█·▁"
    assert sparkline(deque([2.0, 2.0])) == "▁▁"
    assert sparkline(deque([math.nan])) == ""
