"""`amt check`."""

import json
from pathlib import Path

import click

from ascend_moe_train.cli.config import OVERRIDES, RUN_FILE, whole_run
from ascend_moe_train.cli.out_file import check_out, write_out


@click.group("check")
def command() -> None:
    """Find out without a device whether a run's graphs hold together, and whether installed versions fit."""


@command.command("graph")
@RUN_FILE
@click.option("--world-size", required=True, type=int, help="How many devices the run is spread over.")
@click.option("--rank", default=0, show_default=True, help="Whose graphs are compiled.")
@click.option(
    "--target", type=click.Choice(["ascend", "cpu"]), default="ascend", show_default=True, help="Whose kernels."
)
@OVERRIDES
@click.option("--out", type=click.Path(path_type=Path), help="Also write the report to this file.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with every kind of operator.")
def graph(
    run_yaml: Path,
    world_size: int,
    rank: int,
    target: str,
    overrides: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Compile the training step of RUN_YAML as a rank of such a cluster would, up to where a device is needed."""
    from ascend_moe_train.cli.environment import prepare_environment

    prepare_environment()
    if out is not None:
        check_out(out)
    config = whole_run(run_yaml, overrides)
    from ascend_moe_train.train.graph_check import Target, check_graphs
    from ascend_moe_train.train.graph_report import report, report_text

    wanted: Target = "ascend" if target == "ascend" else "cpu"
    shown = report(
        check_graphs(config, world_size, rank, wanted, lambda name: click.echo(f"compiling {name}", err=True)), wanted
    )
    text = json.dumps(shown, indent=2) if as_json else "\n".join(report_text(shown))
    click.echo(text)
    if out is not None:
        write_out(out, text + "\n")


@command.command("versions")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def versions(as_json: bool) -> None:
    """Which Python, MindSpore, CANN, driver and firmware this host has; exit code 2 if two do not fit."""
    from ascend_moe_train.cluster.version_files import read_host
    from ascend_moe_train.cluster.version_report import report, report_text
    from ascend_moe_train.cluster.versions import check_versions, misfits
    from ascend_moe_train.errors import ConfigError

    host = read_host()
    findings = check_versions(host)
    shown = report(host, findings)
    click.echo(json.dumps(shown, indent=2) if as_json else "\n".join(report_text(shown)))
    if (complaint := misfits(findings)) is not None:
        raise ConfigError(complaint)
