"""Ranks that msrun starts: they train as those of mpiexec do, through MindSpore's own collectives, and are watched as
well. On CPUs these have what data parallelism takes."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from ascend_moe_train.cluster import msrun
from ascend_moe_train.errors import ConfigError
from tests.launched import environment, launch_command
from tests.small_run import make_corpus, write_run
from tests.stand_in import Launched, descendants

RANK, SCHEDULER = "ascend_moe_train.cli.rank_main", "ascend_moe_train.parallel.scheduler"
FIGURES = ("loss", "aux_loss", "z_loss", "grad_norm")
ONE_PASS = ("batch.micro_sequences=2", "parallel.zero_stage=0")


def start(run_yaml: Path, starter: str, *overrides: str) -> subprocess.Popen[str]:
    command = launch_command(2, run_yaml, *overrides, starter=starter)
    return subprocess.Popen(
        [*command, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


@pytest.mark.slow
def test_training_is_that_of_mpiexec(tmp_path: Path) -> None:
    run_yaml = write_run(tmp_path, make_corpus(tmp_path))
    found = {}
    for starter in ("mpiexec", "msrun"):
        process = start(run_yaml, starter, "run.steps=6", f"run.dir={tmp_path}/{starter}", *ONE_PASS)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        records = [json.loads(line) for line in output.splitlines()]
        steps = [record for record in records if record["kind"] == "step"]
        found[starter] = [steps, [record["loss"] for record in records if record["kind"] == "eval"]]
    (by_mpi, evaluated), (by_msrun, others) = found.values()
    assert len(by_msrun) == len(by_mpi) == 6 and others == pytest.approx(evaluated, rel=1e-5)
    for one, other in zip(by_msrun, by_mpi, strict=True):
        assert [one[name] for name in FIGURES] == pytest.approx([other[name] for name in FIGURES], rel=1e-5)
    assert (tmp_path / "msrun" / "logs" / "msrun" / "scheduler.log").exists()


def test_a_killed_rank_is_named_and_nobody_is_left(tmp_path: Path) -> None:
    run_yaml = write_run(tmp_path, make_corpus(tmp_path))
    process = start(run_yaml, "msrun", "run.steps=100000", "run.log_every=1", *ONE_PASS)
    with Launched(process, 2, tmp_path) as launched:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["step"] == 2:
                break
        launched.seen = descendants(process.pid)
        assert len(launched.pids(SCHEDULER)) == 1
        pids = launched.pids(RANK)
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        code = launched.wait()
        assert (code, launched.left()) == (137, {}), launched.errors
    said = [line for line in launched.errors.splitlines() if line.startswith("error:")]
    assert "was killed by signal 9 (SIGKILL) in step" in said[0], launched.errors


def test_each_rank_needs_an_npu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager", "davinci10"):
        (tmp_path / name).touch()
    monkeypatch.setattr(msrun, "_DEVICES", tmp_path)
    assert msrun.num_devices() == 3
    msrun.check_devices(3, 3)
    with pytest.raises(ConfigError, match=r"^--ranks 4: this host has 3 NPUs \(/dev/davinci\*\)"):
        msrun.check_devices(4, 3)


def test_a_dry_run_prints_what_msrun_would_get(tmp_path: Path) -> None:
    run_yaml = write_run(tmp_path, make_corpus(tmp_path))
    command = launch_command(2, run_yaml, "run.device=ascend", dry_run=True)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    words = done.stdout.split()
    assert words[0] == "env" and done.stdout.count("\n") == 1
    assert {"--worker_num=2", "--local_worker_num=2", "--join=True", f"--log_dir={tmp_path}/run/logs/msrun"} <= {*words}
    assert not (tmp_path / "run").exists()
    refused = subprocess.run(
        launch_command(2, run_yaml, "run.device=ascend"), capture_output=True, text=True, check=False, env=environment()
    )
    assert (refused.returncode, refused.stdout) == (2, "") and "each rank needs one" in refused.stderr
