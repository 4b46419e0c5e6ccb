"""The facts of a run."""

import dataclasses
import json
from pathlib import Path

import pytest

from ascend_moe_train.errors import MetricsError
from ascend_moe_train.train import run_info
from ascend_moe_train.train.run_info import RunInfo, read_run_info, write_run_info

INFO = RunInfo(
    total_steps=600,
    parameters=8_000_000,
    active_parameters=3_000_000,
    flops_per_token=2.8e7,
    peak_flops_per_s=None,
    peak_source="unknown device",
    versions={"python": "3.11"},
)


def test_round_trip(tmp_path: Path) -> None:
    assert read_run_info(tmp_path) is None
    write_run_info(tmp_path, INFO)
    write_run_info(tmp_path, INFO)
    assert read_run_info(tmp_path) == INFO
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_versions() -> None:
    found = run_info.versions()
    assert {"python", "system", "processor", "numpy"} <= set(found)
    assert found["processor"].endswith("cores")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Invalid JSON"),
        (json.dumps(dataclasses.asdict(INFO) | {"parameters": "many"}), "parameters: "),
        (json.dumps(dataclasses.asdict(INFO) | {"versions": {"x": 1}}), "versions.x: "),
        (" " * (2**20 + 1), "longer than 1048576 bytes"),
    ],
)
def test_hostile_file_is_one_line_error(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(MetricsError) as caught:
        read_run_info(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'run.json'}: {says}")


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="No such file"):
        write_run_info(tmp_path / "none", INFO)
