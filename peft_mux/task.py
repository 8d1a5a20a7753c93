"""`Task`: what one owner wants trained, and every check that needs neither a model nor a tokenizer.

Not here: checks against the backbone (`modeling/`), against rows (`data/`), and between tasks of a run
(`check_task_names`, called by the trainer).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from peft_mux.compat import StrEnum
from peft_mux.data.mapped_rows import RowFormat, mapped, row_format_faults
from peft_mux.data.sources import dataset_faults, rows_named
from peft_mux.errors import ConfigError, Fault, closest, is_real, raise_faults, shown
from peft_mux.generation.options import GenerateOptions
from peft_mux.hyper_parameters import (
    EarlyStopping,
    hyper_parameter_faults,
    is_interval,
    metric_key,
    supported_optimizers,
    supported_schedules,
)
from peft_mux.moved_names import refuse_unknown
from peft_mux.task_interop import task_settings_of, task_settings_of_trainer
from peft_mux.task_names import name_fault

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import TrainerCallback, TrainingArguments


class TaskStatus(StrEnum):
    """Where a task stands in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    STOPPED_EARLY = "stopped_early"
    FAILED = "failed"
    REMOVED = "removed"

    @property
    def is_final(self) -> bool:
        """Whether the task will not train again."""
        return self not in (TaskStatus.WAITING, TaskStatus.RUNNING, TaskStatus.PAUSED)


