"""Hostfiles, environments and options that were written to have something run: they are refused, or mean nothing.

Each is tried through the commands that read it, in a folder in which nothing may appear, and with an eye on what this
process starts and whom it connects to.
"""

import asyncio
import contextlib
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.cluster import hosts_environment, links
from ascend_moe_train.cluster.frames import TO_AGENT, FrameReader, Task, ToAgent
from ascend_moe_train.cluster.links import agent_words
from ascend_moe_train.cluster.remote import quoted
from tests.small_run import write_run
from tests.ssh_server import Home
from tests.watched_starts import STARTS, watched_starts

HOSTILE = [
    "a; touch canary",
    "$(touch canary)",
    "`touch canary`",
    "a|touch canary",
    "a&&touch canary",
    "-oProxyCommand=touch${IFS}canary",
    "--prefix=x",
    "a>canary",
    "a\x00b",
    "a\rb",
    "a\x1b]0;b\x07",
    "a\u2028b",
    "a'b",
    "~root",
    "a\\b",
    "%s%n",
    "../a",
    "a b",
]
# Where a hostile word may stand in a line.
PLACES = ["{} slots=1", "{}@a slots=1", "a slots={}", "a slots=1 user={}", "a slots=1 port={}", "a slots=1 nic={}"]
PLACES += ["a slots=1 address={}", "a slots=1 {}", "a[{}] slots=1"]
FILES = [place.format(word) for word in HOSTILE for place in PLACES]
FILES += [
    "a slots=1\ntouch canary\n",
    "a slots=1\n\n$(touch canary) slots=1\n",
    "a slots=1\r\rtouch canary\n",
    "a[1-999999999] slots=1\n",
    "a[1-9999][1-9999] slots=1\n",
    "".join(f"h{number} slots=1\n" for number in range(100_000)),
    "a slots=1\n" * 100_000,
    "[" * 4000,
]
PREFLIGHT = ["preflight", "--fix"]
WAYS = [
    PREFLIGHT,
    ["launch", "train", "run.yaml"],
    ["launch", "--dry-run", "train", "run.yaml"],
    ["launch", "--detach", "train", "run.yaml"],
]


@pytest.fixture
def folder(tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a run file, and none of the variables that name hosts."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MA_", "VC_", "PET_", "MASTER_", "OMPI_"))]:
        monkeypatch.delenv(name)
    write_run(tmp_path, small_corpus)
    return tmp_path


