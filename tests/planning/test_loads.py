"""What the planner is told of a run's tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from peft_mux import Task
from peft_mux.planning.loads import task_load
from peft_mux.scheduler.costs.loads import TaskLoad
from tests.invariants.mux_lab import make_trainer, tiny_llama

PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5, 6, 7], "rejected_ids": [8, 9]},
    {"prompt_ids": [3, 2], "chosen_ids": [4, 5], "rejected_ids": [8, 9, 10]},
]
JUDGED = [{"prompt_ids": [1, 2, 3], "completion_ids": [4, 5, 6, 7], "label": label} for label in (True, False)]


def load_of(rows: list[dict[str, Any]], folder: Path, **options: Any) -> TaskLoad:
    """Return what the planner is told of a task with these rows."""
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    task = Task(name="one", train_dataset=rows, peft_config=config, train_batch_size=2, max_steps=1, **options)
    trainer = make_trainer([task], folder, model=tiny_llama())
    (run,) = trainer.table
    return task_load(run, {}, num_layers=2)


@pytest.mark.parametrize(
    ("rows", "options", "reference", "batch"),
    [
        ([{"input_ids": [1, 2, 3, 4]}] * 2, {}, False, False),
        (PAIRS, {"objective": "dpo"}, True, False),
        (PAIRS, {"objective": "orpo"}, False, False),
        (JUDGED, {"objective": "kto"}, True, True),
    ],
    ids=["sft", "dpo", "orpo", "kto"],
)
def test_forwards_before_the_passes_of_a_step_are_told(
    rows: list[dict[str, Any]], options: dict[str, Any], reference: bool, batch: bool, tmp_path: Path
) -> None:
    load = load_of(rows, tmp_path, **options)
    assert (load.has_reference_forward, load.has_batch_forward) == (reference, batch)


def test_rows_that_bring_their_reference_need_no_forward(tmp_path: Path) -> None:
    rows = [{**row, "ref_chosen_logps": -3.0, "ref_rejected_logps": -4.0} for row in PAIRS]
    assert not load_of(rows, tmp_path, objective="dpo").has_reference_forward


def test_the_head_of_a_pair_is_computed_for_each_word_of_both(tmp_path: Path) -> None:
    load = load_of(PAIRS, tmp_path, objective="dpo")
    assert load.num_targets == pytest.approx(sum(len(row["chosen_ids"] + row["rejected_ids"]) for row in PAIRS), abs=2)
