"""The model against Hugging Face transformers on golden files: logits, losses, every gradient, greedy generation.

tests/unit/test_hf_oracle.py says live whether the files are still true, and holds the oracle to them.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.model_run import CompiledModel, Result, kernels
from tests.oracle.differences import relative_error
from tests.oracle.golden import FAMILY_CASES, HF_CASES, PROMPT, Golden, golden, read_tensors
from tests.oracle.transformer import inputs

TOLERANCE = 1e-4

RUNS: list[Any] = [("native", case) for case in HF_CASES]
RUNS += [pytest.param("portable", case, marks=pytest.mark.slow) for case in HF_CASES]
RUNS += [("portable", case) for case in FAMILY_CASES if case not in HF_CASES]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What transformers computed, and what the model gives on the same tokens and on those that were generated."""

    reference: Golden
    found: Result
    continued: Result


@cache
def run(kernel_set: str, case: str) -> Run:
    chosen, reference = kernels(kernel_set), golden(*read_tensors(case))
    batch = inputs(reference.tokens_BS, reference.targets_BS)
    model = CompiledModel(reference.config, chosen, reference.weights, num_positions=batch.tokens_BS.shape[1])
    continued = model.run(inputs(reference.generated_BS, reference.targets_BS))
    return Run(reference=reference, found=model.run(batch), continued=continued)


@pytest.mark.parametrize(("kernel_set", "case"), RUNS)
def test_logits(kernel_set: str, case: str) -> None:
    this = run(kernel_set, case)
    assert relative_error(this.found.logits_BSV, this.reference.logits_BSV) < TOLERANCE


@pytest.mark.parametrize(("kernel_set", "case"), RUNS)
def test_losses(kernel_set: str, case: str) -> None:
    this = run(kernel_set, case)
    assert this.found.cross_entropy == pytest.approx(this.reference.cross_entropy, rel=TOLERANCE)
    if this.reference.balance is not None:
        assert this.found.balance == pytest.approx(this.reference.balance, rel=TOLERANCE)
    assert this.found.total == pytest.approx(this.reference.total, rel=TOLERANCE)


@pytest.mark.parametrize(("kernel_set", "case"), RUNS)
def test_every_gradient(kernel_set: str, case: str) -> None:
    this = run(kernel_set, case)
    assert this.found.grads.keys() == this.reference.grads.keys()
    errors = {name: relative_error(this.found.grads[name], grad) for name, grad in this.reference.grads.items()}
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


@pytest.mark.parametrize(("kernel_set", "case"), RUNS)
def test_greedy_generation(kernel_set: str, case: str) -> None:
    this = run(kernel_set, case)
    likeliest_BS = this.continued.logits_BSV.argmax(axis=-1)
    np.testing.assert_array_equal(likeliest_BS[:, PROMPT - 1 : -1], this.reference.generated_BS[:, PROMPT:])


@pytest.mark.parametrize(("kernel_set", "case"), RUNS)
def test_every_token_goes_to_its_experts(kernel_set: str, case: str) -> None:
    this = run(kernel_set, case)
    moe = this.reference.config.moe
    assignments = this.reference.tokens_BS.size * moe.top_k if moe is not None else 0
    np.testing.assert_array_equal(this.found.counts_LE.sum(axis=1), assignments)
    assert this.found.dropped == 0
