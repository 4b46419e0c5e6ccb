"""What the Python that runs ranks says of itself: `python -P -m` this module prints it as JSON. Pure."""

import hashlib
import importlib.metadata
import json
from functools import cache
from pathlib import Path

from ascend_moe_train.cluster.version_files import read_host
from ascend_moe_train.cluster.version_report import report
from ascend_moe_train.cluster.versions import check_versions

PACKAGE = Path(__file__).parents[2]
MODULE = "ascend_moe_train.cluster.preflight.self_report"


@cache
def code_digest() -> str:
    """The SHA-256 of this package: of every source and data file with its place, whoever installed it."""
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(PACKAGE).as_posix()} {content}\n".encode())
    return total.hexdigest()


def package_version() -> str | None:
    """Of this package, None if it was never installed."""
    try:
        return importlib.metadata.version("ascend-moe-train")
    except importlib.metadata.PackageNotFoundError:
        return None


def self_report() -> dict[str, object]:
    """Versions and which of them fit, as `amt check versions` has it; version and digest of this package."""
    host = read_host()
    return {**report(host, check_versions(host)), "package": package_version(), "code": code_digest()}


if __name__ == "__main__":
    print(json.dumps(self_report()))
