"""`amt profile`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascend_moe_train.cli.out_file import check_outs, write_out
from ascend_moe_train.errors import ConfigError

if TYPE_CHECKING:
    from ascend_moe_train.profile.analysis import Analysis
    from ascend_moe_train.profile.load import Capture
    from ascend_moe_train.profile.terms import Prediction
    from ascend_moe_train.profile.thresholds import Threshold

EXIT_FAILED = 1
FOLDER = click.argument("folder", type=click.Path(path_type=Path))
NO_CACHE = click.option("--no-cache", is_flag=True, help="Neither use nor keep what was read of large ranks before.")


@click.group("profile")
def command() -> None:
    """Say from a profiler's folder what a training step does, what is wrong with it and what to change."""


@command.command("show")
@FOLDER
@click.option("--run", "run_yaml", type=click.Path(path_type=Path), help="The profiled run: what was predicted.")
@click.option("--cluster", help="With --run, how many of which device it ran on, such as 64x910B.")
@click.option("--hardware", type=click.Path(path_type=Path), help="Devices of your own, in YAML.")
@click.option("--html", "page_path", type=click.Path(path_type=Path), help="Write a page with tables and drawings.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write all ranks on one time line, as a Chrome trace.")
@NO_CACHE
@click.option("--json", "as_json", is_flag=True, help="As JSON, with formula and source of every figure.")
def show(
    folder: Path,
    run_yaml: Path | None,
    cluster: str | None,
    hardware: Path | None,
    page_path: Path | None,
    trace: Path | None,
    no_cache: bool,
    as_json: bool,
) -> None:
    """What is wrong with the step in FOLDER, in figures, and what to do, by estimated gain."""
    if page_path is not None or trace is not None:
        check_outs({"--html": page_path, "--trace": trace}, [run_yaml, hardware, *_files(folder)])
    if (run_yaml is None) != (cluster is None):
        raise ConfigError("--run and --cluster go together: --run run.yaml --cluster 64x910B")
    analysis, prediction = _analysed(folder, no_cache), None
    if run_yaml is not None and cluster is not None:
        analysis, prediction = _predicted(analysis.capture, run_yaml, cluster, hardware)
    if page_path is not None:
        from ascend_moe_train.profile.page import page

        write_out(page_path, page(analysis, prediction))
    if trace is not None:
        from ascend_moe_train.profile.merged_trace import merged_trace

        write_out(trace, json.dumps(merged_trace(analysis)))
    if as_json:
        from dataclasses import asdict

        from ascend_moe_train.profile.analysis import as_json as shown

        more = {} if prediction is None else {"predicted": asdict(prediction)}
        click.echo(json.dumps({**shown(analysis), **more}, indent=2))
        return
    from ascend_moe_train.profile.screen import console, screen

    console().print(screen(analysis, prediction))


def _files(folder: Path) -> list[Path]:
    from ascend_moe_train.profile.find import find_sources

    return [path for source in find_sources(folder)[0] for path in source.paths()]


def _predicted(
    capture: "Capture", run_yaml: Path, cluster: str, hardware: Path | None
) -> "tuple[Analysis, Prediction]":
    """The analysis with what the run file knows of ranks, and with the planner's advice among the other."""
    from dataclasses import replace

    from ascend_moe_train.cli.config import whole_run
    from ascend_moe_train.planner.hardware import catalogue, parse_cluster
    from ascend_moe_train.profile.analysis import analyse
    from ascend_moe_train.profile.predicted import known_layout, predict

    run, devices = whole_run(run_yaml, ()), parse_cluster(cluster, catalogue(hardware))
    analysis = analyse(capture, known=known_layout(run, devices))
    prediction = predict(run, devices, analysis)
    if prediction.advice is None:
        return analysis, prediction
    advice = sorted([*analysis.advice, prediction.advice], key=lambda each: -each.gain_ms)
    return replace(analysis, advice=tuple(advice)), prediction


@command.command("compare")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@NO_CACHE
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def compare(before: Path, after: Path, no_cache: bool, as_json: bool) -> None:
    """Two captures beside each other: the step, collectives, operators by count and by shape."""
    from dataclasses import asdict

    from ascend_moe_train.profile.compare import compare as compared
    from ascend_moe_train.profile.compare import comparison_screen

    found = compared(_analysed(before, no_cache), _analysed(after, no_cache))
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
        return
    from ascend_moe_train.profile.screen import console

    console().print(comparison_screen(found))


@command.command("check")
@FOLDER
@click.option("--computing", type=float, help="Computing through the step, at least.")
@click.option("--exposed-comm", type=float, help="Communication that nothing hides through the step, at most.")
@click.option("--cache-hit", type=float, help="Hit rate of the cache, at least.")
@click.option("--free", type=float, help="Time in which the device does nothing through the step, at most.")
@click.option("--p2p-exposed", type=float, help="Messages between stages that nothing hides through the step, at most.")
@click.option("--host-bound", type=float, help="Waiting for launches through the step, at most.")
@click.option("--cube-utilisation", type=float, help="How long cube cores are occupied in their kernels, at least.")
@click.option("--memory-bound", type=float, help="Kernels bound by loading through all kernels, at most.")
@NO_CACHE
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def check(folder: Path, no_cache: bool, as_json: bool, **bounds: float | None) -> int:
    """Judge FOLDER against thresholds, as shares such as 0.15, on the worst rank; exit code 1 if one fails.

    Without any, against 0.85 computing, 0.15 exposed communication and 0.90 cache hits, as far as they were collected.
    """
    from dataclasses import asdict

    from ascend_moe_train.profile.analysis import analyse
    from ascend_moe_train.profile.load import load

    thresholds = _thresholds(bounds)
    verdicts = analyse(load(folder, cache=_cache(no_cache)), thresholds).verdicts
    is_asked = any(value is not None for value in bounds.values())
    failed = [each for each in verdicts if each.passed is False or (each.passed is None and is_asked)]
    if as_json:
        click.echo(json.dumps({"passed": not failed, "verdicts": [asdict(each) for each in verdicts]}, indent=2))
    else:
        click.echo("\n".join(each.words for each in verdicts))
    return EXIT_FAILED if failed else 0


def _thresholds(bounds: dict[str, float | None]) -> "tuple[Threshold, ...]":
    from ascend_moe_train.profile.thresholds import DEFAULTS, METRICS, Threshold

    given = {metric: share for metric, share in bounds.items() if share is not None}
    for metric, share in given.items():
        if not 0 <= share <= 1:
            raise ConfigError(f"--{metric.replace('_', '-')} {share:g} is no share: must be from 0 to 1, such as 0.15")
    own = tuple(Threshold(metric=name, share=share, at_least=METRICS[name]) for name, share in given.items())
    return own or DEFAULTS


def _analysed(folder: Path, no_cache: bool) -> "Analysis":
    from ascend_moe_train.profile.analysis import analyse
    from ascend_moe_train.profile.load import load

    return analyse(load(folder, cache=_cache(no_cache)))


def _cache(no_cache: bool) -> Path | None:
    if no_cache:
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "ascend_moe_train" / "profile"
