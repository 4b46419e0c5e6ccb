"""What a process of its own finds out about graphs, for unit/test_graph_check.py: a compilation that fails leaves parts
behind that later ones in the same process trip over.

    python -m tests.graph_worker NAME ARGUMENT ...
"""

import json
import os
import sys
from collections import Counter
from typing import Any

os.environ.setdefault("GLOG_v", "4")

import mindspore as ms
from mindspore import ops

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import UserError
from ascend_moe_train.model.counts import moe_layers
from ascend_moe_train.model.kernels.ascend import AscendKernels
from ascend_moe_train.parallel.graph_facts import payloads
from ascend_moe_train.parallel.mesh import mesh_of, num_micro
from ascend_moe_train.parallel.traffic import model_traffic
from ascend_moe_train.parallel.zero_costs import zero_traffic
from ascend_moe_train.planner.hardware import parse_cluster
from ascend_moe_train.planner.plan import Job
from ascend_moe_train.planner.search import search
from ascend_moe_train.presets import PRESETS
from ascend_moe_train.train.graph_check import check_graphs
from tests.parity.layouts import Case


class SwappedNorm(AscendKernels):
    def fused_rms_norm(self, x_TD: Any, w_D: Any, eps: float) -> Any:
        return super().fused_rms_norm(w_D, x_TD, eps)


class SwigluOverRows(AscendKernels):
    def fused_swiglu(self, h_RF: Any) -> Any:
        return ops.auto_generate.Swiglu()(h_RF, 0)


class SwappedPermute(AscendKernels):
    def fused_permute(self, x_TD: Any, key_TK: Any, rows: int) -> Any:
        return super().fused_permute(key_TK, x_TD, rows)


class TransposedWeights(AscendKernels):
    def fused_grouped_matmul(self, x_RD: Any, w_EDF: Any, counts_E: Any) -> Any:
        return super().fused_grouped_matmul(x_RD, ops.transpose(w_EDF, (0, 2, 1)), counts_E)


class TransposedGates(AscendKernels):
    def fused_combine(self, y_ND: Any, row_N: Any, gate_TK: Any) -> Any:
        return super().fused_combine(y_ND, row_N, ops.transpose(gate_TK, (1, 0)))


MUTANTS = {
    each.__name__: each for each in (SwappedNorm, SwigluOverRows, SwappedPermute, TransposedWeights, TransposedGates)
}


def in_half(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"precision": "bf16"})})


def of_case(text: str) -> dict[str, Any]:
    """Payloads of all ranks in a step, found and as the formulas say, from the last rank of each stage; of what is in
    graphs and does not depend on the routing."""
    case = Case(**json.loads(text))
    config = in_half(case.run())
    mesh = mesh_of(config, case.num_ranks)
    found, expected, operators = Counter[str](), Counter[str](), Counter[str]()
    ranks, constant_bytes = mesh.world_size // mesh.pp, 0
    for stage in range(mesh.pp):
        last = [rank for rank in range(mesh.world_size) if mesh.coordinates(rank).pp == stage][-1]
        each = check_graphs(config, mesh.world_size, last)
        for graph in each.graphs:
            operators.update(graph.operators)
            constant_bytes = max(constant_bytes, graph.constant_bytes)
        for (verb, group), (_, size_bytes) in payloads(list(each.graphs)).items():
            found[f"{verb} {group}"] += ranks * (size_bytes or 0)
        for (verb, group), (_, size_bytes) in zero_traffic(each.zero, num_micro(config.batch, mesh)).items():
            expected[f"{verb} {group}"] += ranks * size_bytes
    for (verb, group), size_bytes in model_traffic(config, mesh, [0] * len(moe_layers(config.model))).items():
        expected[f"{verb} {group}"] += size_bytes
    left_out = [key for key in [*found, *expected] if "all_to_all_v" in key or "pp " in key or key.endswith(" pp")]
    for key in left_out:
        found.pop(key, None)
        expected.pop(key, None)
    return {"found": +found, "expected": +expected, "operators": operators, "constant_bytes": constant_bytes}


def of_rank(text: str, rank: str) -> list[str]:
    """Names of a rank's graphs."""
    case = Case(**json.loads(text))
    return [graph.name for graph in check_graphs(in_half(case.run()), case.num_ranks, int(rank)).graphs]


def of_preset(preset: str, cluster: str, sequences: str, rank: str) -> dict[str, Any]:
    """As the planner lays it out, of as few layers as that has parts, or two."""
    model = PRESETS[preset]()
    assert model.moe is not None
    job = Job(model=model, seq_len=4096, global_sequences=int(sequences))
    plan = search(job, parse_cluster(cluster), top=1).best[0].plan
    layers = max(2, plan.pp * plan.chunks)
    dense = [layer for layer in model.moe.dense_layers if layer < layers - 1]
    text = {
        "run": {"dir": "unused", "steps": 1000, "precision": "bf16"},
        "model": {
            **model.model_dump(mode="json"),
            "num_layers": layers,
            "moe": {**model.moe.model_dump(mode="json"), "dense_layers": dense},
        },
        "data": {"train": [{"path": "unused"}], "tokenizer": "unused", "seq_len": 4096},
        "batch": {"global_sequences": int(sequences), "micro_sequences": plan.micro_sequences},
        "parallel": {
            **plan.parallel().model_dump(mode="json"),
            "stage_layers": "even",
            "receive_factor": 1.5 if plan.ep > 1 else None,
        },
        "recompute": {"policy": plan.recompute},
    }
    found = check_graphs(RunConfig.model_validate_json(json.dumps(text)), plan.num_devices, int(rank))
    operators = Counter[str]()
    for graph in found.graphs:
        operators.update(graph.operators)
    return {"operators": operators, "constant_bytes": max(graph.constant_bytes for graph in found.graphs)}


def of_mutant(name: str) -> str:
    """What is said of kernels with a wrong call."""
    config = in_half(Case(layout=None, model="mixtral", mode="dropless", num_micro=1).run())
    try:
        check_graphs(config, 1, kernels=MUTANTS[name](ms.bfloat16))
    except UserError as error:
        return str(error)
    return ""


CALLS = {"case": of_case, "rank": of_rank, "preset": of_preset, "mutant": of_mutant}

if __name__ == "__main__":
    print(json.dumps(CALLS[sys.argv[1]](*sys.argv[2:])))  # type: ignore[operator]  # each has its own arguments
