"""No code on a page is held by nothing: it is run, or parsed as a command or a run file, or says why not."""

import re
from pathlib import Path

import pytest

from ascend_moe_train.cluster.hostfile import parse_hostfile
from scripts.docs_commands import unheld
from scripts.docs_hook import outside
from scripts.docs_pages import ROOT, blocks, pages, reason_not_to_run
from scripts.docs_regions import agrees

PAGES = {path.relative_to(ROOT).as_posix() for path in pages()} | set(outside())
TEXTS = {name: Path(ROOT, name).read_text(encoding="utf-8") for name in sorted(PAGES)}


@pytest.mark.parametrize("page", TEXTS)
def test_code_is_held(page: str) -> None:
    assert unheld(TEXTS[page]) == []


def test_what_stands_for_code_that_is_not_run_is_there() -> None:
    reasons = {why for text in TEXTS.values() for block in blocks(text) if (why := reason_not_to_run(text, block))}
    tests = {path for why in reasons for path in re.findall(r"[\w/]+\.py", why)}
    assert tests
    assert [path for path in tests if not (ROOT / path).exists()] == []


SAMPLE = """\
# A page

    amt version
    # a remark
    loose

<!-- run -->

    $ amt version
    what it prints

<!-- end of run -->

```text
a drawing
```

<!-- not run: a reason -->

    something else

```python
print()
```

    run: {dir: x}

<!-- not run: a reason -->

```python
print()
```
"""


def test_code_that_nothing_holds_is_seen() -> None:
    assert unheld(SAMPLE) == [(5, "loose"), (23, "print()")]


def block_with(page: str, line: str) -> str:
    (lines,) = [block.lines for block in blocks(TEXTS[page]) if line in "\n".join(block.lines)]
    return "\n".join(lines)


def test_the_hostfiles_of_the_pages_are_taken() -> None:
    hosts = parse_hostfile(block_with("docs/hostfile.md", "node[01-04,07]").encode(), "the page")
    assert len(hosts) == 8 + 5 + 1
    assert len(parse_hostfile(block_with("docs/launch.md", "node[01-04]").encode(), "the page")) == 4


def test_the_rule_on_the_page_is_one() -> None:
    rules = Path(ROOT, "ascend_moe_train/doctor/rules/mindspore.yaml").read_text(encoding="utf-8")
    of_file = "\n".join(line.strip() for line in rules.splitlines())
    shown = "\n".join(line.strip() for line in block_with("docs/doctor.md", "ms-occupied").splitlines())
    assert agrees(f"...\n{shown}\n...", of_file)
