"""Smoothed labels: each task as with transformers' own `LabelSmoother`, alone and with others; refused elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers.trainer_pt_utils import LabelSmoother

from peft_mux import ConfigError, MultiTaskTrainingArguments
from tests.invariants import mux_lab as lab
from tests.modeling.backbones import classifier_of
from tests.trainer.parts import random_task as task
from tests.trainer.parts import rows_with_one_beginning

HELD_OUT = lab.rows(9, 5, 4, 20)


def smoother(share: float) -> Any:
    """Return what gives the loss of a global batch as Trainer does: all rows padded, by the number of its targets."""

    def losses(model: Any, batch: Any) -> Iterator[torch.Tensor]:
        yield smoothed(model, [sequence.input_ids.tolist() for sequence in batch.sequences], share)

    return losses


def smoothed(model: Any, rows: list[list[int]], share: float) -> torch.Tensor:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    count = torch.tensor(sum(len(row) - 1 for row in rows))
    outputs = model(input_ids=ids, attention_mask=mask)
    return LabelSmoother(epsilon=share)(outputs, labels, shift_labels=True, num_items_in_batch=count)


def test_tasks_of_different_factors_are_each_as_with_the_smoother_of_transformers(tmp_path: Path) -> None:
    tasks = [task("own", 1, label_smoothing_factor=0.1), task("none", 2, label_smoothing_factor=0), task("of-run", 3)]
    run = lab.train(tasks, tmp_path, label_smoothing_factor=0.4, max_tokens_per_micro_batch=150)
    shares = {"own": 0.1, "none": 0.0, "of-run": 0.4}
    verdicts = {one.name: lab.judge(run.trainer, one, smoother(shares[one.name])) for one in tasks}
    lab.assert_as_judged(run, verdicts)
    plain = lab.judge(run.trainer, tasks[2])
    assert abs(plain.losses[0] / verdicts["of-run"].losses[0] - 1) > 1e-3, "the factor shows"


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], pytest.param("all-linear", marks=pytest.mark.slow)])
def test_rows_that_share_a_prefix_are_smoothed_as_without_sharing(targets: Any, tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=targets)
    own = task("own", 4, rows_with_one_beginning(), label_smoothing_factor=0.3, config=config)
    run = lab.train([own, task("other", 2)], tmp_path / "run")
    assert run.trainer.table["own"].loader.batch(0).trie is not None, "its rows share"
    verdict = lab.judge(run.trainer, own, smoother(0.3))
    lab.assert_as_judged(run, {"own": verdict})


def test_evaluations_give_the_smoothed_loss_and_the_plain_perplexity_without_noise(tmp_path: Path) -> None:
    own = task("own", 1, label_smoothing_factor=0.3, neftune_noise_alpha=20.0, eval_dataset=HELD_OUT, eval_steps=5)
    run = lab.train([own, task("other", 2)], tmp_path, logging_strategy="steps", logging_steps=1)
    history = run.trainer.task_states["own"].log_history
    found = [entry for entry in history if "eval_loss" in entry][-1]
    view = run.trainer.model.task_view("own")
    rows = [row["input_ids"] for row in HELD_OUT]
    with torch.no_grad():
        assert found["eval_loss"] == pytest.approx(smoothed(view, rows, 0.3).item(), rel=1e-5)
        plain = smoothed(view, rows, 0.0).item()
    assert found["eval_perplexity"] == pytest.approx(math.exp(plain), rel=1e-4)
    steps = [entry for entry in history if "loss" in entry]
    assert all(entry["nll"] != entry["loss"] for entry in steps)
    assert not any("nll" in entry for entry in run.trainer.task_states["other"].log_history)


PAIRS = [{"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5]}] * 4


def test_a_loss_without_labels_to_smooth_and_a_factor_out_of_range_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        task("pairs", 1, rows=PAIRS, objective="dpo", label_smoothing_factor=0.1)
    assert str(caught.value) == (
        "tasks.pairs.label_smoothing_factor must be 0 or None, except for classification, "
        "token_classification, sft, which have single classes or words as targets, got 0.1 with "
        "the objective dpo. Its own label_smoothing is one of objective_args."
    )
    with pytest.raises(ConfigError, match=r"tasks\.own\.label_smoothing_factor must be a number from 0 to.*got 1\.5"):
        task("own", 1, label_smoothing_factor=1.5)
    with pytest.raises(ConfigError, match=r"objective_args\.label_smoothing_factor must .* Set Task\.label_smoothing"):
        task("own", 1, objective_args={"label_smoothing_factor": 0.1})
    # That of the run holds for tasks that do not set it.
    said = r"args\.label_smoothing_factor must be 0 or None, except for .*sft.*got 0\.1 with the objective dpo.*pairs"
    with pytest.raises(ConfigError, match=said):
        lab.make_trainer([task("pairs", 1, rows=PAIRS, objective="dpo")], tmp_path, label_smoothing_factor=0.1)
    unset = task("pairs", 1, rows=PAIRS, objective="dpo", label_smoothing_factor=0)
    lab.make_trainer([unset], tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match=r"args\.label_smoothing_factor must be a number from 0 to 1.*got None"):
        MultiTaskTrainingArguments(str(tmp_path), use_cpu=True, label_smoothing_factor=None)  # type: ignore[arg-type]


def test_rows_with_numbers_in_place_of_a_class_are_not_smoothed(tmp_path: Path) -> None:
    config, model = LoraConfig(r=2, task_type="SEQ_CLS"), classifier_of("llama", vocab_size=lab.VOCABULARY)()
    for label in (0.5, [0.0, 1.0]):
        own = task("own", 1, [{"input_ids": [1, 2], "label": label}], config=config, label_smoothing_factor=0.1)
        with pytest.raises(ConfigError, match=r"tasks\.own\.label_smoothing_factor must be 0 for rows with numbers"):
            lab.make_trainer([own], tmp_path, model=model)
