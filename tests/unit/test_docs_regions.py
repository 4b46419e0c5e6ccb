"""What commands print on the pages is what they print."""

from pathlib import Path

import pytest

from scripts.docs_pages import ROOT, pages, regions
from scripts.docs_regions import agrees, rewritten, table_of

TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in pages()}
FAST = [name for name, text in TEXTS.items() if regions(text)]
SLOW = [name for name in FAST if any("slow" in region.option for region in regions(TEXTS[name]))]


@pytest.mark.parametrize("page", FAST)
def test_pages_show_what_is_printed(page: str) -> None:
    assert rewritten(TEXTS[page]) == TEXTS[page], "make docs-regions writes it anew"


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_pages_show_what_slow_commands_print(page: str) -> None:
    assert rewritten(TEXTS[page], slow=True) == TEXTS[page], "make docs-regions writes it anew"


PAGE = """\
# A page

<!-- file: say.py -->

    import sys

    print("one\\n\\ntwo", *sys.argv[1:])

<!-- end of file -->

<!-- run -->

    $ python say.py \\
        three  # in two lines
    old
    $ python say.py | grep -n two | head -n 1

<!-- end of run -->

<!-- run: exit 2, slow -->

    $ amt config check no.yaml

<!-- end of run -->
"""


def test_regions_are_written_anew() -> None:
    new = rewritten(PAGE)
    assert new == PAGE.replace("    old\n    $", "    one\n\n    two three\n\n    $").replace(
        "head -n 1\n", "head -n 1\n    3:two\n"
    )
    assert rewritten(new) == new
    error = "    error: no.yaml: cannot be read: No such file or directory\n"
    assert rewritten(new, slow=True) == new.replace("no.yaml\n", f"no.yaml\n{error}")


def test_what_varies_is_left_alone() -> None:
    page = PAGE.replace("    old\n", "    one\n    ...\n    tw... three\n\n").replace(
        "head -n 1\n", "head -n 1\n    3:two\n"
    )
    assert rewritten(page) == page


@pytest.mark.parametrize(
    ("shown", "printed", "is_same"),
    [
        ("a\nb", "a\nb", True),
        ("a\nb", "a\nc", False),
        ("a", "a\nb", False),
        ("a\n...", "a\nb\nc", True),
        ("a\n...\nd", "a\nd", True),
        ("a\n...\nd", "a\nb", False),
        ("took ... s, (1)", "took 3.2 s, (1)", True),
        ("took ... s", "took 3.2 ms", False),
        ("x...y", "x\ny", False),
        ("", "", True),
        ("", "a", False),
    ],
)
def test_agreement(shown: str, printed: str, is_same: bool) -> None:
    assert agrees(shown, printed) is is_same


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("<!-- run -->\n\n    $ amt version\n", "has no <!-- end of run -->"),
        ("<!-- run -->\n<!-- file: x -->\n<!-- end of file -->\n", "has no <!-- end of run -->"),
        ("<!-- run -->\n\n$ amt version\n\n<!-- end of run -->\n", "not indented"),
        ("<!-- run -->\n\n    what it prints\n\n<!-- end of run -->\n", "begins with"),
        ("<!-- run -->\n\n    $ rm -r x\n\n<!-- end of run -->\n", "nothing else"),
        ("<!-- run -->\n\n    $ amt version | sh\n\n<!-- end of run -->\n", "nothing else"),
        ("<!-- run -->\n\n    $ amt config check no.yaml\n\n<!-- end of run -->\n", "exit code 2, not 0"),
    ],
)
def test_bad_regions_are_refused(page: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rewritten(page)


def test_tables_are_those_of_the_benchmarks() -> None:
    place = "benchmarks/ranks.md"
    page = rewritten(f"<!-- table: {place} -->\n\n| old |\n\n<!-- end of table -->\n")
    assert "| old |" not in page
    original = Path(ROOT, place).read_text(encoding="utf-8")
    assert "\n".join(line for line in table_of(place) if line.startswith("|")) in original
    assert "\n".join(table_of(place)) in page
    assert "Measured on: date" in page
