"""How long collectives take, by verb, group, placement and size. Pure.

Ring algorithms (Thakur et al., 2005): of B bytes in a group of n, all-gather and reduce-scatter move (n - 1) / n B
through each device, all-reduce twice that. An all-to-all moves the same directly, to each peer over its own way.
"""

from math import prod
from typing import NamedTuple

from ascend_moe_train.parallel.mesh import DENSE_AXES, EXPERT_AXES
from ascend_moe_train.planner.efficiency import Efficiency
from ascend_moe_train.planner.hardware import Cluster, LinkClass
from ascend_moe_train.planner.plan import Plan

HOP_SHARE = 0.25  # of a call's latency, for each further step of a ring
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "ring": 1}


class Span(NamedTuple):
    """A group of `size` devices, of which `inside` are in one node."""

    size: int
    inside: int

    @property
    def is_across(self) -> bool:
        """Whether it spans nodes."""
        return self.inside < self.size


def span(plan: Plan, axis: str, devices_per_node: int) -> Span:
    """The group along an axis, from the order of ranks (`parallel.mesh`): size and stride, in nodes of so many."""
    if axis == "dp x cp":
        size, stride = plan.dp * plan.cp, plan.tp
    else:
        order = DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
        size, stride = getattr(plan, axis), prod(getattr(plan, inner) for inner in order[order.index(axis) + 1 :])
    return Span(size, min(size, max(1, devices_per_node // stride)))


def collective_s(
    verb: str, size_bytes: float, group: Span, cluster: Cluster, efficiency: Efficiency, *, far_share: float = 1.0
) -> float:
    """Seconds of one call; `far_share` of an all-to-all's bytes across nodes is sent. Inside a node: at the rate of a
    group of that size. Across nodes a ring is as fast as its slowest part, where all devices of the group in a node
    share out the crossing; an all-to-all sends each part its own way, both at once."""
    n = group.size
    if n <= 1 or size_bytes <= 0:
        return 0.0
    inside, across = cluster.device.inside, cluster.device.across
    moved = _PASSES[verb] * size_bytes * (n - 1) / n
    if not group.is_across:
        return _way_s(moved, n - 1, inside, inside.rate(n) * efficiency.inside)
    if verb == "all_to_all":
        near = size_bytes * (group.inside - 1) / n
        far = far_share * size_bytes * (n - group.inside) / n
        return max(
            _way_s(near, 1, inside, inside.rate(group.inside) * efficiency.inside),
            _way_s(far, 1, across, across.bytes_per_s * efficiency.across),
        )
    rate = across.bytes_per_s * efficiency.across * (group.inside if verb != "ring" else 1)
    if group.inside > 1:
        rate = min(rate, inside.rate(group.inside) * efficiency.inside)
    hops = -(-n // group.inside) - 1
    return _way_s(moved, hops, across, rate)


def send_s(size_bytes: float, group: Span, cluster: Cluster, efficiency: Efficiency) -> float:
    """Seconds of a message to a neighbour, over one pair's link inside a node."""
    device = cluster.device
    if group.is_across:
        return _way_s(size_bytes, 1, device.across, device.across.bytes_per_s * efficiency.across)
    return _way_s(size_bytes, 1, device.inside, device.inside.bytes_per_s * efficiency.inside)


def _way_s(moved_bytes: float, steps: int, link: LinkClass, rate: float) -> float:
    """The latency of a call and of each step from node to node or device to device, and a rate that small messages do
    not reach: b / (b + knee) of it, with the knee of a whole call."""
    if moved_bytes <= 0:
        return 0.0
    return link.latency_s + steps * HOP_SHARE * link.latency_s + (moved_bytes + link.knee_bytes * min(1, steps)) / rate