# Compared by identity: two tasks with equal fields are two jobs, and datasets have no cheap comparison.
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """One fine-tuning job: its name, its adapter, its data and its hyper-parameters.

    A hyper-parameter that is `None` comes from the run's `MultiTaskTrainingArguments`; names and
    meanings are those of `transformers.TrainingArguments` and `trl.SFTConfig`.

    Attributes:
        name: letters, digits, `_` and `-`, at most 64; unique in the run whatever the case.
        peft_config: adapter of the task; see `peft_mux.modeling.adapters` for what is supported.
        train_dataset: `datasets.Dataset`, `IterableDataset`, or a list of dicts; tokenised rows
            (`input_ids`, optional `labels`, `attention_mask`), `text`, `prompt`/`completion` or `messages`;
            `text` (optional `text_pair`) and `label` for sequence classification. Or where they lie, as
            `peft_mux.load_rows` takes it: a .jsonl, .json, .csv or .parquet file, a folder, or a hub id.
        eval_dataset: the same, held out; where it is the name of a dataset, its split "test" or "validation" is meant.
        train_batch_size: sequences per optimizer step of this task (its *global* batch); by default
            the run's `per_device_train_batch_size * gradient_accumulation_steps`.
        max_steps: optimizer steps of the task; takes precedence over `num_train_epochs`.
        shuffle: whether each epoch has its own order.
        seed: fixes the adapter's initial weights, the order of the data and the dropout.
        max_length: tokens of a row after which `overlong_policy` of the run applies.
        completion_only_loss: loss on the completion only; by default for `prompt`/`completion` rows.
        assistant_only_loss: loss on the assistant's turns only (`messages` rows).
        chat_template: Jinja template for `messages` rows; by default the tokenizer's.
        num_labels: classes of this task's head (sequence classification); by default the backbone's.
        compute_metrics: takes a `transformers.EvalPrediction`, returns a dict of numbers.
        preprocess_logits_for_metrics: shrinks `(logits, labels)` before they are gathered.
        eval_generate: at each evaluation, complete the prompts of the held-out rows (`prompt`/`completion` or
            `messages`) and hold the completions against what the rows ask for; `True` for `GenerateOptions()`, which
            logs `eval_exact_match`. Tasks whose turn it is generate together, in mixed batches.
        early_stopping: when to stop before `max_steps`.
        callbacks: `TrainerCallback`s that see this task's own state and may stop this task alone.
        objective: name of a loss of `peft_mux.modeling.objectives` (docs/losses.md), or a function of the task's own
            that takes `TokenOutputs`; by default what the columns of the rows and the `task_type` of the adapter tell.
        loss_type: name of a variant of that loss, as TRL has it; by default its first; `dpo` adds up a list of them.
        objective_args: arguments of that loss by name, such as `{"beta": 0.1}`; what is left out has TRL's default.
        priority: tasks of higher priority are admitted first, where not all fit into memory.
        row_format: what the rows are where they are of another project: "alpaca" (the prompt of Stanford Alpaca),
            "alpaca_chat" (messages), "sharegpt"; or which column of theirs stands for which of ours, such as
            `{"prompt": "question", "completion": "answer"}`. It holds for `eval_dataset` as well.
        eval_steps: evaluate every so many steps of this task, whatever the run's `eval_strategy`; 0 for never, below 1
            for a share of its steps. Those of the run pass over tasks without held-out rows.
        save_steps: write `<task>/checkpoint-<step>` every so many steps of this task; 0 for never, below 1 for such a
            share.
        eval_delay: steps (epochs, where it is evaluated at their ends) before the first evaluation.
        eval_on_start: whether it is evaluated before its first step, too.
        load_best_model_at_end: end with the adapter of the best evaluation; held-out rows are then evaluated at least
            once an epoch. `early_stopping` does so by itself.
        metric_for_best_model: the metric that tells which evaluation is best, `loss` by default.
        greater_is_better: its direction; by default as in `early_stopping`.
        label_smoothing_factor: share of the loss that all words of the vocabulary have alike, as in Trainer; for the
            loss of next tokens (objective "sft"). `eval_loss` is smoothed, too; `eval_perplexity` is not.
        neftune_noise_alpha: strength of the noise on the embeddings of its tokens in training (NEFTune), 0 for none:
            uniform draws of (-1, 1), times `alpha / sqrt(L * D)` with L tokens of the row and D hidden features.
        hub_model_id: repository of this task's adapter where the run has `push_to_hub=True`; by default the run's
            `hub_model_id`, or the name of its folder, with the name of the task behind it.
        data_timeout_s: seconds within which a stream must give the rows of a step once the others wait for them;
            a stream that does not fails its task, and the others go on.

    Raises:
        ConfigError: naming every field that cannot be run.

    Example:
        >>> from peft import LoraConfig
        >>> task = Task(name="sst2", peft_config=LoraConfig(r=8), train_dataset=[{"text": "a fine film"}])
        >>> task.name
        'sst2'
    """

    name: str
    peft_config: PeftConfig
    train_dataset: Any
    eval_dataset: Any = None
    train_batch_size: int | None = None
    learning_rate: float | None = None
    num_train_epochs: float | None = None
    max_steps: int | None = None
    weight_decay: float | None = None
    lr_scheduler_type: str | None = None
    lr_scheduler_kwargs: dict[str, Any] | None = None
    warmup_steps: float | None = None
    max_grad_norm: float | None = None
    optim: str | None = None
    optim_args: str | None = None
    adam_beta1: float | None = None
    adam_beta2: float | None = None
    adam_epsilon: float | None = None
    seed: int | None = None
    shuffle: bool = True
    max_length: int | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    chat_template: str | None = None
    num_labels: int | None = None
    eval_steps: float | None = None
    save_steps: float | None = None
    data_timeout_s: float | None = None
    compute_metrics: Callable[..., dict[str, float]] | None = None
    preprocess_logits_for_metrics: Callable[..., Any] | None = None
    eval_generate: bool | GenerateOptions | None = None
    early_stopping: EarlyStopping | None = None
    callbacks: Sequence[TrainerCallback] = field(default=())
    objective: str | Callable[..., Any] | None = None
    loss_type: str | Sequence[str] | None = None
    objective_args: dict[str, Any] | None = None
    priority: int = 0
    row_format: RowFormat | None = None
    eval_delay: float | None = None
    eval_on_start: bool | None = None
    load_best_model_at_end: bool | None = None
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    hub_model_id: str | None = None
    label_smoothing_factor: float | None = None
    neftune_noise_alpha: float | None = None

    def __new__(cls, *args: Any, **settings: Any) -> Task:
        """Refuse settings that there are not by saying where they belong or what was meant, which Python would not."""
        if args:
            fix = "Write Task(name=..., peft_config=..., train_dataset=...)."
            raise_faults([Fault("task", f"{shown(args[0])} without its name", "settings by name", fix)])
        # Copies and what comes from another process are made without settings.
        needed = ("name", "peft_config", "train_dataset") if settings else ()
        name = settings.get("name")
        refuse_unknown(
            settings, cls.__dataclass_fields__, f"tasks.{name}" if name_fault(name) is None else "task", needed
        )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Load rows that are named, and check every field that can be judged without a model or a tokenizer."""
        faults = _open_datasets(self)
        raise_faults([*faults, *_task_faults(self, but=[fault.where for fault in faults])])

    @classmethod
    def from_sft_config(cls, name: str, config: TrainingArguments, **settings: Any) -> Task:
        """Return the task that a `SFTConfig` of TRL, or a `TrainingArguments`, describes with rows and an adapter.

        What it says of the run (`bf16`, `logging_steps`, `report_to`, ...) is for
        `MultiTaskTrainingArguments.from_training_arguments`.

        Args:
            name: name of the task.
            config: whose hyper-parameters the task has.
            **settings: `train_dataset`, `peft_config`, and whatever else shall be other than in `config`.

        Raises:
            ConfigError: naming what cannot be done here, with the reason.
        """
        own = task_settings_of(config, has_eval=settings.get("eval_dataset") is not None)
        return cls(name=name, **{**own, **settings})

    @classmethod
    def from_trainer(cls, name: str, trainer: Any, **settings: Any) -> Task:
        """Return the task that a `Trainer` or `SFTTrainer` was made for: its rows, adapter, metrics and callbacks.

        The adapter begins from its configuration, with the task's seed; weights of the trainer's are not taken over.

        Args:
            name: name of the task.
            trainer: a trainer with one adapter that has not trained.
            **settings: whatever shall be other than there.

        Raises:
            ConfigError: naming what cannot be done here, with the reason.
        """
        return cls(name=name, **{**task_settings_of_trainer(trainer), **settings})

    @property
    def is_classification(self) -> bool:
        """Whether the task trains a sequence classifier."""
        return str(getattr(self.peft_config, "task_type", None) or "").endswith("SEQ_CLS")

    @property
    def generate_options(self) -> GenerateOptions | None:
        """What an evaluation generates; `None` for nothing."""
        given = self.eval_generate
        return given if isinstance(given, GenerateOptions) else GenerateOptions() if given else None

    @property
    def stops_by_callback(self) -> bool:
        """Whether a callback of transformers follows the best metric, to stop the task."""
        from transformers import EarlyStoppingCallback

        return any(isinstance(callback, EarlyStoppingCallback) for callback in self.callbacks)

    @property
    def has_own_metrics(self) -> bool:
        """Whether functions of the task's own take part in its evaluations."""
        generated = self.generate_options
        return self.compute_metrics is not None or (generated is not None and generated.metric_names is None)


