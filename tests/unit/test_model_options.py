"""The whole model against its fp64 oracle: every value of an option in `make test`, every pair of values in `make
test-all`. See tests/model_cases.py.

Shape letters: see model/kernels/protocol.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest

from ascend_moe_train.model.config import ModelConfig, MoEConfig, RopeConfig
from ascend_moe_train.part import Part
from tests.model_cases import CASES, VOCAB, batch, firm_params
from tests.model_run import NO_NOISE, CompiledModel, Result, errors, kernels, noise, uniform
from tests.oracle.differences import relative_error
from tests.oracle.golden import FAMILY_CASES, golden, read_tensors
from tests.oracle.transformer import Inputs, transformer, transformer_grads
from tests.pairwise import pairwise

TOLERANCE = 1e-5
NOISE_SEED = 12345
# for what must not change at all: other rows in a matrix product may change the order of a sum
UNCHANGED = 1e-6

JITTERED = [name for name, case in CASES.items() if case.config.moe is not None and case.config.moe.jitter > 0]
CAPPED = [name for name, case in CASES.items() if case.config.moe is not None and case.config.moe.capacity_factor]
PACKED = [name for name, case in CASES.items() if case.has_documents and name not in CAPPED]


def each(names: Iterable[str]) -> Any:
    """Parameters of a test; those that are slow are marked."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize("name", [n if CASES[n].is_quick else pytest.param(n, marks=slow) for n in names])


@dataclass(frozen=True, kw_only=True)
class Run:
    """A compiled case, what it was fed, and what it gave."""

    model: CompiledModel
    params: dict[str, Any]
    fed: Inputs
    result: Result


@cache
def run(name: str) -> Run:
    case = CASES[name]
    kernel_set, fed = kernels(case.kernels), batch(case)
    fed = replace(fed, noise_TD=noise(case.config, fed, NOISE_SEED))
    params = firm_params(case.config, fed)
    model = CompiledModel(case.config, kernel_set, params, num_positions=fed.tokens_BS.shape[1])
    return Run(model=model, params=params, fed=fed, result=model.run(fed, NOISE_SEED))


def too_large(found: Result, name: str, fed: Inputs) -> dict[str, float]:
    expected, grads = transformer_grads(run(name).params, CASES[name].config, fed)
    assert found.grads.keys() == grads.keys()
    return {part: error for part, error in errors(found, expected, grads).items() if not error < TOLERANCE}


@each(CASES)
def test_losses_and_every_gradient_equal_the_oracle(name: str) -> None:
    this = run(name)
    assert too_large(this.result, name, this.fed) == {}


@each(CASES)
def test_counts_and_dropped_assignments_equal_the_oracle(name: str) -> None:
    this, config = run(name), CASES[name].config
    layers = list(transformer(this.params, config, this.fed).moe_layers.values())
    num_experts = config.moe.num_experts if config.moe is not None else 1
    chosen: list[Any] = [np.bincount(layer.routing.expert_TK.reshape(-1), minlength=num_experts) for layer in layers]
    np.testing.assert_array_equal(this.result.counts_LE, np.array(chosen or [[0]]))
    assert this.result.dropped == sum(layer.dispatch.dropped for layer in layers)
    assert (this.result.dropped > 0) == (name in CAPPED)


@each(CASES)
def test_without_counted_targets_only_the_router_learns(name: str) -> None:
    this, config = run(name), CASES[name].config
    found = this.model.run(replace(this.fed, targets_BS=np.full_like(this.fed.targets_BS, -1)), NOISE_SEED)
    assert found.cross_entropy == 0.0
    assert (found.grads["norm.weight"] == 0.0).all()
    assert all(np.isfinite(grad).all() for grad in found.grads.values())
    moe = config.moe
    terms = 0.0 if moe is None else moe.aux_loss_coef * this.result.balance + moe.z_loss_coef * this.result.z
    assert found.total == pytest.approx(terms, rel=TOLERANCE)


@each(JITTERED)
def test_a_negative_seed_switches_the_jitter_off(name: str) -> None:
    this = run(name)
    found = this.model.run(this.fed, NO_NOISE)
    expected = transformer(this.params, CASES[name].config, replace(this.fed, noise_TD={}))
    assert found.z == pytest.approx(expected.z, rel=TOLERANCE)
    assert this.result.z != pytest.approx(expected.z, rel=TOLERANCE)


