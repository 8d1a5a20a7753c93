"""The central promise: training tasks together gives each what it would get alone.

The judge is plain PEFT in an ordinary loop (`mux_lab.judge`): losses within 1e-5 at every step, final weights
within 1e-4. What the judge cannot draw (dropout) is compared with runs of one task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.task import Task, TaskStatus
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Recorder, Run, Verdict

FIELDS = {field.name for field in fields(MultiTaskTrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"
"""The switch's name in newer and older transformers."""


def unequal_tasks() -> list[Task]:
    """Return five tasks that differ in everything that may differ."""
    return [
        Task(
            name="all",
            peft_config=LoraConfig(r=4, target_modules="all-linear"),
            train_dataset=lab.rows(1, 50, 5, 20),
            train_batch_size=4,
            learning_rate=1e-3,
            max_steps=30,
            lr_scheduler_type="linear",
            warmup_steps=3,
        ),
        Task(
            name="attention",
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_alpha=32),
            train_dataset=lab.rows(2, 11, 10, 40),
            train_batch_size=3,
            learning_rate=3e-3,
            max_steps=40,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            seed=3,
        ),
        Task(
            name="mlp",
            peft_config=LoraConfig(r=16, target_modules=["gate_proj", "down_proj"], use_rslora=True),
            train_dataset=lab.rows(3, 20, 30, 60),
            train_batch_size=6,
            learning_rate=1e-3,
            max_steps=20,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            max_grad_norm=0.1,
            seed=7,
        ),
        Task(
            name="longest",
            peft_config=LoraConfig(r=2, target_modules=["o_proj", "up_proj"], lora_alpha=1),
            train_dataset=lab.rows(4, 7, 2, 9),
            train_batch_size=2,
            learning_rate=1e-2,
            max_steps=60,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            seed=0,
        ),
        Task(
            name="single",
            peft_config=LoraConfig(r=32, target_modules=["k_proj"]),
            train_dataset=lab.rows(5, 9, 25, 64),
            train_batch_size=1,
            learning_rate=5e-4,
            max_steps=25,
            lr_scheduler_type="cosine",
            shuffle=False,
            seed=11,
        ),
    ]


def dropout_tasks() -> list[Task]:
    """Return three tasks that drop inputs of their adapters."""
    shared = {"target_modules": ["q_proj", "down_proj"]}
    return [
        lab.small_task("a", data_seed=1, lora_dropout=0.1, **shared),
        lab.small_task("b", data_seed=2, lora_dropout=0.1, rank=8, length=7, seed=2, max_steps=5, **shared),
        lab.small_task("c", data_seed=3, lora_dropout=0.3, rank=2, length=20, seed=3, max_steps=10, **shared),
    ]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All five tasks in one run with everything at its default."""
    return lab.train(unequal_tasks(), tmp_path_factory.mktemp("together"), recorder=Recorder(keep_weights=False))


@pytest.fixture(scope="module")
def verdicts(together: Run) -> dict[str, Verdict]:
    """Plain PEFT's result for each of the five."""
    return {task.name: lab.judge(together.trainer, task) for task in together.trainer.tasks}


def test_each_task_trains_as_plain_peft_would_train_it_alone(together: Run, verdicts: Mapping[str, Verdict]) -> None:
    lab.assert_as_judged(together, verdicts)
    assert set(together.trainer.task_statuses.values()) == {TaskStatus.SUCCEEDED}


def test_the_tasks_learn_so_that_equal_trajectories_mean_something(verdicts: Mapping[str, Verdict]) -> None:
    for name, verdict in verdicts.items():
        assert verdict.losses[0] != verdict.losses[-1]
        moved = [key for key, weight in verdict.weights.items() if "lora_B" in key and weight.abs().max() > 1e-4]
        assert moved, f"{name} has not moved"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"max_tokens_per_micro_batch": 64}, id="many micro-batches"),
        pytest.param({"pad_to_chunks": True, "chunk_size": 8}, id="padded to chunks of 8"),
        pytest.param({"chunk_size": 16, "max_tokens_per_micro_batch": 200}, id="chunks of 16"),
        pytest.param({CHECKPOINTING: True, "max_tokens_per_micro_batch": 300}, id="recomputed activations"),
    ],
)
def test_how_the_stream_is_cut_changes_no_task(
    arguments: dict[str, Any], verdicts: Mapping[str, Verdict], tmp_path: Path
) -> None:
    run = lab.train(unequal_tasks(), tmp_path, recorder=Recorder(keep_weights=False), **arguments)
    lab.assert_as_judged(run, verdicts)


