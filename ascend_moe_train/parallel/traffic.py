"""What the forward and backward passes of one optimizer step put into collectives, in closed form. Pure.

Of payloads see `comm.Comm`; of gradients, optimizer and gathered weights see `zero_costs`. All ranks together, since
only then do the token rows of the experts not depend on the routing.

T tokens of a micro-batch on one dp rank, t of them on one tp rank (T / tp); D hidden, a bytes of an activation; E
experts, K of them for a token; R rows that a rank has room for.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.model.counts import moe_layers
from ascend_moe_train.parallel.contents import Content, rows_in
from ascend_moe_train.parallel.expert_sizes import ExpertSizes, expected_nodes, row_bytes
from ascend_moe_train.parallel.mesh import Mesh, num_micro
from ascend_moe_train.parallel.places import token_order
from ascend_moe_train.parallel.recomputed import keeps_inputs, passes, runs_again
from ascend_moe_train.parallel.stages import Stages, stages_of

Traffic = dict[tuple[str, str], int]
Sent = dict[tuple[str, str, Content], int]
_Sent = Iterator[tuple[str, str, str, Content, int]]  # way, verb, group, what the payload is, its bytes

_FP32_BYTES = 4
_EXCHANGED = {
    "ring": "pass keys and values of {tokens:,} tokens each around a ring, and back with their gradients",
    "ulysses": "exchange {tokens:,} tokens of all heads each for all tokens of some heads, and back",
}


def model_traffic(run: RunConfig, mesh: Mesh, accepted: Sequence[int], crossing: Sequence[int] = ()) -> Traffic:
    """`model_sent` without what the payloads are."""
    found: Traffic = defaultdict(int)
    for (verb, group, _), size_bytes in model_sent(run, mesh, accepted, crossing).items():
        found[verb, group] += size_bytes
    return {key: size_bytes for key, size_bytes in found.items() if size_bytes}


def model_sent(run: RunConfig, mesh: Mesh, accepted: Sequence[int], crossing: Sequence[int] = ()) -> Sent:
    """(verb, group, content) -> payload bytes of all ranks in one step. `accepted` are the assignments of each layer of
    experts that were not dropped; `crossing`, with `dedup_tokens`, the pairs of a token and a node that has experts for
    it.

    tp, of a micro-batch on each rank, in one pass forward and one backward (Korthikanti et al., 2022, section 4.2.2):

        residual stream        around attention, dense FFN     after embedding              before head
        whole on every rank    all_reduce T D a each way       all_reduce T D a forward     all_reduce T D a backward
        split by tokens        all_gather t D a,               reduce_scatter T D a         all_gather t D a forward,
                               reduce_scatter T D a each way   forward, all_gather t D a    reduce_scatter T D a
                                                               backward                     backward

    The loss is an all_reduce of 4 T and one of 8 T bytes forward. Shared experts are as a dense FFN of a stream that is
    split; a stream that is whole is split before experts and gathered after them: all_gather t D a each way. The
    experts' part: see `GlobalFigures`, `Admission` and `ExpertDispatcher`. Each block of multi-token prediction has an
    embedding, a head and a loss of its own. For cp see `ring.Ring` and `context.UlyssesKernels`; multi-token prediction
    asks once for what comes after each token.

    A block that runs again before its backward pass does what it does forward once more, but for what only puts its
    output together. A pipeline stage goes through its layers as often as `Stages.passes` says, but does not go forward
    before it goes backward through blocks whose inputs are kept; from stage to stage
    T D a (t D a) bytes are sent each way on every rank, and every rank tells the others of its column the counts of a
    step.
    """
    totals: Sent = defaultdict(int)
    stages, micro_batches = stages_of(run), num_micro(run.batch, mesh)
    ranks = mesh.world_size // mesh.pp
    for virtual_stage in range(len(stages.bounds)):
        forward, backward = stages.passes(virtual_stage, run.parallel.schedule)
        times_of = {"forward": forward, "backward": backward, "forward alone": forward - backward}
        for way, verb, group, content, payload_bytes in _of_stage(run, mesh, stages, virtual_stage):
            totals[verb, group, content] += ranks * micro_batches * times_of[way] * payload_bytes
    if run.model.moe is not None and mesh.ep > 1:
        again = {f"layers.{layer}." for layer in range(run.model.num_layers) if runs_again(run, layer)}
        crossing = crossing or [0] * len(accepted)
        for prefix, rows, once in zip(moe_layers(run.model), accepted, crossing, strict=True):
            forward, backward = passes(run, prefix)
            forward += backward * (prefix in again)
            for group, content, payload_bytes in _exchanged(run, run.model.moe, (forward, backward), rows, once):
                totals["all_to_all_v", group, content] += payload_bytes
    if mesh.pp > 1:
        sent = ranks * micro_batches * _stream_bytes(run, mesh)
        for way in ("pp forward", "pp backward"):
            totals["send", way, "activations"] = sent * (len(stages.bounds) - stages.chunks)
            totals["send", f"{way} around", "activations"] = sent * (stages.chunks - 1)
        experts = run.model.moe.num_experts if run.model.moe is not None else 1
        counts_bytes = 8 * max(1, len(moe_layers(run.model))) * experts
        totals["all_reduce", "pp", "figures"] = mesh.world_size * counts_bytes
    return {key: size_bytes for key, size_bytes in totals.items() if size_bytes}


def exchanges(run: RunConfig, mesh: Mesh) -> dict[tuple[str, ...], str]:
    """What the groups along each axis do with the activations of a micro-batch, in words."""
    parallel, model = run.parallel, run.model
    tokens = run.batch.micro_sequences * run.data.seq_len // mesh.cp
    rows = tokens // mesh.tp * (model.moe.top_k if model.moe is not None else 0)
    summing = "gather and reduce-scatter" if parallel.sequence_parallel else "sum"
    wire = "" if parallel.expert_wire is None else f" in {parallel.expert_wire}"
    how = "" if parallel.hierarchical_ranks is None else f", first inside nodes of {parallel.hierarchical_ranks}"
    if parallel.dedup_tokens is not None and parallel.hierarchical_ranks is not None and model.moe is not None:
        nodes = mesh.ep * mesh.etp // parallel.hierarchical_ranks
        once = expected_nodes(model.moe.num_experts, model.moe.top_k, nodes)
        how = f", once to each of {nodes} nodes ({once:.2f} of {model.moe.top_k} if all experts are equally likely)"
    how += "" if parallel.expert_chunks == 1 else f", in {parallel.expert_chunks} chunks"
    return {
        ("pp",): "hand activations and their gradients from stage to stage",
        ("cp",): _EXCHANGED[parallel.context].format(tokens=tokens),
        ("tp",): f"{summing} activations ({tokens:,}, {model.hidden}) around attention and feed-forward",
        ("ep",): f"send ({rows:,}, {model.hidden}) token rows each{wire} to the ranks of their experts and back{how}",
        ("etp",): "gather token rows before experts that are cut in width, and sum what comes out",
    }


def _activation_bytes(run: RunConfig) -> int:
    return _FP32_BYTES if run.run.precision == "fp32" else 2


def _tokens(run: RunConfig, mesh: Mesh) -> int:
    return run.batch.micro_sequences * run.data.seq_len // mesh.cp


def _stream_bytes(run: RunConfig, mesh: Mesh) -> int:
    """Of the residual stream of a micro-batch, as far as it is on one rank."""
    tokens = _tokens(run, mesh) // (mesh.tp if run.parallel.sequence_parallel else 1)
    return tokens * run.model.hidden * _activation_bytes(run)


def _of_stage(run: RunConfig, mesh: Mesh, stages: Stages, virtual_stage: int) -> _Sent:
    """What a virtual stage does in one pass forward and one backward."""
    model = run.model
    depth = model.mtp.depth if model.mtp is not None else 0
    first, stop = stages.bounds[virtual_stage]
    is_last = virtual_stage == len(stages.bounds) - 1
    blocks = [*range(first, stop), *(range(model.num_layers, model.num_layers + depth) if is_last else ())]
    for layer in blocks:
        is_kept = keeps_inputs(run, layer)
        for way, verb, group, content, size_bytes in _block(run, mesh, is_moe=model.is_moe(layer)):
            yield ("forward alone" if is_kept and way == "forward" else way), verb, group, content, size_bytes
        if runs_again(run, layer):
            yield from _block_again(run, mesh, is_moe=model.is_moe(layer))
    if mesh.cp > 1 and depth > 0 and is_last:
        yield "forward", "all_gather", "cp", "figures", 3 * 4 * _tokens(run, mesh)
    embeddings, heads = (virtual_stage == 0) + depth * is_last, (1 + depth) * is_last
    if mesh.tp == 1:
        return
    T = _tokens(run, mesh)
    whole = T * model.hidden * _activation_bytes(run)
    entering = "forward alone" if virtual_stage == 0 and keeps_inputs(run, 0) else "forward"
    if run.parallel.sequence_parallel:
        yield entering, "reduce_scatter", "tp", "activations", embeddings * whole
        yield "backward", "all_gather", "tp", "activations", embeddings * (whole // mesh.tp)
        yield "forward", "all_gather", "tp", "activations", heads * (whole // mesh.tp)
        yield "backward", "reduce_scatter", "tp", "activations", heads * whole
    else:
        yield entering, "all_reduce", "tp", "activations", embeddings * whole
        yield "backward", "all_reduce", "tp", "activations", heads * whole
    yield "forward", "all_reduce", "tp", "figures", heads * 3 * T * _FP32_BYTES


def _block(run: RunConfig, mesh: Mesh, *, is_moe: bool) -> _Sent:
    moe = run.model.moe
    whole = _tokens(run, mesh) * run.model.hidden * _activation_bytes(run)
    part = whole // mesh.tp
    is_split = run.parallel.sequence_parallel
    # attention and a dense feed-forward, or attention and shared experts, whose stream is always split
    summed = 2 - is_moe
    if mesh.cp > 1:
        yield from _context(run, mesh)
    of_shared = 1 if moe is not None and is_moe and moe.shared_ffn else 0
    for way in ("forward", "backward") if mesh.tp > 1 else ():
        if is_split:
            yield way, "all_gather", "tp", "activations", summed * part
            yield way, "reduce_scatter", "tp", "activations", summed * whole
        else:
            yield way, "all_reduce", "tp", "activations", summed * whole
            yield way, "all_gather", "tp", "activations", is_moe * part
        yield way, "all_gather", "tp", "activations", of_shared * part
        yield way, "reduce_scatter", "tp", "activations", of_shared * whole
    if moe is not None and is_moe and mesh.world_size > mesh.pp:
        yield from _experts(run, moe, mesh)


def _context(run: RunConfig, mesh: Mesh) -> _Sent:
    """One attention's."""
    model, n, T = run.model, mesh.cp, _tokens(run, mesh)
    size = model.head_size + model.value_size
    heads, kv_heads = model.num_heads // mesh.tp, max(1, model.num_kv_heads // mesh.tp)
    if run.parallel.context == "ring":
        passed = T * kv_heads * size
        once = (n - 1) * passed * _activation_bytes(run)
        yield "forward", "all_to_all_v", "cp", "keys and values", once
        yield "backward", "all_to_all_v", "cp", "keys and values", once + n * passed * _FP32_BYTES
        return
    yield "forward", "all_gather", "cp", "figures", 4 * T
    for way in ("forward", "backward"):
        yield way, "all_to_all", "cp", "keys and values", T * (heads + max(n, kv_heads)) * size * _activation_bytes(run)


