"""A preflight: asks all hosts at once, then each about others, and judges what they said. Pure.

A host is asked twice over SSH: for the time of its clock and all readings of its own, and, when all have answered, for
those that need another host's address. What runs there is probe.py.
"""

import importlib.resources
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ascend_moe_train.cluster.hostfile import Host
from ascend_moe_train.cluster.preflight import checks_host, checks_network, checks_npu, checks_software, links
from ascend_moe_train.cluster.preflight.model import (
    Answers,
    Check,
    Job,
    Link,
    Outcome,
    Reading,
    Request,
    Seen,
    one_line,
    peers_of,
    read_reply,
)
from ascend_moe_train.cluster.remote import Limits, RemoteError, Session, on_each

CHECKS: tuple[Check, ...] = (
    *checks_network.CHECKS,
    *checks_host.CHECKS,
    *checks_npu.CHECKS,
    *checks_software.CHECKS,
)
PROBE_S = 40.0
ANSWER_S = PROBE_S + 10.0
MOST_REPLY_BYTES = 2**18
NUM_CLOCKS, MOST_FAILED_CLOCKS = 3, 2
DEFAULT_LIMITS = Limits(connect_s=5.0)
_TIME = re.compile(rb"([0-9]{9,11})\.([0-9]{9})\s*", re.ASCII)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Everything that came out: for each check, an outcome of each host that could be asked."""

    seen: Seen
    outcomes: Mapping[str, tuple[Outcome, ...]]

    @property
    def findings(self) -> list[tuple[Check, Outcome]]:
        """What failed, in the order of the checks, then of the hosts."""
        return [(check, each) for check in self.checks for each in self.outcomes[check.name] if each.status == "failed"]

    @property
    def checks(self) -> list[Check]:
        """Those that apply to this cluster."""
        return [check for check in (*CHECKS, links.CHECK) if check.name in self.outcomes]


async def ask_all(job: Job, limits: Limits = DEFAULT_LIMITS, progress: Progress = lambda done, of: None) -> Seen:
    """What all hosts say. Nothing is raised for what a host does; such hosts are among the errors."""
    source = importlib.resources.files("ascend_moe_train.cluster.preflight").joinpath("probe.py").read_bytes()
    own = {name: request for check in CHECKS for name, request in check.reads(job).items()}
    done = 0

    async def first(session: Session) -> Answers:
        nonlocal done
        offset_s, error_s = await _clock(session)
        readings = await _probe(session, source, own)
        done += 1
        progress(done, len(job.hosts))
        return Answers(host=session.host, readings=readings, offset_s=offset_s, error_s=error_s)

    seen = _sorted(job, await on_each(job.hosts, first, limits), [])
    if len(seen.answers) < 2:
        return seen
    by_name = {each.host.name: each for each in seen.answers}

    async def second(session: Session) -> Answers:
        answers = by_name[session.host.name]
        return replace(
            answers, readings={**answers.readings, **await _probe(session, source, _of_pairs(seen, answers))}
        )

    seen = _sorted(job, await on_each([each.host for each in seen.answers], second, limits), seen.errors)
    return await _with_links(seen, source, limits) if job.measures_links and len(seen.answers) > 1 else seen


def judge_all(seen: Seen) -> Verdict:
    """Judges by every check that applies."""
    checks = [check for check in CHECKS if seen.has_npus or not check.npus_only]
    if seen.job.measures_links:
        checks.append(links.CHECK)
    return Verdict(seen=seen, outcomes={check.name: tuple(check.judge(seen)) for check in checks})


async def _with_links(seen: Seen, source: bytes, limits: Limits) -> Seen:
    """With the links of all rounds, each round after the other; both hosts of a pair have to be connected at once."""
    found: list[Link] = []
    for pairs in links.rounds_of(len(seen.answers)):
        requests = links.requests_of(seen, pairs)

        async def measure(session: Session, requests: Mapping[str, Request] = requests) -> tuple[str, Reading]:
            name = session.host.name
            return name, (await _probe(session, source, {"link": requests[name]}))["link"]

        hosts = [seen.answers[index].host for pair in pairs for index in pair]
        most = max(2, limits.sessions_now // 2 * 2)
        for start in range(0, len(hosts), most):
            answered = await on_each(hosts[start : start + most], measure, limits)
            readings = dict(each for each in answered if not isinstance(each, RemoteError))
            for sender, receiver in pairs[start // 2 : (start + most) // 2]:
                link = links.link_of(seen.answers[sender], seen.answers[receiver], readings)
                found += [link] if link is not None else []
    return replace(seen, links=tuple(found))


def _of_pairs(seen: Seen, answers: Answers) -> dict[str, Request]:
    peers = peers_of(seen, seen.places[answers.host.name])
    return {
        name: request
        for check in CHECKS
        for peer in peers
        for name, request in check.reads_of_pair(seen, answers, peer).items()
    }


def _sorted(job: Job, found: Iterable[Answers | RemoteError], errors: Sequence[RemoteError]) -> Seen:
    place: dict[Host, int] = {host: index for index, host in enumerate(job.hosts)}
    both = list(found)
    answers = tuple(each for each in both if isinstance(each, Answers))
    failed = [*errors, *(each for each in both if isinstance(each, RemoteError))]
    return Seen(job=job, answers=answers, errors=tuple(sorted(failed, key=lambda each: place[each.host])))


async def _clock(session: Session) -> tuple[float | None, float]:
    """How far its clock is before the one here, by the quickest of some answers, and half of what that took."""
    best: tuple[float | None, float] = (None, float("inf"))
    num_failed = 0
    for _ in range(NUM_CLOCKS):
        try:
            answer = await session.run(["date", "+%s.%N"], timeout_s=3, most_bytes=100)
        except RemoteError:  # what is wrong with the host shows with the readings
            num_failed += 1
            if num_failed == MOST_FAILED_CLOCKS:
                break
            continue
        match = _TIME.fullmatch(answer.stdout)
        if match is not None and answer.took_s / 2 < best[1]:
            there_s = int(match[1]) + int(match[2]) / 1e9
            best = (there_s - (answer.started_s + answer.took_s / 2), answer.took_s / 2)
    return best


async def _probe(session: Session, source: bytes, requests: Mapping[str, Request]) -> Mapping[str, Reading]:
    """Raises RemoteError: there is no Python, or it does not answer as the probe does."""
    request = json.dumps({"deadline_s": PROBE_S, "readings": requests})
    answer = await session.run(
        ["python3", "-I", "-", request], timeout_s=ANSWER_S, most_bytes=MOST_REPLY_BYTES, given=source
    )
    readings = read_reply(answer.stdout)
    if readings is None or set(readings) != set(requests):
        said = one_line((answer.stderr or answer.stdout).decode("utf-8", "replace").strip().rpartition("\n")[2])
        raise RemoteError(
            session.host, "no python", f"python3 gives no readings there: {said or f'exit code {answer.exit_code}'}"
        )
    return readings