def test_small_micro_batches_are_really_used(tmp_path: Path) -> None:
    trainer = lab.make_trainer(unequal_tasks(), tmp_path, max_tokens_per_micro_batch=64)
    assert trainer.plan().htasks[0].micro_batches > 5


def test_arrivals_leave_the_others_alone(together: Run, tmp_path: Path) -> None:
    new = [
        lab.small_task("late", data_seed=8, max_steps=12),
        lab.small_task("later", data_seed=9, rank=2, length=30),
    ]
    recorder = Recorder(at_end={10: lambda trainer: trainer.register_tasks(new)}, keep_weights=False)
    run = lab.train(unequal_tasks(), tmp_path, recorder=recorder)
    assert len(run.losses["late"]) == 12
    for task in unequal_tasks():
        lab.assert_same(run, together, task.name, 1e-6)


def test_a_task_that_arrives_late_trains_as_if_alone(tmp_path: Path) -> None:
    late = lab.small_task("late", data_seed=8, max_steps=12)
    recorder = Recorder(at_end={3: lambda trainer: trainer.register_tasks([late])})
    run = lab.train([lab.small_task("a", data_seed=1)], tmp_path / "together", recorder=recorder)
    lab.assert_same(run, lab.train([late], tmp_path / "alone"), "late", 1e-6)


def test_departures_leave_the_others_alone(together: Run, tmp_path: Path) -> None:
    recorder = Recorder(at_end={15: lambda trainer: trainer.remove_task("attention")}, keep_weights=False)
    run = lab.train(unequal_tasks(), tmp_path, recorder=recorder)
    assert len(run.losses["attention"]) == 15
    for task in unequal_tasks():
        if task.name != "attention":
            lab.assert_same(run, together, task.name, 1e-6)


def test_a_pause_changes_nothing_of_the_paused_task(together: Run, tmp_path: Path) -> None:
    recorder = Recorder(
        at_end={
            8: lambda trainer: trainer.pause_task("mlp"),
            21: lambda trainer: trainer.resume_task("mlp"),
        },
        keep_weights=False,
    )
    run = lab.train(unequal_tasks(), tmp_path, recorder=recorder)
    for task in unequal_tasks():
        lab.assert_same(run, together, task.name, 1e-6)


def test_adapter_dropout_is_the_same_alone_and_together(tmp_path: Path) -> None:
    together = lab.train(dropout_tasks(), tmp_path / "together", max_tokens_per_micro_batch=50)
    for task in dropout_tasks():
        alone = lab.train([task], tmp_path / task.name)
        lab.assert_same(together, alone, task.name, 1e-6)


def test_adapter_dropout_drops_something(tmp_path: Path) -> None:
    targets = ["q_proj", "down_proj"]
    dropping = lab.small_task("a", data_seed=1, lora_dropout=0.1, target_modules=targets)
    plain = lab.small_task("a", data_seed=1, target_modules=targets)
    with_dropout, without = lab.train([dropping], tmp_path / "dropout"), lab.train([plain], tmp_path / "none")
    assert with_dropout.losses["a"][0] == without.losses["a"][0], "before the first step an adapter adds nothing"
    assert with_dropout.losses["a"][2] != without.losses["a"][2]


def test_the_backbone_s_own_dropout_is_the_same_alone_and_together(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=lab.VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    assert config.attn_pdrop == config.embd_pdrop == config.resid_pdrop == 0.1

    def backbone() -> GPT2LMHeadModel:
        model = GPT2LMHeadModel(config)
        lab.fill(model, 1)
        return model

    tasks = [
        lab.small_task("a", data_seed=1, target_modules=["c_attn"], max_steps=5),
        lab.small_task("b", data_seed=2, target_modules=["c_attn", "c_fc"], length=17, seed=2, max_steps=6),
    ]
    together = lab.train(tasks, tmp_path / "together", model=backbone(), max_tokens_per_micro_batch=60)
    for task in tasks:
        lab.assert_same(together, lab.train([task], tmp_path / task.name, model=backbone()), task.name, 1e-6)


def test_bf16_begins_where_fp32_begins_and_stays_finite(verdicts: Mapping[str, Verdict], tmp_path: Path) -> None:
    run = lab.train(unequal_tasks(), tmp_path, bf16=True, recorder=Recorder(keep_weights=False))
    for name, verdict in verdicts.items():
        assert run.losses[name][0] == pytest.approx(verdict.losses[0], rel=1e-2)
        assert len(run.losses[name]) == len(verdict.losses)
        assert all(math.isfinite(loss) for loss in run.losses[name])
        weights = run.weights(name).values()
        assert all(weight.dtype is torch.float32 and weight.isfinite().all() for weight in weights)
