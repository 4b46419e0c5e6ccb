"""`amt launch` on a run file, as a user types it."""

import os
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 300


def environment() -> dict[str, str]:
    """Without what an MPI or launcher that started the tests has left there."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "HYD", "OMPI_", "AMT_"))}


def launch_command(
    num_ranks: int,
    run_yaml: Path,
    *overrides: str,
    starter: str | None = None,
    restarts: int | None = None,
    dry_run: bool = False,
) -> list[str]:
    """The command line, with overrides of the form section.key=value."""
    amt = [sys.executable, "-c", "from ascend_moe_train.cli.main import run; run()"]
    settings = [word for override in overrides for word in ("--set", override)]
    given = {"--starter": starter, "--restarts": restarts}
    how = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    how += ["--dry-run"] if dry_run else []
    return [*amt, "launch", "--ranks", str(num_ranks), *how, "train", str(run_yaml), *settings]


def launched(num_ranks: int, run_yaml: Path, *overrides: str, told_in: Path | None = None) -> None:
    """Trains on so many ranks to the end; AssertionError with what was printed if that fails. `told_in` gets it too."""
    done = subprocess.run(
        launch_command(num_ranks, run_yaml, *overrides),
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE_S,
    )
    if told_in is not None:
        told_in.write_text(done.stdout + done.stderr)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
