"""Imports go one way, pure modules need no framework, and model code is single-device code."""

import ast
import fnmatch
import re
import subprocess
import sys

import pytest

from tests.rules.source import PACKAGE, ROOT, Module, imports, modules

# These import neither MindSpore nor MPI, not even inside a function; nor does any module whose docstring says "Pure.".
PURE = [
    "*.py",
    "*/config.py",
    "model/counts.py",
    "model/adapters.py",
    "parallel/__init__.py",
    "parallel/mesh.py",
    "parallel/mesh_map.py",
    "parallel/cuts.py",
    "parallel/shards.py",
    "parallel/comm.py",
    "cluster/*.py",
    "optim/lr.py",
    "planner/*.py",
    "profile/*.py",
    "doctor/*.py",
    "data/*.py",
    "checkpoint/*.py",
    "cli/__init__.py",
    "cli/bench.py",
    "cli/main.py",
    "cli/config.py",
    "cli/convert.py",
    "cli/data.py",
    "cli/doctor.py",
    "cli/mesh.py",
    "cli/out_file.py",
    "cli/profile.py",
    "cli/schedule.py",
    "cli/selftest.py",
    "cli/long_run.py",
    "cli/version.py",
    "train/live.py",
    "train/metrics.py",
    "train/re*.py",
    "train/run_info.py",
    "train/tensorboard.py",
]
FRAMEWORKS = ("mindspore", "mpi4py")
TRAIN_EXTRA = (*FRAMEWORKS, "mpich", "tensorboard")

PURE_MODEL = (["model", "counts"], ["model", "adapters"])
# What each folder may import; "pure" stands for the modules at the top, every config.py, and those two.
MAY_IMPORT = {
    "pure": {"pure"},
    "model": {"pure", "model"},
    "data": {"pure", "data"},
    "optim": {"pure", "model", "optim"},
    "checkpoint": {"pure", "model", "checkpoint"},
    "parallel": {"pure", "model", "optim", "parallel"},
    "cluster": {"pure", "cluster"},
    "planner": {"pure", "parallel", "planner"},
    "profile": {"pure", "parallel", "planner", "profile"},
    "doctor": {"pure", "cluster", "planner", "doctor"},
    "train": {"pure", "model", "data", "optim", "checkpoint", "parallel", "cluster", "profile", "train"},
    "selftest": {"pure", "model", "data", "optim", "checkpoint", "parallel", "cluster", "train", "selftest"},
    "bench": {"pure", "model", "data", "optim", "checkpoint", "parallel", "cluster", "planner", "train", "bench"},
    "cli": {
        "pure",
        "model",
        "data",
        "optim",
        "checkpoint",
        "parallel",
        "cluster",
        "planner",
        "profile",
        "doctor",
        "train",
        "selftest",
        "bench",
        "cli",
    },
}

MANY_DEVICE_WORDS = re.compile(
    r"(^|_)(ranks?|group|mesh|backend|shard(s|ed|ing)?|world|parallel|tp|dp|ep|pp|cp|sp|hccl|mccl|mpi|allreduce|"
    r"all_reduce|all_gather|all_to_all|reduce_scatter)(_|$)",
    re.IGNORECASE,
)

BLOCKER = """
import importlib, importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked by the test")

sys.meta_path.insert(0, Blocker())
"""


def is_pure(module: Module) -> bool:
    place = module.place.removeprefix(f"{PACKAGE}/")
    listed = any(fnmatch.fnmatchcase(place, each) and place.count("/") == each.count("/") for each in PURE)
    return listed or "Pure." in (ast.get_docstring(module.tree) or "")


def folder_of(name: str) -> str:
    words = name.split(".")[1:]
    is_section = words[-1] == "config" and words[0] != "cli"
    return "pure" if len(words) == 1 or is_section or words in PURE_MODEL else words[0]


def leaks(tree: ast.AST) -> set[str]:
    """Identifiers and imported modules that speak of more than one device."""
    names = set(imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return {name for name in names if any(MANY_DEVICE_WORDS.search(_snake(word)) for word in name.split("."))}


def _snake(word: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word)


def run_blocked(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"BLOCKED = {blocked!r}\n{BLOCKER}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_pure_modules_import_without_frameworks() -> None:
    pure = [module.name for module in modules() if is_pure(module)]
    assert {f"{PACKAGE}.config", f"{PACKAGE}.model.counts", f"{PACKAGE}.cli.main"} <= set(pure)
    code = f"for name in {pure!r}:\n    print(name, flush=True)\n    importlib.import_module(name)"
    done = run_blocked(FRAMEWORKS, code)
    assert done.returncode == 0, f"importing {done.stdout.split()[-1]}: {done.stderr.splitlines()[-1]}"


def test_pure_modules_name_no_framework() -> None:
    found = [
        f"{module.place} imports {name}"
        for module in modules()
        if is_pure(module)
        for name in imports(module.tree)
        if name.partition(".")[0] in FRAMEWORKS
    ]
    assert found == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["version"],
        ["config", "check", "examples/demo.yaml"],
        ["mesh", "examples/demo.yaml", "--ranks", "4", "--set", "batch.micro_sequences=2"],
        ["schedule", "--name", "1f1b", "--stages", "4", "--micro", "8"],
        ["check", "versions"],
        ["doctor", "explain", "EI0006"],
    ],
)
def test_base_install_serves(arguments: list[str]) -> None:
    code = f"from {PACKAGE}.cli.main import main\nsys.exit(main({arguments!r}))"
    done = run_blocked(TRAIN_EXTRA, code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_blocker_blocks() -> None:
    assert "blocked by the test" in run_blocked(FRAMEWORKS, "import mindspore").stderr


def test_help_loads_nothing_heavy() -> None:
    code = (
        f"from {PACKAGE}.cli.main import main\nmain(['--help'])\n"
        "print([name for name in ('numpy', 'pydantic', 'rich', 'tokenizers', 'yaml') if name in sys.modules])"
    )
    assert run_blocked((), code).stdout.splitlines()[-1] == "[]"


def test_imports_go_one_way() -> None:
    folder = {module.name: folder_of(module.name) for module in modules() if module.path.name != "__init__.py"}
    found = [
        f"{module.place} imports {name}"
        for module in modules()
        for name in imports(module.tree) & set(folder)
        if module.name not in folder or folder[name] not in MAY_IMPORT[folder[module.name]]
    ]
    assert found == []


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("a.units", "pure"),
        ("a.model.config", "pure"),
        ("a.model.counts", "pure"),
        ("a.model.kernels.x", "model"),
        ("a.cli.config", "cli"),
        ("a.train.loop", "train"),
    ],
)
def test_folders(name: str, folder: str) -> None:
    assert folder_of(name) == folder


def test_model_code_is_single_device_code() -> None:
    found = {module.place: leaked for module in modules(f"{PACKAGE}/model") if (leaked := leaks(module.tree))}
    assert found == {}


@pytest.mark.parametrize(
    "code",
    [
        "def f(tp_size): ...",
        "x = self.mesh",
        "g = ep_group",
        "import mpi4py.MPI as x",
        "f(world_size=2)",
        "ops.AllGather",
    ],
)
def test_leaks_are_seen(code: str) -> None:
    assert leaks(ast.parse(code))


@pytest.mark.parametrize("code", ["def grouped_matmul(x_TD): ...", "self.num_groups", "step(sparse=1)", "dropout"])
def test_single_device_names_pass(code: str) -> None:
    assert not leaks(ast.parse(code))
