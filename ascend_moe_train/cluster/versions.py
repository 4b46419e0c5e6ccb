"""Which versions of Python, MindSpore, CANN, driver and firmware fit together, and why. Pure.

What is known is in data/versions.json, each entry with its source, and in what the packages say of each other. Where
nothing is said, the verdict is `unknown`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter

from ascend_moe_train.cluster.version_files import HostVersions

TABLE = Path(__file__).parent / "data" / "versions.json"
NOT_FOUND = "not found"
NOT_KNOWN = "not known"
NO_SOURCE = "none"
CAN_SHOW_MORE = "amt check versions shows all"

Verdict = Literal["ok", "wrong", "unknown"]

_STRICT = ConfigDict(extra="forbid", strict=True)
_BASE = re.compile(r"V[0-9]{3}R[0-9]{3}C[0-9]{2}", re.ASCII)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_NUMBERS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class PythonRange:
    """Versions of Python, both ends included; `3.12` includes 3.12.9."""

    __pydantic_config__ = _STRICT

    least: str
    most: str

    def __str__(self) -> str:
        return f"{self.least} to {self.most}"

    def __contains__(self, version: str) -> bool:
        return is_between(version, self.least, self.most)


@dataclass(frozen=True, kw_only=True)
class MindSporeEntry:
    """What is known of one version of MindSpore: the releases of CANN and driver that it is published with, and the
    numbers of CANN that it takes itself; None and empty are not known."""

    __pydantic_config__ = _STRICT

    version: str
    cann: str | None
    driver: str | None
    cann_accepted: list[str]
    python: PythonRange | None
    source: str
    python_source: str | None


@dataclass(frozen=True, kw_only=True)
class CannEntry:
    """The versions of Python that a CANN is documented for."""

    __pydantic_config__ = _STRICT

    version: str
    python: PythonRange
    source: str


@dataclass(frozen=True, kw_only=True)
class VersionTable:
    """All of data/versions.json."""

    __pydantic_config__ = _STRICT

    mindspore: list[MindSporeEntry]
    cann: list[CannEntry]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Whether two of a host's versions fit. `is_inference`: no source states the rule, it follows from what some
    say."""

    pair: str
    verdict: Verdict
    found: str
    expected: str
    why: str
    remedy: str
    source: str
    is_inference: bool = False


@lru_cache(maxsize=1)
def version_table() -> VersionTable:
    """What is known, checked as it is read."""
    return TypeAdapter(VersionTable).validate_json(TABLE.read_bytes())


def check_versions(host: HostVersions, table: VersionTable | None = None) -> tuple[Finding, ...]:
    """Judges every pair of versions of one host."""
    table = table or version_table()
    entry = next((each for each in table.mindspore if each.version == host.mindspore), None)
    return (
        _firmware_for_driver(host),
        _driver_for_firmware(host),
        _cann_with_driver(host),
        _mindspore_with_cann(host, entry),
        _mindspore_with_driver(host, entry),
        _mindspore_with_python(host, entry),
        _cann_with_python(host, table),
    )


def misfits(findings: Iterable[Finding]) -> str | None:
    """One line that names the pairs that do not fit, None if there are none."""
    wrong = [f"{each.pair}: {each.found}, expected {each.expected}" for each in findings if each.verdict == "wrong"]
    return f"versions do not fit: {'; '.join(wrong)} ({CAN_SHOW_MORE})" if wrong else None


def numbers(version: str | None) -> tuple[int, ...]:
    """The numbers that a version begins with: 8.2.RC1 -> (8, 2)."""
    match = _NUMBERS.match(version or "")
    return tuple(int(each) for each in match[0].split(".")) if match else ()


def is_between(version: str, least: str, most: str) -> bool:
    """Both ends included, as far as these go: 3.12.9 is at most 3.12."""
    found, low, high = numbers(version), numbers(least), numbers(most)
    return bool(found and low and high) and found >= low and found[: len(high)] <= high


def bracketed(text: str | None) -> list[list[str]]:
    """`[7.0.0,7.7.99],[8.0]` -> [["7.0.0", "7.7.99"], ["8.0"]]."""
    return [[word.strip() for word in group.split(",")] for group in _BRACKETS.findall(text or "")]


def base_version(text: str | None) -> str | None:
    """`V100R001C22SPC001B231` -> `V100R001C22`."""
    match = _BASE.match(text or "")
    return match[0] if match else None


def _firmware_for_driver(host: HostVersions) -> Finding:
    firmware, ranges = host.firmware_version, _pairs(host.driver.get("compatible_version_fw"))
    verdict: Verdict = "unknown"
    if firmware and numbers(firmware) and ranges:
        verdict = "ok" if any(is_between(firmware, *each) for each in ranges) else "wrong"
    return Finding(
        pair="firmware for driver",
        verdict=verdict,
        found=f"firmware {firmware or NOT_FOUND}",
        expected=_any_of(f"{least} to {most}" for least, most in ranges),
        why="the driver names the firmware that it works with",
        remedy="install firmware and driver of the same release, and start the host anew",
        source="compatible_version_fw of the driver's version.info",
    )


def _driver_for_firmware(host: HostVersions) -> Finding:
    driver = host.driver_release
    listed = _listed(host.firmware.get("compatible_version_drv"))
    prefixes = list(dict.fromkeys(each.rstrip(".") for each in listed if numbers(each)))
    verdict: Verdict = "unknown"
    if driver and numbers(driver) and prefixes:
        verdict = "ok" if any(_begins(driver, prefix) for prefix in prefixes) else "wrong"
    return Finding(
        pair="driver for firmware",
        verdict=verdict,
        found=f"driver {driver or NOT_FOUND}",
        expected=_any_of(prefixes),
        why="the firmware names the drivers that it works with",
        remedy="install firmware and driver of the same release, and start the host anew",
        source="compatible_version_drv of the firmware's version.info",
    )


