"""What a plan takes at least, long before it is evaluated: the search leaves out what cannot be best. Pure.

A step takes at least the passes of any one stage, and, but for zero_bubble, one pass of each stage before it, which
fill and drain the pipeline. A device holds at least an even share of all stages' weights, gradients and states.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm
from typing import NamedTuple

from ascend_moe_train.parallel.mesh import EXPERT_AXES
from ascend_moe_train.planner.block_time import PassTime
from ascend_moe_train.planner.efficiency import Efficiency
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import Slice, effective, kind_of
from ascend_moe_train.planner.memory import CONTEXT_BYTES, stage_parameters, states_of
from ascend_moe_train.planner.plan import Imbalance, Job, Plan, even_layers
from ascend_moe_train.planner.space import Space, Variant
from ascend_moe_train.planner.step_time import time_of
from ascend_moe_train.planner.techniques import PLAIN, Techniques

_GRAIN = 4000
REPEATED = "recompute"  # the part of a backward pass that is a forward pass over again
ROUTED = ("experts", *EXPERT_AXES[2:])  # the parts that depend on how experts are cut, and on how many tokens come

_Pair = tuple[float, float]  # seconds of a forward and of a backward pass


class _Part(NamedTuple):
    """Of one micro-batch: of a layer of each kind, and of what comes before the first and after the last."""

    kinds: dict[int, _Pair]
    ends: tuple[_Pair, _Pair]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Of one micro-batch, with nothing recomputed. `forward_s` and `backward_s` are running sums over the layers;
    `ends` the forward and backward pass of what comes before the first and after the last; `slow` what the step is
    longer than its parts."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    ends: tuple[_Pair, _Pair]
    slow: float


class PassTimes:
    """Passes of a job under every cut, from few evaluations: what depends on the cut of the experts is measured once
    for each number of tokens that come to them, everything else once for each cut of the dense part."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        imbalance: Imbalance,
        efficiency: Efficiency | None,
        techniques: Techniques = PLAIN,
    ) -> None:
        self._job, self._cluster, self._imbalance, self._efficiency = job, cluster, imbalance, efficiency
        # sums of gradients are after the passes, and not for stages
        self._techniques = replace(techniques, compress=PLAIN.compress)
        self._small, self._kinds = _one_of_each(job)
        self._slow = self._measured_slow()
        self._layers = [kind_of(job, layer) for layer in range(job.model.num_layers)]
        self._counts = Counter(self._layers)
        self._dense: dict[tuple[object, ...], _Part] = {}
        self._routed: dict[tuple[object, ...], _Part] = {}
        self._last: tuple[Slice, Passes] | None = None

    def whole_s(self, cut: Slice) -> float:
        """Forward and backward pass of the whole model, `slow` included."""
        dense, routed = self._parts(cut)
        found = sum(map(sum, dense.ends)) + sum(map(sum, routed.ends))
        for kind, count in self._counts.items():
            found += count * (sum(dense.kinds[kind]) + sum(routed.kinds[kind]))
        return self._slow * found

    def of(self, cut: Slice) -> Passes:
        """Layer by layer."""
        if self._last is None or self._last[0] != cut:  # pipelines of a cut are asked for one after the other
            self._last = cut, self._summed(cut)
        return self._last[1]

    def _summed(self, cut: Slice) -> Passes:
        dense, routed = self._parts(cut)
        kinds = {kind: _plus(dense.kinds[kind], routed.kinds[kind]) for kind in self._counts}
        return Passes(
            forward_s=tuple(accumulate((kinds[kind][0] for kind in self._layers), initial=0.0)),
            backward_s=tuple(accumulate((kinds[kind][1] for kind in self._layers), initial=0.0)),
            ends=(_plus(dense.ends[0], routed.ends[0]), _plus(dense.ends[1], routed.ends[1])),
            slow=self._slow,
        )

    def _parts(self, cut: Slice) -> tuple[_Part, _Part]:
        of_dense = cut[:4] + cut[6:]
        if (dense := self._dense.get(of_dense)) is None:
            dense = self._dense[of_dense] = self._measured(Slice(*cut[:4], 1, 1, cut[6]), routed=False)
        of_routed = (cut.micro_sequences / (cut.cp * cut.tp), cut.ep, cut.etp, self._techniques.overlap and cut.tp)
        if (routed := self._routed.get(of_routed)) is None:
            routed = self._routed[of_routed] = self._measured(cut, routed=True)
        return dense, routed

    def _measured(self, cut: Slice, *, routed: bool) -> _Part:
        """By `time_of` for a small model that has one layer of each kind, one on each stage."""
        count = len(self._kinds) + 2
        ranks = lcm(cut.tp * cut.cp, cut.ep * cut.etp)
        techniques = effective(self._techniques, cut)
        plan = Plan(
            num_devices=count * ranks, stage_layers=(1,) * count, pp=count, techniques=techniques, **cut._asdict()
        )
        time = time_of(self._small, self._cluster, plan, self._imbalance, self._efficiency)
        plain = [_pair(each, routed=routed) for each in time.passes]
        kinds = dict(zip(self._kinds, plain[1:-1], strict=True))
        first, last = kinds[self._layers[0]], kinds[self._layers[-1]]
        return _Part(kinds, (_minus(plain[0], first), _minus(plain[-1], last)))

    def _measured_slow(self) -> float:
        """A step through the sum of its parts, which depends on the number of devices."""
        ranks = self._cluster.num_devices
        small = replace(self._small, global_sequences=ranks)
        plan = Plan(num_devices=ranks, stage_layers=(len(self._kinds) + 2,))
        time = time_of(small, self._cluster, plan, self._imbalance, self._efficiency)
        return time.step_s / (time.step_s - time.items.get("straggler", 0.0))


