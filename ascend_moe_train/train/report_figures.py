"""The report's key figures and tables as HTML, readable without scripts. Pure."""

import html
import math

import numpy as np

from ascend_moe_train.train.metrics import EvalRecord
from ascend_moe_train.train.report_data import Floats, RunData
from ascend_moe_train.train.run_info import RunInfo
from ascend_moe_train.units import UNKNOWN, format_bytes, format_count, format_flops_per_s, format_seconds, format_share

MAX_ROWS = 60

# The first steps are slow (compilation, cold caches); what a run settles at is its later part.
SETTLED_SHARE = 0.5
LAST_SHARE = 0.1

Tile = tuple[str, str, str]


def status(data: RunData, info: RunInfo | None) -> str:
    """One line: how far the run came."""
    if not data.step:
        return "No step has finished yet."
    done, planned = data.step[-1], info.total_steps if info else None
    if planned is None or done >= planned:
        return f"{'Finished' if planned else 'Ended'} after {done:,} step{'s' if done != 1 else ''}."
    return f"Stands at step {done:,} of {planned:,}."


def tiles(data: RunData, info: RunInfo | None) -> str:
    """The key figures of a run; what is not known is not shown, or says n/a."""
    rows = [*_quality(data), *_volume(data), *_speed(data, info)]
    if info is not None:
        note = f"{format_count(info.active_parameters)} active per token"
        rows.append(("Parameters", format_count(info.parameters), note))
    if data.num_layers:
        rows.append(_experts(data))
    return "".join(
        f'<div><dt>{html.escape(label)}</dt><dd class="value">{html.escape(value)}</dd>'
        f'<dd class="note">{html.escape(note)}</dd></div>'
        for label, value, note in rows
    )


def evaluation_table(data: RunData) -> str:
    """Validation results, newest first, evenly thinned when there are many; nothing without one."""
    if not data.evals:
        return ""
    every = math.ceil(len(data.evals) / MAX_ROWS)
    shown = data.evals[::-1][::every]
    rows = "".join(
        f"<tr><th scope=row>{record.step:,}</th><td>{_number(record.loss)}</td><td>{_number(record.perplexity)}</td>"
        f"<td>{_number(record.bits_per_byte)}</td><td>{record.tokens:,}</td></tr>"
        for record in shown
    )
    note = f'<p class="unit">every {every}th of {len(data.evals):,}</p>' if every > 1 else ""
    return (
        f'<section class="card"><h2>Validation</h2>{note}<div class="scroll"><table class="numbers"><thead><tr>'
        "<th scope=col>after step</th><th scope=col>loss</th><th scope=col>perplexity</th>"
        f"<th scope=col>bits per byte</th><th scope=col>tokens</th></tr></thead><tbody>{rows}</tbody></table></div>"
        "</section>"
    )


