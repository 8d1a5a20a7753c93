"""The tutorial's blocks run in their order, as a reader would paste them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_every_block_of_the_tutorial_runs_and_leaves_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    assert len(blocks) == 7
    assert (tmp_path / "run/mood/adapter_model.safetensors").is_file()
    assert (tmp_path / "run/sums/adapter_config.json").is_file()
    assert 0 < names["output"].metrics["mood/train_loss"] < 7
    assert re.search(r"^mood '", printed, re.MULTILINE)
    assert re.search(r"^sums '", printed, re.MULTILINE)
    assert names["again"].task_states["sums"].global_step == 6
