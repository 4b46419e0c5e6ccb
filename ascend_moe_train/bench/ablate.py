"""The ladder of `amt bench ablate`, climbed: a training run for each rung, in ranks of its own. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascend_moe_train.bench.ladder import Case, cases, chosen, start_of
from ascend_moe_train.bench.measured import Measured, keep, kept_for
from ascend_moe_train.bench.runs import Say, trained
from ascend_moe_train.cluster.mpiexec import check_ranks
from ascend_moe_train.cluster.msrun import check_devices, num_devices
from ascend_moe_train.cluster.of_run import is_for_npus
from ascend_moe_train.config import RunConfig, load_run, run_to_dict
from ascend_moe_train.errors import ConfigError, DataError
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.train.inputs import model_of_run, open_inputs
from ascend_moe_train.train.run_info import versions

KEPT, WORK = "measured", "work"
MIN_STEPS, MAX_STEPS, MAX_REPEAT = 2, 100_000, 100


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
    if is_for_npus(config):
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
        say(f"{name}: {in_words(before)} (kept from before)")
        return before
    measured, ended = trained(config, asked.ranks, asked.steps, case.rung.put_in, asked.out / WORK / name, say)
    ladder.exit_code = ended.stopped
    if ended.problem is not None:
        ladder.failed[case.rung.name] = ended.problem
        say(f"{name}: failed: {ended.problem}")
    if measured is not None:
        kept.parent.mkdir(exist_ok=True)
        keep(kept, wanted, measured)
        say(f"{name}: {in_words(measured)}")
    return measured


def in_words(measured: Measured) -> str:
    """A measurement in a few."""
    rate = measured.tokens_per_step / measured.step_s
    return f"{rate:,.0f} tokens/s, loss {measured.losses[-1]:.4f}"
