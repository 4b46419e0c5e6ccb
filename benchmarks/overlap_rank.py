"""One rank of overlap.py: the demo model in several layouts, trained when told, and how long it waited for others."""

import sys
import time
from functools import cache

import mindspore as ms

from ascend_moe_train.config import RunConfig, load_run
from ascend_moe_train.train.ranks import join
from benchmarks.ranks_orders import Order, Reply, serve
from benchmarks.ranks_train import RUN, control_of, global_batch, own_part, training_step


class Layout:
    """A training step in one layout, with the links and threads that its configuration asks for."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.ranks = config, join(config)
        self.step = training_step(config, self.ranks.mesh, self.ranks.comm)
        self.number = 0

    def run(self, steps: int) -> Reply:
        """Trains, from where it was; all ranks begin each step together."""
        step_s, total_s, exposed_s, losses = [], [], [], []
        spans = self.ranks.spans
        assert spans is not None  # ranks on a CPU have them
        for _ in range(steps):
            batch = own_part(global_batch(self.config, self.number), self.ranks.mesh, self.ranks.data.index)
            self.number += 1
            self.ranks.wait_for_all()
            spans.take()
            start_s = time.monotonic()
            losses.append(self.step(batch, self.number, control_of(self.config, self.number)).loss)
            step_s.append(time.monotonic() - start_s)
            comm = spans.take()
            total_s.append(comm.total_s)
            exposed_s.append(comm.exposed_s)
        return {"step_s": step_s, "total_s": total_s, "exposed_s": exposed_s, "losses": losses}


def main(path: str) -> None:
    """Serves until the benchmark is done."""
    first = join(load_run(RUN, ("batch.micro_sequences=1",)))
    first.progress.phase("step")
    layout = cache(lambda *overrides: Layout(load_run(RUN, overrides)))

    def obey(order: Order) -> Reply:
        return layout(*order["overrides"]).run(order["steps"])

    serve(path, first.comm.rank, {"mindspore": ms.__version__, "rank": first.comm.rank}, obey)
    first.progress.phase("done")


if __name__ == "__main__":
    main(sys.argv[1])
