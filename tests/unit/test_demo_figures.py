"""The READMEs' table of the demo: both say the same, and a run of the demo says it too (slow)."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts.docs_demo import WORDS, Figures, figures, rewritten, table
from scripts.docs_pages import ROOT, regions
from scripts.docs_regions import PROGRAMS

NUMBER = re.compile(r"\d+(?:\.\d+)*")
PAGES = {"en": "README.md", "zh": "README.zh-CN.md"}
FOUND = Figures(bits=1.5, perplexity=20.25, load_cv=0.2, dead=0, dropped=0, total=14.7, active=5.3, python="3.11.2")


def shown(language: str) -> list[str]:
    (lines,) = [
        region.lines
        for region in regions(Path(ROOT, PAGES[language]).read_text(encoding="utf-8"))
        if region.kind == "demo"
    ]
    return [line for line in lines if line]


def test_both_readmes_show_the_same_figures() -> None:
    in_both = [[NUMBER.findall(line) for line in shown(language)] for language in WORDS]
    assert in_both[0] == in_both[1]
    assert len(in_both[0]) == len(WORDS["en"]) + 1


def test_figures_are_written_where_the_region_is() -> None:
    page = "# A\n\n<!-- demo: en -->\n\nold\n\n<!-- end of demo -->\n\nafter\n"
    written = rewritten(page, FOUND)
    assert "old" not in written
    assert "\n".join(table(FOUND, "en")) in written
    assert rewritten(written, FOUND) == written


def test_a_run_that_has_not_ended_has_no_figures(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"total_steps": 900}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "eval", "step": 200}) + "\n")
    with pytest.raises(ValueError, match="no evaluation after step 900"):
        figures(tmp_path)


@pytest.mark.slow
def test_the_demo_reaches_what_the_readme_shows(tmp_path: Path) -> None:
    # what `make demo` types; the corpus is this Python's library, which is another one in other versions
    prepare = "data prepare --corpus python-stdlib --out corpora/stdlib --vocab-size 2048"
    for words in (prepare.split(), ["train", str(ROOT / "examples/demo.yaml")]):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOG_v": "3"}
        subprocess.run([*PROGRAMS["amt"], *words], cwd=tmp_path, env=environment, check=True)
    found = figures(tmp_path / "runs" / "demo")
    bits, perplexity = map(float, NUMBER.findall(shown("en")[2]))
    assert (found.dead, found.dropped) == (0, 0)
    assert found.perplexity < 100
    if f"Python {found.python}," in shown("en")[-1]:
        assert found.bits == pytest.approx(bits, rel=0.1)
        assert found.perplexity == pytest.approx(perplexity, rel=0.35)
