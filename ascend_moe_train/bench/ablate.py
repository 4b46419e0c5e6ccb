"""The ladder of `amt bench ablate`, climbed: a training run for each rung, in ranks of its own. Pure."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascend_moe_train.bench.ladder import Case, cases, chosen, start_of
from ascend_moe_train.bench.measured import ASKED, FOUND, Measured, keep, kept_for, read_measured
from ascend_moe_train.cluster.ascend_environment import ascend_environment
from ascend_moe_train.cluster.launch import launch, make_job
from ascend_moe_train.cluster.mpiexec import check_ranks, rank_command
from ascend_moe_train.cluster.msrun import check_devices, num_devices
from ascend_moe_train.cluster.output import labelled
from ascend_moe_train.cluster.supervise import Job
from ascend_moe_train.cluster.verdict import EXITS_STOPPED, Deadlines
from ascend_moe_train.config import RunConfig, load_run, run_to_dict
from ascend_moe_train.errors import ConfigError, DataError, MetricsError
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.train.inputs import model_of_run, open_inputs
from ascend_moe_train.train.metrics import record_of_line, replace_file
from ascend_moe_train.train.run_info import versions

RANK_MODULE = "ascend_moe_train.bench.rung_rank"
KEPT, WORK = "measured", "work"
MIN_STEPS, MAX_STEPS, MAX_REPEAT = 2, 100_000, 100
NO_FIRST_LINE = "it left no result"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user wants: `rungs` are all if there is none, `out` is the folder for what is measured."""

    run_yaml: Path
    overrides: tuple[str, ...]
    ranks: int
    steps: int
    repeat: int
    rungs: tuple[str, ...]
    out: Path


