"""docs/ascend-settings.md: the keys are those of the section, the guide's switches are as MindSpore has them."""

import importlib
import re
from pathlib import Path
from typing import Any

import mindspore
import pytest
from mindspore import context
from mindspore.parallel import _auto_parallel_context
from mindspore.parallel.cluster import run

from ascend_moe_train.config_error import known_keys
from ascend_moe_train.train.config import AscendConfig

PAGE = Path(__file__).parents[2] / "docs" / "ascend-settings.md"


def rows(heading: str) -> list[list[str]]:
    """The cells of each row of the table below a heading."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def is_there(switch: str, options: str) -> bool:
    """Whether the installed MindSpore knows a dotted name, a keyword of one of its contexts, or an option of msrun."""
    if switch.startswith("msrun "):
        return bool(re.search(rf"{switch.removeprefix('msrun ')}\b", options))
    name, _, keyword = switch.removesuffix("=)").partition("(")
    if keyword:
        known: dict[str, Any] = {
            "mindspore.set_context": (
                *context._Context.setters,
                *dir(context._Context),
                *context.ms_ctx_param.__members__,
            ),
            "mindspore.set_auto_parallel_context": _auto_parallel_context._set_auto_parallel_context_func_map,
        }
        return keyword in known[name]
    found: Any = mindspore
    path = "mindspore"
    for word in name.split(".")[1:]:
        path += f".{word}"
        if not hasattr(found, word):
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
        else:
            found = getattr(found, word)
    return True


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `msrun --help` prints."""
    monkeypatch.setattr("sys.argv", ["msrun", "--help"])
    with pytest.raises(SystemExit):
        run.get_args()
    return capsys.readouterr().out


def test_the_guides_switches_are_as_the_page_says(options: str) -> None:
    table = rows("The guide's switches")
    assert len(table) > 20
    said = {cells[0].strip("`"): cells[1].split(",")[0].split(":")[0].split(";")[0] for cells in table}
    assert set(said.values()) == {"yes", "no"}
    assert said == {switch: "yes" if is_there(switch, options) else "no" for switch in said}


def test_the_page_has_every_key_with_its_default() -> None:
    said = {cells[0].strip("`"): cells[1].strip("`") for cells in rows("Keys")}
    config = AscendConfig()
    keys = [key for key in known_keys(AscendConfig) if key != "hccl"]
    values = {key: config.hccl if key.startswith("hccl.") else config for key in keys}
    defaults = {key: getattr(part, key.rpartition(".")[2]) for key, part in values.items()}
    words: dict[object, str] = {None: "null", False: "false"}
    assert said == {key: words.get(value) or str(value) for key, value in defaults.items()}


def test_msrun_has_the_options_for_binding_that_the_page_names(options: str) -> None:
    assert is_there("msrun --bind_core", options)
    assert is_there("msrun --bind_numa", options)
