"""What the planner predicts for a run beside what was measured, term by term, and what it would rather do. Pure."""

from collections.abc import Mapping, Sequence
from statistics import mean

from ascend_moe_train.config import RunConfig
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.planner.explain import plan_words
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.plan import TYPICAL, Job
from ascend_moe_train.planner.run_file import plan_of_run
from ascend_moe_train.planner.scored import Scored, scored
from ascend_moe_train.planner.search import search
from ascend_moe_train.planner.space import Space
from ascend_moe_train.planner.step_time import COMMUNICATION
from ascend_moe_train.profile.advice import Advice
from ascend_moe_train.profile.analysis import Analysis
from ascend_moe_train.profile.groups import is_p2p
from ascend_moe_train.profile.layout import Known
from ascend_moe_train.profile.terms import Prediction, Term

MIN_GAIN = 0.02
_KINDS: Mapping[str, tuple[str, ...]] = {
    "DP": ("gradients", "weights"),
    "TP": ("tp",),
    "CP": ("cp",),
    "PP": ("pp",),
}
# what the axes of groups are for, those of the most ranks last, since the first that fits counts
_AXES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "TP": (("tp",),),
    "EP": (("ep",),),
    "CP": (("cp",),),
    "PP": (("pp",),),
    "DP": (("dp",), ("edp",), ("dp", "cp")),
}


def known_layout(run: RunConfig, cluster: Cluster) -> Known:
    """Stages and groups of a run on so many devices. Raises ConfigError as `mesh_of` does."""
    mesh = mesh_of(run, cluster.num_devices)
    stages = {rank: mesh.coordinates(rank).pp for rank in range(cluster.num_devices)}
    groups: dict[frozenset[int], str] = {}
    for kind, choices in _AXES.items():
        for axes in choices:
            for ranks in mesh.groups(axes):
                if len(ranks) > 1:
                    groups.setdefault(frozenset(ranks), kind)
    return Known(stages=stages if mesh.pp > 1 else {}, groups=groups)


def predict(run: RunConfig, cluster: Cluster, analysis: Analysis) -> Prediction:
    """Raises ConfigError for a precision that the devices do not have."""
    job = Job(
        model=run.model,
        seq_len=run.data.seq_len,
        global_sequences=run.batch.global_sequences,
        precision=run.run.precision,
    )
    cluster.device.peak(job.precision)
    own = scored(job, cluster, plan_of_run(run, cluster.num_devices), TYPICAL)
    measured_ms = max((rank.e2e_us for rank in analysis.ranks if rank.steps), default=0.0) / 1e3
    peaks = [each.value for each in analysis.figures if each.name == "memory_peak" and each.value is not None]
    ratio = own.time.step_s * 1e3 / measured_ms if measured_ms > 0 else None
    return Prediction(
        cluster=cluster.name,
        terms=tuple(_terms(own, analysis, measured_ms)),
        mfu_predicted=own.time.mfu,
        mfu_measured=own.time.mfu * ratio if ratio is not None else None,
        memory_predicted_gb=own.memory.peak_bytes / 1e9,
        memory_measured_gb=max(peaks) * 2**20 / 1e9 if peaks else None,
        rates=tuple(_rates(cluster, analysis)),
        advice=_rather(job, cluster, own, measured_ms),
    )