def comm_table(data: RunData) -> str:
    """What collectives sent and took by content, verb and group, the most bytes first; nothing for a run alone."""
    if not data.comm:
        return ""
    ordered = sorted(data.comm.items(), key=lambda pair: -pair[1].payload_bytes)
    rows = "".join(
        f"<tr>{''.join(f'<th scope=row>{html.escape(name)}</th>' for name in names)}<td>{each.steps:,}</td>"
        f"<td>{each.calls / each.steps:.4g}</td><td>{format_bytes(each.payload_bytes / each.steps)}</td>"
        f"<td>{format_bytes(each.payload_bytes)}</td><td>{format_seconds(each.total_s / each.steps)}</td>"
        f"<td>{format_seconds(each.exposed_s / each.steps)}</td></tr>"
        for names, each in ordered[:MAX_ROWS]
    )
    heads = ("what", "verb", "group", "steps", "calls a step", "bytes a step", "bytes", "took a step", "waited a step")
    head = "".join(f"<th scope=col>{name}</th>" for name in heads)
    note = "payload of the first rank, and its time; a step that has none of it is not counted"
    more = f"; {len(ordered) - MAX_ROWS} more kinds" if len(ordered) > MAX_ROWS else ""
    return (
        f'<section class="card"><h2>Communication</h2><p class="unit">{note}{more}</p><div class="scroll">'
        f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def versions_table(info: RunInfo | None) -> str:
    """Versions of software and hardware."""
    if info is None:
        return '<section class="card"><h2>Versions</h2><p class="unit">The run left no run.json.</p></section>'
    peak = UNKNOWN if info.peak_flops_per_s is None else format_flops_per_s(info.peak_flops_per_s)
    source = f" ({info.peak_source})" if info.peak_source else ""
    rows = info.versions | {
        "FLOPs per token": f"{format_count(info.flops_per_token)} (forward and backward)",
        "peak": f"{peak}{source}",
    }
    body = "".join(
        f"<tr><th scope=row>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows.items()
    )
    return (
        '<section class="card"><h2>Versions and machine</h2>'
        f'<div class="scroll"><table><tbody>{body}</tbody></table></div></section>'
    )


def _quality(data: RunData) -> list[Tile]:
    """Validation, then training loss."""
    rows = []
    if data.evals:
        last = data.evals[-1]
        if last.bits_per_byte is not None:
            rows.append(("Validation bits per byte", _number(last.bits_per_byte), _best(data.evals)))
        rows.append(("Validation loss", _number(last.loss), f"perplexity {_number(last.perplexity)}"))
    smooth = data.column("loss_smooth")
    if len(smooth):
        rows.append(("Training loss", _number(float(smooth[-1])), "smoothed, last step"))
    return rows


def _best(evals: list[EvalRecord]) -> str:
    """The best bits per byte of a run, unless it is the last."""
    known = [(record.bits_per_byte, record.step) for record in evals if record.bits_per_byte is not None]
    finite = [pair for pair in known if math.isfinite(pair[0])]
    if not finite or min(finite)[1] == evals[-1].step:
        return "best of the run"
    return f"best {_number(min(finite)[0])} at step {min(finite)[1]:,}"


def _volume(data: RunData) -> list[Tile]:
    if not data.step:
        return []
    skipped = f", {len(data.skipped):,} of them skipped" if data.skipped else ""
    return [
        ("Tokens", format_count(data.tokens), f"{len(data.step):,} steps in {format_seconds(data.seconds)}{skipped}")
    ]


def _speed(data: RunData, info: RunInfo | None) -> list[Tile]:
    """Throughput over the settled part, and memory."""
    if not data.step:
        return []
    tokens_per_s = _middle(data.column("tokens_per_s"))
    flops_per_s = format_flops_per_s(_middle(data.column("model_flops_per_s")))
    text = f"{tokens_per_s:,.0f}" if math.isfinite(tokens_per_s) else UNKNOWN
    mfu = format_share(_middle(data.column("mfu")))
    peak = f" of {format_flops_per_s(info.peak_flops_per_s)} peak" if info and info.peak_flops_per_s else ""
    memory = data.column("memory_bytes").max()
    return [
        ("Tokens per second", text, "median of the later half"),
        ("Model FLOP/s", flops_per_s, f"MFU {mfu}{peak}"),
        ("Peak memory", format_bytes(memory), "resident, at the end of a step"),
    ]


def _experts(data: RunData) -> Tile:
    """How even the load was at the end."""
    cv, busiest, dead, drop = (
        _mean_of_last(data.column(name)) for name in ("load_cv", "load_max_over_mean", "dead_experts", "drop_rate")
    )
    note = f"busiest {busiest:.2f}× mean, {dead:.3g} dead per layer, {format_share(drop)} dropped"
    return ("Expert load variation", f"{cv:.3f}", note)


def _middle(values: Floats) -> float:
    """Median of the finite values in a run's settled part."""
    settled = values[int(len(values) * SETTLED_SHARE) :]
    finite = settled[np.isfinite(settled)]
    return float(np.median(finite)) if len(finite) else math.nan


def _mean_of_last(values: Floats) -> float:
    """Mean of the finite values in a run's last part."""
    last = values[-max(int(len(values) * LAST_SHARE), 1) :]
    finite = last[np.isfinite(last)]
    return float(finite.mean()) if len(finite) else math.nan


def _number(value: float | None) -> str:
    """Four significant digits."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:.4g}" if value == 0 or not 1e-3 <= abs(value) < 1e4 else f"{value:#.4g}".rstrip(".")
