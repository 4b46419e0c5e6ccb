"""The oracles' hand-derived backward passes against central differences, and their routing rules by hand."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from ascend_moe_train.model.config import ClampedSwiGLUConfig, MoEConfig, RopeConfig
from tests.oracle.arrays import F64, I64
from tests.oracle.attention import attention, attention_vjp
from tests.oracle.differences import numeric_vjp, relative_error
from tests.oracle.dispatch import capacity, dispatch
from tests.oracle.experts import grouped_experts, grouped_experts_vjp
from tests.oracle.ffn import swiglu, swiglu_vjp
from tests.oracle.moe import moe_layer, moe_layer_vjp
from tests.oracle.norm import rms_norm, rms_norm_vjp
from tests.oracle.rope import apply_rope, apply_rope_vjp, rope_angles
from tests.oracle.router import Routing, balance_loss, balance_loss_vjp, route, route_vjp, z_loss, z_loss_vjp

TOLERANCE = 1e-6

ROUTERS: dict[str, dict[str, object]] = {
    "softmax_normalised": {},
    "softmax_raw": {"normalize_topk": False},
    "softmax_scaled": {"routed_scale": 2.5},
    "after_topk": {"score_order": "after_topk"},
    "sigmoid_normalised": {"score": "sigmoid"},
    "sigmoid_raw": {"score": "sigmoid", "normalize_topk": False, "routed_scale": 0.5},
    "forced": {"force_balance": True},
    "forced_sigmoid": {"force_balance": True, "score": "sigmoid"},
    "forced_after_topk": {"force_balance": True, "score_order": "after_topk"},
}


def moe_config(**options: object) -> MoEConfig:
    """A small layer: 5 experts, 2 of them per token."""
    return MoEConfig.model_validate({"num_experts": 5, "top_k": 2, "ffn": 3} | options)


def normal(seed: int, *shape: int) -> F64:
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape)


def check_vjp(
    function: Callable[[Mapping[str, F64]], F64 | float],
    inputs: Mapping[str, F64],
    found: Mapping[str, F64],
    d_y: F64 | float,
) -> None:
    """Every gradient in `found` equals the central difference of `function` in the input of that name."""
    for name, gradient in found.items():
        expected = numeric_vjp(_of_one_input(function, inputs, name), inputs[name], d_y)
        assert relative_error(gradient, expected) < TOLERANCE, name


def _of_one_input(
    function: Callable[[Mapping[str, F64]], F64 | float], inputs: Mapping[str, F64], name: str
) -> Callable[[F64], F64 | float]:
    return lambda value: function({**inputs, name: value})


@pytest.mark.parametrize("shape", [(4, 6), (1, 1), (2, 3, 4)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, w, d_y = normal(0, *shape), normal(1, shape[-1]), normal(2, *shape)
    d_x, d_w = rms_norm_vjp(d_y, x, w, 1e-3)
    check_vjp(lambda a: rms_norm(a["x"], a["w"], 1e-3), {"x": x, "w": w}, {"x": d_x, "w": d_w}, d_y)


def test_rms_norm_of_a_constant_row_is_its_weight() -> None:
    np.testing.assert_allclose(rms_norm(np.full((1, 4), 3.0), np.arange(4.0), 0.0), [[0.0, 1.0, 2.0, 3.0]])


def test_oracles_widen_what_they_are_given() -> None:
    assert rms_norm(np.ones((2, 4), np.float32), np.ones(4, np.float32), 1e-5).dtype == np.float64


@pytest.mark.parametrize(
    "rope", [RopeConfig(), RopeConfig(theta=100.0), RopeConfig(scaling="linear", factor=4.0)], ids=str
)
def test_rope(rope: RopeConfig) -> None:
    x, d_y = normal(0, 2, 3, 2, 4), normal(1, 2, 3, 2, 4)
    angle = rope_angles(np.array([[0, 1, 2], [0, 1, 0]]), 4, rope)
    check_vjp(lambda a: apply_rope(a["x"], angle), {"x": x}, {"x": apply_rope_vjp(d_y, angle)}, d_y)


def test_rope_scores_depend_on_the_distance_only_and_scaling_stretches_it() -> None:
    q, k = normal(0, 1, 1, 1, 8), normal(1, 1, 1, 1, 8)

    def score(query: int, key: int, rope: RopeConfig) -> float:
        at = [rope_angles(np.array([[position]]), 8, rope) for position in (query, key)]
        return float((apply_rope(q, at[0]) * apply_rope(k, at[1])).sum())

    plain, stretched = RopeConfig(theta=50.0), RopeConfig(theta=50.0, scaling="linear", factor=2.0)
    assert score(7, 3, plain) == pytest.approx(score(4, 0, plain), rel=1e-12)
    assert score(8, 2, stretched) == pytest.approx(score(4, 1, plain), rel=1e-12)
    assert score(4, 1, plain) != pytest.approx(score(4, 2, plain), rel=1e-3)


def test_rope_turns_element_i_with_element_i_plus_half() -> None:
    angle = rope_angles(np.array([[1]]), 4, RopeConfig(theta=16.0))
    np.testing.assert_allclose(angle[0, 0], [1.0, 0.25])
    turned = apply_rope(np.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4), angle)
    np.testing.assert_allclose(turned.reshape(4), [np.cos(1.0), 0.0, np.sin(1.0), 0.0])


@pytest.mark.parametrize(
    ("segment", "heads", "kv_heads"),
    [([[0, 0, 0, 0], [0, 0, 1, 1]], 4, 2), ([[0]], 2, 1), ([[0, 1, 2]], 3, 3)],
    ids=["documents", "one_token", "every_token_alone"],
)
def test_attention(segment: list[list[int]], heads: int, kv_heads: int) -> None:
    segment_BS = np.array(segment)
    shape_q, shape_kv = (*segment_BS.shape, heads, 4), (*segment_BS.shape, kv_heads, 4)
    inputs = {"q": normal(0, *shape_q), "k": normal(1, *shape_kv), "v": normal(2, *shape_kv)}
    d_y = normal(3, *shape_q)
    d_q, d_k, d_v, d_sink = attention_vjp(d_y, inputs["q"], inputs["k"], inputs["v"], segment_BS)
    check_vjp(lambda a: attention(a["q"], a["k"], a["v"], segment_BS), inputs, {"q": d_q, "k": d_k, "v": d_v}, d_y)
    assert not d_sink.any()


@pytest.mark.parametrize("window", [1, 3, 99])
def test_attention_with_window_sinks_and_wider_values(window: int) -> None:
    segment_BS = np.array([[0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])
    inputs = {"q": normal(0, 2, 5, 4, 4), "k": normal(1, 2, 5, 2, 4), "v": normal(2, 2, 5, 2, 6), "sink": normal(3, 4)}
    d_y = normal(4, 2, 5, 4, 6)
    found = attention_vjp(d_y, inputs["q"], inputs["k"], inputs["v"], segment_BS, window, inputs["sink"])
    check_vjp(
        lambda a: attention(a["q"], a["k"], a["v"], segment_BS, window, a["sink"]),
        inputs,
        dict(zip(inputs, found, strict=True)),
        d_y,
    )


def test_attention_sees_neither_later_tokens_nor_other_documents() -> None:
    q, k, v = normal(0, 1, 4, 2, 4), normal(1, 1, 4, 2, 4), normal(2, 1, 4, 2, 4)
    before = attention(q, k, v, np.array([[0, 0, 1, 1]]))
    v[0, 1] += 1.0
    moved = np.abs(attention(q, k, v, np.array([[0, 0, 1, 1]])) - before).max(axis=(0, 2, 3))
    assert (moved > 0.0).tolist() == [False, True, False, False]
    np.testing.assert_allclose(before[0, 2], normal(2, 1, 4, 2, 4)[0, 2], rtol=1e-12)


@pytest.mark.parametrize("tokens", [4, 1])
def test_swiglu(tokens: int) -> None:
    inputs = {"x": normal(0, tokens, 3), "w13": normal(1, 10, 3), "w2": normal(2, 3, 5)}
    d_y = normal(3, tokens, 3)
    found = dict(zip(inputs, swiglu_vjp(d_y, inputs["x"], inputs["w13"], inputs["w2"]), strict=True))
    check_vjp(lambda a: swiglu(a["x"], a["w13"], a["w2"]), inputs, found, d_y)


@pytest.mark.parametrize("count", [[2, 1, 3], [6, 0, 0], [0, 0, 1], [0, 0, 0]], ids=str)
@pytest.mark.parametrize(
    "moe",
    [
        MoEConfig(num_experts=3, top_k=1, ffn=3),
        MoEConfig(
            num_experts=3, top_k=1, ffn=3, expert_bias=True, clamped_swiglu=ClampedSwiGLUConfig(alpha=1.7, limit=0.9)
        ),
    ],
    ids=["swiglu", "clamped, biased"],
)
def test_grouped_experts(moe: MoEConfig, count: list[int]) -> None:
    count_E, rows = np.array(count), sum(count)
    x, d_y = normal(0, rows, 4), normal(3, rows, 4)
    params = {"w13": normal(1, 3, 4, 6), "w2": normal(2, 3, 3, 4)}
    if moe.expert_bias:
        params |= {"w13_bias": normal(4, 3, 6), "w2_bias": normal(5, 3, 4)}
    d_x, grads = grouped_experts_vjp(d_y, x, count_E, params, moe)
    check_vjp(lambda a: grouped_experts(a["x"], count_E, a, moe), {"x": x, **params}, {"x": d_x, **grads}, d_y)
    assert not grads["w13"][count_E == 0].any()


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("tokens", [6, 1])
def test_router(name: str, tokens: int) -> None:
    moe = moe_config(**ROUTERS[name])
    x, w, noise = normal(0, tokens, 4), normal(1, 5, 4), 1.0 + 0.1 * normal(2, tokens, 4)
    d_weight, d_prob, d_logits = normal(3, tokens, 2), normal(4, tokens, 5), normal(5, tokens, 5)

    def scalar(a: Mapping[str, F64]) -> float:
        routing = route(a["x"], a["w"], moe, noise)
        parts = (routing.weight_TK * d_weight, routing.prob_TE * d_prob, routing.logits_TE * d_logits)
        return float(sum(part.sum() for part in parts))

    d_x, d_w = route_vjp(d_weight, d_prob, d_logits, x, w, moe, noise)
    check_vjp(scalar, {"x": x, "w": w}, {"x": d_x, "w": d_w}, 1.0)


def test_router_weights_by_hand() -> None:
    logits = np.log(np.array([[1.0, 2.0, 3.0, 4.0]]))
    expected = {
        "softmax_normalised": [4 / 7, 3 / 7],
        "softmax_raw": [0.4, 0.3],
        "softmax_scaled": [2.5 * 4 / 7, 2.5 * 3 / 7],
        "after_topk": [4 / 7, 3 / 7],
        "sigmoid_normalised": [0.8 / 1.55, 0.75 / 1.55],
        "sigmoid_raw": [0.4, 0.375],
        "forced": [1 / 3, 2 / 3],
    }
    for name, weight in expected.items():
        moe = moe_config(num_experts=4, **ROUTERS[name])
        routing = route(np.eye(1), logits.T, moe)
        np.testing.assert_allclose(routing.weight_TK, [weight], rtol=1e-12, err_msg=name)
        assert routing.expert_TK.tolist() == ([[0, 1]] if moe.force_balance else [[3, 2]]), name
        np.testing.assert_allclose(routing.prob_TE.sum(axis=1), 1.0, rtol=1e-12)


def test_router_ties_go_to_the_lower_expert() -> None:
    routing = route(np.ones((1, 1)), np.array([[1.0], [2.0], [2.0], [1.0], [2.0]]), moe_config(top_k=4))
    assert routing.expert_TK.tolist() == [[1, 2, 4, 0]]


def test_forced_balance_deals_assignments_in_turn() -> None:
    routing = route(normal(0, 5, 4), normal(1, 5, 4), moe_config(force_balance=True))
    assert routing.expert_TK.tolist() == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


@pytest.mark.parametrize("scope", ["sequence", "batch", "model"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balance_loss(scope: str, score: str) -> None:
    moe = moe_config(aux_loss_scope=scope, score=score)
    xs, w = {"0": normal(0, 6, 4), "1": normal(1, 6, 4)}, normal(2, 5, 4)

    def loss(inputs: Mapping[str, F64]) -> float:
        return balance_loss([route(x, w, moe) for x in inputs.values()], moe, batch=2)

    d_probs = balance_loss_vjp([route(x, w, moe) for x in xs.values()], moe, batch=2)
    zero_TK, zero_TE = np.zeros((6, 2)), np.zeros((6, 5))
    found = {name: route_vjp(zero_TK, d, zero_TE, xs[name], w, moe)[0] for name, d in zip(xs, d_probs, strict=True)}
    check_vjp(loss, xs, found, 1.0)


def _routing(prob: list[list[float]], expert: list[list[int]]) -> Routing:
    empty = np.zeros((0, 0))
    return Routing(logits_TE=empty, prob_TE=np.array(prob), expert_TK=np.array(expert), weight_TK=empty)


def test_balance_loss_by_hand() -> None:
    first = _routing([[0.75, 0.25], [0.25, 0.75]], [[0], [1]])
    second = _routing([[0.75, 0.25], [0.75, 0.25]], [[0], [0]])
    expected = {
        # each sequence is one token: 2 * its chosen probability; then the mean over sequences, the sum over layers
        "sequence": (2 * 0.75 + 2 * 0.75) / 2 + (2 * 0.75 + 2 * 0.75) / 2,
        "batch": 2 * (0.5 * 0.5 + 0.5 * 0.5) + 2 * (1.0 * 0.75),
        "model": 2 * (0.75 * 0.625 + 0.25 * 0.375),
    }
    for scope, value in expected.items():
        moe = moe_config(num_experts=2, top_k=1, aux_loss_scope=scope)
        assert balance_loss([first, second], moe, batch=2) == pytest.approx(value, rel=1e-12), scope


@pytest.mark.parametrize("tokens", [5, 1])
def test_z_loss(tokens: int) -> None:
    logits = normal(0, tokens, 4)
    check_vjp(lambda a: z_loss(a["z"]), {"z": logits}, {"z": z_loss_vjp(logits)}, 1.0)
    assert z_loss(np.zeros((tokens, 4))) == pytest.approx(np.log(4.0) ** 2)


EXPERT: I64 = np.array([[0, 1], [0, 2], [0, 1], [3, 0]])
WEIGHT: F64 = np.array([[0.5, 0.2], [0.9, 0.2], [0.5, 0.9], [0.1, 0.5]])


@pytest.mark.parametrize(
    ("options", "assignments", "counts", "dropped"),
    [
        ({}, [0, 2, 4, 7, 1, 5, 3, 6], [4, 2, 1, 1], 0),
        ({"capacity_factor": 1.0}, [0, 2, 1, 5, 3, 6], [2, 2, 1, 1], 2),
        ({"capacity_factor": 1.0, "drop_policy": "probability"}, [0, 2, 1, 5, 3, 6], [2, 2, 1, 1], 2),
        ({"capacity_factor": 0.5}, [0, 1, 3, 6], [1, 1, 1, 1], 4),
        ({"capacity_factor": 0.5, "drop_policy": "probability"}, [2, 5, 3, 6], [1, 1, 1, 1], 4),
        ({"capacity_factor": 9.0}, [0, 2, 4, 7, 1, 5, 3, 6], [4, 2, 1, 1], 0),
    ],
    ids=str,
)
def test_dispatch(options: dict[str, object], assignments: list[int], counts: list[int], dropped: int) -> None:
    plan = dispatch(EXPERT, WEIGHT, moe_config(num_experts=4, **options))
    assert plan.assignment_M.tolist() == assignments
    assert plan.count_E.tolist() == counts
    assert plan.dropped == dropped
    assert np.flatnonzero(plan.kept_N).tolist() == sorted(assignments)


def test_capacity_rounds_up() -> None:
    assert capacity(moe_config(capacity_factor=1.25), tokens=3) == 2
    assert capacity(moe_config(capacity_factor=0.01), tokens=1) == 1


MOE_LAYERS: dict[str, dict[str, object]] = {
    **ROUTERS,
    "shared": {"shared_ffn": 2},
    "capacity_by_position": {"capacity_factor": 0.75},
    "capacity_by_probability": {"capacity_factor": 0.75, "drop_policy": "probability"},
    "one_expert": {"num_experts": 1, "top_k": 1},
    "all_experts": {"num_experts": 2, "top_k": 2},
}


def moe_params(moe: MoEConfig, hidden: int) -> dict[str, F64]:
    """Random weights of one layer, with the parameter names of the package."""
    shapes = {
        "router.weight": (moe.num_experts, hidden),
        "experts.w13": (moe.num_experts, hidden, 2 * moe.ffn),
        "experts.w2": (moe.num_experts, moe.ffn, hidden),
    }
    if moe.shared_ffn:
        shapes |= {"shared.w13.weight": (2 * moe.shared_ffn, hidden), "shared.w2.weight": (hidden, moe.shared_ffn)}
    return {name: normal(10 + i, *shape) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("name", MOE_LAYERS)
@pytest.mark.parametrize("tokens", [6, 1])
def test_moe_layer(name: str, tokens: int) -> None:
    moe = moe_config(**MOE_LAYERS[name])
    x, params, noise = normal(0, tokens, 4), moe_params(moe, 4), 1.0 + 0.1 * normal(1, tokens, 4)
    d_y, d_prob, d_logits = normal(2, tokens, 4), normal(3, tokens, moe.num_experts), normal(4, tokens, moe.num_experts)

    def scalar(a: Mapping[str, F64]) -> float:
        out = moe_layer(a["x"], {n: w for n, w in a.items() if n != "x"}, moe, noise)
        return float(
            (out.y_TD * d_y).sum() + (out.routing.prob_TE * d_prob).sum() + (out.routing.logits_TE * d_logits).sum()
        )

    d_x, grads = moe_layer_vjp(d_y, d_prob, d_logits, x, params, moe, noise)
    assert grads.keys() == params.keys()
    check_vjp(scalar, {"x": x, **params}, {"x": d_x, **grads}, 1.0)


def test_moe_layer_with_every_token_on_one_expert() -> None:
    moe = moe_config(top_k=1, normalize_topk=False)
    params = moe_params(moe, 4)
    x = np.abs(normal(0, 6, 4))
    params["router.weight"][3] = 9.0
    out = moe_layer(x, params, moe)
    assert out.dispatch.count_E.tolist() == [0, 0, 0, 6, 0]
    d_y, zeros = normal(1, 6, 4), np.zeros((6, 5))
    d_x, grads = moe_layer_vjp(d_y, zeros, zeros, x, params, moe)
    check_vjp(lambda a: moe_layer(a["x"], {**params}, moe).y_TD, {"x": x}, {"x": d_x}, d_y)
    assert not grads["experts.w13"][[0, 1, 2, 4]].any()


def test_moe_layer_drops_add_nothing_and_leave_the_other_weights_alone() -> None:
    free, tight = moe_config(), moe_config(capacity_factor=0.5)
    params, x = moe_params(free, 4), normal(0, 6, 4)
    whole, cut = moe_layer(x, params, free), moe_layer(x, params, tight)
    assert cut.dispatch.dropped > 0
    for t in range(6):
        expected = np.zeros(4)
        for k in range(2):
            if cut.dispatch.kept_N[t * 2 + k]:
                e = whole.routing.expert_TK[t, k]
                expert = swiglu(x[t : t + 1], params["experts.w13"][e].T, params["experts.w2"][e].T)[0]
                expected += whole.routing.weight_TK[t, k] * expert
        np.testing.assert_allclose(cut.y_TD[t], expected, rtol=1e-12, atol=1e-14)
