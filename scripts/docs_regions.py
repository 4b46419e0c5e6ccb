"""Runs the commands that stand in marked regions of the pages, and writes what they print below them.

From the root of the repository:

    python -m scripts.docs_regions [--slow] [PAGE ...]

A region is an indented block between two comments, which no reader sees:

    <!-- run -->                                   <!-- file: run.yaml -->

        $ amt config check run.yaml                    run: {dir: runs/a, steps: 10}
        run.yaml: good. ...
                                                   <!-- end of file -->
    <!-- end of run -->

All commands of a page run one after the other in one folder that has the page's files and copies of examples/, docs/
and benchmarks/. They are `amt` and `python`, without a shell, and may be piped into grep, head and tail.
`<!-- run: exit 2 -->` is for one that is refused. `...` on a page stands for whatever varies, in a line or as a line
for several; an output that agrees with what is there is left alone. Regions that are `slow` run with --slow only.
`<!-- not run: WHY -->` is before a block that is neither run nor a command (scripts/docs_commands.py holds those).
`<!-- table: benchmarks/x.md -->` holds the table of that page, and what it was measured on; `<!-- ratios: en -->` (or
zh) the ratios of all of them (scripts/docs_ratios.py).

tests/unit/test_docs_regions.py compares, `make docs-regions` rewrites.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from scripts.docs_pages import INDENT, PROMPT, ROOT, Region, joined, pages, regions, with_regions
from scripts.docs_ratios import ratios

PROGRAMS = {
    "amt": [sys.executable, "-c", "from ascend_moe_train.cli.main import run; run()"],
    "python": [sys.executable],
}
FILTERS = ("grep", "head", "tail")
LIMIT_S = 1800
ANY = "..."


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command of a page that should end with `exit_code`, or a file of it with its text."""

    command: str = ""
    exit_code: int = 0
    file: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step stands on a page: the lines of its command, and those below that show what it prints."""

    region: Region
    step: Step
    prompt: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()


def places(text: str, *, slow: bool) -> list[Place]:
    """The files and commands of a page, in order."""
    found: list[Place] = []
    for region in regions(text):
        if region.kind == "file":
            text_of_file = "\n".join(region.code) + "\n"
            found.append(Place(region=region, step=Step(file=region.option, text=text_of_file)))
        elif region.kind == "run" and (slow or "slow" not in region.option):
            found += _commands(region)
    return found


def _commands(region: Region) -> Iterator[Place]:
    code = region.code
    exit_code = int(match[1]) if (match := re.search(r"exit (\d+)", region.option)) else 0
    begins = [at for at, line in joined(code) if line.startswith(PROMPT)]
    if begins[:1] != [0]:
        raise ValueError(f"line {region.first}: a region that is run begins with {PROMPT!r} and a command")
    for begin, end in pairwise([*begins, len(code)]):
        (_, command), *rest = joined(code[begin:end])
        stop = begin + rest[0][0] if rest else end
        yield Place(
            region=region,
            step=Step(command=command.removeprefix(PROMPT), exit_code=exit_code),
            prompt=tuple(code[begin:stop]),
            shown=tuple("\n".join(code[stop:end]).rstrip().splitlines()),
        )


@cache
def outputs(todo: tuple[Step, ...]) -> tuple[str, ...]:
    """What each step prints; pages in two languages have the same steps, which then run once. Raises ValueError for a
    command that cannot be run, or that ends otherwise than it should."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("examples", "docs", "benchmarks"):
            shutil.copytree(ROOT / part, folder / part)
        printed = []
        for step in todo:
            if step.file:
                (folder / step.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / step.file).write_text(step.text, encoding="utf-8")
            printed.append(_printed(step, folder) if step.command else "")
        return tuple(printed)


def _printed(step: Step, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1", "GLOG_v": "3"}
    first, *filters = _pipeline(step.command)
    done = subprocess.run(
        [*PROGRAMS[first[0]], *first[1:]],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode != step.exit_code:
        raise ValueError(f"{step.command}: exit code {done.returncode}, not {step.exit_code}:\n{done.stdout}")
    text = done.stdout
    for words in filters:
        text = subprocess.run(words, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _pipeline(command: str) -> list[list[str]]:
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if word == "|":
            parts.append([])
        else:
            parts[-1].append(word)
    programs = [part[0] if part else "" for part in parts]
    if programs[0] not in PROGRAMS or not set(programs[1:]) <= set(FILTERS):
        raise ValueError(f"{command}: runs {', '.join(PROGRAMS)}, piped into {', '.join(FILTERS)}; nothing else")
    return parts


def agrees(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed, but for what `...` stands for."""
    lines = [
        r"(?:[^\n]*\n)*?" if line.strip() == ANY else ".*?".join(map(re.escape, line.split(ANY))) + r"\n"
        for line in shown.splitlines()
    ]
    return re.fullmatch("".join(lines), printed + "\n" if printed else "") is not None


def table_of(place: str) -> list[str]:
    """The table of a page of benchmarks/, and the line that says what it was measured on."""
    lines = (ROOT / place).read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("|")]
    return [*table, "", *(line for line in lines if line.startswith("Measured on: "))]


def rewritten(text: str, *, slow: bool = False) -> str:
    """The page with what its commands print now."""
    todo = places(text, slow=slow)
    contents: dict[Region, list[str]] = {}
    for place, printed in zip(todo, outputs(tuple(place.step for place in todo)), strict=True):
        if place.step.command:
            new = place.shown if agrees("\n".join(place.shown), printed) else printed.splitlines()
            before = contents.setdefault(place.region, [])
            before += [*([""] if before else []), *place.prompt, *new]
    indented = [(region, [f"{INDENT}{line}".rstrip() for line in lines]) for region, lines in contents.items()]
    tables = [(region, table_of(region.option)) for region in regions(text) if region.kind == "table"]
    tables += [(region, ratios(region.option)) for region in regions(text) if region.kind == "ratios"]
    return with_regions(text, [*indented, *tables])


def main() -> None:
    """Rewrite pages."""
    names = [word for word in sys.argv[1:] if word != "--slow"]
    for page in map(Path, names) if names else pages():
        text = page.read_text(encoding="utf-8")
        new = rewritten(text, slow="--slow" in sys.argv)
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page}: rewritten")


if __name__ == "__main__":
    main()
