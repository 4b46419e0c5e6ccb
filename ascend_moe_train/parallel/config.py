"""How a run is spread over ranks, and what of that its model and batch allow. Pure."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ascend_moe_train.cluster.config import DeadlineConfig, RestartConfig
from ascend_moe_train.model.config import LoraConfig, ModelConfig
from ascend_moe_train.part import Part
from ascend_moe_train.train.config import BatchConfig

# What the axes are called elsewhere (Megatron-LM).
AXES_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "context_parallel_size": "parallel.cp",
        "expert_model_parallel_size": "parallel.ep",
        "expert_tensor_parallel_size": "parallel.etp",
        "pipeline_model_parallel_size": "parallel.pp",
        "tensor_model_parallel_size": "parallel.tp",
    }
)
MAX_RANKS = 2**20  # each is gone through, so that more would take for ever

ExpertWire = Literal["fp16", "bf16", "int8"]  # see parallel/rows_wire.py
DedupTokens = Literal["copies", "sums"]  # see parallel/once_per_node.py
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]  # see parallel/schedule.py
AxisSize = Annotated[int, Field(gt=0, le=MAX_RANKS)]


# Of all groups of ranks that a run may have, as messages and records call them.
GroupName = Literal[
    "world",
    "dp_cp_tp",
    "stage",
    "dp",
    "dp_cp",
    "loss",
    "edp",
    "ends",
    "tp",
    "kv_heads",
    "cp",
    "ep",
    "etp",
    "ep x etp",
    "ep inside nodes",
    "ep across nodes",
    "pp",
    "pp forward",
    "pp backward",
    "pp forward around",
    "pp backward around",
]


class SlowLinksConfig(Part):
    """To try on one machine what a slow network would do: each call of a collective among the ranks of `groups` (null
    is all) lasts `latency_s` and its payload at `bytes_per_s` (null is no limit), or as long as it takes if that is
    longer. It is an ideal network's figure, where all calls of all ranks are equally slow and none is in another's way.
    """

    latency_s: Annotated[float, Field(ge=0, le=60)] = 0.0
    bytes_per_s: Annotated[float, Field(ge=1)] | None = None
    groups: tuple[GroupName, ...] | None = None

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.latency_s == 0 and self.bytes_per_s is None:
            raise ValueError("without latency_s or bytes_per_s it has no effect: set one, or leave it out")
        if self.groups == ():
            raise ValueError("groups [] has no effect: name some, or null for all")
        return self


# The keys of one method only.
_OF_METHOD = {"rank": ("powersgd",), "block": ("int8", "onebit_adam"), "warmup_updates": ("onebit_adam",)}


class CompressConfig(Part):
    """How the gradients of dense weights are summed over ranks; what is lost is added to the next step's. Experts'
    gradients are summed as they are.

    `int8`: as multiples of a scale for each `block` of elements. `powersgd`: matrices as products of two of `rank`
    columns (Vogels et al., 2019), the rest as it is. `onebit_adam` (Tang et al., 2021): after `warmup_updates` of Adam
    its second moments stay as they are, and of first moments the signs are sent, with a scale for each `block`; without
    a number, it begins when the second moments no longer grow.
    """

    method: Literal["none", "int8", "powersgd", "onebit_adam"] = "none"
    block: Annotated[int, Field(ge=8, le=2**20, multiple_of=8)] = 1024
    rank: Annotated[int, Field(ge=1, le=64)] = 4
    warmup_updates: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        for key, methods in _OF_METHOD.items():
            value = getattr(self, key)
            if self.method not in methods and value != type(self).model_fields[key].default:
                raise ValueError(f"{key} {value} has no effect with method '{self.method}': leave it out")
        return self


class ParallelConfig(Part):
    """Sizes of the mesh axes, and how what is spread is kept and exchanged.

    `pp`, `cp` and `tp` cut the dense part into pipeline stages, sequences and heads, `ep` and `etp` the experts of a
    stage into whole ones and slices of their width. Data parallelism takes the remaining ranks of each part (dp, and
    edp for the experts): it has no key. `sequence_parallel` keeps activations between the tp regions split by tokens
    (Korthikanti et al., 2022).

    `context` is how attention sees whole sequences of which cp ranks have pieces: `ring` passes keys and values around
    (Liu et al., 2023), `ulysses` exchanges tokens for heads (Jacobs et al., 2023).

    Each pipeline stage holds `chunks` parts of the model, more than one with the `schedule` `interleaved`; their layers
    are shared out `even`ly, by `cost` (embedding, head and multi-token prediction counted), or as `stage_layers` lists
    them in the order of depth. See `parallel.schedule` and `parallel.stages`.

    `zero_stage` 1 shards the optimizer's states over data parallel ranks, 2 gradients too, 3 weights too (Rajbhandari
    et al., 2020). Gradients are reduced in buckets of `bucket_bytes`, and travel as `reduce_dtype`.
    `offload_optimizer` keeps the optimizer's states in host memory. `overlap` has a thread of its own do collectives on
    CPUs, so that gradients of blocks are summed while the backward pass goes on, and shared experts are computed while
    tokens travel. For `compress` see `CompressConfig`.

    In dropless mode a rank has room for `receive_factor` times the token rows that it sends, rows beyond are counted as
    overflow; None has room for whatever may come. `hierarchical_ranks` is the number of ranks of a node: tokens are
    then exchanged inside each node first, then across nodes. With `dedup_tokens` a token goes to each node once and is
    copied there: `copies` gives the same bits; with `sums` what comes back is added up in its node first, which rounds
    otherwise. Token rows and their gradients travel to experts and back as `expert_wire` says: fp16 or int8 with a
    scale for each row, or bf16; None is as activations are. They travel and are computed in `expert_chunks`, each of as
    many experts of every rank. For `slow_links` see `SlowLinksConfig`.
    """

    pp: AxisSize = 1
    cp: AxisSize = 1
    tp: AxisSize = 1
    ep: AxisSize = 1
    etp: AxisSize = 1
    sequence_parallel: bool = False
    context: Literal["ring", "ulysses"] = "ring"
    schedule: ScheduleName = "1f1b"
    chunks: AxisSize = 1
    stage_layers: Literal["even", "cost"] | tuple[Annotated[int, Field(gt=0)], ...] = "even"
    zero_stage: Literal[0, 1, 2, 3] = 0
    bucket_bytes: Annotated[int, Field(gt=0)] = 25 * 2**20
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    offload_optimizer: bool = False
    overlap: bool = False
    compress: CompressConfig = CompressConfig()
    receive_factor: Annotated[float, Field(ge=1)] | None = None
    hierarchical_ranks: AxisSize | None = None
    dedup_tokens: DedupTokens | None = None
    expert_wire: ExpertWire | None = None
    expert_chunks: AxisSize = 1
    deadlines: DeadlineConfig = DeadlineConfig()
    restarts: RestartConfig = RestartConfig()
    slow_links: SlowLinksConfig | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence_parallel true needs tp ranks to split tokens over, and tp is 1: set it to 2 or more"
            )
        self._check_stages()
        self._check_compression()
        if self.context != "ring" and self.cp == 1:
            raise ValueError(f"context '{self.context}' has no effect with cp 1: leave it out, or set cp")
        for key in ("receive_factor", "expert_wire"):
            if (value := getattr(self, key)) is not None and self.ep == 1:
                raise ValueError(f"{key} {value!r} has no effect with ep 1: leave it out")
        if self.expert_chunks > 1:
            self._check_chunks()
        if self.hierarchical_ranks is not None:
            self._check_nodes(self.hierarchical_ranks)
        if (how := self.dedup_tokens) is not None and self.hierarchical_ranks is None:
            raise ValueError(f"dedup_tokens '{how}' needs nodes: set hierarchical_ranks, or leave it out")
        if how is not None and (chunks := self.expert_chunks) > 1:
            raise ValueError(
                f"dedup_tokens '{how}' with expert_chunks {chunks} would send a token to a node once for each chunk: "
                "use expert_chunks 1, or leave dedup_tokens out"
            )
        return self

    def _check_stages(self) -> None:
        if self.pp == 1:
            for key, value in {
                "schedule": self.schedule,
                "chunks": self.chunks,
                "stage_layers": self.stage_layers,
            }.items():
                if value != type(self).model_fields[key].default:
                    raise ValueError(f"{key} {value!r} has no effect with pp 1: leave it out, or set pp")
        if (self.schedule == "interleaved") != (self.chunks > 1):
            raise ValueError(
                f"schedule {self.schedule!r} with chunks {self.chunks}: 'interleaved' needs 2 chunks or more on each "
                "stage, the others have 1"
            )
        if isinstance(self.stage_layers, tuple) and len(self.stage_layers) != self.pp * self.chunks:
            raise ValueError(
                f"stage_layers has {len(self.stage_layers)} numbers, pp {self.pp} x chunks {self.chunks} needs "
                f"{self.pp * self.chunks}"
            )

    def _check_compression(self) -> None:
        """What compresses does so with whole weights, gradients and moments on every rank."""
        if (method := self.compress.method) == "none":
            return
        wanted: dict[str, object] = {"pp": 1, "tp": 1, "zero_stage": 0, "reduce_dtype": "fp32"}
        for key, value in (wanted | {"offload_optimizer": False}).items():
            if (found := getattr(self, key)) != value:
                raise ValueError(
                    f"compress.method '{method}' with {key} {found}: it compresses sums of gradients that are whole on "
                    f"every rank, in fp32; set {key} to {value}, or compress.method to 'none'"
                )

    def _check_chunks(self) -> None:
        if self.ep == 1:
            raise ValueError(f"expert_chunks {self.expert_chunks} has no effect with ep 1: leave it out")
        if self.zero_stage == 3:
            raise ValueError(
                f"expert_chunks {self.expert_chunks} with zero_stage 3 would put all weights of a rank's experts "
                "together for each chunk: use zero_stage 2, or leave it out"
            )

    def _check_nodes(self, ranks: int) -> None:
        """A node holds whole experts' ranks, more than one and not all of an expert-parallel group."""
        across = self.ep * self.etp

        def is_possible(ranks: int) -> bool:
            return ranks % self.etp == 0 and across % ranks == 0 and self.etp < ranks < across

        if across == 1:
            raise ValueError(f"hierarchical_ranks {ranks} has no effect with ep 1: leave it out, or set ep")
        if not is_possible(ranks):
            raise ValueError(
                f"hierarchical_ranks {ranks} does not cut the {across} ranks of ep {self.ep} x etp {self.etp} into "
                f"nodes of several ep ranks each: {_advice(ranks, is_possible, across, 'no number does, leave it out')}"
            )


