"""What pages name is there: links, pictures, messages, tests, files and functions, commands of benchmarks."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
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


PACKAGE = ROOT / "peft_mux"
ROWS = [line for line in (ROOT / "docs/paper_map.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *(ROOT / "docs").glob("*.md")]


def named_files(cell: str) -> list[tuple[str, Path | None, str]]:
    """Return the text of each name in a cell, with its path (`None` where there is none) and its name in it."""
    found: list[tuple[str, Path | None, str]] = []
    folders: list[Path] = []
    for text in re.findall(r"`([^`]+)`", cell):
        path, _, name = text.partition("::")
        if not re.fullmatch(r"[\w./-]+(\.py|\.md|/)", path):
            continue
        # A bare file name is in the folder of a file that the cell has named before, or in such a folder.
        places = [PACKAGE / path, ROOT / path, *(folder / path for folder in reversed(folders) if "/" not in path)]
        if path.startswith("catalogue/"):
            places += [folder / path for folder in folders]
        place = next((place for place in places if place.exists()), None)
        found.append((text, place, name))
        if place is not None:
            folders.append(place if place.is_dir() else place.parent)
    return found


def names_in(path: Path) -> set[str]:
    """Return the classes and functions of a file, and `Class.method` of its methods."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("row", ROWS, ids=[row[2:40] for row in ROWS])
def test_every_file_class_and_function_of_the_paper_map_exists(row: str) -> None:
    cells = row.strip("|").split("|")
    assert len(cells) == 4, "part, realised by, test, benchmark"
    for cell in cells[1:]:
        for text, place, name in named_files(cell):
            assert place is not None, f"`{text}`: no such file"
            assert not name or name in names_in(place), f"`{text}`: {place.relative_to(ROOT)} has no {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_every_benchmark_that_a_document_says_to_run_exists(document: Path) -> None:
    for module in re.findall(r"\b(benchmarks(?:\.[a-z_0-9]+)+)\b(?!\.py)", document.read_text(encoding="utf-8")):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), f"{module} cannot be run"


def test_a_name_that_is_not_there_is_found_missing() -> None:
    (_, gone, _), (_, there, name) = named_files(
        "`data/packing/no_such.py`, `data/packing/passes.py::best_fit_decreasing`"
    )
    assert gone is None
    assert there is not None
    assert name in names_in(there)
    assert "worst_fit" not in names_in(there)


TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
FILES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
CODE = "\n".join(FILES.values()) + "\n".join(
    path.read_text(encoding="utf-8") for path in (ROOT / "peft_mux").rglob("*.py")
)


def test_every_file_that_it_names_is_there() -> None:
    named = re.findall(r"`((?:tests|peft_mux)/[\w/.]+)`", TEXT)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_test_that_it_names_is_there() -> None:
    named = re.findall(r"`(test_\w+?)(?:\.\.\.)?`", TEXT)
    assert len(named) > 15
    assert [name for name in named if f"def {name}" not in CODE] == []


def test_every_table_that_it_names_is_there() -> None:
    named = re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", TEXT)
    of_the_system = {"SIGKILL", "ENOSPC", "EROFS", "EIO", "PEFT_MUX_CRASHPOINT"}
    known = {*re.findall(r"^([A-Z_]+)\b.* = ", CODE, re.MULTILINE), *of_the_system}
    assert len(named) > 15
    assert {name for name in named if name not in known} == set()


PIECES = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def said() -> str:
    """Return all code, with strings joined that continue on the next line."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "peft_mux").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", code)


@pytest.mark.parametrize("piece", PIECES)
def test_each_message_of_the_troubleshooting_page_is_one_that_the_code_has(piece: str, said: str) -> None:
    assert piece in said


def test_there_are_messages_to_look_for() -> None:
    assert len(PIECES) > 8


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = set(re.findall(r"(\w+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == listed


@pytest.mark.nightly
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs_jupyter") is None, reason="mkdocs-jupyter is absent (the extra docs)"
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MultiTaskTrainer" in (tmp_path / "site/reference/index.html").read_text(encoding="utf-8")
