"""What a rank sends for a collective, from the payload that is counted of it. Pure."""

import re

from ascend_moe_train.config import RunConfig
from ascend_moe_train.parallel.cuts import gradient_group
from ascend_moe_train.parallel.mesh import DENSE_AXES, EXPERT_AXES, STAGE_AXES, Mesh
from ascend_moe_train.parallel.shards import repeat_groups

_SPECIAL = {"world": DENSE_AXES, "stage": STAGE_AXES, "loss": ("pp", "dp", "cp")}


def group_size(name: str, config: RunConfig, mesh: Mesh) -> int:
    """Ranks in each group of that name (`parallel.config.GroupName`)."""
    if name == "ends":
        return len(gradient_group("ends", mesh, 0))
    if name == "kv_heads":
        return len(repeat_groups(config.model, mesh)[0])
    if name.endswith(" nodes"):
        inside = (config.parallel.hierarchical_ranks or 1) // mesh.size(EXPERT_AXES[3:])
        return inside if name == "ep inside nodes" else mesh.ep // inside
    axes = _SPECIAL.get(name) or tuple(re.split("_| x ", name.partition(" ")[0] if name.startswith("pp ") else name))
    return mesh.size(axes)


def sent_bytes(verb: str, payload_bytes: float, size: int) -> float:
    """Bytes that leave a rank of a group of `size` for a verb with that payload (`parallel/comm.py`), by algorithms
    that send no more than is needed (Chan et al., 2007): an `all_reduce` is a `reduce_scatter` and an `all_gather`.

    Of `all_to_all_v` the rows that stay are not known: they are taken to be one part in `size`. Of `broadcast` each
    rank's share is given, as if it went through all of them in turn.
    """
    others = size - 1
    if verb == "all_reduce":
        return 2 * payload_bytes * others / size
    if verb == "all_gather":
        return payload_bytes * others
    if verb in ("reduce_scatter", "all_to_all", "all_to_all_v", "broadcast"):
        return payload_bytes * others / size
    return payload_bytes
