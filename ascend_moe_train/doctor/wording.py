"""How a line speaks: whether it only informs, only warns, or complains, and what in it names faults and tells of none.

Pure. Patterns have no repetition inside a repetition, on lines of bounded length.
"""

import re

from ascend_moe_train.doctor.rule import Rule

MAX_HEAD = 120  # characters in which a line says how serious it is

_BEFORE, _AFTER = r"(?:^|[\s\[|(-])", r"(?=[\s\]|:)]|$)"
_INFORMS = re.compile(rf"{_BEFORE}(?:INFO|DEBUG|TRACE|EVENT){_AFTER}")
_WARNS = re.compile(rf"{_BEFORE}(?:\w{{0,40}}W(?:ARNING|arning)|WARN){_AFTER}|^\[W[\d ]")
_NCCL_WARNS = "NCCL WARN"  # by which NCCL reports every failure
_COMPLAINS = re.compile(
    r"(?i)error|fail|fatal|exception|cannot|can't|unable|abort|refused|denied|invalid|kill|crash|corrupt|stuck|exceed"
    r"|insufficient|mismatch|not support|only support|out of range|abnormal|lost\b|too (?:old|many|large)|\bhangs?\b"
    r"|tim(?:ed|es|ing) out"
)
_THING = r"(?:errors?|fail(?:ed|ures?)?|exceptions?|faults?|timeouts?|overflows?|nans?|infs?|retries|skipped|drops?)"
_HARMLESS = re.compile(
    rf"(?i)\b(?:no|0|zero|without|not)\s(?:\w{{1,20}}\s)?{_THING}\b"
    rf"|{_THING}\w{{0,20}}[\"']?(?:\s?\(\w{{1,8}}\))?\s?[=:]\s?[\"']?"
    r"(?:\d[\d.]{0,11}(?:e[-+]?\d{1,3})?(?:\s?m?s|%)?|none|false|true|null|off|on)(?![\w.]|\s(?:error|exceed))"
    r"|\bretry succeeded\b|\b(?:recovered|succeeded) after\b.{0,80}|\b(?:ignored|suppressed|expected):?\s"
)


def is_general(rule: Rule) -> bool:
    """Whether a rule is of words that anybody may use, and counts only where no other knows a line."""
    return rule.id.startswith("general-")


def informs(text: str, level: str) -> bool:
    """Whether a line says of itself that nothing is wrong."""
    return level in ("INFO", "DEBUG", "EVENT") or (not level and _INFORMS.search(text[:MAX_HEAD]) is not None)


def warns(text: str) -> bool:
    """Whether a line says of itself that it is a warning: many runs that go well print some."""
    head = text[:MAX_HEAD]
    return _WARNS.search(head) is not None and _NCCL_WARNS not in head


def complaint(text: str) -> str:
    """A line without counts of nothing, and without settings, such as `errors: 0` and `timeout=1800`."""
    return _HARMLESS.sub(" ", text)


def complains(text: str) -> bool:
    """Whether something else in a line than that is about a failure."""
    return _COMPLAINS.search(complaint(text)) is not None
