"""The model against Hugging Face transformers on golden files: logits, losses and the gradient of every weight.

tests/unit/test_hf_oracle.py does the same with the oracle, and says live whether the files are still true.
"""

from functools import cache

import numpy as np
import pytest

from tests.model_run import KERNEL_SETS, CompiledModel, Result, kernels
from tests.oracle.differences import relative_error
from tests.oracle.golden import HF_CASES, Golden, golden, read_tensors
from tests.oracle.transformer import inputs

TOLERANCE = 1e-4


@cache
def run(kernel_set: str, case: str) -> tuple[Golden, Result]:
    chosen, reference = kernels(kernel_set), golden(*read_tensors(case))
    batch = inputs(reference.tokens_BS, reference.targets_BS)
    model = CompiledModel(reference.config, chosen, reference.weights, num_positions=batch.tokens_BS.shape[1])
    return reference, model.run(batch)


@pytest.mark.parametrize("case", HF_CASES)
@pytest.mark.parametrize("kernel_set", KERNEL_SETS)
def test_logits(kernel_set: str, case: str) -> None:
    reference, found = run(kernel_set, case)
    assert relative_error(found.logits_BSV, reference.logits_BSV) < TOLERANCE


@pytest.mark.parametrize("case", HF_CASES)
@pytest.mark.parametrize("kernel_set", KERNEL_SETS)
def test_losses(kernel_set: str, case: str) -> None:
    reference, found = run(kernel_set, case)
    assert found.cross_entropy == pytest.approx(reference.cross_entropy, rel=TOLERANCE)
    assert found.balance == pytest.approx(reference.balance, rel=TOLERANCE)
    assert found.total == pytest.approx(reference.total, rel=TOLERANCE)


@pytest.mark.parametrize("case", HF_CASES)
@pytest.mark.parametrize("kernel_set", KERNEL_SETS)
def test_every_gradient(kernel_set: str, case: str) -> None:
    reference, found = run(kernel_set, case)
    assert found.grads.keys() == reference.grads.keys()
    errors = {name: relative_error(found.grads[name], grad) for name, grad in reference.grads.items()}
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


@pytest.mark.parametrize("case", HF_CASES)
@pytest.mark.parametrize("kernel_set", KERNEL_SETS)
def test_every_token_goes_to_its_experts(kernel_set: str, case: str) -> None:
    reference, found = run(kernel_set, case)
    moe = reference.config.moe
    assignments = 0 if moe is None else reference.tokens_BS.size * moe.top_k
    np.testing.assert_array_equal(found.counts_LE.sum(axis=1), assignments)
    assert found.dropped == 0
