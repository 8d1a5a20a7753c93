"""Whole runs: prompts together with LoRA on one backbone, each as plain PEFT trains it alone."""

from __future__ import annotations

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from peft_mux import Task
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.prompts.prompt_cases import (
    PROMPTS,
    config_of,
    judge,
    plain_loss,
    rows_of,
    task_ids,
    task_of,
)


def changed(task: Task, **settings: Any) -> Task:
    return Task(**{**{field.name: getattr(task, field.name) for field in fields(task)}, **settings})


def test_every_prompt_next_to_lora_trains_as_plain_peft_trains_it_alone(tmp_path: Path) -> None:
    tasks = [task_of(form, weight_decay=0.1, max_steps=5) for form in (*PROMPTS, "lora")]
    run = lab.train(tasks, tmp_path)
    lab.assert_as_judged(run, {task.name: judge(run.trainer, task) for task in tasks})
    fresh = {task.name: lab.weights(lab.make_trainer([task], tmp_path / task.name), task.name) for task in tasks}
    for name, weights in fresh.items():
        final = run.weights(name)
        assert any(not torch.equal(final[key], weight) for key, weight in weights.items()), f"{name} has not moved"


@pytest.mark.slow
def test_checkpointing_and_long_rows_in_parts_change_nothing(tmp_path: Path) -> None:
    def tasks() -> list[Task]:
        return [changed(task_of(form, max_steps=3), max_length=40) for form in ("prompt", "mlp", "prefix", "lora")]

    plain = lab.train(tasks(), tmp_path / "plain")
    options: dict[str, Any] = {
        "gradient_checkpointing": True,
        "max_tokens_per_micro_batch": 16,
        "split_long_sequences": True,
    }
    parts = lab.train(tasks(), tmp_path / "parts", **options)
    for name in ("prompt", "mlp", "prefix", "lora"):
        lab.assert_same(parts, plain, name, 1e-4)


def test_a_prompt_arrives_in_a_run_of_lora_and_leaves_it(tmp_path: Path) -> None:
    late = {form: task_of(form, max_steps=3) for form in ("prefix", "mlp")}

    def arrive(trainer: Any) -> None:
        trainer.register_tasks(list(late.values()))

    def leave(trainer: Any) -> None:
        trainer.remove_task("mlp")

    recorder = lab.Recorder(at_end={2: arrive, 4: leave})
    run = lab.train([task_of("lora", max_steps=8)], tmp_path, recorder=recorder)
    lab.assert_close(run.losses["prefix"], judge(run.trainer, late["prefix"]).losses, 1e-5, "prefix")
    assert len(run.losses["mlp"]) == 2
    assert len(run.losses["lora"]) == 8


def test_prompts_resume_from_their_checkpoints_bit_by_bit(tmp_path: Path) -> None:
    def tasks() -> list[Task]:
        return [task_of(form, max_steps=4) for form in (*PROMPTS, "lora")]

    whole = lab.train(tasks(), tmp_path / "whole")
    stop = lab.Recorder(at_end={2: lambda trainer: setattr(trainer.control, "should_training_stop", True)})
    lab.train(tasks(), tmp_path / "cut", recorder=stop, save_strategy="steps", save_steps=2)
    rest = lab.train(tasks(), tmp_path / "cut", resume=True, save_strategy="steps", save_steps=100)
    for form in (*PROMPTS, "lora"):
        assert rest.losses[form] == whole.losses[form][2:], form
        final = whole.weights(form)
        assert all(torch.equal(final[key], weight) for key, weight in rest.weights(form).items()), form


def test_an_evaluation_and_a_finished_run_are_plain_pefts(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        seen["shapes"] = [logits.shape for logits in prediction.predictions]
        seen["labels"] = [np.asarray(labels) for labels in prediction.label_ids]
        return {"own": 1.0}

    held_out = rows_of("prompt", 4, 5, 15)
    rows = [{"input_ids": ids} for ids in held_out]
    tasks = [
        changed(task_of(form, max_steps=2), eval_dataset=rows, compute_metrics=metrics if form == "cpt" else None)
        for form in (*PROMPTS, "lora")
    ]
    run = lab.train(tasks, tmp_path, save_strategy="steps", save_steps=100)
    found = run.trainer.evaluate()
    for form in (*PROMPTS, "lora"):
        saved: Any = PeftModel.from_pretrained(lab.tiny_llama(), str(tmp_path / form)).eval()
        saved.peft_config["default"] = config_of(form) if form == "cpt" else saved.peft_config["default"]
        with torch.no_grad():
            wanted = plain_loss(saved, held_out).item()
        assert found[f"{form}/eval_loss"] == pytest.approx(wanted, rel=1e-4), form
        assert task_ids(saved).keys() == ({"task_ids"} if form == "multitask" else set())
    # Of a row's own tokens alone, padded as Trainer pads them.
    assert seen["shapes"] == [(max(map(len, held_out)), 97)] * 4
    given = [[label for label in labels if label != -100] for labels in seen["labels"]]
    assert given == held_out


def test_a_plan_counts_virtual_tokens(tmp_path: Path) -> None:
    def tokens_of(form: str) -> float:
        rows = [{"input_ids": ids} for ids in rows_of("lora", 8, 10, 10)]
        task = changed(task_of(form), train_dataset=rows, train_batch_size=8)
        trainer = lab.make_trainer([task], tmp_path)
        with warnings.catch_warnings():
            # Activations are counted on a description of the model, and estimated only where it does not run.
            warnings.filterwarnings("error", message="activations are estimated by formula")
            return trainer.plan().tokens_per_step

    bare = tokens_of("lora")
    added = {form: tokens_of(form) - bare for form in ("prompt", "cpt", "prefix")}
    assert added == {"prompt": 8 * 3, "cpt": 8 * 8, "prefix": 0}


def test_rows_keep_as_many_tokens_as_they_may_and_positions_are_left_for_the_prompt(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(1, 91))}]
    for form, positions in (("prompt", 3), ("prefix", 5), ("lora", 0)):
        short = changed(task_of(form), train_dataset=rows, train_batch_size=1, max_length=20)
        with pytest.warns(UserWarning, match=r"rows cut to"):
            table = lab.make_trainer([short], tmp_path).table
        (sequence,) = table[form].loader.batch(0).sequences
        assert len(sequence) - sequence.num_virtual_tokens == 20, "max_length is of the row's own tokens"
        with pytest.warns(UserWarning, match=r"rows cut to"):
            table = lab.make_trainer([changed(short, max_length=90)], tmp_path).table
        (sequence,) = table[form].loader.batch(0).sequences
        assert len(sequence) - sequence.num_virtual_tokens == 64 - positions, "the backbone knows 64 positions"
