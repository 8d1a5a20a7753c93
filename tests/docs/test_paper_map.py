"""What docs name of the repository is there: files, classes and functions of the paper map, commands of benchmarks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.paths import ROOT

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
