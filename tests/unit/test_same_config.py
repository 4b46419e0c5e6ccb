"""Ranks that have not read the same configuration: the odd ones are refused, with the keys that differ."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.comm import Comm
from ascend_moe_train.train import same_config
from tests.small_run import small_run

WAIT_S = 20.0


def refusals(configs: list[RunConfig], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each rank of so many raises; empty for none."""
    slots: list[Any] = [None] * len(configs)
    barrier = threading.Barrier(len(configs), timeout=WAIT_S)
    said = [""] * len(configs)

    def exchange(comm: Comm, value: Any) -> list[Any]:
        slots[comm.rank] = value
        barrier.wait()
        found = list(slots)
        barrier.wait()
        return found

    def rank(number: int) -> None:
        try:
            same_config.check_same_config(configs[number], cast(Comm, SimpleNamespace(rank=number)))
        except ConfigError as error:
            said[number] = str(error)

    monkeypatch.setattr(same_config, "exchange_json", exchange)
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(configs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return said


def test_the_odd_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "the configuration is not that of rank {first}: optim.lr is {own} here and {theirs} there"
    same, other = (small_run(tmp_path, tmp_path, f"optim.lr={lr}") for lr in (0.01, 0.02))
    assert refusals([same, same, same], monkeypatch) == ["", "", ""]
    assert refusals([same, other, same], monkeypatch) == ["", words.format(first=0, own=0.02, theirs=0.01), ""]
    assert refusals([other, same, same], monkeypatch) == [words.format(first=1, own=0.02, theirs=0.01), "", ""]
    # as many have the one as the other
    assert refusals([same, other], monkeypatch) == ["", words.format(first=0, own=0.02, theirs=0.01)]


def test_several_keys() -> None:
    own = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}
    assert same_config.differences(own, {**own, "b": 3}) == "b is 2 here and 3 there"
    theirs = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 5}
    expected = "a is 1 here and 2 there, b is 2 here and 3 there, c is 3 here and 4 there, and 1 more"
    assert same_config.differences(own, theirs) == expected
