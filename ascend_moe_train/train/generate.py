"""Text from a trained model. Shape letters: see model/kernels/protocol.py."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from numpy.typing import NDArray
from pydantic import ValidationError

from ascend_moe_train.checkpoint.layout import EXTRAS_FOLDER
from ascend_moe_train.checkpoint.starting import Start, open_start, read_weights
from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.chat_template import ChatRenderer, find_template
from ascend_moe_train.data.tokenizer import Tokenizer, load_tokenizer
from ascend_moe_train.errors import CheckpointError, TrainingError
from ascend_moe_train.model.kernels.select import choose
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.train.inputs import open_tokenizer
from ascend_moe_train.train.metrics import first_problem
from ascend_moe_train.train.session import copy_into, set_device

CONTEXT = 512  # each token takes a pass over so many
TOKENIZER = "tokenizer.json"

Tensor = Any


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn: temperature 0 takes the most likely one; top_p keeps the smallest set of tokens that
    holds this much probability (Holtzman et al., 2020)."""

    max_tokens: int = 200
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0


class _NextLogits(nn.Cell):
    """Logits after token `last` (1,) of a padded sequence: (V,)."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def construct(self, tokens_1S: Tensor, zeros_1S: Tensor, position_1S: Tensor, last: Tensor, seed: Tensor) -> Tensor:
        x_SD, _, _ = self.model.hidden_states(tokens_1S, zeros_1S, position_1S, seed)
        logits_1V = self.model.logits(ops.gather(x_SD, last, 0))
        return ops.cast(ops.reshape(logits_1V, (-1,)), ms.float32)


class Generator:
    """Continues token sequences, one token at a time, with the whole forward pass each time."""

    def __init__(self, model: Transformer, seq_len: int, vocab_size: int) -> None:
        self._next_logits = _NextLogits(model)
        self._seq_len = seq_len
        self._vocab_size = vocab_size

    def logits(self, tokens: list[int]) -> NDArray[np.float64]:
        """Logits of the token that follows, from the last `seq_len` tokens (V,).

        V is the tokenizer's `vocab_size`: what a model knows beyond it stands for no text.
        Raises TrainingError: not finite, since the weights are not or are far too large.
        """
        window = tokens[-self._seq_len :]
        padded_1S = np.zeros((1, self._seq_len), np.int32)
        padded_1S[0, : len(window)] = window
        position_1S = np.arange(self._seq_len, dtype=np.int32)[None]
        last, no_noise = np.array([len(window) - 1], np.int32), np.array([-1], np.int32)
        inputs = (padded_1S, np.zeros_like(padded_1S), position_1S, last, no_noise)
        values: NDArray[np.float64] = self._next_logits(*map(ms.Tensor, inputs)).asnumpy().astype(np.float64)
        if not np.isfinite(values).all():
            raise TrainingError("the model's logits are not finite: its weights are of no use")
        return values[: self._vocab_size]

    def tokens(self, prompt: list[int], sampling: Sampling, end: int | None) -> Iterator[int]:
        """The tokens that follow `prompt`, up to `max_tokens` or the end-of-document token, which is not given."""
        tokens = list(prompt)
        random = np.random.default_rng(sampling.seed)
        for _ in range(sampling.max_tokens):
            token = choose_token(self.logits(tokens), sampling, random)
            if token == end:
                return
            tokens.append(token)
            yield token


def choose_token(logits_V: NDArray[np.float64], sampling: Sampling, random: np.random.Generator) -> int:
    """One token number drawn from logits."""
    if sampling.temperature == 0:
        return int(np.argmax(logits_V))
    with np.errstate(over="ignore"):  # close to temperature 0 all but the largest become -inf, as they should
        scaled_V = (logits_V - logits_V.max()) / sampling.temperature
    p_V = np.exp(scaled_V) / np.exp(scaled_V).sum()
    order = np.argsort(-p_V, kind="stable")
    before_V = np.cumsum(p_V[order]) - p_V[order]
    kept = order[before_V < sampling.top_p]
    return int(random.choice(kept, p=p_V[kept] / p_V[kept].sum()))


def text_pieces(tokenizer: Tokenizer, prompt: str, tokens: Iterable[int]) -> Iterator[str]:
    """The prompt, then what each token adds. A character that is spread over tokens waits until it is whole."""
    yield prompt
    seen: list[int] = []
    text, given = "", 0
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen)
        whole = len(text.rstrip("\ufffd"))
        yield text[given:whole]
        given = max(given, whole)
    yield text[given:]


def load_generator(path: Path, tokenizer_path: str | None, context: int | None = None) -> tuple[Generator, Tokenizer]:
    """The model and tokenizer of a checkpoint folder, or of the newest good one in a folder of checkpoints.

    It runs in fp32 on whatever device is here, whichever the run was on, and sees the last `context` tokens: as many as
    the run trained with, CONTEXT for a converted checkpoint. Raises CheckpointError or DataError: nothing there,
    damaged, no tokenizer, or one of another vocabulary.
    """
    start = open_start(path)
    run = _run(start)
    tokenizer = open_tokenizer(_tokenizer_file(start, run, tokenizer_path), start.model.vocab_size)
    seq_len = context or (CONTEXT if run is None else run.data.seq_len)
    model = load_model(start, seq_len)
    return Generator(model, seq_len, tokenizer.vocab_size), tokenizer


def chat_prompt(path: Path, tokenizer_path: str | None, message: str) -> str:
    """The text that a model continues with its answer to a user's message: see `chat_template.find_template`.

    Arguments as of `load_generator`. Raises DataError: no template, or one that cannot be used.
    """
    start = open_start(path)
    file = _tokenizer_file(start, _run(start), tokenizer_path)
    with ChatRenderer(find_template(file, None, load_tokenizer(file).eod_token), "last") as renderer:
        return renderer.prompt(message, "--prompt")


def _tokenizer_file(start: Start, run: RunConfig | None, given: str | None) -> Path:
    if given is not None:
        return Path(given)
    if run is not None:
        named, copy = Path(run.data.tokenizer), start.path.parent.parent / TOKENIZER
        return copy if copy.exists() and not named.exists() else named
    found = _own_tokenizer(start)
    if found is None:
        raise CheckpointError(f"{start.path}: came without {TOKENIZER}: name one with --tokenizer")
    return found


def load_model(start: Start, num_positions: int) -> Transformer:
    """The model of a checkpoint in fp32 on whatever device is here. Raises CheckpointError for damaged weights."""
    model = Transformer(start.model, choose(set_device("auto"), "auto"), num_positions)
    parameters = dict([*model.weights(), *model.buffers()])
    for name, value in read_weights(start, parameters):
        copy_into(parameters[name], value)
    return model


def _run(start: Start) -> RunConfig | None:
    """The run that wrote a checkpoint; None for a conversion."""
    if "config" not in start.manifest.meta:
        return None
    try:
        return RunConfig.model_validate_json(json.dumps(start.manifest.meta["config"]))
    except ValidationError as error:
        raise CheckpointError(f"{start.path}: manifest.json: meta.config: {first_problem(error)}") from None


def _own_tokenizer(start: Start) -> Path | None:
    return start.path / EXTRAS_FOLDER / TOKENIZER if TOKENIZER in start.manifest.extras else None
