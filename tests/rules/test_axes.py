"""An axis of the mesh is named in few files, and docs/add-an-axis.md lists them."""

import ast
import re

from tests.rules.source import PACKAGE, ROOT, modules

AXIS = "etp"
MAX_FILES = 7
# to train along an axis does not need them
APART = (f"{PACKAGE}/planner/", f"{PACKAGE}/profile/")


def names(tree: ast.AST) -> bool:
    """Whether code or texts name the axis."""
    for node in ast.walk(tree):
        texts = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
        texts += [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        if any(re.search(rf"(^|[^a-z]){AXIS}([^a-z]|$)", text) for text in texts):
            return True
    return False


def test_the_page_lists_the_files_that_name_an_axis() -> None:
    page = (ROOT / "docs" / "add-an-axis.md").read_text(encoding="utf-8")
    listed = re.findall(rf"^\| `({PACKAGE}/[^`]*)`", page, re.MULTILINE)
    naming = [module.place for module in modules() if names(module.tree)]
    assert sorted(listed) == sorted(naming)
    assert len([place for place in naming if not place.startswith(APART)]) <= MAX_FILES


def test_names_are_found() -> None:
    assert names(ast.parse("mesh.etp"))
    assert names(ast.parse("axes = ('ep', 'etp')"))
    assert not names(ast.parse("setpoint = depth"))
