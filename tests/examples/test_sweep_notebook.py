"""The notebook of a sweep runs from its first cell to its last."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.paths import ROOT

NOTEBOOK = ROOT / "notebooks" / "03_sweep.ipynb"


def test_the_notebook_of_a_sweep_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
@pytest.mark.notebook
def test_the_notebook_of_a_sweep_ranks_twenty_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the notebooks extra: nbformat")
    nbclient = pytest.importorskip("nbclient", reason="needs the notebooks extra: nbclient")
    pytest.importorskip("ipykernel", reason="needs the notebooks extra: ipykernel")
    pytest.importorskip("matplotlib", reason="needs the plots extra: the notebook draws the ranking")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
    for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("TMPDIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    html = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("peft-mux" in one for one in html), "the run as it went on"
    assert any(one.count("<tr>") == 21 for one in html), "the ranking"
    assert any("image/png" in output.get("data", {}) for output in outputs)
