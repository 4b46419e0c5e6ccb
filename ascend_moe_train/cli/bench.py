"""`amt bench`."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ascend_moe_train.cli.config import OVERRIDES, RUN_FILE, whole_run
from ascend_moe_train.errors import ConfigError

if TYPE_CHECKING:
    from ascend_moe_train.bench.calibrate import Asked, What
    from ascend_moe_train.bench.probes import DispatchSizes, Probed
    from ascend_moe_train.bench.result import Chart, Result
    from ascend_moe_train.bench.runs import Ended

EXIT_FAILED = 1


RANKS = click.option("--ranks", type=int, help="How many at the same time; one for each core without it.")
ROUNDS = click.option("--rounds", default=10, show_default=True, type=int, help="Of each measurement.")


def out_option(name: str) -> Callable[[Any], Any]:
    """--out, a folder of that name unless given."""
    kind = click.Path(path_type=Path)
    return click.option("--out", type=kind, default=Path(name), show_default=True, help="The folder for the results.")


AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of a table.")
NAME = click.option("--name", default="here", show_default=True, help="What the hardware file calls this machine.")


@click.group("bench")
def command() -> None:
    """Measure this machine: what techniques of training give on it, and what the planner needs."""


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


@command.command("step")
@RUN_FILE
@OVERRIDES
@click.option("--ranks", default=1, show_default=True, type=int, help="How many ranks train together.")
@click.option("--steps", default=20, show_default=True, type=int, help="The later half is timed.")
@click.option("--cluster", help="Set beside it what `amt plan` predicts for that, such as 2xhere.")
@click.option("--hardware", type=click.Path(path_type=Path), help="Devices of your own, in YAML, for --cluster.")
@out_option("step")
@AS_JSON
def step(
    run_yaml: Path,
    overrides: tuple[str, ...],
    ranks: int,
    steps: int,
    cluster: str | None,
    hardware: Path | None,
    out: Path,
    as_json: bool,
) -> int:
    """Measure the training step of RUN_YAML: tokens/s, FLOP/s, memory, communication."""
    from ascend_moe_train.bench.step import CHARTS, Asked, measure, predicted, prepared, step_result
    from ascend_moe_train.cli.environment import prepare_environment
    from ascend_moe_train.planner.hardware import catalogue, parse_cluster

    prepare_environment()
    if cluster is None and hardware is not None:
        raise ConfigError(f"--hardware {hardware} has no effect without --cluster: name one of its devices, as 2xNAME")
    known = parse_cluster(cluster, catalogue(hardware)) if cluster is not None else None
    if known is not None and known.num_devices != ranks:
        raise ConfigError(f"--cluster {cluster}: {known.num_devices} devices for --ranks {ranks}: must be as many")
    asked = Asked(run_yaml=run_yaml, overrides=overrides, ranks=ranks, steps=steps, out=out, cluster=known)
    config = prepared(asked)
    if known is not None:
        predicted(config, known)  # what it cannot predict is said before anything runs
    found, ended = measure(config, asked, lambda line: click.echo(line, err=True))
    if found is None:
        return _not_measured(ended)
    _finish(step_result(config, found, asked, shown_command()), CHARTS, out, as_json)
    return 0


def _not_measured(ended: "Ended") -> int:
    """Says why, and what the exit code is."""
    if ended.problem is not None:
        click.echo(f"error: {ended.problem}", err=True)
    return ended.stopped or EXIT_FAILED


@command.command("data")
@RUN_FILE
@OVERRIDES
@click.option("--ranks", default=1, show_default=True, type=int, help="Of how many one reads.")
@click.option("--rounds", default=100, show_default=True, type=int, help="How many batches.")
@out_option("data")
@AS_JSON
def data(run_yaml: Path, overrides: tuple[str, ...], ranks: int, rounds: int, out: Path, as_json: bool) -> None:
    """Measure how fast a rank gets the batches of RUN_YAML."""
    from ascend_moe_train.bench.host import CHARTS, data_result

    _finish(data_result(whole_run(run_yaml, overrides), ranks, rounds, shown_command()), CHARTS, out, as_json)


@command.command("checkpoint")
@RUN_FILE
@OVERRIDES
@click.option("--rounds", default=3, show_default=True, type=int, help="How often it is written and read.")
@out_option("checkpoint")
@AS_JSON
def checkpoint(run_yaml: Path, overrides: tuple[str, ...], rounds: int, out: Path, as_json: bool) -> None:
    """Measure writing and reading a checkpoint of the size of RUN_YAML, in the folder for the results."""
    from ascend_moe_train.bench.host import CHARTS, WORK, checkpoint_result
    from ascend_moe_train.cli.long_run import stop_cleanly

    config = whole_run(run_yaml, overrides)
    with stop_cleanly():
        result = checkpoint_result(config, rounds, out / WORK, shown_command())
    _finish(result, CHARTS, out, as_json)


def _finish(result: "Result", charts: Sequence["Chart"], out: Path, as_json: bool) -> None:
    write(out, result, charts)
    show(result, [column.key for column in result.columns], out, as_json=as_json)


@command.command("compare")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@out_option("compare")
@AS_JSON
def compare(first: Path, second: Path, out: Path, as_json: bool) -> None:
    """Set two results of the same benchmark, or two of `amt plan --json`, side by side: two machines, or two
    versions."""
    from ascend_moe_train.bench.compare import charts_of, compared

    result = compared(first, second, shown_command())
    _finish(result, charts_of(result), out, as_json)


@command.command("comm")
@RANKS
@ROUNDS
@NAME
@out_option("comm")
@AS_JSON
def comm(ranks: int | None, rounds: int, name: str, out: Path, as_json: bool) -> int:
    """Measure collectives between ranks over sizes and groups, and fit latency and bandwidth."""
    return _probe(("comm",), ranks, rounds, name, out, as_json)


@command.command("gemm")
@RANKS
@ROUNDS
@out_option("gemm")
@AS_JSON
def gemm(ranks: int | None, rounds: int, out: Path, as_json: bool) -> int:
    """Measure matrix products, attention and operators that memory rules."""
    return _probe(("work",), ranks, rounds, None, out, as_json)


@command.command("dispatch")
@RUN_FILE
@OVERRIDES
@RANKS
@ROUNDS
@out_option("dispatch")
@AS_JSON
def dispatch(
    run_yaml: Path, overrides: tuple[str, ...], ranks: int | None, rounds: int, out: Path, as_json: bool
) -> int:
    """Measure the way of a micro-batch of RUN_YAML through a layer of experts, by each set of kernels."""
    from ascend_moe_train.bench import calibrate as made

    sizes = made.dispatch_sizes(whole_run(run_yaml, overrides))
    found, asked, code = _probed(("dispatch",), ranks, rounds, out, sizes)
    if found is None:
        return code
    _finish(made.dispatch_result(found, asked, shown_command()), made.DISPATCH_CHARTS, out, as_json)
    return 0


@command.command("calibrate")
@RANKS
@ROUNDS
@NAME
@out_option("calibrate")
@AS_JSON
def calibrate(ranks: int | None, rounds: int, name: str, out: Path, as_json: bool) -> int:
    """Measure this machine and write it as a hardware file that `amt plan` reads."""
    return _probe(("comm", "work"), ranks, rounds, name, out, as_json)


def _probed(
    what: "tuple[What, ...]", ranks: int | None, rounds: int, out: Path, sizes: "DispatchSizes | None" = None
) -> "tuple[Probed | None, Asked, int]":
    """What ranks found; without that, the exit code, and why is said."""
    from ascend_moe_train.bench.calibrate import Asked, probed
    from ascend_moe_train.cli.environment import prepare_environment
    from ascend_moe_train.cluster.cores import num_cores

    prepare_environment()
    asked = Asked(ranks=num_cores() if ranks is None else ranks, rounds=rounds, out=out)
    found, ended = probed(what, asked, lambda line: click.echo(line, err=True), sizes)
    return found, asked, 0 if found is not None else _not_measured(ended)


def _probe(what: "tuple[What, ...]", ranks: int | None, rounds: int, name: str | None, out: Path, as_json: bool) -> int:
    from ascend_moe_train.bench import calibrate as made
    from ascend_moe_train.cli.out_file import write_out

    if name is not None:
        made.check_name(name)
    command = shown_command()
    found, asked, code = _probed(what, ranks, rounds, out)
    if found is None:
        return code
    results: list[tuple[Result, Sequence[Chart]]] = []
    if found.comm:
        results.append((made.comm_result(found, asked, command), made.COMM_CHARTS))
    if found.work:
        results.append((made.work_result(found, asked, command), made.WORK_CHARTS))
    if name is not None and found.work:
        results.append((made.calibrate_result(found, asked, name, command), made.ENTRY_CHARTS))
    for result, charts in results:
        write(out, result, charts)
    if name is not None:
        write_out(out / made.HARDWARE, made.hardware_text(found, name, command))
    last = results[-1][0]
    show(last, [column.key for column in last.columns], out, as_json=as_json)
    return 0


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
