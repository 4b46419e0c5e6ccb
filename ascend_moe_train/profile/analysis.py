"""A capture with everything that is said of it. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ascend_moe_train.profile.across import (
    KindCost,
    LinkClass,
    PathPart,
    Stage,
    Straggler,
    critical_path,
    kind_costs,
    kind_of_collective,
    link_classes,
    stages_of,
    stragglers,
)
from ascend_moe_train.profile.advice import Advice, Evidence, advise
from ascend_moe_train.profile.layout import Known, Layout, layout_of
from ascend_moe_train.profile.load import Capture
from ascend_moe_train.profile.matched import Matching, match
from ascend_moe_train.profile.metrics import Figure, figures
from ascend_moe_train.profile.operators import Operator, top_shapes, top_types
from ascend_moe_train.profile.tables import Rank
from ascend_moe_train.profile.thresholds import DEFAULTS, Threshold, Verdict, judged

MAX_PAIRS = 40


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What the screen, the page and the JSON are made from."""

    capture: Capture
    layout: Layout
    matching: Matching
    figures: tuple[Figure, ...]
    verdicts: tuple[Verdict, ...]
    stages: tuple[Stage, ...]
    stragglers: tuple[Straggler, ...]
    kinds: tuple[KindCost, ...]
    links: tuple[LinkClass, ...]
    path: tuple[PathPart, ...]
    path_start_ns: int
    types: tuple[Operator, ...]
    shapes: tuple[Operator, ...]
    advice: tuple[Advice, ...]
    warnings: tuple[str, ...]

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """In the order of their numbers."""
        return self.capture.ranks

    def kind_times_ms(self, rank: Rank) -> dict[str, float]:
        """Time of a rank's collectives by kind of group, a step."""
        found: dict[str, float] = {}
        for each in rank.collectives:
            kind = kind_of_collective(each, self.layout)
            found[kind] = found.get(kind, 0.0) + each.elapse_ms / rank.num_steps
        return found

    @property
    def without_advice(self) -> str:
        """Why there is no advice, where there is none."""
        if not any(rank.steps for rank in self.ranks):
            return "How long a step lasts was not collected: what a change would gain is not known."
        return "Nothing that would gain 1 % of the step."

    def value(self, name: str, rank: int) -> float | None:
        """A figure of a rank."""
        return next((each.value for each in self.figures if each.name == name and each.rank == rank), None)


def analyse(capture: Capture, thresholds: Sequence[Threshold] = DEFAULTS, known: Known | None = None) -> Analysis:
    """All figures of a capture, what ranks say together, and what to do. `known` is what a run file says."""
    ranks = capture.ranks
    layout = layout_of(ranks, known)
    matching = match(ranks, layout.stages)
    all_figures = tuple(each for rank in ranks for each in figures(rank))
    found_stages = tuple(stages_of(ranks, layout, matching))
    late = tuple(stragglers(ranks, layout, matching))
    kinds = tuple(kind_costs(ranks, layout, matching))
    path_start_ns, path = critical_path(ranks, matching)
    evidence = Evidence(
        ranks=ranks, figures=all_figures, layout=layout, stages=found_stages, stragglers=late, kinds=kinds
    )
    return Analysis(
        capture=capture,
        layout=layout,
        matching=matching,
        figures=all_figures,
        verdicts=tuple(judged(all_figures, thresholds)),
        stages=found_stages,
        stragglers=late,
        kinds=kinds,
        links=tuple(link_classes(ranks)),
        path=tuple(path),
        path_start_ns=path_start_ns,
        types=tuple(top_types(ranks)),
        shapes=tuple(top_shapes(ranks)),
        advice=tuple(advise(evidence)),
        warnings=tuple(_warnings(ranks, matching)),
    )


def _warnings(ranks: Sequence[Rank], matching: Matching) -> list[str]:
    found = [f"rank {rank.rank}: {words}" for rank in ranks for words in rank.warnings]
    if matching.drifted:
        found.append(
            f"{len(matching.drifted)} groups have other numbers of collectives on some ranks: not compared over ranks"
        )
    apart = max((abs(each) for each in matching.offsets_ns.values()), default=0)
    if apart:
        found.append(f"clocks of ranks are up to {apart / 1e6:.2f} ms apart: aligned at the ends of shared collectives")
    if max((rank.num_steps for rank in ranks), default=1) == 1 and any(rank.steps for rank in ranks):
        found.append("one step was profiled: how much steps differ is not known")
    return found


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Everything, as plain values; shares are fractions, times in the units of their names."""
    return {
        "folder": analysis.capture.folder,
        "ranks": [_rank(rank) for rank in analysis.ranks],
        "layout": {
            "stages": {str(rank): stage for rank, stage in sorted(analysis.layout.stages.items())},
            "sizes": dict(analysis.layout.sizes),
            "source": analysis.layout.source,
        },
        "figures": [asdict(each) for each in analysis.figures],
        "verdicts": [asdict(each) for each in analysis.verdicts],
        "stages": [asdict(each) for each in analysis.stages],
        "stragglers": [asdict(each) for each in analysis.stragglers],
        "waits_ms": {str(rank): wait for rank, wait in sorted(analysis.matching.waits_ms().items())},
        "times_last_to_start": {str(rank): n for rank, n in sorted(analysis.matching.times_last().items())},
        "collectives": [asdict(each) for each in analysis.kinds],
        "longest_waits": [
            {
                "step": each.step,
                "name": each.name,
                "spread_ms": each.spread_ms,
                "last": each.last,
                "elapse_ms": {str(rank): one.elapse_ms for rank, one in sorted(each.by_rank.items())},
            }
            for each in sorted(analysis.matching.shared, key=lambda each: -each.spread_ms)[:MAX_PAIRS]
        ],
        "links": [asdict(each) for each in analysis.links],
        "critical_path": [asdict(each) for each in analysis.path],
        "operators": [asdict(each) for each in analysis.types],
        "operators_by_shape": [asdict(each) for each in analysis.shapes],
        "advice": [asdict(each) for each in analysis.advice],
        "warnings": list(analysis.warnings),
    }


def _rank(rank: Rank) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "writer": rank.writer,
        "folder": rank.folder,
        "level": rank.level,
        "metrics": rank.metrics,
        "versions": dict(rank.versions),
        "steps": [
            {**asdict(each), "e2e_us": each.e2e_us, "communication_us": each.communication_us} for each in rank.steps
        ],
        "iterations_us": list(rank.iterations_us),
        "memory": [
            {**asdict(each), "curve": []} | {"curve": [list(point) for point in each.curve]} for each in rank.memory
        ],
        "owners_at_peak": [asdict(each) for each in rank.owners],
        "caches": [asdict(each) for each in rank.caches],
        "written": dict(rank.written),
        "sources": dict(rank.sources),
    }
