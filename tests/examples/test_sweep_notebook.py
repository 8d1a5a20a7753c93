"""The notebook of a sweep runs from its first cell to its last."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.notebook_run import executed, num_cells_without_outputs, outputs_of
from tests.paths import ROOT

NOTEBOOK = ROOT / "notebooks" / "03_sweep.ipynb"


def test_the_notebook_of_a_sweep_is_stored_without_outputs() -> None:
    assert num_cells_without_outputs(NOTEBOOK) >= 5


@pytest.mark.slow
@pytest.mark.notebook
def test_the_notebook_of_a_sweep_ranks_twenty_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs the plots extra: the notebook draws the ranking")
    outputs = outputs_of(executed(NOTEBOOK, tmp_path, monkeypatch))
    html = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("peft-mux" in one for one in html), "the run as it went on"
    assert any(one.count("<tr>") == 21 for one in html), "the ranking"
    assert any("image/png" in output.get("data", {}) for output in outputs)
