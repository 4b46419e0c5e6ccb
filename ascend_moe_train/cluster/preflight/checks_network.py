"""Checks of how hosts are reached: SSH, addresses, packet sizes, ports. Pure."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

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
    good,
    judge_pairs,
    of_pair,
    one_line,
    parsed,
    unknown,
)
from ascend_moe_train.cluster.remote import Reason, RemoteError

HCCL_PORTS = (60_000, 60_031)
SSH_PORT = 22
CONNECT_S = 4
_ICMP_BYTES = 28  # headers of IPv4 and ICMP; IPv6 has 20 more
_REMEDIES: Mapping[Reason, str] = MappingProxyType(
    {
        "unresolved": "correct the name in the hostfile, /etc/hosts or the DNS, or write address= into the hostfile",
        "refused": "start sshd there, or give its port with port=",
        "unreachable": "look after its cable, power, address and route; leave it out of the hostfile until then",
        "silent": "look whether it is up and whether a firewall drops packets to its SSH port",
        "unknown key": "compare its fingerprint with the one on its console, then log in once by hand to accept it",
        "changed key": "find out why it changed; if it is right, remove the old key from known_hosts and log in once",
        "unchecked key": "remove UserKnownHostsFile none from ~/.ssh/config",
        "denied": "put your public key into its ~/.ssh/authorized_keys, or load the key into your agent",
        "broken": "look into the log of its sshd",
        "no python": "install python3 there, 3.7 or newer, where a session over SSH finds it",
    }
)


def _judge_ssh(seen: Seen) -> Iterator[Outcome]:
    yield from map(good, seen.answers)
    for error in seen.errors:
        yield Outcome(
            host=error.host.name,
            status="failed",
            found=error.detail,
            fix=_ssh_fix(error),
            fix_here=True,
            remedy=_REMEDIES[error.reason],
        )


def _ssh_fix(error: RemoteError) -> tuple[Words, ...]:
    host = error.host
    options = () if host.port is None else ("-p", str(host.port))
    target = host.address if host.user is None else f"{host.user}@{host.address}"
    bracketed = host.address if host.port in (None, SSH_PORT) else f"[{host.address}]:{host.port}"
    if error.reason == "changed key":
        return (("ssh-keygen", "-F", bracketed), ("ssh-keygen", "-R", bracketed), ("ssh", *options, target))
    if error.reason == "denied":
        return (("ssh-copy-id", *options, target),)
    if error.reason == "unresolved":
        return (("getent", "hosts", host.address),)
    return (("ssh", *options, target),)


def _reach_reads(seen: Seen, host: Answers, peer: Answers) -> Mapping[str, Request]:
    port = peer.host.port or SSH_PORT
    return {of_pair("reach", peer): _connect(peer, port)}


def _connect(peer: Answers, port: int) -> Request:
    return {"kind": "connect", "address": peer.host.address, "port": port, "timeout_s": CONNECT_S}


def _is_cut(host: Answers, peer: Answers) -> bool:
    reading = host.get(of_pair("reach", peer))
    return reading.problem is not None or reading.out == "silent"


def _judge_reach(seen: Seen) -> Iterator[Outcome]:
    def problem(host: Answers, peer: Answers) -> str | None:
        reading = host.get(of_pair("reach", peer))
        return f"no connection ({reading.said})" if _is_cut(host, peer) else None

    return judge_pairs(seen, problem, lambda host, found: bad(host, found, ("ip", "route"), ("ip", "neigh")))


def _firewall_ports(seen: Seen) -> tuple[int, ...]:
    return (seen.job.master_port, HCCL_PORTS[0]) if seen.has_npus else (seen.job.master_port,)


def _firewall_reads(seen: Seen, host: Answers, peer: Answers) -> Mapping[str, Request]:
    return {of_pair(f"port {port}", peer): _connect(peer, port) for port in _firewall_ports(seen)}


def _judge_firewall(seen: Seen) -> Iterator[Outcome]:
    """A port on which nobody listens answers that it is closed; a firewall says nothing, or that it is prohibited."""

    def problem(host: Answers, peer: Answers) -> str | None:
        for port in _firewall_ports(seen):
            reading = host.get(of_pair(f"port {port}", peer))
            if not _is_cut(host, peer) and (reading.problem is not None or reading.out == "silent"):
                return f"port {port} is not let through ({reading.said})"
        return None

    looks: tuple[Words, ...] = (("nft", "list", "ruleset"), ("iptables", "-S"), ("firewall-cmd", "--list-all"))
    return judge_pairs(seen, problem, lambda host, found: bad(host, found, *looks))


def _ping_reads(seen: Seen, host: Answers, peer: Answers) -> Mapping[str, Request]:
    size = seen.job.mtu_bytes - _ICMP_BYTES - (20 if ":" in peer.host.address else 0)
    words = ("ping", "-n", "-c", "2", "-i", "0.2", "-W", "3", "-M", "do", "-s", str(size), peer.host.address)
    return {of_pair("ping", peer): command(*words, timeout_s=6)}


def _judge_mtu(seen: Seen) -> Iterator[Outcome]:
    if any(reading.is_missing for each in seen.answers for reading in each.of_pairs("ping").values()):
        return (unknown(each, "there is no ping on some host") for each in seen.answers)

    def problem(host: Answers, peer: Answers) -> str | None:
        reading = host.get(of_pair("ping", peer))
        if _is_cut(host, peer) or reading.code == 0:
            return None
        return f"no packet of {seen.job.mtu_bytes:,} bytes arrives whole"

    def verdict(host: Answers, found: str) -> Outcome:
        mtus = host.facts("host").get("mtus")
        low = {
            one_line(str(name)): mtu
            for name, mtu in (mtus.items() if isinstance(mtus, dict) else ())
            if name != "lo" and isinstance(mtu, int) and mtu < seen.job.mtu_bytes
        }
        own = {name: mtu for name, mtu in low.items() if name == host.host.nic} or low
        shown = "".join(f"; {name} has {mtu}" for name, mtu in own.items())
        fix = [("ip", "link", "set", "dev", name, "mtu", str(seen.job.mtu_bytes)) for name in own]
        return bad(host, f"{found}{shown}", *fix)

    return judge_pairs(seen, problem, verdict)


def _ports_reads(job: Job) -> Mapping[str, Request]:
    return {
        "master port": {"kind": "ports", "first": job.master_port, "last": job.master_port},
        "hccl ports": {"kind": "ports", "first": HCCL_PORTS[0], "last": HCCL_PORTS[1]},
    }


def _judge_ports(seen: Seen) -> Iterator[Outcome]:
    """The first port is needed on the first host only, where ranks find each other."""
    first = seen.job.hosts.hosts[0].name

    def judge(answers: Answers) -> Outcome | None:
        wanted = (["master port"] if answers.host.name == first else []) + (["hccl ports"] if seen.has_npus else [])
        taken: list[int] = []
        for name in wanted:
            found = parsed(answers.get(name).out)
            if not isinstance(found, list):
                return unknown(answers, answers.get(name).said)
            taken += [port for port in found if isinstance(port, int)]
        if not taken:
            return None
        listed = ", ".join(map(str, taken[:5])) + (f" and {len(taken) - 5} more" if len(taken) > 5 else "")
        return bad(answers, f"taken: {listed}", ("ss", "-tlnp", "sport", "=", f":{taken[0]}"))

    return seen.judged(judge)


def _reserved_reads(job: Job) -> Mapping[str, Request]:
    folder = "/proc/sys/net/ipv4"
    return {
        "reserved": {"kind": "file", "path": f"{folder}/ip_local_reserved_ports"},
        "range": {"kind": "file", "path": f"{folder}/ip_local_port_range"},
    }


def _judge_reserved(seen: Seen) -> Iterator[Outcome]:
    first, last = HCCL_PORTS
    needed = set(range(first, last + 1))

    def judge(answers: Answers) -> Outcome | None:
        words = answers.get("range").out.split()
        if len(words) != 2 or not all(word.isdecimal() for word in words):
            return unknown(answers, answers.get("range").said)
        lowest, highest = int(words[0][:6]), int(words[1][:6])
        given = {port for port in needed if lowest <= port <= highest}
        for piece in answers.get("reserved").out.strip().split(","):
            ends = piece.partition("-")[::2]
            numbers = [int(end) for end in ends if end.isdecimal() and len(end) < 6]
            given -= {port for port in given if numbers and numbers[0] <= port <= numbers[-1]}
        if not given:
            return None
        fix = ("sysctl", "-w", f"net.ipv4.ip_local_reserved_ports={first}-{last}")
        return bad(answers, f"{min(given)} to {max(given)} may be given to any connection", fix)

    return seen.judged(judge)


def _between_reads(seen: Seen, host: Answers, peer: Answers) -> Mapping[str, Request]:
    if seen.job.ssh == "none" or (seen.job.ssh == "first" and host is not seen.answers[0]):
        return {}
    port = () if peer.host.port is None else ("-p", str(peer.host.port))
    user = () if peer.host.user is None else ("-l", peer.host.user)
    strict = ("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=5")
    return {of_pair("ssh", peer): command("ssh", *strict, *port, *user, peer.host.address, "true", timeout_s=8)}


def _judge_between(seen: Seen) -> Iterator[Outcome]:
    if seen.job.ssh == "none":
        return (good(each, "not needed: --ssh none") for each in seen.answers)

    def judge(answers: Answers) -> Outcome | None:
        for name, reading in answers.of_pairs("ssh").items():
            if reading.code != 0:
                said = one_line(reading.out.strip().rpartition("\n")[2]) or reading.said
                return bad(answers, f"to {name}: {said}", ("ssh", name, "true"))
        return None

    return seen.judged(judge)


CHECKS = (
    Check(
        name="ssh",
        group="network",
        what="every host is reached from here over SSH, without a password, by a key that is known",
        how="a session with your agent, keys and known_hosts; keys of hosts are never accepted",
        rule="a session within the time-out",
        why="all else that is asked of a host goes over it, and so does the start of ranks",
        remedy="log in by hand with ssh and see what it says",
        judge=_judge_ssh,
    ),
    Check(
        name="ssh between",
        group="network",
        what="hosts reach each other over SSH, where the launcher needs it (--ssh first or all)",
        how="ssh -o BatchMode=yes -o StrictHostKeyChecking=yes ADDRESS true, on the first host or on all",
        rule="exit code 0",
        why="mpiexec with its ssh launcher, pdsh and DeepSpeed start ranks from the first host; amt launch does not",
        remedy="put that host's public key into the other's authorized_keys, and the other's host key into known_hosts",
        judge=_judge_between,
        reads_of_pair=_between_reads,
    ),
    Check(
        name="reach",
        group="network",
        what="hosts reach each other's addresses",
        how=f"a TCP connection to the SSH port of each other host, {CONNECT_S} s",
        rule="it is accepted or refused, not unanswered",
        why="ranks talk to each other directly: one link that is down hangs all of them until a time-out",
        remedy="look after cable, route, VLAN and address of that host",
        judge=_judge_reach,
        reads_of_pair=_reach_reads,
    ),
    Check(
        name="firewall",
        group="network",
        what="ports of ranks are let through",
        how=f"a TCP connection to the port of the master, and to {HCCL_PORTS[0]} with NPUs, {CONNECT_S} s",
        rule="refused or accepted: a port that is filtered says nothing, or that it is prohibited",
        why="ranks then wait for each other until HCCL or MindSpore gives up, which does not say what was in the way",
        remedy="open the port of the master and 60000-60031 between the hosts, or turn the firewall off between them",
        judge=_judge_firewall,
        reads_of_pair=_firewall_reads,
    ),
    Check(
        name="mtu",
        group="network",
        what="large packets pass whole, end to end",
        how="ping -c 2 -M do (do not fragment) with a payload that makes a packet of --mtu bytes, both directions",
        rule="one of two is answered",
        why="a hop with a smaller MTU lets small messages pass and hangs large ones, after the start went well",
        remedy="set the MTU of card, bond, VLAN and every switch port on the way, and keep it where it is configured",
        judge=_judge_mtu,
        reads_of_pair=_ping_reads,
    ),
    Check(
        name="ports",
        group="network",
        what="ports of ranks are free",
        how=f"bind: the port of the master on the first host, with NPUs {HCCL_PORTS[0]} to {HCCL_PORTS[1]} on all",
        rule="nobody listens there",
        why="a rank that finds its port taken ends at the start, or talks to another job",
        remedy="end what listens there, which is often a rank of a dead job, or choose another --master-port",
        judge=_judge_ports,
        reads=_ports_reads,
    ),
    Check(
        name="reserved ports",
        group="network",
        what="ports of HCCL are kept for it",
        how="net.ipv4.ip_local_port_range and net.ipv4.ip_local_reserved_ports",
        rule=f"{HCCL_PORTS[0]} to {HCCL_PORTS[1]} are outside of the first, or in the second",
        why="else any connection of this host may hold one of them when a run starts",
        remedy="reserve them, in /etc/sysctl.d as well",
        judge=_judge_reserved,
        reads=_reserved_reads,
        npus_only=True,
    ),
)
