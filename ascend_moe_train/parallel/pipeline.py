"""Pipeline stages: a rank's chunks of the model as compiled passes, driven by the lists of `schedule`.

A chunk keeps of a micro-batch its input only. The backward pass is one graph: the chunk's forward pass again, then its
gradients (full recomputation of Chen et al., 2016, with the stage's input as checkpoint). It may keep the inputs of
blocks that run again too, and then goes through these only once more (`recompute.kept`). The last chunk, whose backward
pass follows at once, has no forward pass of its own. Shape letters: see model/kernels/protocol.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from numpy.typing import NDArray

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.chunk import Chunk, KeepingForward, chunk_gradient, num_recomputed
from ascend_moe_train.model.counts import moe_layers
from ascend_moe_train.model.each import for_each
from ascend_moe_train.model.graph import Graph
from ascend_moe_train.model.kernels.constants import DTYPES
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.reduction import Reduction
from ascend_moe_train.parallel.comm import Collectives, Comm, Group, Tensor
from ascend_moe_train.parallel.drive import run
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.parallel.messages import DeviceMessages, HostMessages, Messages
from ascend_moe_train.parallel.schedule import SENDS, SENT_BY, Kind, peer, schedule
from ascend_moe_train.parallel.stages import Stages, stages_of
from ascend_moe_train.parallel.streams import WAYS, way_of

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""tokens, targets, segments and positions of a micro-batch, loss weights, noise seed."""

_Key = tuple[int, int]  # micro-batch and chunk


