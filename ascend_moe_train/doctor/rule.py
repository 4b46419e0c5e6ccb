"""What is known about codes and messages: rules as data, one YAML file per family, validated. Pure."""

import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ascend_moe_train.doctor.pattern import parsed
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.strict_yaml import read_text

Role = Literal["cause", "pointer", "symptom", "wrapper", "benign", "fact"]
Lang = Literal["en", "zh"]
LANGS: tuple[Lang, ...] = ("en", "zh")

Group = Literal[
    "benign",
    "checkpoint",
    "collective_mismatch",
    "config_env",
    "container",
    "data",
    "device_fault",
    "device_occupied",
    "disk",
    "hccl_nccl_timeout",
    "moe",
    "nan_overflow_loss",
    "network",
    "oom_device",
    "oom_host",
    "operator_or_memory",
    "peer_crash",
    "port_conflict",
    "program",
    "ranktable_hostfile",
    "shape_sharding",
    "slow",
    "stopped",
    "version_mismatch",
]

# A remedy is something to type, or a key to set: `export X=1`, a program with arguments, `section.key: value`.
_COMMANDS = frozenset(
    {
        "amt",
        "ascend-dmi",
        "cat",
        "chronyc",
        "df",
        "dmesg",
        "docker",
        "env",
        "export",
        "find",
        "firewall-cmd",
        "fuser",
        "grep",
        "hccn_tool",
        "hostnamectl",
        "ibstat",
        "id",
        "ip",
        "journalctl",
        "kill",
        "ldd",
        "ls",
        "msrun",
        "nc",
        "npu-smi",
        "nvidia-smi",
        "pip",
        "ps",
        "py-spy",
        "python",
        "source",
        "ss",
        "ssh-copy-id",
        "sysctl",
        "systemctl",
        "ulimit",
        "unset",
        "which",
    }
)
_KEY = re.compile(r"(--)?[A-Za-z_][\w.\-]*( ?[:=] ?|$)[^\s].*|--[a-z][\w\-]*( \S+)?|[A-Z_]{4,}=\S+")


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Words(_Data):
    """What a line means, in one sentence, and what usually lies behind it, the most frequent first."""

    means: str = Field(min_length=1)
    why: tuple[str, ...] = ()


class Remedy(_Data):
    """What to do: a command or a configuration key, and why, in both languages. One that `prevents` does not help now:
    it keeps the same from coming again."""

    do: str = Field(min_length=2)
    en: str = Field(min_length=1)
    zh: str = Field(min_length=1)
    prevents: bool = False

    @model_validator(mode="after")
    def _is_doable(self) -> Self:
        if not is_doable(self.do):
            raise ValueError(f"{self.do!r} is neither a command nor a key with its value")
        return self


def is_doable(text: str) -> bool:
    """Whether a remedy is a command or a configuration key."""
    words = text.split()
    is_command = words[0].rpartition("/")[2] in _COMMANDS or (words[0] == "for" and words[-1] == "done")
    return is_command or _KEY.fullmatch(text) is not None


