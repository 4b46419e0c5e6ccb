"""`amt doctor`."""

import json
import sys
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from ascend_moe_train.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ascend_moe_train.doctor.rule import Lang
    from ascend_moe_train.doctor.verdict import Verdict

EXIT_FAULT = 1
PIPE = Path("-")

LANG = click.option("--lang", default="en", show_default=True, help="en or zh.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")


class DoctorGroup(click.Group):
    """`amt doctor PATHS...` is `amt doctor diagnose PATHS...`: a path needs no verb before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts the verb there."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["diagnose", *args]
        return super().parse_args(ctx, args)


@click.group("doctor", cls=DoctorGroup)
def command() -> None:
    """Find in logs what happened, the first failing rank and the fix; explain codes."""


@command.command("diagnose")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@LANG
@click.option("--all", "with_all", is_flag=True, help="The runners-up too.")
@click.option("--html", "page_path", type=click.Path(path_type=Path), help="Write a page with a timeline over ranks.")
@click.option("--run", "run_yaml", type=click.Path(path_type=Path), help="The run's file: planned memory beside it.")
@click.option("--cluster", help="With --run: how many of which device, such as 64x910B.")
@AS_JSON
def diagnose(
    paths: tuple[Path, ...],
    lang: str,
    with_all: bool,
    page_path: Path | None,
    run_yaml: Path | None,
    cluster: str | None,
    as_json: bool,
) -> int:
    """Say what happened by the logs in PATHS: a folder, files, a tar archive, - for a pipe; exit code 1 for a fault."""
    from ascend_moe_train.cli.long_run import progress_bar
    from ascend_moe_train.cli.out_file import check_outs, write_out
    from ascend_moe_train.doctor.diagnose import diagnose as diagnosed
    from ascend_moe_train.doctor.page import page
    from ascend_moe_train.doctor.rule import rule_book
    from ascend_moe_train.doctor.words import as_json as verdict_json
    from ascend_moe_train.doctor.words import verdict_lines

    language = _lang(lang)
    if (run_yaml is None) != (cluster is None):
        raise ConfigError("--run and --cluster belong together: amt doctor LOGS --run run.yaml --cluster 64x910B")
    files = [path for path in paths if path != PIPE]
    check_outs({"--html": page_path}, [run_yaml, *files])
    pipe = _standard_input() if len(files) < len(paths) else None
    with progress_bar(silent=as_json) as tell:
        verdict = diagnosed(files, pipe=pipe, tell=tell)
    book = rule_book()
    if page_path is not None:
        write_out(page_path, page(verdict, book, language))
    sums = _memory_lines(verdict, run_yaml, cluster) if run_yaml is not None and cluster is not None else []
    if as_json:
        shown = verdict_json(verdict, book) | ({"memory": sums} if sums else {})
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join([*verdict_lines(verdict, book, language, with_all=with_all), *sums]))
    return EXIT_FAULT if verdict.cause is not None else 0


def _memory_lines(verdict: "Verdict", run_yaml: Path, cluster: str) -> list[str]:
    """The planner's sum beside what was observed."""
    from ascend_moe_train.cli.config import whole_run
    from ascend_moe_train.doctor.memory_sum import memory_lines
    from ascend_moe_train.planner.hardware import catalogue, parse_cluster

    return memory_lines(
        verdict, lambda overrides: whole_run(run_yaml, overrides), parse_cluster(cluster, catalogue(None))
    )


@command.command("explain", context_settings={"ignore_unknown_options": True})  # of -9, which is no option
@click.argument("code")
@LANG
@AS_JSON
def explain(code: str, lang: str, as_json: bool) -> None:
    """Say what CODE means (EI0006, 507011, 0x80e18400, 137, SIGKILL ...), what lies behind it and what to do."""
    from ascend_moe_train.doctor.explain import explained, explained_json
    from ascend_moe_train.doctor.rule import rule_book

    language, book = _lang(lang), rule_book()
    if as_json:
        click.echo(json.dumps(explained_json(code, book), indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(explained(code, book, language)))


@command.command("watch")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--every", "every_s", default=5.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once, and end; exit code 1 if there is something to say.")
@AS_JSON
def watch(run: Path, every_s: float, once: bool, as_json: bool) -> int:
    """Warn of stalls and drifts of the run in the folder RUN while it goes on, until Ctrl-C."""
    from ascend_moe_train.doctor.rule import rule_book
    from ascend_moe_train.doctor.watch import Watch, watching

    if not 0.1 <= every_s <= 86_400:
        raise ConfigError(f"--every {every_s:g} is not possible: must be from 0.1 to 86400 seconds")
    watched = Watch(run_dir=run, book=rule_book())
    lines = watched.look() if once else watching(watched, every_s)
    count = 0
    for line in lines:
        count += 1
        click.echo(json.dumps({"warning": line}, ensure_ascii=False) if as_json else line)
    return EXIT_FAULT if count else 0


def _standard_input() -> BufferedIOBase:
    if sys.stdin is None:
        raise DataError("-: there is no standard input")
    return cast(BufferedIOBase, sys.stdin.buffer)


def _lang(lang: str) -> "Lang":
    from ascend_moe_train.doctor.rule import LANGS

    if lang not in LANGS:
        raise ConfigError(f"--lang {lang!r} is not known: there are {', '.join(LANGS)}")
    return lang
