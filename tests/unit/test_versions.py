"""Versions of Ascend's software: reading what a host says of itself, and judging which fit together."""

import json
import os
import sys
from pathlib import Path

import pytest

from ascend_moe_train.cli import main as cli
from ascend_moe_train.cluster import version_files
from ascend_moe_train.cluster.version_files import (
    HOME,
    INSTALLED_KEY,
    MAX_BYTES,
    MAX_VALUE,
    HostVersions,
    Places,
    VersionFile,
    parse_version_file,
    places,
    read_host,
    read_version_file,
)
from ascend_moe_train.cluster.version_report import report, report_text
from ascend_moe_train.cluster.versions import (
    Finding,
    MindSporeEntry,
    base_version,
    bracketed,
    check_versions,
    is_between,
    misfits,
    version_table,
)

DRIVER = """Version=25.0.rc1.1
ascendhal_version=7.35.23
aicpu_version=1.0
Innerversion=V100R001C21SPC002B220
compatible_version=[V100R001C17],[V100R001C18],[V100R001C19],[V100R001C20],[V100R001C21]
compatible_version_fw=[7.0.0,7.7.99]
package_version=25.0.rc1.1
"""
FIRMWARE = """Version=7.7.0.1.231
firmware_version=1.0
package_version=25.0.rc1.1
compatible_version_drv=[23.0.0,23.0.0.],[24.0,24.0.],[24.1,24.1.],[25.0,25.0.]
"""
CANN = """package_name=Ascend-cann-toolkit
version=8.2.RC1
innerversion=V100R001C22SPC001B231
compatible_version=[V100R001C15],[V100R001C18],[V100R001C19],[V100R001C20],[V100R001C21],[V100R001C23]
arch=aarch64
path=/usr/local/Ascend/ascend-toolkit/8.2.RC1/aarch64-linux
"""
COMPILER = "Version=8.2.0.0.201\nversion_dir=8.2.RC1\n"


def parsed(text: str) -> VersionFile:
    return parse_version_file(text.encode(), "version.info")


def host(
    *,
    driver: str = DRIVER,
    firmware: str = FIRMWARE,
    cann: str = CANN,
    compiler: str = COMPILER,
    mindspore: str | None = "2.10.0",
    python: str = "3.11.4",
) -> HostVersions:
    files = {"driver": driver, "firmware": firmware, "cann": cann, "compiler": compiler}
    return HostVersions(python=python, mindspore=mindspore, **{name: parsed(text) for name, text in files.items()})


def verdicts(of: HostVersions) -> dict[str, str]:
    return {each.pair: each.verdict for each in check_versions(of)}


def finding(of: HostVersions, pair: str) -> Finding:
    return next(each for each in check_versions(of) if each.pair == pair)


def test_a_host_that_fits() -> None:
    assert verdicts(host()) == {
        "firmware for driver": "ok",
        "driver for firmware": "ok",
        "CANN with driver": "ok",
        "CANN for MindSpore": "ok",
        "driver for MindSpore": "unknown",
        "Python for MindSpore": "ok",
        "Python for CANN": "unknown",
    }
    assert misfits(check_versions(host())) is None


@pytest.mark.parametrize(
    ("changed", "pair"),
    [
        (host(firmware=FIRMWARE.replace("7.7.0.1.231", "7.8.0.1")), "firmware for driver"),
        (host(firmware=FIRMWARE.replace("7.7.0.1.231", "6.9.9")), "firmware for driver"),
        (host(driver=DRIVER.replace("package_version=25.0.rc1.1", "package_version=25.2.0")), "driver for firmware"),
        (host(driver=DRIVER.replace("package_version=25.0.rc1.1", "package_version=25.01")), "driver for firmware"),
        (host(cann=CANN.replace("[V100R001C21],", "")), "CANN with driver"),
        (host(compiler=COMPILER.replace("8.2.0", "8.1.0")), "CANN for MindSpore"),
        (host(python="3.13.0"), "Python for MindSpore"),
        (host(python="3.8.18"), "Python for MindSpore"),
    ],
)
def test_a_pair_that_does_not_fit_is_the_only_one(changed: HostVersions, pair: str) -> None:
    found = check_versions(changed)
    assert [each.pair for each in found if each.verdict == "wrong"] == [pair]
    line = misfits(found)
    assert line is not None
    assert line.startswith(f"versions do not fit: {pair}: ")
    assert "\n" not in line