def check_parallel(
    parallel: ParallelConfig, model: ModelConfig, lora: LoraConfig | None, batch: BatchConfig, seq_len: int
) -> None:
    """Whether a model and its micro-batches can be cut as `parallel` asks, whatever the number of ranks.

    Raises ValueError with the dotted keys, their values and the nearest sizes that are possible.
    """
    _check_pipeline(parallel, model)
    if lora is not None:
        for axis in ("tp", "ep", "etp"):
            if (size := getattr(parallel, axis)) > 1:
                raise ValueError(f"parallel.{axis} {size} is impossible with lora, whose adapters are not cut: use 1")
    if model.moe is not None and model.moe.capacity_factor is not None and parallel.receive_factor is not None:
        raise ValueError(
            f"parallel.receive_factor {parallel.receive_factor} has no effect with model.moe.capacity_factor "
            f"{model.moe.capacity_factor}: set one of them to null"
        )
    if (reason := _against_pieces(parallel.cp, seq_len)) is not None:
        advice = _advice(parallel.cp, lambda size: _against_pieces(size, seq_len) is None, seq_len)
        raise ValueError(f"parallel.cp {parallel.cp}: {reason}: {advice}")
    tokens = batch.micro_sequences * seq_len // parallel.cp if model.moe or parallel.sequence_parallel else None
    _refuse("tp", parallel.tp, lambda size: _against_tp(size, model, tokens))
    _refuse("ep", parallel.ep, lambda size: _against_ep(size, model))
    _refuse("expert_chunks", parallel.expert_chunks, lambda size: _against_chunks(size, model, parallel.ep))
    _refuse("etp", parallel.etp, lambda size: _against_etp(size, model))
    if parallel.context == "ulysses":
        _refuse(
            "cp", parallel.cp, lambda size: _against_pieces(size, seq_len) or _against_heads(size, model, parallel.tp)
        )


