"""The report page: what is in it, that it is safe to open, and that it draws in a browser where there is one."""

import base64
import dataclasses
import html.parser
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.errors import MetricsError
from ascend_moe_train.parallel.spans import CommTotal, StepComm
from ascend_moe_train.train import report_data
from ascend_moe_train.train.metrics import JsonlWriter
from ascend_moe_train.train.report import write_report
from ascend_moe_train.train.report_data import MAX_POINTS, HeatBins, RunData, series_json, thin
from tests.synthetic_run import HOSTILE, write_run
from tests.unit.test_metrics import meter, step


class Page(html.parser.HTMLParser):
    """What a browser would see: tags, attributes, and text outside of script and style."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.blocks: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag in self.blocks:
            self.blocks[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self.blocks[self.cdata_elem][-1] += data
        else:
            self.text += data

    @property
    def run(self) -> Any:
        return json.loads(self.blocks["script"][0], parse_constant=lambda name: pytest.fail(name))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("good"), steps=120)


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("bad"), steps=120, bad=True)


def test_content(good: Path) -> None:
    path = write_report(good)
    assert path == good / "report.html"
    assert not list(good.glob(".*"))
    page = Page(path)
    for text in ("Finished after 120 steps", "Validation bits per byte", "8.13 M", "3.41 M active", "MFU 58"):
        assert text in page.text
    for text in ("num_experts:", "def read_header(path):", "numpy", "sgemm measured on all cores", "492 k"):
        assert text in page.text
    curves = set(page.run["series"])
    assert {"loss", "loss_smooth", "eval_loss", "eval_perplexity", "eval_bits_per_byte", "lr", "grad_norm"} <= curves
    assert {"tokens_per_s", "mfu", "load_cv", "load_max_over_mean", "dead_experts", "drop_rate"} <= curves


def test_opens_without_network(good: Path, bad: Path) -> None:
    for folder in (good, bad):
        path = write_report(folder)
        page = Page(path)
        assert not {"src", "href", "srcset", "action", "data", "style"} & {name for name, _ in page.attributes}
        assert not {"link", "img", "iframe", "object", "base", "form"} & set(page.tags)
        assert "@import" not in path.read_text() and "url(" not in page.blocks["style"][0]
        assert not re.search(r"\b(fetch|XMLHttpRequest|import)\b|innerHTML|eval\(", page.blocks["script"][1])


def test_policy_allows_the_inline_blocks_and_nothing_else(good: Path) -> None:
    page = Page(write_report(good))
    policy = next(value for _, value in page.attributes if value and "default-src" in value)
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-[\w+/=]+'; script-src 'sha256-[\w+/=]+'", policy)


def test_hostile_strings_stay_text(bad: Path) -> None:
    page = Page(write_report(bad))
    shown = HOSTILE.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert page.text.count(shown) == 5  # sample, configuration, name and value of a version, source of the peak
    assert page.tags.count("script") == 2 and "onerror" not in dict(page.attributes)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", (bad / "report.html").read_text())


def test_hostile_folder_name(tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=x>"
    page = Page(write_report(write_run(folder, steps=1)))
    assert "img" not in page.tags
    assert folder.name in page.text


def test_missing_values(bad: Path) -> None:
    page = Page(write_report(bad))
    assert "Stands at step 120 of 220" in page.text
    assert "MFU n/a" in page.text
    assert "7 of them skipped" in page.text
    assert len(page.run["skipped"]) == 7
    assert "mfu" not in page.run["series"] and "eval_bits_per_byte" not in page.run["series"]
    loss = page.run["series"]["loss"]
    assert [at for at, value in zip(loss["step"], loss["value"], strict=True) if value is None] == page.run["skipped"]


def test_metrics_alone_are_enough(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "metrics.jsonl", first_step=1) as writer:
        writer.write(step(1))
    page = Page(write_report(tmp_path))
    assert "Ended after 1 step." in page.text and "no config.yaml" in page.text and "no run.json" in page.text
    assert page.run["series"]["loss"] == {"step": [1], "value": [2.5]}
    assert page.run["heat"]["first"] == page.run["heat"]["last"] == [1]


def test_bytes_are_shown_by_what_sent_them(tmp_path: Path) -> None:
    whole = CommTotal(
        verb="all_reduce", group="dp_cp", content="gradients", calls=2, payload_bytes=4000, total_s=0.5, exposed_s=0.25
    )
    signs = replace(whole, verb="all_to_all", content="momenta 1-bit", payload_bytes=125)
    old = CommTotal(verb="send", group="</td><script>", calls=1, payload_bytes=8, total_s=0.5)
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path, first_step=1) as writer:
        for number, calls in enumerate(((whole, old), (signs,), (signs,)), 1):
            comm = StepComm(total_s=1.0, exposed_s=0.5, calls=calls)
            writer.write(step(number, meter(lists_comm=True), comm=comm))
    page = Page(write_report(tmp_path))
    table = page.text[page.text.index("waited a step") + len("waited a step") :]
    assert table.startswith("gradientsall_reducedp_cp124.00 kB4.00 kB500 ms250 ms")
    assert "momenta 1-bitall_to_alldp_cp22125 B250 B500 ms250 ms" in table
    assert "othersend</td><script>118 B8 B500 msn/a" in table
    assert page.run["series"]["comm_bytes"]["value"] == [4008, 125, 125]


def test_no_step_yet(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    page = Page(write_report(tmp_path))
    assert "No step has finished yet" in page.text
    assert page.run == {"series": {}, "skipped": [], "heat": None}


def test_dense_model_has_no_expert_curves(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "metrics.jsonl", first_step=1) as writer:
        writer.write(step(1, counts_LE=np.zeros((0, 0), np.int64)))
    run = Page(write_report(tmp_path)).run
    assert not {"load_cv", "dead_experts", "drop_rate", "aux_loss"} & set(run["series"])
    assert run["heat"] is None


def test_wholly_lost_run(tmp_path: Path) -> None:
    lost: dict[str, Any] = {
        "loss": math.nan,
        "grad_norm": math.inf,
        "step_s": 0.0,
        "skipped": True,
        "aux_loss": math.nan,
    }
    with JsonlWriter(tmp_path / "metrics.jsonl", first_step=1) as writer:
        for number in range(1, 5):
            writer.write(step(number, counts_LE=np.zeros((2, 4), np.int64), **lost))
    page = Page(write_report(tmp_path))
    assert "4 of them skipped" in page.text
    assert "loss" not in page.run["series"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("metrics.jsonl", b"{}\n", "metrics.jsonl line 1: "),
        ("run.json", b"[]", "run.json: "),
        ("metrics.jsonl", None, "metrics.jsonl: No such file"),
    ],
)
def test_unusable_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    write_run(tmp_path, steps=1)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(MetricsError, match=re.escape(says)) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*report*"))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    write_run(tmp_path, steps=1)
    (tmp_path / "sample.txt").write_bytes(b"caf\xe9 " + b"x" * 2**19)
    page = Page(write_report(tmp_path))
    assert "caf\ufffd xxx" in page.text and "(cut here)" in page.text
    assert len(page.text) < 2**19


def test_100k_steps_fit_a_page() -> None:
    data = RunData()
    record = step(1)
    for number in range(1, 100_001):
        spike = 50.0 if number == 77_777 else 2.0
        data.add(dataclasses.replace(record, step=number, loss=spike))
    loss: Any = series_json(data)["loss"]
    assert len(loss["step"]) == MAX_POINTS
    assert (loss["step"][0], loss["step"][-1]) == (1, 100_000)
    assert max(loss["high"]) == 50 and min(loss["low"]) == 2
    assert len(json.dumps(series_json(data))) < 500_000
    assert data.heat is not None
    heat: Any = data.heat.to_json()
    assert len(heat["first"]) <= report_data.MAX_COLUMNS
    assert heat["first"][0] == 1 and heat["last"][-1] == 100_000
    assert all(last + 1 == first for last, first in zip(heat["last"][:-1], heat["first"][1:], strict=True))


def test_large_model_fits_a_page() -> None:
    bins = HeatBins(num_layers=64, num_experts=256)
    load = ((1 / 256,) * 256,) * 64
    for number in range(1, 300):
        bins.add(number, load)
    heat: Any = bins.to_json()
    assert len(heat["cells"]) < 3_000_000
    assert set(base64.b64decode(heat["cells"])) == {128}


def test_heat_map_cells() -> None:
    bins = HeatBins(num_layers=2, num_experts=4)
    bins.add(1, ((0.5, 0.5, 0, 0), (0.25,) * 4))
    bins.add(2, ((1, 0, 0, 0), (0.25,) * 4))
    heat: Any = bins.to_json()
    cells_LEW = np.frombuffer(base64.b64decode(heat["cells"]), np.uint8).reshape(2, 4, 2)
    octaves_LEW = (cells_LEW.astype(float) - 128) / 127 * heat["octaves"]
    assert octaves_LEW[0, 0] == pytest.approx([1, 2], abs=0.02)
    assert cells_LEW[0, 1].tolist()[1] == 0 and (cells_LEW[0, 2:] == 0).all()
    assert (cells_LEW[1] == 128).all()


def test_thin_skips_what_is_not_finite() -> None:
    step_P = np.arange(1, 4001)
    value_P = np.where(step_P % 2 == 0, math.nan, 1.0)
    curve: Any = thin(step_P, value_P, value_P, value_P)
    assert set(curve["value"]) == {1.0} and "low" not in curve
    value_P[:100] = math.inf
    curve = thin(step_P, value_P, value_P, value_P)
    assert curve["value"][:20] == [None] * 20 and curve["value"][20] == 1.0
    assert thin(step_P, value_P * math.nan, value_P, value_P) is None


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("kind", ["good", "bad", "one_step"])
def test_draws_in_a_browser(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    folder = write_run(tmp_path / "run", steps=1) if kind == "one_step" else request.getfixturevalue(kind)
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    more = "--disable-component-update --disable-sync --virtual-time-budget=2000 --enable-logging=stderr --dump-dom"
    done = subprocess.run(
        ["chromium", *flags.split(), *more.split(), f"--user-data-dir={tmp_path}", write_report(folder).as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    drawn = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
    assert "<title>broken" not in drawn
    assert "NaN" not in drawn and "undefined" not in drawn
    assert (drawn.count("<svg"), drawn.count('<figure class="map"')) == (12, 4)
    assert drawn.count("line") > 12
