"""What a task trains with: its own settings, and those of the run where it has none."""

from __future__ import annotations

from typing import Any

import pytest

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.task import EarlyStopping, resolve, task_arguments
from tests.test_arguments import ROWS, arguments, task


def test_a_task_takes_what_it_does_not_set_from_the_run() -> None:
    args = arguments(learning_rate=3e-3, optim="sgd", seed=9, max_length=77, max_steps=5, weight_decay=0.2)
    hyper = resolve(task(learning_rate=1e-4, seed=0, weight_decay=0), args)
    assert (hyper.learning_rate, hyper.seed, hyper.weight_decay) == (1e-4, 0, 0), "a zero of the task is a setting"
    assert (hyper.optim, hyper.max_length, hyper.max_steps) == ("sgd", 77, 5)


def test_enumerations_become_plain_names() -> None:
    hyper = resolve(task(), arguments())
    assert type(hyper.lr_scheduler_type) is str
    assert hyper.lr_scheduler_type == "linear"
    assert type(hyper.optim) is str


def test_the_batch_of_a_task_is_that_of_the_device_times_accumulation_unless_it_sets_its_own() -> None:
    args = arguments(per_device_train_batch_size=3, gradient_accumulation_steps=4)
    assert resolve(task(), args).train_batch_size == 12
    assert resolve(task(train_batch_size=5), args).train_batch_size == 5


@pytest.mark.parametrize(
    ("own", "of_run", "steps", "epochs"),
    [
        ({}, {"max_steps": 9}, 9, 3.0),
        ({"num_train_epochs": 2}, {"max_steps": 9}, -1, 2),
        ({"max_steps": 4}, {"max_steps": 9}, 4, 3.0),
        ({"max_steps": 4, "num_train_epochs": 2}, {}, 4, 2),
        ({"max_steps": -1}, {"max_steps": 9}, -1, 3.0),
        ({}, {"num_train_epochs": 1.5}, -1, 1.5),
    ],
)
def test_a_task_that_sets_only_epochs_is_not_held_to_the_steps_of_the_run(
    own: dict[str, Any], of_run: dict[str, Any], steps: int, epochs: float
) -> None:
    hyper = resolve(task(**own), arguments(**of_run))
    assert (hyper.max_steps, hyper.num_train_epochs) == (steps, epochs)


@pytest.mark.parametrize(
    ("own", "of_run", "every"),
    [
        ({"eval_dataset": ROWS}, {}, 0),
        ({}, {"eval_strategy": "steps", "eval_steps": 4}, 0),
        ({"eval_dataset": ROWS}, {"eval_strategy": "steps", "eval_steps": 4}, 4),
        ({"eval_dataset": ROWS}, {"eval_strategy": "steps", "logging_steps": 6}, 6),
        ({"eval_dataset": ROWS}, {"eval_strategy": "epoch"}, -1),
        ({"eval_dataset": ROWS, "eval_steps": 2}, {"eval_strategy": "epoch"}, 2),
        ({"eval_dataset": ROWS, "eval_steps": 0}, {"eval_strategy": "epoch"}, 0),
        ({"eval_dataset": ROWS, "early_stopping": EarlyStopping()}, {}, -1),
        ({"eval_dataset": ROWS}, {"load_best_model_at_end": True}, -1),
    ],
)
def test_how_often_a_task_is_evaluated(own: dict[str, Any], of_run: dict[str, Any], every: int) -> None:
    assert resolve(task(**own), arguments(**of_run)).eval_steps == every


def test_the_arguments_of_a_task_are_a_copy_of_those_of_the_run() -> None:
    args = arguments(learning_rate=3e-3, optim="sgd", max_length=77)
    own = task_arguments(resolve(task(learning_rate=1e-4, max_length=8), args), args)
    assert (own.learning_rate, own.max_length, own.optim) == (1e-4, 8, "sgd")
    assert (args.learning_rate, args.max_length) == (3e-3, 77)
    assert isinstance(own, MultiTaskTrainingArguments)
