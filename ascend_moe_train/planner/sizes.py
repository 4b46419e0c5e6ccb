"""Other sizes: the smallest cluster for a model, the largest model for a cluster, the cheapest cluster. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ascend_moe_train.model.counts import num_parameters
from ascend_moe_train.planner.hardware import MAX_DEVICES, Cluster
from ascend_moe_train.planner.memory import Memory
from ascend_moe_train.planner.plan import Imbalance, Job, Plan
from ascend_moe_train.planner.scored import Scored, leanest
from ascend_moe_train.planner.search import search
from ascend_moe_train.planner.space import Space

MAX_DOUBLINGS = 14
MAX_LAYERS = 4096
FRACTIONS = 4  # sizes of clusters that are tried between one and its double, in nodes


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A job that fits a cluster, by this plan, the leanest."""

    job: Job
    cluster: Cluster
    plan: Plan
    memory: Memory


def fit(job: Job, cluster: Cluster, imbalance: Imbalance, *, offload: bool = True) -> Fit | None:
    """Any plan with room on every device; None if there is none. Without `offload` states stay on the devices."""
    space, _ = Space.of(job, cluster, offload=(False, True) if offload else (False,)).without_impossible(job)
    found = leanest(job, cluster, space, imbalance, first_fit=True)
    if found is None or not found[1].fits(cluster.device):
        return None
    return Fit(job=job, cluster=cluster, plan=found[0], memory=found[1])


def smallest_cluster(job: Job, cluster: Cluster, imbalance: Imbalance, *, offload: bool = True) -> Fit | None:
    """The fewest devices, of 1, 2, 4 ... in a node, then of whole nodes, with as many sequences a step as before but
    rounded up to a multiple of the devices; None if none of the sizes that are tried has room."""
    least = num_parameters(job.model) * job.engine.weight_bytes / cluster.device.memory_bytes
    for size in sizes(cluster):
        found = fit(_shared_by(job, size), cluster.of(size), imbalance, offload=offload) if size >= least else None
        if found is not None:
            return found
    return None


def largest_model(job: Job, cluster: Cluster, imbalance: Imbalance, *, offload: bool = True) -> Fit | None:
    """The most layers of this shape that fit, to one in fifty; None if not even one does."""
    low, high = 0, max(1, job.model.num_layers)
    best: Fit | None = None
    while high < MAX_LAYERS and (found := fit(_of_layers(job, high), cluster, imbalance, offload=offload)) is not None:
        low, high, best = high, 2 * high, found
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        found = fit(_of_layers(job, middle), cluster, imbalance, offload=offload)
        if found is None:
            high = middle
        else:
            low, best = middle, found
    return best


def cheapest(job: Job, cluster: Cluster, imbalance: Imbalance, top: int) -> list[tuple[Cluster, Scored]]:
    """Clusters of up to that many devices by device-seconds of a step, the least first."""
    found = []
    for size in sizes(cluster):
        if size > cluster.num_devices:
            break
        smaller = cluster.of(size)
        best = search(job, smaller, imbalance=imbalance, top=1).best if _is_shared(job, size) else ()
        if best:
            found.append((smaller, best[0]))
    return sorted(found, key=lambda pair: pair[0].num_devices * pair[1].time.step_s)[:top]


def sizes(cluster: Cluster) -> Iterator[int]:
    """Numbers of devices, ascending: powers of two in a node, then whole nodes, four to each doubling."""
    node = cluster.device.devices_per_node
    size = 1
    while size < node:
        yield size
        size *= 2
    nodes = {
        fraction * 2**power // FRACTIONS
        for power in range(MAX_DOUBLINGS)
        for fraction in range(FRACTIONS, 2 * FRACTIONS)
    }
    yield from (count * node for count in sorted(nodes) if count and count * node <= MAX_DEVICES)


def parameters_of(found: Fit) -> int:
    """Of the model that fits."""
    return num_parameters(found.job.model)


def _shared_by(job: Job, size: int) -> Job:
    return replace(job, global_sequences=-(-job.global_sequences // size) * size)


def _is_shared(job: Job, size: int) -> bool:
    return job.global_sequences % size == 0


def _of_layers(job: Job, num_layers: int) -> Job:
    """The same with more or fewer layers at the end."""
    model = job.model
    changes: dict[str, object] = {"num_layers": num_layers}
    if model.moe is not None:
        dense = tuple(layer for layer in model.moe.dense_layers if layer < num_layers)
        changes["moe"] = model.moe.model_copy(update={"dense_layers": dense})
    if model.attention.window_layers:
        windowed = tuple(layer for layer in model.attention.window_layers if layer < num_layers)
        changes["attention"] = model.attention.model_copy(update={"window_layers": windowed})
    return replace(job, model=model.model_copy(update=changes))