def _block_again(run: RunConfig, mesh: Mesh, *, is_moe: bool) -> _Sent:
    """What a block does forward, in the backward pass: all but what only puts its output together."""
    whole = _tokens(run, mesh) * run.model.hidden * _activation_bytes(run)
    for way, verb, group, content, size_bytes in _block(run, mesh, is_moe=is_moe):
        if way == "forward":
            yield "backward", verb, group, content, size_bytes
    if mesh.tp > 1 and not run.parallel.sequence_parallel:
        if is_moe:
            yield "backward", "all_gather", "tp", "activations", -whole // mesh.tp
        else:
            yield "backward", "all_reduce", "tp", "activations", -whole


def _experts(run: RunConfig, moe: MoEConfig, mesh: Mesh) -> _Sent:
    """One layer's, but for the rows that ep ranks exchange."""
    sequences = mesh.dp * run.batch.micro_sequences if moe.aux_loss_scope == "sequence" else 1
    yield "forward", "all_reduce", "stage", "figures", _FP32_BYTES * (2 * sequences * moe.num_experts + 1)
    sizes = ExpertSizes.of(moe, mesh, _tokens(run, mesh) // mesh.tp, run.parallel.receive_factor)
    if moe.capacity_factor is not None:
        yield "forward", "all_gather", "stage", "figures", _FP32_BYTES * _admission_numbers(run, moe, mesh, sizes)
    elif mesh.ep * mesh.etp > 1:
        yield "forward", "all_gather", "ep x etp", "figures", _FP32_BYTES * moe.num_experts
    if run.parallel.hierarchical_ranks is not None and run.parallel.dedup_tokens is not None:
        nodes = mesh.ep * mesh.etp // run.parallel.hierarchical_ranks
        yield "forward", "all_gather", "ep across nodes", "figures", _FP32_BYTES * nodes
    if mesh.etp > 1:
        chunks = run.parallel.expert_chunks
        rows_bytes = chunks * replace(sizes, chunks=chunks).receive_rows * run.model.hidden * _activation_bytes(run)
        for way in ("forward", "backward"):
            yield way, "all_gather", "etp", "expert rows", rows_bytes
            yield way, "reduce_scatter", "etp", "expert rows", mesh.etp * rows_bytes


def _exchanged(
    run: RunConfig, moe: MoEConfig, passes: tuple[int, int], rows: int, crossing: int
) -> Iterator[tuple[str, Content, int]]:
    """Group, content and bytes of a layer's rows and of what goes with them, in so many passes forward and backward."""
    parallel, (forward, backward) = run.parallel, passes
    of_row = sum(passes) * row_bytes(run.model.hidden, _activation_bytes(run), parallel.expert_wire)
    content = rows_in(parallel.expert_wire)
    if parallel.hierarchical_ranks is None:
        yield "ep", content, 2 * of_row * rows
        return
    yield "ep inside nodes", content, 2 * of_row * rows
    if parallel.dedup_tokens is None:
        yield "ep across nodes", content, 2 * of_row * rows
        return
    is_summed = parallel.dedup_tokens == "sums"
    yield "ep across nodes", content, of_row * (crossing + (crossing if is_summed else rows))
    # experts and gates of a row forward, gradients of gates backward
    lists = 2 * forward + backward * is_summed
    yield "ep across nodes", "figures", _FP32_BYTES * moe.top_k * crossing * lists


def _admission_numbers(run: RunConfig, moe: MoEConfig, mesh: Mesh, sizes: ExpertSizes) -> int:
    """What a rank tells the others so that all know which assignments an expert has room for."""
    if moe.drop_policy == "probability":
        return 2 * sizes.num_tokens * moe.top_k
    # every dp rank's tokens are in as many runs as those of the first
    ranks = mesh.group(("cp", "tp"), 0)
    return token_order(mesh, ranks, run.batch.micro_sequences, run.data.seq_len).num_runs * moe.num_experts