def _open_datasets(task: Task) -> list[Fault]:
    """Put rows in the place of their names, and rows of ours in that of others'; return what hinders that."""
    where, faults = _where(task), []
    for which in ("train_dataset", "eval_dataset"):
        given: Any = getattr(task, which)
        if isinstance(given, (str, os.PathLike)) and str(given):
            try:
                given = rows_named(str(given), which, where)
            except ConfigError as error:
                faults += error.faults
                continue
        if task.row_format is not None and given is not None and not dataset_faults(given, where):
            own = row_format_faults(task.row_format, given, where, which)
            faults += [fault for fault in own if fault not in faults]
            given = given if own else mapped(given, task.row_format)
        object.__setattr__(task, which, given)
    return faults


def _where(task: Task) -> str:
    # A name that is no name cannot say where the other faults are.
    return f"tasks.{task.name}" if name_fault(task.name) is None else "task"


def _task_faults(task: Task, but: Sequence[str] = ()) -> list[Fault]:
    """Return what is wrong with a task, but for fields that faults were told of already."""
    fault, where = name_fault(task.name), _where(task)
    faults = [fault] if fault else []
    faults += _peft_config_faults(task.peft_config, where)
    for which in ("train_dataset", "eval_dataset"):
        if f"{where}.{which}" not in but and (which == "train_dataset" or task.eval_dataset is not None):
            faults += dataset_faults(getattr(task, which), f"{where}.{which}")
    faults += hyper_parameter_faults(task, where)
    faults += _choice_faults(task, where)
    faults += _type_faults(task, where)
    faults += _combination_faults(task, where)
    return faults


