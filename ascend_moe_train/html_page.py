"""One-file HTML pages: what is put into a template, escaped for where it stands. Pure."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping

_MARKER = re.compile(r"\{\{(\w+)\}\}")


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
