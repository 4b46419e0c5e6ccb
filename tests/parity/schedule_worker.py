"""Runs a pipeline schedule with pauses for passes, on one rank. Called by the tests, on ranks."""

import time
from typing import Any

import numpy as np

from ascend_moe_train.parallel.comm import Array, Comm, Group
from ascend_moe_train.parallel.drive import run
from ascend_moe_train.parallel.schedule import Action, Kind, schedule
from ascend_moe_train.parallel.timeline import EqualStages

# elements of a message: more than MPI sends before it is wanted
MESSAGE_SIZE = 20_000


class Paused:
    """`drive.Work` whose passes take the time that they are said to. Messages name the micro-batch and the piece of the
    model that they are for."""

    def __init__(self, comm: Comm, chunks: int, durations: EqualStages) -> None:
        self.comm, self.chunks, self.durations = comm, chunks, durations
        everyone = [comm.world.ranks]
        self.up, self.down = comm.split("forward", everyone), comm.split("backward", everyone)
        self.stage, self.num_stages = comm.rank, comm.world.size
        self.spans_s: list[tuple[float, float]] = []
        self.wrong: list[str] = []

    def forward(self, micro: int, chunk: int) -> None:
        self._pass(Kind.FORWARD, micro, chunk)

    def backward(self, micro: int, chunk: int) -> None:
        self._pass(Kind.BACKWARD, micro, chunk)

    def weight(self, micro: int, chunk: int) -> None:
        self._pass(Kind.WEIGHT, micro, chunk)

    def send_forward(self, micro: int, chunk: int) -> None:
        self._send(self.up, micro, chunk, 1)

    def recv_forward(self, micro: int, chunk: int) -> None:
        self._recv(self.up, micro, chunk, -1)

    def send_backward(self, micro: int, chunk: int) -> None:
        self._send(self.down, micro, chunk, -1)

    def recv_backward(self, micro: int, chunk: int) -> None:
        self._recv(self.down, micro, chunk, 1)

    def _pass(self, kind: Kind, micro: int, chunk: int) -> None:
        start_s = time.monotonic()
        time.sleep(self.durations(self.stage, Action(kind, micro, chunk)))
        self.spans_s.append((start_s, time.monotonic()))

    def _message(self, micro: int, piece: int) -> Array:
        return np.full(MESSAGE_SIZE, micro * self.chunks * self.num_stages + piece, np.float32)

    def _piece(self, chunk: int) -> int:
        return chunk * self.num_stages + self.stage

    def _send(self, group: Group, micro: int, chunk: int, step: int) -> None:
        message = self._message(micro, self._piece(chunk) + step)
        self.comm.send(group, message, (self.stage + step) % self.num_stages)

    def _recv(self, group: Group, micro: int, chunk: int, step: int) -> None:
        expected = self._message(micro, self._piece(chunk))
        found = self.comm.recv(group, expected.shape, expected.dtype, (self.stage + step) % self.num_stages)
        if not np.array_equal(found, expected):
            self.wrong.append(f"{group.name} of micro-batch {micro}, chunk {chunk}: {found[0]}, not {expected[0]}")


def mpi_paused(argument: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On an MPI rank: of each case what is wrong, and start and end of every pass, in seconds of one clock."""
    from ascend_moe_train.parallel.mpi import MpiComm

    comm = MpiComm()
    results = []
    for case in argument:
        work = Paused(comm, case["chunks"], EqualStages(**case["durations_s"]))
        actions = schedule(case["name"], comm.world.size, case["num_micro"], case["chunks"])[comm.rank]
        comm.barrier(comm.world)
        run(actions, work)
        comm.barrier(comm.world)
        results.append({"wrong": work.wrong, "spans_s": work.spans_s})
    return results
