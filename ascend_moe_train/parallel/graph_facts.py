"""Graphs that are compiled by MindSpore's front end and not run: types and shapes are inferred, forward and backward,
for a device that is not here; and what is in them.

Payloads are those of `comm.Comm`, of one call on one rank.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from mindspore.common.api import _cell_graph_executor  # there is no public way to compile without a device
from mindspore.train.mind_ir_pb2 import ModelProto, TensorProto

from ascend_moe_train.errors import TrainingError
from ascend_moe_train.model.graph import Graph

_VERBS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AlltoAll": "all_to_all",
    "AlltoAllV": "all_to_all_v",
    "Broadcast": "broadcast",
    "Send": "send",
    "Receive": "recv",
}
_BYTES = {"BOOL": 1, "INT8": 1, "UINT8": 1, "FLOAT16": 2, "BFLOAT16": 2, "INT16": 2, "DOUBLE": 8, "INT64": 8}
_OTHER_BYTES = 4
# what hands on the memory of its first input
_VIEWS = frozenset({"Reshape", "ExpandDims", "Squeeze", "Depend", "TupleGetItem", "Load", "UpdateState", "MakeTuple"})
_REFERENCE = "REF::"


class Tensors(NamedTuple):
    """Shape and dtype of a tensor; a size that is only known when the graph runs is -1."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Without what is only known when the graph runs."""
        return max(0, prod(self.shape)) * _BYTES.get(self.dtype, _OTHER_BYTES)


class Move(NamedTuple):
    """A collective; `payload_bytes` is None where it depends on the data."""

    verb: str
    group: str
    payload_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class GraphFacts:
    """Of one graph. `live_bytes`: most that is alive at once, besides parameters, when operators run in the order in
    which the front end lists them, each result in memory of its own until its last use."""

    name: str
    calls: int
    operators: Mapping[str, int]
    moves: tuple[Move, ...]
    parameter_bytes: int
    constant_bytes: int
    live_bytes: int
    outputs: tuple[Tensors, ...]


def compiled(graph: Graph) -> ModelProto:
    """The graph as the front end leaves it. Raises TrainingError: what it found wrong, in one line."""
    try:
        found, _ = _cell_graph_executor.compile(graph.cell, *graph.arguments, phase="export.mindir", do_convert=False)
        stream = _cell_graph_executor._get_func_graph_proto(graph.cell, found, "mind_ir")
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        first = " ".join(str(error).partition("\n\n")[0].split())
        raise TrainingError(f"graph {graph.name!r}: {first or type(error).__name__}") from error
    proto = ModelProto()
    proto.ParseFromString(stream)
    return proto


def facts_of(graph: Graph, proto: ModelProto) -> GraphFacts:
    """What is in it. Raises TrainingError for a graph that has parts which are called, of which it is not known how
    often."""
    if proto.functions:
        raise TrainingError(f"graph {graph.name!r}: {len(proto.functions)} parts were not put in line")
    primitives = {primitive.name: primitive for primitive in proto.primitives}
    nodes = [
        (primitives[name.removeprefix(_REFERENCE)], node)
        for node in proto.graph.node
        if (name := node.op_type).startswith(_REFERENCE)
    ]
    return GraphFacts(
        name=graph.name,
        calls=graph.calls,
        operators=dict(Counter(primitive.op_type for primitive, _ in nodes)),
        moves=tuple(_moves(nodes)),
        parameter_bytes=sum(_tensor(each).size_bytes for each in proto.graph.parameter),
        constant_bytes=sum(_constant_bytes(node) for node in proto.graph.node if node.op_type == "Constant"),
        live_bytes=_live_bytes(nodes),
        outputs=tuple(found for each in proto.graph.output for found in _outputs(each)),
    )


def payloads(graphs: list[GraphFacts]) -> dict[tuple[str, str], tuple[int, int | None]]:
    """(verb, group) -> calls in a step, and their payload in bytes, or None where it depends on the data."""
    found: dict[tuple[str, str], tuple[int, int | None]] = {}
    for graph in graphs:
        for verb, group, size_bytes in graph.moves:
            count, total_bytes = found.get((verb, group), (0, 0))
            known = total_bytes is not None and size_bytes is not None
            found[verb, group] = (
                count + graph.calls,
                total_bytes + graph.calls * size_bytes if known else None,  # type: ignore[operator]  # both are known
            )
    return found


def _tensor(proto: TensorProto) -> Tensors:
    return Tensors(tuple(proto.dims), TensorProto.DataType.Name(proto.data_type))


def _results(node: Any) -> list[Tensors]:
    """Of an operator: one tensor, or several."""

    return [found for each in node.attribute if each.name == "shape" for found in _listed(each)]


def _constant_bytes(node: Any) -> int:
    return sum(found.size_bytes for each in node.attribute for found in _listed(each))


def _outputs(value: Any) -> Iterator[Tensors]:
    yield from map(_tensor, value.tensor)
    yield from _listed(value.attr_info)


def _listed(attribute: Any) -> Iterator[Tensors]:
    """The tensors of tuples in tuples."""
    yield from map(_tensor, attribute.tensors)
    for each in attribute.values:
        yield from _listed(each)


def _moves(nodes: list[Any]) -> Iterator[Move]:
    made = {name: _results(node) for _, node in nodes for name in node.output}
    for primitive, node in nodes:
        verb = _VERBS.get(primitive.op_type)
        if verb is None:
            continue
        attributes = {each.name: each for each in primitive.attribute}
        group = attributes["group"].s.decode()
        size = attributes["rank_size"].i if "rank_size" in attributes else 1
        result_bytes = sum(each.size_bytes for each in _results(node))
        payload_bytes: int | None = result_bytes
        if verb == "all_gather":
            payload_bytes = result_bytes // size
        elif verb == "reduce_scatter":
            payload_bytes = result_bytes * size
        elif verb == "all_to_all_v":
            payload_bytes = None
        elif verb == "send":
            payload_bytes = sum(each.size_bytes for each in made.get(node.input[0], ()))
        elif verb == "recv":
            payload_bytes = 0
        yield Move(verb, group, payload_bytes)


def _live_bytes(nodes: list[Any]) -> int:
    home: dict[str, str] = {}
    sizes: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, (primitive, node) in enumerate(nodes):
        (name,) = node.output
        inputs = [home.get(each, each) for each in node.input]
        if primitive.op_type in _VIEWS and inputs:
            home[name] = inputs[0]
        else:
            home[name] = name
            sizes[name] = sum(each.size_bytes for each in _results(node))
            last[name] = place
        last.update((each, place) for each in inputs)
    alive = most = 0
    ends: dict[int, int] = {}
    for name, place in last.items():
        ends[place] = ends.get(place, 0) + sizes.get(name, 0)
    for place, (_, node) in enumerate(nodes):
        alive += sizes.get(node.output[0], 0)
        most = max(most, alive)
        alive -= ends.get(place, 0)
    return most
