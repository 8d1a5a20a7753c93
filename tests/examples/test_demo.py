"""`peft-mux demo --fast`: it ends well, trains every task, and writes and says what it claims."""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_mux.cli.main import main
from peft_mux.demo import run as demo
from peft_mux.demo.task_rows import demo_tasks
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.records import run_records

NAMES = [task.name for task in demo_tasks()]


@dataclass(frozen=True)
class Shown:
    """A demo that has run.

    Attributes:
        status: of the command.
        said: on standard output.
        root: the folder that it was given.
        temporary: the folder for temporary files, as it was left.
        baseline: the backbone that the usual way was timed on.
    """

    status: int
    said: str
    root: Path
    temporary: Path
    baseline: Any


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Run the demo once for all tests."""
    root, temporary = tmp_path_factory.mktemp("demo") / "out", tmp_path_factory.mktemp("temporary")
    lines: list[str] = []
    seen: list[Any] = []
    train_one_by_one = demo.train_one_by_one

    def watch(backbone: Any, *args: Any, **kwargs: Any) -> tuple[float, int]:
        seen.append(backbone)
        return train_one_by_one(backbone, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setattr(demo, "_print_line", lines.append)
        patch.setattr(demo, "train_one_by_one", watch)
        status = main(["demo", "--fast", "--output-dir", str(root)])
    return Shown(status, "\n".join(lines), root, temporary, seen[0])


def test_every_task_is_planned_trained_and_told_of(shown: Shown) -> None:
    assert shown.status == 0
    assert len(NAMES) == 6
    records = run_records(shown.root)
    for name in NAMES:
        ended = [record["status"] for record in records if record["event"] == "status" and record["task"] == name]
        assert ended[-1] == "succeeded", name
        losses = [record["loss"] for record in records if record["event"] == "train" and record["task"] == name]
        assert len(losses) == 4
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[-1] < losses[0], f"{name} learned nothing"
        assert re.search(rf"^{name} +\d+ +\d+\.\d+ -> +\d+\.\d+", shown.said, re.MULTILINE), name
    assert not re.search("hTask|chunk|profile|micro-batch", shown.said), "words of the planner"


def test_what_is_reported_to_be_written_is_there_and_nothing_else(shown: Shown) -> None:
    assert f"Files go to {shown.root}." in shown.said
    assert f"{shown.root / 'report.html'}\n" in shown.said
    assert "<svg" in (shown.root / "report.html").read_text(encoding="utf-8")
    assert {path.name for path in shown.root.iterdir() if path.is_dir()} == {*NAMES, "backbone", "state"}
    assert list(shown.temporary.iterdir()) == []
    assert [path.name for path in shown.root.parent.iterdir()] == ["out"]


def test_the_written_backbone_adapters_and_tokenizer_can_be_used(shown: Shown) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shown.root / "backbone")
    ids = tokenizer("the fox", return_tensors="pt").input_ids
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(shown.root / "backbone")(input_ids=ids).logits
        logits = [plain]
        for name in NAMES:
            backbone = AutoModelForCausalLM.from_pretrained(shown.root / "backbone")
            logits.append(PeftModel.from_pretrained(backbone, shown.root / name)(input_ids=ids).logits)
    for index, one in enumerate(logits):
        for other in logits[:index]:
            assert not torch.equal(one, other), "two adapters are the same, or one does nothing"


def test_a_speed_is_given_for_both_ways_the_usual_one_on_a_backbone_without_adapters(shown: Shown) -> None:
    found = re.search(r"^together ([\d,]+) tokens/s, HF Trainer .* ([\d,]+) tokens/s: ([\d.]+)x", shown.said, re.M)
    assert found
    together, alone = (float(found[number].replace(",", "")) for number in (1, 2))
    assert together > 0
    assert float(found[3]) == pytest.approx(together / alone, rel=0.1, abs=0.06)
    kinds = {type(module).__module__.partition(".")[0] for module in shown.baseline.modules()}
    assert not kinds & {"peft", "peft_mux"}


def test_a_folder_that_is_in_use_gets_a_number(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    assert demo._unused_folder(root) == root
    root.mkdir()
    assert demo._unused_folder(root) == root
    (root / "file").write_text("mine")
    assert demo._unused_folder(root) == tmp_path / "demo-2"
    (tmp_path / "demo-2").mkdir()
    (tmp_path / "demo-2" / "file").write_text("mine")
    assert demo._unused_folder(root) == tmp_path / "demo-3"


@pytest.mark.slow
def test_a_reloaded_adapter_that_differs_makes_the_check_fail(shown: Shown, tmp_path: Path) -> None:
    # Seen from the check alone: the adapters on the disk are those of the run, the model has moved on.
    tokenizer = AutoTokenizer.from_pretrained(shown.root / "backbone")
    backbone = AutoModelForCausalLM.from_pretrained(shown.root / "backbone")
    trainer: MultiTaskTrainer = demo._trainer(backbone, tokenizer, demo_tasks(), tmp_path / "unused", num_steps=1)
    assert demo._different_adapters(trainer, shown.root) == NAMES
