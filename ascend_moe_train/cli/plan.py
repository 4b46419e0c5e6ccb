"""`amt plan`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ascend_moe_train.cli.config import OVERRIDES, RUN_FILE, whole_run
from ascend_moe_train.cli.out_file import check_outs, write_out
from ascend_moe_train.errors import ConfigError

if TYPE_CHECKING:
    from ascend_moe_train.cli.plan_job import Wanted
    from ascend_moe_train.planner.hardware import Cluster
    from ascend_moe_train.planner.plan import Imbalance
    from ascend_moe_train.planner.search import Found

OBJECTIVES = ("throughput", "memory", "devices", "model", "cost")
EXPORTS = ("mindspore", "mindformers", "mindspeed-llm", "megatron")
MAX_TOP = 100

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _job_options(command: _Command) -> _Command:
    """What is trained, on what."""
    options = (
        click.option("--model", help="A preset, a run file (.yaml), or a folder of a model."),
        click.option("--cluster", help="How many of which device, such as 64x910B, 256xH100 or 8xcpu."),
        click.option("--hardware", type=click.Path(path_type=Path), help="Devices of your own, in YAML."),
        click.option("--seq-len", type=int, help="Tokens of a sequence."),
        click.option("--global-sequences", type=int, help="Sequences of an optimizer step."),
        click.option("--precision", help="fp32, fp16, bf16 or fp8."),
        click.option("--engine", help="Whose memory is predicted: ours (default), megatron or zero."),
        click.option("--imbalance", type=float, help="Tokens of the busiest device through the mean, at worst."),
        click.option(
            "--allow", multiple=True, help="Also try KEY=VALUE of section parallel, such as compress.method=int8."
        ),
        click.option("--data", type=click.Path(path_type=Path), help="A corpus for --out, of `amt data prepare`."),
        OVERRIDES,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group("plan", invoke_without_command=True)
@_job_options
@click.option("--objective", default="throughput", show_default=True, help=f"{', '.join(OBJECTIVES)}.")
@click.option("--top", default=5, show_default=True, help="How many plans to show.")
@click.option("--out", type=click.Path(path_type=Path), help="Write a run file that `amt train` and `launch` take.")
@click.option("--export", "system", help=f"Print the parallel part for {', '.join(EXPORTS)}.")
@click.option("--html", "page_path", type=click.Path(path_type=Path), help="Write a page with tables and drawings.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write the step as a Chrome trace.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Find the best way to spread a model over devices, with predicted memory and time."""
    if context.invoked_subcommand is not None:
        given = [name for name, value in options.items() if _is_given(context, name) and value is not None]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')} comes after `{context.invoked_subcommand}`")
        return
    _plan(options)


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _plan(options: dict[str, Any]) -> None:
    from ascend_moe_train.planner.explain import refusal

    if options["objective"] not in OBJECTIVES:
        raise ConfigError(f"--objective {options['objective']!r} does not exist: there are {', '.join(OBJECTIVES)}")
    if options["system"] is not None and options["system"] not in EXPORTS:
        raise ConfigError(f"--export {options['system']!r} is not known: there are {', '.join(EXPORTS)}")
    if not 1 <= options["top"] <= MAX_TOP:
        raise ConfigError(f"--top {options['top']} is not possible: must be from 1 to {MAX_TOP}")
    check_outs({"--out": options["out"], "--html": options["page_path"], "--trace": options["trace"]})
    if options["engine"] is None and options["system"] is not None and options["out"] is None:
        options["engine"] = "megatron"
    asked, cluster, imbalance = _asked(options)
    if options["out"] is not None and not asked.has_data:
        raise ConfigError(
            f"--out {options['out']}: a run needs data: name a corpus of `amt data prepare` with --data, or a run file "
            "as --model"
        )
    if options["objective"] in ("devices", "model", "cost"):
        asked, cluster = _resized(asked, cluster, imbalance, options)
    found = _searched(asked, cluster, imbalance, options)
    if not found.best:
        raise ConfigError(refusal(asked.job, cluster, imbalance, found))
    _show(asked, cluster, imbalance, found, options)


def _asked(options: dict[str, Any]) -> "tuple[Wanted, Cluster, Imbalance]":
    from ascend_moe_train.cli.plan_job import wanted
    from ascend_moe_train.planner.hardware import catalogue, parse_cluster
    from ascend_moe_train.planner.plan import ENGINES
    from ascend_moe_train.planner.run_file import imbalance_of

    for name in ("model", "cluster"):
        if options[name] is None:
            raise ConfigError(f"--{name} is missing: amt plan --model deepseek_v3 --cluster 64x910B")
    engine = options["engine"] or "ours"
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine!r} is not known: there are {', '.join(ENGINES)}")
    imbalance = imbalance_of(options["imbalance"])
    cluster = parse_cluster(options["cluster"], catalogue(options["hardware"]))
    asked = wanted(
        options["model"],
        cluster,
        overrides=options["overrides"],
        data=options["data"],
        seq_len=options["seq_len"],
        global_sequences=options["global_sequences"],
        precision=options["precision"],
        engine=engine,
        allow=options["allow"],
    )
    cluster.device.peak(asked.job.precision)
    return asked, cluster, imbalance


