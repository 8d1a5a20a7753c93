"""The weights that the last update leaves are proven with a forward pass, of no more rows than that takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from peft_mux import MultiTaskTrainer, Task, TaskStatus
from tests.invariants.mux_lab import make_trainer, small_task


def two_steps(
    loss: Callable[[Any], torch.Tensor], folder: Path, *, masked: int | None = None, **config: Any
) -> MultiTaskTrainer:
    """Return a trainer after two steps of a task with its own loss, over rows of 9, 4 and 12 tokens."""
    rows = [{"input_ids": list(range(1, 1 + length))} for length in (9, 4, 12)]
    if masked is not None:
        rows = [{**row, "labels": row["input_ids"]} for row in rows]
        rows[masked]["labels"] = [-100] * len(rows[masked]["labels"])
    settings: dict[str, Any] = {"train_batch_size": 3, "max_steps": 2, "shuffle": False}
    lora = LoraConfig(r=4, target_modules="all-linear", **config)
    tasks = [
        Task(name="a", peft_config=lora, train_dataset=rows, objective=loss, learning_rate=1e-3, **settings),
        small_task("b", data_seed=1, **settings),
    ]
    trainer = make_trainer(tasks, folder)
    trainer.train()
    return trainer


class CountsTargets:
    """A loss that notes how many targets it is given, and may be NaN unless these are of several rows."""

    def __init__(self, *, needs_rows: bool = False) -> None:
        self.counts: list[int] = []
        self.needs_rows = needs_rows

    def __call__(self, outputs: Any) -> torch.Tensor:
        self.counts.append(len(outputs.nll_M))
        return outputs.nll_M / (not self.needs_rows or len(outputs.nll_M) > 11)


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ({}, [8 + 3 + 11, 8 + 3 + 11, 3]),
        ({"masked": 1}, [8 + 11, 8 + 11, 8]),  # a row without a loss proves nothing
        ({"trainable_token_indices": [11]}, [22, 22, 22]),  # weights of single tokens need the whole batch
    ],
    ids=str,
)
def test_the_weights_of_the_last_update_are_proven_by_the_shortest_row_that_suffices(
    given: dict[str, Any], counts: list[int], tmp_path: Path
) -> None:
    trainer = two_steps(loss := CountsTargets(), tmp_path, **given)
    assert trainer.task_statuses["a"] is TaskStatus.SUCCEEDED
    assert loss.counts == counts


def test_a_loss_that_compares_rows_is_judged_by_the_whole_last_batch(tmp_path: Path) -> None:
    loss = CountsTargets(needs_rows=True)
    trainer = two_steps(loss, tmp_path)
    assert trainer.task_statuses["a"] is TaskStatus.SUCCEEDED, trainer.table["a"].reason
    assert loss.counts == [22, 22, 3, 22]
