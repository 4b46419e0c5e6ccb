"""Logs as texts, through the doctor."""

import io
from collections.abc import Mapping

from ascend_moe_train.doctor.diagnose import matcher, scan_stream, verdict_of
from ascend_moe_train.doctor.reading import Source
from ascend_moe_train.doctor.rule import rule_book
from ascend_moe_train.doctor.verdict import Verdict


def verdict_on(files: Mapping[str, str | bytes]) -> Verdict:
    """The verdict on texts by the names of their files."""
    scanned = [
        scan_stream(
            Source(name=name, size_bytes=len(text)),
            io.BytesIO(text.encode() if isinstance(text, str) else text),
            matcher(),
        )
        for name, text in files.items()
    ]
    return verdict_of(scanned, rule_book())


def told(files: Mapping[str, str | bytes]) -> tuple[str, list[int]]:
    """The id of the cause and its ranks; an empty id for no fault, and a question mark behind what is not decided."""
    verdict = verdict_on(files)
    if verdict.cause is None:
        return "", []
    return verdict.cause.rule.id + ("" if verdict.is_decided else "?"), list(verdict.cause.ranks)
