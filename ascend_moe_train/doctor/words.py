"""A verdict as lines for a screen, in English or Chinese, and as JSON. Pure."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ascend_moe_train.doctor.clock import shown_time
from ascend_moe_train.doctor.event import Event
from ascend_moe_train.doctor.fill import filled_remedy, names_of
from ascend_moe_train.doctor.hypothesis import Hypothesis, rank_words
from ascend_moe_train.doctor.rule import LANGS, Lang, Remedy, Rule, RuleBook
from ascend_moe_train.doctor.verdict import Verdict

MAX_QUOTES, MAX_NOT_IT, MAX_LINE, MAX_NAMED, MAX_REMEDIES, MAX_PROBLEMS = 3, 3, 180, 60, 3, 3

# [LEVEL] MODULE(pid,...):time [file:line] [thread], as CANN and MindSpore write it
_HEAD = re.compile(r"(?:\[[A-Z]{4,9}\] ?)?[A-Z_]{2,16}\([^()]{1,80}\):[\d\-:.]{10,40} ?(?:\[[^\[\]]{1,200}\] ?){0,2}")

_HEADS: Mapping[Lang, Mapping[str, str]] = MappingProxyType(
    {
        "en": {
            "what": "what happened",
            "seen": "what is seen",
            "where": "where first",
            "why": "why we think so",
            "behind": "usually behind it",
            "not": "what it is not",
            "now": "do now",
            "then": "then",
            "prevent": "to prevent it",
            "sure": "how sure",
            "also": "also possible",
        },
        "zh": {
            "what": "发生了什么",
            "seen": "看到的现象",
            "where": "首先出现在",
            "why": "依据",
            "behind": "通常原因",
            "not": "并非原因",
            "now": "现在做",
            "then": "然后",
            "prevent": "预防",
            "sure": "把握",
            "also": "其它可能",
        },
    }
)
_TEXT: Mapping[Lang, Mapping[str, str]] = MappingProxyType(
    {
        "en": {
            "none": "no fault found",
            "undecided": "the root cause is not in these logs: {means}",
            "unknown": "cannot be told from these lines",
            "high": "high",
            "medium": "medium: look at the runners-up too (--all)",
            "low": "low: this is what fits best; see --all",
            "read": "{sources} read, {lines} lines, {ranks}",
            "no_ranks": "no ranks told apart",
            "victims": "{who} only report what follows",
            "offset": "clocks differ and were set right: {clocks}",
            "problem": "not read to the end: {problems}",
        },
        "zh": {
            "none": "未发现故障",
            "undecided": "根因不在这些日志中：{means}",
            "unknown": "从这些日志无法判断",
            "high": "高",
            "medium": "中：请一并查看其它可能（--all）",
            "low": "低：目前最吻合的解释，见 --all",
            "read": "读取 {sources}，{lines} 行，{ranks}",
            "no_ranks": "未能区分 rank",
            "victims": "{who} 只是后续现象",
            "offset": "时钟不一致，已校正：{clocks}",
            "problem": "未读完：{problems}",
        },
    }
)


def verdict_lines(verdict: Verdict, book: RuleBook, lang: Lang = "en", *, with_all: bool = False) -> list[str]:
    """About ten lines; with the runners-up on request."""
    rows = verdict_rows(verdict, book, lang, with_all=with_all)
    return [*_aligned(rows, lang), *remarks(verdict, lang)] if rows else no_fault_lines(verdict, lang)


def no_fault_lines(verdict: Verdict, lang: Lang) -> list[str]:
    """That nothing was found, and in what."""
    return [_TEXT[lang]["none"], _read(verdict, lang), *remarks(verdict, lang)]


def verdict_rows(verdict: Verdict, book: RuleBook, lang: Lang, *, with_all: bool) -> list[tuple[str, str]]:
    """What is said, each line after its head, which is empty where it is that of the line before; nothing where there
    is no fault."""
    cause, text = verdict.cause, _TEXT[lang]
    if cause is None:
        return []
    words = cause.rule.words(lang)
    means = cause.filled(words.means)
    rows = [("what" if cause.is_decided else "seen", _means(means, cause, lang)), ("where", _where(cause, lang))]
    rows += [("why", _quote(event)) for event in cause.events[:MAX_QUOTES]]
    if words.why:
        rows.append(("behind", "; ".join(cause.filled(each) for each in words.why)))
    if (not_it := _not_it(verdict, lang)) is not None:
        rows.append(("not", not_it))
    rows += _todo(filled_remedies(cause, verdict, book), lang)
    rows.append(("sure", f"{text[verdict.confidence]}; {_read(verdict, lang)}"))
    if with_all:
        rows += [("also", _runner_up(each, lang)) for each in verdict.others]
    heads = _HEADS[lang]
    before = ["", *(name for name, _ in rows)]
    return [(heads[name] if name != last else "", said) for (name, said), last in zip(rows, before, strict=False)]


def _todo(remedies: Sequence[Remedy], lang: Lang) -> list[tuple[str, str]]:
    """Some of what helps now, in its order, and the first of what keeps it from coming again."""
    later = [each for each in remedies if each.prevents][:1]
    now = [each for each in remedies if not each.prevents][: MAX_REMEDIES - len(later)]
    names = ["now", *["then"] * len(now)][: len(now)] + ["prevent"] * len(later)
    return [(name, f"{each.do}  ({_said(each, lang)})") for name, each in zip(names, [*now, *later], strict=True)]


def _aligned(rows: Sequence[tuple[str, str]], lang: Lang) -> list[str]:
    """Heads in a column."""
    width = max(map(_width, _HEADS[lang].values()))
    return [f"{head}{' ' * (width - _width(head))}  {text}" for head, text in rows]


def _width(text: str) -> int:
    """Columns on a screen: Chinese characters take two."""
    return sum(2 if ord(character) > 0x2E7F else 1 for character in text)


def _means(means: str, cause: Hypothesis, lang: Lang) -> str:
    return means if cause.is_decided else _TEXT[lang]["undecided"].format(means=means)


def _where(cause: Hypothesis, lang: Lang) -> str:
    words = [cause.who_words or _TEXT[lang]["unknown"]]
    if cause.at_s is not None:
        words.append(shown_time(cause.at_s))
    return ", ".join([*words, str(cause.events[0].place)]) if cause.events else ", ".join(words)


def _quote(event: Event) -> str:
    return f"{event.place}: {_short(event.text, MAX_LINE)}"


def _short(text: str, most: int) -> str:
    """A line without the time and place that stand before its own words, cut to a length."""
    said = _HEAD.sub("", text)
    return said if len(said) <= most else f"{said[: most - 3]}..."


def _not_it(verdict: Verdict, lang: Lang) -> str | None:
    """Lines that look like a cause, and the ranks that only report."""
    parts = []
    for event in verdict.not_it[:MAX_NOT_IT]:
        text = _short(event.text, MAX_NAMED)
        parts.append(
            f"'{text}' ({Hypothesis(rule=event.rule, level=0, events=()).filled(event.rule.words(lang).means)})"
        )
    if verdict.victims:
        parts.insert(0, _TEXT[lang]["victims"].format(who=rank_words(verdict.victims)))
    return "; ".join(parts) or None


def filled_remedies(cause: Hypothesis, verdict: Verdict, book: RuleBook) -> list[Remedy]:
    """What to do, with what is known of files, processes, addresses and ranks put in."""
    names = names_of(cause, verdict.evidence)
    return [filled_remedy(each, names) for each in book.remedies(cause.rule)]


def _said(remedy: Remedy, lang: Lang) -> str:
    return remedy.en if lang == "en" else remedy.zh


def _runner_up(each: Hypothesis, lang: Lang) -> str:
    where = f" ({each.events[0].place})" if each.events else ""
    who = f"{each.who_words}: " if each.who_words else ""
    return f"{who}{each.filled(each.rule.words(lang).means)}{where}"


def _read(verdict: Verdict, lang: Lang) -> str:
    evidence, text = verdict.evidence, _TEXT[lang]
    ranks = rank_words(evidence.ranks) if evidence.ranks else text["no_ranks"]
    lines = sum(source.num_lines for source in evidence.sources)
    files = len(evidence.sources)
    sources = f"{files} {'file' if files == 1 else 'files'}" if lang == "en" else f"{files} 个文件"
    return text["read"].format(sources=sources, lines=f"{lines:,}", ranks=ranks)


def remarks(verdict: Verdict, lang: Lang) -> list[str]:
    """Clocks that were set right, and what could not be read."""
    text, remarks = _TEXT[lang], []
    offsets = verdict.evidence.offsets_s
    if offsets:
        clocks = ", ".join(f"{name} {shift:+.1f} s" for name, shift in sorted(offsets.items())[:5])
        remarks.append(text["offset"].format(clocks=clocks))
    problems = [f"{source.name}: {source.problem}" for source in verdict.evidence.sources if source.problem is not None]
    if problems:
        more = [f"+{len(problems) - MAX_PROBLEMS}"] if len(problems) > MAX_PROBLEMS else []
        remarks.append(text["problem"].format(problems="; ".join([*problems[:MAX_PROBLEMS], *more])))
    return remarks


def as_json(verdict: Verdict, book: RuleBook) -> dict[str, Any]:
    """Everything, for programs."""
    evidence = verdict.evidence
    return {
        "fault": verdict.cause is not None,
        "decided": verdict.is_decided,
        "confidence": verdict.confidence,
        "cause": None if verdict.cause is None else _hypothesis_json(verdict.cause, verdict, book),
        "others": [_hypothesis_json(each, verdict, book) for each in verdict.others],
        "not_it": [_event_json(event) for event in verdict.not_it],
        "victims": list(verdict.victims),
        "ranks": list(evidence.ranks),
        "clock_offsets_s": dict(evidence.offsets_s),
        "sources": [
            {"name": s.name, "lines": s.num_lines, "bytes": s.num_bytes, "problem": s.problem} for s in evidence.sources
        ],
    }


def _hypothesis_json(each: Hypothesis, verdict: Verdict, book: RuleBook) -> dict[str, Any]:
    return {
        "id": each.rule.id,
        "group": each.rule.group,
        "level": each.level,
        "ranks": list(each.ranks),
        "who": each.who_words,
        "time": None if each.at_s is None else shown_time(each.at_s),
        "means": {lang: each.filled(each.rule.words(lang).means) for lang in LANGS},
        "why": {lang: [each.filled(why) for why in each.rule.words(lang).why] for lang in LANGS},
        "remedies": [remedy.model_dump() for remedy in filled_remedies(each, verdict, book)],
        "checks": list(each.rule.checks),
        "sources": list(each.rule.sources),
        "lines": [_event_json(event) for event in each.events],
    }


def _event_json(event: Event) -> dict[str, Any]:
    return {
        "rule": event.rule.id,
        "role": event.rule.role,
        "who": event.actor.words,
        "rank": event.actor.rank,
        "time": None if event.at_s is None else shown_time(event.at_s),
        "place": str(event.place),
        "text": event.text,
    }


def rule_lines(rule: Rule, book: RuleBook, lang: Lang) -> list[str]:
    """A rule as a page of reference. What a line would have said stands as `...`."""
    words = rule.words(lang)
    heads = ", ".join(code for code in rule.codes if not code.startswith("@")) or rule.id
    lines = [f"{heads}: {_unnamed(words.means, lang)}", f"  {rule.role}, {rule.group} [{rule.id}]"]
    lines += [f"  - {_unnamed(why, lang)}" for why in words.why]
    lines += [f"  $ {check}" for check in rule.checks]
    lines += [f"  > {remedy.do}  ({_said(remedy, lang)})" for remedy in book.remedies(rule)]
    return [*lines, f"  {'; '.join(rule.sources)}"]


def _unnamed(text: str, lang: Lang) -> str:
    return re.sub(r"\{\w+\}", "...", text.replace("{who}", "a rank" if lang == "en" else "某 rank"))
