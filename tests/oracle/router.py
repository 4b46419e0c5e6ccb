"""Top-k router with its balance and z losses.

T tokens, D hidden, E experts, K top-k, L MoE layers, R groups of tokens over which a balance loss is taken.
Sources: Switch Transformer (Fedus et al., 2021), section 2.2, for the balance loss; ST-MoE (Zoph et al., 2022),
section 3, for the z-loss; DeepSeek-V2 (2024), section 2.1.2, for groups; DeepSeek-V3 (2024), equations 12-20, for
sigmoid scores and biases.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_moe_train.model.config import MoEConfig
from tests.oracle.arrays import F64, I64, Flags, in_float64, logsumexp, softmax, softmax_vjp
from tests.oracle.ffn import sigmoid


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where each token goes: slot k of token t is assignment n = t*K + k."""

    logits_TE: F64
    prob_TE: F64
    """Sums to 1 over E; what the balance loss averages. Sigmoid scores are divided by their sum for it."""
    expert_TK: I64
    weight_TK: F64
    """What multiplies the expert's output: normalised or not, times `routed_scale`."""


@in_float64
def route(x_TD: F64, weight_ED: F64, moe: MoEConfig, noise_TD: F64 | None = None, bias_E: F64 | None = None) -> Routing:
    """Score every expert for every token and pick K.

    `noise_TD` is the jitter: it multiplies what the router sees, not what the experts see. `bias_E` is added to scores
    for the choice, not for the gate weights.
    """
    logits_TE = (x_TD if noise_TD is None else x_TD * noise_TD) @ weight_ED.T
    score_TE = _score(logits_TE, moe)
    expert_TK = _choose(logits_TE, moe, bias_E)
    return Routing(
        logits_TE=logits_TE,
        prob_TE=score_TE / score_TE.sum(axis=1, keepdims=True),
        expert_TK=expert_TK,
        weight_TK=_gate_weight(logits_TE, expert_TK, moe) * moe.routed_scale,
    )


@in_float64
def route_vjp(
    d_weight_TK: F64,
    d_prob_TE: F64,
    d_logits_TE: F64,
    x_TD: F64,
    weight_ED: F64,
    moe: MoEConfig,
    noise_TD: F64 | None = None,
    bias_E: F64 | None = None,
) -> tuple[F64, F64]:
    """Return (d_x_TD, d_weight_ED) from the gradients of the gate weights, prob_TE and logits_TE.

    Those of prob_TE and logits_TE come from the balance loss and the z-loss. The choice of experts is piecewise
    constant, so no gradient flows through it.
    """
    routing = route(x_TD, weight_ED, moe, noise_TD, bias_E)
    d_logits = (
        d_logits_TE
        + _prob_vjp(d_prob_TE, routing.logits_TE, moe)
        + _gate_weight_vjp(d_weight_TK * moe.routed_scale, routing.logits_TE, routing.expert_TK, moe)
    )
    noise = 1.0 if noise_TD is None else noise_TD
    return (d_logits @ weight_ED) * noise, d_logits.T @ (x_TD * noise)


def _choose(logits_TE: F64, moe: MoEConfig, bias_E: F64 | None) -> I64:
    if moe.force_balance:
        return forced_balance(len(logits_TE), moe.num_experts, moe.top_k)
    if bias_E is None and moe.num_groups == 1:
        return top_k(logits_TE, moe.top_k)
    score_TE = logits_TE if moe.score_order == "after_topk" else _score(logits_TE, moe)
    score_TE = score_TE if bias_E is None else score_TE + bias_E
    return top_k(np.where(_in_top_groups(score_TE, moe), score_TE, -np.inf), moe.top_k)


def _in_top_groups(score_TE: F64, moe: MoEConfig) -> Flags:
    """Whether an expert's group is among the token's `top_groups`, by its best expert or the sum of its two best."""
    by_group_TNE = score_TE.reshape(len(score_TE), moe.num_groups, -1)
    best = {"best": 1, "best_two": 2}[moe.groups_by]
    group_score_TN = -np.sort(-by_group_TNE, axis=2)[:, :, :best].sum(axis=2)
    in_top_TN = np.zeros(group_score_TN.shape, dtype=np.bool_)
    np.put_along_axis(in_top_TN, top_k(group_score_TN, moe.top_groups), True, axis=1)
    return np.repeat(in_top_TN, by_group_TNE.shape[2], axis=1)


def top_k(logits_TE: F64, k: int) -> I64:
    """Return expert_TK by falling logit, equal logits by rising expert number. A score rises with its logit."""
    return np.argsort(-logits_TE, axis=1, kind="stable")[:, :k]


def forced_balance(tokens: int, experts: int, k: int) -> I64:
    """Return expert_TK that deals assignment n to expert n mod E, whatever the scores: for benchmarks."""
    return np.arange(tokens * k, dtype=np.int64).reshape(tokens, k) % experts


def _score(logits_TE: F64, moe: MoEConfig) -> F64:
    return softmax(logits_TE) if moe.score == "softmax" else sigmoid(logits_TE)


