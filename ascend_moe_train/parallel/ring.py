"""Attention whose keys and values go around a ring of ranks (Liu et al., 2023, arXiv 2310.01889).

Shape letters: see model/kernels/protocol.py; S places of one rank. Parts of the softmax are merged as in Milakov and
Gimelshein (2018, arXiv 1805.02867), by the logarithms of their sums.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.parallel.comm import Collectives, Group, Tensor
from ascend_moe_train.parallel.places import RingStep, own_places, ring_steps

# primitives: ops.concat and the like are graphs of their own, which MindSpore may lose in a bprop
_zeros_like, _beside = ops.ZerosLike(), ops.Concat(1)


class _All:
    """All rows of dim 1. In these classes nothing is decided inside a graph: MindSpore loses branches of a bprop."""

    def of(self, x: Tensor) -> Tensor:
        """Those rows."""
        return x

    def put(self, x: Tensor, part: Tensor) -> Tensor:
        """x with the part as those rows."""
        return part


class _First(_All):
    """The first rows."""

    def __init__(self, size: int) -> None:
        self.size = size

    def of(self, x: Tensor) -> Tensor:
        """Those rows."""
        return x[:, : self.size]

    def put(self, x: Tensor, part: Tensor) -> Tensor:
        """x with the part as those rows."""
        return _beside((part, x[:, self.size :]))


class _Last(_All):
    """The rows from `start` on."""

    def __init__(self, start: int) -> None:
        self.start = start

    def of(self, x: Tensor) -> Tensor:
        """Those rows."""
        return x[:, self.start :]

    def put(self, x: Tensor, part: Tensor) -> Tensor:
        """x with the part as those rows."""
        return _beside((x[:, : self.start], part))


def _rows(start: int, stop: int, size: int) -> _All:
    """Rows `start` to `stop` of `size`, at either end."""
    if (start, stop) == (0, size):
        return _All()
    return _First(stop) if start == 0 else _Last(start)


class _Unseen:
    """A step in which a window lets nothing be seen."""

    def attend(self, result: Any, q: Tensor, k: Tensor, v: Tensor, start_BS: Tensor) -> Any:
        """Output and logarithms (B, S, H) so far, with what the queries see of these keys."""
        return result

    def add_gradients(self, sums: Any, q: Tensor, k: Tensor, v: Tensor, start_BS: Tensor, given: Any) -> Any:
        """dq, dk and dv so far, with those of this step."""
        return sums


class _Part(_Unseen):
    """A step in which some rows of the queries see some rows of the keys."""

    def __init__(self, kernels: Kernels, step: RingStep, place_S: Any, window: int | None) -> None:
        self.kernels, self.key_starts, self.piece_size = kernels, step.key_starts, step.piece_size
        self.queries, self.keys = (_rows(*rows, len(place_S)) for rows in (step.queries, step.keys))
        place_Q = place_S[slice(*step.queries)]
        starts = np.array(step.key_starts, np.int32)[:, None]
        self.past_1Q = ms.Tensor(np.clip(place_Q + 1 - starts, 0, step.piece_size).sum(0, dtype=np.int32)[None])
        lowest = np.zeros_like(place_Q) if window is None else np.maximum(place_Q - window + 1, 0)
        self.lowest_1Q = ms.Tensor(lowest.astype(np.int32)[None])

    def attend(self, result: Any, q: Tensor, k: Tensor, v: Tensor, start_BS: Tensor) -> Any:
        """See _Unseen."""
        out, log_sum = result
        before = self.queries.of(out), self.queries.of(log_sum)
        both = _merged(before, self.alone(q, k, v, start_BS))
        return self.queries.put(out, both[0]), self.queries.put(log_sum, both[1])

    def alone(self, q: Tensor, k: Tensor, v: Tensor, start_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Output and logarithms (B, S, H) of these rows."""
        first, past = self.bounds(start_BS)
        out, log_sum = self.kernels.attention_part(self.queries.of(q), self.keys.of(k), self.keys.of(v), first, past)
        return out, ops.transpose(log_sum, (0, 2, 1))

    def add_gradients(self, sums: Any, q: Tensor, k: Tensor, v: Tensor, start_BS: Tensor, given: Any) -> Any:
        """See _Unseen."""
        dq, dk, dv = sums
        dq_part, dk_part, dv_part = self.gradients(q, k, v, start_BS, given)
        return (
            self.queries.put(dq, self.queries.of(dq) + dq_part),
            self.keys.put(dk, self.keys.of(dk) + dk_part),
            self.keys.put(dv, self.keys.of(dv) + dv_part),
        )

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, start_BS: Tensor, given: Any) -> Any:
        """dq, dk and dv of these rows. `given`: dout, its product with the output, and logarithms of all scores."""
        first, past = self.bounds(start_BS)
        dout, dot, log_sum = given
        return self.kernels.attention_part_gradient(
            self.queries.of(dout),
            ops.transpose(self.queries.of(dot), (0, 2, 1)),
            ops.transpose(self.queries.of(log_sum), (0, 2, 1)),
            self.queries.of(q),
            self.keys.of(k),
            self.keys.of(v),
            first,
            past,
        )

    def bounds(self, start_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The first key that each query sees and the one past the last, from where its document starts."""
        place = ops.maximum(self.queries.of(start_BS), self.lowest_1Q)
        low = _zeros_like(place)
        high = low + self.piece_size
        first = low
        for start in self.key_starts:
            first = first + ops.minimum(ops.maximum(place - start, low), high)
        return first, ops.broadcast_to(self.past_1Q, first.shape)


class _NoSinks:
    """Output and logarithms as they are."""

    def attend(self, result: Any, sink_H: Tensor) -> Any:
        """With one more score of each query, whose key has no value."""
        return result

    def gradient(self, sink_H: Tensor, log_sum: Tensor, dot: Tensor) -> Tensor:
        """That of the sinks."""
        return _zeros_like(sink_H)


class _Sinks(_NoSinks):
    """One sink for each head."""

    def attend(self, result: Any, sink_H: Tensor) -> Any:
        """See _NoSinks."""
        out, log_sum = result
        sink = ops.broadcast_to(ops.reshape(sink_H, (1, 1, -1)), log_sum.shape)
        return _merged(result, (_zeros_like(out), sink))

    def gradient(self, sink_H: Tensor, log_sum: Tensor, dot: Tensor) -> Tensor:
        """See _NoSinks."""
        return -ops.sum(ops.exp(ops.reshape(sink_H, (1, 1, -1)) - log_sum) * dot, (0, 1))


def _merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and logarithms of two parts of a softmax -> those of both: (B, S, H, Y), (B, S, H)."""
    top = ops.maximum(first[1], second[1])
    weight, other_weight = ops.exp(first[1] - top), ops.exp(second[1] - top)
    total = weight + other_weight
    out = first[0] * ops.expand_dims(weight / total, 3) + second[0] * ops.expand_dims(other_weight / total, 3)
    return out, top + ops.log(total)


class Ring(nn.Cell):
    """(q, k, v, start_BS, sink_H) of one rank's places -> output, and logsumexp of all scores (B, S, H).

    `start_BS` is the place where a query's document starts. Only inputs and results are kept for the backward pass, in
    which keys and values go around once more, and their gradients with them. Payload of a rank in bytes, with n ranks
    and KV elements of k and v, forward: all_to_all_v of (n - 1) KV in the dtype of k; backward: that, and n KV of fp32.
    """

    def __init__(
        self,
        kernels: Kernels,
        collectives: Collectives,
        group: Group,
        *,
        seq_len: int,
        window: int | None,
        has_sinks: bool,
    ) -> None:
        super().__init__()
        place_S = own_places(seq_len, group.size, group.index)
        own, *others = ring_steps(seq_len, group.size, group.index, window)
        self.own = _Part(kernels, own, place_S, window)
        self.others = [_Part(kernels, step, place_S, window) if step.key_starts else _Unseen() for step in others]
        self.sinks = _Sinks() if has_sinks else _NoSinks()
        self.exchange = collectives.all_to_all_v(group, 1)
        to, of = np.zeros((2, group.size), np.int32)
        to[(group.index + 1) % group.size] = of[(group.index - 1) % group.size] = 1
        self.to_next, self.of_previous = ms.Tensor(to), ms.Tensor(of)

    def construct(self, q: Tensor, k: Tensor, v: Tensor, start_BS: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
        result, before, moving = self.own.alone(q, k, v, start_BS), q, _joined(k, v)
        for part in self.others:
            # keys may come while those before them are used, but no more: else all could be here at once
            moving = self.pass_on(ops.depend(moving, before))
            before = result
            k_there, v_there = _parted(moving, k, v)
            result = part.attend(result, q, k_there, v_there, start_BS)
        out, log_sum = self.sinks.attend(result, sink_H)
        # what was passed on last is waited for, also where a window let nothing of it be seen
        return ops.cast(ops.depend(out, moving), q.dtype), log_sum

    def bprop(
        self, q: Tensor, k: Tensor, v: Tensor, start_BS: Tensor, sink_H: Tensor, out: Any, dout: Any
    ) -> tuple[Tensor, ...]:
        dout_BSHY = ops.cast(ops.depend(dout[0], out[0]), ms.float32)
        dot = ops.sum(dout_BSHY * ops.cast(out[0], ms.float32), 3)
        given = dout_BSHY, dot, out[1]
        dq, dk, dv = self.own.gradients(q, k, v, start_BS, given)
        moving, collected, arrived = _joined(k, v), _joined(dk, dv), dout_BSHY
        for part in self.others:
            moving = self.pass_on(ops.depend(moving, arrived))
            arrived = self.pass_on(ops.depend(collected, moving))
            k_there, v_there = _parted(moving, k, v)
            dk, dv = _parted(arrived, k, v)
            dq, dk, dv = part.add_gradients((dq, dk, dv), q, k_there, v_there, start_BS, given)
            collected = _joined(dk, dv)
        collected = self.pass_on(collected)
        dk, dv = _parted(collected, k, v)
        dsink_H = self.sinks.gradient(sink_H, out[1], dot)
        dq = ops.cast(ops.depend(dq, collected), q.dtype)
        return dq, ops.cast(dk, k.dtype), ops.cast(dv, v.dtype), _zeros_like(start_BS), dsink_H

    def pass_on(self, x_1N: Tensor) -> Tensor:
        """To the next rank; what comes is of the rank before."""
        return self.exchange(x_1N, self.to_next, self.of_previous)


def _joined(k: Tensor, v: Tensor) -> Tensor:
    """As one row."""
    return _beside((ops.reshape(k, (1, -1)), ops.reshape(v, (1, -1))))


def _parted(x_1N: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of the shapes of k and v, from one row."""
    size = k.size
    return ops.reshape(x_1N[:, :size], k.shape), ops.reshape(x_1N[:, size:], v.shape)