def _cann_with_driver(host: HostVersions) -> Finding:
    """The one need only know the other: driver 25.0.rc1.1 (C21) does not list CANN 8.2.RC1 (C22), which lists C21, and
    they are reported to work together."""
    cann, driver = base_version(host.cann.get("innerversion")), base_version(host.driver.get("Innerversion"))
    cann_lists = [each for each in _listed(host.cann.get("compatible_version")) if base_version(each)]
    driver_lists = [each for each in _listed(host.driver.get("compatible_version")) if base_version(each)]
    verdict: Verdict = "unknown"
    if (cann and cann in driver_lists) or (driver and driver in cann_lists):
        verdict = "ok"
    elif cann and driver and cann_lists and driver_lists:
        verdict = "wrong"
    return Finding(
        pair="CANN with driver",
        verdict=verdict,
        found=f"CANN {_with_base(host.cann_release, cann)}, driver {_with_base(host.driver_release, driver)}",
        expected="one that lists the other",
        why="a driver that is older than CANN needs ends in EE1015 or 507899, or hangs (vllm-ascend issue 5468)",
        remedy="install a newer driver, or take an older CANN",
        source="compatible_version of the driver's version.info and of CANN's ascend_toolkit_install.info",
        is_inference=True,
    )


def _mindspore_with_cann(host: HostVersions, entry: MindSporeEntry | None) -> Finding:
    release = host.cann_release
    number = ".".join(map(str, numbers(host.compiler.get("Version") or release)[:2]))
    verdict: Verdict = "unknown"
    expected = NOT_KNOWN
    if entry and entry.cann_accepted:
        expected = _any_of(entry.cann_accepted)
        if number:
            verdict = "ok" if number in entry.cann_accepted else "wrong"
    elif entry and entry.cann:
        expected = entry.cann
        if release and release.lower() == entry.cann.lower():
            verdict = "ok"
    return Finding(
        pair="CANN for MindSpore",
        verdict=verdict,
        found=f"MindSpore {host.mindspore or NOT_FOUND}, CANN {release or NOT_FOUND}",
        expected=expected,
        why="MindSpore's operators are built against CANN's libraries; it warns in its log, and goes on",
        remedy="install a CANN of those, or the MindSpore that goes with the one that is there",
        source=entry.source if entry else NO_SOURCE,
    )


def _mindspore_with_driver(host: HostVersions, entry: MindSporeEntry | None) -> Finding:
    listed, driver = entry.driver if entry else None, host.driver_release
    return Finding(
        pair="driver for MindSpore",
        verdict="ok" if listed and driver and _begins(driver, listed) else "unknown",
        found=f"MindSpore {host.mindspore or NOT_FOUND}, driver {driver or NOT_FOUND}",
        expected=listed or NOT_KNOWN,
        why="releases are published for one driver; others are not said to fail",
        remedy="if there is trouble, try the driver that is expected",
        source=entry.source if entry and listed else NO_SOURCE,
    )


def _mindspore_with_python(host: HostVersions, entry: MindSporeEntry | None) -> Finding:
    listed = entry.python if entry else None
    verdict: Verdict = "unknown"
    if listed and host.python:
        verdict = "ok" if host.python in listed else "wrong"
    return Finding(
        pair="Python for MindSpore",
        verdict=verdict,
        found=f"Python {host.python or NOT_FOUND}, MindSpore {host.mindspore or NOT_FOUND}",
        expected=str(listed) if listed else NOT_KNOWN,
        why="there are wheels for these only",
        remedy="install such a Python, and everything anew in it",
        source=(entry.python_source if entry else None) or NO_SOURCE,
    )


def _cann_with_python(host: HostVersions, table: VersionTable) -> Finding:
    """Outside of what is documented is not known to fail."""
    mine = numbers(host.cann_release)[:2]
    entry = next((each for each in table.cann if mine and numbers(each.version) == mine), None)
    return Finding(
        pair="Python for CANN",
        verdict="ok" if entry and host.python and host.python in entry.python else "unknown",
        found=f"Python {host.python or NOT_FOUND}, CANN {host.cann_release or NOT_FOUND}",
        expected=f"documented for {entry.python}" if entry else NOT_KNOWN,
        why="parts of CANN's compiler are Python packages",
        remedy="if there is trouble, try a Python that is documented",
        source=entry.source if entry else NO_SOURCE,
    )


def _begins(version: str, prefix: str) -> bool:
    """Whether it is of a release: 25.0.rc1.1 is of 25.0 and of 25.0.RC1, 25.01 of neither."""
    version, prefix = version.lower(), prefix.lower()
    return bool(prefix) and (version == prefix or version.startswith(f"{prefix}."))


def _pairs(text: str | None) -> list[tuple[str, str]]:
    return [(group[0], group[1]) for group in bracketed(text) if len(group) == 2 and all(map(numbers, group))]


def _listed(text: str | None) -> list[str]:
    return [word for group in bracketed(text) for word in group]


def _any_of(words: Iterable[str]) -> str:
    return ", ".join(words) or NOT_KNOWN


def _with_base(release: str | None, base: str | None) -> str:
    return NOT_FOUND if release is None else f"{release} ({base})" if base else release
