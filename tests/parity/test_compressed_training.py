"""Runs whose gradients are summed in few bits: what they learn, what they send, and that they go on exactly."""

from pathlib import Path
from typing import Any

import pytest

from tests.parity.compressed_training_worker import SAVED, STEPS, WARM_UP
from tests.ranks import run_ranks
from tests.small_run import write_run

CONTENT = {"int8": "gradients int8", "powersgd": "gradients powersgd", "onebit_adam": "momenta 1-bit"}
# steps that are those of whole gradients: before signs are sent, before anything was lost
EXACT_STEPS = {"onebit_adam": WARM_UP, "int8": 1, "powersgd": 0}


@pytest.fixture(
    scope="module",
    params=["onebit_adam", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "powersgd"))],
)
def method(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def of_ranks(method: str, tmp_path_factory: pytest.TempPathFactory, small_corpus: Path) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compressed")
    write_run(folder, small_corpus)
    worker = "tests.parity.compressed_training_worker:on_rank"
    argument = [str(folder), method]
    return run_ranks(2, worker, argument, deadline_s=600, environment={"AMT_RUN_ID": "tests"})


def test_losses_are_not_above_those_of_whole_gradients(method: str, of_ranks: list[dict[str, Any]]) -> None:
    one, other = (result[method]["figures"] for result in of_ranks)
    assert one == other and len(one) == STEPS
    whole = of_ranks[0]["none"]["figures"]
    for found, expected in list(zip(one, whole, strict=True))[: EXACT_STEPS[method]]:
        assert found == pytest.approx(expected, rel=1e-2 if method == "int8" else 1e-5)
    losses, expected = [loss for loss, _ in one], [loss for loss, _ in whole]
    # it may well learn faster for some steps
    assert all(loss < 1.03 * other for loss, other in zip(losses, expected, strict=True))
    assert losses[-1] < 0.9 * losses[0] and losses != pytest.approx(expected, rel=1e-5)


def test_the_norm_by_which_gradients_are_clipped_is_near_that_of_their_sum(
    method: str, of_ranks: list[dict[str, Any]]
) -> None:
    whole, found = (of_ranks[0][each]["figures"][WARM_UP][1] for each in ("none", method))
    # of the first step that sends momenta: weights are still those of whole gradients, the norm is a sketch's
    assert found == pytest.approx(whole, rel=0.1)
    assert method != "onebit_adam" or found != whole


def test_a_run_goes_on_from_a_checkpoint_exactly(method: str, of_ranks: list[dict[str, Any]]) -> None:
    for result in of_ranks:
        continued = result[method]["continued"]
        assert set(continued) == set(map(str, SAVED))
        for step, figures in continued.items():
            assert figures == result[method]["figures"][int(step) :]


def test_bytes_are_those_of_the_formulas(method: str, of_ranks: list[dict[str, Any]]) -> None:
    for result in of_ranks:
        for each in ("none", method):
            assert result[each]["sent"] == result[each]["expected"]
            assert result[each]["kept_bytes"] == result[each]["expected_bytes"]
    whole, small = (of_ranks[0][name]["sent"] for name in ("none", method))
    assert small["all_reduce edp gradients"] == whole["all_reduce edp gradients"]
    dense = [sum(size for key, size in each.items() if " dp_cp " in key) for each in (small, whole)]
    assert {key.split(" dp_cp ")[1] for key in small if " dp_cp " in key} == {CONTENT[method]}
    assert dense[0] < 0.7 * dense[1]


def test_the_change_to_momenta_is_told_once(method: str, of_ranks: list[dict[str, Any]]) -> None:
    told = [info for info in of_ranks[0][method]["told"] if "momenta" in info]
    line = f"step {WARM_UP}: second moments stay as they are, momenta are sent as signs from now on"
    assert told == ([line] if method == "onebit_adam" else [])


def test_a_checkpoint_without_what_was_lost_is_no_mistake(method: str, of_ranks: list[dict[str, Any]]) -> None:
    assert any("begins at zero" in note for note in of_ranks[0]["from another"])
    assert not any("begins at zero" in note for note in of_ranks[0][method]["notes"])