@each(PACKED)
def test_a_token_sees_only_its_own_document(name: str) -> None:
    """Routing is dropless here; with a capacity, tokens compete for places whatever document they are in."""
    this = run(name)
    segment = this.fed.segment_BS
    changed_BS = segment == segment[:, -1:] - 1
    assert changed_BS.any()
    assert (segment[changed_BS.any(axis=1)].max(axis=1) > 0).all()
    tokens = np.where(changed_BS, (this.fed.tokens_BS + 1) % VOCAB, this.fed.tokens_BS)
    before, after = (this.model.run(replace(this.fed, tokens_BS=x)).logits_BSV for x in (this.fed.tokens_BS, tokens))
    assert relative_error(after[~changed_BS], before[~changed_BS]) < UNCHANGED
    assert relative_error(after[changed_BS], before[changed_BS]) > 0.1
    whole = [
        this.model.run(replace(this.fed, tokens_BS=x, segment_BS=np.zeros_like(segment))).logits_BSV
        for x in (this.fed.tokens_BS, tokens)
    ]
    last_BS = segment == segment[:, -1:]
    assert relative_error(whole[1][last_BS], whole[0][last_BS]) > UNCHANGED


@pytest.mark.parametrize("amplitude", [0.01, 0.3])
def test_noise_is_uniform_and_depends_on_seed_and_place(amplitude: float) -> None:
    size = 1 << 16
    first, again, other = (uniform((size,), seed, amplitude) for seed in (7, 7, 8))
    assert first.tobytes() == again.tobytes()
    unit = [(x.astype(np.float64) - 1.0 + amplitude) / (2.0 * amplitude) for x in (first, other)]
    limit = 5.0 / np.sqrt(size)  # five standard errors of a mean or a correlation
    for x in unit:
        assert x.min() > -1e-4
        assert x.max() < 1.0 + 1e-4
        assert abs(x.mean() - 0.5) < limit * np.sqrt(1 / 12)
        per_bin = np.histogram(x, bins=64, range=(-1e-4, 1.0 + 1e-4))[0]
        assert (per_bin - size / 64).std() < 1.5 * np.sqrt(size / 64)
    pairs = [(unit[0], unit[1]), *((unit[0][:-lag], unit[0][lag:]) for lag in (1, 2, 24, 1024))]
    for a, b in pairs:
        assert abs(np.corrcoef(a, b)[0, 1]) < limit


def test_noise_of_amplitude_zero_is_one() -> None:
    assert (uniform((1000,), 3, 0.0) == 1.0).all()


def test_every_pair_of_values_meets() -> None:
    factors = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1), "d": (0, 1)}
    cases = pairwise(factors, lambda choice: not (choice["a"] == 2 and choice["b"] == 1))
    met = {(m, case[m], n, case[n]) for case in cases for m, n in combinations(factors, 2)}
    wanted = {(m, i, n, j) for m, n in combinations(factors, 2) for i in factors[m] for j in factors[n]}
    assert met == wanted - {("a", 2, "b", 1)}
    assert len(cases) < 12


def values(part: type[Part], field: str) -> set[Any]:
    """Here, or on golden files of transformers (tests/unit/test_model_hf.py)."""
    configs = [case.config for case in CASES.values()]
    configs += [golden(*read_tensors(case)).config for case in FAMILY_CASES]
    holders: dict[type[Part], list[Any]] = {
        ModelConfig: configs,
        MoEConfig: [config.moe for config in configs if config.moe is not None],
        RopeConfig: [config.rope for config in configs],
    }
    return {getattr(holder, field) for holder in holders[part]}


@pytest.mark.parametrize("part", [ModelConfig, MoEConfig, RopeConfig])
def test_the_cases_meet_every_option(part: type[Part]) -> None:
    """An option is a field with a default. `init_std` is left out: it says how weights start, and these are given."""
    for name, field in part.model_fields.items():
        if field.is_required() or name == "init_std":
            continue
        met = values(part, name)
        assert len(met) > 1, f"{part.__name__}.{name} is always {met}: add it to the cases"
        if get_origin(field.annotation) is Literal:
            assert met == set(get_args(field.annotation)), f"{part.__name__}.{name} is only {met}: add it to the cases"
