"""What a run remembers goes into a checkpoint and comes back the same; anything else is refused by name."""

import json
from typing import Any

import pytest

from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.optim.scaling import LossScale
from ascend_moe_train.train.state import TrainingState

STATE = TrainingState(
    step=17,
    updates=15,
    tokens=17 * 64,
    bad_in_row=1,
    skipped=2,
    loss_scale=LossScale(scale=2.0**40 / 3, good_steps=3, overflows=2),
    smooth_total=0.1 + 0.2,
    smooth_weight=1 / 3,
    recent_losses=(1.1, 2.2000000000000006, 1e-300),
)


def meta() -> dict[str, Any]:
    parsed = json.loads(json.dumps({"state": STATE.model_dump(mode="json")}))
    assert isinstance(parsed, dict)
    return parsed


def test_every_bit_comes_back() -> None:
    assert TrainingState.from_meta(meta(), 17, "here") == STATE


def test_a_fresh_run_has_done_nothing() -> None:
    fresh = TrainingState()
    assert (fresh.step, fresh.updates, fresh.recent_losses, fresh.loss_scale.scale) == (0, 0, (), 1.0)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "step as text": ({"step": "17"}, "step: Input should be a valid integer"),
    "step that is true": ({"step": True}, "step: Input should be a valid integer"),
    "negative step": ({"step": -1}, "step: Input should be greater than or equal to 0"),
    "unknown key": ({"extra": 1}, "extra: Extra inputs are not permitted"),
    "loss scale of none": ({"loss_scale": {"scale": 0.0}}, "loss_scale.scale: Input should be greater than 0"),
    "loss scale as text": ({"loss_scale": {"scale": "2"}}, "loss_scale.scale: Input should be a valid number"),
    "infinite loss scale": ({"loss_scale": {"scale": float("inf")}}, "loss_scale.scale: Input should be a finite"),
    "loss scale with more": ({"loss_scale": {"scale": 1.0, "x": 1}}, "loss_scale.x: Unexpected keyword argument"),
    "negative overflows": ({"loss_scale": {"scale": 1.0, "overflows": -1}}, "loss_scale.overflows: Input should be"),
    "loss that is no number": ({"recent_losses": [float("nan")]}, "recent_losses.0: Input should be a finite number"),
    "losses that are no list": ({"recent_losses": {}}, "recent_losses: Input should be a valid"),
    "mean that is infinite": ({"smooth_total": float("-inf")}, "smooth_total: Input should be a finite number"),
    "step of another checkpoint": ({"step": 18}, "step is 18, the checkpoint's 17"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named(case: str) -> None:
    changes, message = MISTAKES[case]
    changed = meta()
    changed["state"] |= changes
    with pytest.raises(CheckpointError) as raised:
        TrainingState.from_meta(changed, 17, "step-17")
    assert str(raised.value).startswith("step-17: manifest.json: meta.state")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [{}, {"state": None}, {"state": []}, {"state": 3}])
def test_no_state_at_all(content: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"^here: manifest\.json: meta\.state"):
        TrainingState.from_meta(content, 17, "here")
