"""Patterns of log lines: literal text with named gaps, found in linear time without regular expressions. Pure.

`timeout[{seconds} s] ... tag[{tag}]` is three kinds of things: text that has to be there as it is, `{name}` for what
stands there, and `...` for anything. Each piece of text is looked for from the end of the one before, once: no input
makes that more than linear.
"""

from dataclasses import dataclass

MIN_LITERAL = 4  # shorter text is everywhere in a log
MAX_CAPTURE = 200
GAP = "..."
NUMBERS = frozenset({"rank", "local", "size", "pid", "step", "index"})  # names that stand for whole numbers only


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Pieces of text; `names[i]` is what stands before piece i: a name, GAP, or None at the start."""

    text: str
    pieces: tuple[str, ...]
    names: tuple[str | None, ...]
    last: str | None  # the name of what follows the last piece

    @property
    def literal(self) -> str:
        """The longest piece: a line without it cannot match."""
        return max(self.pieces, key=len)

    def find(self, line: str) -> dict[str, str] | None:
        """What the names stand for in a line that matches; None for one that does not.

        A name at the end stands for one word. What is longer than MAX_CAPTURE characters does not match, nor do words
        where a number has to be.
        """
        found: dict[str, str] = {}
        at = 0
        for piece, name in zip(self.pieces, self.names, strict=True):
            start = _find(line, piece, at)
            if start < 0:
                return None
            if name is not None and name != GAP:
                if start - at > MAX_CAPTURE:
                    return None
                found[name] = line[at:start].strip()
            at = start + len(piece)
        if self.last is not None and self.last != GAP:
            words = line[at : at + MAX_CAPTURE].split(maxsplit=1)
            found[self.last] = words[0].strip("[](){},;:'\"").rstrip(".") if words else ""
        return found if all(text.isdecimal() for name, text in found.items() if name in NUMBERS) else None


def parsed(text: str) -> Pattern:
    """The pattern that a text describes. Raises ValueError: a brace without its partner, or too little literal text."""
    pieces: list[str] = []
    names: list[str | None] = []
    name: str | None = None
    for kind, word in _tokens(GAP.join(part.strip() for part in text.split(GAP)) if GAP in text else text):
        if kind == "text":
            pieces.append(word)
            names.append(name)
            name = None
        elif name is not None:
            raise ValueError(f"pattern {text!r}: text is needed between {name!r} and {word!r}")
        else:
            name = word
    if not pieces or max(map(len, pieces)) < MIN_LITERAL:
        raise ValueError(f"pattern {text!r}: at least {MIN_LITERAL} characters of text in a piece are needed")
    return Pattern(text=text, pieces=tuple(pieces), names=tuple(names), last=name)


def _tokens(text: str) -> list[tuple[str, str]]:
    """Text, names and gaps as they follow each other."""
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        ends = [place for place in (text.find("{", at), text.find(GAP, at)) if place >= 0]
        stop = min(ends, default=len(text))
        if stop > at:
            found.append(("text", text[at:stop]))
        if stop == len(text):
            break
        if text[stop] == "{":
            close = text.find("}", stop)
            name = text[stop + 1 : close]
            if close < 0 or not name.isidentifier():
                raise ValueError(f"pattern {text!r}: braces hold a name, such as {{seconds}}")
            found.append(("name", name))
            at = close + 1
        else:
            found.append(("gap", GAP))
            at = stop + len(GAP)
    return found


def _find(line: str, piece: str, at: int) -> int:
    """Where a piece begins; one that begins or ends with a digit is no part of a longer number."""
    while True:
        start = line.find(piece, at)
        if start < 0:
            return -1
        before, after = line[start - 1 : start], line[start + len(piece) : start + len(piece) + 1]
        splits = (piece[0].isdigit() and before.isdigit()) or (piece[-1].isdigit() and after.isdigit())
        if not splits:
            return start
        at = start + 1
