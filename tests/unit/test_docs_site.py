"""`mkdocs.yml`: the site builds without a warning and without a network, and its pages load nothing from elsewhere."""

import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

from scripts.docs_hook import ROOT, in_repository, in_site, outside, slug, translated

WITHOUT_NETWORK = """
import socket
import sys

from mkdocs.__main__ import cli


def refuse(*arguments):
    raise AssertionError(f"the build asks the network: {arguments[1:]}")


socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
cli(["build", "--strict", *sys.argv[1:]])  # with --quiet as well warnings would be no errors
"""
ATTRIBUTES = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


class Loaded(HTMLParser):
    """Collects what a page makes a browser load; a canonical address or the next page is none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag != "link" or values.get("rel") not in ("next", "prev", "canonical"):
            self.addresses += [address] if (address := values.get(ATTRIBUTES.get(tag, ""))) else []


def build(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK, *arguments],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = build("--site-dir", str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    for uri in [*outside().values(), "planner.md", "parallel.md"]:
        assert (tmp_path / "site" / uri).with_suffix(".html") in pages
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert loaded.addresses
        assert [address for address in loaded.addresses if address.startswith(("http:", "https:", "//"))] == []


DEAD_LINKS = {
    "[x](planer.md)": "planer.md",
    "[x](planner.md#no-such-part)": "no-such-part",
    "[x](../benchmarks/nothing.md)": "nothing.md",
    "[x](../ascend_moe_train/config.py)": "config.py",
}


def test_dead_links_are_errors(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "launch.md").open("a", encoding="utf-8") as page:
        page.write("\n" + "\n".join(DEAD_LINKS) + "\n")
    hook = ROOT / "scripts" / "docs_hook.py"
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nhooks: [{hook}]\n")
    done = build("--config-file", str(tmp_path / "mkdocs.yml"), "--site-dir", str(tmp_path / "site"))
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    for complaint in DEAD_LINKS.values():
        assert len([line for line in warnings if complaint in line]) == 1


def test_links_of_the_repository_become_links_of_the_site() -> None:
    assert translated("[a](docs/planner.md#time), ![b](docs/report.png)", "index.md") == (
        "[a](planner.md#time), ![b](report.png)"
    )
    assert translated("[a](../benchmarks/ranks.md) [b](launch.md) [c](#here)", "parallel.md") == (
        "[a](benchmarks/ranks.md) [b](launch.md) [c](#here)"
    )
    assert translated("[a](../../README.md) [b](../parallel.md)", "guide/zero.md") == (
        "[a](../index.md) [b](../parallel.md)"
    )
    left = "[a](../tests/ranks.py) [b](https://example.org/docs/a.md)"
    assert translated(left, "parallel.md") == left


def test_places_go_both_ways() -> None:
    for place in ("README.md", "docs/planner.md", "benchmarks/ranks.md"):
        uri = in_site(place)
        assert uri is not None
        assert in_repository(uri) == place


def test_anchors_are_those_of_github() -> None:
    assert slug("The mesh: who is `where`?", "-") == "the-mesh-who-is-where"
    assert slug("通信 与 计算", "-") == "通信-与-计算"
