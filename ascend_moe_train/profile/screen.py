"""One screen about a capture, as lines of tables. Pure."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ascend_moe_train.plain_text import plain
from ascend_moe_train.profile.analysis import Analysis
from ascend_moe_train.profile.numbers import counted, format_count
from ascend_moe_train.profile.tables import Rank
from ascend_moe_train.profile.terms import Prediction
from ascend_moe_train.units import UNKNOWN, format_share

MAX_RANKS = 16
MAX_ADVICE = 6
MAX_OPERATORS = 8
COLUMNS = 118  # where there is no terminal
MARKS = {True: "[green]passed[/]", False: "[red]failed[/]", None: "[dim]not collected[/]"}


def unmarked(text: str) -> str:
    """Text of a file for where rich shows it: no markup, and nothing that steers a terminal."""
    return escape(plain(text))


def screen(analysis: Analysis, prediction: Prediction | None = None) -> RenderableType:
    """Thresholds, the tables, and last, where a terminal ends, what to do."""
    parts: list[RenderableType] = [Text.from_markup(_title(analysis)), _verdicts(analysis), _ranks(analysis)]
    if analysis.stages:
        parts.append(_stages(analysis))
    if analysis.kinds:
        parts.append(_kinds(analysis))
    if analysis.types:
        parts.append(_operators(analysis))
    if prediction is not None:
        parts += [_predicted(prediction), Text.from_markup(_beside(prediction))]
    parts.append(_advice(analysis))
    parts += [Text.from_markup(f"[yellow]note:[/] {unmarked(words)}") for words in analysis.warnings[:6]]
    return Group(*parts)


def console() -> Console:
    """As wide as the terminal, or COLUMNS."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=COLUMNS)


def _title(analysis: Analysis) -> str:
    ranks = analysis.ranks
    writers = ", ".join(sorted({rank.writer for rank in ranks}))
    levels = ", ".join(sorted({" ".join(filter(None, (rank.level, rank.metrics))) for rank in ranks} - {""}))
    steps = max(len(rank.steps) for rank in ranks)
    known = [rank.e2e_us for rank in ranks if rank.steps]
    step = f", step {max(known) / 1e3:.1f} ms" if known else ""
    sizes = " ".join(f"{name}{size}" for name, size in analysis.layout.sizes.items() if size > 1 and name != "world")
    facts = ", ".join(filter(None, (writers, levels, sizes)))
    return (
        f"[bold]{unmarked(analysis.capture.folder)}[/]: {counted(len(ranks), 'rank')}, "
        f"{counted(steps, 'step')}{step} ({unmarked(facts)})"
    )


def table(title: str, *heads: str, words: Sequence[int] = (0,)) -> Table:
    """Columns with their heads; those of `words` to the left."""
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for place, head in enumerate(heads):
        shown.add_column(head, justify="left" if place in words else "right", no_wrap=place not in words)
    return shown


def _verdicts(analysis: Analysis) -> Table:
    shown = table("Thresholds", "metric", "bound", "worst", "rank", "", words=(0, 4))
    for each in analysis.verdicts:
        bound = f"{'>=' if each.at_least else '<='} {each.share * 100:g} %"
        rank = "" if each.worst_rank is None else str(each.worst_rank)
        mark = MARKS[each.passed] if each.passed is not None else f"[dim]{unmarked(each.missing)}[/]"
        shown.add_row(each.metric, bound, format_share(each.worst), rank, mark)
    return shown


def _ranks(analysis: Analysis) -> Table:
    heads = (
        "rank",
        "stage",
        "step ms",
        "computing",
        "exposed comm",
        "free",
        "p2p",
        "waited ms",
        "cube use",
        "mac",
        "memory",
    )
    shown = table("Ranks, mean step", *heads)
    waits = analysis.matching.waits_ms()
    for rank in _shown(analysis):
        number = rank.rank
        stage = analysis.layout.stages.get(number)
        step = analysis.value("step", number)
        wait = waits.get(number)
        memory = analysis.value("memory_peak", number)
        shown.add_row(
            str(number),
            "" if stage is None else str(stage),
            UNKNOWN if step is None else f"{step:.1f}",
            *(
                format_share(analysis.value(name, number))
                for name in ("computing", "exposed_comm", "free", "p2p_exposed")
            ),
            UNKNOWN if wait is None else f"{wait / rank.num_steps:.1f}",
            *(format_share(analysis.value(name, number)) for name in ("cube_utilisation", "cube_mac")),
            UNKNOWN if memory is None else f"{memory / 1024:.1f} GB",
        )
    if len(analysis.ranks) > MAX_RANKS:
        shown.caption = f"{MAX_RANKS} of {len(analysis.ranks)}: those that wait least, and most; all with --json"
    return shown


