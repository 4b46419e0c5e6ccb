"""`amt launch`: what it would run, what it refuses before anything runs, how it shows what ranks print."""

import importlib.metadata
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_moe_train.cli.launch import ViewScreen
from ascend_moe_train.cli.main import main
from ascend_moe_train.cluster.cores import num_cores
from ascend_moe_train.cluster.mpiexec import (
    MIN_RANKS_ALLOWED,
    check_ranks,
    command_line,
    find_mpiexec,
    rank_environment,
)
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.train.metrics import EvalRecord, Record, to_json_line
from tests.small_run import write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_yaml(tmp_path: Path, small_corpus: Path) -> Path:
    return write_run(tmp_path, small_corpus)


def test_mpiexec_is_that_of_the_wheel() -> None:
    found = find_mpiexec()
    assert found.name.startswith("mpiexec") and found.parent == Path(sys.executable).parent.resolve()
    assert subprocess.run([str(found), "--version"], capture_output=True, check=False, timeout=20).returncode == 0


@pytest.mark.parametrize("package", ["mpich", "mpi4py"])
def test_a_missing_package_is_one_line(package: str, run_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> list[importlib.metadata.PackagePath]:
        raise importlib.metadata.PackageNotFoundError(name)

    if package == "mpich":
        monkeypatch.setattr(importlib.metadata, "files", files)
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"^{package} is not installed: .*pip install 'ascend-moe-train\[train\]'$"):
        find_mpiexec()


def test_a_wheel_without_its_program_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=rf"^mpiexec of mpich \({tmp_path}/mpiexec\) is not installed"):
        find_mpiexec()


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascend_moe_train.cluster.mpiexec.num_cores", lambda: 8)
    threads = {ranks: rank_environment(ranks, {}, {})["OMP_NUM_THREADS"] for ranks in (1, 2, 3, 8, 16)}
    assert threads == {1: "8", 2: "4", 3: "2", 8: "1", 16: "1"}


def test_the_environment_of_ranks() -> None:
    given = {
        "GLOG_v": "1",
        "HOME": "/h",
        "PYTHONPATH": "/p",
        "PMI_RANK": "3",
        "AMT_RANK": "5",
        "OMPI_COMM_WORLD_RANK": "1",
    }
    made = rank_environment(2, given, {"AMT_RUN_ID": "x"})
    assert (made["GLOG_v"], made["HOME"], made["OMP_WAIT_POLICY"]) == ("1", "/h", "passive")
    assert (made["AMT_RANKS"], made["AMT_RUN_ID"]) == ("2", "x")
    assert made["PYTHONPATH"].split(":") == [str(ROOT), "/p"]
    assert not {"PMI_RANK", "AMT_RANK", "OMPI_COMM_WORLD_RANK"} & set(made)


def test_the_command_stays_on_this_machine() -> None:
    words = command_line(Path("/bin/mpiexec"), 3, ["program", "a b"])
    assert words[0] == "/bin/mpiexec" and words[words.index("-n") + 1] == "3"
    assert words[words.index("-launcher") + 1] == "fork"
    assert words[-4:] == ["-m", "ascend_moe_train.cluster.guard", "program", "a b"]


