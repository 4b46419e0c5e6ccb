"""What `amt check graph` shows."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ascend_moe_train.parallel.graph_facts import payloads
from ascend_moe_train.parallel.mesh import DENSE_AXES, EXPERT_AXES
from ascend_moe_train.parallel.mesh_map import columns
from ascend_moe_train.train.graph_check import RankGraphs, Target
from ascend_moe_train.units import format_bytes

NOT_RUN = "Types and shapes hold together through forward, backward and update. Nothing was run on a device."
MAX_OPERATORS_SHOWN = 12


def report(found: RankGraphs, target: Target) -> dict[str, Any]:
    """As JSON-able values; bytes are of one rank."""
    operators: Counter[str] = Counter()
    for graph in found.graphs:
        operators.update(graph.operators)
    return {
        "target": target,
        "rank": found.rank,
        "world_size": found.mesh.world_size,
        "axes": {axis: found.mesh.size((axis,)) for axis in dict.fromkeys((*DENSE_AXES, *EXPERT_AXES))},
        "graphs": [
            {
                "name": graph.name,
                "calls_per_step": graph.calls,
                "operators": sum(graph.operators.values()),
                "collectives": len(graph.moves),
                "parameter_bytes": graph.parameter_bytes,
                "constant_bytes": graph.constant_bytes,
                "live_bytes": graph.live_bytes,
            }
            for graph in found.graphs
        ],
        "collectives": [
            {"verb": verb, "group": group, "calls_per_step": calls, "payload_bytes": size_bytes}
            for (verb, group), (calls, size_bytes) in sorted(payloads(list(found.graphs)).items())
        ],
        "operators": dict(operators.most_common()),
    }


def report_text(shown: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    axes = " x ".join(f"{axis} {size}" for axis, size in shown["axes"].items())
    yield f"Rank {shown['rank']} of {shown['world_size']:,} ({axes}), kernels for {shown['target']}"
    yield ""
    rows = [("graph", "calls a step", "operators", "collectives", "parameters", "constants", "alive at once")]
    for graph in shown["graphs"]:
        counts = [str(graph[name]) for name in ("calls_per_step", "operators", "collectives")]
        sizes = [format_bytes(graph[name]) for name in ("parameter_bytes", "constant_bytes", "live_bytes")]
        rows.append((graph["name"], *counts, *sizes))
    yield from columns(rows)
    yield ""
    if shown["collectives"]:
        table = [("verb", "group", "calls a step", "payload a step")]
        for each in shown["collectives"]:
            size = "by the routing" if each["payload_bytes"] is None else format_bytes(each["payload_bytes"])
            table.append((each["verb"], each["group"], str(each["calls_per_step"]), size))
        yield from columns(table)
    else:
        yield "No collectives"
    yield ""
    listed = list(shown["operators"].items())
    most = ", ".join(f"{name} {count}" for name, count in listed[:MAX_OPERATORS_SHOWN])
    more = len(listed) - MAX_OPERATORS_SHOWN
    yield f"Operators: {most}" + (f" and {more} other kinds (--json has all)" if more > 0 else "")
    yield NOT_RUN
