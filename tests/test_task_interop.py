"""From TRL and Trainer to tasks: the same hyper-parameters, rows and losses; what cannot be done is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.errors import ConfigError
from peft_mux.task import Task
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.invariants.mux_lab import rows, tiny_llama
from tests.runs import Acts, hearing

ROWS = rows(1, 8, 6, 6)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def plain(folder: Path, **settings: Any) -> TrainingArguments:
    options = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_steps": 3}
    return TrainingArguments(output_dir=str(folder), **{**options, **settings})


def test_a_task_has_what_the_arguments_of_one_run_said(tmp_path: Path) -> None:
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "seed": 7}
    rate = {"learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 0.1}
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    own = {"train_dataset": ROWS, "eval_dataset": ROWS, "peft_config": LORA, "learning_rate": 1e-3}
    task = Task.from_sft_config("sql", plain(tmp_path, **batch, **rate, **evaluation), **own)
    assert (task.train_batch_size, task.max_steps, task.learning_rate, task.seed) == (6, 3, 1e-3, 7)
    assert (task.lr_scheduler_type, task.warmup_steps, task.eval_steps) == ("cosine", 0.1, 2)
    assert task.metric_for_best_model == "loss"
    config = plain(tmp_path, label_smoothing_factor=0.2, neftune_noise_alpha=5.0)
    task = Task.from_sft_config("sql", config, train_dataset=ROWS, peft_config=LORA)
    assert (task.label_smoothing_factor, task.neftune_noise_alpha) == (0.2, 5.0)


@pytest.mark.parametrize(("field", "value"), [("eval_do_concat_batches", False), ("data_seed", 3)])
def test_what_no_task_can_have_is_refused_with_its_reason(field: str, value: Any, tmp_path: Path) -> None:
    config = plain(tmp_path, **{field: value})
    with pytest.raises(ConfigError, match=rf"config\.{field} .*got {value}.*Reason: "):
        Task.from_sft_config("a", config, train_dataset=ROWS, peft_config=LORA)
    with pytest.raises(ConfigError, match=rf"args\.{field} .*got {value}"):
        MultiTaskTrainingArguments.from_training_arguments(config)


def test_a_trainer_and_its_task_train_to_the_same_losses(tmp_path: Path) -> None:
    theirs: list[float] = []
    losses = Acts(lambda logs, **_: theirs.extend([logs["loss"]] if "loss" in logs else []), event="on_log")
    same = [{**row, "labels": row["input_ids"]} for row in ROWS[:2]]
    config = plain(tmp_path, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-2, seed=1)
    stops = EarlyStoppingCallback(2)
    model, callbacks = get_peft_model(tiny_llama(), LORA), [losses, stops]
    trainer = Trainer(model, config, train_dataset=same, callbacks=callbacks, data_collator=stacked)
    task = Task.from_trainer("own", trainer, train_dataset=same, callbacks=[])
    evaluated = Task.from_trainer("own", trainer, train_dataset=same, eval_dataset=same)
    assert evaluated.callbacks == callbacks, "those of its owner"
    trainer.remove_callback(EarlyStoppingCallback)
    trainer.train()
    args = MultiTaskTrainingArguments.from_training_arguments(config, output_dir=str(tmp_path / "ours"))
    ours = MultiTaskTrainer(tiny_llama(), args, [task])
    ours.train()
    found = [entry["loss"] for entry in ours.task_states["own"].log_history if "loss" in entry]
    # The first steps tell: the initial weights of A are those of another draw, and B is 0.
    assert found[0] == pytest.approx(theirs[0], rel=1e-3)
    assert len(found) == len(theirs) == 3


def stacked(batch: Any) -> dict[str, Any]:
    return {key: torch.tensor([row[key] for row in batch]) for key in ("input_ids", "labels")}


def test_a_trainer_without_an_adapter_and_what_are_no_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config .*got dict"):
        Task.from_sft_config("a", {}, train_dataset=ROWS, peft_config=LORA)  # type: ignore[arg-type]
    trainer = Trainer(tiny_llama(), plain(tmp_path), train_dataset=ROWS)
    with pytest.raises(ConfigError, match=r"trainer\.model must be a trainer of a model with one adapter:"):
        Task.from_trainer("own", trainer)


class Asks(TrainerCallback):
    """Notes every event with its step, and asks for a log, an evaluation and a checkpoint of its own."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def hear(self, event: str, args: Any, state: Any, control: Any, facts: dict[str, Any]) -> None:
        self.events.append((event, state.global_step))
        self.state = state
        if event == "on_step_end":
            control.should_log = control.should_log or state.global_step == 1
            control.should_evaluate = control.should_evaluate or state.global_step == 2
            control.should_save = control.should_save or state.global_step == 3


for _event in "step_begin pre_optimizer_step optimizer_step step_end evaluate log save".split():
    setattr(Asks, f"on_{_event}", hearing(f"on_{_event}"))


