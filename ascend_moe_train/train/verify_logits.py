"""The same prompt through transformers and through our model: the proof that a conversion means what it should.

Shape letters: see model/kernels/protocol.py.
"""

import gc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from ascend_moe_train.checkpoint.starting import Start, open_start
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.counts import num_parameters
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.train.generate import load_model
from ascend_moe_train.train.memory import free_bytes
from ascend_moe_train.units import format_bytes

TOLERANCE = 1e-4  # as for every parity with transformers: both compute in fp32
_TOKENS = 32
_FP32_BYTES = 4

Tensor = Any


class _Logits(nn.Cell):
    """Logits after every token: (S, V)."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def construct(self, tokens_1S: Tensor, zeros_1S: Tensor, position_1S: Tensor, no_noise: Tensor) -> Tensor:
        x_SD, _, _ = self.model.hidden_states(tokens_1S, zeros_1S, position_1S, no_noise)
        return self.model.logits(x_SD)


def logits_check(*, hugging_face: Path | None = None, checkpoint: Path | None = None) -> Callable[[Path], None]:
    """Compares the folder that was made with the one that it was made of, which is given.

    Raises:
        CheckpointError: at once where torch or transformers is missing. The check itself: too large for the memory, a
            model that transformers cannot run, or logits that differ.
    """
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise CheckpointError(f"--verify logits needs {' and '.join(missing)}: pip install {' '.join(missing)}")

    def check(made: Path) -> None:
        compare_logits(hugging_face or made, checkpoint or made)

    return check


def compare_logits(hugging_face: Path, checkpoint: Path) -> None:
    """Raises CheckpointError when the largest difference of logits exceeds TOLERANCE of the largest logit."""
    start = open_start(checkpoint)
    _check_memory(start)
    vocab_size = start.model.vocab_size
    tokens_1S = np.random.default_rng(0).integers(0, vocab_size, (1, _TOKENS)).astype(np.int32)
    theirs_SV = transformers_logits(hugging_face, tokens_1S)[:, :vocab_size]
    ours_SV = our_logits(start, tokens_1S)
    errors_S = np.abs(ours_SV - theirs_SV).max(axis=1) / np.abs(theirs_SV).max()
    worst = int(errors_S.argmax())
    if not errors_S[worst] < TOLERANCE:
        raise CheckpointError(
            f"{checkpoint}: logits differ from those of {hugging_face} by {errors_S[worst]:.2g} at position {worst}; "
            f"allowed: {TOLERANCE:g}"
        )


def _check_memory(start: Start) -> None:
    needed_bytes = _FP32_BYTES * num_parameters(start.model)
    free = free_bytes()
    if free is not None and needed_bytes > free:
        raise CheckpointError(
            f"--verify logits: {start.path} has {format_bytes(needed_bytes)} of fp32 weights, of memory "
            f"{format_bytes(free)} are free"
        )


def transformers_logits(folder: Path, tokens_1S: NDArray[np.int32]) -> NDArray[np.float64]:
    """Of a Hugging Face folder, after every token (S, V). Raises CheckpointError for what transformers cannot run."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True, attn_implementation="eager"
        )
        with torch.no_grad():
            logits_SV = model.eval()(input_ids=torch.from_numpy(tokens_1S.astype(np.int64))).logits[0]
    except Exception as error:  # it raises whatever its many models raise
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder}: transformers cannot run it: {type(error).__name__}: {reason}") from error
    values: NDArray[np.float64] = logits_SV.double().numpy()
    del model
    gc.collect()
    return values


def our_logits(start: Start, tokens_1S: NDArray[np.int32]) -> NDArray[np.float64]:
    """Of a checkpoint, after every token (S, V). Raises CheckpointError for damaged weights."""
    num_tokens = tokens_1S.shape[1]
    model = load_model(start, num_tokens)
    position_1S = np.arange(num_tokens, dtype=np.int32)[None]
    inputs = (tokens_1S, np.zeros_like(tokens_1S), position_1S, np.array([-1], np.int32))
    values: NDArray[np.float64] = _Logits(model)(*map(ms.Tensor, inputs)).asnumpy().astype(np.float64)
    return values
