"""The doctor's rules: each is told by its own cases, has words in both languages, and remedies that can be typed."""

import re

import pytest

from ascend_moe_train.config import RunConfig
from ascend_moe_train.config_error import known_keys
from ascend_moe_train.doctor.diagnose import matcher
from ascend_moe_train.doctor.event import Actor
from ascend_moe_train.doctor.explain import explained, rules_of
from ascend_moe_train.doctor.pattern import parsed
from ascend_moe_train.doctor.prefix import split
from ascend_moe_train.doctor.rule import LANGS, Remedy, Rule, is_doable, read_rules, rule_book
from ascend_moe_train.doctor.wording import warns
from ascend_moe_train.errors import ConfigError, DataError
from tests.doctored import verdict_on

RULES = [rule for rule in rule_book().rules.values() if rule.role != "fact"]
TOLD = [(rule, log) for rule in RULES for log in rule.cases]
INNER = "EE9999: Inner Error, Please contact support engineer!"  # something went wrong, it does not say what
SECTIONS = tuple(RunConfig.model_fields)
CODES = re.findall(
    r"\w+",
    """
EI0001 EI0002 EI0003 EI0004 EI0005 EI0006 EI0007 EI0008 EI0009 EI0010 EI0011 EI0012 EI0013 EI0014 EI0015 EI0016 EI0017
EI0018 EI0019 EI0020 EI9999 EJ0001 EJ0003 EJ0004 EE1001 EE1002 EE1005 EE1010 EE1013 EE1015 EE1019 EE1021 EE1023 EE2002
EE9999 EH0001 EH0010 EH9999 107001 107002 107003 107019 107020 107022 107023 107035 107024 107036 207000 207001 207002
207003 207004 207005 207006 207007 207008 207011 207012 207013 207015 207016 207018 207020 500000 500001 507000 507001
507008 507010 507011 507013 507014 507015 507016 507017 507018 507022 507033 507034 507035 507036 507042 507046 507047
507048 507049 507050 507051 507053 507054 507055 507056 507057 507899 507900 507901 507904 161001 161002 361001 561000
561002 561003 561101 561103 561107 561108 EL0001 EL0003 EL0004 EL0005 EL0007 EL0008 EL0009 EL0012 EL0015 EZ2001 EZ3002
EZ9999 EZ9903 E69999 E19999 E29999 E20001 E22001 E30003 E30008 E39999 E40001 E40003 E40021 EB0000 EK0001 EP0001
""",
)


@pytest.mark.parametrize(("rule", "log"), TOLD, ids=[rule.id for rule, _ in TOLD])
def test_its_cases_tell_a_rule(rule: Rule, log: str) -> None:
    _, level, text = split(log, Actor())
    assert rule.id in [match.rule.id for match in matcher().matches(text, level)]


@pytest.mark.parametrize("rule", [r for r in RULES if r.role in ("cause", "pointer") and r.cases], ids=lambda r: r.id)
def test_a_cause_alone_is_the_verdict(rule: Rule) -> None:
    is_warning = not rule.alone and (warns(rule.cases[0]) or rule.cases[0].startswith("[WARNING]"))
    if is_warning:  # many runs that go well print it
        assert verdict_on({"x.log": f"{rule.cases[0]}\n"}).cause is None
    verdict = verdict_on({"x.log": f"{rule.cases[0]}\n", "y.log": f"{INNER}\n" if is_warning else ""})
    assert verdict.cause is not None
    assert verdict.cause.rule.group == rule.group or verdict.cause.level > rule.level


@pytest.mark.parametrize("rule", [r for r in RULES if r.role in ("wrapper", "benign") and r.cases], ids=lambda r: r.id)
def test_wrappers_and_benign_lines_decide_nothing(rule: Rule) -> None:
    assert not verdict_on({"x.log": f"{rule.cases[0]}\n"}).is_decided


def test_a_cause_beats_what_wraps_it() -> None:
    wrappers = [rule.cases[0] for rule in RULES if rule.role in ("wrapper", "benign") and rule.cases]
    log = "\n".join([*wrappers, "OSError: [Errno 28] No space left on device", *wrappers])
    verdict = verdict_on({"x.log": f"{log}\n"})
    assert verdict.cause is not None
    assert verdict.cause.rule.id == "disk-full"


@pytest.mark.parametrize("code", CODES)
def test_codes_are_explained(code: str) -> None:
    assert rules_of(code, rule_book())
    assert code in explained(code, rule_book(), "zh")[0]