def _shown(analysis: Analysis) -> Sequence[Rank]:
    """All, or of many the ends of the order in which they wait."""
    if len(analysis.ranks) <= MAX_RANKS:
        return analysis.ranks
    waits = analysis.matching.waits_ms()
    ordered = sorted(analysis.ranks, key=lambda rank: (waits.get(rank.rank, rank.exposed_us), rank.rank))
    return [*ordered[: MAX_RANKS // 2], *ordered[-MAX_RANKS // 2 :]]


def _stages(analysis: Analysis) -> Table:
    shown = table(
        "Pipeline stages", "stage", "ranks", "computing ms", "free ms", "p2p ms", "p2p waiting ms", "Bubble as written"
    )
    for each in analysis.stages:
        ranks = ",".join(map(str, each.ranks[:8])) + ("..." if len(each.ranks) > 8 else "")
        values = (each.computing_ms, each.free_ms, each.p2p_ms, each.p2p_wait_ms, each.bubble_written_ms)
        shown.add_row(str(each.stage), ranks, *(UNKNOWN if value is None else f"{value:.1f}" for value in values))
    return shown


def _kinds(analysis: Analysis) -> Table:
    heads = ("for", "operators", "count", "ms", "exposed ms", "waiting ms", "MB")
    shown = table("Collectives by kind of group, a rank and step", *heads, words=(0, 1))
    for each in analysis.kinds:
        values = (each.elapse_ms, each.exposed_ms, each.wait_ms)
        times = [UNKNOWN if value is None else f"{value:.1f}" for value in values]
        shown.add_row(
            each.kind, unmarked(", ".join(each.operators[:4])), format_count(each.count), *times, f"{each.size_mb:.0f}"
        )
    return shown


def _operators(analysis: Analysis) -> Table:
    heads = ("operator", "core", "count", "ms", "share", "bound by", "ratio")
    shown = table("Operators, a rank and step", *heads, words=(0, 1, 5))
    for each in analysis.types[:MAX_OPERATORS]:
        ratio = UNKNOWN if each.ratio is None else f"{each.ratio:.2f}"
        shown.add_row(
            unmarked(each.type[:40]),
            unmarked(each.core),
            format_count(each.count),
            f"{each.total_ms:.2f}",
            format_share(each.share),
            each.bound or UNKNOWN,
            ratio,
        )
    return shown


def _predicted(prediction: Prediction) -> Table:
    shown = table(f"Predicted for {prediction.cluster} beside measured, ms a step", "", "predicted", "measured")
    for each in prediction.terms:
        values = (each.predicted_ms, each.measured_ms)
        shown.add_row(each.name, *(UNKNOWN if value is None else f"{value:.1f}" for value in values))
    return shown


def _beside(prediction: Prediction) -> str:
    memory = prediction.memory_measured_gb
    words = [
        f"MFU {format_share(prediction.mfu_predicted)} predicted, {format_share(prediction.mfu_measured)} measured",
        f"memory {prediction.memory_predicted_gb:.1f} GB predicted, "
        + (UNKNOWN if memory is None else f"{memory:.1f} GB measured"),
        *(f"{unmarked(name)} {rate:.1f} of {most:.1f} GB/s" for name, rate, most in prediction.rates),
    ]
    return "; ".join(words)


def _advice(analysis: Analysis) -> Group:
    return Group(
        Text("What to do, by estimated gain", style="bold"), *(Text.from_markup(line) for line in _lines(analysis))
    )


def _lines(analysis: Analysis) -> Iterator[str]:
    if not analysis.advice:
        yield analysis.without_advice
    for number, each in enumerate(analysis.advice[:MAX_ADVICE], 1):
        yield f"{number}. [bold]{unmarked(each.title)}[/]: [cyan]about {each.gain_ms:.1f} ms a step[/]"
        yield from (f"   {unmarked(fact)}" for fact in each.figures)
        yield f"   [green]{unmarked(each.action)}[/] [dim]({unmarked(', '.join(each.keys))})[/]"
