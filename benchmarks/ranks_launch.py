"""`python -m benchmarks.ranks_launch 2 MODULE ARGUMENT...`: a module as so many ranks under the project's launcher."""

import sys

from ascend_moe_train.cluster.launch import launch, make_job
from ascend_moe_train.cluster.mpiexec import rank_command
from ascend_moe_train.cluster.output import PlainScreen
from ascend_moe_train.cluster.verdict import Deadlines

# a benchmark's own deadline is shorter
IDLE_S = 3600.0


def main(ranks: int, module: str, arguments: list[str]) -> int:
    """The exit code."""
    deadlines = Deadlines(compile_s=IDLE_S, step_s=IDLE_S, save_s=IDLE_S)
    outcome = launch(make_job(ranks, rank_command(module, arguments), deadlines), PlainScreen())
    if outcome.message is not None:
        print(outcome.message, file=sys.stderr)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
