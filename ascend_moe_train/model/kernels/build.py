"""Compiles the C kernels in `csrc/` on first use and keeps the library in the user's cache folder."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
COMPILE_TIMEOUT_S = 300
# Without errno and traps, square roots and comparisons vectorise; the meaning of inf and NaN stays as in IEEE 754.
FLAGS = ("-std=gnu11", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


class NoLibraryError(Exception):
    """The native kernels cannot be built here. The message is the reason, in one line."""


def library() -> Path:
    """The compiled kernels, built now if no earlier run of the same sources, compiler, MindSpore and processor did.

    Raises NoLibraryError.
    """
    dnnl = dnnl_library()
    compiler = _compiler()
    command = [*compiler, *_target_flags(), *FLAGS]
    key = hashlib.sha256()
    parts = [
        shlex.join(command),
        _version_of(compiler),
        importlib.metadata.version("mindspore"),
        str(dnnl),
        _processor(),
    ]
    for part in parts:
        key.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".c", ".h"):
            key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    path = _cache_root() / key.hexdigest()[:32] / "kernels.so"
    if not path.is_file():
        _compile(command, dnnl, path)
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibraryError(f"the compiled kernels cannot be loaded: {error}") from error
    return path


def dnnl_library() -> Path:
    """MindSpore's own oneDNN, found without importing MindSpore."""
    spec = importlib.util.find_spec("mindspore")
    if spec is None or spec.origin is None:
        raise NoLibraryError("mindspore is not installed")
    found = sorted((Path(spec.origin).parent / "lib").glob("libdnnl.so*"))
    if not found:
        raise NoLibraryError(f"this mindspore has no libdnnl in {Path(spec.origin).parent / 'lib'}")
    return found[0]


def _compiler() -> list[str]:
    """The C compiler and its own arguments: $CC, or the first of cc, gcc, clang on PATH."""
    try:
        wanted = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise NoLibraryError(f"CC={os.environ['CC']} is no command: {error}") from error
    for words in [wanted] if wanted else [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(words[0])
        if found is not None:
            return [found, *words[1:]]
    raise NoLibraryError(f"no C compiler: {f'CC={wanted[0]}' if wanted else 'cc, gcc or clang'} is not on PATH")


def _version_of(compiler: list[str]) -> str:
    return _run([*compiler, "--version"], "asking the compiler for its version").partition("\n")[0]


def _target_flags() -> tuple[str, ...]:
    return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)


def _processor() -> str:
    """What instructions this processor has: a home folder may be shared by unequal machines."""
    text = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        text = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {text}"


def _cache_root() -> Path:
    """A folder that only this user can write: a library from anywhere else must not be loaded."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        root = (base if base.is_absolute() else Path.home() / ".cache") / "ascend_moe_train"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except (OSError, RuntimeError) as error:
        raise NoLibraryError(f"the cache folder cannot be used: {error}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NoLibraryError(f"cache folder {root} can be written by other users")
    return root


def _compile(command: list[str], dnnl: Path, path: Path) -> None:
    """Write `path` aside and rename it, so that processes which compile at the same time do not disturb each other."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, suffix=".so.part")
        os.close(handle)
    except OSError as error:
        raise NoLibraryError(f"cache folder {path.parent} cannot be written: {error}") from error
    try:
        sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
        link = [str(dnnl), f"-Wl,-rpath,{dnnl.parent}", "-lm"]
        _run([*command, "-o", aside, *sources, *link], "compiling the kernels")
        Path(aside).replace(path)
    finally:
        Path(aside).unlink(missing_ok=True)


def _run(command: list[str], doing: str) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLibraryError(f"{doing} with {command[0]}: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise NoLibraryError(f"{doing} with {command[0]} failed: {lines[0].strip() if lines else done.returncode}")
    return done.stdout
