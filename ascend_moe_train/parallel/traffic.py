"""What the forward and backward passes of one optimizer step put into collectives, in closed form. Pure.

Of payloads see `comm.Comm`; of gradients, optimizer and gathered weights see `zero_costs`. All ranks together, since
only then do the token rows of the experts not depend on the routing.

T tokens of a micro-batch on one dp rank, t of them on one tp rank (T / tp); D hidden, a bytes of an activation; E
experts, K of them for a token; R rows that a rank has room for.
"""

from collections import defaultdict
from collections.abc import Iterator

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.parallel.expert_sizes import ExpertSizes
from ascend_moe_train.parallel.mesh import Mesh, num_micro

Traffic = dict[tuple[str, str], int]
_Sent = Iterator[tuple[str, str, int]]

_FP32_BYTES = 4


def model_traffic(run: RunConfig, mesh: Mesh, accepted: int) -> Traffic:
    """(verb, group) -> payload bytes of all ranks in one step. `accepted` are the assignments of all layers that were
    not dropped.

    tp, forward and backward of a micro-batch on each rank (Korthikanti et al., 2022, section 4.2.2):

        residual stream           around attention, dense FFN     around embedding          around head
        whole on every rank       all_reduce 2 T D a              all_reduce T D a          all_reduce T D a
        split by tokens           all_gather 2 t D a,             all_gather t D a,         all_gather t D a,
                                  reduce_scatter 2 T D a          reduce_scatter T D a      reduce_scatter T D a

    The loss is an all_reduce of 4 T and one of 8 T bytes. Shared experts are as a dense FFN of a stream that is split;
    a stream that is whole is split before experts and gathered after them: all_gather 2 t D a. The experts' part: see
    `GlobalFigures`, `Admission` and `ExpertDispatcher`. Each block of multi-token prediction has an embedding, a head
    and a loss of its own.
    """
    totals: Traffic = defaultdict(int)
    micro_batches = num_micro(run.batch, mesh)
    for verb, group, payload_bytes in (*_tensor(run, mesh), *_experts(run, mesh)):
        totals[verb, group] += mesh.world_size * micro_batches * payload_bytes
    if run.model.moe is not None and mesh.ep > 1:
        row_bytes = run.model.hidden * _activation_bytes(run)
        nodes = run.parallel.hierarchical_ranks is not None
        for group in ("ep inside nodes", "ep across nodes") if nodes else ("ep",):
            totals["all_to_all_v", group] += 4 * accepted * row_bytes
    return dict(totals)


def exchanges(run: RunConfig, mesh: Mesh) -> dict[tuple[str, ...], str]:
    """What the groups along each axis do with the activations of a micro-batch, in words."""
    parallel, model = run.parallel, run.model
    tokens = run.batch.micro_sequences * run.data.seq_len // mesh.cp
    rows = tokens // mesh.tp * (model.moe.top_k if model.moe is not None else 0)
    summing = "gather and reduce-scatter" if parallel.sequence_parallel else "sum"
    nodes = "" if parallel.hierarchical_ranks is None else f", first inside nodes of {parallel.hierarchical_ranks}"
    return {
        ("pp",): "hand activations and their gradients from stage to stage",
        ("cp",): f"exchange keys and values of {tokens:,} tokens each",
        ("tp",): f"{summing} activations ({tokens:,}, {model.hidden}) around attention and feed-forward",
        ("ep",): f"send ({rows:,}, {model.hidden}) token rows each to the ranks of their experts and back{nodes}",
        ("etp",): "gather token rows before experts that are cut in width, and sum what comes out",
    }


def _activation_bytes(run: RunConfig) -> int:
    return _FP32_BYTES if run.run.precision == "fp32" else 2


def _tokens(run: RunConfig, mesh: Mesh) -> int:
    return run.batch.micro_sequences * run.data.seq_len // mesh.cp


def _tensor(run: RunConfig, mesh: Mesh) -> _Sent:
    if mesh.tp == 1:
        return
    model, T = run.model, _tokens(run, mesh)
    whole = T * model.hidden * _activation_bytes(run)
    part = whole // mesh.tp

    def both_ways(times: int) -> _Sent:
        """Around what needs all tokens: once forward, once backward."""
        if run.parallel.sequence_parallel:
            yield "all_gather", "tp", times * part
            yield "reduce_scatter", "tp", times * whole
        else:
            yield "all_reduce", "tp", times * whole

    depth = model.mtp.depth if model.mtp is not None else 0
    layers = range(model.num_layers + depth)
    num_moe = sum(model.is_moe(layer) for layer in layers)
    yield from both_ways(2 * len(layers) + 2 * (len(layers) - num_moe) + 2 * (1 + depth))
    yield "all_reduce", "tp", (1 + depth) * 3 * T * _FP32_BYTES
    if model.moe is not None and model.moe.shared_ffn:
        yield "all_gather", "tp", num_moe * 2 * part
        yield "reduce_scatter", "tp", num_moe * 2 * whole
    if not run.parallel.sequence_parallel:
        yield "all_gather", "tp", num_moe * 2 * part


def _experts(run: RunConfig, mesh: Mesh) -> _Sent:
    moe, model = run.model.moe, run.model
    if moe is None or mesh.world_size == 1:
        return
    depth = model.mtp.depth if model.mtp is not None else 0
    layers = sum(model.is_moe(layer) for layer in range(model.num_layers + depth))
    sequences = mesh.dp * run.batch.micro_sequences if moe.aux_loss_scope == "sequence" else 1
    yield "all_reduce", "stage", layers * _FP32_BYTES * (2 * sequences * moe.num_experts + 1)
    sizes = ExpertSizes.of(moe, mesh, _tokens(run, mesh) // mesh.tp, run.parallel.receive_factor)
    if moe.capacity_factor is not None:
        yield "all_gather", "stage", layers * _FP32_BYTES * _admission_numbers(moe, sizes)
    elif mesh.ep * mesh.etp > 1:
        yield "all_gather", "ep x etp", layers * _FP32_BYTES * moe.num_experts
    if mesh.etp > 1:
        rows_bytes = sizes.receive_rows * model.hidden * _activation_bytes(run)
        yield "all_gather", "etp", layers * 2 * rows_bytes
        yield "reduce_scatter", "etp", layers * 2 * mesh.etp * rows_bytes


def _admission_numbers(moe: MoEConfig, sizes: ExpertSizes) -> int:
    """What a rank tells the others so that all know which assignments an expert has room for."""
    return moe.num_experts if moe.drop_policy == "position" else 2 * sizes.num_tokens * moe.top_k
