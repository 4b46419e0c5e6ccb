"""TensorBoard event files, read back with TensorBoard's own reader."""

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ascend_moe_train.errors import MetricsError
from ascend_moe_train.train.tensorboard import TensorBoardWriter
from tests.unit.test_metrics import evaluation, meter, step


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def tags(folder: Path) -> set[str]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_scalars(tmp_path: Path) -> None:
    with TensorBoardWriter(tmp_path, first_step=1) as writer:
        writer.write(step(1, meter(peak_flops_per_s=None)))
        writer.write(step(2, meter(peak_flops_per_s=None), loss=1.5))
        writer.write(evaluation(2))
    assert scalars(tmp_path, "loss/train") == [(1, 2.5), (2, 1.5)]
    assert scalars(tmp_path, "experts_dead/moe_layer_00") == [(1, 2), (2, 2)]
    ((at, loss),) = scalars(tmp_path, "loss/validation")
    assert at == 2 and loss == pytest.approx(math.log(8))
    assert {"experts/drop_rate", "experts_load_cv/moe_layer_01"} <= tags(tmp_path)
    assert not {"speed/mfu", "optim/loss_scale"} & tags(tmp_path)


def test_resumed_run_replaces_later_steps(tmp_path: Path) -> None:
    with TensorBoardWriter(tmp_path, first_step=1) as writer:
        for number in (1, 2, 3):
            writer.write(step(number))
    with TensorBoardWriter(tmp_path, first_step=2) as writer:
        writer.write(step(2, loss=1.0))
    assert scalars(tmp_path, "loss/train") == [(1, 2.5), (2, 1.0)]


def test_not_finite(tmp_path: Path) -> None:
    with TensorBoardWriter(tmp_path, first_step=1) as writer:
        writer.write(step(1, loss=math.nan, grad_norm=math.inf))
    assert math.isnan(scalars(tmp_path, "loss/train")[0][1])


def test_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MetricsError, match="file"):
        TensorBoardWriter(tmp_path / "file" / "events", first_step=1)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TensorBoardWriter(tmp_path, first_step=1) as writer, Path("/dev/full").open("ab", buffering=0) as full:
        writer.write(step(1))
        monkeypatch.setattr(writer, "_file", full)
        with pytest.raises(MetricsError, match=r"events.*: No space left on device"):
            writer.write(step(2))
    assert scalars(tmp_path, "loss/train") == [(1, 2.5)]
