"""What each rank does for ZeRO in a step, and what that takes in memory and traffic, as closed forms. Pure.

s elements of a rank's local tensor, n ranks of the group over which its gradient is summed, p = ceil(s / n) elements of
a flat part, m micro-batches, w bytes of an element of a gradient on its way (4 as fp32, 2 as bf16 or fp16).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ascend_moe_train.parallel.buckets import ELEMENT_BYTES, Bucket, Buckets, Share, buckets_of, is_repeated
from ascend_moe_train.parallel.comm import WIRE_DTYPES, Group, Wire
from ascend_moe_train.parallel.compress_costs import BITS, TwoStageSizes, low_rank_bytes
from ascend_moe_train.parallel.config import CompressConfig
from ascend_moe_train.parallel.contents import COMPRESSED, Content, gradients_in

NOT_COMPRESSED = CompressConfig()
NUM_FIGURES = 5  # see optim/reduction.py
SKETCH_COLUMNS = 256  # see parallel/sketch.py
Traffic = dict[tuple[str, str], tuple[int, int]]
Sent = dict[tuple[str, str, Content], tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class ZeroBytes:
    """What one rank keeps from step to step: the model's weights, the sums of gradients of several micro-batches, and
    the optimizer's moments with its own copies of weights; `host` is what of the latter is outside of the device."""

    weights: int
    gradients: int
    optimizer: int
    host: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.host


@dataclass(frozen=True, kw_only=True)
class Uses:
    """How often a micro-batch puts a weight together from its parts, and shares out its gradient."""

    gathers: int
    reductions: int


@dataclass(frozen=True, kw_only=True)
class ZeroPlan:
    """What one rank does. `shares` are of all weights that it holds, in the order of their first use; `names` those of
    what is trained in the whole model, `uses` of what is put together on use, `early` names what is reduced while the
    backward pass goes on."""

    stage: int
    shares: tuple[Share, ...]
    names: tuple[str, ...]
    world: Group
    uses: Mapping[str, Uses]
    bucket_bytes: int
    wire: Wire | None = None
    offload: bool = False
    compress: CompressConfig = NOT_COMPRESSED
    early: frozenset[str] = frozenset()

    def is_compressed(self, bucket: Bucket) -> bool:
        """Whether its sum, or that of its momenta, is of less than all bits: dense weights that all ranks have."""
        share = self.trained[bucket[0]]
        return self.compress.method != "none" and share.gradient == "dense" and share.group.size == self.world.size

    def sends_momenta(self, bucket: Bucket) -> bool:
        """Whether momenta are sent instead of gradients, once 1-bit Adam's second moments are fixed."""
        return self.compress.method == "onebit_adam" and self.is_compressed(bucket)

    @property
    def trained(self) -> list[Share]:
        """Those that have a gradient."""
        return [share for share in self.shares if share.is_trained]

    @property
    def buckets(self) -> Buckets:
        """Of the places among the trained."""
        return buckets_of(self.trained, self.bucket_bytes, self.early)

    def is_early(self, bucket: Bucket) -> bool:
        """Whether it is reduced while the backward pass goes on."""
        return self.trained[bucket[0]].name in self.early


def zero_bytes(plan: ZeroPlan, num_micro: int) -> ZeroBytes:
    """The sum over tensors, in units of 4 bytes:

        form      weight   sum of gradients, if m > 1      optimizer
        whole     s        s                               2 s
        parts     s        s in stage 1, p in stages 2, 3  3 p
        on_use    p        p                               2 p

    All tensors are `whole` in stage 0, `parts` in stages 1 and 2; in stage 3 matrices are `on_use`, the rest `parts`.
    Groups of one rank have `whole` ones only (Rajbhandari et al., 2020, figure 1, whose 16-bit weights and gradients
    are fp32 here). Frozen weights have neither gradients nor states. What compression has lost, and PowerSGD's factors,
    count with the optimizer (`compress_costs`). With `offload`, moments and one copy of all
    weights that are updated (3 s or 3 p) are on the host, and nothing of the optimizer on the device.

    Not counted: what is alive only inside a graph, such as activations, buckets and the gradients of one micro-batch.
    """
    weights = gradients = optimizer = host = 0
    for share in plan.shares:
        updated = prod(share.updated_shape)
        weights += share.part if share.form == "on_use" else share.size
        if not share.is_trained:
            continue
        if num_micro > 1:
            gradients += updated if plan.stage > 1 else share.size
        if plan.offload:
            host += 3 * updated
        else:
            optimizer += (3 if share.form == "parts" else 2) * updated
    optimizer += lost_bytes(plan) // ELEMENT_BYTES
    counts = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "host": host}
    return ZeroBytes(**{name: ELEMENT_BYTES * count for name, count in counts.items()})


def lost_bytes(plan: ZeroPlan) -> int:
    """What a rank remembers of what compression has lost, with PowerSGD's factors."""
    return sum(_lost_bytes(plan, bucket) for bucket in plan.buckets.reduced)


def _lost_bytes(plan: ZeroPlan, bucket: Bucket) -> int:
    if not plan.is_compressed(bucket):
        return 0
    shares, compress = [plan.trained[i] for i in bucket], plan.compress
    if compress.method == "powersgd":
        return low_rank_bytes([share.shape for share in shares], compress.rank)[1]
    return _two_stage(plan, shares).lost_bytes


def _two_stage(plan: ZeroPlan, shares: Sequence[Share]) -> TwoStageSizes:
    size = sum(share.size for share in shares)
    return TwoStageSizes(size=size, ranks=plan.world.size, block=plan.compress.block)


