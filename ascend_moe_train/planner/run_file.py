"""Run files that say what a plan says. Pure."""

import copy
from collections.abc import Mapping
from dataclasses import replace

from ascend_moe_train import strict_yaml
from ascend_moe_train.config import ModelOfRun, RunConfig, resolve
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.expert_sizes import ExpertSizes
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.parallel.stages import stages_of
from ascend_moe_train.planner.plan import OURS, TYPICAL, Imbalance, Job, Plan, even_layers
from ascend_moe_train.planner.techniques import Techniques
from ascend_moe_train.strict_yaml import Value

# what of section `parallel` a plan does not choose, and so leaves as it was
MAX_IMBALANCE = 100_000
KEPT = ("receive_factor", "deadlines", "restarts", "slow_links")
# and what plans for the memory of other software do not have
OURS_ONLY = ("bucket_bytes", "reduce_dtype", "overlap")


def planned(
    tree: Mapping[str, Value],
    job: Job,
    plan: Plan,
    source: str,
    imbalance: Imbalance = TYPICAL,
    model_of_run: ModelOfRun | None = None,
) -> dict[str, Value]:
    """A run file's tree with the sections that a plan chooses; what it says besides stays as it is. In dropless mode
    ranks have room for as many rows as memory was predicted with, unless the file says for how many.

    Raises ConfigError if the run cannot be one: it says something else that does not go with the plan.
    """
    found = copy.deepcopy(dict(tree))
    before = found.get("parallel")
    names = KEPT if job.engine == OURS else (*KEPT, *OURS_ONLY)
    kept = {key: before[key] for key in names if key in before} if isinstance(before, dict) else {}
    if not _has_room_to_choose(job, plan):
        kept.pop("receive_factor", None)
    elif kept.get("receive_factor") is None:
        kept["receive_factor"] = imbalance.worst
    chosen = plan.parallel().model_dump(mode="json", exclude_defaults=True)
    if plan.stage_layers == even_layers(job.model.num_layers, len(plan.stage_layers)):
        chosen.pop("stage_layers", None)
    found["parallel"] = {**chosen, **kept}
    found.pop("recompute", None)
    if plan.recompute != "none":
        layers = {} if plan.recompute_layers is None else {"layers": plan.recompute_layers}
        kept = {} if plan.recompute_kept == "stage_input" else {"kept": plan.recompute_kept}
        found["recompute"] = {"policy": plan.recompute, **layers, **kept}
    sections: dict[str, dict[str, Value]] = {
        "batch": {"global_sequences": job.global_sequences, "micro_sequences": plan.micro_sequences},
        "data": {"seq_len": job.seq_len},
        "run": {"precision": job.precision},
    }
    for name, keys in sections.items():
        section = found.get(name)
        found[name] = {**(section if isinstance(section, dict) else {}), **keys}
    run = resolve(copy.deepcopy(found), {}, source, (), model_of_run)
    mesh_of(run, plan.num_devices)
    return found


def _has_room_to_choose(job: Job, plan: Plan) -> bool:
    moe = job.model.moe
    return moe is not None and moe.capacity_factor is None and plan.ep > 1


def with_room(run: RunConfig, num_devices: int, imbalance: Imbalance) -> Imbalance:
    """An imbalance whose worst case is the room that a run's ranks have for rows in dropless mode, filled or not."""
    moe, mesh = run.model.moe, mesh_of(run, num_devices)
    if moe is None or moe.capacity_factor is not None or mesh.ep == 1:
        return imbalance
    tokens = run.batch.micro_sequences * run.data.seq_len // (mesh.cp * mesh.tp)
    whole = ExpertSizes.of(moe, mesh, tokens, run.parallel.receive_factor)
    chunks = run.parallel.expert_chunks
    room = chunks * replace(whole, chunks=chunks).receive_rows / whole.send_rows
    return Imbalance(expected=min(imbalance.expected, room), worst=room)


def run_text(tree: Mapping[str, Value], heading: str) -> str:
    """YAML with a comment above."""
    return f"# {heading}\n" + strict_yaml.dump(dict(tree))


def plan_of_run(run: RunConfig, num_devices: int) -> Plan:
    """The plan that a run file describes. Raises ConfigError as `mesh_of` does."""
    mesh_of(run, num_devices)
    parallel = run.parallel.model_dump(mode="python", include=set(Plan.__dataclass_fields__) - {"stage_layers"})
    parallel["techniques"] = Techniques.of(run.parallel)
    bounds = stages_of(run).bounds
    return Plan(
        num_devices=num_devices,
        stage_layers=tuple(stop - first for first, stop in bounds),
        micro_sequences=run.batch.micro_sequences,
        recompute=run.recompute.policy,
        recompute_layers=run.recompute.layers,
        recompute_kept=run.recompute.kept,
        **parallel,
    )


def imbalance_of(worst: float | None) -> Imbalance:
    """Tokens of the busiest device through the mean, at worst; a step as a whole has three tenths of what is above 1,
    as in the default. Raises ConfigError."""
    if worst is None:
        return Imbalance()
    if not 1 <= worst < MAX_IMBALANCE:
        raise ConfigError(f"imbalance {worst}: the busiest through the mean is from 1 (balanced) to {MAX_IMBALANCE:,}")
    return Imbalance(expected=1 + 0.3 * (worst - 1), worst=worst)
