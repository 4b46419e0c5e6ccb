"""Logs of runs that went well give no fault, whatever faults their lines name."""

import pytest

from tests.doctored import told
from tests.healthy import NOTES, healthy_log


@pytest.mark.parametrize("note", NOTES)
def test_a_line_that_names_faults_is_none(note: str) -> None:
    assert told({"x.log": f"{note}\n"}) == ("", [])


def test_healthy_logs() -> None:
    assert {seed: found for seed in range(200) if (found := told({"x.log": healthy_log(seed)}))[0]} == {}


def test_a_fault_in_them_is_seen() -> None:
    log = f"{healthy_log(1)}[ERROR] x: the link is down\n"
    assert told({"x.log": log})[0] == "general-link"