def zero_traffic(plan: ZeroPlan, num_micro: int, *, sends_momenta: bool = False) -> Traffic:
    """`zero_sent` without what the payloads are."""
    found: Traffic = {}
    for (verb, group, _), (calls, size_bytes) in zero_sent(plan, num_micro, sends_momenta=sends_momenta).items():
        before = found.get((verb, group), (0, 0))
        found[verb, group] = before[0] + calls, before[1] + size_bytes
    return found


def zero_sent(plan: ZeroPlan, num_micro: int, *, sends_momenta: bool = False) -> Sent:
    """(verb, group, content) -> calls and payload bytes (see `comm.Comm`) of a rank in one optimizer step;
    `sends_momenta`: of one with 1-bit Adam's second moments fixed.

    r = 1 in stages 0 and 1, m in stages 2 and 3; what is repeated has q elements in rows that neighbours have too:

        all_reduce      of whole tensors: w s, once                       one call a bucket
        reduce_scatter  of those in parts: w n p, r times                 one call a bucket
        all_gather      of those in parts: 4 p, once                      one call a bucket
        all_gather      of those put together on use: 4 p, m times a use  one call each
        reduce_scatter  of those: w n p, m times a use                    one call each
        all_reduce      over neighbours: w q, r times                     one call a bucket; on use m times, a call each
        all_reduce      over the world: 4 (5 + number of tensors)         one call

    In fp16 each of these sums of gradients has an all_reduce of 4 bytes before it (`scaled`).

    Of what is compressed, instead of w s: in blocks the bytes of `TwoStageSizes.sent_bytes`, codes and scales a call
    each; with PowerSGD those of `low_rank_bytes` in two calls. With momenta sent, the all_reduce over the world has 4 k
    bytes more, for a `Sketch` of k columns.

    In groups of one rank nothing is called. A use is one in each forward pass and, but for the embedding, in each
    backward pass (`Stages.passes`). With adapters this is the most that can be: what no gradient needs is left out.
    """
    wire_bytes = ELEMENT_BYTES if plan.wire is None else WIRE_DTYPES[plan.wire].itemsize
    reductions = num_micro if plan.stage > 1 else 1
    trained, buckets = plan.trained, plan.buckets
    sent = _Sent(gradients_in(plan.wire), is_scaled=plan.wire == "fp16")
    for bucket in buckets.repeated:
        shares = [trained[i] for i in bucket]
        sent.add_sum("all_reduce", shares[0].neighbours, reductions, wire_bytes * sum(s.num_repeated for s in shares))
    for bucket in buckets.reduced:
        shares = [trained[i] for i in bucket]
        if plan.is_compressed(bucket) and (sends_momenta or not plan.sends_momenta(bucket)):
            _add_compressed(sent, plan, shares)
            continue
        group, is_whole = shares[0].group, shares[0].form == "whole"
        elements = sum(share.size if is_whole else share.part * group.size for share in shares)
        sent.add_sum("all_reduce" if is_whole else "reduce_scatter", group, reductions, wire_bytes * elements)
    for bucket in buckets.published:
        shares = [trained[i] for i in bucket]
        sent.add("all_gather", shares[0].group, "weights", 1, ELEMENT_BYTES * sum(share.part for share in shares))
    for share in plan.shares:
        if share.form != "on_use":
            continue
        gathers, times = num_micro * plan.uses[share.name].gathers, num_micro * plan.uses[share.name].reductions
        sent.add("all_gather", share.group, "weights", gathers, ELEMENT_BYTES * share.part)
        sent.add_sum("reduce_scatter", share.group, times, wire_bytes * share.part * share.group.size)
        if is_repeated(share):
            sent.add_sum("all_reduce", share.neighbours, times, wire_bytes * share.num_repeated)
    has_sketch = sends_momenta and any(plan.sends_momenta(bucket) for bucket in buckets.reduced)
    columns = SKETCH_COLUMNS if has_sketch else 0
    sent.add("all_reduce", plan.world, "figures", 1, ELEMENT_BYTES * (NUM_FIGURES + len(plan.names) + columns))
    return sent.found


def _add_compressed(sent: "_Sent", plan: ZeroPlan, shares: Sequence[Share]) -> None:
    compress, group = plan.compress, shares[0].group
    if compress.method == "powersgd":
        size_bytes, lost_bytes = low_rank_bytes([share.shape for share in shares], compress.rank)
        content: Content = COMPRESSED[compress.method] if lost_bytes else "gradients"
        sent.add_bytes("all_reduce", group, content, 2 if lost_bytes else 1, size_bytes)
        return
    for verb, size_bytes in _two_stage(plan, shares).sent_bytes(BITS[compress.method]).items():
        sent.add_bytes(verb, group, COMPRESSED[compress.method], 2, size_bytes)


class _Sent:
    """Adds up calls."""

    def __init__(self, gradients: Content, *, is_scaled: bool) -> None:
        self.found: Sent = {}
        self._gradients: Content = gradients
        self._is_scaled = is_scaled

    def add_sum(self, verb: str, group: Group | None, times: int, size_bytes: int) -> None:
        self.add(verb, group, self._gradients, times, size_bytes)
        if self._is_scaled:
            self.add("all_reduce", group, self._gradients, times, ELEMENT_BYTES)

    def add(self, verb: str, group: Group | None, content: Content, times: int, size_bytes: int) -> None:
        self.add_bytes(verb, group, content, times, times * size_bytes)

    def add_bytes(self, verb: str, group: Group | None, content: Content, calls: int, size_bytes: int) -> None:
        if group is not None and group.size > 1 and calls:
            before, total_bytes = self.found.get((verb, group.name, content), (0, 0))
            self.found[verb, group.name, content] = before + calls, total_bytes + size_bytes
