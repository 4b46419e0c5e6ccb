"""YAML for run files: read as data only, with the line of every key; written so that it reads back the same. Pure.

The reader takes the JSON-like part of YAML 1.2: mappings, lists, strings, whole numbers, floats (`3e-4` too, which
YAML 1.1 readers take for a string), true, false, null. It refuses anchors and aliases, tags, duplicate keys, several
documents in one text, control characters in text, nesting beyond 16 levels, and files of more than 1 MB.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

import yaml

from ascend_moe_train.errors import ConfigError

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"

MAX_BYTES = 1_000_000
MAX_DEPTH = 16
MAX_DIGITS = 18  # a whole number of 18 digits fits into 64 bits

_WORDS: Mapping[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?[0-9]+", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a text holds, and on which line (from 1) each dotted key stands."""

    value: Value
    lines: Mapping[str, int]


def read_file(path: Path) -> Document:
    """The document in a file. Raises ConfigError, naming file and line, for anything the module docstring refuses."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes, which no run file is")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: byte {raw[error.start]:#04x} at offset {error.start}") from error
    return read_text(text, str(path), numbered=True)


def read_text(text: str, origin: str, *, numbered: bool = False, is_ours: bool = False) -> Document:
    """The document in `text`. Errors are ConfigErrors that begin with `origin`, and with the line when `numbered`.

    What is ours is read by PyYAML's parser in C where there is one: ten times as fast, with poorer words for mistakes.
    """
    loader = yaml.CSafeLoader if is_ours and yaml.__with_libyaml__ else yaml.SafeLoader
    return _Reader(text, origin, numbered, loader).document()


def dump(value: Value) -> str:
    """YAML that `read_text` reads as `value` again."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    return text


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    quoted = _number_or_word(text) is not text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if quoted else None)


_Dumper.add_representer(str, _represent_str)


def _number_or_word(text: str) -> bool | int | float | str | None:
    """What an unquoted scalar means."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) <= MAX_DIGITS else float(text)
    return float(text) if _FLOAT.fullmatch(text) else text


class _Reader:
    """Builds values from the parser's events, so that nothing but data can come out and every key's line is known."""

    def __init__(
        self, text: str, origin: str, numbered: bool, loader: type[yaml.SafeLoader | yaml.CSafeLoader]
    ) -> None:
        self._origin = origin
        self._numbered = numbered
        self._lines: dict[str, int] = {}
        self._loader = loader
        self._events = self._safe_events(text)

    def document(self) -> Document:
        value: Value = None
        seen = False
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if seen:
                    self._refuse(event, "a second document starts here: one is allowed")
                seen = True
                value = self._value(next(self._events), ())
        return Document(value=value, lines=self._lines)

    def _safe_events(self, text: str) -> Iterator[yaml.Event]:
        depth = 0
        try:
            for event in yaml.parse(text, Loader=self._loader):
                if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
                    self._refuse(event, f"anchors and aliases are not allowed ('{event.anchor}'): write the value out")
                if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
                    self._refuse(event, f"tags are not allowed ('{event.tag}'): plain values only")
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if depth > MAX_DEPTH:
                    self._refuse(event, f"nested more than {MAX_DEPTH} levels deep")
                yield event
        except yaml.MarkedYAMLError as error:
            problem = " ".join(str(error.problem or error.context).split())
            line = error.problem_mark.line + 1 if error.problem_mark else None
            raise ConfigError(f"{self._where(line)}: not valid YAML: {problem}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{self._origin}: not valid YAML: {' '.join(str(error).split())}") from error

    def _value(self, event: yaml.Event, path: tuple[str, ...]) -> Value:
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(path)
        text = self._text(event)
        return _number_or_word(text) if isinstance(event, yaml.ScalarEvent) and event.implicit[0] else text

    def _text(self, event: yaml.Event) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            self._refuse(event, "a key has to be a plain word")
        text = event.value
        if control := _CONTROL.search(text):
            self._refuse(event, f"text with the control character U+{ord(control[0]):04X} is not allowed")
        return text

    def _mapping(self, path: tuple[str, ...]) -> dict[str, Value]:
        mapping: dict[str, Value] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._text(event)
            if key in mapping:
                self._refuse(event, f"duplicate key '{'.'.join((*path, key))}'")
            self._lines[".".join((*path, key))] = _line(event)
            mapping[key] = self._value(next(self._events), (*path, key))
        return mapping

    def _list(self, path: tuple[str, ...]) -> list[Value]:
        items: list[Value] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            place = (*path, str(len(items)))
            self._lines[".".join(place)] = _line(event)
            items.append(self._value(event, place))
        return items

    def _refuse(self, event: yaml.Event, problem: str) -> NoReturn:
        raise ConfigError(f"{self._where(_line(event))}: {problem}")

    def _where(self, line: int | None) -> str:
        return f"{self._origin}:{line}" if self._numbered and line is not None else self._origin


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 1
