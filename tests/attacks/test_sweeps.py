"""Sweeps over invalid settings, or in folders with other content: refused, or ranked last."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, PeftMuxError, sweep
from peft_mux.sweeps import add_referee, end_sweeps, sweep_tasks
from tests.attacks import attack_lab as attacks
from tests.attacks.attack_lab import nano_task, rows, sampled
from tests.attacks.run_files import snapshot

pytestmark = pytest.mark.timeout(60)


def swept(folder: Path, grid: Any, *, resume: bool = False, task: dict[str, Any] | None = None, **options: Any) -> Any:
    """Sweep a small task."""
    args = MultiTaskTrainingArguments(
        output_dir=str(folder), use_cpu=True, disable_tqdm=True, report_to="none", save_strategy="steps", save_steps=2
    )
    own = nano_task("sql", 1, eval_dataset=rows(9, 2), **(task or {}))
    given = {"model": attacks.nano_llama(), "args": args, "processing_class": attacks.words_tokenizer(), **options}
    return sweep(own, grid, resume_from_checkpoint=resume or None, **given)


HOSTILE_GRIDS: dict[str, Any] = {
    "no mapping": [("learning_rate", [1e-3, 2e-3])],
    "None": None,
    "a key that is a number": {5: [1, 2]},
    "more values than memory holds": {"seed": range(10**12)},
    "more combinations than memory holds": {"seed": range(10**5), "learning_rate": [1e-3] * 1000},
    "a rate of NaN": {"learning_rate": [1e-3, math.nan]},
    "values that are a dict": {"learning_rate": {"a": 1}},
    "values without an end": {"learning_rate": (rate for rate in iter(float, 1.0))},
    "objects": {"learning_rate": [object(), "fast"]},
    "ranks that are none": {"peft_config.r": ["a", 0]},
    "a type of adapter that stays what it is": {"peft_config.peft_type": ["IA3", "LORA"]},
    "a metric that stays away": {"seed": [1, 2]},
}


@pytest.mark.parametrize("kind", sampled(list(HOSTILE_GRIDS), fast=4))
def test_a_hostile_sweep_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    metric = "eval_own" if kind == "a metric that stays away" else "eval_loss"
    with pytest.raises(PeftMuxError, match=r"sweep|tasks\.sql"):
        swept(tmp_path / "run", HOSTILE_GRIDS[kind], metric=metric)


def test_settings_that_diverge_lose_and_their_neighbours_are_ranked(tmp_path: Path) -> None:
    result = swept(tmp_path / "run", {"learning_rate": [1e30, 1e-3, 1e-2]}, early_stop="halving")
    assert result.best.settings["learning_rate"] < 1
    assert result.ranking[-1].settings["learning_rate"] == 1e30


def test_a_sweep_all_of_which_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeftMuxError, match=r"no task has eval_loss.*Failed: sql-01: non_finite"):
        swept(tmp_path / "run", {"learning_rate": [1e30, 1e29]}, task={"weight_decay": 1.0})


@pytest.mark.parametrize("grid", [{"learning_rate": [2e-3, 1e-3]}, {"seed": [8, 9]}, {"max_steps": [8, 6]}], ids=str)
def test_a_folder_of_another_sweep_is_not_ranked_by_settings_that_nothing_was_trained_with(
    grid: Any, tmp_path: Path
) -> None:
    before = {key: values[::-1] for key, values in grid.items()}
    first = swept(tmp_path / "run", before)
    again = swept(tmp_path / "run", before, resume=True)
    assert [(one.name, one.value) for one in again.ranking] == [(one.name, one.value) for one in first.ranking]
    with pytest.raises(PeftMuxError, match=f"sql-01.*{next(iter(grid))}"):
        swept(tmp_path / "run", grid, resume=True)


def test_the_best_adapter_is_not_written_through_a_link(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "adapter_model.safetensors").write_bytes(b"precious")
    (folder / "sql").symlink_to(outside)
    result = swept(folder, {"seed": [1, 2]})
    assert result.place is None
    assert snapshot(outside) == {"adapter_model.safetensors": b"precious"}


def test_the_best_adapter_does_not_take_the_place_of_a_task_that_came_meanwhile(tmp_path: Path) -> None:
    args = MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, report_to="none")
    contest, tasks = sweep_tasks(nano_task("sql", 1, eval_dataset=rows(9, 2)), {"seed": [1, 2]})
    trainer = MultiTaskTrainer(attacks.nano_llama(), args, tasks, processing_class=attacks.words_tokenizer())

    class Comes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer.register_tasks([nano_task("sql", 7)])

    trainer.add_callback(Comes())
    referee = add_referee(trainer, [contest], early_stop=None)
    trainer.train()
    own = load_file(tmp_path / "sql" / "adapter_model.safetensors")
    (result,) = end_sweeps(trainer, referee)
    assert result.place is None
    after = load_file(tmp_path / "sql" / "adapter_model.safetensors")
    assert all(bool((own[key] == after[key]).all()) for key in own)
