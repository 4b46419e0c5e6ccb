"""What comes from outside is only data; and what a linter is told to overlook says why."""

import ast
import io
import re
import tokenize

import pytest

from tests.rules.source import everything

# Ways to run what was read, and readers that do.
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "torch.load",
    "ms.load_checkpoint",
    "mindspore.load_checkpoint",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_ARGUMENTS = {"shell", "allow_pickle"}

UNEXPLAINED = re.compile(r"#\s*(noqa|type:\s*ignore)(:?\s*[A-Z]+[0-9]+|\[[a-z, -]+\])?\s*$")


def dangers(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_IMPORTS]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module] if node.module.split(".")[0] in FORBIDDEN_IMPORTS else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if name in FORBIDDEN_CALLS else []
            found += [
                f"{name}({keyword.arg}=...)"
                for keyword in node.keywords
                if keyword.arg in FORBIDDEN_ARGUMENTS
                and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
            ]
    return found


def test_nothing_read_is_run() -> None:
    assert {module.place: found for module in everything() if (found := dangers(module.tree))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "eval('1')",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "np.load(f, allow_pickle=flag)",
        "yaml.load(text, Loader)",
    ],
)
def test_dangers_are_seen(code: str) -> None:
    assert len(dangers(ast.parse(code))) == 1


def test_safe_spellings_pass() -> None:
    assert dangers(ast.parse("re.compile('x'); model.eval(); np.load(f, allow_pickle=False); run(shell=False)")) == []


def unexplained(text: str) -> list[str]:
    comments = [
        token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    return [f"{token.start[0]}: {token.string}" for token in comments if UNEXPLAINED.search(token.string)]


def test_exemptions_say_why() -> None:
    assert {module.place: found for module in everything() if (found := unexplained(module.text))} == {}


def test_unexplained_exemptions_are_seen() -> None:
    text = "a  # noqa: E501\nb  # type: ignore[misc]\nc  # type: ignore[misc]  # the base is Any\n'# noqa'\n"
    assert unexplained(text) == ["1: # noqa: E501", "2: # type: ignore[misc]"]