@pytest.mark.slow
def test_checkpoints_of_the_strategy_best_are_those_of_trainer(tmp_path: Path) -> None:
    same = [{**row, "labels": row["input_ids"]} for row in ROWS[:2]]
    for greater, wanted in ((True, [2]), (False, [2, 4, 6, 7])):  # the loss falls
        folder = tmp_path / f"theirs-{greater}"
        best = {"metric_for_best_model": "loss", "greater_is_better": greater, "save_strategy": "best"}
        config = plain(folder, max_steps=7, eval_strategy="steps", eval_steps=2, learning_rate=1e-3, **best)
        theirs, own = Asks(), Asks()
        model, options = get_peft_model(tiny_llama(), LORA), {"train_dataset": same, "eval_dataset": same}
        Trainer(model, config, callbacks=[theirs], data_collator=stacked, **options).train()
        args = MultiTaskTrainingArguments.from_training_arguments(config, output_dir=str(tmp_path / f"ours-{greater}"))
        task = Task(name="own", peft_config=LORA, callbacks=[own], **options)
        MultiTaskTrainer(tiny_llama(), args, [task]).train()
        saves = [[step for event, step in one.events if event == "on_save"] for one in (own, theirs)]
        assert saves[1] == sorted({*wanted, 3}), "3 is asked for"
        assert saves[0][: len(saves[1])] == saves[1]


def test_rates_that_follow_a_metric_are_those_of_trainer_also_when_resumed(tmp_path: Path) -> None:
    same = [{**row, "labels": row["input_ids"]} for row in ROWS[:2]]
    # The loss falls, which is worse in this mode, except in the cooldown.
    follows = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"mode": "max", "patience": 0}}
    follows["lr_scheduler_kwargs"] |= {"factor": 0.5, "cooldown": 1}
    steps = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1, "learning_rate": 1e-3}
    config = plain(tmp_path, save_strategy="steps", save_steps=4, **steps, **follows)
    options = {"train_dataset": same, "eval_dataset": same}
    trainer = Trainer(get_peft_model(tiny_llama(), LORA), config, data_collator=stacked, **options)
    trainer.train()
    wanted = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(set(wanted)) > 2
    args = MultiTaskTrainingArguments.from_training_arguments(config, output_dir=str(tmp_path / "ours"))
    task = Task(name="own", peft_config=LORA, **options)
    for last, resume in ((4, False), (8, True)):
        stops = Acts(lambda control, **_: setattr(control, "should_training_stop", True), step=last)
        ours = MultiTaskTrainer(tiny_llama(), args, [task], callbacks=[stops])
        ours.train(resume_from_checkpoint=resume)
        found = [entry["learning_rate"] for entry in ours.task_states["own"].log_history if "loss" in entry]
        assert found == wanted[:last]
    with pytest.raises(ConfigError, match=r"tasks\.b\.eval_dataset must be held-out rows.*reduce_lr_on_plateau"):
        MultiTaskTrainer(tiny_llama(), args, [task, Task(name="b", peft_config=LORA, train_dataset=same)])


def test_a_task_is_logged_evaluated_and_saved_when_trainer_would_do_it(tmp_path: Path) -> None:
    same = [{**row, "labels": row["input_ids"]} for row in ROWS[:2]]
    shown = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    best = {"load_best_model_at_end": True, "learning_rate": 1e-3, "per_device_train_batch_size": 2}
    config = plain(tmp_path, max_steps=7, warmup_steps=3, **{**shown, **best})
    theirs, own = Asks(), Asks()
    model = get_peft_model(tiny_llama(), LORA)
    trainer = Trainer(model, config, train_dataset=same, eval_dataset=same, callbacks=[theirs], data_collator=stacked)
    found = trainer.train()
    args = MultiTaskTrainingArguments.from_training_arguments(config, output_dir=str(tmp_path / "ours"))
    task = Task(name="own", peft_config=LORA, train_dataset=same, eval_dataset=same, callbacks=[own])
    ours = MultiTaskTrainer(tiny_llama(), args, [task])
    # The initial weights of A are those of another draw, and B is 0.
    assert ours.train().metrics["own/train_loss"] == pytest.approx(found.training_loss, rel=1e-3)
    state = ours.task_states["own"]
    for name in ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps"):
        assert getattr(state, name) == getattr(trainer.state, name) == getattr(own.state, name), name
    assert (ours.state.max_steps, ours.state.num_train_epochs, ours.state.logging_steps) == (7, 7, 2)
    assert state.best_global_step == trainer.state.best_global_step == 7
    rates = [
        [(entry["step"], entry["learning_rate"]) for entry in one.log_history if "loss" in entry]
        for one in (state, trainer.state)
    ]
    assert rates[0][:4] == rates[1], "the rates of these steps, not of the next ones"
    wanted = [event for event in theirs.events if event != ("on_log", 7)]
    assert [event for event in own.events if event != ("on_log", 7)] == wanted
    assert (tmp_path / "ours" / "own" / "checkpoint-3").is_dir()