def _resized(
    asked: "Wanted", cluster: "Cluster", imbalance: "Imbalance", options: dict[str, Any]
) -> "tuple[Wanted, Cluster]":
    """The job and the cluster that the objective is after."""
    from dataclasses import replace

    from ascend_moe_train.planner.sizes import cheapest, largest_model, smallest_cluster

    if options["objective"] == "cost":
        cheap = cheapest(asked.job, cluster, imbalance, 1)
        return asked, cheap[0][0] if cheap else cluster
    if options["objective"] == "devices":
        small = smallest_cluster(asked.job, cluster, imbalance)
        return (asked, cluster) if small is None else (replace(asked, job=small.job), small.cluster)
    large = largest_model(asked.job, cluster, imbalance)
    if large is None:
        return asked, cluster
    tree = {**asked.tree, "model": large.job.model.model_dump(mode="json")}
    return replace(asked, job=large.job, tree=tree), cluster


def _searched(asked: "Wanted", cluster: "Cluster", imbalance: "Imbalance", options: dict[str, Any]) -> "Found":
    from ascend_moe_train.planner.search import search_among
    from ascend_moe_train.planner.space import Space

    is_elsewhere = options["system"] is not None and options["out"] is None
    limits = {"schedules": ("1f1b", "interleaved")} if is_elsewhere else {}  # those that all of EXPORTS have
    return search_among(
        asked.job,
        cluster,
        asked.techniques,
        objective="memory" if options["objective"] == "memory" else "throughput",
        imbalance=imbalance,
        space=Space.of(asked.job, cluster, **limits),
        top=options["top"],
    )


def _show(asked: "Wanted", cluster: "Cluster", imbalance: "Imbalance", found: "Found", options: dict[str, Any]) -> None:
    from ascend_moe_train.planner.export import export
    from ascend_moe_train.planner.report import as_json, report_lines

    lines = report_lines(asked.job, cluster, imbalance, asked.name, found)
    best = found.best[0]
    tried = dict.fromkeys(word for each in asked.techniques for word in each.words)
    if left := [word for word in tried if word not in best.plan.techniques.words]:
        lines.append(f"tried, and not in plan 1: {', '.join(left)}")
    exported = export(asked.job, best.plan, options["system"]) if options["system"] is not None else None
    _write_files(asked, cluster, found, lines, options)
    if options["as_json"]:
        shown = as_json(asked.job, cluster, asked.name, found)
        click.echo(json.dumps(shown if exported is None else {**shown, "export": exported}, indent=2))
        return
    click.echo(exported if exported is not None else "\n".join(lines), nl=exported is None)


def _write_files(
    asked: "Wanted", cluster: "Cluster", found: "Found", lines: list[str], options: dict[str, Any]
) -> None:
    from ascend_moe_train.planner.explain import plan_words
    from ascend_moe_train.planner.page import page, timeline_of
    from ascend_moe_train.planner.run_file import imbalance_of, planned, run_text
    from ascend_moe_train.planner.trace import chrome_trace
    from ascend_moe_train.train.inputs import model_of_run

    best, title = found.best[0], f"{asked.name} on {cluster.name}"
    if options["out"] is not None:
        imbalance = imbalance_of(options["imbalance"])
        tree = planned(asked.tree, asked.job, best.plan, str(options["model"]), imbalance, model_of_run)
        heading = f"planned by `amt plan` for {cluster.name}: {plan_words(best.plan)}"
        write_out(options["out"], run_text(tree, heading))
        ranks = f"amt launch --ranks {cluster.num_devices} train {options['out']}"
        lines.append(f"\n{options['out']}: written; to run it: {ranks}")
    if options["page_path"] is not None:
        text = page(asked.job, cluster, title, found.best, found.seen, "\n".join(lines))
        write_out(options["page_path"], text)
    if options["trace"] is not None:
        write_out(options["trace"], json.dumps(chrome_trace(timeline_of(asked.job, best), title)))


@command.command("check")
@RUN_FILE
@click.option("--cluster", required=True, help="How many of which device, such as 64x910B or 8xcpu.")
@click.option("--hardware", type=click.Path(path_type=Path), help="Devices of your own, in YAML.")
@click.option("--imbalance", type=float, help="Tokens of the busiest device through the mean, at worst.")
@OVERRIDES
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def check(
    run_yaml: Path,
    cluster: str,
    hardware: Path | None,
    imbalance: float | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Judge the layout that RUN_YAML has: does it fit, how long does a step take; exit code 2 if it does not fit."""
    from ascend_moe_train.planner.hardware import catalogue, parse_cluster
    from ascend_moe_train.planner.judge import judged
    from ascend_moe_train.planner.run_file import imbalance_of

    devices = parse_cluster(cluster, catalogue(hardware))
    judgement = judged(whole_run(run_yaml, overrides), devices, imbalance_of(imbalance), str(run_yaml))
    click.echo(json.dumps(judgement.shown, indent=2) if as_json else "\n".join(judgement.lines))
    if judgement.complaint is not None:
        raise ConfigError(judgement.complaint)


@command.command("sweep")
@_job_options
@click.option(
    "--vary", required=True, help="What to vary: devices, seq-len, micro-sequences, imbalance, link, cluster."
)
@click.option("--over", required=True, help="Its values, separated by commas, such as 64,128,256 or 64x910B,64xA100.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def sweep(vary: str, over: str, as_json: bool, **options: Any) -> None:
    """The best plan for each of several values: sizes of the cluster, sequence lengths, clusters and so on."""
    from ascend_moe_train.cli.plan_sweep import swept

    options |= {"objective": "throughput", "top": 1}
    lines, shown = swept(vary, over, options, _asked)
    click.echo(json.dumps(shown, indent=2) if as_json else "\n".join(lines))
