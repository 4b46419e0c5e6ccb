"""Checks of NPUs and of the network between them. Pure.

What npu-smi and hccn_tool print is known from documents and threads; nothing here has been run on an NPU.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from ascend_moe_train.cluster.preflight.model import (
    Answers,
    Check,
    Job,
    Outcome,
    Request,
    Seen,
    Words,
    bad,
    command,
    of_pair,
    one_line,
    unknown,
    usual,
)
from ascend_moe_train.cluster.preflight.npu_text import (
    conf_addresses,
    link_status,
    npu_address,
    tls_switch,
)

MOST_IDLE_SHARE = 0.1  # of HBM; firmware takes 3.4 of 64 GB
CONF = "/etc/hccn.conf"
_RECEIVED = re.compile(r"([0-9]{1,6}) (?:packets )?received|recv (seq)=", re.ASCII)
_LOST = re.compile(r"\b0 (?:packets )?received|recv time ?out|unreachable", re.ASCII | re.IGNORECASE)


def _smi_reads(job: Job) -> Mapping[str, Request]:
    if job.device == "cpu":
        return {}
    return {"npu-smi": command("npu-smi", "info", timeout_s=20)}


def _judge_npus(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        reading, num_npus = answers.get("npu-smi"), len(answers.npu_table.npus)
        if num_npus >= seen.job.hosts.slots:
            return None
        if num_npus == 0:
            said = "npu-smi is not found" if reading.is_missing else one_line(reading.out) or reading.said
            return bad(answers, f"no NPU: {said}", ("npu-smi", "info"))
        found = f"{num_npus} of {seen.job.hosts.slots} NPUs"
        return bad(answers, found, ("npu-smi", "info", "-l"), ("npu-smi", "info", "-m"))

    return seen.judged(judge)


def _judge_health(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        npus = answers.npu_table.npus
        if not npus:
            return unknown(answers, "npu-smi shows no NPU")
        ill = [each for each in npus if each.health != "OK"]
        if not ill:
            return None
        number = str(ill[0].number)
        looks: Words = ("npu-smi", "info", "-i", number, "-c", "0", "-t", "health")
        reset: Words = ("npu-smi", "set", "-t", "reset", "-i", number, "-c", "0")
        return bad(answers, ", ".join(f"NPU {each.number} {one_line(each.health)}" for each in ill), looks, reset)

    return seen.judged(judge)


def _judge_idle(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        table = answers.npu_table
        if not table.npus:
            return unknown(answers, "npu-smi shows no NPU")
        if table.processes:
            listed = ", ".join(f"process {process} on NPU {number}" for number, process in table.processes[:4])
            more = f" and {len(table.processes) - 4} more" if len(table.processes) > 4 else ""
            return bad(answers, f"{listed}{more}", ("ps", "-fp", str(table.processes[0][1])))
        full = [
            f"NPU {each.number} holds {each.hbm_used_mb:,} of {each.hbm_mb:,} MB without a process"
            for each in table.npus
            if each.hbm_mb and each.hbm_used_mb and each.hbm_used_mb > MOST_IDLE_SHARE * each.hbm_mb
        ]
        return bad(answers, full[0], remedy="look for a container that holds it: docker ps") if full else None

    return seen.judged(judge)


def _hccn(option: str) -> Callable[[Job], Mapping[str, Request]]:
    def reads(job: Job) -> Mapping[str, Request]:
        if job.device == "cpu":
            return {}
        return {
            f"hccn {option} {number}": command("hccn_tool", "-i", str(number), f"-{option}", "-g")
            for number in range(job.hosts.slots)
        }

    return reads


def _numbers(seen: Seen, answers: Answers) -> list[int]:
    """NPUs that npu-smi shows: what one that is missing says of its link is no further finding."""
    return [each.number for each in answers.npu_table.npus if each.number < seen.job.hosts.slots]


def _judge_link(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        down = []
        for number in _numbers(seen, answers):
            reading = answers.get(f"hccn link {number}")
            if reading.is_missing:
                return bad(
                    answers, "hccn_tool is not found", remedy="install the driver, or mount it into the container"
                )
            if (status := link_status(reading.out)) != "UP":
                down.append(f"NPU {number} {status or one_line(reading.out) or reading.said}")
        if not down:
            return None
        first = down[0].split()[1]
        looks: list[Words] = [("hccn_tool", "-i", first, f"-{each}", "-g") for each in ("optical", "link_stat", "lldp")]
        return bad(answers, ", ".join(down), *looks)

    return seen.judged(judge)


def _address_reads(job: Job) -> Mapping[str, Request]:
    return {**_hccn("ip")(job), "hccn.conf": {"kind": "file", "path": CONF}} if job.device != "cpu" else {}


def address_of(answers: Answers, number: int) -> str | None:
    """The address of one NPU, only if it is one."""
    found = npu_address(answers.get(f"hccn ip {number}").out)
    try:
        return str(ipaddress.ip_address(found[0])) if found else None
    except ValueError:
        return None


def _judge_addresses(seen: Seen) -> Iterator[Outcome]:
    everywhere = [(each.host.name, n, address_of(each, n)) for each in seen.answers for n in _numbers(seen, each)]
    count = Counter(address for _, _, address in everywhere)
    owners: dict[str | None, str] = {}
    for host, number, address in everywhere:
        owners.setdefault(address, f"NPU {number} of {host}")
    masks = {
        (each.host.name, n): (npu_address(each.get(f"hccn ip {n}").out) or ("", None))[1]
        for each in seen.answers
        for n in _numbers(seen, each)
    }
    mask = usual(list(masks.values()))

    def judge(answers: Answers) -> Outcome | None:
        conf = conf_addresses(answers.get("hccn.conf").out)
        for number in _numbers(seen, answers):
            own = f"NPU {number} of {answers.host.name}"
            address = address_of(answers, number)
            wanted = conf.get(number)
            fix = (
                "hccn_tool",
                "-i",
                str(number),
                "-ip",
                "-s",
                "address",
                wanted or "ADDRESS",
                "netmask",
                mask or "MASK",
            )
            if address is None:
                return bad(answers, f"NPU {number} has no address", fix)
            if wanted is not None and wanted != address:
                return bad(answers, f"NPU {number} has {address}, {CONF} says {wanted}", fix)
            if masks[answers.host.name, number] != mask:
                return bad(
                    answers, f"NPU {number} has netmask {masks[answers.host.name, number]}, most have {mask}", fix
                )
            if count[address] > 1 and owners[address] != own:
                return bad(answers, f"NPU {number} has {address}, as {owners[address]} does", fix)
        return None

    return seen.judged(judge)


def _judge_tls(seen: Seen) -> Iterator[Outcome]:
    found = {
        (each.host.name, number): tls_switch(each.get(f"hccn tls {number}").out)
        for each in seen.answers
        for number in _numbers(seen, each)
    }
    most = usual([each for each in found.values() if each is not None])

    def judge(answers: Answers) -> Outcome | None:
        own = {number: found[answers.host.name, number] for number in _numbers(seen, answers)}
        if None in own.values():
            return unknown(answers, "hccn_tool -tls -g says nothing of it")
        other = [number for number, switch in own.items() if switch != most]
        if not other:
            return None
        fix: list[Words] = [
            ("hccn_tool", "-i", str(number), "-tls", "-s", "enable", "1" if most == "on" else "0") for number in other
        ]
        return bad(answers, f"TLS is {own[other[0]]} on NPU {', '.join(map(str, other))}, elsewhere {most}", *fix)

    return seen.judged(judge)


def _ping_reads(seen: Seen, host: Answers, peer: Answers) -> Mapping[str, Request]:
    """NPU to NPU of the same number, with the next host only: a ring passes every link of every host."""
    if not seen.has_npus or not _is_next(seen, host, peer):
        return {}
    requests = {}
    for number in _numbers(seen, host):
        if (address := address_of(peer, number)) is not None:
            words = ("hccn_tool", "-i", str(number), "-ping", "-g", "address", address)
            requests[of_pair(f"npu ping {number}", peer)] = command(*words)
    return requests


def _is_next(seen: Seen, host: Answers, peer: Answers) -> bool:
    return (seen.places[host.host.name] + 1) % len(seen.answers) == seen.places[peer.host.name]


def _is_up(answers: Answers, number: int) -> bool:
    return link_status(answers.get(f"hccn link {number}").out) == "UP"


def _judge_ping(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        lost, unclear = [], []
        for number in _numbers(seen, answers):
            for peer, reading in answers.of_pairs(f"npu ping {number}").items():
                if not (_is_up(answers, number) and _is_up(seen.answers[seen.places[peer]], number)):
                    continue  # a finding of its own
                if _LOST.search(reading.out) or reading.code != 0:
                    lost.append(f"NPU {number} does not reach that of {peer}")
                elif not _RECEIVED.search(reading.out):
                    unclear.append(number)
        if lost:
            return bad(answers, lost[0] + (f", and {len(lost) - 1} more" if len(lost) > 1 else ""))
        return unknown(answers, "hccn_tool -ping says nothing that is known") if unclear else None

    return seen.judged(judge)


CHECKS = (
    Check(
        name="npus",
        group="npu",
        what="all NPUs are there",
        how="npu-smi info",
        rule="at least as many as the hostfile has slots",
        why="a card that fell off the bus is found by the rank that should have it, when all others already wait",
        remedy="look for driver and card: npu-smi info -l, lspci, dmesg; in a container, for /dev/davinci*",
        judge=_judge_npus,
        reads=_smi_reads,
        npus_only=True,
    ),
    Check(
        name="npu health",
        group="npu",
        what="NPUs are healthy",
        how="npu-smi info",
        rule="Health is OK for each",
        why="a card with Warning or Alarm may train for hours and then end with a device error such as 507015",
        remedy="read its event codes; a reset ends everything that runs on it; if it comes back, replace the card",
        judge=_judge_health,
        reads=_smi_reads,
        npus_only=True,
    ),
    Check(
        name="npu idle",
        group="npu",
        what="nobody else uses the NPUs",
        how="npu-smi info",
        rule="no process is listed, and no more than a tenth of HBM is taken",
        why="what a dead job or another user holds is missing at the first step: out of memory, or ports in use",
        remedy="see whose it is, and end it if it is left over",
        judge=_judge_idle,
        reads=_smi_reads,
        npus_only=True,
    ),
    Check(
        name="npu link",
        group="npu",
        what="the network ports of the NPUs are up",
        how="hccn_tool -i N -link -g, for each",
        rule="link status: UP",
        why="HCCL waits for a link that is down until its time-out, and names another rank (EI0006, EI0009)",
        remedy="look after module, fibre and switch port",
        judge=_judge_link,
        reads=_hccn("link"),
        npus_only=True,
    ),
    Check(
        name="npu address",
        group="npu",
        what="the NPUs' addresses are set and consistent",
        how=f"hccn_tool -i N -ip -g, for each; {CONF}",
        rule=f"one each, as {CONF} says, that no other has, with the netmask of most",
        why="a rank table is made from them; two NPUs of one address talk to whom they do not mean (EI0014, EJ0004)",
        remedy="set it as root, and write it down in the configuration that sets it at the start of the host",
        judge=_judge_addresses,
        reads=_address_reads,
        npus_only=True,
    ),
    Check(
        name="npu tls",
        group="npu",
        what="the TLS switch is equal on all NPUs",
        how="hccn_tool -i N -tls -g, for each",
        rule="the same on all NPUs of all hosts",
        why="NPUs with another switch do not connect to each other (EI0016)",
        remedy="set it on all alike, as root",
        judge=_judge_tls,
        reads=_hccn("tls"),
        npus_only=True,
    ),
    Check(
        name="npu ping",
        group="npu",
        what="NPUs reach those of the next host",
        how="hccn_tool -i N -ping -g address ADDRESS, each to the one of its number on the next host",
        rule="it is answered",
        why="links that are up may still be in another VLAN, or without a gateway",
        remedy="look after VLAN, gateway (hccn_tool -gateway -g) and routes of the switch",
        judge=_judge_ping,
        reads_of_pair=_ping_reads,
        npus_only=True,
    ),
)
