"""Communication groups: how their names become the numbers in collectives' names, and what they are for. Pure."""

from collections.abc import Mapping
from typing import Any

from ascend_moe_train.profile.tables import GroupInfo

MAX_GROUPS = 10_000
MAX_RANKS = 2**20
_UINT32 = 0xFFFFFFFF
_FACTORS = (29, 131)
SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "data_parallel_size": "dp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "world_size": "world",
}
# how names of groups begin, longest first -> what for
_BEGINNINGS = (
    ("default_group", "world"),
    ("hccl_world", "world"),
    ("world", "world"),
    ("embd", "embedding"),
    ("position_embd", "embedding"),
    ("tp_ep_pp", "world"),
    ("tp_pp", "model"),
    ("mp", "model"),
    ("model", "model"),
    ("exp", "EP"),
    ("ep", "EP"),
    ("edp", "DP"),
    ("dp_modulo", "DP"),
    ("dp", "DP"),
    ("data", "DP"),
    ("cp", "CP"),
    ("context", "CP"),
    ("tp", "TP"),
    ("etp", "TP"),
    ("tensor", "TP"),
    ("pp", "PP"),
    ("pipe", "PP"),
)
P2P_KINDS = ("send", "receive", "recv", "batchsendrecv", "sendrecv")


def hashed(name: str) -> str:
    """The number behind the @ of a collective: two polynomial hashes of 32 bits beside each other."""
    parts = [0, 0]
    for char in name:
        parts = [(part * factor + ord(char)) & _UINT32 for part, factor in zip(parts, _FACTORS, strict=True)]
    return str(parts[0] << 32 | parts[1])


def groups_of(metadata: Mapping[str, Any]) -> dict[str, GroupInfo]:
    """Number -> name and ranks, from profiler_metadata.json. What is not as expected is left out: names are a help."""
    listed = metadata.get("parallel_group_info")
    found = {}
    for name, info in list(listed.items())[:MAX_GROUPS] if isinstance(listed, dict) else []:
        ranks = info.get("global_ranks") if isinstance(info, dict) else None
        if isinstance(ranks, list) and all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in ranks):
            called = str(info.get("group_name") or name)[:80]
            found[hashed(str(name))] = GroupInfo(name=called, ranks=tuple(ranks))
    return found


def sizes_of(metadata: Mapping[str, Any]) -> dict[str, int]:
    """tp, pp, dp, cp, ep and world, where the framework wrote them."""
    given = metadata.get("distributed_args")
    values = given if isinstance(given, dict) else {}
    return {
        short: values[name]
        for name, short in SIZES.items()
        if type(values.get(name)) is int and 0 < values[name] < MAX_RANKS
    }


def kind_of(name: str) -> str | None:
    """`DP` of `dp_cp`; None for a name that says nothing."""
    plain = name.lower()
    return next((kind for start, kind in _BEGINNINGS if plain.startswith(start)), None)


def is_p2p(kind: str) -> bool:
    """Whether a collective of this kind is a message between two ranks, whatever bucket a writer put it in."""
    return kind.lower() in P2P_KINDS


def kind_of_pattern(kinds: frozenset[str]) -> str:
    """What a group without a name is for, from the operators seen in it: only exchanges of tokens are an all-to-all,
    only messages a pipeline; anything else could be several things."""
    plain = {kind.lower() for kind in kinds}
    if any(kind.startswith(("alltoall", "all2all")) for kind in plain):
        return "EP"
    if plain and all(is_p2p(kind) for kind in plain):
        return "PP"
    return "unknown"