def test_unknown_codes() -> None:
    assert explained("EI7777", rule_book(), "en") == [
        "EI7777: HCCL reports it; there is no rule of it: read the lines around it"
    ]
    with pytest.raises(DataError, match="did you mean EI00"):
        explained("EI006", rule_book(), "en")


@pytest.mark.parametrize(
    ("code", "first", "rule_id"),
    [
        ("137", "137: a process that signal 9 (SIGKILL) ended", "killed"),
        ("-9", "-9: a process that signal 9 (SIGKILL) ended", "killed"),
        ("SIGKILL", "SIGKILL: a process that signal 9 (SIGKILL) ended", "killed"),
        ("sigsegv", "sigsegv: a process that signal 11 (SIGSEGV) ended", "crashed"),
        ("143", "143: a process that signal 15 (SIGTERM) ended", "general-stopped"),
        ("EI0006", "EI0006: no link to a peer", "hccl-link-timeout"),
        ("ERR02200", "ERR02200: torch_npu's collectives report a failed call of HCCL", "rt-torch-wrapper"),
    ],
)
def test_what_newcomers_ask(code: str, first: str, rule_id: str) -> None:
    assert [rule.id for rule in rules_of(code, rule_book())] == [rule_id]
    for lang in LANGS:
        lines = explained(code, rule_book(), lang)
        assert not any(re.search(r"\{\w+\}", line) for line in lines)
        assert lang == "zh" or lines[0].startswith(first)


@pytest.mark.parametrize(("code", "close"), [("SIGKIL", "SIGKILL"), ("sigkil", "SIGKILL"), ("EI0O06", "EI0006")])
def test_the_nearest_spelling(code: str, close: str) -> None:
    with pytest.raises(DataError, match=f"did you mean {close}"):
        explained(code, rule_book(), "en")


def test_chinese_is_chinese() -> None:
    texts = [rule.zh.means for rule in RULES if rule.zh is not None]
    assert [text for text in texts if not re.search("[\u4e00-\u9fff]", text)] == []


def test_our_keys_in_remedies_exist() -> None:
    known = set(known_keys(RunConfig))
    remedies = {remedy.do for rule in RULES for remedy in rule_book().remedies(rule)}
    ours = {do.partition(":")[0] for do in remedies if do.split(".")[0] in SECTIONS and ": " in do}
    assert ours - known == set()
    assert len(ours) > 5


@pytest.mark.parametrize(
    "text", ["export X=1", "npu-smi info", "parallel.tp: 4", "--master_port 1", "max_device_memory: 1GB", "A_B=1,2"]
)
def test_doable(text: str) -> None:
    assert is_doable(text)


@pytest.mark.parametrize("text", ["contact support", "check the network", "reduce memory", "please wait"])
def test_not_doable(text: str) -> None:
    assert not is_doable(text)
    with pytest.raises(ValueError, match="neither a command nor a key"):
        Remedy(do=text, en="x", zh="x")


RULE = """\
rules:
  - {id: a-rule, role: benign, match: [hello there], en: {means: x}, zh: {means: x}, sources: [s], cases: [c]}
"""


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("id: a-rule", "id: A rule", "id: String should match pattern"),
        ("role: benign", "role: funny", "role: Input should be 'cause', 'pointer'"),
        ("role: benign", "role: cause", "remedies is missing"),
        ("hello there", "x", "at least 4 characters"),
        ("hello there", "'hello {there'", "braces hold a name"),
        ("cases: [c]", "cases: []", "cases is missing"),
        ("sources: [s]", "sources: [s], remedies: [nothing]", "rule a-rule: there is no remedy 'nothing'"),
        ("sources: [s]", "sources: [s], colour: red", "colour: Extra inputs are not permitted"),
    ],
)
def test_bad_rules_are_refused(before: str, after: str, problem: str) -> None:
    assert len(read_rules({"r.yaml": RULE}).rules) == 1
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_rules({"r.yaml": RULE.replace(before, after)})


@pytest.mark.parametrize(
    ("pattern", "line", "found"),
    [
        ("wait for {who} done", "x wait for rank 3 done", {"who": "rank 3"}),
        ("error code {code}", "an error code 507011, then", {"code": "507011"}),
        ("from...to [{place}]", "from anywhere to [here]", {"place": "here"}),
        ("code 507", "code 5071", None),
        ("507 is it", "1507 is it", None),
        ("507 is it", "1507 is it, 507 is it", {}),
        ("hello {x} there", f"hello {'x' * 300} there", None),
    ],
)
def test_patterns(pattern: str, line: str, found: dict[str, str] | None) -> None:
    assert parsed(pattern).find(line) == found
