"""Which pipeline stage a rank is in, and what its communication groups are for. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_moe_train.profile.groups import kind_of, kind_of_pattern
from ascend_moe_train.profile.tables import GroupInfo, Rank


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a run file says: stages by rank, and what the group of so many ranks is for."""

    stages: Mapping[int, int]
    groups: Mapping[frozenset[int], str]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`stages` by rank, empty where it is not known; `kinds` and `names` of groups by their number; `sizes` as the
    framework wrote them."""

    stages: Mapping[int, int]
    kinds: Mapping[str, str]
    groups: Mapping[str, GroupInfo]
    sizes: Mapping[str, int]
    source: str

    def peers(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Ranks that do the same work: those of one stage."""
        found: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            found[self.stages.get(rank, 0)].append(rank)
        return [tuple(each) for _, each in sorted(found.items())]

    @property
    def num_stages(self) -> int:
        """At least 1."""
        return len(set(self.stages.values())) or 1


def layout_of(ranks: Sequence[Rank], known: Known | None = None) -> Layout:
    """From the metadata of all ranks; what a group without a name is for, from its ranks, else from its operators."""
    groups = {number: info for rank in ranks for number, info in rank.groups.items()}
    seen: dict[str, set[str]] = defaultdict(set)
    members: dict[str, set[int]] = defaultdict(set)
    for rank in ranks:
        for each in rank.collectives:
            seen[each.group].add(each.kind)
            members[each.group].add(rank.rank)
    of_ranks = _kinds_of_ranks(groups)
    kinds = {}
    for number in {*groups, *seen}:
        named = kind_of(groups[number].name) if number in groups else None
        own = frozenset(members[number])
        by_ranks = (known.groups.get(own) if known is not None else None) or of_ranks.get(own)
        kinds[number] = named or by_ranks or kind_of_pattern(frozenset(seen[number]))
    sizes = next((rank.sizes for rank in ranks if rank.sizes), {})
    if known is not None:
        return Layout(stages=known.stages, kinds=kinds, groups=groups, sizes=sizes, source="the run file")
    found, source = _stages(ranks, groups, kinds, sizes)
    return Layout(stages=found, kinds=kinds, groups=groups, sizes=sizes, source=source)


def _kinds_of_ranks(groups: Mapping[str, GroupInfo]) -> dict[frozenset[int], str]:
    """What a group of exactly these ranks is for, where all groups of them that have a name agree."""
    found: dict[frozenset[int], set[str]] = defaultdict(set)
    for info in groups.values():
        if len(info.ranks) > 1 and (kind := kind_of(info.name)) is not None:
            found[frozenset(info.ranks)].add(kind)
    return {ranks: next(iter(kinds)) for ranks, kinds in found.items() if len(kinds) == 1}


def _stages(
    ranks: Sequence[Rank], groups: Mapping[str, GroupInfo], kinds: Mapping[str, str], sizes: Mapping[str, int]
) -> tuple[dict[int, int], str]:
    """A rank's place in its pipeline group; else by the order of Megatron, where a stage's ranks follow each other."""
    pipelines = [info.ranks for number, info in groups.items() if kinds.get(number) == "PP" and len(info.ranks) > 1]
    if pipelines:
        found = {rank: place for group in pipelines for place, rank in enumerate(group)}
        return found, "profiler_metadata.json: parallel_group_info"
    stages, world = sizes.get("pp", 1), sizes.get("world", 0)
    if stages > 1 and world and world % stages == 0:
        of_stage = world // stages
        found = {each.rank: each.rank // of_stage for each in ranks if each.rank < world}
        return found, "profiler_metadata.json: distributed_args, stages in the order of ranks"
    return {}, "not known: no pipeline group in profiler_metadata.json"
