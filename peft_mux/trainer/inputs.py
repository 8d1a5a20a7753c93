"""Checks of what a trainer is given: its tasks, in a list or in the short form, its callbacks, and its launch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.errors import ConfigError, Fault, raise_faults, shown
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.storage import check_task_names, unwritable
from peft_mux.task import Task, event_faults

_OF_THE_TASK = "Set it on the Task"
_WHERE = {
    "compute_metrics": _OF_THE_TASK,
    "preprocess_logits_for_metrics": _OF_THE_TASK,
    "peft_config": _OF_THE_TASK,
    "train_batch_size": _OF_THE_TASK,
    "data_collator": "Sequences are packed by ChunkPackingCollator",
    "model_init": "Give the model, or its name",
    "optimizers": "Every task has an optimizer of its own; set optim on the Task",
    "optimizer_cls_and_kwargs": "Every task has an optimizer of its own; set optim on the Task",
    "compute_loss_func": "Set loss_type on the Task",
    "tokenizer": "Pass it as processing_class",
}
"""Where the setting of an argument of Trainer belongs; other arguments have no meaning for many tasks."""


def refuse_trainer_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments of `transformers.Trainer` that cannot mean anything for many tasks.

    Raises:
        ConfigError: naming each one that is set, and where its setting belongs.
    """
    # `None` is the default of most of them: code that passes them on unset asks for nothing.
    raise_faults(
        [
            Fault(name, type(value).__name__, "left out", f"{_WHERE.get(name, 'It has no meaning for many tasks')}.")
            for name, value in given.items()
            if value is not None
        ]
    )


