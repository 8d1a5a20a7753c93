"""From a `ResolvedTask` to a `TaskRun`: rows tokenised, their order fixed, the number of steps known.

Nothing here touches the model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from transformers import TrainerState

from peft_mux.arguments import MOST_STEPS, MultiTaskTrainingArguments
from peft_mux.data.dataset import TaskLoader, TokenizedDataset, open_rows, tokenize_dataset
from peft_mux.data.streams import ReadAhead, StreamLoader
from peft_mux.data.tokenize import TokenizeOptions
from peft_mux.engine.tasks.optimizer import check_optimizer
from peft_mux.engine.tasks.resolved import ResolvedTask
from peft_mux.engine.tasks.task_run import BestMetric, TaskRun
from peft_mux.errors import ConfigError, DataError
from peft_mux.modeling.adapters.prompts.kinds import prompt_kind_of
from peft_mux.modeling.backbone.probe import max_positions
from peft_mux.modeling.generation.prompts import PromptRow, read_prompts


def make_task_runs(
    tasks: Sequence[ResolvedTask], args: MultiTaskTrainingArguments, tokenizer: Any, config: Any
) -> list[TaskRun]:
    """Return all tasks ready to be started, or raise one error with everything that is wrong with any of them.

    Args:
        tasks: the tasks, whose settings have been checked.
        args: the arguments of the run.
        tokenizer: the tokenizer for rows that are not tokenised yet; `None` if there are none.
        config: the configuration of the backbone, for its vocabulary and positions.

    Raises:
        DataError: if rows of one or more tasks cannot be trained on.
        ConfigError: if the settings of a task do not fit its data.
    """
    runs, errors = [], []
    for task in tasks:
        try:
            runs.append(make_task_run(task, args, tokenizer, config))
        except (DataError, ConfigError) as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise DataError("\n".join(str(error) for error in errors))
    return runs


def make_task_run(resolved: ResolvedTask, args: MultiTaskTrainingArguments, tokenizer: Any, config: Any) -> TaskRun:
    """Return one task ready to be started; see `make_task_runs`."""
    task, hyper = resolved.task, resolved.hyper
    kind, positions = prompt_kind_of(task.peft_config), max_positions(config)
    if kind is not None and positions is not None:
        # Those of the prompt come before a row's; `max_length` is of the row alone, as in TRL.
        positions -= cast(Any, task.peft_config).num_virtual_tokens
    options = TokenizeOptions(
        task=task.name,
        max_length=hyper.max_length,
        overlong_policy=args.overlong_policy,
        completion_only_loss=task.completion_only_loss,
        assistant_only_loss=task.assistant_only_loss,
        chat_template=task.chat_template,
        row_form=resolved.row_form,
        num_labels=task.num_labels,
        vocab_size=config.get_text_config().vocab_size,
        max_positions=positions,
        virtual_labels=() if kind is None else kind.virtual_labels(task.peft_config),
        reference_columns=resolved.reference_columns,
    )
    loader = _make_loader(resolved, options, tokenizer)
    if loader.report.warning:
        # At once: otherwise a run may train for hours on four rows of twenty-four.
        warnings.warn(loader.report.warning, UserWarning, stacklevel=2)
    num_steps = hyper.max_steps
    if num_steps <= 0:
        if loader.steps_per_epoch is None:
            allowed = "a number, as a stream has no length"
            raise ConfigError(f"tasks.{task.name}.max_steps: got {num_steps}; allowed: {allowed}.")
        num_steps = math.ceil(hyper.num_train_epochs * loader.steps_per_epoch)
        if num_steps > MOST_STEPS:
            got = f"got {hyper.num_train_epochs}, which is {hyper.num_train_epochs * loader.steps_per_epoch:g} steps"
            raise ConfigError(
                f"tasks.{task.name}.num_train_epochs: {got}; allowed: at most {MOST_STEPS} steps. Set max_steps."
            )
    check_optimizer(task.name, hyper, num_steps, args)
    eval_data, eval_prompts = None, ()
    if task.eval_dataset is not None:
        rows = task.eval_dataset
        if not hasattr(rows, "__len__"):
            # Every evaluation goes through all held-out rows, so a stream of them is read once and kept.
            where = f"tasks.{task.name}.eval_dataset"
            with _naming(where):
                rows = ReadAhead(_all_rows(rows), where=where, timeout_s=hyper.data_timeout_s).take()
        eval_data = tokenize_dataset(rows, options=options, tokenizer=tokenizer, split="eval_dataset")
        if eval_data.report.warning:
            warnings.warn(eval_data.report.warning, UserWarning, stacklevel=2)
        eval_prompts = _read_eval_prompts(resolved, rows, options, tokenizer)
    return TaskRun(
        resolved=replace(resolved, num_labels=_num_labels(resolved, loader)),
        loader=loader,
        eval_data=eval_data,
        num_steps=num_steps,
        state=TrainerState(max_steps=num_steps),
        best=BestMetric(task, hyper),
        eval_prompts=eval_prompts,
    )


def _num_labels(resolved: ResolvedTask, loader: Any) -> int | None:
    """Return the number of classes of the task's head: its own, or one more than its greatest label."""
    form = resolved.objective.row_form
    if not (form.needs_label or form.has_token_labels):
        return form.num_labels
    if resolved.task.num_labels is not None:
        return resolved.task.num_labels
    dataset = getattr(loader, "dataset", None)
    return dataset.num_classes() if isinstance(dataset, TokenizedDataset) else None


def _make_loader(resolved: ResolvedTask, options: TokenizeOptions, tokenizer: Any) -> Any:
    """Return what reads the global batch of any step: a `TaskLoader`, or a `StreamLoader` for rows without a length."""
    task, hyper = resolved.task, resolved.hyper
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
    # Plans need the first batch. Read here, its faults are raised where the task is registered.
    with _naming(where):
        loader.sample(1)
    return loader


def _read_eval_prompts(
    resolved: ResolvedTask, rows: Any, options: TokenizeOptions, tokenizer: Any
) -> tuple[PromptRow, ...]:
    """Return the prompts that evaluations complete; warn about rows that are too long for that."""
    generated = resolved.task.generate_options
    if generated is None:
        return ()
    room = None if options.max_positions is None else options.max_positions - generated.max_new_tokens
    found, num_too_long = read_prompts(rows, options, tokenizer, limit=generated.num_rows, max_tokens=room)
    if num_too_long:
        warnings.warn(
            f"tasks.{resolved.name}.eval_generate: {num_too_long:,} held-out prompts left out, as no "
            f"{generated.max_new_tokens:,} tokens fit behind them. Lower max_new_tokens.",
            UserWarning,
            stacklevel=2,
        )
    return found


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Name the dataset in what its own code raises: here no status of a task names it."""
    try:
        yield
    except DataError as error:
        raise error if where in str(error) else DataError(f"{where}: {error}") from error.__cause__


def _all_rows(stream: Iterable[Any]) -> Iterator[list[Any]]:
    yield list(stream)
