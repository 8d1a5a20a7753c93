"""What a task trains with: its own settings, completed from those of the run."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from transformers import IntervalStrategy

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.hyper_parameters import HyperParameters, greater_is_better
from peft_mux.task import Task


def resolve(task: Task, args: MultiTaskTrainingArguments) -> HyperParameters:
    """Return the settings that a task trains with: its own, and those of the run where it has none.

    A task that sets only one of `max_steps` and `num_train_epochs` is held to that one.

    Args:
        task: the task, whose `None` settings are filled in.
        args: the arguments of the run, which hold the defaults of all tasks.
    """

    def pick(name: str) -> Any:
        own = getattr(task, name)
        value = getattr(args, name) if own is None else own
        return getattr(value, "value", value)

    # `max_steps` takes precedence over epochs, so the run's own would override the epochs of this task.
    max_steps = pick("max_steps")
    if task.max_steps is None and task.num_train_epochs is not None:
        max_steps = -1
    load_best = bool(pick("load_best_model_at_end")) and task.eval_dataset is not None
    metric = pick("metric_for_best_model") if task.eval_dataset is not None else None
    # Trainer's default; a callback that stops early needs a metric, too.
    if metric is None and (load_best or task.stops_by_callback):
        metric = "loss"
    # What the run says is about the run's metric.
    greater = task.greater_is_better if task.metric_for_best_model else pick("greater_is_better")
    batch_size = task.train_batch_size or args.per_device_train_batch_size * args.gradient_accumulation_steps
    direct = (
        "learning_rate num_train_epochs weight_decay lr_scheduler_type lr_scheduler_kwargs warmup_steps max_grad_norm "
        "optim optim_args adam_beta1 adam_beta2 adam_epsilon seed max_length data_timeout_s eval_delay eval_on_start "
        "label_smoothing_factor"
    ).split()
    return HyperParameters(
        train_batch_size=batch_size,
        max_steps=max_steps,
        eval_steps=_eval_steps(task, args),
        save_steps=task.save_steps or 0,
        load_best_model_at_end=load_best,
        metric_for_best_model=metric,
        greater_is_better=greater,
        neftune_noise_alpha=pick("neftune_noise_alpha") or 0.0,
        **{name: pick(name) for name in direct},
    )


def task_arguments(hyper: HyperParameters, args: MultiTaskTrainingArguments) -> MultiTaskTrainingArguments:
    """Return a copy of the run's arguments with one task's settings, for code that reads `TrainingArguments`.

    Args:
        hyper: the settings of the task, complete.
        args: the arguments of the run; they are not changed.
    """
    # Copied, not made anew: `__post_init__` would check and complete every field a second time.
    own = copy.copy(args)
    for item in fields(HyperParameters):
        # TrainingArguments has `train_batch_size` as a property that cannot be set.
        if item.name not in ("train_batch_size", "max_length"):
            setattr(own, item.name, getattr(hyper, item.name))
    own.max_length = hyper.max_length
    strategies = {-1.0: IntervalStrategy.EPOCH, 0.0: IntervalStrategy.NO}
    own.eval_strategy = strategies.get(float(hyper.eval_steps), IntervalStrategy.STEPS)
    if hyper.metric_for_best_model is not None and hyper.greater_is_better is None:
        own.greater_is_better = greater_is_better(hyper.metric_for_best_model)
    # Whoever is given the copy may write into it; the run and the other tasks must not see that.
    vars(own).update({key: copy.deepcopy(value) for key, value in vars(own).items() if isinstance(value, (dict, list))})
    return own


def _eval_steps(task: Task, args: MultiTaskTrainingArguments) -> float:
    if task.eval_dataset is None:
        return 0
    if task.eval_steps is not None:
        return task.eval_steps
    strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
    if strategy == "steps":
        return args.eval_steps or args.logging_steps
    # Whoever looks for the best adapter must see its metric: at least once an epoch, even where the run asks for none.
    loads_best = args.load_best_model_at_end if task.load_best_model_at_end is None else task.load_best_model_at_end
    if strategy == "epoch" or task.early_stopping is not None or task.stops_by_callback or loads_best:
        return -1
    return 0
