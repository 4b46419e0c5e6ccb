"""`amt preflight`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ascend_moe_train.cli.config import OVERRIDES
from ascend_moe_train.cli.finite_range import FiniteRange
from ascend_moe_train.cli.hosts import host_options, hosts_of
from ascend_moe_train.cli.out_file import check_outs, write_out

if TYPE_CHECKING:
    from ascend_moe_train.cluster.hostfile import Hosts
    from ascend_moe_train.cluster.preflight.model import Job
    from ascend_moe_train.cluster.preflight.run import Verdict

EXIT_FOUND = 1
# Of each parameter a checkpoint has the weight and both moments of AdamW, in fp32.
CHECKPOINT_BYTES = 12


@click.command("preflight")
@click.argument("run_yaml", required=False, type=click.Path(path_type=Path))
@host_options
@OVERRIDES
@click.option("--python", help="The Python of the ranks, the same path on all hosts [default: the one that runs here].")
@click.option("--device", type=click.Choice(["auto", "ascend", "cpu"]), help="Whether NPUs are to be there.")
@click.option("--master-port", type=click.IntRange(1024, 65535), default=8118, show_default=True, help="Of msrun.")
@click.option("--folder", help="Where checkpoints go [default: that of RUN_YAML].")
@click.option(
    "--ssh",
    type=click.Choice(["none", "first", "all"]),
    default="none",
    show_default=True,
    help="Which hosts must reach the others over SSH.",
)
@click.option("--mtu", type=click.IntRange(576, 65535), default=9000, show_default=True, help="Bytes of a packet.")
@click.option("--max-offset", type=FiniteRange(0.001, 3600), default=0.5, show_default=True, help="Seconds of a clock.")
@click.option("--min-write", type=FiniteRange(0, 1_000_000), default=50.0, show_default=True, help="MB/s of the disk.")
@click.option("--timeout", type=FiniteRange(0.1, 600), default=5.0, show_default=True, help="Seconds to connect.")
@click.option("--html", "page_path", type=click.Path(path_type=Path), help="Also write a page to this file.")
@click.option("--rank-table", type=click.Path(path_type=Path), help="Also write HCCL's rank table to this file.")
@click.option("--links", is_flag=True, help="Also measure the links between hosts, over TCP.")
@click.option("--hardware-out", type=click.Path(path_type=Path), help="With --links: a hardware file for amt plan.")
@click.option("--fix", is_flag=True, help="Print the commands that would help; nothing is run.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(run_yaml: Path | None, overrides: tuple[str, ...], **options: Any) -> int:
    """Check whether the hosts of a job are fit for it, before it starts.

    Exit code 1: something was found. RUN_YAML says where checkpoints go, and is compared itself.
    """
    import asyncio
    from dataclasses import replace

    from ascend_moe_train.cluster.preflight.links import hardware_text
    from ascend_moe_train.cluster.preflight.report import as_json, page
    from ascend_moe_train.cluster.preflight.run import DEFAULT_LIMITS, ask_all, judge_all
    from ascend_moe_train.cluster.rank_table import rank_table
    from ascend_moe_train.errors import ConfigError

    outs = {"--html": "page_path", "--rank-table": "rank_table", "--hardware-out": "hardware_out"}
    check_outs({option: options[name] for option, name in outs.items()}, [options["hostfile"], run_yaml])
    if options["hardware_out"] is not None and not options["links"]:
        raise ConfigError(f"--hardware-out {options['hardware_out']}: no link is measured without --links")
    hosts = hosts_of(options["hostfile"], options["hosts_from"], options["slots"])
    job = _job(hosts, run_yaml, overrides, options)
    limits = replace(DEFAULT_LIMITS, connect_s=options["timeout"])
    verdict = judge_all(asyncio.run(ask_all(job, limits, _progress)))
    if options["as_json"]:
        click.echo(json.dumps(as_json(verdict), indent=2))
    else:
        _show(verdict, with_fixes=options["fix"])
    if options["page_path"] is not None:
        write_out(options["page_path"], page(verdict))
    if options["hardware_out"] is not None:
        write_out(options["hardware_out"], hardware_text(verdict.seen))
    if options["rank_table"] is not None:
        write_out(options["rank_table"], json.dumps(rank_table(verdict.seen), indent=1) + "\n")
    return EXIT_FOUND if verdict.findings else 0


def _job(hosts: "Hosts", run_yaml: Path | None, overrides: tuple[str, ...], options: dict[str, Any]) -> "Job":
    """Raises ConfigError: a run file that cannot be used, or --set without one."""
    import hashlib

    from ascend_moe_train.cluster.preflight.model import Job
    from ascend_moe_train.cluster.preflight.self_report import code_digest
    from ascend_moe_train.errors import ConfigError

    device, folder, need_bytes, files = options["device"], options["folder"], 0, {}
    if run_yaml is not None:
        from ascend_moe_train.cli.config import counts, whole_run

        config = whole_run(run_yaml, overrides)
        files = {str(run_yaml.absolute()): hashlib.sha256(run_yaml.read_bytes()).hexdigest()}
        device = device or config.run.device
        folder = folder or str((Path(config.run.dir) / "checkpoints").absolute())
        numbers = counts(config)
        parameters = numbers.get("adapter_parameters", numbers["parameters"])
        need_bytes = parameters * CHECKPOINT_BYTES * (config.checkpoint.keep + 1)
    elif overrides:
        raise ConfigError(f"--set {overrides[0]}: there is no RUN_YAML to override")
    for name in ("python", "folder"):
        if options[name] is not None and not (options[name] and options[name].isprintable()):
            what = "has characters that no path has" if options[name] else "is empty"
            raise ConfigError(f"--{name} {options[name]!a}: {what}")
    return Job(
        hosts=hosts,
        python=options["python"] or sys.executable,
        master_port=options["master_port"],
        code=code_digest(),
        device=device or "auto",
        files=files,
        folder=folder,
        need_bytes=need_bytes,
        least_bytes_per_s=options["min_write"] * 1e6,
        mtu_bytes=options["mtu"],
        most_offset_s=options["max_offset"],
        ssh=options["ssh"],
        measures_links=options["links"],
    )


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{done} of {of} hosts have answered", err=True, nl=done == of)


def _show(verdict: "Verdict", *, with_fixes: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from ascend_moe_train.cluster.preflight.links import link_lines
    from ascend_moe_train.cluster.preflight.report import (
        MARKS,
        NOT_ASKED,
        counted,
        finding_lines,
        fix_lines,
        headline,
        matrix,
    )

    names, rows = matrix(verdict)
    table = Table(box=None, pad_edge=False)
    for name in ("check", "passed", *names):
        table.add_column(name, no_wrap=True)
    styles = {"ok": "green", "failed": "bold red", "unknown": "dim"}
    for check, outcomes in rows:
        marks = [
            f"[{styles[each.status]}]{MARKS[each.status]}[/]" if each else f"[dim]{NOT_ASKED}[/]" for each in outcomes
        ]
        table.add_row(check.name, counted(verdict, check), *marks)
    Console().print(table)
    lines = ["", headline(verdict), *finding_lines(verdict), *link_lines(verdict.seen.links)]
    if with_fixes:
        lines += ["", *fix_lines(verdict)]
    click.echo("\n".join(lines))
