"""Preflight: what hosts say is judged and never trusted; what is shown and written."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_moe_train.cli import main as cli
from ascend_moe_train.cluster.hostfile import parse_hostfile
from ascend_moe_train.cluster.preflight import probe
from ascend_moe_train.cluster.preflight.checks_host import CHECKS as HOST_CHECKS
from ascend_moe_train.cluster.preflight.links import MOST_ROUNDS, hardware_text, link_lines, rounds_of
from ascend_moe_train.cluster.preflight.model import (
    Answers,
    Job,
    Link,
    Reading,
    Seen,
    blamed,
    parsed,
    peers_of,
    read_reply,
)
from ascend_moe_train.cluster.preflight.npu_text import (
    conf_addresses,
    link_status,
    npu_address,
    parse_npu_smi,
    tls_switch,
)
from ascend_moe_train.cluster.preflight.report import as_json, fix_lines, headline, page
from ascend_moe_train.cluster.preflight.run import CHECKS, judge_all
from ascend_moe_train.cluster.preflight.self_report import code_digest
from ascend_moe_train.cluster.rank_table import rank_table
from ascend_moe_train.cluster.remote import RemoteError
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.planner.hardware import catalogue
from tests.lab import npu_smi, tls

HOSTILE = "\x1b[2J$(reboot)`id`; rm -rf / <script>alert(1)</script> {{style}} [bold]\u202e\x00 " + "x" * 500


def job(num_hosts: int = 3, slots: int = 2, **more: Any) -> Job:
    text = "".join(f"n{number} slots={slots} address=10.0.0.{number + 1}\n" for number in range(num_hosts))
    return Job(
        hosts=parse_hostfile(text.encode(), "hosts"), python="/x/python", master_port=8118, code=code_digest(), **more
    )


def reading(out: object, code: int | None = 0, problem: str | None = None) -> Reading:
    return Reading(out=out if isinstance(out, str) else json.dumps(out), code=code, problem=problem)


def seen(readings: list[dict[str, Reading]], **more: Any) -> Seen:
    asked = job(len(readings), **more)
    answers = [Answers(host=h, readings=r, offset_s=0.0) for h, r in zip(asked.hosts, readings, strict=True)]
    return Seen(job=asked, answers=tuple(answers), errors=())


def outcomes(name: str, said: Seen) -> list[tuple[str, str]]:
    check = next(check for check in CHECKS if check.name == name)
    return [(each.status, each.found) for each in check.judge(said)]


def test_npu_smi_is_read_by_its_bars() -> None:
    table = parse_npu_smi(npu_smi(range(3), health={1: "Alarm"}, process=(2, 4242), hbm_mb={0: 30000}))
    assert [(each.number, each.name, each.health, each.hbm_used_mb) for each in table.npus] == [
        (0, "910B2", "OK", 30000),
        (1, "910B2", "Alarm", 3404),
        (2, "910B2", "OK", 3404),
    ]
    assert table.processes == ((2, 4242),)


def test_a_host_that_was_not_asked_has_a_mark_of_its_own() -> None:
    said = seen([{}, {}])
    error = RemoteError(said.answers[1].host, "broken", "nobody listens")
    verdict = judge_all(replace(said, answers=said.answers[:1], errors=(error,)))
    assert page(verdict).count("<td>-</td>") == len(verdict.checks) - 1  # all but that of SSH


def test_a_wider_table_of_a_newer_release_is_read() -> None:
    text = npu_smi(range(2)).replace("| 0                         |", "| 0       0                                 |")
    assert len(parse_npu_smi(text).npus) == 2


@given(st.text(alphabet="| 0123OK\n910B2 Process id/+-", max_size=400))
def test_whatever_npu_smi_prints_is_read(text: str) -> None:
    assert len(parse_npu_smi(text).npus) <= 64


def test_hccn_tool_is_read() -> None:
    assert link_status("link status: UP\n") == "UP"
    assert link_status("Cmd err") is None
    assert npu_address("ipaddr:192.168.1.10\nnetmask:255.255.255.0\n") == ("192.168.1.10", "255.255.255.0")
    assert npu_address("ipaddr:; reboot") is None
    assert tls_switch(tls(0, 0)) == "off"
    assert tls_switch(tls(0, 1)) == "on"
    assert tls_switch("") is None
    assert conf_addresses("address_0=192.168.1.10\nnetmask_0=x\naddress_1=192.168.1.11\n") == {
        0: "192.168.1.10",
        1: "192.168.1.11",
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"readings": 3}',
        b'{"readings": {"a": {"out": 1, "code": 0, "problem": null}}}',
        b'{"readings": {"a": {"out": "", "code": "0", "problem": null}}}',
        b'{"readings": {"a": {"out": "", "code": 0, "problem": null, "more": 1}}}',
        b'{"readings": {}, "more": {}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_replies_of_another_form_are_refused(content: bytes) -> None:
    assert read_reply(content) is None


def test_replies_are_read() -> None:
    reply = read_reply(b'{"readings": {"a": {"out": "x", "code": null, "problem": "late"}}}')
    assert reply == {"a": Reading(out="x", code=None, problem="late")}
    assert parsed("[" * 100_000) is None


@pytest.mark.parametrize("said", [HOSTILE, "{}", "[]", "null", '{"environment": {"HCCL_X": [1, {"a": 2}]}, "mtus": 3}'])
def test_whatever_hosts_say_is_judged_and_shown(said: str) -> None:
    names = ["host", "names", "disk", "npu-smi", "software", "thp", "hugepages", "range", "reserved", "timedatectl"]
    names += [
        "master port",
        "hccl ports",
        "hccn.conf",
        *(f"hccn {o} {n}" for o in ("ip", "link", "tls") for n in (0, 1)),
    ]
    good = dict.fromkeys(names, reading(npu_smi(range(2))))
    verdict = judge_all(seen([dict.fromkeys(names, reading(said)), good, {}], folder="/x", files={"/r": "0"}))
    shown = [headline(verdict), *fix_lines(verdict)]
    assert all(line.isprintable() for line in shown)
    assert json.loads(json.dumps(as_json(verdict)))["passed"] is False
    text = page(verdict)
    assert "<script" not in text
    assert "\x1b" not in text
    for _, outcome in verdict.findings:
        assert outcome.found.isprintable()
        assert all(shlex.split(shlex.join(words)) == list(words) for words in outcome.fix)


def test_the_guilty_host_is_named() -> None:
    hosts = "abcd"
    tested = [(a, b) for a in hosts for b in hosts if a != b]
    assert blamed([], tested) == {}
    assert blamed([pair for pair in tested if "c" in pair], tested) == {"c": ["a", "b", "d"]}
    assert blamed([pair for pair in tested if "c" in pair or "a" in pair], tested).keys() == {"a", "c"}
    assert blamed([("a", "b"), ("b", "a")], tested) in ({"a": ["b"]}, {"b": ["a"]})


def test_every_host_of_a_large_cluster_is_tested_by_several() -> None:
    said = seen([{}] * 100)
    counts = dict.fromkeys((each.host.name for each in said.answers), 0)
    for index in range(100):
        peers = peers_of(said, index)
        assert len(peers) <= 16
        assert said.answers[index] not in peers
        for peer in peers:
            counts[peer.host.name] += 1
    assert min(counts.values()) >= 6
    assert [len(peers_of(seen([{}] * 4), index)) for index in range(4)] == [3] * 4


def test_clocks_are_held_against_the_middle_of_all() -> None:
    said = seen([{}] * 3)
    late = Answers(host=said.answers[1].host, readings={}, offset_s=-3.0, error_s=0.1)
    unclear = Answers(host=said.answers[2].host, readings={}, offset_s=3.0, error_s=2.9)
    found = outcomes("clock", Seen(job=said.job, answers=(said.answers[0], late, unclear), errors=()))
    assert [status for status, _ in found] == ["ok", "failed", "ok"]
    assert "3.00 s behind" in found[1][1]


@pytest.mark.parametrize(
    ("addresses", "status", "words"),
    [
        (["10.0.0.2"], "ok", ""),
        (["127.0.1.1"], "failed", "10.0.0.2 is 127.0.1.1"),
        (["10.9.9.9"], "failed", "10.0.0.2 is 10.9.9.9, elsewhere"),
        ("Name or service not known", "failed", "has no address"),
    ],
)
def test_names_mean_the_same_everywhere(addresses: object, status: str, words: str) -> None:
    right = {f"10.0.0.{number}": [f"10.0.0.{number}"] for number in (1, 2, 3)}
    said = seen([{"names": reading(each)} for each in (right, right, right | {"10.0.0.2": addresses})])
    found = outcomes("names", said)
    assert [each for each, _ in found] == ["ok", "ok", status]
    assert words in found[2][1]


def test_a_slow_disk_is_found() -> None:
    fast = {"disk": reading({"folder": "/x", "free_bytes": 10**12, "bytes_per_s": 1e9})}
    slow = {"disk": reading({"folder": "/x", "free_bytes": 10**12, "bytes_per_s": 1e6})}
    found = outcomes("disk", seen([fast, slow], folder="/x"))
    assert [status for status, _ in found] == ["ok", "failed"]
    assert "1.00 MB/s, at least 50.0 MB/s" in found[1][1]


def test_a_host_that_cannot_be_asked_is_one_finding() -> None:
    said = seen([{}] * 2)
    error = RemoteError(said.job.hosts.hosts[1], "changed key", "its key is another one")
    verdict = judge_all(Seen(job=said.job, answers=said.answers[:1], errors=(error,)))
    of_second = [(check.name, each.found) for check, each in verdict.findings if each.host == "n1"]
    assert of_second == [("ssh", "its key is another one")]
    assert "ssh-keygen -R 10.0.0.2" in "\n".join(fix_lines(verdict))


def test_checks_are_complete_data() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS) >= 25
    for check in CHECKS:
        assert all((check.what, check.how, check.rule, check.why, check.remedy)), check.name
        requests = {**check.reads(job(folder="/x")), **check.reads_of_pair(seen([{}] * 2), *seen([{}] * 2).answers)}
        for request in requests.values():
            assert request["kind"] in probe.KINDS
            if request["kind"] in ("command", "connect", "disk"):
                assert 0 < request["timeout_s"] <= 20
    assert {check.group for check in HOST_CHECKS} == {"host"}


def test_a_rank_table_is_written() -> None:
    readings = [
        {f"hccn ip {number}": reading(f"ipaddr:192.168.{host}.{number}\n") for number in range(2)} for host in range(2)
    ]
    table = rank_table(seen(readings))
    assert table["server_count"] == "2"
    assert [each["server_id"] for each in table["server_list"]] == ["10.0.0.1", "10.0.0.2"]
    assert table["server_list"][1]["device"] == [
        {"device_id": "0", "device_ip": "192.168.1.0", "rank_id": "2"},
        {"device_id": "1", "device_ip": "192.168.1.1", "rank_id": "3"},
    ]
    with pytest.raises(ConfigError, match="NPU 0 of n1 has no address"):
        rank_table(seen([readings[0], {}]))
    with pytest.raises(ConfigError, match=r"has the address 192\.168\.0\.0, as NPU 0 of n0 does"):
        rank_table(seen([readings[0], readings[0]]))


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 7, 8])
def test_all_pairs_meet_in_disjoint_rounds(num_hosts: int) -> None:
    rounds = list(rounds_of(num_hosts))
    for pairs in rounds:
        busy = [index for pair in pairs for index in pair]
        assert len(set(busy)) == len(busy)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == sorted((a, b) for a in range(num_hosts) for b in range(num_hosts) if a != b)
    assert len(list(rounds_of(1000))) == MOST_ROUNDS


@pytest.mark.parametrize("num_hosts", [3, 4])
def test_the_host_with_slow_links_is_named(num_hosts: int, tmp_path: Path) -> None:
    said = seen([{"npu-smi": reading("", None, "not found")}] * num_hosts, measures_links=True)
    names = [each.host.name for each in said.answers]
    links = tuple(
        Link(sender=a, receiver=b, bytes_per_s=1e8 if "n2" in (a, b) else 1e9, latency_s=5e-5)
        for a in names
        for b in names
        if a != b
    )
    said = replace(said, links=links)
    check = judge_all(said).outcomes["links"]
    assert [each.status for each in check] == ["ok", "ok", "failed", "ok"][:num_hosts]
    assert "100 MB/s, half of the hosts have 1.00 GB/s or more" in check[2].found
    assert next(link_lines(links)).startswith(f"links: {len(links)} measured")
    file = tmp_path / "hardware.yaml"
    file.write_text(hardware_text(said))
    device = catalogue(file)["hosts"]
    assert device.devices_per_node == 2
    assert device.across.latency_s == 5e-5
    with pytest.raises(ConfigError, match="NPUs have links of their own"):
        hardware_text(replace(said, job=replace(said.job, device="ascend")))
    with pytest.raises(ConfigError, match="no link was measured"):
        hardware_text(replace(said, links=()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --hostfile FILE, or --hosts-from"),
        (["--hostfile", "none"], "none: there is no such hostfile"),
        (["--hostfile", "hosts", "--hosts-from", "slurm"], "give --hostfile FILE"),
        (["--hostfile", "hosts", "--slots", "8"], "a hostfile has slots= in each line"),
        (["--hostfile", "hosts", "--set", "optim.lr=1"], "no RUN_YAML to override"),
        (["--hostfile", "hosts", "--folder", "/a\nb"], "has characters that no path has"),
        (["--hostfile", "hosts", "--html", "."], "--html .: is a folder"),
        (["--hostfile", "hosts", "--rank-table", "."], "--rank-table .: is a folder"),
        (["--hostfile", "hosts", "--hardware-out", "."], "--hardware-out .: is a folder"),
        (["--hostfile", "hosts", "no.yaml"], "no.yaml"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    Path("hosts").write_text("a slots=8\n")
    assert cli.main(["preflight", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
