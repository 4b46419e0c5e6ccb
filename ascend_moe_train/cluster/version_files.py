"""The files in which Ascend's software says which version it is: where they are, and what they say.

Parsing takes text, which may come from another host; reading is a thin layer over it.
"""

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_BYTES = 65_536
MAX_VALUE = 2_000  # characters; the longest known is a list of a few hundred
ROOT = Path("/usr/local/Ascend")
INSTALLED = Path("/etc/ascend_install.info")  # names the folder of driver and firmware
INSTALLED_KEY = "Driver_Install_Path_Param"
HOME = "ASCEND_HOME_PATH"
CANN_HOMES = ("ascend-toolkit/latest", "cann")  # below ROOT; the second from CANN 8.5 on
_KEY = re.compile(r"[A-Za-z0-9_.-]{1,100}")


@dataclass(frozen=True, kw_only=True)
class VersionFile:
    """One file of `key=value` lines. Without values it is not there, or, if there is a `problem`, cannot be used."""

    place: str
    values: Mapping[str, str] | None = None
    problem: str | None = None

    def get(self, *keys: str) -> str | None:
        """The value of the first of these keys that has one."""
        return next((value for key in keys if self.values and (value := self.values.get(key))), None)


NOT_LOOKED_FOR = VersionFile(place="")


@dataclass(frozen=True, kw_only=True)
class HostVersions:
    """What one host has; None is not found. `cann` is what its installer left, `compiler` what MindSpore looks at."""

    python: str | None = None
    mindspore: str | None = None
    driver: VersionFile = NOT_LOOKED_FOR
    firmware: VersionFile = NOT_LOOKED_FOR
    cann: VersionFile = NOT_LOOKED_FOR
    compiler: VersionFile = NOT_LOOKED_FOR

    @property
    def driver_release(self) -> str | None:
        """Such as 25.0.rc1.1. Newer drivers have it as `package_version` only, and something else as `Version`."""
        return self.driver.get("package_version", "Version")

    @property
    def firmware_version(self) -> str | None:
        """Such as 7.7.0.1.231, which is not its release."""
        return self.firmware.get("Version")

    @property
    def cann_release(self) -> str | None:
        """Such as 8.2.RC1; without the installer's file, the compiler's number, such as 8.2.0.0.201."""
        return self.cann.get("version") or self.compiler.get("version_dir", "Version")


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the files of a host are, each the first that is there."""

    driver: tuple[Path, ...]
    firmware: tuple[Path, ...]
    cann: tuple[Path, ...]
    compiler: tuple[Path, ...] = field(default=())


def parse_version_file(content: bytes, place: str) -> VersionFile:
    """What a file says. Unknown keys are kept, a key that comes again is not, and neither are lines of no such form.

    Nothing of a file with more than `MAX_BYTES`, or that is not UTF-8 text, is used.
    """
    if len(content) > MAX_BYTES:
        return VersionFile(place=place, problem=f"longer than {MAX_BYTES:,} bytes, which no version file is")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte {content[error.start]:#04x} at offset {error.start}"
        return VersionFile(place=place, problem=f"not UTF-8 text: {found}")
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = (part.strip() for part in line.partition("="))
        if equals and _KEY.fullmatch(key) and value.isprintable() and len(value) <= MAX_VALUE:
            values.setdefault(key, value)
    return VersionFile(place=place, values=values, problem=None if values else "has no line of the form key=value")


def read_version_file(places: tuple[Path, ...]) -> VersionFile:
    """The first of these that is there."""
    for path in places:
        try:
            if not path.exists():
                continue
            if not path.is_file():  # reading a pipe would wait for ever
                return VersionFile(place=str(path), problem="is no regular file")
            with path.open("rb") as file:
                return parse_version_file(file.read(MAX_BYTES + 1), str(path))
        except OSError as error:
            return VersionFile(place=str(path), problem=f"cannot be read: {error.strerror or error}")
    return VersionFile(place=" or ".join(map(str, places)))


def places(environment: Mapping[str, str], root: Path = ROOT, installed: Path = INSTALLED) -> Places:
    """Where to look: driver and firmware below the folder that `installed` names, CANN where ASCEND_HOME_PATH says;
    without these, below `root`."""
    base = Path(read_version_file((installed,)).get(INSTALLED_KEY) or root)
    home = environment.get(HOME)
    homes = [Path(home)] if home else [root / each for each in CANN_HOMES]
    return Places(
        driver=(base / "driver" / "version.info",),
        firmware=(base / "firmware" / "version.info",),
        cann=tuple(each / f"{platform.machine()}-linux" / "ascend_toolkit_install.info" for each in homes),
        compiler=tuple(each / "compiler" / "version.info" for each in homes),
    )


def read_host(environment: Mapping[str, str] = os.environ, where: Places | None = None) -> HostVersions:
    """What this host has. Nothing is run or imported for it, and whatever the files hold, nothing is raised."""
    where = where or places(environment)
    return HostVersions(
        python=platform.python_version(),
        mindspore=_installed_mindspore(),
        driver=read_version_file(where.driver),
        firmware=read_version_file(where.firmware),
        cann=read_version_file(where.cann),
        compiler=read_version_file(where.compiler),
    )


def _installed_mindspore() -> str | None:
    try:
        return importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        return None
