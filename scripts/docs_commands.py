"""The commands and keys that pages name, held against the real command line and the real configuration."""

import copy
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from ascend_moe_train import strict_yaml
from ascend_moe_train.cli import main as cli
from ascend_moe_train.config import RunConfig, resolve
from ascend_moe_train.config_error import known_keys
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.strict_yaml import Value
from scripts.docs_pages import PROMPT, ROOT, blocks, joined, reason_not_to_run, regions, without_code

EXAMPLE = ROOT / "examples" / "demo.yaml"
SECTIONS = tuple(RunConfig.model_fields)
DRAWING = "text"
# Blocks of other languages and drawings: fenced with one of these.
NO_COMMANDS = (DRAWING, "python", "yaml", "json")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
DOTTED = re.compile(rf"(?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)+")
FILES = (".py", ".yaml", ".json", ".md", ".txt", ".html", ".jsonl", ".safetensors")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a code block that runs something, its number from 1 and its words."""

    number: int
    words: tuple[str, ...]


def commands(text: str) -> Iterator[Line]:
    """The lines of a page that run `amt`, `python -m` of this repository, or `make`, up to a pipe or a redirection.
    What should be refused is left out: it is in a region that is run."""
    refused = {at for region in regions(text) if "exit" in region.option for at in range(region.first, region.stop)}
    for block in blocks(text):
        if block.language in NO_COMMANDS or block.first in refused:
            continue
        for at, line in joined(block.lines):
            line = line.removeprefix(PROMPT).removeprefix(".venv/bin/")
            if line.startswith(("amt ", "python -m ", "make ")):
                words = shlex.split(re.split(r" [|>] ", line)[0], comments=True)
                yield Line(number=block.first + at, words=tuple(words))


def complaint(words: tuple[str, ...]) -> str | None:
    """What is wrong with a command, None for nothing. Nothing is run: `amt` parses its words and stops there."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        missing = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"there is no `make {missing[0]}`" if missing else None
    if words[0] == "python":
        return _no_module(words[2])
    try:
        context = _parsed(list(words[1:]))
        check_settings(context.params.get("overrides", ()), context.params.get("model"))
    except (click.ClickException, ConfigError) as error:
        return str(error.format_message() if isinstance(error, click.ClickException) else error)
    return None


def _no_module(name: str) -> str | None:
    place = ROOT.joinpath(*name.split("."))
    is_own = name.partition(".")[0] in ("scripts", "benchmarks", "tests", "ascend_moe_train")
    is_there = place.with_suffix(".py").exists() or (place / "__main__.py").exists()
    return f"there is no {name}" if is_own and not is_there else None


def _parsed(arguments: list[str]) -> click.Context:
    """The context of the last verb, all words parsed. Raises click's errors."""
    command: click.Command = cli.amt
    name: str = "amt"
    context: click.Context | None = None
    while True:
        context = command.make_context(name, arguments, parent=context)
        if not isinstance(command, click.Group):
            return context
        rest = [*context._protected_args, *context.args]  # where click keeps the next verb until it calls it
        if not rest:
            return context
        found_name, found, arguments = command.resolve_command(context, rest)
        assert found_name is not None
        assert found is not None
        name, command = found_name, found


def check_settings(overrides: tuple[str, ...], model: str | None = None) -> None:
    """Raises ConfigError: an override that no run takes, laid over the demo's run or over one of a preset."""
    tree = _example()
    if model is not None and model.isidentifier():
        tree["model"] = {"preset": model}
    resolve(tree, {}, "the page", overrides)


def check_yaml(text: str) -> None:
    """Raises ConfigError: keys or values that no run file takes, laid over those of the demo."""
    value = strict_yaml.read_text(text, "the page", numbered=True).value
    assert isinstance(value, dict)
    tree = _example()
    for section, keys in value.items():
        tree[section] = _over(tree.get(section), keys)
    resolve(tree, {}, "the page")


def _example() -> dict[str, Value]:
    value = copy.deepcopy(strict_yaml.read_file(EXAMPLE).value)
    assert isinstance(value, dict)
    return value


def _over(below: Value, above: Value) -> Value:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _over(below.get(key), value) for key, value in above.items()}}
    return above


def unheld(text: str) -> list[tuple[int, str]]:
    """The lines of code blocks that nothing holds, with their numbers: neither in a region, nor a command, nor a run
    file, nor marked with what stands for them."""
    found = []
    held = {line.number for line in commands(text)}
    runs = {first for first, _ in yaml_blocks(text)}
    inside = {at for region in regions(text) for at in range(region.first + 1, region.stop + 1)}
    for block in blocks(text):
        if block.language == DRAWING or block.first in inside | runs or reason_not_to_run(text, block):
            continue
        lines = [(block.first + at, line.strip()) for at, line in joined(block.lines)]
        found += [(number, line) for number, line in lines if line and line[0] != "#" and number not in held]
    return found


def yaml_blocks(text: str) -> Iterator[tuple[int, str]]:
    """The blocks of a page that are a run file or a part of one, with the number of their first line."""
    for block in blocks(text):
        keys = [line.partition(":")[0] for line in block.lines if re.match(r"[a-z_]+:", line)]
        if keys and set(keys) <= set(SECTIONS):
            yield block.first, "\n".join(block.lines) + "\n"


def unknown_inline(text: str) -> list[str]:
    """What stands in backticks as a command or a key of a run, and is none."""
    keys = set(known_keys(RunConfig))
    found = []
    for span in INLINE.findall(without_code(text)):
        if span.startswith("amt "):
            found += [f"`{span}`: {problem}" for problem in _unknown_words(span.split()[1:])]
        elif DOTTED.fullmatch(key := span.partition("=")[0].partition(":")[0]) and not span.endswith(FILES):
            plain = ".".join(word for word in key.split(".") if not word.isdecimal())
            found += [] if plain in keys else [f"`{span}`: no run has the key {plain}"]
    return found


def _unknown_words(words: list[str]) -> Iterator[str]:
    """Verbs that are not there, and options that the verbs before them do not have."""
    command: click.Command = cli.amt
    takes_value = {"--help": False, "--version": False}  # by option
    is_value = False
    with click.Context(cli.amt, info_name="amt") as context:
        for word in words:
            if is_value:
                is_value = False
            elif word.startswith("--"):
                if word.partition("=")[0] not in takes_value:
                    yield f"no option {word}"
                is_value = takes_value.get(word, False)
            elif isinstance(command, click.Group) and word.isalpha() and word.islower():
                found: Any = command.get_command(context, word)
                if found is None:
                    yield f"no verb {word}"
                    return
                command = found
                for parameter in command.params:
                    takes_value |= dict.fromkeys(parameter.opts, not getattr(parameter, "is_flag", False))
