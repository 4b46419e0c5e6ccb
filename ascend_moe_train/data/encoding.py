"""Documents as what a shard holds: token ids and, for conversations, which of them count in the loss. Pure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.data.chat import check_special_tokens
from ascend_moe_train.data.chat_template import ChatRenderer
from ascend_moe_train.data.sources import Document
from ascend_moe_train.data.tokenizer import Tokenizer

TooLong = Literal["drop", "truncate"]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One document. `counted` has a 1 for each token that is a target; None when all are.

    `text_bytes` is the UTF-8 text that the targets stand for. No `ids`: the document was dropped.
    """

    ids: Sequence[int]
    counted: NDArray[np.uint8] | None = None
    text_bytes: int = 0
    truncated: bool = False


class Encoder(Protocol):
    """How one kind of document is encoded."""

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        """Each document in turn."""


class TextEncoder:
    """Plain text: every token counts, and an end-of-document token ends it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        """See `Encoder`."""
        texts = [document.text for document in documents]
        for text, ids in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            yield Encoded(ids=[*ids, self._tokenizer.eod_id], text_bytes=len(text.encode()))


class ChatEncoder:
    """Conversations: what the template makes of them, of which the assistant's turns count.

    A token counts when any of its characters is in such a turn. With `max_tokens`, longer conversations are dropped, or
    cut there and dropped only if nothing that counts is left. Raises DataError naming the document.
    """

    def __init__(
        self, tokenizer: Tokenizer, renderer: ChatRenderer, *, max_tokens: int | None, too_long: TooLong
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._max_tokens = max_tokens
        self._cuts = too_long == "truncate"

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        """See `Encoder`."""
        rendered = []
        for document in documents:
            conversation = json.loads(document.text)
            check_special_tokens(conversation, self._tokenizer.special_tokens, document.where)
            rendered.append(self._renderer.render(conversation, document.where))
        tokens = self._tokenizer.encode_marked([each.text for each in rendered])
        for each, (ids, ranges) in zip(rendered, tokens, strict=True):
            yield self._encoded(each.text, each.spans, ids, ranges)

    def _encoded(
        self, text: str, spans: Sequence[tuple[int, int]], ids: Sequence[int], ranges: Sequence[tuple[int, int]]
    ) -> Encoded:
        truncated = self._max_tokens is not None and len(ids) > self._max_tokens
        if truncated and not self._cuts:
            return Encoded(ids=())
        ids = ids[: self._max_tokens]
        range_N2 = np.asarray(ranges[: self._max_tokens], dtype=np.int64).reshape(-1, 2)
        counted = np.zeros(len(ids), dtype=np.uint8)
        text_bytes = 0
        cut = int(range_N2[-1, 1]) if len(ids) else 0
        for start, end in spans:
            counted |= (range_N2[:, 0] < end) & (range_N2[:, 1] > start)
            text_bytes += len(text[start : min(end, cut)].encode())
        counted[:1] = 0  # nothing tells of the first token
        if not counted.any():
            return Encoded(ids=())
        return Encoded(ids=ids, counted=counted, text_bytes=text_bytes, truncated=truncated)
