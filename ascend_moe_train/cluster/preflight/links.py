"""How fast hosts reach each other over TCP: pairs that are disjoint measure at the same time. Pure.

It is the network of the hosts, by one connection of a Python program, not that of NPUs.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from ascend_moe_train.cluster.preflight.model import Answers, Check, Link, Outcome, Reading, Request, Seen, bad, good
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.units import format_bytes, format_seconds

MOST_ROUNDS = 30
SEND_S = 0.5
WAIT_S = 8.0
NUM_PINGS = 50
LEAST_SHARE = 0.5  # of what half of the hosts have


def rounds_of(num_hosts: int) -> Iterator[list[tuple[int, int]]]:
    """Sender and receiver of disjoint pairs, so that every host meets every other in both directions, as far as
    MOST_ROUNDS goes (circle method of a round-robin tournament)."""
    circle: list[int | None] = [*range(num_hosts), *([None] if num_hosts % 2 else [])]
    for number in range(min(2 * (len(circle) - 1), MOST_ROUNDS)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        yield both if number % 2 == 0 else [(b, a) for a, b in both]
        if number % 2:
            circle = [circle[0], circle[-1], *circle[1:-1]]


def requests_of(seen: Seen, pairs: Sequence[tuple[int, int]]) -> dict[str, Request]:
    """Host -> what it does in this round."""
    requests: dict[str, Request] = {}
    for sender, receiver in pairs:
        to = seen.answers[receiver].host
        shared = {"address": to.address, "port": seen.job.master_port, "timeout_s": WAIT_S, "pings": NUM_PINGS}
        requests[seen.answers[sender].host.name] = {"kind": "send", "send_s": SEND_S, **shared}
        requests[to.name] = {"kind": "listen", **shared}
    return requests


def link_of(sender: Answers, receiver: Answers, readings: Mapping[str, Reading]) -> Link | None:
    """The link of a pair by what both have read; None if either could not."""
    found = {
        each.host.name: Answers(host=each.host, readings={"link": readings[each.host.name]}).facts("link")
        for each in (sender, receiver)
        if each.host.name in readings
    }
    speed = found.get(receiver.host.name, {}).get("bytes_per_s")
    latency_s = found.get(sender.host.name, {}).get("latency_s")
    if not (isinstance(speed, float) and isinstance(latency_s, float) and speed > 0 and latency_s > 0):
        return None
    return Link(sender=sender.host.name, receiver=receiver.host.name, bytes_per_s=speed, latency_s=latency_s)


def _judge(seen: Seen) -> Iterator[Outcome]:
    """By the fastest link of each host: one that is slow to all others is slow itself."""
    best: dict[str, float] = {}
    for link in seen.links:
        for name in (link.sender, link.receiver):
            best[name] = max(best.get(name, 0.0), link.bytes_per_s)
    median = statistics.median(best.values()) if best else 0.0

    def judge(answers: Answers) -> Outcome | None:
        speed = best.get(answers.host.name)
        if speed is None:
            return bad(answers, "no link to it could be measured")
        found = f"its fastest link has {format_bytes(speed)}/s"
        if speed < LEAST_SHARE * median:
            return bad(answers, f"{found}, half of the hosts have {format_bytes(median)}/s or more")
        return good(answers, found)

    return seen.judged(judge)


CHECK = Check(
    name="links",
    group="network",
    what="no host has slow links",
    how=f"--links: one TCP connection between two hosts, {SEND_S} s each way; pairs without a common host at once",
    rule="its fastest link has half of what half of the hosts have",
    why="all ranks wait for the host with the slowest link in every collective",
    remedy="compare speed and duplex (ethtool), errors (ip -s link) and the switch port with those of other hosts",
    judge=_judge,
)


def link_lines(links: Sequence[Link]) -> Iterator[str]:
    """The links for people: all in one line, then the slowest."""
    if not links:
        return
    speed = statistics.median(each.bytes_per_s for each in links)
    latency_s = statistics.median(each.latency_s for each in links)
    yield f"links: {len(links)} measured, median {format_bytes(speed)}/s, {format_seconds(latency_s)} one way"
    for each in sorted(links, key=lambda link: link.bytes_per_s)[:3]:
        figures = f"{format_bytes(each.bytes_per_s)}/s, {format_seconds(each.latency_s)}"
        yield f"    {each.sender} to {each.receiver}: {figures}"


def hardware_text(seen: Seen) -> str:
    """A hardware file of the planner in which nodes have these links: `hosts`, like its `cpu`.

    Raises ConfigError: nothing was measured, or the hosts have NPUs, which have links of their own.
    """
    if seen.has_npus:
        raise ConfigError("no hardware file: NPUs have links of their own, which TCP between hosts does not measure")
    if not seen.links:
        raise ConfigError("no hardware file: no link was measured, which --links does")
    slots = seen.job.hosts.slots
    speed = statistics.median(each.bytes_per_s for each in seen.links) / slots
    latency_s = statistics.median(each.latency_s for each in seen.links)
    return (
        f"# by amt preflight --links between {len(seen.answers)} hosts; a rank has 1/{slots} of its host's link\n"
        f"hosts:\n  like: cpu\n  devices_per_node: {slots}\n"
        f"  across: {{bytes_per_s: {speed:.4g}, latency_s: {latency_s:.4g}}}\n"
    )
