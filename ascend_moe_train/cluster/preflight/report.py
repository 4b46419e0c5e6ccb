"""What `amt preflight` shows: lines, JSON, commands to mend things, one page. Pure."""

import html
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ascend_moe_train.cluster.preflight.model import Check, Outcome
from ascend_moe_train.cluster.preflight.run import Verdict
from ascend_moe_train.html_page import asset, card, cell, filled, policy_hash, table

MOST_COLUMNS = 8
MARKS = {"ok": "ok", "failed": "FAILED", "unknown": "?"}
NOT_ASKED = "-"  # of a host that could not be reached


def headline(verdict: Verdict) -> str:
    """How it went, in one line."""
    num_hosts, findings = len(verdict.seen.job.hosts), verdict.findings
    hosts = f"{num_hosts} host{'s' if num_hosts > 1 else ''}"
    unsaid = sum(each.status == "unknown" for outcomes in verdict.outcomes.values() for each in outcomes)
    more = f"; {unsaid} could not be said" if unsaid else ""
    if not findings:
        return f"{hosts}, {len(verdict.checks)} checks: nothing found{more}"
    guilty = len({each.host for _, each in findings})
    return f"{hosts}, {len(verdict.checks)} checks: {len(findings)} found on {guilty} of them{more}"


def matrix(verdict: Verdict) -> tuple[list[str], list[tuple[Check, list[Outcome | None]]]]:
    """Hosts of the columns, and what each check gives for them. Of many hosts only those that have a finding, as far as
    they go on a screen; a host that could not be asked has None."""
    names = [host.name for host in verdict.seen.job.hosts]
    if len(names) > MOST_COLUMNS:
        guilty = {each.host for _, each in verdict.findings}
        names = [name for name in names if name in guilty][:MOST_COLUMNS]
    rows = []
    for check in verdict.checks:
        by_host = {each.host: each for each in verdict.outcomes[check.name]}
        rows.append((check, [by_host.get(name) for name in names]))
    return names, rows


def counted(verdict: Verdict, check: Check) -> str:
    """On how many hosts a check passed."""
    outcomes = verdict.outcomes[check.name]
    return f"{sum(each.status == 'ok' for each in outcomes)}/{len(verdict.seen.job.hosts)}"


def finding_lines(verdict: Verdict) -> Iterator[str]:
    """Every finding with its reason and remedy."""
    for check, each in verdict.findings:
        yield f"{each.host}  {check.name}: {each.found}"
        yield f"    why: {check.why}"
        yield f"    do:  {each.remedy or check.remedy}"


def fix_lines(verdict: Verdict) -> Iterator[str]:
    """Commands that look into or mend what was found, for the user to run where the comment says."""
    for check, each in verdict.findings:
        where = "here" if each.fix_here else f"on {each.host}"
        yield f"# {where}, {check.name}: {each.found}"
        yield from (shlex.join(words) for words in each.fix)
        if not each.fix:
            yield f"# {each.remedy or check.remedy}"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """All of it, as JSON-able values."""
    job = verdict.seen.job
    return {
        "hosts": [asdict(host) for host in job.hosts],
        "has_npus": verdict.seen.has_npus,
        "passed": not verdict.findings,
        "links": [asdict(each) for each in verdict.seen.links],
        "findings": [
            {
                "host": each.host,
                "check": check.name,
                "found": each.found,
                "why": check.why,
                "remedy": each.remedy or check.remedy,
                "fix": [list(words) for words in each.fix],
                "fix_here": each.fix_here,
            }
            for check, each in verdict.findings
        ],
        "checks": [
            {
                "name": check.name,
                "group": check.group,
                "what": check.what,
                "how": check.how,
                "rule": check.rule,
                "outcomes": {
                    each.host: {"status": each.status, "found": each.found} for each in verdict.outcomes[check.name]
                },
            }
            for check in verdict.checks
        ],
    }


def page(verdict: Verdict) -> str:
    """The page as text. All strings may hold anything: they are escaped here."""
    style = asset(__package__, "preflight.css")
    findings = verdict.findings
    sections = []
    if findings:
        rows = [
            [
                f"<td class=failed>{html.escape(each.host)}</td>",
                *map(cell, (check.name, each.found, check.why, each.remedy or check.remedy)),
                f"<td><pre>{html.escape(chr(10).join(map(shlex.join, each.fix)))}</pre></td>",
            ]
            for check, each in findings
        ]
        sections.append(card("Found", table(["host", "check", "what", "why it matters", "do", "commands"], rows)))
    names, checked = matrix(verdict)
    rows = [
        [cell(check.name), cell(check.what), cell(counted(verdict, check)), *map(_mark, outcomes)]
        for check, outcomes in checked
    ]
    sections.append(card("Checks", table(["check", "what", "passed", *names], rows)))
    rows = [[*map(cell, (check.name, check.how, check.rule))] for check, _ in checked]
    sections.append(card("How it was checked", table(["check", "how", "passes if"], rows)))
    parts = {
        "title": "Not fit" if findings else "Fit",
        "mark": "failed" if findings else "ok",
        "status": html.escape(headline(verdict)),
        "sections": "\n".join(sections),
        "verb": "preflight",
        "beside": "",
        "style": style,
        "style_hash": policy_hash(style),
    }
    return filled(asset("ascend_moe_train", "plain.html"), parts)


def _mark(outcome: Outcome | None) -> str:
    if outcome is None:
        return f"<td>{NOT_ASKED}</td>"
    title = html.escape(outcome.found, quote=True)
    return f'<td class="{outcome.status}" title="{title}">{MARKS[outcome.status]}</td>'