class _Forward(nn.Cell):
    """x_TD -> (x_TD,) of a chunk."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.chunk = chunk

    def construct(self, x_TD: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.chunk(x_TD, *inputs)[0],)


class _Backward(nn.Cell):
    """(x_TD, gradient of the output, loss scale, inputs, what the forward pass kept) -> (gradient of x_TD or a zero,
    figures, counts_LE); what is asked for of the weights' gradients is added to their sums."""

    def __init__(
        self,
        chunk: Chunk,
        *,
        of_input: bool,
        is_given: bool,
        weights: Sequence[Any],
        sums: Sequence[Any],
        reduction: Reduction,
    ) -> None:
        super().__init__()
        self.gradient = chunk_gradient(chunk, weights, of_input=of_input, is_given=is_given)
        self.reduction = reduction
        self.of_weights = len(weights) > 0
        if self.of_weights:
            self.sums = ms.ParameterTuple(list(sums))

    def construct(self, x_TD: Tensor, dy_TD: Tensor, scale: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dx_TD, figures, counts_LE, grads = self.gradient(x_TD, dy_TD, scale, *inputs)
        if not self.of_weights:
            return dx_TD, figures, counts_LE
        grads = self.reduction.of_micro(grads)
        done = for_each(ops.assign_add, self.sums, grads)
        return ops.depend(dx_TD, done), figures, counts_LE


@dataclass(frozen=True, kw_only=True)
class StageSite:
    """What a rank must know of its place in the pipeline."""

    stages: Stages
    stage: int
    comm: Comm
    messages: Messages
    ends: Mapping[Kind, tuple[Group, int]]
    """Of each kind of message the group, and the place in it of the stage at the other end."""
    column: Group
    """The ranks of all stages."""
    shape: tuple[int, ...]
    dtype: Any
    moe_rows: tuple[tuple[int, ...], ...]
    num_moe_layers: int
    num_experts: int
    num_micro: int

    def of_all_stages(self, counts: Mapping[_Key, NDArray[np.int32]]) -> NDArray[np.int64]:
        """counts_LE of every layer of experts, from those of this stage's chunks by micro-batch and chunk."""
        whole = np.zeros((max(1, self.num_moe_layers), self.num_experts), np.int64)
        for (_, chunk), each in counts.items():
            # a graph has no empty tensors: a chunk without experts hands out one row that means nothing
            rows = list(self.moe_rows[chunk])
            whole[rows] += each[: len(rows)]
        return self.comm.all_reduce(self.column, whole)

    def send(self, kind: Kind, x_TD: Tensor) -> None:
        """To the stage that gets messages of this kind."""
        group, place = self.ends[kind]
        self.messages.send(group, place, x_TD)

    def recv(self, kind: Kind) -> Tensor:
        """From the stage that sends them."""
        group, place = self.ends[kind]
        return self.messages.recv(group, place)


def site_of(config: RunConfig, mesh: Mesh, comm: Comm, device: Collectives | None = None) -> StageSite:
    """This rank's; messages go by the `device`, if it is given, and else through the host. Every rank calls it."""
    stages, here = stages_of(config), mesh.coordinates(comm.rank).pp
    tokens = config.batch.micro_sequences * config.data.seq_len // mesh.cp
    rows = tokens // mesh.tp if config.parallel.sequence_parallel else tokens
    shape, dtype = (rows, config.model.hidden), DTYPES[config.run.precision]
    column = comm.split("pp", mesh.groups(("pp",))).carrying("figures")
    ends = _ends(mesh, comm, stages, here)
    if device is None:
        host_dtype = np.float32 if config.run.precision == "fp32" else np.float16
        messages: Messages = HostMessages(comm, shape, host_dtype)
    else:
        messages = DeviceMessages(device, ends, shape, dtype)
    return StageSite(
        stages=stages,
        stage=here,
        comm=comm,
        messages=messages,
        ends=ends,
        column=column,
        shape=shape,
        dtype=dtype,
        moe_rows=stages.moe_rows(config.model, here),
        num_moe_layers=len(moe_layers(config.model)),
        num_experts=config.model.moe.num_experts if config.model.moe is not None else 1,
        num_micro=config.batch.global_sequences // (mesh.dp * config.batch.micro_sequences),
    )


def _ends(mesh: Mesh, comm: Comm, stages: Stages, stage: int) -> dict[Kind, tuple[Group, int]]:
    """See StageSite. The groups where the last stage meets the first are theirs alone."""
    columns, n = mesh.groups(("pp",)), stages.num_stages
    around = [part for ranks in columns for part in ((ranks[0], ranks[-1]), *((rank,) for rank in ranks[1:-1]))]
    groups = {
        way: comm.split(f"pp {way}", around if "around" in way else columns).carrying("activations")
        for way in WAYS
        if stages.chunks > 1 or "around" not in way
    }
    found = {}
    for kind in (*SENDS, *SENT_BY):
        way = way_of(kind, stage, n)
        if way in groups:
            other = peer(kind, stage, n)
            found[kind] = (groups[way], int(other > 0) if "around" in way else other)
    return found


class Pipeline:
    """One rank's passes over the micro-batches of a step.

    `weights` are what gradients are taken of, by name, and `sums` where these are added up, in the same order.
    """

    def __init__(
        self,
        model: Transformer,
        config: RunConfig,
        site: StageSite,
        *,
        weights: Mapping[str, Any],
        sums: Sequence[Any],
        reduction: Reduction,
    ) -> None:
        stages, schedule_name = site.stages, config.parallel.schedule
        self._site = site
        self._actions = schedule(schedule_name, stages.num_stages, site.num_micro, stages.chunks)[site.stage]
        chunks, in_two = chunks_of(model, site), schedule_name == "zero_bubble"
        is_kept = [config.recompute.kept == "block_inputs" and not c.is_last and num_recomputed(c) > 0 for c in chunks]
        self.forward = [
            None if chunk.is_last else KeepingForward(chunk, num_recomputed(chunk)) if kept else _Forward(chunk)
            for chunk, kept in zip(chunks, is_kept, strict=True)
        ]
        self.backward: list[_Backward | None] = []
        self.weight: list[_Backward | None] = []
        for number, chunk in enumerate(chunks):
            places = [i for i, each in enumerate(weights) if stages.chunk_of(each, site.stage) == number]
            own, own_sums = [list(weights.values())[i] for i in places], [sums[i] for i in places]
            make = partial(_Backward, chunk, is_given=is_kept[number], reduction=reduction)
            whole = make(of_input=not in_two, weights=own, sums=own_sums)
            if not in_two:
                self.backward.append(whole)
                continue
            self.weight.append(whole)
            of_input = None
            if not chunk.is_first:
                of_input = make(of_input=True, weights=(), sums=())
            self.backward.append(of_input)

    def graphs(self, inputs: Inputs, scale: Tensor) -> list[Graph]:
        """See step.Passes."""
        site, found = self._site, []
        nothing, stream = ms.Tensor(np.zeros(1, np.float32)), ms.Tensor(np.zeros(site.shape, np.float32))
        stream = stream.astype(site.dtype)
        for c, forward in enumerate(self.forward):
            x_TD = nothing if site.stages.is_first(site.stage, c) else stream
            dy_TD = nothing if site.stages.is_last(site.stage, c) else stream
            given = f"forward {c}" if isinstance(forward, KeepingForward) else None
            if forward is not None:
                found.append(Graph(f"forward {c}", forward, (x_TD, *inputs), site.num_micro))
            for name, cells in (("backward", self.backward), ("weight", self.weight)):
                cell = cells[c] if cells else None
                if cell is not None:
                    found.append(Graph(f"{name} {c}", cell, (x_TD, dy_TD, scale, *inputs), site.num_micro, given))
        return found

    def __call__(self, micros: Sequence[Inputs], scale: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """-> this stage's figures (5,), and counts_LE of all stages, both summed over the micro-batches."""
        work = _Work(self, self._site, micros, scale)
        run(self._actions, work)
        # read after the last pass: each reading waits for the device
        figures = np.sum([each.asnumpy() for each, _ in work.figures.values()], axis=0, dtype=np.float32)
        return figures, self._site.of_all_stages({key: counts.asnumpy() for key, (_, counts) in work.figures.items()})


class _Work:
    """See `drive.Work`. What a micro-batch has in a chunk is kept from the pass that makes it to the last that reads
    it."""

    def __init__(self, passes: Pipeline, site: StageSite, micros: Sequence[Inputs], scale: Tensor) -> None:
        self._passes, self._site, self._micros, self._scale = passes, site, micros, scale
        self._nothing = ms.Tensor(np.zeros(1, np.float32))
        self._inputs: dict[_Key, Tensor] = {}
        self._outputs: dict[_Key, Tensor] = {}
        self._kept: dict[_Key, tuple[Tensor, ...]] = {}
        self._output_gradients: dict[_Key, Tensor] = {}
        self._input_gradients: dict[_Key, Tensor] = {}
        self.figures: dict[_Key, tuple[Tensor, Tensor]] = {}

    def forward(self, micro: int, chunk: int) -> None:
        """See drive.Work; of the last chunk the backward pass does it."""
        cell = self._passes.forward[chunk]
        if cell is not None:
            x_TD = self._inputs.get((micro, chunk), self._nothing)
            found = cell(x_TD, *self._micros[micro])
            self._outputs[micro, chunk], self._kept[micro, chunk] = found[0], found[1:]

    def backward(self, micro: int, chunk: int) -> None:
        """See drive.Work."""
        cell = self._passes.backward[chunk]
        if cell is not None:
            self._input_gradients[micro, chunk] = self._differentiated(cell, micro, chunk)
        if not self._passes.weight:
            self._forget(micro, chunk)

    def weight(self, micro: int, chunk: int) -> None:
        """See drive.Work."""
        cell = self._passes.weight[chunk]
        assert cell is not None
        self._differentiated(cell, micro, chunk)
        self._forget(micro, chunk)

    def _differentiated(self, cell: _Backward, micro: int, chunk: int) -> Tensor:
        key = (micro, chunk)
        x_TD, dy_TD = self._inputs.get(key, self._nothing), self._output_gradients.get(key, self._nothing)
        dx_TD, figures, counts_LE = cell(x_TD, dy_TD, self._scale, *self._micros[micro], *self._kept.get(key, ()))
        self.figures[key] = (figures, counts_LE)
        return dx_TD

    def _forget(self, micro: int, chunk: int) -> None:
        self._inputs.pop((micro, chunk), None)
        self._kept.pop((micro, chunk), None)
        self._output_gradients.pop((micro, chunk), None)

    def send_forward(self, micro: int, chunk: int) -> None:
        """See drive.Work."""
        self._site.send(Kind.SEND_FORWARD, self._outputs.pop((micro, chunk)))

    def recv_forward(self, micro: int, chunk: int) -> None:
        """See drive.Work."""
        self._inputs[micro, chunk] = self._site.recv(Kind.RECV_FORWARD)

    def send_backward(self, micro: int, chunk: int) -> None:
        """See drive.Work."""
        self._site.send(Kind.SEND_BACKWARD, self._input_gradients.pop((micro, chunk)))

    def recv_backward(self, micro: int, chunk: int) -> None:
        """See drive.Work."""
        self._output_gradients[micro, chunk] = self._site.recv(Kind.RECV_BACKWARD)


def through_stages(
    cells: Sequence[Any], site: StageSite | None, inputs: Sequence[Tensor]
) -> list[tuple[int, NDArray[Any]]]:
    """One micro-batch through all chunks in the order of depth: cells of this stage's `chunks_of`, (x_TD, inputs) ->
    (x_TD, result). Returns the virtual stage and the result of each. Every rank of the stages calls it."""
    x_TD, results = ms.Tensor(np.zeros(1, np.float32)), []
    if site is None:
        return [(0, cells[0](x_TD, *inputs)[1].asnumpy())]
    for chunk, cell in enumerate(cells):
        if not site.stages.is_first(site.stage, chunk):
            x_TD = site.recv(Kind.RECV_FORWARD)
        x_TD, result = cell(x_TD, *inputs)
        if not site.stages.is_last(site.stage, chunk):
            site.send(Kind.SEND_FORWARD, x_TD)
        results.append((chunk * site.stages.num_stages + site.stage, result.asnumpy()))
    return results


def chunks_of(model: Transformer, site: StageSite | None) -> list[Chunk]:
    """This rank's part of a model; without a pipeline the whole of it."""
    if site is None:
        return [Chunk(model, (0, len(model.layers)), is_first=True, is_last=True)]
    s, stages = site.stage, site.stages
    return [
        Chunk(model, stages.layers(s, c), is_first=stages.is_first(s, c), is_last=stages.is_last(s, c))
        for c in range(stages.chunks)
    ]
