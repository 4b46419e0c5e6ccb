"""The page of a capture: one HTML file with tables and drawings, which loads nothing and needs no script. Pure."""

import html
from collections.abc import Iterator, Sequence

from ascend_moe_train.html_page import asset, filled, policy_hash
from ascend_moe_train.profile.analysis import Analysis
from ascend_moe_train.profile.draw import MAX_ROWS, heat, memory_curves, step_bars, timeline
from ascend_moe_train.profile.numbers import counted, format_count
from ascend_moe_train.profile.operators import Operator
from ascend_moe_train.profile.tables import Owner
from ascend_moe_train.profile.terms import Prediction
from ascend_moe_train.units import UNKNOWN, format_share

MAX_CURVES = 4


def page(analysis: Analysis, prediction: Prediction | None = None) -> str:
    """The page as text. All strings may hold anything: they are escaped here."""
    style = asset("ascend_moe_train", "page.css") + asset(__package__, "profile.css")
    parts = {
        "title": html.escape(analysis.capture.folder),
        "status": html.escape(_status(analysis)),
        "tiles": _tiles(analysis),
        "sections": "\n".join(filter(None, _sections(analysis, prediction))),
        "style": style,
        "style_hash": policy_hash(style),
    }
    return filled(asset(__package__, "profile.html"), parts)


def _status(analysis: Analysis) -> str:
    ranks = analysis.ranks
    writers = ", ".join(sorted({rank.writer for rank in ranks}))
    steps = max(len(rank.steps) for rank in ranks)
    return f"{counted(len(ranks), 'rank')}, {counted(steps, 'step')}, {writers}; {'; '.join(analysis.warnings[:3])}"


def _tiles(analysis: Analysis) -> str:
    known = [rank.e2e_us / 1e3 for rank in analysis.ranks if rank.steps]
    tiles = [("Step", f"{max(known):.1f} ms" if known else UNKNOWN, "longest rank, mean over steps", "")]
    for each in analysis.verdicts:
        mark = "" if each.passed is None else "good" if each.passed else "bad"
        bound = f"{'at least' if each.at_least else 'at most'} {each.share * 100:g} %"
        note = bound if each.worst_rank is None else f"{bound}; worst, rank {each.worst_rank}"
        tiles.append((each.metric.replace("_", " "), format_share(each.worst), note, mark))
    return "".join(
        f'<div class="{mark}"><dt>{html.escape(name)}</dt><dd class="value">{html.escape(value)}</dd>'
        f'<dd class="note">{html.escape(note)}</dd></div>'
        for name, value, note, mark in tiles
    )


def _sections(analysis: Analysis, prediction: Prediction | None) -> Iterator[str]:
    ranks = analysis.ranks
    yield card("What to do, by estimated gain", _advice(analysis))
    if prediction is not None:
        rows = [[each.name, _ms(each.predicted_ms), _ms(each.measured_ms)] for each in prediction.terms]
        heads = ["part of the step", "predicted, ms", "measured, ms"]
        yield card(f"Predicted for {prediction.cluster} beside measured", html_table(heads, rows))
    if any(rank.steps for rank in ranks):
        yield card("Step of each rank", step_bars(ranks) + _more(len(ranks)))
    drawn = timeline(ranks, analysis.matching.offsets_ns, analysis.path, analysis.path_start_ns)
    if drawn:
        yield card("Timeline", drawn + _path(analysis))
    if analysis.stages:
        yield card("Pipeline stages", _stages(analysis))
    if analysis.kinds:
        yield card("Collectives by kind of group, a rank and step", _kinds(analysis))
        yield card("Time of collectives by rank, ms a step", _heat(analysis))
    if analysis.stragglers:
        yield card("Late among their peers", _stragglers(analysis))
    if analysis.links:
        yield card("Links", _links(analysis))
    if analysis.types:
        yield card("Operators, a rank and step", _operators(analysis.types))
    if analysis.shapes:
        yield card("Operators by the shapes of their inputs", _operators(analysis.shapes))
    for rank in [rank for rank in ranks if rank.memory][:MAX_CURVES]:
        yield card(f"Memory of rank {rank.rank}", memory_curves(rank.memory) + _owners(rank.owners))
    yield card("All figures", _figures(analysis))


