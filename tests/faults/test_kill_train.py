"""`amt train` as a process: kill -9 at random moments changes nothing; SIGTERM and Ctrl-C save before the end; a
full disk ends it with one line and its checkpoints whole.

The same command is started again after each end. Moments are in the imports and the compilation, in steps and between
the lines of metrics.jsonl, and inside the writing of a checkpoint.
"""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ascend_moe_train.checkpoint import store
from tests.small_run import metrics, newest_state, write_run

ROOT = Path(__file__).parents[2]
STEPS = 400
SETTINGS = (f"run.steps={STEPS}", "run.eval_every=100", "batch.micro_sequences=4", "checkpoint.every=6")
MOMENTS = ("start", "step", "save", "step", "save", "step", "start", "save", "step", "step")
FEW_MOMENTS = ("start", "step", "save")
TIMEOUT_S = 120
# Threads of so small a model would mostly wait for each other.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # NumPy has threads


class Command:
    """The same command on a folder, as often as it is started. Its output goes to a file."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        program = "from ascend_moe_train.cli.main import run; run()"
        options = [word for setting in SETTINGS for word in ("--set", setting)]
        self._arguments = [sys.executable, "-c", program, "train", str(write_run(folder, corpus)), *options]
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(self._arguments, cwd=ROOT, stdout=output, stderr=output, env=ENVIRONMENT)
        self._processes.append(process)
        return process

    def finish(self) -> None:
        assert self.start().wait(TIMEOUT_S) == 0, self.output

    def end_all(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    @property
    def newest_step(self) -> int:
        steps = [int(path.name.removeprefix("step-")) for path in (self.run_dir / "checkpoints").glob("step-*")]
        return max(steps, default=0)

    def is_saving(self) -> bool:
        return any((self.run_dir / "checkpoints").glob(".tmp-*"))


def wait_until(condition: Callable[[], bool], command: Command, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, f"the run ended before the moment came: {command.output}"
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


def wait_for(moment: str, command: Command, process: subprocess.Popen[bytes], generator: random.Random) -> None:
    if moment == "start":
        time.sleep(generator.uniform(0.1, 4.0))
        return
    before = command.newest_step
    wait_until(lambda: command.newest_step > before, command, process)
    time.sleep(generator.uniform(0.0, 0.2))
    if moment == "save":
        wait_until(command.is_saving, command, process)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path) -> Iterator[Callable[[], Command]]:
    """Starts a run that nobody disturbs, beside the others; the call waits for its end."""
    command = Command(tmp_path_factory.mktemp("unbroken"), small_corpus)
    process = command.start()

    def ended() -> Command:
        assert process.wait(TIMEOUT_S) == 0, command.output
        return command

    yield ended
    command.end_all()


@pytest.fixture
def command(tmp_path: Path, small_corpus: Path) -> Iterator[Command]:
    made = Command(tmp_path, small_corpus)
    yield made
    made.end_all()


def assert_same_run(found: Command, expected: Command) -> None:
    assert metrics(found.run_dir) == metrics(expected.run_dir)
    assert newest_state(found.run_dir) == newest_state(expected.run_dir)
    names = [{path.relative_to(each.run_dir) for path in each.run_dir.rglob("*")} for each in (found, expected)]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    "moments", [pytest.param(FEW_MOMENTS, id="three"), pytest.param(MOMENTS, id="ten", marks=pytest.mark.slow)]
)
def test_kill_at_random_moments(moments: Sequence[str], command: Command, unbroken: Callable[[], Command]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    reached = []
    for moment in moments:
        process = command.start()
        wait_for(moment, command, process, generator)
        process.send_signal(signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        newest = store.newest(command.run_dir / "checkpoints")
        assert (0 if newest is None else newest.step) == command.newest_step
        reached.append(command.newest_step)
    assert reached == sorted(reached)
    assert len(set(reached)) > moments.count("step") + moments.count("save")
    assert reached[-1] < STEPS
    command.finish()
    assert_same_run(command, unbroken())
    assert "skipped" not in command.output and "Traceback" not in command.output


def test_sigterm_and_ctrl_c_save_and_exit(command: Command, unbroken: Callable[[], Command]) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = command.start()
        wait_for("step", command, process, random.Random(1))
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == code, command.output
        step = metrics(command.run_dir)[-1]["step"]
        assert 0 < newest_state(command.run_dir)[0] == step < STEPS
        assert f"stopped by {number.name} after step {step}, saved" in command.output
    command.finish()
    assert_same_run(command, unbroken())


@pytest.mark.parametrize("kind", [pytest.param("nothing more", marks=pytest.mark.slow), "no checkpoint more"])
def test_a_full_disk_is_one_line_and_leaves_the_checkpoints_whole(
    kind: str, command: Command, unbroken: Callable[[], Command]
) -> None:
    process = command.start()
    wait_for("step", command, process, random.Random(2))
    # no file of the process may grow beyond this: the system then refuses a write as a full disk would
    lines_bytes = (command.run_dir / "metrics.jsonl").stat().st_size
    limit_bytes = lines_bytes + 1000 if kind == "nothing more" else lines_bytes + 50_000
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    assert process.wait(TIMEOUT_S) == 2, command.output
    assert command.output.count("error: ") == 1 and "Traceback" not in command.output
    assert command.output.splitlines()[-1].startswith("error: ")
    assert command.output.splitlines()[-1].endswith("File too large")
    assert newest_state(command.run_dir)[0] == command.newest_step > 0
    assert not list(command.run_dir.rglob(".*")), "something half-written is left"
    command.finish()
    assert_same_run(command, unbroken())
