"""`MultiTaskTrainerCallback`: what a callback of a run may be told of its tasks, beside transformers' own events."""

# MERGED: `Task`: what one owner wants trained, and every check that needs neither a model nor a tokenizer.
# MERGED: Not here: checks against the backbone (`modeling/`), against rows (`data/`), and between tasks of a run
# MERGED: (`check_task_names`, called by the trainer).
# MERGED: What a task trains with: its own settings, completed from those of the run.

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from transformers import IntervalStrategy, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from peft_mux.arguments import MultiTaskTrainingArguments, task_settings_of, task_settings_of_trainer
from peft_mux.data.sources import RowFormat, dataset_faults, mapped, row_format_faults, rows_named
from peft_mux.errors import ConfigError, Fault, StrEnum, closest, is_real, raise_faults, shown
from peft_mux.hyper_parameters import (
    EarlyStopping,
    HyperParameters,
    greater_is_better,
    hyper_parameter_faults,
    is_interval,
    metric_key,
    supported_optimizers,
    supported_schedules,
)
from peft_mux.modeling.generation.options import GenerateOptions
from peft_mux.moved_names import refuse_unknown
from peft_mux.storage import name_fault

if TYPE_CHECKING:
    from peft import PeftConfig

    from peft_mux.modeling.objectives.task_objective import FoundLoss


class MultiTaskTrainerCallback(TrainerCallback):
    """A `transformers.TrainerCallback` that is also told what becomes of the tasks of a run.

    Given to `MultiTaskTrainer(callbacks=[...])`. Each method may be left out, and a plain `TrainerCallback` may have
    single ones of them. All are called by `train`, between two steps, on every process, after what they tell of is
    done: an adapter that they name is on the disk. What is done to a trainer that does not train is not told.

    What they ask for (`control.should_training_stop`, or `trainer.register_tasks` and its like) is done before the
    next step; a run whose last task has ended goes on with what `on_task_end` registers. What they raise ends the run,
    as it does with transformers' events.

    The events of a task get, beside `args`, `state` and `control` of the run:

    * `task`: its name.
    * `task_state`: its own `TrainerState`, with `global_step` and `log_history`.
    * `status`, `reason`: its `TaskStatus` at that moment, and why, "" where nothing is to be said.
    * `adapter_folder`: the folder of its adapter as it is now; `None` where the disk has none, or an older one.
    * `model` and `processing_class`, as transformers' events get them.

    Example:
        >>> class Tell(MultiTaskTrainerCallback):
        ...     def on_task_end(self, args, state, control, *, task, status, adapter_folder, **kwargs):
        ...         print(f"{task} {status}: {adapter_folder}")
    """

    def on_task_register(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that was registered while the others train; it begins when a plan admits it."""

    def on_task_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that takes its first step of this `train` next, or goes on from a checkpoint."""

    def on_task_pause(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that rests."""

    def on_task_resume(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that rests no more; it goes on, or waits for a plan to admit it."""

    def on_task_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that has taken all its steps, or has stopped early."""

    def on_task_fail(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that has failed; `reason` says why, and the others go on.

        One that failed only because its adapter could not be written may end after all, when the disk takes it.
        """

    def on_task_remove(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that was removed, whether it had ended before or not."""

    def on_plan(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of the `plan` that the next steps follow, and of the one `before` it (`None` before the first)."""


EVENTS = tuple(name for name in vars(MultiTaskTrainerCallback) if name.startswith("on_"))
"""Names of the events that transformers does not have."""


def hears(callback: object, event: str) -> bool:
    """Return whether a callback has a method of its own for one of `EVENTS`."""
    method = getattr(callback, event, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(MultiTaskTrainerCallback, event)


def event_faults(callbacks: Iterable[object], where: str) -> list[Fault]:
    """Return a fault for each method that looks like one of `EVENTS` and is none: it would never be called.

    Args:
        callbacks: callbacks of a run.
        where: path of the argument that they were given as.
    """
    faults = []
    for callback in callbacks:
        likely = [name for name in dir(callback) if name.startswith(("on_task", "on_plan", "on_replan"))]
        for name in [one for one in likely if one not in EVENTS and callable(getattr(callback, one))]:
            kind = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            fix = closest(name, EVENTS)
            faults.append(Fault(f"{where}.{kind}.{name}", "an event that is never called", ", ".join(EVENTS), fix))
    return faults


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
    # Imported here: the registry of losses brings torch, which a module that only names `Task` does not need.
    from peft_mux.modeling.objectives.task_objective import find_loss

    loss = find_loss(task, where)
    faults += hyper_parameter_faults(task, where)
    faults += _choice_faults(task, where, loss)
    faults += _type_faults(task, where)
    faults += _combination_faults(task, where, loss)
    return faults


def _peft_config_faults(config: object, where: str) -> list[Fault]:
    # Here and not above, as peft brings torch and transformers, which take seconds to import.
    from peft import PeftConfig

    if isinstance(config, PeftConfig):
        return []
    return [Fault(f"{where}.peft_config", type(config).__name__, "a peft.PeftConfig such as LoraConfig(r=8)")]


def _choice_faults(task: Task, where: str, loss: FoundLoss) -> list[Fault]:
    faults = []
    for name, value, options in (
        ("optim", task.optim, supported_optimizers()),
        ("lr_scheduler_type", task.lr_scheduler_type, supported_schedules()),
    ):
        plain = getattr(value, "value", value)
        if plain is not None and (not isinstance(plain, str) or plain not in options):
            faults.append(Fault(f"{where}.{name}", shown(plain), ", ".join(options), closest(plain, options)))
    faults += loss.faults
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        value = getattr(task, name)
        if value is not None and not callable(value):
            faults.append(Fault(f"{where}.{name}", shown(value), "a function"))
    return faults


def _type_faults(task: Task, where: str) -> list[Fault]:
    from transformers import TrainerCallback

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


def _combination_faults(task: Task, where: str, loss: FoundLoss) -> list[Fault]:
    faults = _best_faults(task, where, loss)
    if task.compute_metrics is not None and loss.objective is not None and not loss.objective.has_logits:
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


def _best_faults(task: Task, where: str, loss: FoundLoss) -> list[Fault]:
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
        for fault in _metric_faults(task, metric, f"{where}.{field_name}", loss)
    ]


def _metric_faults(task: Task, metric: str, where: str, loss: FoundLoss) -> list[Fault]:
    """Return a fault for a metric that no evaluation gives, as far as that is known before functions are called."""
    # What `compute_metrics` returns is only known when it is called, so only its absence is judged.
    if loss.objective is None or loss.args is None:
        return []
    known = loss.objective.metric_names(loss.args)
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