def card(title: str, body: str) -> str:
    """A section with a heading."""
    return f'<section class="card"><h2>{html.escape(title)}</h2>{body}</section>'


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Cells are escaped here; those of the columns `words` may break."""
    head = "".join(f"<th{_class(place, words)}>{html.escape(each)}</th>" for place, each in enumerate(heads))
    body = "".join(
        "<tr>"
        + "".join(f"<td{_class(place, words)}>{html.escape(cell)}</td>" for place, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _class(place: int, words: Sequence[int]) -> str:
    return ' class="words"' if place in words else ""


def _more(count: int) -> str:
    return f"<p>The first {MAX_ROWS} of {count} ranks.</p>" if count > MAX_ROWS else ""


def _advice(analysis: Analysis) -> str:
    if not analysis.advice:
        return f"<p>{html.escape(analysis.without_advice)}</p>"
    items = []
    for each in analysis.advice:
        facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in each.figures)
        keys = " ".join(f"<code>{html.escape(key)}</code>" for key in each.keys)
        items.append(
            f'<li><p class="advice"><b>{html.escape(each.title)}</b> <span class="gain">about {each.gain_ms:.1f} ms a '
            f"step</span></p><ul>{facts}</ul><p>{html.escape(each.action)}</p><p>{keys}</p></li>"
        )
    return f'<ol class="advices">{"".join(items)}</ol>'


def _path(analysis: Analysis) -> str:
    if not analysis.path:
        return ""
    rows = [
        [str(each.rank), f"{each.start_ms:.1f}", f"{each.end_ms:.1f}", f"{each.end_ms - each.start_ms:.1f}", each.what]
        for each in analysis.path
    ]
    heads = ["rank", "from, ms", "to, ms", "ms", "critical path: what it does"]
    return html_table(heads, rows, words=(0, 4))


def _stages(analysis: Analysis) -> str:
    rows = []
    for each in analysis.stages:
        values = (each.computing_ms, each.free_ms, each.p2p_ms, each.p2p_wait_ms, each.bubble_written_ms)
        ranks = ", ".join(map(str, each.ranks[:16])) + (" ..." if len(each.ranks) > 16 else "")
        rows.append([str(each.stage), ranks, *map(_ms, values)])
    heads = ["stage", "ranks", "computing, ms", "free, ms", "messages, ms", "of it waiting", "Bubble as written"]
    return html_table(heads, rows, words=(0, 1))


def _kinds(analysis: Analysis) -> str:
    rows = []
    for each in analysis.kinds:
        times = map(_ms, (each.elapse_ms, each.exposed_ms, each.wait_ms))
        rows.append([each.kind, ", ".join(each.operators), format_count(each.count), *times, f"{each.size_mb:.0f}"])
    return html_table(["for", "operators", "count", "ms", "exposed", "waiting", "MB"], rows, words=(0, 1))


def _heat(analysis: Analysis) -> str:
    kinds = [each.kind for each in analysis.kinds]
    ranks = [rank for rank in analysis.ranks if rank.collectives][:MAX_ROWS]
    waits = analysis.matching.waits_ms()
    rows = []
    for rank in ranks:
        sums = analysis.kind_times_ms(rank)
        waited = waits.get(rank.rank)
        rows.append([*(sums.get(kind) for kind in kinds), None if waited is None else waited / rank.num_steps])
    return heat([f"rank {rank.rank}" for rank in ranks], [*kinds, "waiting"], rows, "ms a step")


def _stragglers(analysis: Analysis) -> str:
    rows = [
        [
            str(each.rank),
            "" if each.stage is None else str(each.stage),
            f"{each.delay_ms:.1f}",
            str(each.times),
            f"{each.computing_ms:+z.1f}",
            f"{each.free_ms:+z.1f}",
            each.cause,
        ]
        for each in analysis.stragglers
    ]
    heads = ["rank", "stage", "others wait, ms", "times last", "computing", "free", "cause"]
    return html_table(heads, rows, words=(0, 6))


def _links(analysis: Analysis) -> str:
    rows = [
        [
            each.transport,
            f"{each.size_mb:.0f}",
            f"{each.time_ms:.1f}",
            f"{each.gb_per_s:.1f}",
            f"{each.slowest_gb_per_s:.1f}",
            each.slowest,
        ]
        for each in analysis.links
    ]
    return html_table(["link", "MB", "ms", "GB/s", "slowest, GB/s", "between"], rows, words=(0, 5))


def _operators(operators: Sequence[Operator]) -> str:
    has_shapes = any(each.shapes for each in operators)
    rows = [
        [
            each.type,
            *([each.shapes] if has_shapes else []),
            each.core,
            format_count(each.count),
            f"{each.total_ms:.2f}",
            f"{each.mean_us:.1f}",
            format_share(each.share),
            each.bound or UNKNOWN,
            UNKNOWN if each.ratio is None else f"{each.ratio:.2f}",
        ]
        for each in operators
    ]
    shapes = ["shapes"] if has_shapes else []
    heads = ["operator", *shapes, "core", "count", "ms", "us each", "share", "bound by", "ratio"]
    return html_table(heads, rows, words=(0, 1) if has_shapes else (0,))


def _owners(owners: Sequence[Owner]) -> str:
    rows = [[each.name, f"{each.size_mb:.1f}", str(each.count)] for each in owners[:10]]
    return html_table(["allocated in the window, alive at the peak", "MB", "times"], rows) if rows else ""


def _figures(analysis: Analysis) -> str:
    names = list(dict.fromkeys(each.name for each in analysis.figures))
    rows = []
    for name in names:
        own = [each for each in analysis.figures if each.name == name]
        known = [each for each in own if each.value is not None]
        values = [each.value for each in known if each.value is not None]
        if not values:
            rows.append([name, own[0].missing, "", own[0].formula, ""])
            continue
        unit = known[0].unit
        low, high = min(values), max(values)
        shown = [format_share(each) if unit == "share" else f"{each:.2f} {unit}" for each in dict.fromkeys((low, high))]
        sources = ", ".join(dict.fromkeys(each.source for each in known if each.source))
        rows.append([name, " to ".join(shown), str(len(values)), known[0].formula, sources])
    return html_table(["figure", "over ranks", "ranks", "formula", "from"], rows, words=(0, 1, 3, 4))


def _ms(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"