def test_either_direction_suffices_for_cann_and_driver() -> None:
    only_driver_lists = host(
        cann=CANN.replace("C22SPC", "C20SPC").replace("[V100R001C21],", ""),
    )
    assert verdicts(only_driver_lists)["CANN with driver"] == "ok"
    assert finding(only_driver_lists, "CANN with driver").is_inference
    one_list = host(cann="version=8.5.0\ninnerversion=V100R001C25\n")
    assert verdicts(one_list)["CANN with driver"] == "unknown"


def test_nothing_found_is_unknown_and_never_wrong() -> None:
    assert set(verdicts(HostVersions()).values()) == {"unknown"}
    empty = host(driver="", firmware="", cann="", compiler="")
    assert {verdict for pair, verdict in verdicts(empty).items() if "Python" not in pair} == {"unknown"}


def test_a_version_that_no_source_knows_is_unknown() -> None:
    for version in ("2.8.0", "2.7.0", "3.0", "", None):
        # 2.7.0 is published with 8.2.RC1; that another does not work is nowhere said
        of = host(mindspore=version, cann=CANN.replace("8.2.RC1", "8.3.RC1"))
        assert verdicts(of)["CANN for MindSpore"] == "unknown"
    assert verdicts(host(mindspore="2.7.0"))["CANN for MindSpore"] == "ok"
    assert verdicts(host(mindspore="2.7.0"))["driver for MindSpore"] == "unknown"
    assert verdicts(host(mindspore="2.6.0"))["driver for MindSpore"] == "ok"


def test_the_documented_pythons_of_cann() -> None:
    cann = CANN.replace("8.2.RC1", "8.3.RC1")
    assert verdicts(host(cann=cann))["Python for CANN"] == "ok"
    assert verdicts(host(cann=cann, python="3.11.9"))["Python for CANN"] == "unknown"


def test_without_the_installers_file_the_compilers_counts() -> None:
    of = host(cann="")
    assert of.cann_release == "8.2.RC1"
    assert verdicts(of)["CANN for MindSpore"] == "ok"
    assert host(cann="", compiler="Version=9.1.0.0.1\n").cann_release == "9.1.0.0.1"


def test_newer_drivers_have_their_release_elsewhere() -> None:
    newer = DRIVER.replace("Version=25.0.rc1.1\n", "Version=7.35.23\n", 1)
    assert host(driver=newer.replace("25.0.rc1.1", "26.0.rc1")).driver_release == "26.0.rc1"


def test_the_table_is_what_the_installed_mindspore_checks_for() -> None:
    checker = pytest.importorskip("mindspore.run_check._check_version")
    mindspore = pytest.importorskip("mindspore")
    entry = entry_of(mindspore.__version__)
    assert entry.cann_accepted == checker.AscendEnvChecker(None).version


def entry_of(version: str) -> MindSporeEntry:
    return next(each for each in version_table().mindspore if each.version == version)


def test_every_entry_has_a_source() -> None:
    table = version_table()
    sources = [each.source for each in table.mindspore] + [each.source for each in table.cann]
    assert all(source.strip() for source in sources)
    assert all(each.python_source for each in table.mindspore if each.python)
    assert len({each.version for each in table.mindspore}) == len(table.mindspore) >= 10
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in (entry_of("2.10.0").python or "")


@pytest.mark.parametrize(
    ("version", "is_in"),
    [("3.9", True), ("3.12.9", True), ("3.13", False), ("3.8.99", False), ("x", False), ("", False), ("3", False)],
)
def test_ranges_include_their_ends(version: str, is_in: bool) -> None:
    assert is_between(version, "3.9", "3.12") is is_in


def test_notations() -> None:
    assert bracketed("[7.0.0, 7.7.99],[8]") == [["7.0.0", "7.7.99"], ["8"]]
    assert bracketed("7.0") == bracketed(None) == []
    assert base_version("V100R001C22SPC001B231") == "V100R001C22"
    assert base_version("8.2") is base_version(None) is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"Version=1\n" * (MAX_BYTES // 9), "longer than"),
        (b"Version=\xff\n", "not UTF-8 text: byte 0xff at offset 8"),
        (b"", "no line of the form"),
        (b"\x00\x01", "no line of the form"),
        (b"[section]\nno values here\n", "no line of the form"),
        (b"Version=a\x1b[31mb\n", "no line of the form"),
        (b"Version=" + b"9" * (MAX_VALUE + 1), "no line of the form"),
    ],
)
def test_hostile_files_say_what_is_wrong(content: bytes, problem: str) -> None:
    file = parse_version_file(content, "version.info")
    assert not file.values
    assert file.problem is not None
    assert problem in file.problem
    assert set(verdicts(HostVersions(driver=file, firmware=file, cann=file, compiler=file)).values()) == {"unknown"}