def _pair(each: PassTime, *, routed: bool) -> _Pair:
    forward, backward = (
        sum(value for part, value in parts.items() if part != REPEATED and (part in ROUTED) == routed)
        for parts in (each.forward_parts, each.backward_parts)
    )
    return forward, backward


def _plus(left: _Pair, right: _Pair) -> _Pair:
    return left[0] + right[0], left[1] + right[1]


def _minus(left: _Pair, right: _Pair) -> _Pair:
    return left[0] - right[0], left[1] - right[1]


@lru_cache(maxsize=64)
def _one_of_each(job: Job) -> tuple[Job, tuple[int, ...]]:
    """A job whose model has the kinds of layers of `job`, between one like its first and one like its last."""
    model = job.model
    listed = [kind_of(job, layer) for layer in range(model.num_layers)]
    kinds = tuple(dict.fromkeys(listed))
    places = [listed[0], *kinds, listed[-1]]
    changes: dict[str, object] = {"num_layers": len(places)}
    if model.moe is not None:
        dense = tuple(place for place, kind in enumerate(places) if not model.is_moe(kind))
        changes["moe"] = model.moe.model_copy(update={"dense_layers": dense})
    if model.attention.window is not None:
        windowed = tuple(place for place, kind in enumerate(places) if kind in model.attention.window_layers)
        changes["attention"] = model.attention.model_copy(update={"window_layers": windowed})
    return replace(job, model=model.model_copy(update=changes)), kinds


def busy_s(passes: Passes, stage_layers: Sequence[int], pp: int, *, repeats: bool) -> list[float]:
    """Seconds of a micro-batch on each stage. `repeats`: backward passes begin with the forward pass over again, but
    for the last virtual stage."""
    found = [0.0] * pp
    first, last = 0, len(stage_layers) - 1
    for place, size in enumerate(stage_layers):
        stop = first + size
        forward = passes.forward_s[stop] - passes.forward_s[first]
        value = passes.backward_s[stop] - passes.backward_s[first]
        if place == 0:
            forward, value = forward + passes.ends[0][0], value + passes.ends[0][1]
        if place == last:
            forward, value = forward + passes.ends[1][0], value + passes.ends[1][1]
        found[place % pp] += value + forward * (2 if repeats and place < last else 1)
        first = stop
    return found


def least_step_s(busy: Sequence[float], num_micro: int, chunks: int, schedule: str, slow: float) -> float:
    """Of a pipeline whose stages are `busy` so long with each micro-batch."""
    most, before = 0.0, 0.0
    for each in busy:
        most = max(most, num_micro * each + (0.0 if schedule == "zero_bubble" else before / chunks))
        before += each
    return slow * most