@contextmanager
def trainer_constructor(args: MultiTaskTrainingArguments, folder: Path) -> Iterator[None]:
    """Undo what the constructor of Trainer does for one model, in the `with` block.

    It makes `output_dir`, which a plan must not, one repository on the Hub, and trackers for all tasks together.

    Args:
        args: the arguments of the run.
        folder: the folder of the run; it is removed with those of its parents that did not exist, if they are empty.

    Raises:
        CheckpointError: if the folder cannot be made.
    """
    # The innermost first, as a folder is empty only when those in it are gone.
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    pushes, args.push_to_hub = args.push_to_hub, False
    loggers, args.report_to = args.report_to, [] if args.report_per_task else args.report_to
    try:
        yield
    except OSError as error:
        if error.filename is None or Path(error.filename) not in (folder, *folder.parents):
            raise
        raise unwritable(folder, error) from error
    finally:
        args.push_to_hub, args.report_to = pushes, loggers
    for path in missing:
        with suppress(OSError):  # not empty
            path.rmdir()


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse callbacks that know one model with one metric if they are given to the run, and misspelt events.

    Raises:
        ConfigError: naming them, and where they belong or how they are spelt.
    """
    callbacks = list(callbacks)
    faults = [
        Fault("callbacks", shown(given), "a list of TrainerCallback objects or classes")
        for given in callbacks
        if not isinstance(given, TrainerCallback)
        and not (isinstance(given, type) and issubclass(given, TrainerCallback))
    ]
    faults += event_faults(callbacks, "callbacks")
    if any(isinstance(callback, EarlyStoppingCallback) for callback in callbacks):
        fix = "Give it to Task(callbacks=[...]), or set Task(early_stopping=EarlyStopping(...))."
        allowed = "without EarlyStoppingCallback, because each task stops on its own"
        faults.append(Fault("callbacks", "one for the whole run", allowed, fix))
    raise_faults(faults)


def check_launch(args: MultiTaskTrainingArguments) -> None:
    """Refuse a launch with fewer processes than were asked for, or of a kind that is not supported.

    `accelerate launch --cpu --num_processes 2` starts one process without a warning; only the address at which it
    should have met the others shows that there were to be more.

    Raises:
        ConfigError: naming what was started, and what to type.
    """
    if args.world_size == 1:
        promised = processes_asked_of_launcher(os.environ)
        if promised is not None:
            raise ConfigError(
                f"processes must be the {promised} that the launcher was asked for, got 1. On CPUs start them with "
                "torchrun --nproc-per-node N script.py (accelerate launch --cpu starts one), on GPUs with accelerate "
                "launch --multi_gpu --num_processes N script.py; a single one with python script.py."
            )
        return
    kinds = [
        kind
        for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
        if os.environ.get(f"ACCELERATE_USE_{kind}", "false").lower() in ("1", "true")
    ]
    if kinds:
        raise ConfigError(
            "processes must be plain ones, each with the whole model (accelerate launch --multi_gpu, or torchrun), "
            f"got a launch with {', '.join(kinds)}. Leave the option out."
        )


def processes_asked_of_launcher(environment: Mapping[str, str]) -> str | None:
    """Return how many processes a launcher was asked for if that is more than one, else `None`.

    Args:
        environment: environment variables of a process that is alone, by name.
    """
    counts = [environment.get(name, "") for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")]
    stated = next((count for count in counts if count.isdigit()), None)
    if stated is not None:
        return stated if int(stated) > 1 else None
    # accelerate's launcher always sets the precision, and an address only if it was asked for several processes.
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_PORT" in environment
    return "several" if by_accelerate else None


def check_evaluation(args: MultiTaskTrainingArguments, tasks: Sequence[Task]) -> None:
    """Refuse a run with settings of evaluations but without held-out rows.

    Raises:
        ConfigError: naming each argument of evaluations that is set while no task has held-out rows.
    """
    if any(task.eval_dataset is not None for task in tasks):
        return
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    wanted = {"eval_strategy": strategy if strategy != "no" else None}
    wanted |= {"save_strategy": "best" if args.save_strategy == "best" else None}
    names = "load_best_model_at_end metric_for_best_model greater_is_better eval_on_start eval_delay".split()
    wanted |= {name: getattr(args, name) or None for name in names}
    fix = "Give eval_dataset to the tasks that should be evaluated."
    raise_faults(
        [
            Fault(f"args.{name}", f"{value!r} without a task that has held-out rows", "its default", fix)
            for name, value in wanted.items()
            if value is not None
        ]
    )


def task_list(
    model: Any,
    tasks: Sequence[Task] | None,
    train_dataset: Mapping[str, Any] | None,
    eval_dataset: Mapping[str, Any] | None,
) -> list[Task]:
    """Return the tasks, from the list or from the short form.

    Args:
        model: the model of the trainer; the short form needs a `MultiTaskPeftModel`.
        tasks: the list of tasks, or `None` for the short form.
        train_dataset: rows by task name, in the short form.
        eval_dataset: held-out rows by task name, in the short form.

    Raises:
        ConfigError: if there is no task, or both forms are used.
    """
    if tasks is not None:
        if train_dataset is not None or eval_dataset is not None:
            raise ConfigError("train_dataset must be left out with tasks. Put the rows on the tasks.")
        require_tasks(tasks)
        if not tasks:
            raise ConfigError("tasks must be a list of at least one Task, got an empty list.")
        check_task_names(task.name for task in tasks)
        return list(tasks)
    held_out = {} if eval_dataset is None else eval_dataset
    if not isinstance(model, MultiTaskPeftModel) or not isinstance(train_dataset, Mapping):
        raise ConfigError(
            "tasks must be a list of Task, or a MultiTaskPeftModel with train_dataset={name: rows, ...}, got None."
        )
    is_of_model = set(train_dataset) == set(model.tasks)
    if not isinstance(held_out, Mapping) or not is_of_model or not set(held_out) <= set(train_dataset):
        raise ConfigError(
            f"train_dataset must have rows for exactly the tasks of the model ({', '.join(model.tasks)}), and "
            f"held-out rows for some of them, got rows for {', '.join(train_dataset)}."
        )
    return [
        Task(
            name=name,
            peft_config=model.peft_config[model.adapter_of(name)],
            train_dataset=train_dataset[name],
            eval_dataset=held_out.get(name),
        )
        for name in model.tasks
    ]


def require_tasks(tasks: object) -> None:
    """Refuse a value that is not a list of tasks.

    Raises:
        ConfigError: naming the value, and how a list is written.
    """
    if isinstance(tasks, Task):
        raise ConfigError("tasks must be a list of at least one Task, got a single Task. Write [task].")
    if not isinstance(tasks, Sequence) or isinstance(tasks, str):
        fix = " Write list(tasks.values())." if isinstance(tasks, Mapping) else ""
        raise ConfigError(f"tasks must be a list of at least one Task, got {type(tasks).__name__}.{fix}")
    wrong = dict.fromkeys(type(task).__name__ for task in tasks if not isinstance(task, Task))
    if wrong:
        raise ConfigError(f"tasks must be a list of at least one Task, got {', '.join(wrong)} in the list.")


def make_collator(args: MultiTaskTrainingArguments) -> ChunkPackingCollator:
    """Return what packs the rows of a run into micro-batches.

    Args:
        args: the arguments of the run, which say how chunks are cut.
    """
    return ChunkPackingCollator(
        chunk_size=args.chunk_size,
        min_chunk_size=args.min_chunk_size,
        pad_to_chunks=args.pad_to_chunks,
        split_long_sequences=args.split_long_sequences,
    )
