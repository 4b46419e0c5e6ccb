"""Files stay under 400 lines and functions under 60, without exceptions."""

import ast

from tests.rules.source import everything

MAX_FILE_LINES = 399
MAX_FUNCTION_LINES = 59


def test_files_are_short() -> None:
    lengths = {module.place: len(module.text.splitlines()) for module in everything()}
    assert {place: length for place, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = [
        f"{module.place}:{node.lineno} {node.name} {node.end_lineno - node.lineno + 1}"
        for module in everything()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []
