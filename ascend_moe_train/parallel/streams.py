"""Which messages between pipeline stages wait for each other on a device. Pure.

A device does the messages of a group of ranks one after the other, in the order in which they are asked for, and a send
may wait there until its peer has come to the receive. So messages go in groups of their own: activations, gradients,
and both of them once more where the last stage meets the first (interleaved schedules). In one group around the ring,
all stages could be at a send.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from ascend_moe_train.parallel.schedule import SENDS, SENT_BY, Action, Kind, peer

Way = Literal["forward", "backward", "forward around", "backward around"]
WAYS: tuple[Way, ...] = ("forward", "backward", "forward around", "backward around")
# at the last stage what goes to or comes from the first, else at the first stage
_AT_LAST = (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
_FORWARD = (Kind.SEND_FORWARD, Kind.RECV_FORWARD)


def way_of(kind: Kind, stage: int, num_stages: int) -> Way:
    """That of a stage's message of this kind."""
    is_around = stage == (num_stages - 1 if kind in _AT_LAST else 0)
    if kind in _FORWARD:
        return "forward around" if is_around else "forward"
    return "backward around" if is_around else "backward"


def check_streams(actions: Sequence[Sequence[Action]], ways: Callable[[Kind, int, int], Way] = way_of) -> None:
    """Raises ValueError, naming where stages wait, unless all lists come to their end on devices: each stage asks for
    what its list says, in order, and goes on but for what it receives; of each way, a stage's messages are done one
    after the other, each when both ends have come to it."""
    asked = [_Asked(listed, stage, len(actions), ways) for stage, listed in enumerate(actions)]
    moved = True
    while moved:
        moved = sum(each.go_on() for each in asked) > 0
        for each in asked:
            for way, waiting in each.waiting.items():
                if waiting and waiting[0].kind in SENDS:
                    other = asked[peer(waiting[0].kind, each.stage, len(actions))].waiting[way]
                    if other and SENT_BY.get(other[0].kind) is waiting[0].kind:
                        waiting.popleft()
                        other.popleft()
                        moved = True
    stuck = [f"stage {each.stage} at {each.listed[each.place]}" for each in asked if each.place < len(each.listed)]
    stuck += [f"stage {each.stage} sends {way[0]}" for each in asked for way in each.waiting.values() if way]
    if stuck:
        raise ValueError(f"the stages wait for each other: {'; '.join(stuck)}")


class _Asked:
    """What a stage has asked for."""

    def __init__(
        self, listed: Sequence[Action], stage: int, num_stages: int, ways: Callable[[Kind, int, int], Way]
    ) -> None:
        self.listed, self.stage, self.place = listed, stage, 0
        self.waiting: dict[Way, deque[Action]] = {way: deque() for way in WAYS}
        self._way = {kind: ways(kind, stage, num_stages) for kind in (*SENDS, *SENT_BY)}
        self._is_receiving = False

    def go_on(self) -> bool:
        """As far as it can; whether that is any further."""
        before = self.place
        while self.place < len(self.listed):
            each = self.listed[self.place]
            way = self._way.get(each.kind)
            if way is not None and not self._is_receiving:
                self.waiting[way].append(each)
            self._is_receiving = each.kind in SENT_BY and each in self.waiting[self._way[each.kind]]
            if self._is_receiving:
                break
            self.place += 1
        return self.place > before
