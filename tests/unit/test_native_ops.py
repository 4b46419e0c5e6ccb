"""MindSpore's own operators for devices: their graphs pass the front end."""

import os
import subprocess
import sys
from pathlib import Path

from tests.rules.source import ROOT

DEVICES = {"MS_SIMULATION_LEVEL": "0", "RANK_SIZE": "4", "RANK_ID": "1"}
IN_BOTH = ("all_reduce", "max", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "broadcast", "barrier")
EXPORTED = {f"{name} {dtype}" for name in IN_BOTH for dtype in ("Float32", "BFloat16")}
EXPORTED |= {"all_reduce bf16 wire", "reduce_scatter fp16 wire", "send", "recv"}
EXPORTED |= {f"gradient {name}" for name in ("gather_sum", "scatter_sum", "exchange", "exchange_rows")}
EXPORTED |= {f"gradient exchange_rows in {wire}" for wire in ("fp16", "bf16", "int8")}
EXPORTED |= {"gradient of ring attention", "gradient of ulysses attention"}


def test_graphs_for_devices_are_exported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.native_export", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **DEVICES},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {f"exported {name}" for name in EXPORTED}
