"""How weights, gradients and optimizer states are shared out, and gradients put into buckets. Pure.

n ranks of a reduction group. A tensor's flat part is ceil(size / n) of its elements in row-major order; zeros fill up
the last parts, and are never seen outside of what travels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from ascend_moe_train.parallel.comm import Group
from ascend_moe_train.parallel.cuts import Gradient
from ascend_moe_train.parallel.shards import Placement, flat_part, part_size

ELEMENT_BYTES = 4  # fp32: weights, gradients, moments
CLASSES: tuple[Gradient, ...] = ("dense", "partial", "expert", "ends")

Form = Literal["whole", "parts", "on_use"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """How a rank shares one of its tensors, of local `shape`, with the group over which its gradient is summed.

    `form` `whole`: each rank of the group updates all of it. `parts`: each updates its flat part, and the weight is put
    together from them. `on_use`: the weight too is nowhere but in parts, put together when it is used.

    After the sum over the group, `weight` is what an element that this rank updates counts in sums over all ranks, so
    that each of the model's counts once. From row `repeated_from` on, `neighbours` have the same rows, each with a part
    of their gradient; they count on the first of these ranks alone.
    """

    name: str
    shape: tuple[int, ...]
    gradient: Gradient
    group: Group
    form: Form
    weight: float
    is_trained: bool = True
    repeated_from: int | None = None
    neighbours: Group | None = None

    @property
    def size(self) -> int:
        """Elements of the local tensor."""
        return prod(self.shape)

    @property
    def part(self) -> int:
        """Elements of a flat part, zeros included."""
        return part_size(self.size, self.group.size)

    @property
    def updated(self) -> tuple[int, int]:
        """(start, stop) of the local tensor's elements that this rank updates."""
        return (0, self.size) if self.form == "whole" else flat_part(self.size, self.group.size, self.group.index)

    @property
    def updated_shape(self) -> tuple[int, ...]:
        """Shape of what the optimizer sees."""
        return self.shape if self.form == "whole" else (self.part,)

    @property
    def num_repeated(self) -> int:
        """Elements in the rows that neighbours have too; the last of the local tensor."""
        return 0 if self.repeated_from is None else (self.shape[0] - self.repeated_from) * prod(self.shape[1:])

    @property
    def num_counted(self) -> int:
        """Elements, from the first that this rank updates on, that count in sums over all ranks."""
        start, stop = self.updated
        if self.neighbours is None or self.neighbours.index == 0:
            return stop - start
        return min(stop, max(start, self.size - self.num_repeated)) - start


def share_of(
    name: str,
    placement: Placement,
    *,
    group: Group,
    form: Form,
    is_trained: bool = True,
    neighbours: Group | None = None,
) -> Share:
    """The share of a placed tensor; a group of one rank has no use for parts."""
    form = "whole" if group.size == 1 else form
    repeated = placement.repeated
    return Share(
        name=name,
        shape=placement.local_shape,
        gradient=placement.gradient,
        group=group,
        form=form,
        weight=(1 if form == "whole" else group.size) / placement.replicas,
        is_trained=is_trained,
        repeated_from=None if repeated is None else repeated.start,
        neighbours=None if repeated is None else neighbours,
    )


Bucket = tuple[int, ...]


def fill_buckets(sizes: Sequence[int], places: Iterable[int], most: int) -> list[Bucket]:
    """Places one after the other into buckets, each of `most` at the most or of one place."""
    buckets: list[list[int]] = []
    room = 0
    for place in places:
        if not buckets or sizes[place] > room:
            buckets.append([])
            room = most
        buckets[-1].append(place)
        room -= sizes[place]
    return [tuple(bucket) for bucket in buckets]


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Places of trained tensors, as many together as fit; those used last come first, since their gradients do.

    Kind after kind: ranks of one group hold the same tensors of its kind, but not always of the others, and must not
    wait for each other in turn. `repeated` are summed over neighbours before the rest.
    """

    repeated: list[Bucket]
    reduced: list[Bucket]
    published: list[Bucket]


def buckets_of(shares: Sequence[Share], bucket_bytes: int, early: frozenset[str] = frozenset()) -> Buckets:
    """The buckets of one rank's tensors, in the order of their first use; sizes are those of fp32 elements. Those named
    `early` are reduced in buckets of their own, before the others."""
    sizes = [ELEMENT_BYTES * share.size for share in shares]

    def fill(chosen: Iterable[int]) -> list[Bucket]:
        places = sorted(chosen, reverse=True)
        kinds = ([i for i in places if shares[i].gradient == gradient] for gradient in CLASSES)
        return [bucket for kind in kinds for bucket in fill_buckets(sizes, kind, bucket_bytes)]

    trained = [i for i, share in enumerate(shares) if share.is_trained]
    in_backward = [i for i in trained if shares[i].form == "on_use"]
    after = [i for i in trained if shares[i].form != "on_use" and shares[i].group.size > 1]
    return Buckets(
        repeated=fill(i for i in set(trained) - set(in_backward) if is_repeated(shares[i])),
        reduced=[
            *fill(i for i in after if shares[i].name in early),
            *fill(i for i in after if shares[i].name not in early),
        ],
        published=fill(i for i in after if shares[i].form == "parts"),
    )


def is_repeated(share: Share) -> bool:
    """Whether some of its rows have to be summed over neighbours."""
    return share.neighbours is not None and share.neighbours.size > 1
