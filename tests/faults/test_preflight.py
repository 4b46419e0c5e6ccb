"""A preflight of four hosts on this machine: what is wrong is found, where it is, and nothing else."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.cli import main as cli
from ascend_moe_train.cluster.preflight.run import CHECKS
from tests.lab import Lab, LabHost, why_not
from tests.lab_faults import FAULTS, Fault, mend
from tests.lab_preflight import preflight, report, with_fault

NUM_HOSTS = 4
# Of each kind of fault one; `make test-all` has the others.
QUICK = {"wrong host key", "MTU 1500", "clock 3 s off", "disk full", "port taken", "an NPU missing", "NPU link down"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    made = Lab(tmp_path_factory.mktemp("lab"), NUM_HOSTS)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(made.home))
            patch.delenv("SSH_AUTH_SOCK", raising=False)
            for host in made.hosts:
                mend(made, host, report())
            yield made
    finally:
        made.close()


@pytest.mark.parametrize("ssh", ["none", "first"])
def test_a_good_cluster_passes(lab: Lab, ssh: str) -> None:
    verdict = preflight(lab, ssh=ssh)
    assert [(check.name, each.host, each.found) for check, each in verdict.findings] == []
    others = {
        (name, each.host, each.status, each.found)
        for name, outcomes in verdict.outcomes.items()
        for each in outcomes
        if each.status != "ok"
    }
    assert others == set()
    assert set(verdict.outcomes) == {check.name for check in CHECKS}
    assert all(len(outcomes) == NUM_HOSTS for outcomes in verdict.outcomes.values())


def with_marks() -> list[Any]:
    slow = pytest.mark.slow
    return [pytest.param(each, id=each.name, marks=() if each.name in QUICK else slow) for each in FAULTS]


@pytest.mark.parametrize("fault", with_marks())
def test_a_fault_is_found_where_it_is_and_nothing_else(lab: Lab, fault: Fault) -> None:
    with with_fault(lab, fault):
        verdict = preflight(lab, **fault.job)
    found = [(check.name, outcome.host, outcome.found) for check, outcome in verdict.findings]
    expected_host = "h1" if fault.check == "ssh between" else lab.hosts[fault.at - 1].name
    assert [each[:2] for each in found] == [(fault.check, expected_host)], found
    check, outcome = verdict.findings[0]
    assert fault.found in outcome.found
    assert not outcome.found.startswith(f"{check.name}:")  # which is shown before it
    assert fault.remedy in (outcome.remedy or check.remedy)


def test_links_are_measured(lab: Lab) -> None:
    verdict = preflight(lab, measures_links=True)
    names = [host.name for host in lab.hosts]
    assert {(each.sender, each.receiver) for each in verdict.seen.links} == {
        (a, b) for a in names for b in names if a != b
    }
    assert len(verdict.outcomes["links"]) == NUM_HOSTS


def test_the_planner_takes_the_links_that_were_measured(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text(lab.hostfile(slots=2))
    asked = ["--hostfile", "hosts", "--python", "amt-python", "--folder", "/mnt/run", "--min-write", "0"]
    with lab.switch.entered():
        code = cli.main(["preflight", *asked, "--device", "cpu", "--links", "--hardware-out", "links.yaml"])
    shown = capsys.readouterr().out
    assert code == 0, shown
    words = ["plan", "--model", "tiny", "--cluster", f"{2 * NUM_HOSTS}xhosts", "--hardware", "links.yaml"]
    assert cli.main(words) == 0
    assert f"{2 * NUM_HOSTS}xhosts" in capsys.readouterr().out.replace(" x ", "x")


def test_the_lab_leaves_this_machine_as_it_is(lab: Lab) -> None:
    host: LabHost = lab.hosts[0]
    assert host.space.run("cat /etc/hccn.conf").startswith("address_0=")
    assert not Path("/etc/hccn.conf").exists()
    assert os.uname().nodename != host.name


def test_the_command_shows_and_writes_what_is_found(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command line: table, reasons, commands that are printed only, page, rank table, JSON."""
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text(lab.hostfile())
    common = ["preflight", "--hostfile", "hosts", "--python", "amt-python", "--folder", "/mnt/run", "--min-write", "0"]
    third = lab.hosts[2]
    third.space.run("ip link set eth0 mtu 1500")
    try:
        with lab.switch.entered():
            code = cli.main([*common, "--fix", "--html", "page.html", "--rank-table", "ranks.json"])
            shown = capsys.readouterr().out
            mtu = third.space.run("cat /sys/class/net/eth0/mtu")
            third.space.run("ip link set eth0 mtu 9000")
            good_code = cli.main([*common, "--json"])
    finally:
        mend(lab, third, report())
    assert (code, good_code) == (1, 0)
    assert "4 hosts, 29 checks: 1 found on 1 of them" in shown
    assert "h3  mtu: between it and h1, h2, h4: no packet of 9,000 bytes arrives whole; eth0 has 1500" in shown
    assert "\nip link set dev eth0 mtu 9000\n" in shown
    assert mtu == "1500\n"  # printed, not run
    assert "between it and h1, h2, h4" in Path("page.html").read_text()
    assert len(json.loads(Path("ranks.json").read_text())["server_list"]) == NUM_HOSTS
    assert json.loads(capsys.readouterr().out)["findings"] == []