def _peft_config_faults(config: object, where: str) -> list[Fault]:
    # Here and not above, as peft brings torch and transformers, which take seconds to import.
    from peft import PeftConfig

    if isinstance(config, PeftConfig):
        return []
    return [Fault(f"{where}.peft_config", type(config).__name__, "a peft.PeftConfig such as LoraConfig(r=8)")]


def _choice_faults(task: Task, where: str) -> list[Fault]:
    faults = []
    for name, value, options in (
        ("optim", task.optim, supported_optimizers()),
        ("lr_scheduler_type", task.lr_scheduler_type, supported_schedules()),
    ):
        plain = getattr(value, "value", value)
        if plain is not None and (not isinstance(plain, str) or plain not in options):
            faults.append(Fault(f"{where}.{name}", shown(plain), ", ".join(options), closest(plain, options)))
    faults += _loss_faults(task, where)
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        value = getattr(task, name)
        if value is not None and not callable(value):
            faults.append(Fault(f"{where}.{name}", shown(value), "a function"))
    return faults


def _loss_faults(task: Task, where: str) -> list[Fault]:
    # Only where a task is checked: the registry brings torch, which names and numbers do not need.
    from peft_mux.modeling.objectives.task_objective import objective_faults

    return objective_faults(task, where)


def _known_metrics(task: Task) -> tuple[str, ...]:
    """Return the metrics that every evaluation of the task gives; none where its loss is at fault."""
    from peft_mux.modeling.objectives.task_objective import args_of, objective_of

    try:
        return objective_of(task).metric_names(args_of(task))
    except ConfigError:
        return ()


def _has_logits(task: Task) -> bool:
    from peft_mux.modeling.objectives.task_objective import objective_of

    try:
        return objective_of(task).has_logits
    except ConfigError:
        return True


def _type_faults(task: Task, where: str) -> list[Fault]:
    from transformers import TrainerCallback

    from peft_mux.task_events import EVENTS, hears

    faults = [Fault(f"{where}.priority", "None", "a value, 0 by default")] if task.priority is None else []
    for name, (kind, allowed) in {
        "shuffle": (bool, "True or False"),
        "assistant_only_loss": (bool, "True or False"),
        "eval_on_start": ((bool, type(None)), "True, False or None"),
        "load_best_model_at_end": ((bool, type(None)), "True, False or None"),
        "greater_is_better": ((bool, type(None)), "True, False or None"),
        "metric_for_best_model": ((str, type(None)), "the name of a metric"),
        "hub_model_id": ((str, type(None)), 'a repository, such as "owner/name"'),
        "completion_only_loss": ((bool, type(None)), "True, False or None"),
        "chat_template": ((str, type(None)), "a Jinja template"),
        "lr_scheduler_kwargs": ((dict, type(None)), "a dict of options of the schedule"),
        "optim_args": ((str, type(None)), 'options as "key=value,key=value"'),
    }.items():
        value = getattr(task, name)
        if not isinstance(value, kind):
            faults.append(Fault(f"{where}.{name}", shown(value), allowed))
    callbacks = task.callbacks
    if not isinstance(callbacks, (list, tuple)) or not all(isinstance(item, TrainerCallback) for item in callbacks):
        return [*faults, Fault(f"{where}.callbacks", shown(callbacks), "a list of TrainerCallback objects")]
    for callback in callbacks:
        if told := [event for event in EVENTS if hears(callback, event)]:
            fix = "Give it to MultiTaskTrainer(callbacks=[...]); a task's own has on_train_begin and on_train_end."
            kind = type(callback).__name__
            faults.append(Fault(f"{where}.callbacks", f"{kind} with {', '.join(told)}", "events of one task", fix))
    return faults


