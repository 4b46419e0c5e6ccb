"""docs/claims.md: each claim has a verdict, and a part that shows it by a command that is run."""

import re
from pathlib import Path

from scripts.docs_hook import slug
from scripts.docs_pages import ROOT, regions

PAGE = Path(ROOT, "docs", "claims.md").read_text(encoding="utf-8")
ROW = re.compile(r"\| \[(\d+)\]\(#([^)]+)\) \| (.+?) \| \*\*(true|corrected|refused)\*\*")


def test_every_claim_has_a_verdict() -> None:
    assert [int(row[1]) for row in ROW.finditer(PAGE)] == list(range(1, 16))


def test_every_verdict_is_shown_by_what_is_run() -> None:
    parts = {slug(part.partition("\n")[0], "-"): part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
    for row in ROW.finditer(PAGE):
        run = [region for region in regions(parts[row[2]]) if region.kind == "run" and "slow" not in region.option]
        assert run, f"claim {row[1]}"


def test_what_is_called_by_name_is_in_the_commands_that_are_run() -> None:
    code = "\n".join(line for region in regions(PAGE) for line in region.lines)
    for name in (
        "hostfile",
        "mindspore.distributed",
        "shard",
        "gradient_fp16_compress",
        "AllToAll",
        "sharding_propagation",
    ):
        assert name in code
    assert "strategy_ckpt_save_file" in code
