"""`amt selftest`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ascend_moe_train.selftest.results import Result
    from ascend_moe_train.selftest.suite import Report

EXIT_FAILED = 1
PAGE, DATA = "report.html", "report.json"


@click.command("selftest")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "ascend"]),
    default="auto",
    show_default=True,
    help="Which; auto takes Ascend where MindSpore finds it.",
)
@click.option("--ranks", default=2, show_default=True, type=int, help="How many talk to each other.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["kernels", "collectives", "training"]),
    help="Leave out the rest; may be given again.",
)
@click.option(
    "--limit",
    "limit_s",
    default=180,
    show_default=True,
    type=click.IntRange(1, 86_400),
    help="Seconds that one check may take.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("selftest"),
    show_default=True,
    help=f"The folder for {PAGE} and {DATA}.",
)
@click.option("--json", "as_json", is_flag=True, help=f"Print what is in {DATA} instead of a table.")
def command(device: str, ranks: int, only: tuple[str, ...], limit_s: int, out: Path, as_json: bool) -> int:
    """Check this machine's kernels, collectives and training, and write a page for a bug report."""
    import tempfile

    from ascend_moe_train.cluster.mpiexec import check_ranks
    from ascend_moe_train.selftest.suite import KINDS, Asked, run_suite
    from ascend_moe_train.selftest.words import as_json as report_json
    from ascend_moe_train.selftest.words import line, verdict

    check_ranks(ranks)
    make_out(out)
    chosen = tuple(kind for kind in KINDS if not only or kind in only)
    asked = Asked(device=device, ranks=ranks, only=chosen, limit_s=float(limit_s))

    def show(result: "Result") -> None:
        if not as_json:
            click.echo(line(result))

    with tempfile.TemporaryDirectory(prefix="amt-selftest-") as folder:
        report = run_suite(asked, Path(folder), show, lambda found: write(out, found))
    if as_json:
        click.echo(json.dumps(report_json(report), indent=2))
    else:
        click.echo(f"{verdict(report)}\npage: {out / PAGE}")
    return exit_code(report)


def exit_code(report: "Report") -> int:
    """1 if a check has failed; as a shell has it if a signal ended it before that."""
    import signal

    if report.has_failed:
        return EXIT_FAILED
    return 0 if report.stopped_by is None else 128 + signal.Signals[report.stopped_by]


def make_out(out: Path) -> None:
    """The folder of the page. Raises DataError: there can be none."""
    from ascend_moe_train.errors import DataError

    if out.exists() and not out.is_dir():
        raise DataError(f"--out {out}: is a file, a folder is needed")
    if not out.parent.is_dir():
        raise DataError(f"--out {out}: there is no folder {out.parent}")
    out.mkdir(exist_ok=True)


def write(out: Path, report: "Report") -> None:
    """Puts page and data there, each whole."""
    from ascend_moe_train.cli.out_file import write_out
    from ascend_moe_train.selftest.page import page
    from ascend_moe_train.selftest.words import as_json as report_json

    write_out(out / PAGE, page(report))
    write_out(out / DATA, json.dumps(report_json(report), indent=2) + "\n")
