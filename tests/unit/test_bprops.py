"""Cells with a backward pass of their own call no function of MindSpore that is more than its operator.

In such a cell MindSpore (2.10) may lose the graph of a function that decides something or makes its operator when it is
called: the gradient does not compile then, sometimes, with an error that MindSpore calls its own.
"""

import ast
import inspect
import os
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")

import pytest
from mindspore import ops

PACKAGE = Path(__file__).parents[2] / "ascend_moe_train"
DECIDES = (ast.If, ast.IfExp, ast.For, ast.While, ast.BoolOp)


def is_plain(name: str) -> bool:
    """Whether ops.`name` is an operator, or a function that only calls one."""
    found = getattr(ops, name)
    if not inspect.isfunction(found):
        return True
    (function,) = ast.parse(inspect.getsource(found)).body
    nodes = [*ast.walk(function)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return "_get_cache_prim" not in names and not any(isinstance(node, DECIDES) for node in nodes)


def called(tree: ast.Module) -> dict[str, ast.AST]:
    """What a module's code may call, by name: its functions and methods, and functions imported from the package."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE.name):
            path = PACKAGE.parent.joinpath(*node.module.split(".")).with_suffix(".py")
            names = {each.name for each in node.names}
            if path.exists():
                found |= {
                    name: each for name, each in functions_of(ast.parse(path.read_text())).items() if name in names
                }
        elif isinstance(node, ast.ClassDef):
            found |= {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    return found | functions_of(tree)


def functions_of(tree: ast.Module) -> dict[str, ast.AST]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def used(tree: ast.Module) -> dict[str, set[str]]:
    """What a module's classes with a bprop use of `ops`, with all that they may call, by name."""
    functions = called(tree)
    found: dict[str, set[str]] = {}
    for cell in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        methods = [node for node in cell.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
        if not any(method.name == "bprop" for method in methods):
            continue
        todo: list[ast.AST] = [*methods]
        seen: set[str] = set()
        found[cell.name] = set()
        while todo:
            for node in ast.walk(todo.pop()):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ops":
                    found[cell.name].add(node.attr)
                    continue
                name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
                if name in functions and name not in seen and not name.startswith("__"):
                    seen.add(name)
                    todo.append(functions[name])
    return found


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if "def bprop" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_only_plain_operators(path: Path) -> None:
    cells = used(ast.parse(path.read_text(encoding="utf-8")))
    assert cells
    wrong = {cell: {name for name in names if not is_plain(name)} for cell, names in cells.items()}
    assert not any(wrong.values()), wrong


# of other modules, what autodiff's exchange of rows calls
CALLED = {
    "parallel/rows_wire.py": ("InBf16", "InCodes", "ScaledFp16", "_as_bf16"),
    "parallel/scaled.py": ("PowerOfTwo",),
    "optim/codecs.py": ("Int8Blocks",),
}


@pytest.mark.parametrize("place", CALLED)
def test_what_moves_rows_calls_only_plain_operators(place: str) -> None:
    names = set()
    tree = ast.parse((PACKAGE / place).read_text(encoding="utf-8"))
    parts = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for part in CALLED[place]:
        methods = [node for node in ast.walk(parts[part]) if isinstance(node, ast.FunctionDef)]
        for node in (node for method in methods if method.name != "__init__" for node in ast.walk(method)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ops":
                names.add(node.attr)
    assert {name for name in names if not is_plain(name)} == set()
    assert names or place == "parallel/scaled.py"


def test_others_are_seen() -> None:
    text = """
class A:
    def construct(self, x):
        return f(x)
    def bprop(self, x, out, dout):
        return ops.exp(dout)
def f(x):
    return ops.gather(x, x, 0)
"""
    assert used(ast.parse(text)) == {"A": {"exp", "gather"}}
    assert [name for name in ("exp", "gather", "full_like", "softmax", "Gather", "reshape") if not is_plain(name)] == [
        "gather",
        "full_like",
        "softmax",
    ]
