"""What each rank does for test_compression.py: compressed sums, step after step."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from numpy.typing import NDArray

from ascend_moe_train.optim.codecs import Codec, Int8Blocks, SignBits
from ascend_moe_train.parallel.buckets import Share, share_of
from ascend_moe_train.parallel.comm import Group, RecordingComm
from ascend_moe_train.parallel.compressed import LowRankBucket, TwoStage, TwoStageBucket
from ascend_moe_train.parallel.config import CompressConfig
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.scaled import summing
from ascend_moe_train.parallel.shards import Placement

STEPS, LENGTH, BLOCK, RANK = 40, 1000, 64, 2
CODECS: dict[str, Callable[[], Codec]] = {"int8": Int8Blocks, "signs": SignBits}
SHAPES: dict[str, tuple[int, ...]] = {"wide": (12, 40), "thin": (3, 2), "bias": (7,), "tall": (50, 6)}
# factors; what stays small in fp16; what would overflow
TINY, HUGE = 1e-9, 3e7
Array = NDArray[np.float32]


def gradient(rank: int, step: int, length: int = LENGTH) -> Array:
    """The same part in every step and on every rank, and another one."""
    common = np.random.default_rng(7).standard_normal(length)
    return (common + np.random.default_rng([rank, step]).standard_normal(length)).astype(np.float32)


def matrices(rank: int, step: int) -> list[Array]:
    """A gradient of each of SHAPES."""
    return [
        gradient(rank, 100 * step + i, int(np.prod(shape))).reshape(shape) for i, shape in enumerate(SHAPES.values())
    ]


class _Mean(nn.Cell):
    def __init__(self, mean: TwoStage) -> None:
        super().__init__()
        self.mean = mean

    def construct(self, x_L: Any, is_good: Any) -> Any:
        mean_L, lost_L, lost_p = self.mean(x_L, x_L)
        return ops.depend(mean_L, self.mean.remember(is_good, lost_L, lost_p))


class _Bucket(nn.Cell):
    def __init__(self, bucket: Any) -> None:
        super().__init__()
        self.bucket = bucket

    def construct(self, *grads: Any) -> Any:
        return self.bucket(grads, grads)


class _Sum(nn.Cell):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def construct(self, x: Any) -> Any:
        return self.call(x)


def on_rank(_: Any) -> dict[str, Any]:
    """Sums of every kind on this rank."""
    from ascend_moe_train.parallel.mpi import MpiComm

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    comm = RecordingComm(MpiComm())
    collectives, rank, world = HostOps(comm), comm.rank, comm.world
    return {
        "two stages": {name: two_stages(collectives, world, make()) for name, make in CODECS.items()},
        "sent": sent(comm),
        "not good": not_good(collectives, world),
        "low rank": low_rank(collectives, world),
        "not finite": not_finite(collectives, world),
        "fp16": half(collectives, world, rank),
    }


def two_stages(collectives: HostOps, world: Group, codec: Codec) -> list[Array]:
    """The means of all steps."""
    net = _Mean(TwoStage(collectives, world, LENGTH, codec, BLOCK, "x"))
    good, rank = ms.Tensor([True]), collectives.rank
    return [net(ms.Tensor(gradient(rank, step)), good).asnumpy() for step in range(STEPS)]


def sent(comm: RecordingComm) -> list[tuple[str, int]]:
    """Verbs and payloads of one mean of signs."""
    net = _Mean(TwoStage(HostOps(comm), comm.world, LENGTH, SignBits(), BLOCK, "y"))
    x_L, good = ms.Tensor(gradient(comm.rank, 0)), ms.Tensor([True])
    net(x_L, good).asnumpy()
    before = len(comm.calls)
    net(x_L, good).asnumpy()
    return [(call.verb, call.payload_bytes) for call in comm.calls[before:]]


def not_good(collectives: HostOps, world: Group) -> list[float]:
    """Sums of what was lost: after a step, after one that is not to be remembered, after another that is."""
    mean = TwoStage(collectives, world, LENGTH, Int8Blocks(), BLOCK, "z")
    net, found = _Mean(mean), []
    for step, is_good in enumerate((True, False, True)):
        net(ms.Tensor(gradient(collectives.rank, step)), ms.Tensor([is_good])).asnumpy()
        found.append(float(np.abs(mean.lost.asnumpy()).sum() + np.abs(mean.lost_of_part.asnumpy()).sum()))
    return found


def shares(world: Group) -> list[Share]:
    """Of SHAPES, whole on every rank."""
    found = []
    for name, shape in SHAPES.items():
        placement = Placement(
            shape=shape,
            gradient="dense",
            intervals=tuple(((0, size),) for size in shape),
            group=world.ranks,
            index=world.index,
            replicas=world.size,
            is_first=True,
            repeated=None,
        )
        found.append(share_of(name, placement, group=world, form="whole"))
    return found


def low_rank(collectives: HostOps, world: Group) -> list[list[Array]]:
    """The sums of all steps, of each of SHAPES."""
    config = CompressConfig(method="powersgd", rank=RANK)
    net = _Bucket(LowRankBucket((3, 2, 1, 0), shares(world), collectives, config))
    found = []
    for step in range(STEPS):
        grads = net(*map(ms.Tensor, matrices(collectives.rank, step)))
        found.append([grad.asnumpy() for grad in reversed(grads)])
    return found


def not_finite(collectives: HostOps, world: Group) -> dict[str, list[bool]]:
    """Whether sums are finite in four steps, of which the middle ones have one number on one rank that is not."""
    found: dict[str, list[bool]] = {}
    makes: dict[str, Any] = {"int8": (TwoStageBucket, CompressConfig(method="int8", block=BLOCK))}
    for name, (make, config) in (makes | {"powersgd": (LowRankBucket, CompressConfig(method="powersgd"))}).items():
        net = _Bucket(make((0, 3), shares(world), collectives, config))
        found[name] = []
        for step, value in enumerate((None, np.inf, np.nan, None)):
            grads = matrices(collectives.rank, step)
            if value is not None and collectives.rank == world.size - 1:
                grads[0][3, 5] = value
            sums = net(*map(ms.Tensor, grads))
            found[name].append(bool(all(np.isfinite(each.asnumpy()).all() for each in sums)))
    return found


def half(collectives: HostOps, world: Group, rank: int) -> dict[str, Array]:
    """Sums in fp16 of numbers that are small, large, mixed, zero, and not finite on one rank."""
    net = _Sum(summing(collectives, world, collectives.all_reduce(world, wire="fp16"), "fp16"))
    x = gradient(rank, 0)
    broken = x.copy()
    broken[5] = np.nan if rank == 0 else 1.0
    given = {"tiny": x * TINY, "huge": x * HUGE, "zero": x * 0.0, "broken": broken}
    return {name: net(ms.Tensor(each.astype(np.float32))).asnumpy() for name, each in given.items()}
