"""A notebook of `notebooks/`, as it is stored and as a reader runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT


def stored(name: str) -> Any:
    """Return a notebook with the outputs that it is stored with."""
    nbformat = pytest.importorskip("nbformat", reason="needs the notebooks extra: nbformat")
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def run(name: str, folder: Path) -> Any:
    """Return a notebook after its last cell, run in `folder` without network; skip where its extra is missing."""
    pytest.importorskip("matplotlib", reason="needs the plots extra: notebooks draw")
    for module in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(module, reason=f"needs the notebooks extra: {module}")
    from tools.notebooks import clean, executed

    notebook = executed(ROOT / "notebooks" / f"{name}.ipynb", folder)
    clean(notebook, folder)
    return notebook


def outputs_of(notebook: Any) -> list[Any]:
    """Return what all its code cells gave."""
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed_by(notebook: Any) -> str:
    """Return what its cells printed."""
    return "".join(output.text for output in outputs_of(notebook) if output.get("name") == "stdout")


def has_picture(notebook: Any) -> bool:
    """Whether a cell shows a PNG."""
    return any("image/png" in output.get("data", {}) for output in outputs_of(notebook))


def html_of(notebook: Any, *sources: str) -> list[str]:
    """Return the HTML that its cells show, or those that have all of `sources` in them, by cell."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells = [cell for cell in cells if all(source in cell.source for source in sources)]
    found = [output.data for cell in cells for output in cell.outputs if "data" in output]
    return [data["text/html"] for data in found if "text/html" in data]
