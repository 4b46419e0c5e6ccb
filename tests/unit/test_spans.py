"""What collectives of a step take, and what the step waits for."""

import numpy as np

from ascend_moe_train.parallel.comm import Array, Group, LocalComm
from ascend_moe_train.parallel.spans import CommTotal, Spans, StepComm, TimedComm

PAIR = Group(name="ep", ranks=(0, 1), index=0)
X = np.arange(6, dtype=np.float32).reshape(3, 2)


class Pairs(LocalComm):
    """Gathers that take two seconds of a clock that stands still otherwise."""

    now_s = 7.0

    def all_gather(self, group: Group, x: Array, out: Array | None = None) -> Array:
        self.now_s += 2.0
        return super().all_gather(group, x, out)


def test_calls_are_added_up_by_verb_group_and_content_until_they_are_taken() -> None:
    spans, inner = Spans(), Pairs()
    comm = TimedComm(inner, spans.ran, clock=lambda: inner.now_s)
    comm.all_gather(PAIR, X)
    comm.barrier(PAIR)
    comm.all_gather(PAIR, X[:1])
    comm.all_gather(PAIR.carrying("weights"), X)
    spans.waited("all_gather", PAIR, 1.5)
    spans.waited("all_gather", PAIR, 0.5)
    spans.waited("all_gather", PAIR.carrying("weights"), 0.25)
    gathers = CommTotal(verb="all_gather", group="ep", calls=2, payload_bytes=32, total_s=4.0, exposed_s=2.0)
    barrier = CommTotal(verb="barrier", group="ep", calls=1, payload_bytes=0, total_s=0.0, exposed_s=0.0)
    weights = CommTotal(
        verb="all_gather", group="ep", calls=1, payload_bytes=24, total_s=2.0, content="weights", exposed_s=0.25
    )
    assert spans.take() == StepComm(total_s=6.0, exposed_s=2.25, calls=(gathers, barrier, weights))
    assert spans.take() == StepComm(total_s=0, exposed_s=0.0, calls=())


def test_what_moves_nothing_is_left_out() -> None:
    spans, inner = Spans(), Pairs()
    comm = TimedComm(inner, spans.ran, clock=lambda: inner.now_s)
    comm.all_gather(comm.split("ep", [(0,)]), X)
    assert spans.take().calls == ()