@pytest.mark.parametrize("value", ["[[[[", "[,]", "[7.0.0]", "[a,b]", "]" * 999, "[" + "," * 999 + "]", "[9" * 400])
def test_values_of_no_known_form_judge_nothing_wrong(value: str) -> None:
    odd = f"Version={value}\ncompatible_version={value}\ncompatible_version_fw={value}\n"
    of = host(driver=odd, firmware=f"compatible_version_drv={value}\nVersion={value}", cann=odd, compiler=odd)
    assert {verdict for pair, verdict in verdicts(of).items() if "Python" not in pair} == {"unknown"}


def test_keys_twice_spaces_and_unknown_ones() -> None:
    file = parse_version_file("\ufeff Version = 1 \r\nVersion=2\nnew_key=x=y\n".encode(), "p")
    assert file.values == {"Version": "1", "new_key": "x=y"}


def test_files_of_a_host(tmp_path: Path) -> None:
    base, home = tmp_path / "moved", tmp_path / "cann-9"
    installed = tmp_path / "ascend_install.info"
    installed.write_text(f"UserName=HwHiAiUser\n{INSTALLED_KEY}={base}\n")
    where = places({HOME: str(home)}, installed=installed)
    assert where.driver == (base / "driver" / "version.info",)
    for paths, text in ((where.driver, DRIVER), (where.firmware, FIRMWARE), (where.cann, CANN), (where.compiler, "x")):
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(text)
    found = read_host({}, where)
    assert (found.driver_release, found.firmware_version, found.cann_release) == (
        "25.0.rc1.1",
        "7.7.0.1.231",
        "8.2.RC1",
    )
    assert found.compiler.problem is not None


def test_without_variables_the_usual_folders_are_looked_at(tmp_path: Path) -> None:
    where = places({}, root=tmp_path, installed=tmp_path / "absent")
    assert where.driver == (tmp_path / "driver" / "version.info",)
    assert [path.relative_to(tmp_path).parts[0] for path in where.compiler] == ["ascend-toolkit", "cann"]
    (tmp_path / "cann" / "compiler").mkdir(parents=True)
    where.compiler[1].write_text(COMPILER)
    assert read_version_file(where.compiler).get("version_dir") == "8.2.RC1"


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_version_file((tmp_path / "pipe",)).problem == "is no regular file"
    assert read_version_file((tmp_path,)).problem == "is no regular file"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert read_version_file((tmp_path / "loop",)).values is None
    too_long = read_version_file((tmp_path / ("x" * 300),))
    assert too_long.problem is not None
    assert too_long.problem.startswith("cannot be read: ")


def test_command_on_a_host_without_ascend(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = (Path("/absent/version.info"),)
    at = Places(driver=nowhere, firmware=nowhere, cann=nowhere, compiler=nowhere)
    monkeypatch.setattr(version_files, "places", lambda environment: at)
    assert cli.main(["check", "versions"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "not found" in line and "/absent/version.info" in line]) == 4
    assert any(line.startswith("ok       Python for MindSpore: ") for line in lines)
    assert cli.main(["check", "versions", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["versions"]["driver"] == {"version": None, "file": "/absent/version.info", "problem": None}
    assert {each["verdict"] for each in shown["checks"]} <= {"ok", "unknown"}


def test_command_where_versions_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "version.info").write_text("Version=8.1.0.1\n")
    monkeypatch.setenv(HOME, str(tmp_path))
    assert cli.main(["check", "versions"]) == 2
    output = capsys.readouterr()
    assert output.err == (
        "error: versions do not fit: CANN for MindSpore: MindSpore 2.10.0, CANN 8.1.0.1, expected 8.2, 8.3, 8.5, 9.0, "
        "9.1 (amt check versions shows all)\n"
    )
    assert "  do: install a CANN of those" in output.out


def test_text_says_reason_and_that_a_rule_is_inferred() -> None:
    of = host(cann=CANN.replace("[V100R001C21],", ""))
    text = "\n".join(report_text(report(of, check_versions(of))))
    assert "wrong    CANN with driver: CANN 8.2.RC1 (V100R001C22), driver 25.0.rc1.1 (V100R001C21)" in text
    assert "hangs" in text
    assert "an inference" in text
