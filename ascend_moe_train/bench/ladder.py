"""The ladder of `amt bench ablate`: techniques as data, each with the keys that it changes. Pure."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from types import MappingProxyType
from typing import Literal

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.buckets import ELEMENT_BYTES
from ascend_moe_train.parallel.mesh import EXPERT_AXES, mesh_of
from ascend_moe_train.parallel.shards import placements

NumericsName = Literal["same", "order", "rounds"]
PutIn = Literal["one_by_one", "permute"]  # see put_in.py
Need = Literal["experts", "several ranks", "MPI", "fp32", "no capacity", "shared out", "whole"]

# What a technique may do to the losses: nothing; sums are taken in another order; numbers are rounded on their way.
NUMERICS: Mapping[NumericsName, str] = MappingProxyType(
    {"same": "same sums", "order": "sums in another order", "rounds": "rounds"}
)
BUCKETS_WITH_OVERLAP = 4
# What every rung begins from, whatever the run file says of it.
START = (
    "run.log_comm=true",
    "run.kernels=portable",
    "recompute={}",
    "parallel.bucket_bytes=1",
    *(f"parallel.{axis}=1" for axis in EXPERT_AXES[2:]),
    "parallel.zero_stage=0",
    "parallel.overlap=false",
    "parallel.reduce_dtype=fp32",
    "parallel.compress={}",
    "parallel.offload_optimizer=false",
    "parallel.receive_factor=null",
    "parallel.hierarchical_ranks=null",
    "parallel.dedup_tokens=null",
    "parallel.dedup_tokens=null",
    "parallel.expert_wire=null",
    "parallel.expert_chunks=1",
)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One technique. `changes` are keys of the run file laid over those of the rung that it stands `on` (of the first
    rung: over `START`); names in braces are those of `facts`. `needs` says without what it is left out, `numerics` what
    it may do to losses, and `put_in` what is put into the model that no key of a run file stands for.

    Rungs that are `beside` the ladder are tried on the rung that they name, and no other stands on them.
    """

    name: str
    says: str
    on: str | None
    changes: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    numerics: NumericsName = "order"
    put_in: PutIn | None = None
    beside: bool = False


