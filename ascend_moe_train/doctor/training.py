"""Faults of training that figures of steps show: values that are not finite, experts that die, drifts. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from ascend_moe_train.doctor.event import Actor, Event, Place
from ascend_moe_train.doctor.hypothesis import Hypothesis, inferred
from ascend_moe_train.doctor.rule import RuleBook
from ascend_moe_train.doctor.series import Row, Series
from ascend_moe_train.units import format_bytes, format_seconds

WINDOW = 20  # steps that are looked at together
ENOUGH = 60  # steps that a drift takes
ROUTED = 100  # before that a router has not learned to balance, which is no fault
STORM_SHARE = 0.5
JUMP_NATS = 1.0
RISE_NATS, RISE_SHARE = 0.3, 1.15
NORM_TIMES = 10.0
UNEVEN_CV = 1.5
DROP_SHARE = 0.25  # with a capacity factor of 1, a tenth or two is what runs that go well drop
SLOWER, LARGER = 1.3, 1.3
STUCK = 1e-6
APART = 1e-3
NAN_LEVEL, STORM_LEVEL, SUSPECT_LEVEL, APART_LEVEL = 68, 64, 46, 58

Check = Callable[[Series, RuleBook], list[Hypothesis]]


def training(series: Sequence[Series], book: RuleBook) -> list[Hypothesis]:
    """What the figures of all sources show."""
    checks: tuple[Check, ...] = (_storm, _jump, _rise, _norm, _experts, _stuck, _drops, _slower, _larger)
    found = [each for one in series for check in checks for each in check(one, book)]
    return [*_not_finite(series, book), *found, *_apart(series, book)]


def _event(series: Series, row: Row, book: RuleBook, code: str, *names: str) -> list[Event]:
    """The step as a line to quote."""
    rules = book.by_code.get(f"@{code}", ())
    shown = ", ".join(f"{name} {row.figures[name]:.6g}" for name in names if name in row.figures)
    actor = Actor(part="rank", rank=series.rank) if series.rank is not None else Actor()
    place = Place(source=series.source, line=row.line)
    return [Event(rule=rule, actor=actor, place=place, text=f"step {row.step}: {shown}", moment=None) for rule in rules]


def _told(
    series: Series, row: Row, book: RuleBook, code: str, level: int, names: Sequence[str], **values: str
) -> list[Hypothesis]:
    events = _event(series, row, book, code, *names)
    filled = {"step": str(row.step), **values}
    ranks = () if series.rank is None else (series.rank,)
    return inferred(book, code, level, events, ranks=ranks, values=filled)


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row.figures[name] for row in rows if name in row.figures and math.isfinite(row.figures[name])]


def _not_finite(series: Sequence[Series], book: RuleBook) -> list[Hypothesis]:
    """The first step of all at which a loss is not finite, or a norm where nothing is scaled, and the rank that it is
    on, unless it comes to several at once; at the end of a run it is what ended it."""
    lost = [(each, row, name) for each in series if (found := _first_lost(each)) is not None for row, name in [found]]
    if not lost:
        return []
    first = min(row.step for _, row, _ in lost)
    began = [each for each in lost if each[1].step == first]
    one, row, name = began[0]
    scale = row.figures.get("loss_scale", math.nan)
    where = f" (loss scale {scale:g})" if math.isfinite(scale) else ""
    is_last = any(_is_lost(each, name) for each in one.rows[-3:])
    level = NAN_LEVEL if is_last else SUSPECT_LEVEL
    told = _told(one, row, book, "nan-began", level, ["loss", "grad_norm", "lr"], name=name, where=where)
    return told if len(began) == 1 else [replace(each, ranks=()) for each in told]


def _first_lost(series: Series) -> tuple[Row, str] | None:
    for row in series.rows:
        name = next((name for name in ("loss", "grad_norm") if _is_lost(row, name)), None)
        if name is not None:
            return row, name
    return None


def _is_lost(row: Row, name: str) -> bool:
    value = row.figures.get(name)
    scaled = math.isfinite(row.figures.get("loss_scale", math.nan))
    return value is not None and not math.isfinite(value) and (name == "loss" or not scaled)


def _storm(series: Series, book: RuleBook) -> list[Hypothesis]:
    last = series.rows[-WINDOW:]
    skipped = [row for row in last if row.figures.get("skipped", 0.0) > 0]
    if len(last) < WINDOW or len(skipped) < STORM_SHARE * len(last):
        return []
    scale = f"{last[-1].figures.get('loss_scale', math.nan):g}"
    values = {"count": str(len(skipped)), "window": str(len(last)), "scale": scale}
    return _told(series, last[-1], book, "overflow-steps", STORM_LEVEL, ["loss", "loss_scale"], **values)


def _jump(series: Series, book: RuleBook) -> list[Hypothesis]:
    """A jump of the loss that did not pass, with what the learning rate was."""
    rows = [row for row in series.rows if math.isfinite(row.figures.get("loss", math.nan))]
    for index in range(WINDOW, len(rows)):
        before = median(_values(rows[index - WINDOW : index], "loss"))
        row = rows[index]
        after = rows[index : index + WINDOW]
        if row.figures["loss"] - before > JUMP_NATS and min(_values(after, "loss")) - before > JUMP_NATS / 2:
            lr = row.figures.get("lr", math.nan)
            where = f" (learning rate {lr:g})" if math.isfinite(lr) else ""
            values = {"before": f"{before:.3f}", "after": f"{row.figures['loss']:.3f}", "where": where}
            return _told(series, row, book, "spike", SUSPECT_LEVEL + 1, ["loss", "grad_norm", "lr"], **values)
    return []


def _rise(series: Series, book: RuleBook) -> list[Hypothesis]:
    values = _values(series.rows, "loss")
    if len(values) < ENOUGH:
        return []
    best = min(median(values[i : i + WINDOW]) for i in range(0, len(values) - WINDOW, WINDOW))
    last = median(values[-WINDOW:])
    if last - best < RISE_NATS or last < RISE_SHARE * best:
        return []
    shown = {"before": f"{best:.3f}", "after": f"{last:.3f}", "window": str(len(values))}
    return _told(series, series.rows[-1], book, "diverged", SUSPECT_LEVEL + 1, ["loss", "lr"], **shown)


def _norm(series: Series, book: RuleBook) -> list[Hypothesis]:
    return _grown(series, book, "norm-drift", "grad_norm", NORM_TIMES, lambda value: f"{value:.3g}")


def _slower(series: Series, book: RuleBook) -> list[Hypothesis]:
    return _grown(series, book, "slow-drift", "step_s", SLOWER, format_seconds)


def _larger(series: Series, book: RuleBook) -> list[Hypothesis]:
    return _grown(series, book, "memory-creep", "memory_bytes", LARGER, lambda value: format_bytes(round(value)))


def _grown(
    series: Series, book: RuleBook, code: str, name: str, times: float, shown: Callable[[float], str]
) -> list[Hypothesis]:
    """A figure whose quarters grow from one to the next, the first steps left out, by so many times in all."""
    values = _values(series.rows[5:], name)
    if len(values) < ENOUGH:
        return []
    quarter = len(values) // 4
    parts = [median(values[i * quarter : (i + 1) * quarter]) for i in range(4)]
    last = median(values[-WINDOW:])
    if parts[0] <= 0 or last < times * parts[0] or not parts[0] < parts[1] < parts[2] < parts[3]:
        return []
    values_shown = {"before": shown(parts[0]), "after": shown(last)}
    return _told(series, series.rows[-1], book, code, SUSPECT_LEVEL - 4, [name], **values_shown)


def _experts(series: Series, book: RuleBook) -> list[Hypothesis]:
    """Experts that got nothing in most of the last steps; else a load that is far from even."""
    last = series.rows[-WINDOW:]
    if len(series.rows) < ROUTED:
        return []
    names = sorted({name for row in last for name in row.figures if name.startswith(("dead_experts.", "load_cv."))})
    for name in names:
        values = _values(last, name)
        layer = name.partition(".")[2]
        if name.startswith("dead") and values and median(values) >= 1:
            return _told(series, last[-1], book, "dead-experts", 46, [name], count=f"{median(values):g}", layer=layer)
    for name in names:
        values = _values(last, name)
        if name.startswith("load_cv") and values and median(values) > UNEVEN_CV:
            layer = name.partition(".")[2]
            return _told(series, last[-1], book, "unbalanced", 44, [name], cv=f"{median(values):.2f}", layer=layer)
    return []


def _stuck(series: Series, book: RuleBook) -> list[Hypothesis]:
    values = _values(series.rows[-ENOUGH:], "aux_loss")
    if len(values) < ENOUGH or not values[0] or max(values) - min(values) > STUCK * abs(values[0]):
        return []
    shown = {"value": f"{values[-1]:g}", "window": str(len(values))}
    return _told(series, series.rows[-1], book, "aux-stuck", SUSPECT_LEVEL - 6, ["aux_loss"], **shown)


def _drops(series: Series, book: RuleBook) -> list[Hypothesis]:
    values = _values(series.rows[-WINDOW:], "drop_rate")
    if len(series.rows) < ROUTED or len(values) < WINDOW or median(values) < DROP_SHARE:
        return []
    share = f"{median(values):.0%}"
    return _told(series, series.rows[-1], book, "drops", SUSPECT_LEVEL, ["drop_rate"], share=share)


def _apart(series: Sequence[Series], book: RuleBook) -> list[Hypothesis]:
    """The first step at which ranks print another value of what is the same on all: the norm of all gradients."""
    own = [each for each in series if each.rank is not None]
    by_step: dict[int, dict[int, tuple[Series, Row]]] = {}
    for each in own:
        for row in each.rows:
            if each.rank is not None and math.isfinite(row.figures.get("grad_norm", math.nan)):
                by_step.setdefault(row.step, {})[each.rank] = (each, row)
    for _, rows in sorted(by_step.items()):
        if len(rows) < 3 or (odd := _odd_one(rows)) is None:
            continue
        one, row = rows[odd]
        others = median(row.figures["grad_norm"] for rank, (_, row) in rows.items() if rank != odd)
        values = {"name": "the gradient norm", "own": f"{row.figures['grad_norm']:.6g}", "others": f"{others:.6g}"}
        return _told(one, row, book, "desync", APART_LEVEL, ["grad_norm", "loss"], **values)
    return []


def _odd_one(rows: Mapping[int, tuple[Series, Row]]) -> int | None:
    """The single rank that is apart while all others agree."""
    values = {rank: row.figures["grad_norm"] for rank, (_, row) in rows.items()}
    middle = median(values.values())
    odd = [rank for rank, value in values.items() if abs(value - middle) > APART * abs(middle)]
    return odd[0] if len(odd) == 1 else None