def _gate_weight(logits_TE: F64, expert_TK: I64, moe: MoEConfig) -> F64:
    if moe.score_order == "after_topk":
        return softmax(np.take_along_axis(logits_TE, expert_TK, axis=1))
    chosen_TK = np.take_along_axis(_score(logits_TE, moe), expert_TK, axis=1)
    return chosen_TK / chosen_TK.sum(axis=1, keepdims=True) if moe.normalize_topk else chosen_TK


def _gate_weight_vjp(d_weight_TK: F64, logits_TE: F64, expert_TK: I64, moe: MoEConfig) -> F64:
    weight_TK = _gate_weight(logits_TE, expert_TK, moe)
    if moe.score_order == "after_topk":
        return _scatter(softmax_vjp(d_weight_TK, weight_TK), expert_TK, logits_TE.shape)
    score_TE = _score(logits_TE, moe)
    d_chosen_TK = d_weight_TK
    if moe.normalize_topk:
        sum_T1 = np.take_along_axis(score_TE, expert_TK, axis=1).sum(axis=1, keepdims=True)
        d_chosen_TK = _normalise_vjp(d_weight_TK, weight_TK, sum_T1)
    return _score_vjp(_scatter(d_chosen_TK, expert_TK, logits_TE.shape), score_TE, moe)


def _prob_vjp(d_prob_TE: F64, logits_TE: F64, moe: MoEConfig) -> F64:
    score_TE = _score(logits_TE, moe)
    sum_T1 = score_TE.sum(axis=1, keepdims=True)
    return _score_vjp(_normalise_vjp(d_prob_TE, score_TE / sum_T1, sum_T1), score_TE, moe)


def _score_vjp(d_score_TE: F64, score_TE: F64, moe: MoEConfig) -> F64:
    if moe.score == "softmax":
        return softmax_vjp(d_score_TE, score_TE)
    return d_score_TE * score_TE * (1.0 - score_TE)


def _normalise_vjp(d_y: F64, y: F64, total: F64) -> F64:
    """Gradient of y = x / sum(x) over the last axis, with total = sum(x): (d_y - sum(d_y * y)) / total."""
    d_x: F64 = (d_y - (d_y * y).sum(axis=-1, keepdims=True)) / total
    return d_x


def _scatter(d_chosen_TK: F64, expert_TK: I64, shape: tuple[int, ...]) -> F64:
    d_TE = np.zeros(shape)
    np.put_along_axis(d_TE, expert_TK, d_chosen_TK, axis=1)
    return d_TE


def balance_loss(routings: Sequence[Routing], moe: MoEConfig, batch: int) -> float:
    """Return E * sum_e f_e P_e, taken per group of tokens: 1.0 when balanced.

    f_e is the share of the group's assignments that chose expert e (before any drop), P_e its mean probability.
    `routings` are the MoE layers, `batch` the number of equal sequences in T. Scope `sequence`: mean over sequences,
    sum over layers. `batch`: sum over layers. `model`: the tokens of all layers are one group.
    """
    prob_RTE, share_RE, weight = _groups(routings, moe, batch)
    return float(weight * moe.num_experts * (share_RE * prob_RTE.mean(axis=1)).sum())


def balance_loss_vjp(routings: Sequence[Routing], moe: MoEConfig, batch: int) -> list[F64]:
    """Return d_prob_TE of each layer for d_loss = 1; f counts assignments, so it has no gradient."""
    prob_RTE, share_RE, weight = _groups(routings, moe, batch)
    d_prob_RE = weight * moe.num_experts * share_RE / prob_RTE.shape[1]
    d_prob_LTE = np.broadcast_to(d_prob_RE[:, None, :], prob_RTE.shape).reshape(len(routings), -1, moe.num_experts)
    return list(d_prob_LTE)


def _groups(routings: Sequence[Routing], moe: MoEConfig, batch: int) -> tuple[F64, F64, float]:
    """Return (probabilities by group, assignment share by group, weight of each group's loss)."""
    groups, weight = {
        "sequence": (len(routings) * batch, 1.0 / batch),
        "batch": (len(routings), 1.0),
        "model": (1, 1.0),
    }[moe.aux_loss_scope]
    prob_RTE = np.stack([routing.prob_TE for routing in routings]).reshape(groups, -1, moe.num_experts)
    expert_RN = np.stack([routing.expert_TK for routing in routings]).reshape(groups, -1)
    share_RE = np.stack([np.bincount(row, minlength=moe.num_experts) / row.size for row in expert_RN])
    return prob_RTE, share_RE, weight


@in_float64
def z_loss(logits_TE: F64) -> float:
    """Mean over tokens of logsumexp(logits)^2."""
    return float((logsumexp(logits_TE) ** 2).mean())


@in_float64
def z_loss_vjp(logits_TE: F64) -> F64:
    """Return d_logits_TE for d_loss = 1: 2 logsumexp softmax / T."""
    d_logits_TE: F64 = 2.0 * logsumexp(logits_TE)[:, None] * softmax(logits_TE) / len(logits_TE)
    return d_logits_TE
