"""Pages that are there in English and in Chinese say the same: headings, tables, lists, code, links and regions."""

import posixpath
import re
from pathlib import Path

import pytest

from scripts.docs_pages import ROOT, blocks, pages, regions, without_code

TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in pages()}
LINK = re.compile(r"\]\(([^)\s#]*)(?:#[^)\s]*)?\)")
LISTS = re.compile(r"(\s*)(?:-|\d+\.) ")
COMMENT = re.compile(r"\s+# .*")
# The names of the other language's pages, which link to each other.
OF_LANGUAGE = re.compile(r"README(\.zh-CN)?\.md|docs/guide/(zh/)?[a-z]+\.md")


def in_chinese(name: str) -> str:
    return name.replace("README.md", "README.zh-CN.md").replace("docs/guide/", "docs/guide/zh/", 1)


PAIRS = [name for name in TEXTS if in_chinese(name) != name and in_chinese(name) in TEXTS]


def headings(text: str) -> list[int]:
    return [len(line) - len(line.lstrip("#")) for line in without_code(text).splitlines() if re.match("#+ ", line)]


def tables(text: str) -> list[tuple[int, str]]:
    """Of each row the number of its cells, and what its first cell has in backticks, which is not translated."""
    rows = [line for line in without_code(text).splitlines() if line.startswith("|")]
    return [(row.count("|"), " ".join(re.findall("`[^`]+`", row.split("|")[1]))) for row in rows]


def lists(text: str) -> list[int]:
    """The indentation of each item."""
    return [len(item[1]) for line in without_code(text).splitlines() if (item := LISTS.match(line))]


def code(text: str) -> list[str]:
    """Blocks without the comments, which are translated."""
    return ["\n".join(COMMENT.sub("", line) for line in block.lines).strip() for block in blocks(text)]


def links(text: str, name: str) -> list[str]:
    """What a page links to, in no order: that of words differs. Pages of its own language are as in English."""
    folder = posixpath.dirname(name)
    found = [posixpath.normpath(posixpath.join(folder, link)) for link in LINK.findall(without_code(text)) if link]
    return sorted(
        OF_LANGUAGE.sub(lambda page: page[0].replace("zh/", "").replace(".zh-CN", ""), link) for link in found
    )


def what_is_run(text: str) -> list[tuple[object, ...]]:
    """Not what is written in the page's own language, which tests of its own hold to the same figures."""
    found = [region for region in regions(text) if region.kind not in ("ratios", "demo")]
    return [(region.kind, region.option, region.lines) for region in found]


def test_every_page_of_the_guide_is_there_in_both() -> None:
    guide = {path.name for path in Path(ROOT, "docs", "guide").glob("*.md")}
    assert {path.name for path in Path(ROOT, "docs", "guide", "zh").glob("*.md")} == guide
    assert {posixpath.basename(name) for name in PAIRS} == guide | {"README.md"}


@pytest.mark.parametrize("name", PAIRS)
def test_both_languages_say_the_same(name: str) -> None:
    english, chinese = TEXTS[name], TEXTS[in_chinese(name)]
    assert what_is_run(chinese) == what_is_run(english)
    assert headings(chinese) == headings(english)
    assert tables(chinese) == tables(english)
    assert lists(chinese) == lists(english)
    assert code(chinese) == code(english)
    assert links(chinese, in_chinese(name)) == links(english, name)


def test_differences_are_seen() -> None:
    page = "# A\n\n| `a` | b |\n|---|---|\n\n- one\n\nsee [x](x.md#y)\n\n    amt version  # what\n"
    for taken_for in (headings, tables, lists, code):
        assert taken_for(page) != taken_for("")
    assert tables(page) != tables(page.replace("`a`", "`c`"))
    assert code(page) == code(page.replace("# what", "# something else"))
    assert links(page, "docs/guide/zh/a.md") == links(page, "docs/guide/a.md") == ["docs/guide/x.md"]
