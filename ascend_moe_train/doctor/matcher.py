"""Which lines of a block are worth a look, and which rules match a line: by RE2, in linear time. Pure."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import re2

from ascend_moe_train.doctor.pattern import Pattern, parsed
from ascend_moe_train.doctor.rule import Rule, RuleBook
from ascend_moe_train.doctor.wording import complains, complaint, informs, is_general

MAX_MEM_BYTES = 256 * 2**20  # of RE2's automaton, beyond which it would be slower
EXCEPTION = "@exception"  # pseudo codes: rules for what no other rule knows
COMM_EXCEPTION = "@comm-exception"
ERROR = "@error"
VAGUE = "general-timeout"

_ANY_ERROR = (
    r"\[(?:ERROR|CRITICAL|EXCEPTION)\]",
    r"[A-Za-z](?:Error|Exception|Interrupt)\b",
    r"Traceback \(most recent call last\)",
    r"(?i:(?:\berror|\bfatal): )",
)
_CODE = r"\bE[1-9A-Z]\d{4}\b"
_NUMBER = (
    r"(?:error[ _]?[Cc]ode(?: is)?|retcode|retCode|runtime result|\bret|errorCode|failed ?:)"
    r"[\s=:\[(]{1,4}([1-5]\d{5})\b"
)
_LOSS = r"(?i:\bloss\b|_loss\b)"
_ADVICE = ("Solution", "Possible Cause", "Possible cause", "TraceBack")  # CANN's own, which fits many causes
_MODULE = re.compile(r"\[[A-Z]{5,9}\] ?(?P<name>[A-Z][A-Z_0-9]{1,16})\(")
_EXCEPTION = re.compile(
    r"(?:E {1,8})?(?:[A-Za-z_]\w{0,60}\.){0,8}(?P<name>[A-Z]\w{0,60}(?:Error|Exception|Interrupt))(?:: ?(?P<said>.*))?$"
)
# `error: `, `srun: error: `, `docker: Error response from daemon: `, as programs begin what they end with
_SAYS_ERROR = re.compile(r"(?i)(?:[\w.\-/\[\]]{1,40}: ){0,3}(?:fatal|error)(?: [a-z ]{1,40})?: \S")
_QUOTED_SOURCE = re.compile(r"\s*(?:raise [\w.]+(?: from \w+)?(?:\(|$)|except [\w., ()]+:$)")  # a traceback's own lines
_FIGURE = re.compile(r"\d{1,9}\.\d{1,20}(?:e[-+]?\d{1,4})?")  # a measure, such as RelativeError: 0.01
_COMM_WORDS = re.compile(
    r"(?i)nccl|hccl|gloo|rendezvous|all_?reduce|all_?gather|all_?to_?all|barrier|broadcast|broken pipe|peer"
    r"|timed? ?out|distributed job|launch kernel failed, name:\S*(?:reduce|gather|alltoall|send|receive)"
)


@dataclass(frozen=True, kw_only=True)
class Match:
    """A rule that matches a line, with what its names stand for."""

    rule: Rule
    values: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    rule: Rule
    pattern: Pattern
    lower: bool


class Matcher:
    """The rules of a book, compiled."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book
        self._entries = [
            _Entry(rule=rule, pattern=parsed(text), lower=lower)
            for rule in book.rules.values()
            for lower, texts in ((False, rule.match), (True, rule.any_case))
            for text in texts
        ]
        own = [_literal(entry) for entry in self._entries]
        codes = [_CODE.encode(), _NUMBER.encode()]
        others = [*_of_other_encodings(self._entries), *(each.encode() for each in _ANY_ERROR)]
        self._first_code, self._first_other = len(own), len(own) + len(codes)
        options = _options()
        self._set = re2.Set.SearchSet(options)
        for each in (*own, *codes, *others):
            self._set.Add(each)
        self._set.Compile()
        self.anything = re2.compile(b"|".join([*sorted(set(own)), *codes, *others, _LOSS.encode()]), options)
        self._code, self._number = re2.compile(_CODE), re2.compile(_NUMBER)

    def is_serious(self, raw: bytes) -> bool:
        """Whether a line has what some rule looks for, a code, or the sign of an error: without, no rule matches it."""
        return bool(self._set.Match(raw))

    def matches(self, text: str, level: str) -> list[Match]:
        """What the rules say of a line: that it is benign, before all else; general rules where no other does."""
        if _QUOTED_SOURCE.match(text):  # the error itself follows, with its words
            return []
        found = list(self._found(text))
        facts = [match for match in found if match.rule.role == "fact"]
        benign = [match for match in found if match.rule.role == "benign"]
        if benign:
            return [*facts, *benign]
        special = [match for match in found if match.rule.role != "fact" and not is_general(match.rule)]
        if any(match.rule.role != "wrapper" for match in special):
            return [*facts, *special]
        is_setup = bool(facts) and not special and self._code.search(text) is None
        if is_setup or text.lstrip().startswith(_ADVICE):
            return [*facts, *special]
        words = self._words([match for match in found if is_general(match.rule)], text, level)
        if special:  # a wrapper says nothing, but what it passes on may
            return [*facts, *special, *words]
        return self._general(words, text, level)

    def _words(self, found: list[Match], text: str, level: str) -> list[Match]:
        """The surest general rule for a line without its counts of nothing and its settings; what words say counts more
        than the module of a code. None for a line that only informs."""
        if not found or informs(text, level):
            return []
        said = complaint(text)
        if said != text:
            found = [match for match in self._found(said) if is_general(match.rule)]
        worded = [match for match in found if not match.rule.is_inferred]
        return [max(worded or found, key=_says_most)] if found else []

    def _general(self, found: list[Match], text: str, level: str) -> list[Match]:
        """What general words say of a line, and that it is an exception or an error, if it is one."""
        unknown = self._unknown(text, level)
        if not found:
            return [] if unknown is None else [unknown]
        best = found[0]
        if not best.rule.level:
            return [best]
        return [Match(rule=best.rule, values=best.values | (unknown.values if unknown is not None else {}))]

    def _found(self, text: str) -> Iterator[Match]:
        seen: set[str] = set()
        lower = text.lower()
        has_code = False
        for index in self._set.Match(text.encode("utf-8", errors="replace")) or ():
            if index >= self._first_code:
                has_code = has_code or index < self._first_other
                continue
            entry = self._entries[index]
            rule = entry.rule
            if rule.id in seen or (rule.unless and any(word in text for word in rule.unless)):
                continue
            values = entry.pattern.find(lower if entry.lower else text)
            if values is not None:
                seen.add(rule.id)
                yield Match(rule=rule, values=values)
        codes = [*self._code.findall(text), *self._number.findall(text)] if has_code else []
        for code in dict.fromkeys(codes):
            for rule in self._book.by_code.get(code) or self._book.by_code.get(_family(code), ()):
                if rule.id not in seen:
                    seen.add(rule.id)
                    yield Match(rule=rule, values={"code": code})

    def _unknown(self, text: str, level: str) -> Match | None:
        """An exception or an error line that no rule knows."""
        said = _EXCEPTION.match(text)
        if said is not None and _FIGURE.fullmatch(said["said"] or "") is None:
            is_about_peers = _COMM_WORDS.search(text[:2000]) is not None
            code = COMM_EXCEPTION if is_about_peers else EXCEPTION
            values = {"name": said["name"], "said": (said["said"] or "")[:200]}
        elif level in ("ERROR", "CRITICAL", "EXCEPTION") or (not level and _is_said_to_be_one(text)):
            module = _MODULE.match(text)
            code = f"{ERROR}-{module['name']}" if module is not None else ERROR
            values = {"said": text[:200]}
        else:
            return None
        rules = self._book.by_code.get(code) or self._book.by_code.get(ERROR if level else code, ())
        return Match(rule=rules[0], values=values) if rules else None


def _is_said_to_be_one(text: str) -> bool:
    """Whether a line without a level begins as errors of programs do, and not with a count or a measure."""
    return _SAYS_ERROR.match(text) is not None and complains(text)


def _says_most(match: Match) -> tuple[int, bool]:
    """A timeout says less than anything else that is seen."""
    return match.rule.level, match.rule.id != VAGUE


def _family(code: str) -> str:
    """The pseudo code of a module's codes, or of a range of numbers. Internal codes (9000 and above) have none: they
    say nothing."""
    if code.isdecimal():
        return f"@{code[:3]}"
    return "" if code[2] == "9" else f"@{code[:2]}"


def _options() -> re2.Options:
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = MAX_MEM_BYTES
    options.never_capture = True
    options.log_errors = False
    return options


def _literal(entry: _Entry) -> bytes:
    escaped = bytes(re2.escape(entry.pattern.literal.encode()))
    return b"(?i:" + escaped + b")" if entry.lower else escaped


def _of_other_encodings(entries: Sequence[_Entry]) -> list[bytes]:
    """The literals that logs in GB18030 have in other bytes."""
    texts = {entry.pattern.literal for entry in entries}
    return sorted(bytes(re2.escape(text.encode("gb18030"))) for text in texts if not text.isascii())
