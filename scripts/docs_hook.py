"""What `mkdocs.yml` hooks into MkDocs: pages outside docs/ become pages of the site, and links between all of them,
which are written as a reader of the repository follows them, lead to pages of the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
BENCHMARKS = "Benchmarks"
# The target of a link or image, and its anchor; not one with a scheme.
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def outside() -> dict[str, str]:
    """Place in the repository of every page outside docs/, and its place in the site."""
    benchmarks = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").glob("*.md"))
    own = ["README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md", *benchmarks]
    return {"README.md": "index.md"} | {place: place for place in own}


def in_site(place: str) -> str | None:
    """The place in the site of what has that place in the repository; None if it is not in the site."""
    if place in outside():
        return outside()[place]
    return place.removeprefix("docs/") if place.startswith("docs/") else None


def in_repository(uri: str) -> str:
    """The inverse of `in_site`."""
    return {site: place for place, site in outside().items()}.get(uri, f"docs/{uri}")


def translated(markdown: str, uri: str) -> str:
    """A page of the site with its links, which are relative to its place in the repository, as links in the site. One
    that leads out of the site is left as it is, and MkDocs complains of it."""
    folder = posixpath.dirname(in_repository(uri))

    def replaced(link: re.Match[str]) -> str:
        target = in_site(posixpath.normpath(posixpath.join(folder, link[1])))
        if target is None:
            return link[0]
        return posixpath.relpath(target, posixpath.dirname(uri) or ".") + (link[2] or "")

    return LINK.sub(replaced, markdown)


def slug(heading: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it: letters and digits of any language are kept."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the benchmarks in the navigation, and names anchors as the repository's pages do, Chinese ones too."""
    assert config.nav is not None
    section = next(entry for entry in config.nav if BENCHMARKS in entry)
    section[BENCHMARKS] = [site for place, site in outside().items() if place.startswith("benchmarks/")]
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside docs/."""
    for place, uri in outside().items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / place)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translates links."""
    return translated(markdown, page.file.src_uri)
