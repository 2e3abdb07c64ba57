"""Links of the Markdown files outside docs/ lead somewhere; mkdocs checks those inside."""

import re
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT

PAGES = sorted(ROOT.glob("*.md"))
#: relative links to a workflow are GitHub's own
LINK = re.compile(r"\]\((?!https?://|mailto:|\.\./\.\./actions/)([^)\s]+)\)")


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    actual = set()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower())
        actual.add(slug.strip().replace(" ", "-"))
    return actual


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for link in LINK.findall(page.read_text("utf-8")):
        name, _, anchor = link.partition("#")
        if name:
            target = page.parent / name
        else:
            target = page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_navigation_names_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = set(re.findall(r"[:-] ([\w/-]+\.md)$", navigation, re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == pages
