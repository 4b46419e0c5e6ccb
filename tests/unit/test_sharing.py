"""What a rank shares with others is known from the configuration as it is made of the model itself."""

from dataclasses import replace

import pytest

from ascend_moe_train.parallel.apply import parallelize
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.parallel.native import Drawn, NativeOps
from ascend_moe_train.parallel.sharing import zero_plan_of
from ascend_moe_train.train.session import build_model
from tests.parity.layouts import LAYOUTS, Case

MODELS = ("tied mixtral of 4", "mtp deepseek of 4", "untied mixtral of 4")
# what a formula of bytes could get wrong: every axis, stages of ZeRO, both ends, rows that neighbours have too
CHOSEN = (
    "dp2",
    "zero1 dp4",
    "zero3 dp2",
    "tp4",
    "tp2+sp",
    "etp2 x ep2",
    "pp2 x 2 chunks",
    "pp2 x tp2 x ep2",
    "pp2 x dp2 x cp2",
    "pp2 zero bubble, zero3",
    "tp2+sp x ep2 x etp2 zero3",
)


@pytest.mark.parametrize("layout", CHOSEN)
def test_shares_and_uses_are_those_of_the_model(layout: str) -> None:
    for number, model in enumerate(MODELS):
        case = Case(layout=layout, model=model, mode="dropless", num_micro=2, recompute=("none", "full")[number % 2])
        if layout == "pp2 zero bubble, zero3" and model != "untied mixtral of 4":
            continue  # refused
        config, ranks = case.run(), LAYOUTS[layout][0]
        mesh = mesh_of(config, ranks)
        for rank in {0, ranks - 1}:
            built, _, _ = build_model(config)
            sharded = parallelize(built, mesh, config, NativeOps(Drawn(rank, ranks)))
            expected = sharded.plan
            found = zero_plan_of(config, mesh, rank)
            assert found.shares == expected.shares
            assert replace(found, uses=dict(found.uses)) == replace(expected, uses=dict(expected.uses))
