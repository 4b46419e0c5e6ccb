"""The pages of the documentation as text: their code blocks, and the regions that commands are run for."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
INDENT = "    "
BEGIN = re.compile(r"<!-- (run|file|table|ratios|demo)(?:: (.+))? -->")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
FENCE = re.compile(r"( *)(```+)(\w*)")
PROMPT = "$ "


@dataclass(frozen=True, kw_only=True)
class Region:
    """What is between `<!-- kind: option -->` and `<!-- end of kind -->`, in lines [first, stop) of the page."""

    kind: str
    option: str
    first: int
    stop: int
    lines: tuple[str, ...]

    @property
    def code(self) -> list[str]:
        """The lines of its code block, without the indentation. Raises ValueError: a line is not part of one."""
        for number, line in enumerate(self.lines, self.first + 1):
            if line and not line.startswith(INDENT):
                raise ValueError(f"line {number}: {line!r} is not indented by {len(INDENT)}, as all of a region is")
        return "\n".join(line.removeprefix(INDENT) for line in self.lines).strip("\n").splitlines()


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block: its language ("" where none is named), the number of its first line from 1, and its lines."""

    language: str
    first: int
    lines: tuple[str, ...]


def pages() -> list[Path]:
    """Every page that tells users what to do: the READMEs and docs/."""
    return [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def regions(text: str) -> list[Region]:
    """Those of a page, in order. Raises ValueError for one that does not end, or that another begins in."""
    found, lines, number = [], text.splitlines(), 0
    while number < len(lines):
        begin = BEGIN.fullmatch(lines[number])
        if begin is None:
            number += 1
            continue
        end = f"<!-- end of {begin[1]} -->"
        stop = next((at for at in range(number + 1, len(lines)) if _is_marker(lines[at])), None)
        if stop is None or lines[stop] != end:
            raise ValueError(f"line {number + 1}: {lines[number]} has no {end}")
        found.append(
            Region(
                kind=begin[1],
                option=begin[2] or "",
                first=number + 1,
                stop=stop,
                lines=tuple(lines[number + 1 : stop]),
            )
        )
        number = stop + 1
    return found


def _is_marker(line: str) -> bool:
    return BEGIN.fullmatch(line) is not None or line.startswith("<!-- end of ")


def with_regions(text: str, contents: Sequence[tuple[Region, Sequence[str]]]) -> str:
    """The page with other lines in some of its regions; a blank line stays in front of them and behind."""
    lines = text.splitlines()
    for region, content in sorted(contents, key=lambda each: -each[0].first):
        lines[region.first : region.stop] = ["", *content, ""]
    return "\n".join(lines) + "\n"


def blocks(text: str) -> Iterator[Block]:
    """The code blocks of a page, fenced or indented."""
    lines, number = text.splitlines(), 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is not None:
            stop = next(at for at in range(number + 1, len(lines)) if lines[at].strip() == fence[2])
            yield Block(language=fence[3], first=number + 2, lines=tuple(lines[number + 1 : stop]))
            number = stop + 1
        elif lines[number].startswith(INDENT) and (number == 0 or not lines[number - 1].strip()):
            stop = number
            while stop < len(lines) and (lines[stop].startswith(INDENT) or not lines[stop].strip()):
                stop += 1
            yield Block(
                language="", first=number + 1, lines=tuple(line.removeprefix(INDENT) for line in lines[number:stop])
            )
            number = stop
        else:
            number += 1


def reason_not_to_run(text: str, block: Block) -> str | None:
    """What `<!-- not run: ... -->` says on the line before the blank one, or the fence, before a block."""
    before = [line for line in text.splitlines()[: block.first - 1] if line.strip() and not FENCE.match(line)]
    marker = NOT_RUN.fullmatch(before[-1]) if before else None
    return marker[1] if marker else None


def without_code(text: str) -> str:
    """The page's prose: fenced and indented blocks left out."""
    lines = text.splitlines()
    for block in blocks(text):
        for at in range(block.first - 1, block.first - 1 + len(block.lines)):
            lines[at] = ""
    return "\n".join(lines)


def joined(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The lines with their numbers from 0, those that end in a backslash as one with what follows."""
    at = 0
    while at < len(lines):
        first, line = at, lines[at]
        while line.endswith("\\") and at + 1 < len(lines):
            at += 1
            line = line[:-1] + lines[at].strip()
        yield first, line
        at += 1
