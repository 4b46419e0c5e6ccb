"""What `amt check versions` shows."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ascend_moe_train.cluster.version_files import HostVersions, VersionFile
from ascend_moe_train.cluster.versions import NOT_FOUND, NOT_KNOWN, Finding

INFERENCE = "an inference, no source states the rule"


def report(host: HostVersions, findings: Sequence[Finding]) -> dict[str, Any]:
    """As JSON-able values; what was not found is null."""
    return {
        "versions": {
            "python": {"version": host.python},
            "mindspore": {"version": host.mindspore},
            "cann": {"version": host.cann_release, **_file(host.cann)},
            "cann_compiler": {"version": host.compiler.get("Version"), **_file(host.compiler)},
            "driver": {"version": host.driver_release, **_file(host.driver)},
            "firmware": {"version": host.firmware_version, **_file(host.firmware)},
        },
        "checks": [asdict(each) for each in findings],
    }


def report_text(shown: dict[str, Any]) -> Iterator[str]:
    """The same for people: what is there, then each pair, with reason and remedy of what is wrong."""
    for name, each in shown["versions"].items():
        found = each["version"] or (f"not usable: {each['problem']}" if each.get("problem") else NOT_FOUND)
        yield f"{name.replace('_', ' '):<14} {found:<16} {each.get('file') or ''}".rstrip()
    yield ""
    for check in shown["checks"]:
        expected = f"; expected {check['expected']}" if check["expected"] != NOT_KNOWN else ""
        if not expected and NOT_FOUND not in check["found"]:
            expected = "; no source says what fits"
        yield f"{check['verdict']:<8} {check['pair']}: {check['found']}{expected}"
        if check["verdict"] == "wrong":
            yield f"{'':<8}   why: {check['why']}"
            yield f"{'':<8}   do: {check['remedy']}"
        if check["verdict"] != "unknown":
            yield f"{'':<8}   by: {check['source']}" + (f" ({INFERENCE})" if check["is_inference"] else "")


def _file(file: VersionFile) -> dict[str, str | None]:
    return {"file": file.place, "problem": file.problem}
