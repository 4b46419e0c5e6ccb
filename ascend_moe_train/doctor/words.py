"""A verdict as lines for a screen, in English or Chinese, and as JSON. Pure."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ascend_moe_train.doctor.clock import shown_time
from ascend_moe_train.doctor.event import Event
from ascend_moe_train.doctor.hypothesis import Hypothesis, rank_words
from ascend_moe_train.doctor.rule import LANGS, Lang, Remedy, Rule, RuleBook
from ascend_moe_train.doctor.verdict import Verdict

MAX_QUOTES, MAX_NOT_IT, MAX_LINE, MAX_NAMED = 3, 3, 180, 60

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
    cause, text = verdict.cause, _TEXT[lang]
    if cause is None:
        return [text["none"], _read(verdict, lang), *_remarks(verdict, lang)]
    words = cause.rule.words(lang)
    means = cause.filled(words.means)
    rows = [("what" if cause.is_decided else "seen", _means(means, cause, lang)), ("where", _where(cause, lang))]
    rows += [("why", _quote(event)) for event in cause.events[:MAX_QUOTES]]
    if words.why:
        rows.append(("behind", "; ".join(cause.filled(each) for each in words.why)))
    if (not_it := _not_it(verdict, lang)) is not None:
        rows.append(("not", not_it))
    remedies = filled_remedies(cause, verdict, book)
    names = ["now", *["then"] * (len(remedies) - 2), "prevent"] if len(remedies) > 1 else ["now"]
    shown = [0, 1, len(remedies) - 1] if len(remedies) > 3 else range(len(remedies))
    rows += [(names[i], f"{remedies[i].do}  ({_said(remedies[i], lang)})") for i in shown]
    rows.append(("sure", f"{text[verdict.confidence]}; {_read(verdict, lang)}"))
    if with_all:
        rows += [("also", _runner_up(each, lang)) for each in verdict.others]
    return [*_aligned(rows, lang), *_remarks(verdict, lang)]


def _aligned(rows: Sequence[tuple[str, str]], lang: Lang) -> list[str]:
    """Heads in a column, each once."""
    heads = _HEADS[lang]
    width = max(map(_width, heads.values()))
    lines, before = [], ""
    for name, text in rows:
        head = "" if name == before else heads[name]
        before = name
        lines.append(f"{head}{' ' * (width - _width(head))}  {text}")
    return lines


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
    """What to do, with the log and the process of the rank at fault put in where they are known."""
    names = {}
    sources = verdict.evidence.by_rank.get(cause.ranks[0], ()) if cause.ranks else ()
    if sources:
        names["LOG_OF_THAT_RANK"] = sources[0].name
    elif cause.events:
        names["LOG_OF_THAT_RANK"] = cause.events[0].place.source
    pids = {rank: pid for pid, rank in verdict.evidence.pids.items()}
    if cause.ranks and cause.ranks[0] in pids:
        names["PID"] = str(pids[cause.ranks[0]])
    found = []
    for remedy in book.remedies(cause.rule):
        words = [names.get(word, word) for word in remedy.do.split(" ")]
        found.append(Remedy.model_construct(do=" ".join(words), en=remedy.en, zh=remedy.zh))
    return found


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


def _remarks(verdict: Verdict, lang: Lang) -> list[str]:
    """Clocks that were set right, and what could not be read."""
    text, remarks = _TEXT[lang], []
    offsets = verdict.evidence.offsets_s
    if offsets:
        clocks = ", ".join(f"{name} {shift:+.1f} s" for name, shift in sorted(offsets.items())[:5])
        remarks.append(text["offset"].format(clocks=clocks))
    problems = [f"{source.name}: {source.problem}" for source in verdict.evidence.sources if source.problem is not None]
    if problems:
        remarks.append(text["problem"].format(problems="; ".join(problems[:3])))
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
        "remedies": [{"do": r.do, "en": r.en, "zh": r.zh} for r in filled_remedies(each, verdict, book)],
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
    """A rule as a page of reference."""
    words = rule.words(lang)
    heads = ", ".join(rule.codes) or rule.id
    lines = [f"{heads}: {words.means}", f"  {rule.role}, {rule.group} [{rule.id}]"]
    lines += [f"  - {why}" for why in words.why]
    lines += [f"  $ {check}" for check in rule.checks]
    lines += [f"  > {remedy.do}  ({_said(remedy, lang)})" for remedy in book.remedies(rule)]
    return [*lines, f"  {'; '.join(rule.sources)}"]
