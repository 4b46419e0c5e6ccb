"""`amt bench`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascend_moe_train.cli.config import OVERRIDES, RUN_FILE

if TYPE_CHECKING:
    from ascend_moe_train.bench.result import Chart, Result

EXIT_FAILED = 1


@click.group("bench")
def command() -> None:
    """Measure this machine: what each technique of training gives on it."""


@command.command("ablate")
@RUN_FILE
@OVERRIDES
@click.option("--ranks", default=2, show_default=True, type=int, help="How many ranks train together.")
@click.option("--steps", default=20, show_default=True, type=int, help="Of each rung; the later half is timed.")
@click.option("--repeat", default=1, show_default=True, type=int, help="Runs of each rung, the rungs taking turns.")
@click.option("--rungs", help="Only these, with commas between.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("ablate"),
    show_default=True,
    help="The folder for what is measured; it goes on from what is there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of a table.")
def ablate(
    run_yaml: Path,
    overrides: tuple[str, ...],
    ranks: int,
    steps: int,
    repeat: int,
    rungs: str | None,
    out: Path,
    as_json: bool,
) -> int:
    """Train RUN_YAML with one technique after the other, and say what each gives."""
    from ascend_moe_train.bench.ablate import Asked, climb
    from ascend_moe_train.bench.ablate_result import CHARTS, ON_SCREEN, result_of
    from ascend_moe_train.cli.environment import prepare_environment

    prepare_environment()
    names = tuple(name.strip() for name in rungs.split(",")) if rungs is not None else ()
    asked = Asked(run_yaml=run_yaml, overrides=overrides, ranks=ranks, steps=steps, repeat=repeat, rungs=names, out=out)
    ladder = climb(asked, lambda line: click.echo(line, err=True))
    result = result_of(ladder, asked, shown_command())
    write(out, result, CHARTS)
    show(result, ON_SCREEN, out, as_json=as_json)
    if ladder.exit_code is not None:
        return ladder.exit_code
    return EXIT_FAILED if ladder.failed else 0


def shown_command() -> str:
    """The command line of this process, as a shell would take it."""
    return shlex.join(["amt", *sys.argv[1:]])


def write(out: Path, result: "Result", charts: Sequence["Chart"]) -> None:
    """Puts the result there, as JSON, Markdown and a page, each whole."""
    from ascend_moe_train.bench.page import page
    from ascend_moe_train.bench.result import markdown, result_json
    from ascend_moe_train.cli.out_file import write_out

    out.mkdir(parents=True, exist_ok=True)
    write_out(out / f"{result.kind}.json", result_json(result))
    write_out(out / f"{result.kind}.md", markdown(result))
    write_out(out / f"{result.kind}.html", page(result, charts))


def show(result: "Result", keys: Sequence[str], out: Path, *, as_json: bool) -> None:
    """Prints the result: those columns of it, or all as JSON."""
    from ascend_moe_train.bench.result import result_json, table_of
    from ascend_moe_train.cli.long_run import print_table

    if as_json:
        click.echo(result_json(result), nl=False)
        return
    print_table(table_of(result, keys))
    click.echo(f"page: {out / f'{result.kind}.html'}")
