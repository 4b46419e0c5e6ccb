"""`python -m ascend_moe_train.selftest.mpi_ranks FOLDER`: the checks of FOLDER on several ranks, as `amt launch` starts
them. Pure."""

import sys
from pathlib import Path

from ascend_moe_train.cluster.launch import launch, make_job
from ascend_moe_train.cluster.mpiexec import python, rank_command
from ascend_moe_train.cluster.output import PlainScreen
from ascend_moe_train.cluster.verdict import Deadlines
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.selftest.processes import WORKER, asked_of


def mpi_command(folder: Path) -> list[str]:
    """The process that starts the ranks."""
    return [*python(), "-m", "ascend_moe_train.selftest.mpi_ranks", str(folder)]


def main(folder: Path) -> int:
    """The exit code of the ranks; what went wrong is on standard error, in a line that names the rank."""
    asked = asked_of(folder)
    # shorter than the time of a check, so that the launcher can still name a rank that is stuck
    idle_s = asked["check_s"] / 2
    deadlines = Deadlines(compile_s=asked["start_s"], step_s=idle_s, save_s=idle_s)
    try:
        outcome = launch(make_job(asked["ranks"], rank_command(WORKER, [str(folder)]), deadlines), PlainScreen())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if outcome.message is not None:
        print(outcome.message, file=sys.stderr)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
