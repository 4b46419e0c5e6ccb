"""How bytes travel, where a run may choose: in fewer bits, in two steps, beside computation. Pure."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from ascend_moe_train.parallel.config import CompressConfig, DedupTokens, ExpertWire, ParallelConfig
from ascend_moe_train.parallel.zero_costs import NOT_COMPRESSED


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """Keys of section `parallel` that leave who holds what as it is (see `ParallelConfig`)."""

    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    compress: CompressConfig = NOT_COMPRESSED
    overlap: bool = False
    expert_wire: ExpertWire | None = None
    expert_chunks: int = 1
    hierarchical_ranks: int | None = None
    dedup_tokens: DedupTokens | None = None
    bucket_bytes: int = ParallelConfig.model_fields["bucket_bytes"].default

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Self:
        """Those of a run."""
        return cls(**{name: getattr(parallel, name) for name in NAMES})

    @property
    def keys(self) -> dict[str, Any]:
        """Those that are not plain, by name."""
        return {name: value for name in NAMES if (value := getattr(self, name)) != getattr(PLAIN, name)}

    @property
    def words(self) -> list[str]:
        """What of it is not plain, and makes a difference, as a reader names it."""
        found = {name: getattr(value, "method", value) for name, value in self.keys.items() if name != "bucket_bytes"}
        return [name if value is True else f"{name} {value}" for name, value in found.items()]

    def without(self, name: str) -> Self:
        """With one of them plain, and what there is only with it."""
        names = (name, "dedup_tokens") if name == "hierarchical_ranks" else (name,)
        return replace(self, **{each: getattr(PLAIN, each) for each in names})

    @property
    def is_compressed(self) -> bool:
        """Whether sums of dense gradients, or of their momenta, are of less than all bits."""
        return self.compress.method != "none"

    @property
    def warm_up(self) -> Self:
        """What holds before 1-bit Adam sends momenta."""
        return replace(self, compress=PLAIN.compress) if self.compress.method == "onebit_adam" else self


NAMES = tuple(field.name for field in fields(Techniques))
PLAIN = Techniques()
