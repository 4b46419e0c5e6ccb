"""One-file HTML pages: what is put into a template, escaped for where it stands. Pure."""

import base64
import hashlib
import html
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence

_MARKER = re.compile(r"\{\{(\w+)\}\}")


def asset(package: str, name: str) -> str:
    """The text of a file in the folder `assets` of a package."""
    return importlib.resources.files(package).joinpath("assets", name).read_text("utf-8")


def filled(template: str, parts: Mapping[str, str]) -> str:
    """The template with every {{name}} replaced, in one pass: a marker inside what is put in stays text."""
    return printable(_MARKER.sub(lambda marker: parts[marker[1]], template))


def policy_hash(text: str) -> str:
    """How a content security policy names an inline block (CSP level 2, section 4.2.5)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def script_json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def printable(text: str) -> str:
    """Control characters, which HTML does not allow, and lone surrogates replaced."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", text.replace("\r\n", "\n"))


def card(title: str, body: str) -> str:
    """A section with a heading; `body` is HTML."""
    return f'<section class="card"><h2>{html.escape(title)}</h2>{body}</section>'


def cell(text: str) -> str:
    """A cell of a table, of any text."""
    return f"<td>{html.escape(text)}</td>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells, which are HTML, under heads, which are any text."""
    head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
