"""What the launcher tells the processes that it starts, by environment variable. Pure."""

from typing import Literal

Starter = Literal["mpiexec", "msrun"]

CONTROL = "AMT_CONTROL"  # name of the launcher's socket, in Linux's abstract namespace
BOARD = "AMT_BOARD"  # path of the status board
RANK = "AMT_RANK"  # number of this rank, from 0
FIRST_RANK = "AMT_FIRST_RANK"  # the first rank of this host, 0 unless there are several hosts
RANKS = "AMT_RANKS"  # number of ranks
CORES = "AMT_CORES"  # of this host, for all of its ranks together
RUN_ID = "AMT_RUN_ID"  # the same text on every rank, another one for each start
STARTED = "AMT_STARTED"  # when the launcher was started: seconds since 1970
STARTER = "AMT_STARTER"  # what started the ranks, one of Starter
