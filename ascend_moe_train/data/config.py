"""What a run reads. Pure."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ascend_moe_train.part import Part


class CorpusConfig(Part):
    """One corpus of a blend: `path` is what `amt data prepare --out` wrote (or a Megatron prefix without .bin/.idx)."""

    path: str
    weight: Annotated[float, Field(gt=0)] = 1.0


class DataConfig(Part):
    """Token shards to train on. `reset_attention` keeps a token from attending to other documents of its sequence; in
    conversations it never does."""

    train: tuple[CorpusConfig, ...]
    valid: tuple[CorpusConfig, ...] = ()
    tokenizer: str
    seq_len: Annotated[int, Field(gt=1)] = 256
    reset_attention: bool = False

    @model_validator(mode="after")
    def _something_to_read(self) -> Self:
        if not self.train:
            raise ValueError("train is empty: name at least one corpus")
        return self