RUNGS = (
    Rung(
        name="one_by_one",
        says="each expert by itself, over all tokens",
        on=None,
        needs=("experts", "no capacity", "fp32"),
        put_in="one_by_one",
    ),
    Rung(name="grouped", says="tokens sorted by expert, experts in one product", on="one_by_one", needs=("experts",)),
    Rung(
        name="permute",
        says="sort, permute and combine by fused kernels",
        on="grouped",
        needs=("experts",),
        put_in="permute",
    ),
    Rung(name="kernels", says="all fused kernels of the device", on="permute", changes=("run.kernels=auto",)),
    Rung(
        name="buckets",
        says="gradients summed in buckets, not one by one",
        on="kernels",
        changes=("parallel.bucket_bytes={bucket_bytes}",),
        needs=("several ranks",),
        numerics="same",
    ),
    Rung(
        name="expert_parallel",
        says="each rank has some of the experts",
        on="buckets",
        changes=("parallel.ep={ep}",),
        needs=("several ranks", "experts", "shared out"),
    ),
    Rung(
        name="overlap",
        says="collectives beside the backward pass",
        on="expert_parallel",
        changes=("parallel.overlap=true", "parallel.bucket_bytes={overlap_bytes}"),
        needs=("several ranks", "MPI"),
        numerics="same",
    ),
    Rung(
        name="reduce_bf16",
        says="gradients travel as bf16",
        on="overlap",
        changes=("parallel.reduce_dtype=bf16",),
        needs=("several ranks",),
        numerics="rounds",
    ),
    Rung(
        name="recompute",
        says="activations of experts computed again",
        on="reduce_bf16",
        changes=("recompute.policy=selective",),
        numerics="same",
    ),
    *(
        Rung(
            name=f"zero{stage}",
            says=f"{what} shared out",
            on="recompute",
            changes=(f"parallel.zero_stage={stage}",),
            needs=("several ranks",),
            beside=True,
        )
        for stage, what in ((1, "optimizer states"), (2, "gradients too"), (3, "weights of matrices too"))
    ),
    Rung(
        name="reduce_fp16",
        says="gradients travel as scaled fp16",
        on="overlap",
        changes=("parallel.reduce_dtype=fp16",),
        needs=("several ranks",),
        numerics="rounds",
        beside=True,
    ),
    *(
        Rung(
            name=method,
            says=says,
            on="overlap",
            changes=(f"parallel.compress.method={method}", *more),
            needs=("several ranks", "whole"),
            numerics="rounds",
            beside=True,
        )
        for method, says, more in (
            ("int8", "dense gradients as int8 blocks", ()),
            ("powersgd", "dense gradients as factors of rank 4", ()),
            (
                "onebit_adam",
                "signs of momenta in the second half",
                ("parallel.compress.warmup_updates={warm_up}",),
            ),
        )
    ),
    Rung(
        name="expert_wire",
        says="token rows travel as int8",
        on="expert_parallel",
        changes=("parallel.expert_wire=int8",),
        needs=("several ranks", "experts", "shared out"),
        numerics="rounds",
        beside=True,
    ),
    Rung(
        name="expert_chunks",
        says="token rows travel in two chunks of experts",
        on="expert_parallel",
        changes=("parallel.expert_chunks=2",),
        needs=("several ranks", "experts", "shared out"),
        numerics="same",
        beside=True,
    ),
)
BY_NAME: Mapping[str, Rung] = MappingProxyType({rung.name: rung for rung in RUNGS})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A rung for one run on so many ranks: all overrides, in their order, and why it is left out if it is. `on` is the
    nearest rung below it that is not."""

    rung: Rung
    overrides: tuple[str, ...]
    on: str | None = None
    why_not: str | None = None


def chosen(names: Sequence[str]) -> tuple[Rung, ...]:
    """Those rungs in the order of the ladder; all if none is named. Raises ConfigError for an unknown name."""
    for name in names:
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(BY_NAME)}"
            raise ConfigError(f"--rungs {name!r} is not a rung: {hint}")
    return tuple(rung for rung in RUNGS if not names or rung.name in names)


def start_of(config: RunConfig, ranks: int, steps: int) -> tuple[str, ...]:
    """Overrides of every rung: `START`, and a batch and length that so many ranks and steps can have.

    Raises ConfigError: the run's mesh does not fit the ranks.
    """
    fixed = prod((config.parallel.pp, config.parallel.cp, config.parallel.tp))
    if ranks % fixed:
        raise ConfigError(f"--ranks {ranks}: pp x cp x tp of the run are {fixed}, of which it is no multiple")
    sequences, dp = config.batch.global_sequences, ranks // fixed
    if sequences % dp:
        raise ConfigError(
            f"--ranks {ranks}: batch.global_sequences {sequences} does not divide by the {dp} data parallel ranks"
        )
    length = (f"run.steps={steps}",) if steps > config.run.steps else ()
    return (*START, *length, f"batch.micro_sequences={gcd(config.batch.micro_sequences, sequences // dp)}")


def facts(config: RunConfig, ranks: int, steps: int) -> dict[str, int]:
    """What the names in `Rung.changes` stand for. `config` is that of the run with `start_of`."""
    experts = config.model.moe.num_experts if config.model.moe is not None else 1
    held = placements(config.model, mesh_of(config, ranks), 0, lora=config.lora)
    dense_bytes = ELEMENT_BYTES * sum(each.local_size for each in held.values() if each.gradient == "dense")
    return {
        "ep": gcd(experts, ranks // config.parallel.pp),
        "bucket_bytes": type(config.parallel).model_fields["bucket_bytes"].default,
        "overlap_bytes": max(1, dense_bytes // BUCKETS_WITH_OVERLAP),
        "warm_up": max(1, steps // 2),
    }


def cases(
    rungs: Sequence[Rung],
    config: RunConfig,
    ranks: int,
    steps: int,
    start: Sequence[str],
    refused: Callable[[Sequence[str]], str | None],
) -> list[Case]:
    """Each rung for this run. `config` is that of the run with `start`; `refused` says why a run cannot have some
    overrides, or None."""
    known = facts(config, ranks, steps)
    found: dict[str, Case] = {}
    for rung in RUNGS:
        lower = None if rung.on is None else found[rung.on]
        if lower is not None and lower.why_not is not None:
            lower = found.get(lower.on or "")
        below = start if lower is None else lower.overrides
        overrides = (*below, *(change.format_map(known) for change in rung.changes))
        why_not = _why_not(rung, config, ranks, known) or refused(overrides)
        found[rung.name] = Case(
            rung=rung, overrides=overrides, on=lower.rung.name if lower is not None else None, why_not=why_not
        )
    return [found[rung.name] for rung in rungs]


def _why_not(rung: Rung, config: RunConfig, ranks: int, known: Mapping[str, int]) -> str | None:
    moe, is_npu = config.model.moe, config.run.device == "ascend"
    reasons: Mapping[Need, str | None] = {
        "experts": "the model has no experts" if moe is None else None,
        "several ranks": "one rank talks to nobody" if ranks == 1 else None,
        "MPI": "for ranks on CPUs" if is_npu else None,
        "fp32": f"run.precision is {config.run.precision}" if config.run.precision != "fp32" else None,
        "no capacity": "model.moe.capacity_factor drops tokens" if moe and moe.capacity_factor is not None else None,
        "shared out": "ranks and experts have no common divisor" if known["ep"] == 1 else None,
        "whole": "pp or tp cuts what is compressed" if config.parallel.pp * config.parallel.tp > 1 else None,
    }
    return next((why for need in rung.needs if (why := reasons[need]) is not None), None)
