"""How a run goes on over another number of ranks than it was laid out for. Pure."""

import json

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.plan import Job
from ascend_moe_train.planner.run_file import KEPT, OURS_ONLY
from ascend_moe_train.planner.search import search

# What of section `parallel` has nothing to do with the number of ranks; what tokens travel by goes with ep above 1.
_STAYS = (*KEPT, *OURS_ONLY, "compress")
_WITH_EXPERTS = ("expert_wire", "receive_factor")


def settings_on(run: RunConfig, cluster: Cluster) -> list[str]:
    """Overrides (section.key=value) with which a run goes on over all devices of a cluster, with the same numbers: none
    where its layout fits them as it is, else those of the fastest plan.

    Raises ConfigError: nothing fits.
    """
    try:
        mesh_of(run, cluster.num_devices)
    except ConfigError:
        return _planned(run, cluster)
    return []


def _planned(run: RunConfig, cluster: Cluster) -> list[str]:
    job = Job(
        model=run.model,
        seq_len=run.data.seq_len,
        global_sequences=run.batch.global_sequences,
        precision=run.run.precision,
    )
    found = search(job, cluster, top=1)
    if not found.best:
        raise ConfigError(f"no layout of this run fits {cluster.num_devices} devices: amt plan tells why")
    plan = found.best[0].plan
    chosen = plan.parallel().model_dump(mode="json", exclude=set(_STAYS))
    if plan.ep > 1:
        chosen = {key: value for key, value in chosen.items() if key not in _WITH_EXPERTS}
    wanted = {f"parallel.{key}": value for key, value in chosen.items()}
    wanted["batch.micro_sequences"] = plan.micro_sequences
    kept = plan.recompute_kept if plan.recompute == "full" else "stage_input"
    recompute = {"policy": plan.recompute, "layers": plan.recompute_layers, "kept": kept}
    wanted |= {f"recompute.{key}": value for key, value in recompute.items()}
    now = run.model_dump(mode="json")
    return [f"{key}={json.dumps(value)}" for key, value in wanted.items() if _at(now, key) != value]


def _at(tree: dict[str, object], key: str) -> object:
    section, name = key.split(".")
    found = tree[section]
    return found.get(name) if isinstance(found, dict) else None
