"""What the search chooses from. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import Slice
from ascend_moe_train.planner.plan import KEPT, RECOMPUTE, Job, Kept, Plan, Recompute, check, even_layers
from ascend_moe_train.planner.techniques import PLAIN, Techniques

MAX_STAGES = 64
MAX_CONTEXT = 64
MAX_MICRO = 32
MAX_CHUNKS = 8
Zero = Literal[0, 1, 2, 3]
ZEROS: tuple[Zero, ...] = (0, 1, 2, 3)
Variant = tuple[Zero, bool]
"""How states are kept: ZeRO stage, and whether in host memory."""
Policy = tuple[Recompute, Kept]
"""What is recomputed, and whose inputs are kept."""
_SPEED = (1, 0, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Space:
    """Sizes of each axis and the other choices, each of which is combined with each that it is possible with.

    tp and the width of experts are cut inside a node only. `sequence_parallel` goes with tp above 1. All have the
    `techniques` that have an effect on them.
    """

    num_devices: int
    tp: tuple[int, ...]
    cp: tuple[int, ...]
    contexts: tuple[Literal["ring", "ulysses"], ...] = ("ring", "ulysses")
    sequence_parallel: tuple[bool, ...] = (True, False)
    ep: tuple[int, ...]
    expert_tp: tuple[int, ...]
    pp: tuple[int, ...]
    chunks: tuple[int, ...]
    schedules: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zero_bubble")
    micro: tuple[int, ...]
    zero: tuple[Zero, ...] = ZEROS
    recompute: tuple[Recompute, ...] = RECOMPUTE
    kept: tuple[Kept, ...] = KEPT
    offload: tuple[bool, ...] = (False, True)
    techniques: Techniques = PLAIN

    @classmethod
    def of(cls, job: Job, cluster: Cluster, **limits: object) -> Self:
        """Everything for a job on a cluster; `limits` replace fields. Dense gradients are summed in few bits where they
        are whole on every device (`ParallelConfig`)."""
        count, model = cluster.num_devices, job.model
        sizes = [n for n in range(1, min(count, max(256, model.num_layers)) + 1) if count % n == 0]
        node = [n for n in sizes if n <= cluster.devices_per_node]
        experts = model.moe.num_experts if model.moe is not None else 1
        found = cls(
            num_devices=count,
            tp=tuple(node),
            cp=tuple(n for n in sizes if n <= MAX_CONTEXT and (n == 1 or job.seq_len % (2 * n) == 0)),
            ep=tuple(n for n in sizes if experts % n == 0),
            expert_tp=tuple(node) if model.moe is not None else (1,),
            pp=tuple(n for n in sizes if n <= min(MAX_STAGES, model.num_layers)),
            chunks=tuple(range(1, MAX_CHUNKS + 1)),
            micro=tuple(n for n in _powers_of_two(MAX_MICRO) if job.global_sequences % n == 0),
            offload=(False,) if cluster.device.kind == "cpu" else (False, True),  # there it is the same memory
        )
        found = replace(found, **limits)  # type: ignore[arg-type]  # names are those of the fields
        return (
            replace(found, tp=(1,), pp=(1,), zero=(0,), offload=(False,)) if found.techniques.is_compressed else found
        )

    def cuts(self, job: Job) -> Iterator[Slice]:
        """Every way to cut a block that is possible for some number of stages."""
        for tp in self.tp:
            for cp, context in self._contexts():
                for micro in self.micro:
                    for ep in self.ep:
                        for width in self.expert_tp:
                            for is_parallel in self.sequence_parallel if tp > 1 else (False,):
                                cut = Slice(tp, is_parallel, cp, context, ep, width, micro)
                                if any(True for _ in self.stages(job, cut)):
                                    yield cut

    def stages(self, job: Job, cut: Slice) -> Iterator[int]:
        """Numbers of stages that go with a cut: ranks and sequences divide."""
        for pp in self.pp:
            of_stage, rest = divmod(self.num_devices, pp)
            if rest or of_stage % (cut.tp * cut.cp) or of_stage % (cut.ep * cut.etp):
                continue
            if job.global_sequences % (of_stage // (cut.tp * cut.cp) * cut.micro_sequences) == 0:
                yield pp

    def pipelines(self, pp: int, num_layers: int) -> Iterator[tuple[ScheduleName, int]]:
        """Schedules and chunks for so many stages."""
        if pp == 1:
            yield "1f1b", 1
            return
        for name in self.schedules:
            if name != "interleaved":
                yield name, 1
            else:
                yield from ((name, n) for n in self.chunks if n > 1 and pp * n <= num_layers)

    def variants(self) -> tuple[Variant, ...]:
        """How states can be kept, roughly the fastest first."""
        return tuple((zero, offload) for offload in self.offload for zero in sorted(self.zero, key=_SPEED.index))

    def policies(self, job: Job, pp: int) -> tuple[Policy, ...]:
        """Policies and whose inputs are kept: of blocks only where they are recomputed and stages go forward again."""
        has_stages = pp > 1 and job.engine.keeps == "inputs"
        return tuple(
            (policy, kept)
            for policy in self.recompute
            for kept in self.kept
            if kept == "stage_input" or (policy == "full" and has_stages)
        )

    def refused_variants(self, job: Job, pp: int, chunks: int) -> dict[Zero, str]:
        """ZeRO stages that the model forbids with such a pipeline, and why."""
        layers = even_layers(job.model.num_layers, pp * chunks)
        plan = Plan(num_devices=pp, pp=pp, chunks=chunks, stage_layers=layers)
        plan = replace(plan, schedule="interleaved") if chunks > 1 else plan
        reasons = {zero: check(job, replace(plan, zero_stage=zero)) for zero in self.zero}
        return {zero: reason for zero, reason in reasons.items() if reason is not None}

    def without_impossible(self, job: Job) -> tuple[Self, dict[str, str]]:
        """The space without sizes that the model forbids whatever the others are, and why: `tp 16` -> reason."""
        refused: dict[str, str] = {}
        kept: dict[str, Any] = {}
        for name, axis in {"tp": "tp", "ep": "ep", "expert_tp": Slice._fields[5], "pp": "pp"}.items():
            sizes = []
            for size in getattr(self, name):
                reason = check(replace(job, global_sequences=size), _alone(job, axis, size))
                if reason is None:
                    sizes.append(size)
                else:
                    refused[f"{axis} {size}"] = reason.removeprefix(f"parallel.{axis} {size}: ")
            kept[name] = tuple(sizes)
        return replace(self, **kept), refused

    def _contexts(self) -> Iterator[tuple[int, Literal["ring", "ulysses"]]]:
        for cp in self.cp:
            for context in self.contexts if cp > 1 else ("ring",):
                yield cp, "ulysses" if context == "ulysses" else "ring"


def _alone(job: Job, axis: str, size: int) -> Plan:
    """A plan of one such axis."""
    layers = even_layers(job.model.num_layers, size if axis == "pp" else 1)
    sizes: dict[str, Any] = {axis: size}
    return Plan(num_devices=size, stage_layers=layers, **sizes)


def _powers_of_two(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