def refused(folder: Path, way: list[str], options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What one command says that starts nothing, connects to nobody and leaves nothing."""
    before = sorted(folder.iterdir())
    with watched_starts() as seen:
        code = main([way[0], *options, *way[1:]])
    said = capsys.readouterr()
    assert (code, seen, said.out) == (2, [], ""), (options, said.err)
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and said.err[:-1].isprintable(), said.err
    assert sorted(folder.iterdir()) == before
    return said.err


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_hostile_hostfiles(way: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # words of hosts are enough for one way: all read hostfiles by the same function
    for text in FILES if way is PREFLIGHT else FILES[:: len(PLACES)]:
        (folder / "hosts").write_text(text)
        assert "hosts:" in refused(folder, way, ["--hostfile", "hosts"], capsys)


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
@pytest.mark.parametrize("path", ["-oProxyCommand=touch canary", "$(touch canary)", "/dev/zero", "."])
def test_hostile_names_of_hostfiles(
    way: list[str], path: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(folder, way, ["--hostfile", path], capsys)


SLOTS = {"SLURM_GPUS_PER_NODE": "1", "MS_LOCAL_WORKER": "1", "MA_NUM_GPUS": "1"}
ENVIRONMENTS = {
    "slurm": ("SLURM_JOB_NODELIST",),
    "kubernetes": ("VC_WORKER_HOSTS", "VC_MASTER_HOSTS", "OMPI_MCA_orte_default_hostfile", "MASTER_ADDR"),
    "modelarts": ("VC_WORKER_HOSTS", "MA_VJ_NAME", "MA_TASK_NAME", "MA_NUM_HOSTS"),
}
SLOTS_OF = {"slurm": "SLURM_GPUS_PER_NODE", "kubernetes": "MS_LOCAL_WORKER", "modelarts": "MA_NUM_GPUS"}
MORE = {
    "MASTER_ADDR": {"PET_NNODES": "2"},
    "MA_VJ_NAME": {"MA_TASK_NAME": "w", "MA_NUM_HOSTS": "2"},
    "MA_TASK_NAME": {"MA_VJ_NAME": "j", "MA_NUM_HOSTS": "2"},
    "MA_NUM_HOSTS": {"MA_VJ_NAME": "j", "MA_TASK_NAME": "w"},
}


@pytest.mark.parametrize("system", [*ENVIRONMENTS, "auto"])
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_hostile_environments(
    way: list[str], system: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(ENVIRONMENTS) == set(hosts_environment.SYSTEMS)
    names = ENVIRONMENTS.get(system, ("SLURM_JOB_NODELIST", "VC_WORKER_HOSTS"))
    for name in names:
        # what a variable of a system cannot hold is tried in hostfiles
        for word in [word for word in HOSTILE if "\0" not in word]:
            with monkeypatch.context() as patch:
                for variable, value in {**SLOTS, **MORE.get(name, {}), name: word}.items():
                    patch.setenv(variable, value)
                refused(folder, way, ["--hosts-from", system], capsys)
    if system == "auto":
        return
    for word in ("$(touch canary)", "-1", "8; touch canary", "9" * 5000, "1e3", ""):
        with monkeypatch.context() as patch:
            patch.setenv(SLOTS_OF[system], word)
            patch.setenv("VC_WORKER_HOSTS", "a,b")
            patch.setenv("SLURM_JOB_NODELIST", "a,b")
            refused(folder, way, ["--hosts-from", system], capsys)


def test_a_list_of_hosts_that_is_a_comment_bomb_is_inert(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "hosts").write_text("# $(touch canary)\n" * 100_000 + "203.0.113.9 slots=1 # `touch canary`\n")
    before = sorted(folder.iterdir())
    with watched_starts() as seen:
        assert main(["launch", "--hostfile", "hosts", "--dry-run", "train", "run.yaml"]) == 0
    assert seen == [] and sorted(folder.iterdir()) == before
    assert "canary" not in capsys.readouterr().out


@pytest.mark.parametrize("way", WAYS[1:], ids=" ".join)
def test_hostile_names_of_variables(way: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "hosts").write_text("203.0.113.9 slots=1\n")
    for name in [*HOSTILE, "", "PATH=/tmp", "A\nB", "\udcff"]:
        assert "--env" in refused(folder, way, ["--hostfile", "hosts", "--env", name], capsys)


def test_a_variable_that_is_no_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "hosts").write_text("203.0.113.9 slots=1\n")
    monkeypatch.setenv("EVIL", os.fsdecode(b"\xff$(touch canary)"))
    for way in WAYS[1:]:
        said = refused(folder, way, ["--hostfile", "hosts", "--env", "EVIL"], capsys)
        assert "is no UTF-8 text" in said


def test_what_a_dry_run_prints_is_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given to a shell as it stands, its lines have the words that would be run."""
    (folder / "hosts").write_text("203.0.113.9 slots=1 nic=eth0\n")
    evil = "x'; touch canary; $(touch canary) `touch canary` \"\\"
    monkeypatch.setenv("EVIL", evil)
    given = ["--set", f"run.dir={evil}"]
    with watched_starts() as seen:
        code = main(["launch", "--hostfile", "hosts", "--dry-run", "--env", "EVIL", "train", "run.yaml", *given])
    assert (code, seen) == (0, [])
    comment, *lines = capsys.readouterr().out.splitlines()
    assert comment.startswith("# 203.0.113.9: ")
    for line in lines:
        words = shlex.split(line)
        in_shell = subprocess.run(["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
        assert in_shell.stdout.split("\0")[:-1] == words
    assert f"EVIL={evil}" in shlex.split(lines[1]) and given[1] in shlex.split(lines[1])
    assert not (folder / "canary").exists()


def test_a_shell_finds_the_words_that_were_sent(tmp_path: Path) -> None:
    words = [word for word in HOSTILE if all(each >= " " for each in word)]
    command = quoted(["printf", "%s\\0", *words])
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split("\0")[:-1] == words
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def ssh_host(home: Home, commands: list[str], tasks: list[ToAgent]) -> Iterator[int]:
    """The port of a host that keeps what it is to run and its first frame, and does not answer."""

    async def keep(process: asyncssh.SSHServerProcess[bytes]) -> None:
        commands.append(process.command or "")
        await process.stdin.readline()
        reader: FrameReader[ToAgent] = FrameReader(TO_AGENT)
        while not tasks and (piece := await process.stdin.read(65536)):
            tasks.extend(reader.feed(piece))
        process.exit(1)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    serving = home.serve(keep)
    try:
        yield asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_hosts_are_sent_the_same_words_whatever_was_given(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is hostile arrives as data, whole, and nothing is started here."""
    evil = "$(touch canary)`touch canary`; touch canary\n\x07'\""
    home = Home(tmp_path_factory.mktemp("home"), monkeypatch)
    monkeypatch.setattr(links, "is_here", lambda address: False)
    monkeypatch.setenv("EVIL", evil)
    commands: list[str] = []
    tasks: list[ToAgent] = []
    with ssh_host(home, commands, tasks) as port:
        home.know(f"[127.0.0.1]:{port}")
        (folder / "hosts").write_text(f"127.0.0.1 slots=2 user=me port={port} nic=eth0\n")
        setting = f"run.dir={folder}/{evil[:15]}"
        with watched_starts() as seen:
            code = main(["launch", "--hostfile", "hosts", "--env", "EVIL", "train", "run.yaml", "--set", setting])
    assert code == 1
    assert [each for each in seen if each.split()[0] in STARTS] == []
    assert commands == [shlex.join(agent_words())]
    task = tasks[0]
    assert isinstance(task, Task)
    assert task.environment["EVIL"] == evil and setting in task.arguments
    assert not (folder / "canary").exists()


def test_what_is_watched_is_seen() -> None:
    with watched_starts() as seen:
        subprocess.run(["true"], check=True)

        async def start() -> None:
            await (await asyncio.create_subprocess_exec("true")).wait()

        asyncio.run(start())
    assert sum(each.startswith("subprocess.Popen") for each in seen) == 2
