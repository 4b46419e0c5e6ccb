"""`amt schedule`."""

import json
import shutil
from pathlib import Path

import click

from ascend_moe_train.cli.out_file import check_out, write_out
from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.parallel.schedule import SCHEDULES

# where there is no terminal
COLUMNS = 132


@click.command("schedule")
@click.option("--name", required=True, type=click.Choice(SCHEDULES), help="The pipeline schedule.")
@click.option("--stages", "num_stages", required=True, type=int, help="Pipeline stages.")
@click.option("--micro", "num_micro", required=True, type=int, help="Micro-batches of a step.")
@click.option("--chunks", default=1, show_default=True, help="Parts of the model on each stage; interleaved needs 2.")
@click.option("--forward-s", default=1.0, show_default=True, help="Forward pass of a micro-batch through a stage.")
@click.option("--backward-s", default=2.0, show_default=True, help="Its whole backward pass.")
@click.option("--weight-s", type=float, help="The part of it that zero_bubble does later; half of it by default.")
@click.option("--send-s", default=0.0, show_default=True, help="How long a message travels.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the timeline to this file.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with start and end of every action.")
def command(
    name: ScheduleName,
    num_stages: int,
    num_micro: int,
    chunks: int,
    forward_s: float,
    backward_s: float,
    weight_s: float | None,
    send_s: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Show the timeline of a pipeline schedule: who computes when, who is idle, how much is in flight."""
    from ascend_moe_train.parallel.timeline_view import timeline_view, view_text

    if out is not None:
        check_out(out)
    shown = timeline_view(
        name,
        num_stages,
        num_micro,
        chunks,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        send_s=send_s,
    )
    width = shutil.get_terminal_size((COLUMNS, 1)).columns
    text = json.dumps(shown, indent=2) if as_json else "\n".join(view_text(shown, width))
    click.echo(text)
    if out is not None:
        write_out(out, text + "\n")
