"""A run that cannot fit into the machine's memory is refused before anything is allocated."""

from pathlib import Path

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.model.counts import num_parameters
from ascend_moe_train.train import memory
from tests.small_run import small_run, write_run


def test_what_a_run_holds_at_the_least(tmp_path: Path) -> None:
    config = small_run(tmp_path, tmp_path)
    # fp32 weights, gradients, two moments; 4 sequences of 16 tokens, four int32 each
    assert memory.least_bytes(config) == 16 * num_parameters(config.model) + 16 * 4 * 16


def test_adapters_have_moments_and_the_frozen_weights_none(tmp_path: Path) -> None:
    whole = small_run(tmp_path, tmp_path, "run.init_from=x", "model.moe.balance_bias_rate=null")
    adapted = small_run(tmp_path, tmp_path, "run.init_from=x", "model.moe.balance_bias_rate=null", "lora.r=1")
    weights = num_parameters(whole.model)
    assert 4 * weights < memory.least_bytes(adapted) < 8 * weights < memory.least_bytes(whole)


def test_this_machine_tells() -> None:
    free = memory.free_bytes()
    assert free is not None and free > 2**20


def test_a_system_that_does_not_tell_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: None)
    memory.check_memory(small_run(tmp_path, tmp_path, "model.vocab_size=99999999999"))


@pytest.mark.parametrize(
    "change",
    [
        "model.vocab_size=99999999999",
        "model.moe.num_experts=999999999",
        "batch.global_sequences=999999999999999998",
    ],
)
def test_a_run_that_cannot_fit_is_refused(
    change: str, tmp_path: Path, small_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(write_run(tmp_path, small_corpus)), "--set", change]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this run needs at least ") and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]