@dataclass(kw_only=True)
class Ladder:
    """What has been found so far, by the name of a rung. `exit_code` is that of a run that was stopped."""

    config: RunConfig
    cases: Sequence[Case]
    measured: dict[str, list[Measured]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None


class _Listener:
    """Keeps what ranks say beside their records, and tells of steps."""

    def __init__(self, say: Say, name: str) -> None:
        self._say, self._name = say, name

    def line(self, rank: int, text: str, *, is_error: bool) -> None:
        """Takes in a line. What is an error is in the logs of the ranks, and in the verdict of the launcher."""
        if record_of_line(text) is None and is_error and rank == 0:
            self._say(f"  {self._name}: {labelled(rank, text)}")


def climb(asked: Asked, say: Say) -> Ladder:
    """Measures every rung `repeat` times, one rung after the other, every second round the other way round.

    What is in `out` of the same question is taken from there. A rung that fails is left, and the others go on; a stop
    leaves the rest. Raises UserError subclasses: a run that cannot begin.
    """
    _check(asked)
    ladder = _prepared(asked)
    configs = {case.rung.name: _config_of(asked, case.overrides) for case in ladder.cases if case.why_not is None}
    for case in ladder.cases:
        if case.why_not is not None:
            say(f"{case.rung.name}: left out: {case.why_not}")
    for number in range(asked.repeat):
        for name in list(configs)[:: 1 if number % 2 == 0 else -1]:
            if name in ladder.failed:
                continue
            case = next(case for case in ladder.cases if case.rung.name == name)
            measured = _measured(asked, case, configs[name], number, ladder, say)
            if ladder.exit_code is not None:
                return ladder
            if measured is not None:
                ladder.measured.setdefault(name, []).append(measured)
    return ladder


def _check(asked: Asked) -> None:
    check_ranks(asked.ranks)
    for name, value, least, most in (
        ("steps", asked.steps, MIN_STEPS, MAX_STEPS),
        ("repeat", asked.repeat, 1, MAX_REPEAT),
    ):
        if not least <= value <= most:
            raise ConfigError(f"--{name} {value}: must be from {least} to {most:,}")
    if asked.out.exists() and not asked.out.is_dir():
        raise DataError(f"--out {asked.out}: is a file, a folder is needed")


def _prepared(asked: Asked) -> Ladder:
    rungs = chosen(asked.rungs)
    given = load_run(asked.run_yaml, asked.overrides, model_of_run)
    start = start_of(given, asked.ranks, asked.steps)
    config = _config_of(asked, start)
    if _is_for_npus(config):
        check_devices(asked.ranks, num_devices())

    def refused(overrides: Sequence[str]) -> str | None:
        try:
            mesh_of(_config_of(asked, overrides), asked.ranks)
        except ConfigError as error:
            return str(error)
        return None

    made = cases(rungs, config, asked.ranks, asked.steps, start, refused)
    if all(case.why_not is not None for case in made):
        raise ConfigError(f"--rungs: nothing is left to measure: {made[0].rung.name}: {made[0].why_not}")
    open_inputs(config)  # what is wrong with the data is said before anything is started
    return Ladder(config=config, cases=made)


def _config_of(asked: Asked, overrides: Sequence[str]) -> RunConfig:
    return load_run(asked.run_yaml, (*asked.overrides, *overrides), model_of_run)


def question(config: RunConfig, case: Case, asked: Asked) -> dict[str, Any]:
    """What a measurement is of, whatever folder it is in."""
    run = run_to_dict(config)
    del run["run"]["dir"]
    same = {name: value for name, value in versions().items() if name != "system"}
    return {"run": run, "ranks": asked.ranks, "steps": asked.steps, "put_in": case.rung.put_in, "versions": same}


def _measured(asked: Asked, case: Case, config: RunConfig, number: int, ladder: Ladder, say: Say) -> Measured | None:
    """One run of a rung, or what is kept of it."""
    name = f"{case.rung.name}.{number}"
    kept, wanted = asked.out / KEPT / f"{name}.json", question(config, case, asked)
    if (before := kept_for(kept, wanted)) is not None:
        say(f"{name}: {_in_words(before)} (kept from before)")
        return before
    folder = asked.out / WORK / name
    run = run_to_dict(config)
    run["run"]["dir"] = str(folder / "run")
    found = folder / FOUND
    try:
        for each in (folder, kept.parent):
            each.mkdir(parents=True, exist_ok=True)
        found.unlink(missing_ok=True)
    except OSError as error:
        raise MetricsError(f"{folder}: {error.strerror or error}") from None
    order = {"run": run, "steps": asked.steps, "put_in": case.rung.put_in}
    replace_file(folder / ASKED, [json.dumps(order).encode()])
    outcome = launch(_job(config, asked.ranks, folder), _Listener(say, name))
    if outcome.exit_code in EXITS_STOPPED:
        ladder.exit_code = outcome.exit_code
        return None
    measured = read_measured(found) if outcome.exit_code == 0 else None
    if measured is None:
        first = next(iter((outcome.message or NO_FIRST_LINE).splitlines()))
        ladder.failed[case.rung.name] = first.removeprefix("error: ")
        say(f"{name}: failed: {ladder.failed[case.rung.name]}; what its ranks printed: {folder / 'logs'}")
        return None
    keep(kept, wanted, measured)
    say(f"{name}: {_in_words(measured)}")
    return measured


def _job(config: RunConfig, ranks: int, folder: Path) -> Job:
    is_npu = _is_for_npus(config)
    given: Mapping[str, str] = os.environ | (ascend_environment(config.ascend, os.environ) if is_npu else {})
    return make_job(
        ranks,
        rank_command(RANK_MODULE, [str(folder)]),
        Deadlines(**config.parallel.deadlines.model_dump()),
        run_dir=folder,
        starter="msrun" if is_npu else "mpiexec",
        given=given,
    )


def _is_for_npus(config: RunConfig) -> bool:
    return config.run.device == "ascend" or (config.run.device == "auto" and num_devices() > 0)


def _in_words(measured: Measured) -> str:
    rate = measured.tokens_per_step / measured.step_s
    return f"{rate:,.0f} tokens/s, loss {measured.losses[-1]:.4f}"
