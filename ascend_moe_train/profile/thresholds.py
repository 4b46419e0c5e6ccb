"""What counts as good: named metrics with defaults that users replace. Pure.

The defaults of `computing`, `exposed_comm` and `cache_hit` are a guide's "kernel utilisation > 85 %", "HCCL < 15 % of
the step" and "cache hit > 90 %", each with the definition that holds: see docs/profile.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_moe_train.profile.metrics import Figure


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """The metric must be at least, or at most, this share on every rank."""

    metric: str
    share: float
    at_least: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The worst rank against a threshold; `passed` is None where nothing was collected."""

    metric: str
    share: float
    at_least: bool
    passed: bool | None
    worst_rank: int | None
    worst: float | None
    missing: str

    @property
    def words(self) -> str:
        """One line."""
        bound = f"{'>=' if self.at_least else '<='} {self.share * 100:g} %"
        if self.passed is None or self.worst is None:
            return f"{self.metric} {bound}: {self.missing}"
        result = "passed" if self.passed else "failed"
        return f"{self.metric} {bound}: {result}, worst {self.worst * 100:.1f} % on rank {self.worst_rank}"


# metric -> whether it must be at least so much
METRICS: Mapping[str, bool] = {
    "computing": True,
    "exposed_comm": False,
    "cache_hit": True,
    "free": False,
    "p2p_exposed": False,
    "host_bound": False,
    "cube_utilisation": True,
    "memory_bound": False,
}
DEFAULTS = (
    Threshold(metric="computing", share=0.85, at_least=True),
    Threshold(metric="exposed_comm", share=0.15, at_least=False),
    Threshold(metric="cache_hit", share=0.90, at_least=True),
)


def judged(figures: Sequence[Figure], thresholds: Sequence[Threshold]) -> list[Verdict]:
    """Each threshold against the worst rank that has the figure."""
    found = []
    for each in thresholds:
        of_metric = [figure for figure in figures if figure.name == each.metric]
        known = [(figure.value, figure.rank) for figure in of_metric if figure.value is not None]
        worst = (min if each.at_least else max)(known, key=lambda pair: pair[0]) if known else None
        passed = None
        if worst is not None:
            passed = worst[0] >= each.share if each.at_least else worst[0] <= each.share
        found.append(
            Verdict(
                metric=each.metric,
                share=each.share,
                at_least=each.at_least,
                passed=passed,
                worst_rank=worst[1] if worst else None,
                worst=worst[0] if worst else None,
                missing="" if worst else next((figure.missing for figure in of_metric), "not collected"),
            )
        )
    return found
