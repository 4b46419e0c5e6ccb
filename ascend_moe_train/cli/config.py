"""`amt config`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ascend_moe_train.config import RunConfig

RUN_FILE = click.argument("run_yaml", type=click.Path(path_type=Path))
OVERRIDES = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key: --set optim.lr=3e-4"
)


def whole_run(run_yaml: Path, overrides: tuple[str, ...]) -> "RunConfig":
    """The run of a file, its model completed from the checkpoint that it starts from."""
    from ascend_moe_train.config import load_run
    from ascend_moe_train.train.inputs import model_of_run

    return load_run(run_yaml, overrides, model_of_run)


@click.group("config")
def command() -> None:
    """Show or check the configuration of a run."""


@command.command("show")
@RUN_FILE
@OVERRIDES
@click.option("--json", "as_json", is_flag=True, help="As JSON, with the counts under their own key.")
def show(run_yaml: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every key of RUN_YAML after presets, overrides and defaults, and what the model amounts to."""
    from ascend_moe_train.config import dump_yaml, run_to_dict

    cfg = whole_run(run_yaml, overrides)
    if as_json:
        click.echo(json.dumps({"config": run_to_dict(cfg), "counts": counts(cfg)}, indent=2))
        return
    click.echo(dump_yaml(cfg), nl=False)
    click.echo("".join(f"# {name}: {number:,}\n" for name, number in counts(cfg).items()), nl=False)


@command.command("check")
@RUN_FILE
@OVERRIDES
def check(run_yaml: Path, overrides: tuple[str, ...]) -> None:
    """Say whether RUN_YAML can be run, in one line; exit code 2 if not."""
    from ascend_moe_train.units import format_count

    cfg = whole_run(run_yaml, overrides)
    numbers = counts(cfg)
    click.echo(
        f"{run_yaml}: good. {format_count(numbers['parameters'])} parameters "
        f"({format_count(numbers['active_parameters'])} active), {cfg.run.steps:,} steps of "
        f"{numbers['tokens_per_step']:,} tokens, {format_count(numbers['training_flops_per_token'])}FLOP per token"
    )


def counts(cfg: "RunConfig") -> dict[str, int]:
    """What the run amounts to: parameters, active parameters, tokens per step, training FLOPs per token."""
    from ascend_moe_train.model.adapters import num_adapter_parameters, run_flops_per_token
    from ascend_moe_train.model.counts import num_active_parameters, num_parameters

    adapted = {} if cfg.lora is None else {"adapter_parameters": num_adapter_parameters(cfg.model, cfg.lora)}
    return {
        "parameters": num_parameters(cfg.model),
        "active_parameters": num_active_parameters(cfg.model),
        **adapted,
        "tokens_per_step": cfg.tokens_per_step,
        "training_flops_per_token": run_flops_per_token(cfg.model, cfg.lora, cfg.data.seq_len),
    }