class Rule(_Data):
    """One kind of line. `match` are patterns (see pattern.py), `any_case` the same in lower case; `unless` rules lines
    out that hold such text. `level` orders causes: from 50 on they end a run, below they are suspects. Lines that are
    warnings count only where something else is wrong, unless the rule counts `alone`."""

    id: str = Field(pattern=r"^[a-z][a-z0-9\-]+$")
    role: Role
    group: Group = "program"
    level: int = Field(default=0, ge=0, le=100)
    alone: bool = False
    codes: tuple[str, ...] = ()
    match: tuple[str, ...] = ()
    any_case: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    en: Words | None = None
    zh: Words | None = None
    checks: tuple[str, ...] = ()
    remedies: tuple[str | Remedy, ...] = ()
    sources: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for text in (*self.match, *self.any_case):
            parsed(text)
        if not (self.codes or self.match or self.any_case):
            raise ValueError("codes, match or any_case is needed")
        if any(text != text.lower() for text in self.any_case):
            raise ValueError("any_case is written in lower case")
        if self.role != "fact":
            needed = ("en", "zh", "sources") if self.is_inferred else ("en", "zh", "sources", "cases")
            missing = [name for name in needed if not getattr(self, name)]
            if missing:
                raise ValueError(f"{missing[0]} is missing")
        if self.role in ("cause", "pointer", "symptom") and not self.remedies:
            raise ValueError("remedies is missing")
        if self.role in ("cause", "pointer") and not self.level:
            raise ValueError("a cause has a level")
        return self

    @property
    def is_inferred(self) -> bool:
        """Whether no line tells it: it is concluded from many, under a code of its own that begins with @."""
        return bool(self.codes) and all(code.startswith("@") for code in self.codes)

    def words(self, lang: Lang) -> Words:
        """What it means, in a language; facts have no words."""
        found = self.en if lang == "en" else self.zh
        assert found is not None
        return found


class _File(_Data):
    actions: dict[str, Remedy] = {}
    rules: tuple[Rule, ...] = ()


class RuleBook:
    """All rules by id, and those that a code names."""

    def __init__(self, rules: Sequence[Rule], actions: Mapping[str, Remedy]) -> None:
        """Raises ValueError: two rules of one id, or a remedy that does not exist."""
        self.rules = {rule.id: rule for rule in rules}
        self._actions = actions
        if len(self.rules) < len(rules):
            ids = [rule.id for rule in rules]
            raise ValueError(f"two rules are called {next(each for each in ids if ids.count(each) > 1)!r}")
        for rule in rules:
            self.remedies(rule)

    @cached_property
    def by_code(self) -> dict[str, tuple[Rule, ...]]:
        """The rules that list a code."""
        found: dict[str, tuple[Rule, ...]] = {}
        for rule in self.rules.values():
            for code in rule.codes:
                found[code] = (*found.get(code, ()), rule)
        return found

    def remedies(self, rule: Rule) -> tuple[Remedy, ...]:
        """What to do. Raises ValueError: the name of one that does not exist."""
        named = [each for each in rule.remedies if isinstance(each, str) and each not in self._actions]
        if named:
            raise ValueError(f"rule {rule.id}: there is no remedy {named[0]!r}")
        return tuple(self._actions[each] if isinstance(each, str) else each for each in rule.remedies)

    def without(self, rule_ids: frozenset[str]) -> "RuleBook":
        """The same without some rules."""
        return RuleBook([rule for rule in self.rules.values() if rule.id not in rule_ids], self._actions)


@cache
def rule_book() -> RuleBook:
    """The rules that come with the package."""
    folder = resources.files("ascend_moe_train.doctor") / "rules"
    texts = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".yaml")}
    return read_rules(texts)


def read_rules(texts: Mapping[str, str]) -> RuleBook:
    """Rules from the texts of YAML files by their names. Raises ConfigError naming the file and what is wrong."""
    rules: list[Rule] = []
    actions: dict[str, Remedy] = {}
    for name, text in sorted(texts.items()):
        value: Any = read_text(text, name, numbered=True, is_ours=True).value
        try:
            file = _File.model_validate(value)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise ConfigError(f"{name}: {_place(value, problem['loc'])}: {problem['msg']}") from error
        rules += file.rules
        actions |= file.actions
    try:
        return RuleBook(rules, actions)
    except ValueError as error:
        raise ConfigError(f"{', '.join(sorted(texts))}: {error}") from error


def _place(value: Any, loc: tuple[int | str, ...]) -> str:
    """Where in a file: a rule by its id."""
    if len(loc) > 1 and loc[0] == "rules" and isinstance(loc[1], int):
        rule = value["rules"][loc[1]]
        name = rule.get("id", loc[1]) if isinstance(rule, dict) else loc[1]
        return ".".join(["rules", str(name), *map(str, loc[2:])])
    return ".".join(map(str, loc))
