"""`amt profile`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ascend_moe_train.profile.analysis import Analysis
    from ascend_moe_train.profile.load import Capture


@click.group("profile")
def command() -> None:
    """Say from a profiler's folder what a training step does, what is wrong with it and what to change."""


@command.command("show")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--no-cache", is_flag=True, help="Neither use nor keep what was read of large ranks before.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with formula and source of every figure.")
def show(folder: Path, no_cache: bool, as_json: bool) -> None:
    """What is wrong with the step in FOLDER, in figures, and what to do, by estimated gain."""
    from ascend_moe_train.profile.analysis import as_json as shown

    analysis = _analysed(folder, no_cache)
    if as_json:
        click.echo(json.dumps(shown(analysis), indent=2))
        return
    from ascend_moe_train.profile.screen import console, screen

    console().print(screen(analysis))


def _analysed(folder: Path, no_cache: bool) -> "Analysis":
    from ascend_moe_train.profile.analysis import analyse

    return analyse(_captured(folder, no_cache))


def _captured(folder: Path, no_cache: bool) -> "Capture":
    from ascend_moe_train.profile.load import load

    return load(folder, cache=None if no_cache else _cache())


def _cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "ascend_moe_train" / "profile"
