"""`amt mesh`."""

import json
from pathlib import Path

import click

from ascend_moe_train.cli.config import OVERRIDES, RUN_FILE, whole_run
from ascend_moe_train.cli.out_file import check_out, write_out


@click.command("mesh")
@RUN_FILE
@click.option("--ranks", "num_ranks", required=True, type=int, help="How many ranks the run is spread over.")
@OVERRIDES
@click.option("--out", type=click.Path(path_type=Path), help="Also write the map to this file.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with every group.")
def command(run_yaml: Path, num_ranks: int, overrides: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Show how RUN_YAML is spread over ranks: who is where, speaks with whom, holds what."""
    from ascend_moe_train.parallel.mesh_map import map_text, mesh_map

    if out is not None:
        check_out(out)
    shown = mesh_map(whole_run(run_yaml, overrides), num_ranks)
    text = json.dumps(shown, indent=2) if as_json else "\n".join(map_text(shown, str(run_yaml)))
    click.echo(text)
    if out is not None:
        write_out(out, text + "\n")
