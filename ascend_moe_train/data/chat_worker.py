"""The process that runs a chat template. Pure.

A template is somebody's program. Jinja's immutable sandbox keeps it from Python's internals; what that cannot stop, a
template that never ends or fills the memory, ends this process alone: by an alarm that no code can catch, and a bound
on memory.

It is run as a file, reads one JSON object per line from standard input and answers each with one: first the settings
(`template`, `variables`, `answers`), then conversations (`messages`, `tools`). An answer is `text` and `spans` (start
and end of each assistant turn in characters), or `error`. With `prompt`, the text goes up to where the assistant's next
turn begins, and there are no spans.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_S = 10
MAX_CHARACTERS = 1 << 24
MAX_MEMORY_BYTES = 1 << 30
# Noncharacters of Unicode, which no text may hold: they enclose what a `generation` block rendered.
OPENING, CLOSING = "\ufdd0", "\ufdd1"

GENERATION_TAGS = {"generation"}

Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]


class LoudUndefined(Undefined):
    """A missing name is false, as templates expect, but printing it is a mistake."""

    def __str__(self) -> str:
        self._fail_with_undefined_error()


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` of transformers: what is inside was written by the assistant."""

    tags = GENERATION_TAGS

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Any) -> str:
        return f"{OPENING}{caller()}{CLOSING}"


class Template:
    """A compiled template. Raises jinja2.TemplateError, or whatever its code raises."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=LoudUndefined,
            extensions=[GenerationBlock, loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        # Both are random: the same conversation would not always be the same tokens.
        del environment.filters["random"], environment.globals["lipsum"]
        self._template = environment.from_string(source)
        self._variables = {"raise_exception": _raise_exception, "documents": None, **variables}
        self.marks_answers = any(
            isinstance(node.call.node, nodes.ExtensionAttribute)
            for node in environment.parse(source).find_all(nodes.CallBlock)
        )

    def render(self, messages: Messages, tools: object, *, prompt: bool = False) -> str:
        """The text of a conversation, with `prompt` up to where the assistant's next turn begins."""
        pieces, size = [], 0
        variables = {**self._variables, "messages": messages, "tools": tools, "add_generation_prompt": prompt}
        for piece in self._template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise TemplateError(f"it writes more than {MAX_CHARACTERS} characters")
        text = "".join(pieces)
        text.encode()  # half a surrogate pair is no text, and no tokenizer takes it
        return text


def conversation(template: Template, messages: Messages, tools: object, *, only_last: bool) -> tuple[str, list[Span]]:
    """The text of a conversation and the spans of the assistant's turns, or of the last one.

    Without `generation` blocks a turn is what the text grows by: from the text of the messages before it, with the
    prompt for the assistant, to the text that ends with it. Both must be how the whole text begins, else TemplateError.
    """
    text = template.render(messages, tools)
    if template.marks_answers:
        text, spans = _unmark(text)
    else:
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [_grown(template, messages, tools, text, turn) for turn in (turns[-1:] if only_last else turns)]
    if not any(start < end for start, end in spans):
        raise TemplateError("it writes nothing for the assistant's turns")
    return text, spans[-1:] if only_last else spans


def _grown(template: Template, messages: Messages, tools: object, text: str, turn: int) -> Span:
    before = template.render(messages[:turn], tools, prompt=True)
    # The last turn may be followed by whatever ends a conversation.
    upto = text if turn == len(messages) - 1 else template.render(messages[: turn + 1], tools)
    for part, what in ((before, "before"), (upto, "up to")):
        if not text.startswith(part):
            raise TemplateError(
                f"it writes the messages {what} message {turn + 1} differently when more follow, so the assistant's "
                "turns cannot be found: mark them with {% generation %}, or count the last answer only"
            )
    return len(before), len(upto)


def _unmark(text: str) -> tuple[str, list[Span]]:
    pieces, spans, size = [], [], 0
    for number, part in enumerate(text.split(OPENING)):
        inside, closing, after = part.partition(CLOSING) if number else ("", CLOSING, part)
        if not closing or CLOSING in after:
            raise TemplateError("it has a {% generation %} block inside another")
        if number:
            spans.append((size, size + len(inside)))
        pieces += [inside, after]
        size += len(inside) + len(after)
    return "".join(pieces), spans


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers' filter: Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _describe(error: Exception) -> str:
    place = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    if isinstance(error, MemoryError):
        return f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
    return place + kind + " ".join(str(error).split())[:300]


def answers(lines: Iterator[bytes]) -> Iterator[Mapping[str, Any]]:
    """One answer per line: to the settings an empty one, then to each conversation."""
    settings = json.loads(next(lines))
    try:
        with _alarm():
            template = Template(settings["template"], settings["variables"])
    except Exception as error:  # a template's code, even its syntax, may raise anything
        yield {"error": _describe(error)}
        return
    yield {}
    for line in lines:
        asked = json.loads(line)
        only_last = settings["answers"] == "last"
        spans: list[Span] = []
        try:
            with _alarm():
                if asked.get("prompt"):
                    text = template.render(asked["messages"], asked["tools"], prompt=True)
                else:
                    text, spans = conversation(template, asked["messages"], asked["tools"], only_last=only_last)
        except Exception as error:  # see above
            yield {"error": _describe(error)}
        else:
            yield {"text": text, "spans": spans}


@contextmanager
def _alarm() -> Iterator[None]:
    """The system ends this process when the block takes too long: no Python code is asked."""
    signal.alarm(MAX_S)
    try:
        yield
    finally:
        signal.alarm(0)


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Answers until the source ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the source
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for answer in answers(iter(source.readline, b"")):
        sink.write(json.dumps(answer).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
