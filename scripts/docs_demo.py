"""What a run of the demo reached, as the READMEs show it.

From the root of the repository, after `make demo`:

    python -m scripts.docs_demo

writes the table between `<!-- demo: en -->` (or zh) and `<!-- end of demo -->` anew. Speed is not in it:
machines differ, and speeds are shown as ratios. The slow test in
tests/unit/test_demo_figures.py runs the demo and compares.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from scripts.docs_pages import ROOT, regions, with_regions

WORDS = {
    "en": (
        "| what | figure |",
        "| validation, held-out files | {bits:.2f} bits per byte (perplexity {perplexity:.1f}) |",
        "| expert load, last step | coefficient of variation {load_cv:.2f}, {dead} dead, {dropped:.1f} % dropped |",
        "| model | {total:.1f} M parameters, {active:.1f} M active |",
        "| ran with | Python {python}, whose library is the corpus |",
    ),
    "zh": (
        "| 指标 | 数值 |",
        "| 验证（未参与训练的留出文件） | 每字节比特数 {bits:.2f}（困惑度 {perplexity:.1f}） |",
        "| 专家负载（最后一步） | 变异系数 {load_cv:.2f}，闲置的“死专家” {dead} 个，丢弃 {dropped:.1f} % |",
        "| 模型 | {total:.1f} M 参数，每个 token 激活 {active:.1f} M |",
        "| 运行环境 | Python {python}，语料是它的标准库 |",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of a whole run. `load_cv` is the mean over layers in the last step, `total` and `active` are millions."""

    bits: float
    perplexity: float
    load_cv: float
    dead: int
    dropped: float
    total: float
    active: float
    python: str


def figures(run: Path) -> Figures:
    """What the folder of a finished run says. Raises ValueError: it was not evaluated after its last step."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    about = json.loads((run / "run.json").read_text(encoding="utf-8"))
    steps = [each for each in records if each["kind"] == "step"]
    evaluated = [each for each in records if each["kind"] == "eval"]
    if not evaluated or evaluated[-1]["step"] != about["total_steps"]:
        raise ValueError(f"{run}: no evaluation after step {about['total_steps']}: the run has not ended")
    return Figures(
        bits=evaluated[-1]["bits_per_byte"],
        perplexity=evaluated[-1]["perplexity"],
        load_cv=fmean(steps[-1]["load_cv"]),
        dead=sum(steps[-1]["dead_experts"]),
        dropped=100 * steps[-1]["drop_rate"],
        total=about["parameters"] / 1e6,
        active=about["active_parameters"] / 1e6,
        python=about["versions"]["python"],
    )


def table(found: Figures, language: str) -> list[str]:
    """The lines of a README's table."""
    head, *rows = WORDS[language]
    return [head, "| --- | --- |", *(row.format(**vars(found)) for row in rows)]


def rewritten(text: str, found: Figures) -> str:
    """A page with the figures in its regions."""
    places = [(region, table(found, region.option)) for region in regions(text) if region.kind == "demo"]
    return with_regions(text, places)


def main() -> None:
    """Rewrite the READMEs from runs/demo."""
    found = figures(ROOT / "runs" / "demo")
    for page in sorted(ROOT.glob("README*.md")):
        page.write_text(rewritten(page.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
