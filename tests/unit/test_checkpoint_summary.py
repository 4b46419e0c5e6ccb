"""The summary of a checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.summary import CheckpointSummary, inspect_checkpoint
from ascend_moe_train.errors import CheckpointError


def test_summary(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "model.embed.weight": np.zeros((5, 3), np.float32),
        "model.norm.weight": np.zeros(3, np.float32),
        "adam_m.norm.weight": np.zeros(3, np.float16),
        "step": np.array(7, np.int64),
    }
    meta = {"config": {"optim": {"lr": 0.1, "betas": [0.9, 0.95]}, "model": {}}, "rng": 1}
    path = store.save(tmp_path, 7, tensors, meta, keep=1, max_file_bytes=60)
    assert inspect_checkpoint(path) == CheckpointSummary(
        path=path,
        step=7,
        tensors=4,
        files=3,
        data_bytes=72 + 6 + 8,
        elements=22,
        elements_by_prefix={"adam_m": 3, "model": 18, "step": 1},
        bytes_by_dtype={"F16": 6, "F32": 72, "I64": 8},
        config_keys=("optim.betas", "optim.lr"),
        meta_keys=("config", "rng"),
    )


def test_without_config_and_tensors(tmp_path: Path) -> None:
    summary = inspect_checkpoint(store.save(tmp_path, 0, {}, {}, keep=1))
    assert (summary.tensors, summary.data_bytes, summary.config_keys) == (0, 0, ())


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
        inspect_checkpoint(tmp_path)
