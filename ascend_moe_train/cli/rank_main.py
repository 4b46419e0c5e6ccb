"""`python -m ascend_moe_train.cli.rank_main ...`: the command `amt` as one rank of many. Pure."""

import sys
from collections.abc import Sequence

from ascend_moe_train.cli.main import attempt
from ascend_moe_train.cluster.as_rank import as_rank


def main(arguments: Sequence[str]) -> int:
    """Runs one command line; returns if all ranks are meant to end together: with 0, or stopped and saved."""
    return as_rank(lambda: attempt(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
