"""Links of the docs lead to files and headings that exist, and pictures are what their tool draws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import ROOT
from tools.pictures import COMMAND, DRAWINGS, FOLDER

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def links(page: Path) -> list[str]:
    """Return the targets of all links and pictures of a page that are not on the web."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("http")]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        place = page.parent / name if name else page
        assert place.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(place), f"{page.name}: {target}"


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_picture_is_what_the_tool_draws(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text("utf-8") == DRAWINGS[name]().svg(), f"run {COMMAND} --drawings"


def test_every_picture_is_shown_somewhere_and_loads_nothing_from_the_web() -> None:
    shown = {(page.parent / target).resolve() for page in PAGES for target in links(page)}
    for path in FOLDER.glob("*.svg"):
        assert path.resolve() in shown
        assert not re.search(r"(href=|src=|url\()[\"']?http", path.read_text("utf-8"))