def least_bubble(pp: int, num_micro: int, chunks: int, schedule: str) -> float:
    """What `least_step_s` is at least, for stages that are busy so long together, as a multiple of an even share.

    Of m micro-batches and c chunks, stage i ends after m b_i + sum of b_j for j < i, through c. Weights w_i that add up
    to 1 and give each b the same factor K, in all a K times the sum, are those with
    w_i m = K - (sum of w_j for j > i) / c; they exist for K = 1 / (c (1 - (1 - 1 / (c m))^pp)).
    """
    if schedule == "zero_bubble":
        return 1.0
    most = chunks * num_micro
    return pp / (most * (1 - (1 - 1 / most) ** pp))


def least_bytes(job: Job, cluster: Cluster, space: Space, cut: Slice, pp: int, variant: Variant) -> float:
    """Weights, gradients and states on a device, on average over the stages, and what its software takes."""
    dense, expert = _whole(job, cut.tp, cut.ep, cut.etp)
    of_stage = space.num_devices // pp
    zero, offload = variant
    each = (
        states_of(job, dense / pp, of_stage // cut.tp, zero, offload=offload),
        states_of(job, expert / pp, of_stage // (cut.ep * cut.etp), zero, offload=offload),
    )
    return CONTEXT_BYTES[cluster.device.kind] + sum(one.weights + one.gradients + one.optimizer for one in each)


@lru_cache(maxsize=4096)
def _whole(job: Job, tp: int, ep: int, width: int) -> tuple[int, int]:
    cut = Slice(tp, False, 1, "ring", ep, width, 1)
    plan = Plan(num_devices=lcm(tp, ep * width), stage_layers=(job.model.num_layers,), **cut._asdict())
    return stage_parameters(job, plan, 0)


def splits(passes: Passes, pp: int, chunks: int, *, repeats: bool) -> tuple[tuple[int, ...], ...]:
    """Ways to share out layers that are worth a try: evenly, with the layers that are left over in the first or in the
    last virtual stages, and so that the longest virtual stage is about as short as it can be."""
    count = 2 if repeats else 1
    sums = [count * forward + backward for forward, backward in zip(passes.forward_s, passes.backward_s, strict=True)]
    before = count * passes.ends[0][0] + passes.ends[0][1]
    unit = sums[-1] / _GRAIN  # many cuts share their costs to such a grain, and then their splits
    rounded = tuple(round(each / unit) for each in sums)
    return _splits(rounded, round(before / unit), round(sum(passes.ends[1]) / unit), pp * chunks)


@lru_cache(maxsize=4096)
def _splits(sums: tuple[int, ...], before: int, after: int, parts: int) -> tuple[tuple[int, ...], ...]:
    even = even_layers(len(sums) - 1, parts)
    whole = sums[-1] + before + after
    low, high, balanced = -(-whole // parts) - 1, whole, even  # most that a virtual stage takes: too little, enough
    middles = tuple((left + right) / 2 for left, right in pairwise(sums))
    while high - low > 1:
        middle = (low + high) // 2
        found = _filled(sums, middles, before, after, parts, middle)
        if found is None:
            low = middle
        else:
            balanced, high = found, middle
    return tuple(dict.fromkeys((even, even[::-1], balanced)))


def _filled(
    sums: Sequence[int], middles: Sequence[float], before: int, after: int, parts: int, most: int
) -> tuple[int, ...] | None:
    """Sizes of virtual stages none of which takes longer than `most`, each near its share of what is left; or None.
    `middles` are those of neighbours in `sums`."""
    num_layers, sizes, first = len(sums) - 1, [], 0
    for part in range(parts):
        left = parts - part - 1
        own = (before if part == 0 else 0) + (after if left == 0 else 0)
        done = sums[first] - own
        stop = bisect_right(sums, most + done, first + 1) - 1
        if left:
            share = (sums[-1] - sums[first] + after + (before if part == 0 else 0)) / (left + 1)
            stop = min(stop, bisect_right(middles, share + done, first + 1), num_layers - left)
        if stop <= first:
            return None
        sizes.append(stop - first)
        first = stop
    return tuple(sizes) if first == num_layers else None
