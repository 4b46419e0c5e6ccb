"""`amt train`."""

from pathlib import Path

import click

from ascend_moe_train.cli.config import OVERRIDES, RUN_FILE, whole_run


@click.command("train")
@RUN_FILE
@OVERRIDES
@click.option("--json", "as_json", is_flag=True, help="Print records as JSON lines instead of a table.")
def command(run_yaml: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Train the model of RUN_YAML; the same command continues a run that was interrupted."""
    from ascend_moe_train.cli.environment import prepare_environment
    from ascend_moe_train.train.stop import StopRequest

    prepare_environment()
    # the configuration imports NumPy, and a thread that starts before SIGINT is blocked would take a Ctrl-C
    with StopRequest() as stop:
        config = whole_run(run_yaml, overrides)
        from ascend_moe_train.train.json_view import JsonView
        from ascend_moe_train.train.live import LiveView
        from ascend_moe_train.train.ranks import join
        from ascend_moe_train.train.start import start
        from ascend_moe_train.train.view import Silent

        ranks = join(config)
        table = LiveView(total_steps=config.run.steps, log_every=config.run.log_every)
        with Silent() if not ranks.is_first else JsonView() if as_json else table as view:
            return start(config, view, stop, ranks)
