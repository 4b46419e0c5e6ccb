"""What a run reads besides its configuration, opened and checked before anything heavy is imported. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.converted import model_meta
from ascend_moe_train.checkpoint.starting import Start, check_model, open_whole
from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.loader import EvalLoader, TrainLoader
from ascend_moe_train.data.manifest import TOKENIZER_NAME
from ascend_moe_train.data.tokenizer import Tokenizer, load_tokenizer, read_tokenizer_text
from ascend_moe_train.errors import CheckpointError, DataError


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """`valid` is None when the configuration names no validation corpus, `start` when no weights are to be read: they
    are random, or the run has checkpoints of its own and no adapters."""

    train: TrainLoader
    valid: EvalLoader | None
    tokenizer: Tokenizer
    start: Start | None


def open_inputs(config: RunConfig, dp_rank: int = 0, dp_size: int = 1) -> Inputs:
    """What one rank of a run reads. Raises DataError or CheckpointError for one of these that cannot be used."""
    train = TrainLoader(
        config.data,
        vocab_size=config.model.vocab_size,
        seed=config.run.seed,
        global_sequences=config.batch.global_sequences,
        dp_rank=dp_rank,
        dp_size=dp_size,
        micro_sequences=config.batch.micro_sequences,
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
    for corpus in (*config.data.train, *config.data.valid):
        check_tokenizer_of(Path(corpus.path), tokenizer, Path(config.data.tokenizer))
    return Inputs(train=train, valid=valid, tokenizer=tokenizer, start=open_first_weights(config))


def open_first_weights(config: RunConfig) -> Start | None:
    """Where to read weights from, see `Inputs`. Raises CheckpointError: not there, damaged, or of another model."""
    if config.run.init_from is None or (
        config.lora is None and _has_checkpoints(Path(config.run.dir) / store.CHECKPOINTS)
    ):
        return None
    start = open_whole(Path(config.run.init_from))
    check_model(start, config.model)
    return start


def model_of_run(run: Mapping[str, object]) -> dict[str, Any] | None:
    """The model of the checkpoint that a run goes on from, or else starts from; None when it starts from no checkpoint.

    `run` is that section of a run file, not checked yet. Raises CheckpointError: nothing there, or damaged.
    """
    folder, init_from = run.get("dir"), run.get("init_from")
    if not isinstance(init_from, str):
        return None
    own = Path(folder) / store.CHECKPOINTS if isinstance(folder, str) else None
    path = store.find(own if own is not None and _has_checkpoints(own) else Path(init_from))
    return model_meta(store.read_manifest(path).meta, str(path)).model.model_dump(mode="json")


def _has_checkpoints(root: Path) -> bool:
    try:
        return store.newest(root) is not None
    except CheckpointError:
        return True  # what is wrong with it is said when it is loaded


def open_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """A tokenizer for a model of `vocab_size`. Raises DataError: unusable, or with ids that the model does not know."""
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(f"tokenizer {path} has {tokenizer.vocab_size} tokens, model.vocab_size is {vocab_size}")
    return tokenizer


def check_tokenizer_of(corpus: Path, tokenizer: Tokenizer, path: Path) -> None:
    """Raises DataError: the corpus was prepared with a tokenizer whose ids mean something else to the one at `path`.

    A corpus without a tokenizer.json beside its shards, such as one of Megatron's, is taken as it is.
    """
    own = (corpus if corpus.is_dir() else corpus.parent) / TOKENIZER_NAME
    if not own.is_file() or read_tokenizer_text(own) == read_tokenizer_text(path):
        return
    prepared_with = load_tokenizer(own)
    if (token := tokenizer.unlike(prepared_with)) is not None:
        raise DataError(
            f"{corpus}: was prepared with another tokenizer than data.tokenizer {path}, which does not know "
            f"{token[:40]!r} by the same number: use {own}"
        )
