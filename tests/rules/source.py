"""The package's modules as syntax trees, for the rules to read."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "ascend_moe_train"


@dataclass(frozen=True, kw_only=True)
class Module:
    """One file: its dotted name, path, text and tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def place(self) -> str:
        """The path from the root of the repository."""
        return str(self.path.relative_to(ROOT))


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """Every Python file below the folders (default: the package)."""
    paths = sorted(path for folder in folders or (PACKAGE,) for path in (ROOT / folder).rglob("*.py"))
    return tuple(_read(path) for path in paths)


def everything() -> tuple[Module, ...]:
    """Every Python file of the repository."""
    return modules(PACKAGE, "tests", "scripts", "benchmarks")


def _read(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    words = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(words[:-1] if words[-1] == "__init__" else words)
    return Module(name=name, path=path, text=text, tree=ast.parse(text))


def imports(tree: ast.AST) -> set[str]:
    """Dotted names imported anywhere in the tree, inside functions too; `from a import b` gives a and a.b."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found