def _terms(own: Scored, analysis: Analysis, measured_ms: float) -> list[Term]:
    items = {name: value * 1e3 for name, value in own.time.items.items()}
    listed = {name for names in _KINDS.values() for name in names}
    routed = [name for name in COMMUNICATION if name not in listed]
    others = {*COMMUNICATION, "bubble", "straggler"}
    with_steps = [rank for rank in analysis.ranks if rank.steps]
    waits = _waits_ms(analysis, p2p=False)
    stages = [each.computing_ms for each in analysis.stages]
    computing = max(stages) if stages else mean([rank.computing_us / 1e3 for rank in with_steps] or [0.0])
    bubbles = [each.p2p_wait_ms for each in analysis.stages if each.p2p_wait_ms is not None]
    kinds = {"EP": tuple(routed), **_KINDS}
    return [
        Term(name="step", predicted_ms=sum(items.values()), measured_ms=measured_ms or None),
        Term(
            name="computing, slowest stage",
            predicted_ms=sum(value for name, value in items.items() if name not in others),
            measured_ms=computing if with_steps else None,
        ),
        *(
            Term(
                name=f"exposed {kind}, moving",
                predicted_ms=sum(items.get(name, 0.0) for name in names),
                measured_ms=_moving_ms(analysis, kind),
            )
            for kind, names in kinds.items()
        ),
        Term(name="bubble", predicted_ms=items.get("bubble", 0.0), measured_ms=mean(bubbles) if bubbles else None),
        Term(name="waiting for others", predicted_ms=items.get("straggler", 0.0), measured_ms=waits),
        Term(
            name="device idle (free)",
            predicted_ms=None,
            measured_ms=mean(rank.free_us / 1e3 for rank in with_steps) if with_steps else None,
        ),
    ]


def _moving_ms(analysis: Analysis, kind: str) -> float | None:
    """Exposed less waiting; not known where it, or some group, is not."""
    found = next((each for each in analysis.kinds if each.kind == kind), None)
    if found is None:
        is_known = bool(analysis.kinds) and all(each.kind != "unknown" for each in analysis.kinds)
        return 0.0 if is_known else None
    return None if found.exposed_ms is None else max(0.0, found.exposed_ms - (found.wait_ms or 0.0))


def _waits_ms(analysis: Analysis, *, p2p: bool) -> float | None:
    """Waiting in collectives, or in messages, a step, mean over ranks; None where nothing was matched."""
    shared = [each for each in analysis.matching.shared if is_p2p(each.kind) == p2p]
    if not shared:
        return None
    steps = {rank.rank: rank.num_steps for rank in analysis.ranks}
    waits = sum(each.wait_ms(rank) / steps[rank] for each in shared for rank in each.by_rank)
    return waits / len({rank for each in shared for rank in each.by_rank})


def _rates(cluster: Cluster, analysis: Analysis) -> list[tuple[str, float, float]]:
    """HCCS, SIO and PCIE against a pair's link inside a node, RDMA against that between nodes."""
    links = {"RDMA": cluster.device.across}
    return [
        (each.transport, each.gb_per_s, links.get(each.transport, cluster.device.inside).bytes_per_s / 1e9)
        for each in analysis.links
    ]


def _rather(job: Job, cluster: Cluster, own: Scored, measured_ms: float) -> Advice | None:
    found = search(job, cluster, objective="throughput", imbalance=TYPICAL, space=Space.of(job, cluster), top=1)
    if not found.best:
        return None
    best = found.best[0]
    share = 1 - best.time.step_s / own.time.step_s
    if share < MIN_GAIN:
        return None
    return Advice(
        title="the planner knows a faster layout",
        gain_ms=share * measured_ms,
        figures=(
            f"predicted for this run {own.time.step_s * 1e3:.1f} ms ({plan_words(own.plan)}), for the other "
            f"{best.time.step_s * 1e3:.1f} ms; the same share of what was measured",
        ),
        keys=_changed(own, best),
        action=plan_words(best.plan),
    )


def _changed(own: Scored, best: Scored) -> tuple[str, ...]:
    """The keys in which the two plans differ."""
    elsewhere = {"micro_sequences": "batch.micro_sequences", "recompute": "recompute.policy"}
    elsewhere |= {"recompute_layers": "recompute.layers", "recompute_kept": "recompute.kept"}
    names: Sequence[str] = [
        name
        for name in own.plan.__dataclass_fields__
        if name != "num_devices" and getattr(own.plan, name) != getattr(best.plan, name)
    ]
    return tuple(elsewhere.get(name, f"parallel.{name}") for name in names)
