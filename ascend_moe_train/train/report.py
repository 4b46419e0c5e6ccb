"""The report of a run: one HTML file with its curves, expert load, configuration and versions. Pure."""

import html
import re
from pathlib import Path

from ascend_moe_train.errors import MetricsError
from ascend_moe_train.html_page import asset, filled, policy_hash, script_json
from ascend_moe_train.train.metrics import replace_file
from ascend_moe_train.train.report_data import RunData, read_run, series_json, skipped_json
from ascend_moe_train.train.report_figures import comm_table, evaluation_table, status, tiles, versions_table
from ascend_moe_train.train.run_info import RunInfo, read_run_info

METRICS_NAME = "metrics.jsonl"
CONFIG_NAME = "config.yaml"
SAMPLE_NAME = "sample.txt"
REPORT_NAME = "report.html"
MAX_TEXT_BYTES = 2**18

_YAML_KEY = re.compile(r"^(\s*(?:- )?)([\w.-]+:)", re.MULTILINE)


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into the run's folder from the files in it and returns its path.

    Read are metrics.jsonl (required), run.json, config.yaml and sample.txt. The page loads nothing: style, script and
    data are inside, and its content security policy forbids the rest. Raises MetricsError naming file and line.
    """
    data = read_run(run_dir / METRICS_NAME)
    info = read_run_info(run_dir)
    config = _read_text(run_dir / CONFIG_NAME)
    sample = _read_text(run_dir / SAMPLE_NAME)
    page = render(run_dir.resolve().name or "run", data, info, config=config, sample=sample)
    path = run_dir / REPORT_NAME
    replace_file(path, [page.encode()])
    return path


def render(title: str, data: RunData, info: RunInfo | None, *, config: str | None, sample: str | None) -> str:
    """The page as text. All strings may hold anything: they are escaped here."""
    style = asset(__package__, "report.css")
    script = asset(__package__, "report.js") + asset(__package__, "heatmap.js")
    payload = {
        "series": series_json(data),
        "skipped": skipped_json(data),
        "heat": data.heat.to_json() if data.heat else None,
    }
    sections = [_sample_section(sample), evaluation_table(data), comm_table(data), _facts_section(config, info)]
    parts = {
        "title": html.escape(title),
        "status": status(data, info),
        "tiles": tiles(data, info),
        "sections": "\n".join(section for section in sections if section),
        "data": script_json(payload),
        "style": style,
        "script": script,
        "style_hash": policy_hash(style),
        "script_hash": policy_hash(script),
    }
    return filled(asset(__package__, "report.html"), parts)


def _read_text(path: Path) -> str | None:
    """A small text file's content; None without the file. Bytes that are no UTF-8 become replacement characters."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MetricsError(f"{path}: {error.strerror or error}") from None
    cut = "\n… (cut here)" if len(content) > MAX_TEXT_BYTES else ""
    return content[:MAX_TEXT_BYTES].decode("utf-8", "replace") + cut


def _sample_section(sample: str | None) -> str:
    if sample is None or not sample.strip():
        return ""
    return f'<section class="card sample"><h2>Text the model wrote</h2><pre>{html.escape(sample)}</pre></section>'


def _facts_section(config: str | None, info: RunInfo | None) -> str:
    """Configuration beside versions."""
    if config is None:
        body = '<p class="unit">The run left no config.yaml.</p>'
    else:
        body = "<pre>" + _YAML_KEY.sub(r'\1<span class="key">\2</span>', html.escape(config, quote=False)) + "</pre>"
    left = f'<section class="card"><h2>Configuration</h2>{body}</section>'
    return f'<div class="pair">{left}{versions_table(info)}</div>'
