"""The training step of a rank of a cluster that is not here, compiled as far as MindSpore's front end goes.

Types and shapes are inferred through forward and backward pass and update. No operator is selected for a device, and
nothing is run: what an operator does there, and whether it takes such sizes, shows on the device alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mindspore as ms
import numpy as np
from mindspore.nn.utils import no_init_parameters

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.model.graph import Graph
from ascend_moe_train.model.kernels.ascend import AscendKernels
from ascend_moe_train.model.kernels.constants import DTYPES
from ascend_moe_train.model.kernels.portable import PortableKernels
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.kernels.rounded import RoundedKernels
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW
from ascend_moe_train.optim.host_adamw import HostAdamW
from ascend_moe_train.parallel.apply import parallelize
from ascend_moe_train.parallel.graph_facts import GraphFacts, compiled, facts_of
from ascend_moe_train.parallel.mesh import Mesh, mesh_of
from ascend_moe_train.parallel.native import Drawn, NativeOps
from ascend_moe_train.parallel.pipeline import site_of
from ascend_moe_train.parallel.zero_costs import ZeroPlan
from ascend_moe_train.train.building import make_step

Target = Literal["ascend", "cpu"]


@dataclass(frozen=True, kw_only=True)
class RankGraphs:
    """What was found of one rank."""

    rank: int
    mesh: Mesh
    zero: ZeroPlan
    graphs: tuple[GraphFacts, ...]


def check_graphs(
    config: RunConfig,
    world_size: int,
    rank: int = 0,
    target: Target = "ascend",
    note: Callable[[str], None] = lambda name: None,
    kernels: Kernels | None = None,
) -> RankGraphs:
    """Compiles every graph of a step of `rank`, with the kernels of `target` unless others are given, and MindSpore's
    own collectives. `note` is called with the name of each graph before it is compiled.

    Raises ConfigError: a rank that is not there, a run that does not go with so many. TrainingError: what the front end
    found wrong.
    """
    mesh = mesh_of(config, world_size)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not there: must be from 0 to {world_size - 1}")
    ms.set_context(mode=ms.GRAPH_MODE)
    kernels = kernels or kernels_of(target, config.run.precision)
    collectives = NativeOps(Drawn(rank, world_size))
    with no_init_parameters():  # nothing is ever in them, and the whole model may be more than fits into memory here
        model = Transformer(config.model, kernels, config.data.seq_len)
    sharded = parallelize(model, mesh, config, collectives)
    make = HostAdamW if config.parallel.offload_optimizer else AdamW
    optimizer = make(sharded.weights, config.optim, kernels, sharded.num_dims)
    site = site_of(config, mesh, collectives.comm, collectives) if mesh.pp > 1 else None
    step = make_step(config, mesh, collectives.comm, model, sharded, optimizer, site)
    found: dict[str, GraphFacts] = {}
    for graph in step.graphs(_micro_batch(config, mesh)):
        note(graph.name)
        found[graph.name] = _facts(graph, found)
    return RankGraphs(rank=rank, mesh=mesh, zero=sharded.plan, graphs=tuple(found.values()))


def kernels_of(target: Target, precision: str) -> Kernels:
    """Those that a run on such a device would take."""
    if target == "ascend":
        return AscendKernels(DTYPES[precision])
    return PortableKernels() if precision == "fp32" else RoundedKernels(PortableKernels(), DTYPES[precision])


def _facts(graph: Graph, before: dict[str, GraphFacts]) -> GraphFacts:
    given = before[graph.given].outputs[1:] if graph.given is not None else ()
    arguments = (*graph.arguments, *[_like(each.shape, each.dtype) for each in given])
    graph = graph._replace(arguments=arguments)
    return facts_of(graph, compiled(graph))


_OF_NAMES = {"FLOAT": ms.float32, "FLOAT16": ms.float16, "BFLOAT16": ms.bfloat16, "INT32": ms.int32}


def _like(shape: tuple[int, ...], dtype: str) -> Any:
    return ms.Tensor(np.zeros(shape, np.float32)).astype(_OF_NAMES[dtype])


def _micro_batch(config: RunConfig, mesh: Mesh) -> Any:
    """Its inputs as the step gets them, with nothing in them."""
    shape = (config.batch.micro_sequences, config.data.seq_len // mesh.cp)
    numbers = [ms.Tensor(np.zeros(shape, np.int32)) for _ in range(4)]
    return (*numbers, ms.Tensor(np.ones(2, np.float32)), ms.Tensor(np.zeros(1, np.int32)))
