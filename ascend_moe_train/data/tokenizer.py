"""Byte-level BPE in Hugging Face's `tokenizer.json` form: trained here or given. Pure."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from ascend_moe_train.errors import DataError

EOD_TOKEN = "<|endoftext|>"
EOD_TOKENS = (EOD_TOKEN, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>")
MIN_VOCAB_SIZE = 257
MAX_VOCAB_SIZE = 1 << 24
MAX_FILE_BYTES = 1 << 28


class Tokenizer:
    """Text to token ids and back. `vocab_size` is the largest id plus one; `eod_id` ends every document,
    `eod_token` is its spelling.

    `special_tokens` are those that mean something besides their text, `special_ids` their numbers.
    """

    def __init__(self, backend: BackendTokenizer, name: str) -> None:
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        eod_tokens = [token for token in EOD_TOKENS if token in vocabulary]
        if not eod_tokens:
            raise DataError(f"{name}: no end-of-document token, one of {', '.join(EOD_TOKENS)} is needed")
        if max(vocabulary.values()) >= MAX_VOCAB_SIZE:
            raise DataError(f"{name}: token id {max(vocabulary.values())}, allowed are ids below {MAX_VOCAB_SIZE}")
        backend.no_truncation()
        backend.no_padding()
        # Text that spells a special token is text: without this, a document could end itself or another.
        backend.encode_special_tokens = True
        self._backend = backend
        self.eod_token = eod_tokens[0]
        self.eod_id = vocabulary[self.eod_token]
        special = {
            number: token.content for number, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self.special_tokens, self.special_ids = frozenset(special.values()), frozenset(special)
        self.vocab_size = max(vocabulary.values()) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any special token."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, on all cores."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    @cached_property
    def _marked(self) -> BackendTokenizer:
        backend = BackendTokenizer.from_str(self.to_json())
        backend.post_processor = processors.Sequence([])  # some make ranges leave spaces out
        return backend

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Token ids of texts in which the spelling of a special token is that token, on all cores.

        With each token comes the range of characters that it stands for.
        """
        return [
            (encoding.ids, encoding.offsets)
            for encoding in self._marked.encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out. Raises DataError for an id outside the vocabulary."""
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise DataError(f"token id {token_id} is outside the tokenizer's vocabulary of {self.vocab_size}")
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def unlike(self, other: "Tokenizer") -> str | None:
        """The first token, by its id in `other`, that has another id here or none; None where ids of `other` are good
        here too."""
        here = self._backend.get_vocab(with_added_tokens=True)
        theirs = other._backend.get_vocab(with_added_tokens=True)
        wrong = (token for token, number in theirs.items() if here.get(token) != number)
        return min(wrong, key=theirs.__getitem__, default=None)

    def to_json(self) -> str:
        """The text of `tokenizer.json`."""
        text: str = self._backend.to_str(pretty=True)
        return text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE of at most `vocab_size` tokens: the end-of-document token (id 0), 256 bytes, merges."""
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise DataError(
            f"vocab_size {vocab_size} is not possible, allowed: {MIN_VOCAB_SIZE} (256 bytes and the "
            f"end-of-document token) to {MAX_VOCAB_SIZE}"
        )
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, "the trained tokenizer")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`. Raises DataError when it is not one or has no end-of-document token."""
    return parse_tokenizer(read_tokenizer_text(path), str(path))


def read_tokenizer_text(path: Path) -> str:
    """The text of a `tokenizer.json` file, read once so that what is parsed is what is copied."""
    try:
        if not path.is_file():
            raise DataError(f"{path}: no such file, a Hugging Face tokenizer.json is needed")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{path}: {path.stat().st_size} bytes, a tokenizer.json has at most {MAX_FILE_BYTES}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte offset {error.start}, so not a tokenizer.json") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def parse_tokenizer(text: str, name: str) -> Tokenizer:
    """A tokenizer from the text of a `tokenizer.json`; `name` is the file for messages."""
    try:
        backend = BackendTokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{name}: not a Hugging Face tokenizer.json: {reason}") from error
    return Tokenizer(backend, name)
