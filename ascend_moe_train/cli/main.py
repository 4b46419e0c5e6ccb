"""The command `amt`: finds the verb, runs it, turns a user's mistake into one line and an exit code."""

import difflib
import importlib
import io
import sys
from collections.abc import Sequence
from types import MappingProxyType

import click

from ascend_moe_train.errors import UserError
from ascend_moe_train.plain_text import plain

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
MAX_COMPLAINT = 4096  # characters

# Verb: the module that holds its `command`, imported only when the verb runs; and its line in the help.
VERBS = MappingProxyType(
    {
        "data": ("ascend_moe_train.cli.data", "Make token shards from text or conversations, and look into them."),
        "train": (
            "ascend_moe_train.cli.train",
            "Train the model of RUN_YAML; the same command continues a run that was interrupted.",
        ),
        "generate": ("ascend_moe_train.cli.generate", "Sample text from a checkpoint."),
        "convert": (
            "ascend_moe_train.cli.convert",
            "Hugging Face folders to checkpoints and back, each time with proof; new models from old ones.",
        ),
        "launch": (
            "ascend_moe_train.cli.launch",
            "Run a command as the ranks of one run, here or on several hosts; see how it fares, stop it.",
        ),
        "preflight": (
            "ascend_moe_train.cli.preflight",
            "Check whether the hosts of a job are fit for it, before it starts.",
        ),
        "mesh": (
            "ascend_moe_train.cli.mesh",
            "Show how RUN_YAML is spread over ranks: who is where, speaks with whom, holds what.",
        ),
        "schedule": (
            "ascend_moe_train.cli.schedule",
            "Show the timeline of a pipeline schedule: who computes when, who is idle, how much is in flight.",
        ),
        "plan": (
            "ascend_moe_train.cli.plan",
            "Find the best way to spread a model over devices, with predicted memory and time.",
        ),
        "profile": (
            "ascend_moe_train.cli.profile",
            "Say from a profiler's folder what a training step does, what is wrong with it and what to change.",
        ),
        "check": (
            "ascend_moe_train.cli.check",
            "Find out without a device whether a run's graphs hold together, and whether installed versions fit.",
        ),
        "doctor": (
            "ascend_moe_train.cli.doctor",
            "Find in logs what happened, the first failing rank and the fix; explain codes.",
        ),
        "selftest": (
            "ascend_moe_train.cli.selftest",
            "Check this machine's kernels, collectives and training, and write a page for a bug report.",
        ),
        "bench": (
            "ascend_moe_train.cli.bench",
            "Measure this machine: what techniques of training give on it, and what the planner needs.",
        ),
        "config": ("ascend_moe_train.cli.config", "Show or check the configuration of a run."),
        "version": ("ascend_moe_train.cli.version", "Print the versions that a bug report needs."),
    }
)


class LazyGroup(click.Group):
    """A group whose verbs are imported when they run, so that help and completion stay fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of one verb, or None for an unknown one."""
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(VERBS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's own, with the nearest verb for an unknown one."""
        if args[0] not in VERBS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], VERBS, n=1)
            meant = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(VERBS)}"
            raise click.UsageError(f"unknown command '{args[0]}': {meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the verbs from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ascend-moe-train", prog_name="amt")
def amt() -> None:
    """Train Mixture-of-Experts language models with MindSpore."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 2 for a user's mistake, 130 when interrupted."""
    for stream in (sys.stdout, sys.stderr):
        # names of files need not be UTF-8, and a terminal need not be; the escape is one of JSON as well
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code, complaint = attempt(arguments)
    if complaint is not None:
        click.echo(f"error: {complaint}", err=True)
    return code


def attempt(arguments: Sequence[str] | None) -> tuple[int, str | None]:
    """Runs one command line: its exit code, and for a user's mistake what was wrong, in one line."""
    try:
        result = amt.main(args=arguments, prog_name="amt", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USER_ERROR, None
    except click.ClickException as error:
        return _complaint(_hint(error) + error.format_message())
    except UserError as error:
        return _complaint(str(error))
    except OSError as error:
        # such as a name that is too long, a folder that may not be entered, a disk that is full
        where = f"{error.filename}: " if error.filename else ""
        return _complaint(f"{where}{error.strerror or error}")
    except MemoryError as error:
        return _complaint(f"out of memory: {error}".removesuffix(": "))
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED, None
    return (result if isinstance(result, int) else 0), None


def _hint(error: click.ClickException) -> str:
    """What stands before click's own words where those do not say what to do: names that a shell made of a glob."""
    path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else ""
    if path.endswith("data prepare") and "unexpected extra argument" in error.format_message():
        return "--source takes one name, give it again for more, and a glob in quotes (--source 'notes/*.md'): "
    return ""


def run() -> None:
    """The console script."""
    sys.exit(main())


def _complaint(message: str) -> tuple[int, str]:
    line = " ".join(message.splitlines())
    return EXIT_USER_ERROR, plain(line if len(line) <= MAX_COMPLAINT else f"{line[: MAX_COMPLAINT - 3]}...")
