"""The blocks of the README and of the tutorial run as a reader would paste them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from peft_mux.cli.main import main
from peft_mux.demo.small_llama import make_backbone, make_tokenizer
from tests.paths import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "Qwen/Qwen3-0.6B"


@pytest.fixture
def small_model_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with the example rows of a checkout, a small model, and the files of the README's YAML."""
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    rows = [{"prompt": f"{a} and {b} make", "completion": f" {a + b}"} for a in range(1, 5) for b in range(1, 5)]
    tokenizer = make_tokenizer([row["prompt"] + row["completion"] for row in rows])
    for part in (make_backbone(tokenizer, hidden_size=64, num_layers=2), tokenizer):
        part.save_pretrained("small")
    Path("data").mkdir()
    for name in ("math", "sql"):
        Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.usefixtures("small_model_and_rows")
def test_the_example_of_the_readme_trains_two_plain_adapters() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    for old, new in ((MODEL, "small"), ("max_steps=20", "max_steps=2"), ("learning_rate=2e-4", "use_cpu=True")):
        assert old in code
        code = code.replace(old, new)
    exec(code, {})
    for name in ("sql", "sums"):
        assert Path(f"runs/first/{name}/adapter_model.safetensors").is_file()


@pytest.mark.usefixtures("small_model_and_rows")
def test_the_file_of_the_readme_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    config = yaml.safe_load(text)
    config["model"] = "small"
    config["run"] = {"use_cpu": True}
    config["tasks"]["math"] |= {"dataset": "data/math.jsonl", "split": "train[:8]", "eval_split": "train[8:]"}
    Path("tasks.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert main(["validate", "tasks.yaml"]) == 0, capsys.readouterr().err


def test_every_block_of_the_tutorial_runs_and_leaves_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
