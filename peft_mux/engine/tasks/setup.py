"""From a `Task` to a `TaskRun`: rows tokenised, order fixed, number of steps known. Nothing here touches the model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from transformers import TrainerState

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.data.dataset import DataReport, TaskLoader, TokenizedDataset, open_rows, tokenize_dataset
from peft_mux.data.rows import CLASS_LABELS
from peft_mux.data.streams import ReadAhead, StreamLoader
from peft_mux.data.tokenize import TokenizeOptions
from peft_mux.engine.tasks.optimizer import check_optimizer
from peft_mux.engine.tasks.task_run import BestMetric, TaskRun
from peft_mux.errors import ConfigError, DataError
from peft_mux.hyper_parameters import MOST_STEPS, HyperParameters
from peft_mux.modeling.adapters.prompts.kinds import prompt_kind_of
from peft_mux.modeling.backbone.probe import max_positions
from peft_mux.modeling.generation.prompts import PromptReader, PromptRow
from peft_mux.modeling.objectives.task_objective import args_of, given_references, objective_of
from peft_mux.task import Task, TaskStatus, resolve


def make_task_run(task: Task, args: MultiTaskTrainingArguments, tokenizer: Any, config: Any) -> TaskRun:
    """Return the task ready to be started.

    Args:
        task: the task, already checked by itself.
        args: the arguments of the run.
        tokenizer: the tokenizer for rows that are not tokenised yet; `None` if there are none.
        config: the configuration of the backbone, for its vocabulary and positions.

    Raises:
        DataError: if a row cannot be trained on.
        ConfigError: if the task's settings do not fit its data.
    """
    hyper = resolve(task, args)
    options = _options(task, hyper, args, config)
    loader = _loader(task, hyper, options, tokenizer)
    _warn_of_left_out_rows(loader.report)
    num_steps = _num_steps(task, hyper, loader)
    check_optimizer(task.name, hyper, num_steps, args)
    eval_data, eval_prompts = None, ()
    if task.eval_dataset is not None:
        rows = _held_out_rows(task, hyper)
        eval_data = tokenize_dataset(rows, options=options, tokenizer=tokenizer, split="eval_dataset")
        _warn_of_left_out_rows(eval_data.report)
        eval_prompts = _eval_prompts(task, rows, options, tokenizer)
    return TaskRun(
        task=task,
        hyper=hyper,
        loader=loader,
        eval_data=eval_data,
        num_steps=num_steps,
        state=TrainerState(max_steps=num_steps),
        best=BestMetric(task, hyper),
        status=TaskStatus.WAITING,
        eval_prompts=eval_prompts,
    )


def make_task_runs(tasks: list[Task], args: MultiTaskTrainingArguments, tokenizer: Any, config: Any) -> list[TaskRun]:
    """Return all tasks ready to be started, or one error that lists what is wrong with any of them.

    Raises:
        DataError: if rows of one or more tasks cannot be trained on.
    """
    runs, errors = [], []
    for task in tasks:
        try:
            runs.append(make_task_run(task, args, tokenizer, config))
        except (DataError, ConfigError) as error:
            # Kept, so that all faults of all tasks are told at once.
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise DataError("\n".join(str(error) for error in errors))
    return runs


def class_count(run: TaskRun) -> int | None:
    """Return the number of classes of a classification task: its own, or one more than its greatest label."""
    form = objective_of(run.task).row_form
    if not (form.needs_label or form.has_token_labels):
        return form.num_labels
    if run.task.num_labels is not None:
        return run.task.num_labels
    dataset = getattr(run.loader, "dataset", None)
    if not isinstance(dataset, TokenizedDataset):
        return None
    if form.has_token_labels:
        return 1 + max(int(dataset[row].labels.max()) for row in range(len(dataset)))
    several = dataset[0].row_values.get(CLASS_LABELS)
    if several is not None:
        return len(np.atleast_1d(several))
    labels = [dataset[row].class_label for row in range(len(dataset))]
    # Labels with fractions are targets of a regression, whose head has one output.
    if any(isinstance(label, float) for label in labels):
        return 1
    return int(max(label for label in labels if label is not None)) + 1


def _options(task: Task, hyper: HyperParameters, args: MultiTaskTrainingArguments, config: Any) -> TokenizeOptions:
    kind, positions = prompt_kind_of(task.peft_config), max_positions(config)
    if kind is not None and positions is not None:
        # Those of the prompt come before a row's; `max_length` is of the row alone, as in TRL.
        positions -= kind.num_positions(task.peft_config)
    return TokenizeOptions(
        task=task.name,
        max_length=hyper.max_length,
        overlong_policy=args.overlong_policy,
        completion_only_loss=task.completion_only_loss,
        assistant_only_loss=task.assistant_only_loss,
        chat_template=task.chat_template,
        row_form=objective_of(task).rows(args_of(task)),
        num_labels=task.num_labels,
        vocab_size=config.get_text_config().vocab_size,
        max_positions=positions,
        virtual_labels=() if kind is None else kind.virtual_labels(task.peft_config),
        reference_columns=given_references(task),
    )


def _loader(task: Task, hyper: HyperParameters, options: TokenizeOptions, tokenizer: Any) -> Any:
    settings: dict[str, Any] = {
        "task": task.name,
        "batch_size": hyper.train_batch_size,
        "seed": hyper.seed,
        "arrange": options.arrange,
    }
    if options.arrange is not None and hyper.train_batch_size < 2:
        allowed = "at least 2, as each prompt of a batch is also read with the answer of another"
        raise ConfigError(f"tasks.{task.name}.train_batch_size: got {hyper.train_batch_size}; allowed: {allowed}.")
    if hasattr(task.train_dataset, "__len__"):
        dataset = tokenize_dataset(task.train_dataset, options=options, tokenizer=tokenizer)
        return TaskLoader(dataset, **settings, shuffle=task.shuffle)
    where = f"tasks.{task.name}.train_dataset"
    loader = StreamLoader(
        task.train_dataset,
        partial(open_rows, options=options, tokenizer=tokenizer),
        where=where,
        timeout_s=hyper.data_timeout_s,
        **settings,
    )
    # Plans are made with the first batch. Read here, what is wrong with it is told to whoever brings the task.
    with _naming(where):
        loader.sample(1)
    return loader


def _held_out_rows(task: Task, hyper: HyperParameters) -> Any:
    rows = task.eval_dataset
    if not hasattr(rows, "__len__"):
        # Every evaluation goes through all held-out rows, so a stream of them is read once and kept.
        where = f"tasks.{task.name}.eval_dataset"
        with _naming(where):
            rows = ReadAhead(_all_rows(rows), where=where, timeout_s=hyper.data_timeout_s).take()
    return rows


def _eval_prompts(task: Task, rows: Any, options: TokenizeOptions, tokenizer: Any) -> tuple[PromptRow, ...]:
    """Return the prompts that evaluations complete; say which rows are too long for that."""
    generated = task.generate_options
    if generated is None:
        return ()
    room = None if options.max_positions is None else options.max_positions - generated.max_new_tokens
    reader = PromptReader(options, tokenizer)
    found = reader.read(rows, limit=generated.num_rows, max_tokens=room)
    if reader.num_too_long:
        warnings.warn(
            f"tasks.{task.name}.eval_generate: {reader.num_too_long:,} held-out prompts left out, as no "
            f"{generated.max_new_tokens:,} tokens fit behind them. Lower max_new_tokens.",
            UserWarning,
            stacklevel=2,
        )
    return found


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Name the dataset in what its own code has raised: here there is no status of a task that would."""
    try:
        yield
    except DataError as error:
        raise error if where in str(error) else DataError(f"{where}: {error}") from error.__cause__


def _all_rows(stream: Iterable[Any]) -> Iterator[list[Any]]:
    yield list(stream)


def _warn_of_left_out_rows(report: DataReport) -> None:
    """Say at once what is not trained on: a run may train for hours on four rows of twenty-four."""
    if report.warning:
        warnings.warn(report.warning, UserWarning, stacklevel=2)


def _num_steps(task: Task, hyper: HyperParameters, loader: Any) -> int:
    if hyper.max_steps > 0:
        return hyper.max_steps
    if loader.steps_per_epoch is None:
        raise ConfigError(
            f"tasks.{task.name}.max_steps: got {hyper.max_steps}; allowed: a number, as a stream has no length."
        )
    num_steps = hyper.num_train_epochs * loader.steps_per_epoch
    if num_steps > MOST_STEPS:
        raise ConfigError(
            f"tasks.{task.name}.num_train_epochs: got {hyper.num_train_epochs}, which is {num_steps:g} steps; allowed: "
            f"at most {MOST_STEPS} steps. Set max_steps."
        )
    return math.ceil(num_steps)
