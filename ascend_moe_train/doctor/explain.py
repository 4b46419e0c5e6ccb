"""What a code means: the rules that know it, and what its letters say where none does. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ascend_moe_train.config_error import MAX_SHOWN, nearest
from ascend_moe_train.doctor.rule import LANGS, Lang, Rule, RuleBook
from ascend_moe_train.doctor.words import rule_lines
from ascend_moe_train.errors import DataError

# The second character of a CANN code is the module that reports it (CANN error code reference).
MODULES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "1": ("graph engine", "图引擎"),
        "2": ("fusion engine", "融合引擎"),
        "3": ("AI CPU", "AI CPU"),
        "4": ("operator compiler", "算子编译器"),
        "5": ("AI Core operator", "AI Core 算子"),
        "6": ("AI Core operator", "AI Core 算子"),
        "7": ("AI Core operator", "AI Core 算子"),
        "8": ("AI Core operator", "AI Core 算子"),
        "9": ("TBE", "TBE"),
        "A": ("TBE", "TBE"),
        "B": ("TBE", "TBE"),
        "E": ("runtime", "运行时"),
        "H": ("ACL", "ACL"),
        "I": ("HCCL", "HCCL"),
        "J": ("HCCP", "HCCP"),
        "K": ("profiling", "性能采集"),
        "L": ("driver", "驱动"),
        "N": ("DVPP", "DVPP"),
        "P": ("dump", "dump"),
        "Z": ("operators", "算子"),
    }
)


def rules_of(code: str, book: RuleBook) -> tuple[Rule, ...]:
    """The rules of a code or an id. Raises DataError, with the nearest one: neither exists."""
    plain = code.strip()
    for each in (plain, plain.upper(), plain.lower()):
        if each in book.by_code and not each.startswith("@"):
            return book.by_code[each]
    rule = book.rules.get(plain.lower())
    if rule is not None and rule.role != "fact":
        return (rule,)
    if _module(plain.upper()) is not None:
        return ()
    known = [each for each in book.by_code if not each.startswith("@")] + list(book.rules)
    close = nearest(plain, known) or nearest(plain.upper(), known)
    meant = f"did you mean {close}?" if close is not None else "codes look like EI0006 or 507011"
    raise DataError(f"code {code[:MAX_SHOWN]!r} is not known: {meant}")


def _module(code: str) -> tuple[str, str] | None:
    is_code = len(code) == 6 and code[0] in "EWI" and code[2:].isascii() and code[2:].isdecimal()
    return MODULES.get(code[1]) if is_code else None


def explained(code: str, book: RuleBook, lang: Lang) -> list[str]:
    """Lines about a code. Raises DataError: it is not known."""
    rules = rules_of(code, book)
    if rules:
        return [line for rule in rules for line in rule_lines(rule, book, lang)]
    module = _module(code.upper())
    assert module is not None
    name = module[LANGS.index(lang)]
    if lang == "zh":
        return [f"{code}: 没有该码的规则；它由 {name} 报告，请看其前后的行"]
    return [f"{code}: there is no rule of it; {name} reports it: read the lines around it"]


def explained_json(code: str, book: RuleBook) -> dict[str, Any]:
    """The same for programs."""
    rules = rules_of(code, book)
    module = _module(code.upper())
    return {
        "code": code,
        "module": None if module is None else dict(zip(LANGS, module, strict=True)),
        "rules": [
            {
                **rule.model_dump(
                    mode="json", include={"id", "role", "group", "codes", "en", "zh", "checks", "sources"}
                ),
                "remedies": [each.model_dump() for each in book.remedies(rule)],
            }
            for rule in rules
        ],
    }
