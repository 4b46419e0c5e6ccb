"""Commands, run files and keys on the pages are those that there are."""

from pathlib import Path

import pytest

from ascend_moe_train.errors import ConfigError
from scripts.docs_commands import check_yaml, commands, complaint, unknown_inline, yaml_blocks
from scripts.docs_hook import outside
from scripts.docs_pages import ROOT, pages

PAGES = sorted({path.relative_to(ROOT).as_posix() for path in pages()} | set(outside()))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str) -> None:
    text = Path(ROOT, page).read_text(encoding="utf-8")
    wrong = [(line.number, found) for line in commands(text) if (found := complaint(line.words))]
    assert wrong == []
    assert unknown_inline(text) == []
    for _, block in yaml_blocks(text):
        check_yaml(block)


def test_there_are_commands_and_run_files_to_check() -> None:
    texts = [path.read_text(encoding="utf-8") for path in pages()]
    assert sum(len(list(commands(text))) for text in texts) > 60
    assert sum(len(list(yaml_blocks(text))) for text in texts) > 4


SAMPLE = """\
`amt plann`, `amt launch --starter msrun`, `amt plan sweep --wary x`, `parallel.zero`, `amt data`, `data.train.0.path`

    .venv/bin/amt launch --ranks 2 \\
        train run.yaml   # on two
    $ amt mesh run.yaml
    what it prints
    $ amt config show run.yaml | head -n 3

```text
amt launch   starts, watches
```

- a list

      make nothing

<!-- run: exit 2 -->

    $ amt config check no.yaml --such

<!-- end of run -->

    run: {dir: x, stepps: 3}
"""


def test_what_is_a_command() -> None:
    found = {line.number: line.words for line in commands(SAMPLE)}
    assert found == {
        3: ("amt", "launch", "--ranks", "2", "train", "run.yaml"),
        5: ("amt", "mesh", "run.yaml"),
        7: ("amt", "config", "show", "run.yaml"),
    }


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("amt mesh run.yaml", "--ranks"),
        ("amt plan --modell x --cluster 8xcpu", "--modell"),
        ("amt pplan", "did you mean 'plan'"),
        ("amt launch --ranks 2 trian run.yaml", "trian"),
        ("amt launch --ranks two train run.yaml", "two"),
        ("amt train run.yaml --set parallel.zero_stage=4", "parallel.zero_stage"),
        ("amt train run.yaml --set paralel.tp=4", "paralel"),
        ("amt plan --model mixtral_8x7b --cluster 8x910B --set model.moe.experts=3", "model.moe.experts"),
        ("make demos", "make demos"),
        ("python -m benchmarks.no_such", "benchmarks.no_such"),
    ],
)
def test_mistakes_are_seen(command: str, words: str) -> None:
    assert words in (complaint(tuple(command.split())) or "")


@pytest.mark.parametrize(
    "command",
    [
        "amt launch --ranks 4 train run.yaml --set parallel.tp=2",
        "amt plan check planned.yaml --cluster 8xcpu",
        "amt plan --model mixtral_8x7b --cluster 8x910B --set model.moe.top_k=4",
        "make demo PYTHON=python3.12",
        "python -m benchmarks --rounds 3",
        "python -m pytest tests/unit/test_merge.py",
    ],
)
def test_good_ones_pass(command: str) -> None:
    assert complaint(tuple(command.split())) is None


def test_inline_mistakes_are_seen() -> None:
    assert [found.partition(": ")[2] for found in unknown_inline(SAMPLE)] == [
        "no verb plann",
        "no option --wary",
        "no run has the key parallel.zero",
    ]


def test_run_files_are_checked() -> None:
    ((number, block),) = yaml_blocks(SAMPLE)
    assert number == 23
    with pytest.raises(ConfigError, match=r"run\.steps"):
        check_yaml(block)
