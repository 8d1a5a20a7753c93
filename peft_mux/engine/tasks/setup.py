"""Converts a `Task` into a `ResolvedTask` with complete settings, and into a `ActiveTask` with tokenised rows.

This module does not use the model.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, cast

from peft import PromptLearningConfig

from peft_mux.arguments import MOST_STEPS, MultiTaskTrainingArguments
from peft_mux.data.dataset import TaskLoader, TokenizedDataset, open_rows, tokenize_dataset
from peft_mux.data.packing.prefixes import any_share_prefix
from peft_mux.data.streams import ReadAhead, StreamLoader
from peft_mux.data.tokenize import CLASS_LABELS, TokenizeOptions, own_tokenizer
from peft_mux.engine.tasks.active_task import ActiveTask, BestMetric, ResolvedTask, new_state
from peft_mux.engine.tasks.optimizer import check_optimizer
from peft_mux.errors import ConfigError, DataError, Fault, raise_faults
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.backbone.probe import max_positions
from peft_mux.modeling.model import reason_of_adapter
from peft_mux.modeling.objectives.task_objective import find_loss
from peft_mux.modeling.sampling import GenerateOptions
from peft_mux.task import Task, resolve

ReadPrompts = Callable[[GenerateOptions, Any, TokenizeOptions, Any], tuple[Any, ...]]
"""Returns the prompts that evaluations complete, from held-out rows, with the options of their tokens and tokenizer."""


def resolve_tasks(tasks: Iterable[Task], args: MultiTaskTrainingArguments) -> list[ResolvedTask]:
    """Return the tasks with their settings completed by those of the run.

    Raises:
        ConfigError: if the losses of tasks have errors; the message names all of them.
    """
    resolved: list[ResolvedTask] = []
    faults: list[Fault] = []
    for task in tasks:
        hyper, loss = resolve(task, args), find_loss(task, f"tasks.{task.name}")
        faults += loss.faults
        if task.save_steps and args.save_strategy == "no":
            got, allowed = f'{task.save_steps} with save_strategy="no"', "None, or used with another save_strategy"
            faults.append(Fault(f"tasks.{task.name}.save_steps", got, allowed, "The run would save nothing."))
        if isinstance(task.eval_dataset, dict) and hyper.metric_for_best_model in ("loss", "eval_loss"):
            allowed = f"a metric of one data set, such as eval_{next(iter(task.eval_dataset))}_loss"
            faults.append(Fault(f"tasks.{task.name}.metric_for_best_model", '"loss", which several have', allowed))
        if loss.objective is not None and loss.args is not None:
            loss_args = replace(loss.args, label_smoothing_factor=hyper.label_smoothing_factor)
            # A copy, because the user's own may change: its name is a key of many tables.
            resolved.append(ResolvedTask(copy.copy(task), hyper, loss.objective, loss_args))
    raise_faults(faults)
    return resolved


def adapters_of(tasks: Sequence[ResolvedTask]) -> dict[str, Any]:
    """Return the configurations, seeds and numbers of classes of tasks, as `MultiTaskPeftModel` takes them."""
    return {
        "peft_configs": {task.name: task.peft_config for task in tasks},
        "seeds": {task.name: task.hyper.seed for task in tasks},
        "num_labels": {task.name: task.num_labels for task in tasks if task.num_labels is not None},
    }


def make_active_tasks(
    tasks: Sequence[ResolvedTask],
    args: MultiTaskTrainingArguments,
    tokenizer: Any,
    config: Any,
    read_prompts: ReadPrompts | None = None,
) -> list[ActiveTask]:
    """Return all tasks ready to start, or raise one error with the errors of all of them.

    Args:
        tasks: the tasks, whose settings have been checked.
        args: the arguments of the run.
        tokenizer: the tokenizer for rows that are not tokenised yet; `None` if there are none.
        config: the configuration of the backbone, for its vocabulary size and number of positions.
        read_prompts: returns the prompts of held-out rows; only tasks with `eval_generate` need it.

    Raises:
        DataError: if rows of one or more tasks cannot be trained on.
        ConfigError: if the settings of a task do not fit its data.
    """
    runs, errors = [], []
    for task in tasks:
        try:
            runs.append(make_active_task(task, args, tokenizer, config, read_prompts))
        except (DataError, ConfigError) as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise DataError("\n".join(str(error) for error in errors))
    return runs


def make_active_task(
    resolved: ResolvedTask,
    args: MultiTaskTrainingArguments,
    tokenizer: Any,
    config: Any,
    read_prompts: ReadPrompts | None = None,
) -> ActiveTask:
    """Return one task ready to start; see `make_active_tasks`."""
    task, hyper = resolved.task, resolved.hyper
    kind, positions, reference_columns = kind_of(task.peft_config), max_positions(config), ()
    if not kind.has_targets and positions is not None:
        # The prompt takes the first positions; `max_length` limits only the row, as in TRL.
        positions -= cast(Any, task.peft_config).num_virtual_tokens
    if isinstance(task.peft_config, PromptLearningConfig) and resolved.needs_reference:
        # Reference values cannot be computed, because rows always include the learnt prompt.
        reference_columns = resolved.objective.reference_columns
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
        virtual_labels=kind.virtual_labels(task.peft_config),
        reference_columns=reference_columns,
        truncation_mode=task.truncation_mode,
        packing=task.packing,
    )
    loader = _make_loader(resolved, options, tokenizer)
    if loader.report.warning:
        # Warn before training; otherwise a run may train for hours on four of twenty-four rows.
        warnings.warn(loader.report.warning, UserWarning, stacklevel=2)
    num_steps = hyper.max_steps
    if num_steps <= 0:
        if loader.steps_per_epoch is None:
            allowed = "a number, as a stream has no length"
            raise ConfigError(f"tasks.{task.name}.max_steps must be {allowed}, got {num_steps}.")
        num_steps = math.ceil(hyper.num_train_epochs * loader.steps_per_epoch)
        if num_steps > MOST_STEPS:
            got = f"got {hyper.num_train_epochs}, which is {hyper.num_train_epochs * loader.steps_per_epoch:g} steps"
            raise ConfigError(
                f"tasks.{task.name}.num_train_epochs must give at most {MOST_STEPS} steps: {got}. Set max_steps."
            )
    check_optimizer(task.name, hyper, num_steps, args)
    eval_data, eval_prompts = {}, ()
    given = {} if task.eval_dataset is None else task.eval_dataset
    options = replace(options, packing=False)  # which would not change a mean over tokens
    for part, rows in given.items() if isinstance(given, dict) else [("", given)]:
        split, prefix = (f"eval_dataset.{part}", f"eval_{part}") if part else ("eval_dataset", "eval")
        held_out, data = read_held_out(resolved, rows, options, tokenizer, split)
        eval_data[prefix] = data
        if rows is task.train_dataset or (isinstance(loader, TaskLoader) and data.has_tokens_of(loader.dataset)):
            what = "held-out metrics will not show overfitting. Give rows that are not trained on."
            warnings.warn(f"tasks.{task.name}.{split} has the rows of train_dataset: {what}", stacklevel=2)
        if task.generate_options is not None:  # which is refused with several data sets
            assert read_prompts is not None, "the trainer hands it in"
            eval_prompts = read_prompts(task.generate_options, held_out, options, tokenizer)
    form, num_labels = resolved.objective.row_form, task.num_labels
    if not (form.needs_label or form.has_token_labels):
        num_labels = form.num_labels
    elif num_labels is None and isinstance(loader, TaskLoader):
        num_labels = loader.dataset.num_classes()  # one more than the greatest label
    first = loader.sample(1)[0]
    if hyper.label_smoothing_factor and (CLASS_LABELS in first.row_values or isinstance(first.class_label, float)):
        allowed, got = "0 for rows with numbers in place of a class", f"{hyper.label_smoothing_factor:g}"
        raise ConfigError(f"tasks.{task.name}.label_smoothing_factor must be {allowed}, got {got}.")
    return ActiveTask(
        resolved=replace(resolved, num_labels=num_labels),
        loader=loader,
        eval_data=eval_data,
        num_steps=num_steps,
        state=new_state(hyper, args, num_steps, loader.steps_per_epoch),
        best=BestMetric(task, hyper),
        eval_prompts=eval_prompts,
        held_out_options=options,
        router_coefficient=resolved.router_coefficient(config),
    )


def read_held_out(
    resolved: ResolvedTask, rows: Any, options: TokenizeOptions, tokenizer: Any, split: str
) -> tuple[Any, TokenizedDataset]:
    """Return held-out rows with a length, and their tokens; warn about rows that are cut or left out.

    Args:
        resolved: the task.
        rows: a dataset or a stream.
        options: how the rows become tokens.
        tokenizer: the tokenizer; `None` for tokenised rows.
        split: name of the dataset, for messages.
    """
    if not hasattr(rows, "__len__"):
        # Every evaluation uses all held-out rows, so an evaluation stream is read once and kept.
        where = f"tasks.{resolved.name}.{split}"
        with _naming(where):
            batches = (list(takewhile(lambda _: not reader.is_over, stream)) for stream in (rows,))
            reader = ReadAhead(batches, where=where, timeout_s=resolved.hyper.data_timeout_s)
            rows = reader.take()
    data = tokenize_dataset(rows, options=options, tokenizer=tokenizer, split=split)
    if data.report.warning:
        warnings.warn(data.report.warning, UserWarning, stacklevel=2)
    return rows, data


_SAMPLE_ROWS = 64


def decide_sharing(runs: Iterable[ActiveTask], args: MultiTaskTrainingArguments, backbone_reason: str | None) -> None:
    """Enable prefix sharing for tasks for which it is exact, and record a remark for the others.

    A remark is recorded if the user has requested sharing, or if rows of the task do have a common prefix.

    Args:
        runs: the tasks.
        args: the arguments of the run.
        backbone_reason: why no task on the backbone may share (`peft_mux.modeling.model`), or `None`.
    """
    for run in runs:
        reason = backbone_reason or reason_of_adapter(run.task.peft_config)
        if reason is None and run.hyper.neftune_noise_alpha:
            reason = f"its neftune_noise_alpha={run.hyper.neftune_noise_alpha:g} is drawn for each row"
        if reason is None and args.pad_to_chunks:
            reason = "pad_to_chunks=True requires streams of equal shapes"
        run.loader.shares_prefixes = reason is None and args.share_prefixes is not False
        if reason is None or args.share_prefixes is False:
            continue
        if args.share_prefixes is True or any_share_prefix(
            row.input_ids[start:end] for row in run.loader.sample(_SAMPLE_ROWS) for start, end in row.sequence_bounds
        ):
            run.sharing_remark = f"{run.name}: shared prefixes are computed for each row, because {reason}"


def _make_loader(resolved: ResolvedTask, options: TokenizeOptions, tokenizer: Any) -> Any:
    """Return the loader of global batches: a `TaskLoader`, or a `StreamLoader` for datasets without a length."""
    task, hyper = resolved.task, resolved.hyper
    settings: dict[str, Any] = {
        "task": task.name,
        "batch_size": hyper.train_batch_size,
        "seed": hyper.seed,
        "arrange": options.arrange,
    }
    if options.arrange is not None and hyper.train_batch_size < 2:
        allowed = "at least 2, because each prompt of a batch is also paired with the answer of another row"
        raise ConfigError(f"tasks.{task.name}.train_batch_size must be {allowed}, got {hyper.train_batch_size}.")
    if hasattr(task.train_dataset, "__len__"):
        dataset = tokenize_dataset(task.train_dataset, options=options, tokenizer=tokenizer)
        loader = TaskLoader(dataset, **settings, shuffle=task.shuffle, drops_last=hyper.dataloader_drop_last)
        if not loader.steps_per_epoch:
            allowed = f"False, because {len(dataset)} rows are no batch of {hyper.train_batch_size}"
            raise ConfigError(f"tasks.{task.name}.dataloader_drop_last must be {allowed}, got True.")
        return loader
    where = f"tasks.{task.name}.train_dataset"
    loader = StreamLoader(
        task.train_dataset,
        # Copied now, before user code that runs during training can change it.
        partial(open_rows, options=options, tokenizer=own_tokenizer(tokenizer)),
        where=where,
        timeout_s=hyper.data_timeout_s,
        **settings,
    )
    # Plans need the first batch. Reading it here reports its errors when the task is registered.
    with _naming(where):
        loader.sample(1)
    return loader


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Add the name of the dataset to errors of its own code."""
    try:
        yield
    except DataError as error:
        raise error if where in str(error) else DataError(f"{where}: {error}") from error.__cause__
