import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_moe_train.cli import main as cli
from ascend_moe_train.strict_yaml import read_text

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "demo.yaml")


def test_show_prints_yaml_with_counts_as_comments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", EXAMPLE, "--set", "run.steps=77"]) == 0
    output = capsys.readouterr().out
    shown = read_text(output, "output").value
    assert isinstance(shown, dict)
    assert isinstance(shown["run"], dict)
    assert shown["run"]["steps"] == 77
    assert "# active_parameters: " in output


def test_show_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", EXAMPLE, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["counts"]["parameters"] > shown["counts"]["active_parameters"] > 1e6
    assert shown["config"]["model"]["moe"]["num_experts"] == 8


def test_check_says_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", EXAMPLE]) == 0
    assert capsys.readouterr().out.startswith(f"{EXAMPLE}: good. ")


def test_version_names_every_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("python", "ascend-moe-train", "mindspore", "numpy"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "prepare", "--source", "a.md", "b.md", "--out", "x"], "--source takes one name"),
        (["cofnig"], "unknown command 'cofnig': did you mean 'config'?"),
        (["xyzzy"], "unknown command 'xyzzy': there are "),
        (["config", "show"], "Missing argument 'RUN_YAML'."),
        (["config", "show", EXAMPLE, "--sett", "a=b"], "No such option"),
        (["config", "check", "absent.yaml"], "absent.yaml: cannot be read: No such file or directory"),
        (["config", "check", "ab\nsent.yaml"], "ab sent.yaml: cannot be read"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {message}")
    assert output.err.count("\n") == 1


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.amt, "main", interrupted)
    assert cli.main([]) == 130


@pytest.mark.parametrize("reason", ["", "Unable to allocate 11.6 TiB"])
def test_no_memory_is_one_line(
    reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(**_: object) -> None:
        raise MemoryError(reason)

    monkeypatch.setattr(cli.amt, "main", full)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == f"error: out of memory{reason and ': '}{reason}\n"


def test_closed_pipe_is_silent() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-c", "from ascend_moe_train.cli.main import run; run()", "version"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")
