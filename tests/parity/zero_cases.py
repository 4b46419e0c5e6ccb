"""Small models whose sizes no number of ranks divides, their batches, and the layouts of test_zero.py.

Shape letters: see model/kernels/protocol.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.loader import Batch
from ascend_moe_train.model.config import LoraConfig, ModelConfig, MoEConfig, MTPConfig
from ascend_moe_train.model.layers import initial_value
from ascend_moe_train.optim.config import OptimConfig

LENGTH = 7
NUM_STEPS = 3
LR = 1e-2
# A large eps: with a small one the first update is the sign of the gradient, however small that is.
OPTIM = OptimConfig(eps=1e-3, clip_norm=0.5)

# Losses of the router are means over a rank's own tokens here, so they must not be in what is trained.
_MOE = MoEConfig(num_experts=3, top_k=2, ffn=5, aux_loss_coef=0.0, router_bias=True, shared_ffn=4)
PLAIN = ModelConfig(vocab_size=11, hidden=6, num_layers=1, num_heads=3, num_kv_heads=3, head_dim=2, ffn=5, moe=_MOE)
TIED = PLAIN.model_copy(update={"tie_embeddings": True, "mtp": MTPConfig(), "moe": None})
MODELS = {"plain": PLAIN, "tied": TIED}
LORA = LoraConfig(r=2, alpha=1, targets=("attn.qkv", "experts.w2"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on `ranks`, data parallel; `options` are those of section `parallel`. A step has 8 sequences."""

    name: str
    ranks: int
    num_micro: int
    model: str = "plain"
    kernels: str = "native"
    has_adapters: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> "Case":
        """The same on one rank."""
        kernels, adapters = self.kernels, self.has_adapters
        name = f"{self.model} {self.num_micro} {kernels} {adapters}"
        return Case(
            name=name, ranks=1, num_micro=self.num_micro, model=self.model, kernels=kernels, has_adapters=adapters
        )

    @property
    def lora(self) -> LoraConfig | None:
        return LORA if self.has_adapters else None

    @property
    def run(self) -> RunConfig:
        return RunConfig.model_validate(
            {
                "run": {"dir": "unused", "steps": 1, "init_from": "unused"},
                "model": MODELS[self.model].model_dump(),
                "data": {"train": ({"path": "unused"},), "tokenizer": "unused", "seq_len": LENGTH},
                "batch": {"global_sequences": 8, "micro_sequences": 8 // self.num_micro // self.ranks},
                "optim": {"warmup_steps": 0},
                "lora": None if self.lora is None else self.lora.model_dump(),
                "parallel": dict(self.options),
            }
        )


def _case(ranks: int, stage: int, num_micro: int, **kwargs: Any) -> Case:
    options = {"zero_stage": stage, **kwargs.pop("options", {})}
    others = [f"{key} {value}" for key, value in {**options, **kwargs}.items() if key != "zero_stage"]
    name = ", ".join([f"{ranks} ranks", f"stage {stage}", f"{num_micro} micro", *others])
    return Case(name=name, ranks=ranks, num_micro=num_micro, options=options, **kwargs)


SMALL = {"bucket_bytes": 300}
ON_TWO = [
    _case(2, 0, 2),
    _case(2, 1, 1, kernels="portable", options=SMALL),
    _case(2, 1, 2, options={"offload_optimizer": True}),
    _case(2, 2, 2, options=SMALL),
    _case(2, 3, 2),
    _case(2, 3, 1, model="tied", options=SMALL | {"offload_optimizer": True}),
    _case(2, 3, 2, has_adapters=True),
    _case(2, 0, 1, options={"reduce_dtype": "bf16"}),
    _case(2, 2, 1, options={"reduce_dtype": "fp16"}),
    _case(2, 3, 1, options={"reduce_dtype": "bf16"}),
]
ON_FOUR = [_case(4, 0, 1), *(_case(4, stage, 2, options=SMALL) for stage in (1, 2, 3)), _case(4, 3, 1, model="tied")]
# Where there is nobody to share with.
ALONE = _case(1, 3, 2, options={"offload_optimizer": True, "reduce_dtype": "fp16"})
CASES = {case.name: case for case in (*ON_TWO, *ON_FOUR)}


def value_of(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The value that a weight starts from; no two elements alike."""
    value = initial_value(f"{name}.", shape, std=0.3, num_layers=1, seed=5)
    return value + initial_value(f"{name}..", shape, std=0.1, num_layers=1, seed=6) if "norm" in name else value


def batch_of(case: Case, step: int, index: int) -> Batch:
    """What rank `index` trains on in a step: its block of every micro-batch."""
    rng = np.random.default_rng([7, step])
    tokens, targets = rng.integers(0, MODELS[case.model].vocab_size, (2, 8, LENGTH)).astype(np.int32)
    # targets that are not counted: more in the first sequences than in the last
    targets[rng.random(targets.shape) < np.linspace(0.6, 0.0, 8)[:, None]] = -1
    segment = np.zeros_like(tokens) + (np.arange(LENGTH, dtype=np.int32) >= 4).astype(np.int32)
    position = np.arange(LENGTH, dtype=np.int32) - 4 * segment
    rows = np.arange(8).reshape(case.num_micro, case.ranks, -1)[:, index].reshape(-1)
    parts = (np.ascontiguousarray(each[rows]) for each in (tokens, targets, segment, position))
    tokens_BS, targets_BS, segment_BS, position_BS = parts
    return Batch(tokens_BS=tokens_BS, targets_BS=targets_BS, segment_BS=segment_BS, position_BS=position_BS)
