"""The chat template of a tokenizer, and conversations as the text that it makes of them. Pure."""

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from ascend_moe_train.data import chat_worker
from ascend_moe_train.data.manifest import TEMPLATE_NAME, TOKENIZER_CONFIG_NAME
from ascend_moe_train.errors import DataError

MAX_TEMPLATE_BYTES = 1 << 20
MAX_CONFIG_BYTES = 1 << 28
# Which of the assistant's turns count in the loss.
Answers = Literal["all", "last"]
# The names of special tokens that transformers gives to a template.
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True)
class TemplateSource:
    """A template's text, the file it came from, and the special tokens it may name.

    `config` is the text of the tokenizer_config.json that says which these are, if there is one.
    """

    text: str
    path: Path
    variables: Mapping[str, str]
    config: str | None = None

    @property
    def sha256(self) -> str:
        """Of everything that what it writes depends on."""
        return hashlib.sha256(json.dumps([self.text, dict(self.variables)], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text. `spans` are the counted turns of the assistant: start and end in characters."""

    text: str
    spans: Sequence[tuple[int, int]]


def find_template(tokenizer: Path, given: Path | None, eod_token: str) -> TemplateSource:
    """The template to use with a tokenizer.json: the given file, else what lies beside it, as transformers looks.

    That is chat_template.jinja, then `chat_template` in tokenizer_config.json (of several, the one named `default`).
    The special tokens come from tokenizer_config.json; a tokenizer without one still has its end-of-document token as
    `eos_token`. Raises DataError naming the file.
    """
    config_path = tokenizer.with_name(TOKENIZER_CONFIG_NAME)
    text = _read_text(config_path, MAX_CONFIG_BYTES) if config_path.is_file() else None
    config = {} if text is None else _parse_config(text, config_path)
    variables = {"eos_token": eod_token} | _special_tokens(config, config_path)
    path = given or tokenizer.with_name(TEMPLATE_NAME)
    if given is not None or path.is_file():
        template = _read_text(path, MAX_TEMPLATE_BYTES)
    else:
        path, template = config_path, _template_in(config, config_path, tokenizer)
    return TemplateSource(text=template, path=path, variables=variables, config=text)


def _read_text(path: Path, max_bytes: int) -> str:
    try:
        if not path.is_file():
            raise DataError(f"{path}: no such file, a chat template is needed")
        if path.stat().st_size > max_bytes:
            raise DataError(f"{path}: {path.stat().st_size} bytes, allowed are at most {max_bytes}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte offset {error.start}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _parse_config(text: str, path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON that can be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(config, dict):
        raise DataError(f"{path}: a JSON {type(config).__name__}, an object is needed")
    return config


def _special_tokens(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    tokens = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            continue
        if not isinstance(text, str):
            raise DataError(f"{path}: {name} is of type {type(text).__name__}, text is needed")
        tokens[name] = text
    return tokens


def _template_in(config: Mapping[str, Any], path: Path, tokenizer: Path) -> str:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    if template is None:
        raise DataError(
            f"{tokenizer}: no chat template beside it, neither {TEMPLATE_NAME} nor chat_template in "
            f"{TOKENIZER_CONFIG_NAME}; "
            "name one with --chat-template"
        )
    if not isinstance(template, str) or len(template.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
        raise DataError(f"{path}: chat_template is no text of at most {MAX_TEMPLATE_BYTES} bytes")
    return template


class ChatRenderer:
    """Runs a template in a process of its own (see `chat_worker`) for the length of a `with` block.

    Raises DataError on entry for a template that cannot be compiled.
    """

    def __init__(self, source: TemplateSource, answers: Answers) -> None:
        self._source = source
        self._answers = answers

    def __enter__(self) -> Self:
        # -P: the folder of that file is no place to import from
        command = [sys.executable, "-P", str(Path(chat_worker.__file__))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        settings = {
            "template": self._source.text,
            "variables": dict(self._source.variables),
            "answers": self._answers,
        }
        try:
            self._ask(settings, str(self._source.path))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def render(self, conversation: Mapping[str, Any], where: str) -> Rendered:
        """The text of one conversation. Raises DataError that begins with `where` and tells what the template did."""
        answer = self._ask(conversation, f"{where}: chat template {self._source.path}")
        return Rendered(text=answer["text"], spans=answer["spans"])

    def prompt(self, message: str, where: str) -> str:
        """The text after which the assistant answers a user's message. Raises DataError as `render` does."""
        question = {"messages": [{"role": "user", "content": message}], "tools": None, "prompt": True}
        text: str = self._ask(question, f"{where}: chat template {self._source.path}")["text"]
        return text

    def _ask(self, question: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        sink, source = self._process.stdin, self._process.stdout
        assert sink is not None and source is not None
        try:
            sink.write(json.dumps(question).encode() + b"\n")
            sink.flush()
            line = source.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise DataError(f"{where}: {self._fate()}")
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise DataError(f"{where}: {answer['error']}")
        return answer

    def _fate(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGALRM:
            return f"it does not end within {chat_worker.MAX_S} s"
        return f"its process ended with exit code {code}"

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue
