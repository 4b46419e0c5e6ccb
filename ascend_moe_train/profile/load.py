"""A whole capture: ranks read side by side, the large ones kept for the next look. Pure."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ascend_moe_train.errors import ProfileError
from ascend_moe_train.profile.cluster_output import read_cluster_output
from ascend_moe_train.profile.find import Source, find_sources
from ascend_moe_train.profile.kept import read_kept
from ascend_moe_train.profile.tables import Rank

PARALLEL_BYTES = 2**25  # below, starting processes takes longer than reading
MAX_RANKS = 100_000


@dataclass(frozen=True, kw_only=True)
class Capture:
    """All ranks of a folder, in the order of their numbers."""

    folder: str
    ranks: tuple[Rank, ...]


def load(folder: Path, *, cache: Path | None = None) -> Capture:
    """Reads all ranks of a folder. With `cache`, a folder, large ranks are kept in it by their content.

    Raises ProfileError in one line for what cannot be read.
    """
    sources, clusters = find_sources(folder)
    if len(sources) > MAX_RANKS:
        raise ProfileError(f"{folder}: holds {len(sources)} ranks: at most {MAX_RANKS} are read")
    by_rank = {each.rank: each for each in _read_all(sources, cache)}
    for place in clusters:
        for each in read_cluster_output(place):
            by_rank.setdefault(each.rank, each)
    ranks = tuple(by_rank[rank] for rank in sorted(by_rank))
    if not any(each.steps or each.kernels or each.collectives or each.iterations_us or each.caches for each in ranks):
        raise ProfileError(f"{folder}: its files hold no step, no kernel, no collective and no counter")
    return Capture(folder=folder.resolve().name or str(folder), ranks=ranks)


def _read_all(sources: Sequence[Source], cache: Path | None) -> list[Rank]:
    sizes = [sum(path.stat().st_size for path in each.paths()) for each in sources]
    workers = min(len(sources), os.cpu_count() or 1)
    if workers < 2 or sum(sizes) < PARALLEL_BYTES:
        return [read_kept(each, cache) for each in sources]
    # large ones first, so that none is left over at the end
    order = sorted(range(len(sources)), key=lambda place: -sizes[place])
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(read_kept, [sources[place] for place in order], [cache] * len(sources)))
