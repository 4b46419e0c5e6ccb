"""`amt version`."""

import platform
from importlib.metadata import PackageNotFoundError, version

import click

PACKAGES = ("ascend-moe-train", "mindspore", "numpy", "mpi4py", "mpich", "tokenizers", "safetensors", "pydantic")


@click.command("version")
def command() -> None:
    """Print the versions that a bug report needs."""
    for name, number in versions().items():
        click.echo(f"{name:<17} {number}")


def versions() -> dict[str, str]:
    """Version of the package, of Python, of the system, and of what numbers depend on; nothing is imported for it."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