@pytest.mark.parametrize("ranks", [-1, 0, 10_000, 10**30])
def test_a_number_of_ranks_that_is_impossible(ranks: int, run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    most = max(MIN_RANKS_ALLOWED, 8 * num_cores())
    assert main(["launch", "--ranks", str(ranks), "train", str(run_yaml)]) == 2
    assert capsys.readouterr().err == (
        f"error: --ranks {ranks}: must be 1 to {most} on this machine, which has {num_cores()} cores\n"
    )
    assert not (run_yaml.parent / "run").exists()


def test_any_machine_may_try_some_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascend_moe_train.cluster.mpiexec.num_cores", lambda: 1)
    check_ranks(MIN_RANKS_ALLOWED)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "two", "train", "RUN"], "Invalid value for '--ranks': 'two' is not a valid integer."),
        (["train", "RUN"], "--ranks or --hostfile is missing: say how many ranks, or on which hosts"),
        (["--ranks", "2", "--spares", "1", "train", "RUN"], "--spares has no effect without --hostfile: leave it out"),
        (["--hostfile", "none", "--ranks", "2", "train", "RUN"], "--ranks 2: with --hostfile there is a rank on each"),
        (["--hostfile", "none", "train", "RUN"], "none: there is no such hostfile"),
        (["--hostfile", "none", "--env", "NO_SUCH", "train", "RUN"], "--env NO_SUCH: is not set here"),
        (["--ranks", "2", "tran", "RUN"], "No such command 'tran'. Did you mean 'train'?"),
        (["--ranks", "2", "train"], "Missing argument 'RUN_YAML'."),
        (["--ranks", "2", "train", "none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        (["--ranks", "2", "train", "RUN", "--set", "run.stps=3"], "--set run.stps=3: unknown key 'run.stps'"),
        (["--ranks", "3", "train", "RUN"], "batch.global_sequences 4 does not divide by dp 3"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    arguments: list[str], message: str, run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *(str(run_yaml) if word == "RUN" else word for word in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"error: {message}") and printed.err.count("\n") == 1
    assert not (run_yaml.parent / "run").exists()


def test_hosts_of_a_batch_system(
    run_yaml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "203.0.113.[8-9]")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    assert main(["launch", "--hosts-from", "slurm", "--slots", "1", "--dry-run", "train", str(run_yaml)]) == 0
    comments = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert comments == [f"# 203.0.113.{8 + n}: ranks {n} to {n}, agent over SSH to 203.0.113.{8 + n}" for n in range(2)]


def test_a_dry_run_of_msrun_prints_what_each_host_would_run(
    run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("203.0.113.[7-8] slots=1\n")
    arguments = ["--hostfile", str(tmp_path / "hosts"), "--starter", "msrun", "--dry-run", "train", str(run_yaml)]
    assert main(["launch", *arguments]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if "--worker_num=2" in line]
    assert len(lines) == 2
    for node, words in enumerate(lines):
        assert {"--local_worker_num=1", f"--node_rank={node}", "--master_addr=203.0.113.7", "--join=True"} <= {*words}


def test_a_dry_run_prints_and_runs_nothing(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = "run.dir=/a folder"
    assert main(["launch", "--ranks", "2", "--dry-run", "train", str(run_yaml), "--set", setting]) == 0
    line = capsys.readouterr().out
    words = shlex.split(line)
    assert line.count("\n") == 1 and words[0] == "env" and str(find_mpiexec()) in words
    assert words[words.index("-n") + 1] == "2"
    assert words[-7:] == ["ascend_moe_train.cli.rank_main", "train", "--json", "--set", setting, "--", str(run_yaml)]
    assert not any(word.startswith(("AMT_CONTROL", "AMT_RUN_ID")) for word in words)
    assert not (run_yaml.parent / "run").exists()


class Kept:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[Record | str] = []

    def show(self, record: Record) -> None:
        self.said.append(record)

    def note(self, message: str) -> None:
        self.said.append(message)


def test_records_of_the_first_rank_are_shown_and_all_else_is_a_remark() -> None:
    record = EvalRecord.from_loss(step=3, loss=1.5, tokens=10, bytes_per_token=None)
    line = to_json_line(record).decode().rstrip()
    kept = Kept()
    screen = ViewScreen(kept)
    screen.line(0, line, is_error=False)
    for text in ("plain", "{", '{"kind": "step"}', "null", "[" * 10_000):
        screen.line(0, text, is_error=False)
    screen.line(0, line, is_error=True)
    screen.line(1, line, is_error=False)
    assert kept.said == [
        record,
        "plain",
        "{",
        '{"kind": "step"}',
        "null",
        "[" * 10_000,
        line,
        f"[rank 1] {line}",
    ]


def test_a_screen_that_nobody_looks_at_is_an_error() -> None:
    class Gone(Kept):
        def note(self, message: str) -> None:
            sys.exit(1)  # what rich does at a broken pipe

    with pytest.raises(BrokenPipeError):
        ViewScreen(Gone()).line(0, "x", is_error=False)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--version"], 0, ""),
        (["config", "check", "none.yaml"], 2, "error: none.yaml: cannot be read: No such file or directory\n"),
        (["nothing"], 2, "error: unknown command 'nothing': "),
    ],
)
def test_a_rank_alone_ends_as_the_command_does(arguments: list[str], code: int, message: str) -> None:
    command = [sys.executable, "-m", "ascend_moe_train.cli.rank_main", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr[: len(message)]) == (code, message) and done.stderr.count("\n") <= 1


def test_a_rank_with_a_board_that_is_not_there_says_so() -> None:
    command = [sys.executable, "-m", "ascend_moe_train.cli.rank_main", "--version"]
    environment = {"AMT_BOARD": "/nowhere", "AMT_RANK": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: /nowhere: no status board of a launcher: No such file or directory\n"