def _combination_faults(task: Task, where: str) -> list[Fault]:
    faults = _best_faults(task, where)
    if task.compute_metrics is not None and not _has_logits(task):
        allowed = "None with this objective, whose rows have no labels to compare logits with"
        faults.append(Fault(f"{where}.compute_metrics", "a function", allowed))
    if task.compute_metrics is not None and task.eval_dataset is None:
        faults.append(Fault(f"{where}.compute_metrics", "a function", "none where eval_dataset is not set"))
    faults += _generation_faults(task, where)
    is_stream = not hasattr(task.train_dataset, "__len__") and task.train_dataset is not None
    if is_stream and not task.max_steps:
        faults.append(
            Fault(f"{where}.max_steps", shown(task.max_steps), "a number of steps, as a stream has no length")
        )
    return faults


def _best_faults(task: Task, where: str) -> list[Fault]:
    """Return what is wrong with how the best evaluation is told, and with what only held-out rows give a meaning."""
    faults = []
    rule = task.early_stopping
    if rule is not None and not isinstance(rule, EarlyStopping):
        faults.append(Fault(f"{where}.early_stopping", shown(rule), "EarlyStopping(metric=..., patience=...)"))
        rule = None
    metrics = {"early_stopping.metric": rule and rule.metric, "metric_for_best_model": task.metric_for_best_model}
    if len({metric_key(name) for name in metrics.values() if isinstance(name, str)}) > 1:
        allowed = f"{rule.metric!r}, the metric of early_stopping, or None" if rule else ""
        faults.append(Fault(f"{where}.metric_for_best_model", shown(task.metric_for_best_model), allowed))
    if task.greater_is_better is not None and task.metric_for_best_model is None:
        faults.append(
            Fault(f"{where}.greater_is_better", shown(task.greater_is_better), "None without metric_for_best_model")
        )
    wants = {
        "early_stopping": rule is not None,
        "an EarlyStoppingCallback": isinstance(task.callbacks, (list, tuple)) and task.stops_by_callback,
        "load_best_model_at_end": task.load_best_model_at_end is True,
        "metric_for_best_model": task.metric_for_best_model is not None,
        "eval_on_start": task.eval_on_start is True,
        "eval_delay": is_real(task.eval_delay) and task.eval_delay != 0,
        "eval_steps": is_interval(task.eval_steps),
    }
    for name in [name for name, is_wanted in wants.items() if is_wanted]:
        if task.eval_dataset is None:
            faults.append(Fault(f"{where}.eval_dataset", "None", f"held-out rows, as {name} is set"))
        if name != "eval_on_start" and is_real(task.eval_steps) and task.eval_steps == 0:
            faults.append(Fault(f"{where}.eval_steps", "0", f"more than 0, as {name} is set"))
    return faults + [
        fault
        for field_name, metric in metrics.items()
        if isinstance(metric, str) and task.eval_dataset is not None
        for fault in _metric_faults(task, metric, f"{where}.{field_name}")
    ]


def _metric_faults(task: Task, metric: str, where: str) -> list[Fault]:
    """Return a fault for a metric that no evaluation gives, as far as that is known before functions are called."""
    # What `compute_metrics` returns is only known when it is called, so only its absence is judged.
    known = _known_metrics(task)
    known = (*known, *((known and task.generate_options and task.generate_options.metric_names) or ()))
    if not known or task.has_own_metrics or metric_key(metric) in known:
        return []
    fix = "Set compute_metrics so that it returns this metric."
    return [Fault(where, shown(metric), f"{' or '.join(known)} where compute_metrics is not set", fix)]


def _generation_faults(task: Task, where: str) -> list[Fault]:
    """Return why completions of held-out prompts cannot be generated, as far as the task itself tells."""
    given, where = task.eval_generate, f"{where}.eval_generate"
    if given is None or given is False:
        return []
    if given is not True and not isinstance(given, GenerateOptions):
        fix = "Write GenerateOptions(**options)." if isinstance(given, dict) else ""
        return [Fault(where, shown(given), "True, False, or GenerateOptions(max_new_tokens=..., metrics=...)", fix)]
    if task.is_classification:
        return [Fault(where, shown(given), "None for sequence classification, which completes no text")]
    if task.eval_dataset is None:
        return [Fault(where, shown(given), "None where eval_dataset is not set", "Give held-out rows with prompts.")]
    return []


TASK_FIELDS = tuple(item.name for item in fields(Task))
"""Names of the fields of a `Task`, for files and for messages."""
