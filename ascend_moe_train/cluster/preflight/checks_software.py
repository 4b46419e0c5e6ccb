"""Checks of what is installed: the same everywhere, and fit for each other. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from ascend_moe_train.cluster.preflight.model import (
    Answers,
    Check,
    Job,
    Outcome,
    Request,
    Seen,
    bad,
    command,
    good,
    one_line,
    parsed,
    unknown,
    usual,
)
from ascend_moe_train.cluster.preflight.self_report import MODULE

PARTS = ("python", "mindspore", "cann", "driver", "firmware")


def _report_reads(job: Job) -> Mapping[str, Request]:
    return {"software": command(job.python, "-P", "-m", MODULE, timeout_s=20)}


def _judge_python(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        reading = answers.get("software")
        if _versions(answers):
            return None
        if reading.is_missing:
            return bad(answers, f"there is no {seen.job.python}")
        last = reading.out.strip().rpartition("\n")[2]
        return bad(answers, one_line(last) or reading.said, (seen.job.python, "-P", "-m", MODULE))

    return seen.judged(judge)


def _judge_equal(seen: Seen) -> Iterator[Outcome]:
    found = {each.host.name: _versions(each) for each in seen.answers}
    known = [each for each in found.values() if each]
    right = {part: usual([each[part] for each in known]) for part in PARTS}

    def judge(answers: Answers) -> Outcome | None:
        own = found[answers.host.name]
        if not own:
            return unknown(answers, "its Python does not say")
        wrong = [
            f"{part} {own[part] or 'not found'}, most hosts have {right[part] or 'none'}"
            for part in PARTS
            if own[part] != right[part]
        ]
        if wrong:
            return bad(answers, "; ".join(wrong))
        return good(answers, ", ".join(f"{part} {own[part]}" for part in PARTS if own[part]))

    return seen.judged(judge)


def _judge_fit(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        checks = _report(answers).get("checks")
        if not isinstance(checks, list):
            return unknown(answers, "its Python does not say")
        wrong = [each for each in checks if isinstance(each, dict) and each.get("verdict") == "wrong"]
        if not wrong:
            return None
        found = "; ".join(f"{each.get('pair')}: {each.get('found')}, expected {each.get('expected')}" for each in wrong)
        return bad(answers, one_line(found), remedy=one_line(str(wrong[0].get("remedy"))))

    return seen.judged(judge)


def _judge_code(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        code = _report(answers).get("code")
        if not isinstance(code, str):
            return unknown(answers, "its Python does not say")
        if code == seen.job.code:
            return None
        version = one_line(str(_report(answers).get("package")))
        return bad(answers, f"ascend-moe-train {version} with other files ({one_line(code)[:12]}) than here")

    return seen.judged(judge)


def _file_reads(job: Job) -> Mapping[str, Request]:
    return {f"digest {path}": {"kind": "digest", "path": path} for path in job.files}


def _judge_files(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        if not seen.job.files:
            return unknown(answers, "no run file")
        for path, wanted in seen.job.files.items():
            reading = answers.get(f"digest {path}")
            if reading.problem is not None:
                return bad(answers, f"{path}: {reading.said}", ("ls", "-l", path))
            if reading.out != wanted:
                return bad(answers, f"{path} is another one than here", ("sha256sum", path))
        return None

    return seen.judged(judge)


def _report(answers: Answers) -> Mapping[str, Any]:
    """What its Python prints last; empty if that is no report."""
    found = parsed(answers.get("software").out.strip().rpartition("\n")[2])
    return found if isinstance(found, dict) else {}


def _versions(answers: Answers) -> dict[str, str | None]:
    """Part -> version of what its Python reports; empty if it reports nothing that can be used."""
    versions = _report(answers).get("versions")
    if not isinstance(versions, dict):
        return {}
    named = {part: versions.get(part) for part in PARTS}
    if not all(isinstance(each, dict) for each in named.values()):
        return {}
    shown = {part: each.get("version") for part, each in named.items() if isinstance(each, dict)}
    return {part: None if version is None else one_line(str(version)) for part, version in shown.items()}


CHECKS = (
    Check(
        name="python",
        group="software",
        what="the Python of the ranks is there, and has this package",
        how=f"PYTHON -P -m {MODULE}",
        rule="it reports its versions",
        why="a host that cannot start a rank leaves all others waiting for it",
        remedy="install it at the same path, with ascend-moe-train, or give the right one with --python",
        judge=_judge_python,
        reads=_report_reads,
    ),
    Check(
        name="versions",
        group="software",
        what="versions are equal",
        how="the same report: Python, MindSpore, CANN, driver, firmware",
        rule="those of most hosts",
        why="ranks compile their graphs by themselves: other versions give other graphs and collectives",
        remedy="install what the other hosts have",
        judge=_judge_equal,
        reads=_report_reads,
    ),
    Check(
        name="versions fit",
        group="software",
        what="versions fit each other",
        how="the same report; what fits is in the table of amt check versions",
        rule="no pair is known not to fit",
        why="a driver that is older than CANN needs ends in EE1015 or hangs; others fail at the first operator",
        remedy="amt check versions on that host has the details",
        judge=_judge_fit,
        reads=_report_reads,
    ),
    Check(
        name="code",
        group="software",
        what="the code of ascend-moe-train is the same",
        how="the same report: SHA-256 over the files of the package",
        rule="as here",
        why="ranks with other code train another model, or wait for collectives that never come",
        remedy="bring the same version there: git pull, pip install, or a shared folder",
        judge=_judge_code,
        reads=_report_reads,
    ),
    Check(
        name="run file",
        group="software",
        what="the run file is the same, at the same path",
        how="SHA-256 of the file on every host",
        rule="as here",
        why="each rank reads its own copy; one that differs trains another model",
        remedy="copy it there, or keep it in a shared folder; amt launch distributes nothing",
        judge=_judge_files,
        reads=_file_reads,
    ),
)
