"""What a code means: the rules that know it, and what its letters say where none does; exit codes and signals. Pure."""

import re
import signal
from collections.abc import Iterable, Mapping
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


# Of torch_npu's ERR<module><kind> (Ascend Extension for PyTorch, error codes).
TORCH_MODULES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "00": ("torch_npu's core", "torch_npu 核心"),
        "01": ("torch_npu's operators", "torch_npu 算子"),
        "02": ("torch_npu's collectives", "torch_npu 集合通信"),
        "03": ("torch_npu's graphs", "torch_npu 图"),
        "04": ("torch_npu's profiler", "torch_npu 性能采集"),
        "99": ("the program on top of torch_npu", "torch_npu 之上的程序"),
    }
)
TORCH_KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "001": ("an invalid parameter", "参数无效"),
        "002": ("an invalid type", "类型无效"),
        "003": ("an invalid value", "取值无效"),
        "004": ("an invalid pointer", "指针无效"),
        "005": ("an internal error", "内部错误"),
        "006": ("memory", "内存错误"),
        "007": ("something that is not supported", "功能不支持"),
        "008": ("something that was not found", "资源不存在"),
        "009": ("something that is not available", "资源不可用"),
        "010": ("a failed system call", "系统调用失败"),
        "011": ("a timeout", "超时"),
        "012": ("missing rights", "权限不足"),
        "100": ("a failed call of ACL: the code beside it says which", "调用 ACL 失败：见旁边的错误码"),
        "200": ("a failed call of HCCL: the code beside it says which", "调用 HCCL 失败：见旁边的错误码"),
        "300": ("a failed call of the graph engine", "调用图引擎失败"),
        "999": ("an exception of its own", "应用自身异常"),
    }
)
# The rule for a process that a signal ended.
OF_SIGNALS: Mapping[signal.Signals, str] = MappingProxyType(
    {
        signal.SIGKILL: "killed",
        signal.SIGTERM: "general-stopped",
        signal.SIGINT: "general-stopped",
        signal.SIGHUP: "general-stopped",
        **dict.fromkeys((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL), "crashed"),
    }
)
SHELL_SIGNALS = 128  # a shell gives 128 plus the number of the signal


def rules_of(code: str, book: RuleBook) -> tuple[Rule, ...]:
    """The rules of a code or an id. Raises DataError, with the nearest one: neither exists."""
    plain = code.strip()
    for each in (plain, plain.upper(), plain.lower()):
        if each in book.by_code and not each.startswith("@"):
            return book.by_code[each]
    rule = book.rules.get(plain.lower())
    if rule is not None and rule.role != "fact":
        return (rule,)
    if (number := _signal(plain)) is not None and number in OF_SIGNALS:
        return (book.rules[OF_SIGNALS[number]],)
    if said := tuple(each for each in book.rules.values() if each.role != "fact" and plain.upper() in each.match):
        return said
    if _letters(plain) is not None:
        return ()
    known = [each for each in book.by_code if not each.startswith("@")] + [*book.rules, *(s.name for s in OF_SIGNALS)]
    close = _one_off(plain.upper(), known) or nearest(plain, known) or nearest(plain.upper(), known)
    meant = f"did you mean {close}?" if close is not None else "there are EI0006, ERR02200, 507011, 137, SIGKILL ..."
    raise DataError(f"code {code[:MAX_SHOWN]!r} is not known: {meant}")


def _one_off(code: str, known: Iterable[str]) -> str | None:
    """The code that differs in one place."""
    same_size = (each for each in known if len(each) == len(code))
    return next((each for each in same_size if sum(a != b for a, b in zip(code, each, strict=True)) == 1), None)


def _signal(code: str) -> signal.Signals | None:
    """The signal of an exit code of a shell (137), of Python (-9), or of a name (SIGKILL, KILL)."""
    name = code.upper().removeprefix("SIG")
    if f"SIG{name}" in signal.Signals.__members__:
        return signal.Signals[f"SIG{name}"]
    if re.fullmatch(r"-?[0-9]{1,3}", code) is None:
        return None
    number = int(code)
    number = -number if number < 0 else number - SHELL_SIGNALS
    return signal.Signals(number) if number in set(signal.Signals) else None


def _letters(code: str) -> tuple[str, str] | None:
    """What the letters of a code say, in both languages."""
    plain = code.strip().upper()
    number = _signal(plain)
    if number is not None:
        return (
            f"a process that signal {int(number)} ({number.name}) ended",
            f"进程被信号 {int(number)}（{number.name}）结束",
        )
    if (found := re.fullmatch(r"ERR([0-9]{2})([0-9]{3})", plain)) is not None:
        module, kind = TORCH_MODULES.get(found[1]), TORCH_KINDS.get(found[2])
        if module is not None and kind is not None:
            return f"{module[0]} report {kind[0]}" if module[0].endswith("s") else f"{module[0]} reports {kind[0]}", (
                f"{module[1]}报告：{kind[1]}"
            )
    module = _module(plain)
    return None if module is None else (f"{module[0]} reports it", f"由 {module[1]} 报告")


def _module(code: str) -> tuple[str, str] | None:
    is_code = len(code) == 6 and code[0] in "EWI" and code[2:].isascii() and code[2:].isdecimal()
    return MODULES.get(code[1]) if is_code else None


def explained(code: str, book: RuleBook, lang: Lang) -> list[str]:
    """Lines about a code. Raises DataError: it is not known."""
    rules, letters = rules_of(code, book), _letters(code)
    said = "" if letters is None else letters[LANGS.index(lang)]
    if not rules:
        rest = "没有该码的规则；请看其前后的行" if lang == "zh" else "there is no rule of it: read the lines around it"
        return [f"{code}: {said}{'；' if lang == 'zh' else '; '}{rest}"]
    lines = [line for rule in rules for line in rule_lines(rule, book, lang)]
    is_own = any(code.strip().upper() in rule.codes for rule in rules)
    return lines if is_own or not said else [f"{code}: {said}", *lines]


def explained_json(code: str, book: RuleBook) -> dict[str, Any]:
    """The same for programs."""
    rules, letters = rules_of(code, book), _letters(code)
    return {
        "code": code,
        "letters": None if letters is None else dict(zip(LANGS, letters, strict=True)),
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
