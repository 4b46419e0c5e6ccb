"""Building the native kernels: the cache, every reason why they may not be there, and what a run then gets."""

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ascend_moe_train.errors import TrainingError
from ascend_moe_train.model.kernels import build
from ascend_moe_train.model.kernels.select import choose

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler on PATH"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and quick compiling."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "FLAGS", tuple(flag for flag in build.FLAGS if flag != "-O3"))
    return tmp_path / "ascend_moe_train"


@needs_compiler
def test_compiles_once_and_leaves_only_the_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: build.library(), range(2)))
    assert paths[0] == paths[1]
    assert [path.name for path in paths[0].parent.iterdir()] == ["kernels.so"]
    assert [path.parent.parent for path in paths] == [cache, cache]
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.library() == paths[0]
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        build.library()


def script(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "CC=no-such-compiler is not on PATH"),
        ("'gcc", "is no command: No closing quotation"),
        ("/no/such/file -m64", "CC=/no/such/file is not on PATH"),
    ],
)
def test_a_compiler_that_is_not_there(cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(build.NoLibraryError, match=reason):
        build.library()


def test_a_compiler_that_fails(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'if [ "$1" = --version ]; then echo 1; else echo "k.c:3: error: too old" >&2; exit 1; fi'
    monkeypatch.setenv("CC", script(tmp_path, "bad-cc", text))
    with pytest.raises(build.NoLibraryError, match=r"failed: k\.c:3: error: too old"):
        build.library()
    assert not [path for path in cache.rglob("*") if path.is_file()], "a failed build left a file behind"


def test_a_library_that_cannot_be_loaded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo junk > "$2"; fi; shift; done'
    monkeypatch.setenv("CC", script(tmp_path, "junk-cc", text))
    with pytest.raises(build.NoLibraryError, match="cannot be loaded"):
        build.library()


def test_a_cache_that_others_can_write(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(build.NoLibraryError, match="can be written by other users"):
        build.library()


def test_a_cache_that_is_a_file(cache: Path) -> None:
    cache.touch()
    with pytest.raises(build.NoLibraryError, match="the cache folder cannot be used"):
        build.library()


def test_without_a_compiler_auto_is_portable_and_native_an_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING):
        assert choose("cpu", "auto").name == "portable"
    assert "no C compiler: cc, gcc or clang is not on PATH" in caplog.text
    with pytest.raises(TrainingError) as error:
        choose("cpu", "native")
    assert str(error.value).count("\n") == 0
    assert "no C compiler" in str(error.value)


def test_choice_by_device(cache: Path) -> None:
    assert choose("cpu", "portable").name == "portable"
    assert choose("ascend", "auto").name == "portable"
    with pytest.raises(TrainingError, match=r"'native' needs run\.device 'cpu', got 'ascend'"):
        choose("ascend", "native")
