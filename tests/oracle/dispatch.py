"""Which assignments reach their expert, and the order in which the experts see them.

T tokens, K top-k, E experts, C capacity, N = T*K assignments (n = t*K + k), M assignments kept.
"""

import math
from dataclasses import dataclass

import numpy as np

from ascend_moe_train.model.config import MoEConfig
from tests.oracle.arrays import F64, I64, Flags, in_float64


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Rows of the grouped expert computation: kept assignments sorted by expert, then by assignment number."""

    assignment_M: I64
    count_E: I64
    """Kept per expert; sums to M."""
    dropped: int
    """N - M."""

    @property
    def kept_N(self) -> Flags:
        """Whether assignment n reached its expert."""
        kept = np.zeros(len(self.assignment_M) + self.dropped, dtype=np.bool_)
        kept[self.assignment_M] = True
        return kept


@in_float64
def dispatch(expert_TK: I64, weight_TK: F64, moe: MoEConfig, admitted_N: Flags | None = None) -> Dispatch:
    """Keep every assignment (no capacity factor), or at most C for each expert; of those admitted, if that is given.

    Drop policy `position` keeps the first C in order of n, `probability` the C with the largest gate weight, equal
    weights in order of n. A dropped assignment adds nothing to its token's output, and the weights of the token's
    other assignments stay as they were.
    """
    expert_N = expert_TK.reshape(-1)
    by_probability = moe.drop_policy == "probability"
    priority_N = np.argsort(-weight_TK.reshape(-1), kind="stable") if by_probability else np.arange(expert_N.size)
    limit = expert_N.size if moe.capacity_factor is None else capacity(moe, expert_TK.shape[0])
    count_E = np.zeros(moe.num_experts, dtype=np.int64)
    kept: list[int] = []
    for n in priority_N:
        if count_E[expert_N[n]] < limit and (admitted_N is None or admitted_N[n]):
            count_E[expert_N[n]] += 1
            kept.append(int(n))
    return Dispatch(
        assignment_M=np.array(sorted(kept, key=lambda n: (expert_N[n], n)), dtype=np.int64),
        count_E=count_E,
        dropped=expert_N.size - len(kept),
    )


def capacity(moe: MoEConfig, tokens: int) -> int:
    """C = ceil(capacity_factor * T * K / E)."""
    if moe.capacity_factor is None:
        raise ValueError("dropless: there is no capacity")
    return math.ceil(moe.capacity_factor * tokens * moe.top_k / moe.num_experts)
