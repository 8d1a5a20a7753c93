"""A file of two tasks, with the backbone and the rows that it names."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from tests.cli.lab import save_backbone, write_rows

ROWS = [{"prompt": f"say {word}", "completion": f" {word}"} for word in ("one", "two", "three", "four", "five", "six")]
TASKS = """\
model: backbone
output_dir: {output_dir}
run: {{use_cpu: true, logging_steps: 1, report_to: none, max_steps: 3, per_device_train_batch_size: 2, save_steps: 2}}
defaults: {{dataset: rows.jsonl, learning_rate: 1e-2, peft: {{r: 4, target_modules: all-linear}}}}
tasks:
  sql: {{eval_dataset: rows.jsonl}}
  math: {{peft: {{r: 2}}, max_steps: 2}}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a tiny backbone, its tokenizer, and rows."""
    folder = tmp_path_factory.mktemp("cli")
    save_backbone(folder / "backbone", [row["prompt"] + row["completion"] for row in ROWS])
    write_rows(folder / "rows.jsonl", ROWS)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what `datasets` keeps go to the test's own folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(made: Path, tmp_path: Path) -> Path:
    """Return a file of two tasks; what it trains goes to the test's own folder."""
    path = made / f"{tmp_path.name}.yaml"
    path.write_text(TASKS.format(output_dir=tmp_path / "out"), encoding="utf-8")
    return path
