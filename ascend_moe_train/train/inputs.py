"""What a run reads besides its configuration, opened and checked before anything heavy is imported. Pure."""

from dataclasses import dataclass
from pathlib import Path

from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.loader import EvalLoader, TrainLoader
from ascend_moe_train.data.tokenizer import Tokenizer, load_tokenizer
from ascend_moe_train.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """`valid` is None when the configuration names no validation corpus."""

    train: TrainLoader
    valid: EvalLoader | None
    tokenizer: Tokenizer


def open_inputs(config: RunConfig) -> Inputs:
    """The corpora and the tokenizer of a run. Raises DataError for one that cannot be used."""
    train = TrainLoader(
        config.data,
        vocab_size=config.model.vocab_size,
        seed=config.run.seed,
        global_sequences=config.batch.global_sequences,
    )
    valid = None
    if config.data.valid:
        valid = EvalLoader(
            config.data,
            vocab_size=config.model.vocab_size,
            num_sequences=config.run.eval_sequences,
            micro_sequences=config.batch.micro_sequences,
        )
    tokenizer = open_tokenizer(Path(config.data.tokenizer), config.model.vocab_size)
    return Inputs(train=train, valid=valid, tokenizer=tokenizer)


def open_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """A tokenizer for a model of `vocab_size`. Raises DataError: unusable, or with ids that the model does not know."""
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(f"tokenizer {path} has {tokenizer.vocab_size} tokens, model.vocab_size is {vocab_size}")
    return tokenizer
