"""A notebook of `notebooks/`, looked at as it is stored and run as a reader does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT


def num_cells_without_outputs(path: Path) -> int:
    """Return the number of code cells, none of which is stored with what it gave."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    return len(code)


def executed(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, timeout_s: int = 280) -> Any:
    """Return a notebook after its last cell, run in `folder` without network; skip where its extra is missing."""
    nbformat = pytest.importorskip("nbformat", reason="needs the notebooks extra: nbformat")
    nbclient = pytest.importorskip("nbclient", reason="needs the notebooks extra: nbclient")
    pytest.importorskip("ipykernel", reason="needs the notebooks extra: ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
    for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("TMPDIR", str(folder))):
        monkeypatch.setenv(name, value)
    for name in ("IPYTHONDIR", "HF_HOME"):
        monkeypatch.setenv(name, str(folder / name))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=timeout_s, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def outputs_of(notebook: Any) -> list[Any]:
    """Return what all its code cells gave."""
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed_by(notebook: Any) -> str:
    """Return what its cells printed."""
    return "".join(output.text for output in outputs_of(notebook) if output.get("name") == "stdout")


def html_of(notebook: Any, *sources: str) -> list[str]:
    """Return the HTML that its cells show, or those that have one of `sources` in them, by cell."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if sources:
        cells = [cell for cell in cells if all(source in cell.source for source in sources)]
    found = [output.data for cell in cells for output in cell.outputs if "data" in output]
    return [data["text/html"] for data in found if "text/html" in data]