def _check_pipeline(parallel: ParallelConfig, model: ModelConfig) -> None:
    """What of a model does not go through pipeline stages. Raises ValueError."""
    if parallel.pp == 1:
        return
    parts = parallel.pp * parallel.chunks
    if parts > model.num_layers:
        chunks = f" x parallel.chunks {parallel.chunks}" if parallel.chunks > 1 else ""
        raise ValueError(
            f"parallel.pp {parallel.pp}{chunks}: the model has {model.num_layers} layers (model.num_layers), "
            "each part needs one"
        )
    if isinstance(parallel.stage_layers, tuple) and (total := sum(parallel.stage_layers)) != model.num_layers:
        raise ValueError(f"parallel.stage_layers add up to {total}, model.num_layers is {model.num_layers}")
    if model.moe is not None and model.moe.aux_loss_scope == "model" and model.moe.aux_loss_coef:
        raise ValueError(
            f"parallel.pp {parallel.pp} is impossible with model.moe.aux_loss_scope 'model', which takes all layers "
            "together while stages run at different times: use 'batch' or 'sequence'"
        )
    if parallel.zero_stage < 2:
        return
    if parallel.chunks > 1:
        raise ValueError(
            f"parallel.zero_stage {parallel.zero_stage} is impossible with parallel.chunks {parallel.chunks}: "
            "gradients of a micro-batch are reduced when those of the whole stage are there; use zero_stage 1"
        )
    if model.tie_embeddings or model.mtp is not None:
        why = "model.tie_embeddings" if model.tie_embeddings else "model.mtp"
        raise ValueError(
            f"parallel.zero_stage {parallel.zero_stage} is impossible with parallel.pp {parallel.pp} and {why}: first "
            "and last stage would wait for each other in every micro-batch to sum the embedding's gradient; use "
            "zero_stage 1"
        )


