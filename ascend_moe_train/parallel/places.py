"""Where the tokens of a rank are: in their sequences, and in the global micro-batch. Pure.

Context parallelism cuts each sequence into 2 * cp equal pieces. Rank r of a cp group has pieces r and 2 * cp - 1 - r:
under a causal mask that is equally much work for every rank (Llama 3: Dubey et al., 2024, section 3.3.2).

B sequences of one dp rank in a micro-batch, S places of a sequence, T tokens of one rank, W ranks of a stage in order,
U all their tokens, R runs, M the runs of all. A token's place in the global micro-batch is the number of its sequence
times S, plus its place in there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.parallel.mesh import Coordinates, Mesh

I32 = NDArray[np.int32]


class Sequences(Protocol):
    """What `data.loader.Batch` is: int32 of shape [B, S] each."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def tokens_BS(self) -> I32: ...

    @property
    def targets_BS(self) -> I32: ...

    @property
    def segment_BS(self) -> I32: ...

    @property
    def position_BS(self) -> I32: ...


SomeSequences = TypeVar("SomeSequences", bound=Sequences)


def pieces(cp: int, index: int) -> tuple[int, int]:
    """The two pieces, of 2 * cp, that a rank of a cp group has of each sequence."""
    return index, 2 * cp - 1 - index


def own_places(seq_len: int, cp: int, index: int) -> I32:
    """The places of a sequence that a rank of a cp group has, ascending: (S / cp,). `seq_len` divides by 2 * cp."""
    if cp == 1:
        return np.arange(seq_len, dtype=np.int32)
    size = seq_len // (2 * cp)
    return np.concatenate([np.arange(size, dtype=np.int32) + piece * size for piece in pieces(cp, index)])


def own_part(batch: SomeSequences, mesh: Mesh, here: Coordinates) -> SomeSequences:
    """The places of a dp rank's sequences that one rank of its cp group has: (B, S / cp).

    A document is known by the place where it starts, which may be another rank's, instead of by its number: that too
    never falls along a sequence and is the same for all tokens of a document. With cp 1 the batch stays as it is.
    """
    if mesh.cp == 1:
        return batch
    place_S = own_places(batch.tokens_BS.shape[1], mesh.cp, here.cp)
    return replace(
        batch,
        tokens_BS=batch.tokens_BS[:, place_S],
        targets_BS=batch.targets_BS[:, place_S],
        segment_BS=starts(batch.segment_BS)[:, place_S],
        position_BS=batch.position_BS[:, place_S],
    )


def starts(segment_BS: I32) -> I32:
    """The place where each token's document starts."""
    is_first_BS = np.ones(segment_BS.shape, np.bool_)
    is_first_BS[:, 1:] = segment_BS[:, 1:] != segment_BS[:, :-1]
    place_BS = np.where(is_first_BS, np.arange(segment_BS.shape[1], dtype=np.int32), np.int32(0))
    return np.maximum.accumulate(place_BS, axis=1)


def token_places(mesh: Mesh, rank: int, num_sequences: int, seq_len: int) -> I32:
    """Places in the global micro-batch of a rank's tokens before experts, in their order: (T,).

    `num_sequences` are those of one dp rank. Tokens are split over tp there, whatever they are elsewhere.
    """
    here = mesh.coordinates(rank)
    sequence_B1 = np.arange(num_sequences, dtype=np.int32)[:, None] + np.int32(here.dp * num_sequences)
    place_N = (sequence_B1 * np.int32(seq_len) + own_places(seq_len, mesh.cp, here.cp)).reshape(-1)
    size = len(place_N) // mesh.tp
    return place_N[here.tp * size : (here.tp + 1) * size]


@dataclass(frozen=True, kw_only=True)
class TokenOrder:
    """The tokens of W ranks in the order of their places: what one process would have them in.

    A run is a stretch of a rank's tokens with consecutive places. Ranks have `num_runs` of them, some perhaps empty.
    """

    place_WT: I32
    run_WT: I32
    num_runs: int
    order_M: I32
    """The runs, each known as w * num_runs + r, by their places; (W * num_runs,)."""

    @classmethod
    def of(cls, places: Sequence[I32]) -> "TokenOrder":
        """From what each rank has."""
        place_WT = np.stack(places)
        follows_WT = np.zeros(place_WT.shape, np.bool_)
        follows_WT[:, 1:] = place_WT[:, 1:] == place_WT[:, :-1] + 1
        run_WT = np.cumsum(~follows_WT, axis=1, dtype=np.int32) - 1
        num_runs = int(run_WT.max()) + 1
        # empty runs last
        first_WR = np.full((len(places), num_runs), np.iinfo(np.int32).max, np.int32)
        for place_T, run_T, first_R in zip(place_WT, run_WT, first_WR, strict=True):
            np.minimum.at(first_R, run_T, place_T)
        order_M = np.argsort(first_WR.reshape(-1), kind="stable").astype(np.int32)
        return cls(place_WT=place_WT, run_WT=run_WT, num_runs=num_runs, order_M=order_M)

    @property
    def token_order_U(self) -> I32:
        """The tokens, each known as w * T + t, by their places; (W * T,)."""
        return np.argsort(self.place_WT.reshape(-1), kind="stable").astype(np.int32)


def token_order(mesh: Mesh, ranks: Sequence[int], num_sequences: int, seq_len: int) -> TokenOrder:
    """That of the ranks of a stage."""
    return TokenOrder.of([token_places(mesh, rank, num_sequences, seq_len) for rank in ranks])


@dataclass(frozen=True, kw_only=True)
class RingStep:
    """What one rank computes with the keys of another: rows of its queries, rows of those keys.

    Rows outside see, or are seen by, nothing: with a window that may be all. `key_starts` are the places of the first
    of each `piece_size` keys.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    key_starts: tuple[int, ...]
    piece_size: int


def ring_steps(seq_len: int, cp: int, index: int, window: int | None) -> list[RingStep]:
    """By step: first with a rank's own keys, then with those of the rank before, and so on around the ring."""
    size = seq_len // (2 * cp)
    own = pieces(cp, index)
    found = []
    for step in range(cp):
        theirs = pieces(cp, (index - step) % cp)
        seen = [
            (q, k)
            for q, query_piece in enumerate(own)
            for k, key_piece in enumerate(theirs)
            if key_piece <= query_piece and (window is None or _distance(query_piece, key_piece, size) < window)
        ]
        if not seen:
            found.append(RingStep(queries=(0, 0), keys=(0, 0), key_starts=(), piece_size=size))
            continue
        rows = [(min(each) * size, (max(each) + 1) * size) for each in zip(*seen, strict=True)]
        key_starts = tuple(theirs[k] * size for k in range(rows[1][0] // size, rows[1][1] // size))
        found.append(RingStep(queries=rows[0], keys=rows[1], key_starts=key_starts, piece_size=size))
    return found


def _distance(query_piece: int, key_piece: int, size: int) -> int:
    """How far back the nearest key is from the first query."""
    return max(0, (query_piece - key_piece - 1) * size + 1)
