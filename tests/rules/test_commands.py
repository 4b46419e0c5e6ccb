"""The commands and their options are a frozen list: tests/rules/cli.txt.

After a change that is meant: python -m tests.rules.test_commands > tests/rules/cli.txt
"""

from collections.abc import Iterator
from pathlib import Path

import click

from ascend_moe_train.cli.main import VERBS, amt

LIST = Path(__file__).with_name("cli.txt")


def command_lines() -> Iterator[str]:
    """One line per command: its words, arguments and options."""
    with click.Context(amt, info_name="amt") as context:
        for verb in VERBS:
            command = amt.get_command(context, verb)
            assert command is not None
            yield from _lines(command, f"amt {verb}")


def _lines(command: click.Command, words: str) -> Iterator[str]:
    words = " ".join([words, *(_parameter(parameter) for parameter in command.params)])
    if isinstance(command, click.Group):
        for name, inner in sorted(command.commands.items()):
            yield from _lines(inner, f"{words} {name}")
        return
    yield words


def _parameter(parameter: click.Parameter) -> str:
    many = "..." if parameter.multiple or parameter.nargs != 1 else ""
    if isinstance(parameter, click.Argument):
        return f"{(parameter.name or '').upper()}{many}"
    return f"{'|'.join((*parameter.opts, *parameter.secondary_opts))}{many}"


def test_commands_are_those_of_the_list() -> None:
    assert list(command_lines()) == LIST.read_text(encoding="utf-8").splitlines()


def test_help_says_what_each_command_says_of_itself() -> None:
    with click.Context(amt, info_name="amt") as context:
        for verb, (_, line) in VERBS.items():
            command = amt.get_command(context, verb)
            assert command is not None
            assert (command.help or "").splitlines()[0] == line


if __name__ == "__main__":
    click.echo("\n".join(command_lines()))