def nearest_sizes(wanted: int, is_possible: Callable[[int], bool], most: int = MAX_RANKS) -> list[int]:
    """The nearest size below and the nearest above that are possible, of 1 to `most`."""
    below = next(filter(is_possible, range(min(wanted - 1, most), 0, -1)), None)
    above = next(filter(is_possible, range(wanted + 1, most + 1)), None)
    return [size for size in (below, above) if size is not None]


def _advice(wanted: int, is_possible: Callable[[int], bool], most: int, none: str = "") -> str:
    found = nearest_sizes(wanted, is_possible, min(most, MAX_RANKS))
    return f"use {' or '.join(map(str, found))}" if found else none


def _refuse(axis: str, size: int, against: Callable[[int], str | None]) -> None:
    """Raises ValueError if something is against this size of an axis; 1 is always possible."""
    if (reason := against(size)) is not None:
        raise ValueError(f"parallel.{axis} {size}: {reason}: {_advice(size, lambda n: against(n) is None, 2 * size)}")


def _against_pieces(cp: int, seq_len: int) -> str | None:
    """Each rank has two pieces of a sequence, so that a causal mask is equally much work for all."""
    if cp == 1 or seq_len % (2 * cp) == 0:
        return None
    return f"data.seq_len {seq_len} does not divide into 2 x {cp} pieces"


def _against_heads(cp: int, model: ModelConfig, tp: int) -> str | None:
    """Whole heads of a tp rank are shared out to cp ranks; those of keys and values are repeated where they are few."""
    heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    of_tp = f" (on each of tp {tp})" if tp > 1 else ""
    if heads % cp:
        return f"context 'ulysses' shares out model.num_heads {heads}{of_tp}, which does not divide by it"
    if kv_heads % cp and cp % kv_heads:
        return (
            f"context 'ulysses' shares out model.num_kv_heads {kv_heads}{of_tp}, which neither divides by it nor "
            "divides it"
        )
    return None


def _against_tp(tp: int, model: ModelConfig, tokens: int | None) -> str | None:
    """What forbids this size: every part of a layer that is cut by heads, width or vocabulary has to come out even."""
    if tp == 1:
        return None
    if model.qk_norm == "full":
        return "model.qk_norm 'full' is one norm over all heads, which cannot be cut"
    divided = {"model.num_heads": model.num_heads, "model.vocab_size": model.vocab_size}
    if model.moe is None or model.moe.dense_layers:
        divided["model.ffn"] = model.ffn
    if model.moe is not None:
        divided["model.moe.shared_ffn"] = model.moe.shared_ffn
    for key, size in divided.items():
        if size % tp:
            return f"{key} {size} does not divide by it"
    kv_heads = model.num_kv_heads
    if kv_heads % tp and tp % kv_heads:
        return f"model.num_kv_heads {kv_heads} neither divides by it nor divides it"
    if tokens is not None and tokens % tp:
        return f"the {tokens:,} tokens of a micro-batch on one rank do not divide by it"
    return None


def _against_ep(ep: int, model: ModelConfig) -> str | None:
    if ep == 1:
        return None
    if model.moe is None:
        return "the model has no experts (model.moe is null)"
    return (
        f"model.moe.num_experts {model.moe.num_experts} does not divide by it" if model.moe.num_experts % ep else None
    )


def _against_chunks(chunks: int, model: ModelConfig, ep: int) -> str | None:
    if model.moe is None or (local := model.moe.num_experts // ep) % chunks == 0:
        return None
    return (
        f"the {local} experts of a rank (model.moe.num_experts {model.moe.num_experts} / ep {ep}) do not divide by it"
    )


def _against_etp(etp: int, model: ModelConfig) -> str | None:
    if etp == 1:
        return None
    if model.moe is None:
        return "the model has no experts (model.moe is null)"
    return f"model.moe.ffn {model.moe.ffn} does not divide by it" if model.moe.ffn % etp else None
