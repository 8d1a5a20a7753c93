"""`Task`: one fine-tuning job, with every check that needs neither a model nor a tokenizer.

Also here: `HyperParameters`, a task's settings completed from those of the run (`resolve`), `EarlyStopping`,
`TaskStatus`, and `MultiTaskTrainerCallback`. Checks against the backbone are in `modeling/`, checks against rows in
`data/`, and checks between the tasks of a run in the trainer.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig
from transformers import (
    EarlyStoppingCallback,
    IntervalStrategy,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from peft_mux.arguments import (
    NUMBER_RULES,
    PLATEAU,
    MultiTaskTrainingArguments,
    checks_settings,
    choice_faults,
    is_interval,
    refuse_unknown,
    short_repr,
    supported_optimizers,
    supported_schedules,
    type_rule,
)
from peft_mux.data.sources import RowFormat, dataset_faults, mapped, row_format_faults, rows_named
from peft_mux.errors import (
    CheckpointError,
    ConfigError,
    Fault,
    Rule,
    StrEnum,
    closest,
    is_integer,
    is_real,
    is_text,
    printable,
    raise_faults,
    rule_faults,
    shown,
)
from peft_mux.from_trl import settings_of, settings_of_trainer
from peft_mux.modeling.adapters.files import ADAPTER_NAMES, ENCODER_NAME, read_config
from peft_mux.modeling.objectives.task_objective import FoundLoss, find_loss
from peft_mux.modeling.sampling import GenerateOptions
from peft_mux.storage import name_fault


class MultiTaskTrainerCallback(TrainerCallback):
    """A `transformers.TrainerCallback` with additional events for the tasks of a run.

    Given to `MultiTaskTrainer(callbacks=[...])`. Every method is optional, and a plain `TrainerCallback` may define
    some of them. `train` calls them between two steps, on every process, after the event has happened: an adapter that
    they name is on the disk. Changes to a trainer that does not train are not announced.

    Their requests (`control.should_training_stop`, `trainer.register_tasks` and similar calls) are carried out before
    the next step; a run whose last task has ended continues with what `on_task_end` registers. An exception in them
    ends the run, as with transformers' events.

    The events of a task receive, in addition to `args`, `state` and `control` of the run:

    * `task`: its name.
    * `task_state`: its own `TrainerState`, with `global_step` and `log_history`.
    * `status`, `reason`: its `TaskStatus` at that moment, and why, "" if there is nothing to say.
    * `adapter_folder`: the folder of its current adapter; `None` if the disk has none, or an older one.
    * `model` and `processing_class`, as transformers' events get them.

    Example:
        >>> class PrintEnd(MultiTaskTrainerCallback):
        ...     def on_task_end(self, args, state, control, *, task, status, adapter_folder, **kwargs):
        ...         print(f"{task} {status}: {adapter_folder}")
    """

    def on_task_register(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Called when a task is registered while others train; it begins when a plan admits it."""

    def on_task_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Called before the first step of a task in this `train`, also when it resumes from a checkpoint."""

    def on_task_pause(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Called when a task is paused."""

    def on_task_resume(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Called when a paused task is resumed; it trains again as soon as the plan admits it."""

    def on_task_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Called when a task has taken all its steps, or has stopped early."""

    def on_task_fail(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Called when a task has failed; `reason` says why, and the other tasks continue.

        A task that failed only because its adapter could not be written may still succeed, once the disk accepts it.
        """

    def on_task_remove(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Called when a task is removed, whether it had ended before or not."""

    def on_plan(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Called with the `plan` that the next steps follow, and the one `before` it (`None` before the first)."""


EVENTS = tuple(name for name in vars(MultiTaskTrainerCallback) if name.startswith("on_"))
"""Names of the events that transformers does not have."""


def hears(callback: object, event: str) -> bool:
    """Return whether a callback defines its own method for one of `EVENTS`."""
    method = getattr(callback, event, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(MultiTaskTrainerCallback, event)


def event_faults(callbacks: Iterable[object], where: str) -> list[Fault]:
    """Return a fault for each method whose name looks like one of `EVENTS` but is not: it would never be called.

    Args:
        callbacks: callbacks of a run.
        where: path of the argument that they were given as.
    """
    faults = []
    for callback in callbacks:
        kind = callback.__name__ if isinstance(callback, type) else type(callback).__name__
        for name in dir(callback):
            is_likely = name.startswith(("on_task", "on_plan", "on_replan")) and callable(getattr(callback, name))
            if is_likely and name not in EVENTS:
                got, allowed = "an event that is never called", f"one of {', '.join(EVENTS)}"
                faults.append(Fault(f"{where}.{kind}.{name}", got, allowed, closest(name, EVENTS)))
    return faults


class TaskStatus(StrEnum):
    """The status of a task."""

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


# ---------------------------------------------------------------------------------------------- metrics and intervals


def metric_key(name: str, prefix: str = "eval") -> str:
    """Return the key of a metric in the results of an evaluation, with Trainer's prefix.

    Args:
        name: the metric with or without that prefix; a user's function chose it, so it becomes one printable line.
        prefix: the prefix, which several held-out data sets extend by their name.
    """
    name = " ".join(printable(name).split())
    return name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"


def greater_is_better(metric: str) -> bool:
    """Return whether a greater metric is better: Trainer's guess by its name, and not for the perplexity."""
    return not metric.endswith(("loss", "perplexity"))


def steps_of(interval: float, num_steps: int) -> int:
    """Return an interval in steps, as Trainer reads it: below 1 it is a share of all steps, rounded up."""
    return max(1, math.ceil(interval * num_steps)) if 0 < interval < 1 else int(interval)


@checks_settings(lambda *_, **given: refuse_unknown(given, EarlyStopping.__dataclass_fields__, "early_stopping"))
@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class EarlyStopping:
    """Stop a task when its metric has not improved for a while, and go back to its best adapter.

    Attributes:
        metric: key of an evaluation metric, `eval_loss` or one that `compute_metrics` returns.
        patience: evaluations without improvement after which the task stops.
        min_delta: change that counts as an improvement.
        greater_is_better: direction; by default `False` for names that end with `loss` or `perplexity`, else `True`.

    Raises:
        ConfigError: if a field is of a wrong type or out of range.
    """

    metric: str = "eval_loss"
    patience: int = 3
    min_delta: float = 0.0
    greater_is_better: bool | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Check all fields."""
        rules = {
            "patience": Rule(lambda value: is_integer(value, 1), "an integer of at least 1"),
            "min_delta": Rule(lambda value: is_real(value) and value >= 0, "a number of at least 0"),
            "metric": Rule(is_text, "the name of a metric"),
            "greater_is_better": type_rule("bool | None"),
        }
        raise_faults(rule_faults({name: getattr(self, name) for name in rules}, rules, "early_stopping."))

    @property
    def maximise(self) -> bool:
        """Whether a greater metric is better."""
        return greater_is_better(self.metric) if self.greater_is_better is None else self.greater_is_better


# ----------------------------------------------------------------------------------------------------------------- task


def _check_settings(*args: Any, **settings: Any) -> None:
    if args:
        fix = "Write Task(name=..., peft_config=..., train_dataset=...)."
        raise_faults([Fault("task", f"{shown(args[0])} without a name", "created from settings by name", fix)])
    needed = ["name", "peft_config", "train_dataset"]
    if settings.get("init_adapter") is not None:  # it has a configuration
        needed.remove("peft_config")
    refuse_unknown(settings, Task.__dataclass_fields__, _where(settings.get("name")), needed)


# Compared by identity: two tasks with equal fields are two jobs, and datasets have no cheap comparison.
@checks_settings(_check_settings)
@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Task:
    """One fine-tuning job: its name, its adapter, its data and its hyper-parameters.

    A hyper-parameter that is `None` comes from the run's `MultiTaskTrainingArguments`; names and
    meanings are those of `transformers.TrainingArguments` and `trl.SFTConfig`.

    Attributes:
        name: letters, digits, `_` and `-`, at most 64; unique in the run, ignoring case.
        peft_config: adapter of the task; see `peft_mux.modeling.adapters` for what is supported. With `init_adapter` it
            may be left out.
        train_dataset: `datasets.Dataset`, `IterableDataset`, or a list of dicts; tokenised rows
            (`input_ids`, optional `labels`, `attention_mask`), `text`, `prompt`/`completion` or `messages`;
            `text` (optional `text_pair`) and `label` for sequence classification. Or a source that
            `peft_mux.load_rows` takes: a .jsonl, .json, .csv or .parquet file, a folder, or a hub id.
        eval_dataset: the same, held out; for the name of a dataset, its split "test" or "validation" is used. Or a dict
            of several by name, which are evaluated one after another: `eval_<name>_loss`, ..., as in Trainer.
        train_batch_size: sequences per optimizer step of this task (its *global* batch); by default
            the run's `per_device_train_batch_size * gradient_accumulation_steps`.
        max_steps: optimizer steps of the task; takes precedence over `num_train_epochs`.
        shuffle: whether each epoch has its own order; "group_by_length" puts rows of similar length into one batch.
        dataloader_drop_last: whether each epoch leaves out its last batch if it is smaller than the others.
        seed: fixes the adapter's initial weights, the order of the data and the dropout.
        max_length: tokens of a row above which `overlong_policy` of the run applies.
        truncation_mode: which part of longer rows is kept, "keep_start" or, for the objectives sft and dpo, "keep_end".
        packing: whether `train_batch_size` counts packed rows, as in TRL with its strategy "bfd": rows of up to
            `max_length` tokens that consist of whole sequences, which do not see one another.
        completion_only_loss: loss on the completion only; by default for `prompt`/`completion` rows.
        assistant_only_loss: loss on the assistant's turns only (`messages` rows).
        chat_template: Jinja template for `messages` rows; by default the tokenizer's.
        num_labels: classes of this task's head (sequence classification); by default the backbone's.
        compute_metrics: takes a `transformers.EvalPrediction`, returns a dict of numbers.
        preprocess_logits_for_metrics: shrinks `(logits, labels)` before they are gathered.
        eval_generate: at each evaluation, complete the prompts of the held-out rows (`prompt`/`completion` or
            `messages`) and compare the completions with those of the rows; `True` for `GenerateOptions()`, which
            logs `eval_exact_match`. Tasks that are evaluated at the same step generate together, in mixed batches.
        early_stopping: when to stop before `max_steps`.
        callbacks: `TrainerCallback`s that see this task's own state and may stop this task alone.
        objective: name of a loss of `peft_mux.modeling.objectives` (docs/losses.md), or a function that takes
            `TokenOutputs`; by default decided by the columns of the rows and the `task_type` of the adapter.
        loss_type: name of a variant of that loss, as in TRL; by default its first; `dpo` adds up a list of them.
        objective_args: arguments of that loss by name, such as `{"beta": 0.1}`; the others have TRL's defaults.
        priority: tasks of higher priority are admitted first, if not all fit into memory.
        row_format: format of rows of other projects: "alpaca" (the prompt of Stanford Alpaca), "alpaca_chat"
            (messages), "sharegpt"; or which of their columns stands for which of ours, such as
            `{"prompt": "question", "completion": "answer"}`, or of a format's:
            `{"format": "alpaca_chat", "instruction": "question"}`. It applies to `eval_dataset` as well.
        eval_steps: evaluate every this many steps of the task, regardless of the run's `eval_strategy`; 0 for never,
            below 1 for a share of its steps. The run's own does not apply to tasks without held-out rows.
        save_steps: write `<task>/checkpoint-<step>` every this many steps of the task; 0 for never, below 1 for a share
            of its steps.
        eval_delay: steps (epochs, if it is evaluated at their ends) before the first evaluation.
        eval_on_start: whether it is evaluated before its first step, too.
        load_best_model_at_end: end with the adapter of the best evaluation; held-out rows are then evaluated at least
            once an epoch. `early_stopping` does so by itself.
        metric_for_best_model: the metric that decides which evaluation is best, `loss` by default.
        greater_is_better: its direction; by default as in `early_stopping`.
        label_smoothing_factor: share of the loss that is spread over all words or classes, as in Trainer; for the
            loss of next tokens (objective "sft") and for classification. `eval_loss` is smoothed, too;
            `eval_perplexity` is not.
        neftune_noise_alpha: strength of the noise on the embeddings of its tokens in training (NEFTune), 0 for none:
            uniform draws of (-1, 1), times `alpha / sqrt(L * D)` with L tokens of the row and D hidden features.
        loraplus_lr_ratio: LoRA+: the learning rate of LoRA's B as a multiple of that of A, usually at least 1, as in
            PEFT's `create_loraplus_optimizer`; by default both have the same.
        router_aux_loss_coef: coefficient of the balancing loss of routers, for mixtures of experts (docs/losses.md), 0
            for none; by default the model's own wherever TRL adds this loss.
        init_adapter: a saved adapter whose weights the task begins with: a folder as PEFT writes it, or a hub id.
        reference: what losses with a reference (DPO, KTO, ...) compare with: "adapter", the frozen weights of
            `init_adapter` and the default with it, as TRL does with a `PeftModel`; or "backbone".
        hub_model_id: repository of this task's adapter if the run has `push_to_hub=True`; by default the run's
            `hub_model_id`, or the name of its folder, followed by the name of the task.
        data_timeout_s: seconds within which a stream must deliver the rows of a step once the others wait for them;
            otherwise its task fails, and the other tasks continue.

    Raises:
        ConfigError: naming every field that cannot be run.

    Example:
        >>> from peft import LoraConfig
        >>> task = Task(name="sst2", peft_config=LoraConfig(r=8), train_dataset=[{"text": "a fine film"}])
        >>> task.name
        'sst2'
    """

    name: str
    peft_config: PeftConfig = None  # type: ignore[assignment]
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
    shuffle: bool | str = True
    dataloader_drop_last: bool | None = None
    max_length: int | None = None
    truncation_mode: str = "keep_start"
    packing: bool = False
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
    loraplus_lr_ratio: float | None = None
    router_aux_loss_coef: float | None = None
    init_adapter: str | os.PathLike[str] | None = None
    reference: str | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Load rows that are given by their source, and check every field."""
        where, faults = _where(self.name), []
        for which in ("train_dataset", "eval_dataset"):
            rows, opening_faults = _opened(self, which, where)
            faults += [fault for fault in opening_faults if fault not in faults]
            object.__setattr__(self, which, rows)
        faults += _begin_from_adapter(self, where)
        loss = find_loss(self, where)
        raise_faults([*faults, *_field_faults(self, where), *loss.faults, *_combination_faults(self, where, loss)])

    @classmethod
    def from_sft_config(cls, name: str, config: TrainingArguments, **settings: Any) -> Task:
        """Return the task that a configuration of TRL, or a `TrainingArguments`, describes with rows and an adapter.

        The class of the configuration decides the objective: `ORPOConfig` trains ORPO. Arguments of its loss become
        `objective_args`, and the adapter has no dropout where TRL switches it off (`disable_dropout`). Settings of the
        run (`bf16`, `logging_steps`, `report_to`, ...) are for `MultiTaskTrainingArguments.from_training_arguments`.

        Args:
            name: name of the task.
            config: whose hyper-parameters the task has.
            **settings: `train_dataset`, `peft_config`, and settings that replace those of `config`.

        Raises:
            ConfigError: naming what cannot be done here, with the reason.
        """
        return cls(name=name, **settings_of(config, settings))

    @classmethod
    def from_trainer(cls, name: str, trainer: Any, **settings: Any) -> Task:
        """Return the task that a `Trainer` or a trainer of TRL was made for: rows, adapter, loss, metrics, callbacks.

        The class of the trainer decides the objective: an `ORPOTrainer` trains ORPO. The adapter begins from its
        configuration, with the task's seed; the trainer's weights are not used.

        Args:
            name: name of the task.
            trainer: a trainer with one adapter that has not trained.
            **settings: settings that replace those of the trainer.

        Raises:
            ConfigError: naming what cannot be done here, with the reason.
        """
        return cls(name=name, **settings_of_trainer(trainer, settings))

    @property
    def is_classification(self) -> bool:
        """Whether the task trains a sequence classifier."""
        return str(getattr(self.peft_config, "task_type", None) or "").endswith("SEQ_CLS")

    @property
    def generate_options(self) -> GenerateOptions | None:
        """What an evaluation generates; `None` for nothing."""
        given = self.eval_generate
        return given if isinstance(given, GenerateOptions) else GenerateOptions() if given is True else None

    @property
    def stops_by_callback(self) -> bool:
        """Whether a callback of transformers follows the best metric, to stop the task."""
        return any(isinstance(callback, EarlyStoppingCallback) for callback in self.callbacks)

    @property
    def has_own_metrics(self) -> bool:
        """Whether functions of the user take part in its evaluations."""
        generated = self.generate_options
        return self.compute_metrics is not None or (generated is not None and generated.metric_names is None)


TASK_FIELDS = tuple(item.name for item in fields(Task))
"""Names of the fields of a `Task`, for files and for messages."""
_PLAIN_FIELDS = (
    "packing assistant_only_loss completion_only_loss eval_on_start load_best_model_at_end greater_is_better "
    "dataloader_drop_last metric_for_best_model hub_model_id chat_template lr_scheduler_kwargs optim_args"
).split()


def _where(name: object) -> str:
    # An invalid name cannot say where the other faults are.
    return f"tasks.{name}" if name_fault(name) is None else "task"


def _opened(task: Task, which: str, where: str) -> tuple[Any, list[Fault]]:
    """Return the rows of a field, or of each of several data sets, as `opened_rows` does."""
    rows = getattr(task, which)
    if rows is None and which == "eval_dataset":
        return rows, []
    if which == "eval_dataset" and isinstance(rows, dict) and rows:
        names = [name for name in rows if not isinstance(name, str) or name.split() != [printable(name)]]
        if names:
            return rows, [Fault(f"{where}.{which}", shown(names[0]), "named by printable words without spaces")]
        opened, faults = {}, []
        for name, part in rows.items():
            opened[name], faults_of_part = opened_rows(task, part, f"{which}.{name}", where)
            faults += faults_of_part
        return opened, faults
    return opened_rows(task, rows, which, where)


def opened_rows(task: Task, rows: Any, which: str, where: str) -> tuple[Any, list[Fault]]:
    """Return rows of a task, loaded from their source and with our columns, and what is wrong with them."""
    if isinstance(rows, (str, os.PathLike)) and str(rows):
        try:
            rows = rows_named(str(rows), which, where)
        except ConfigError as error:
            return rows, list(error.faults)
    faults = dataset_faults(rows, f"{where}.{which}")
    if faults or task.row_format is None:
        return rows, faults
    faults = row_format_faults(task.row_format, rows, where, which)
    return (rows, faults) if faults else (mapped(rows, task.row_format), [])


_RESOLVED_BY_MODEL = frozenset(
    "base_model_name_or_path revision inference_mode peft_version auto_mapping task_type target_modules "
    "exclude_modules layers_to_transform layers_pattern modules_to_save".split()
)
"""Fields in which a saved configuration may differ from a given one that means the same; tensors are compared later."""


def _begin_from_adapter(task: Task, where: str) -> list[Fault]:
    """Put the folder of `init_adapter`, and its configuration if none is given, into a task; return what is wrong."""
    given = task.init_adapter
    if given is None:
        return []
    field, allowed = f"{where}.init_adapter", "the folder of a PEFT adapter, or its id on the Hub"
    if not isinstance(given, (str, os.PathLike)) or not str(given):
        return [Fault(field, shown(given), allowed)]
    try:
        folder = Path(given)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(str(given), allow_patterns=[*ADAPTER_NAMES, ENCODER_NAME]))
        saved = read_config(folder)
    except (OSError, ValueError, CheckpointError) as error:
        return [Fault(field, shown(str(given)), allowed, " ".join(str(error).split()))]
    object.__setattr__(task, "init_adapter", str(folder))
    if task.peft_config is None:
        object.__setattr__(task, "peft_config", saved)
        return []
    if not isinstance(task.peft_config, PeftConfig):
        return []  # which is a fault of its own
    fix = "Leave peft_config out to train the adapter as it was saved."
    if type(task.peft_config) is not type(saved):
        got, wanted = type(task.peft_config).__name__, f"a {type(saved).__name__}, the type of {given}"
        return [Fault(f"{where}.peft_config", got, wanted, fix)]
    # Sets have no order in files; what PEFT completes by the model is `None` before.
    asked, there = (json.loads(json.dumps(c.to_dict(), default=sorted)) for c in (task.peft_config, saved))
    return [
        Fault(f"{where}.peft_config.{name}", shown(value), f"{shown(there[name])}, as in {given}", fix)
        for name, value in asked.items()
        if name not in _RESOLVED_BY_MODEL and "init" not in name and "dropout" not in name
        if value is not None and value != there.get(name)
    ]


def _field_faults(task: Task, where: str) -> list[Fault]:
    """Return a fault for each field with an invalid value, independent of the other fields."""
    faults: list[Fault] = []

    def refuse(name: str, allowed: str, fix: str = "", *, got: str = "") -> None:
        faults.append(Fault(f"{where}.{name}", got or shown(getattr(task, name)), allowed, fix))

    if (fault := name_fault(task.name)) is not None:
        faults.append(fault)
    if not isinstance(task.peft_config, PeftConfig):
        refuse("peft_config", "a peft.PeftConfig such as LoraConfig(r=8)", got=type(task.peft_config).__name__)
    if task.loraplus_lr_ratio is not None and not isinstance(task.peft_config, LoraConfig):
        got = f"{shown(task.loraplus_lr_ratio)} with {type(task.peft_config).__name__}"
        refuse("loraplus_lr_ratio", "None except with LoraConfig, whose B has its own rate", got=got)
    rules = {name: rule for name, rule in NUMBER_RULES.items() if getattr(task, name) is not None or name == "priority"}
    rules |= {name: type_rule(Task.__dataclass_fields__[name].type) for name in _PLAIN_FIELDS}
    faults += rule_faults({name: getattr(task, name) for name in rules}, rules, f"{where}.")
    for name, options in (("optim", supported_optimizers()), ("lr_scheduler_type", supported_schedules())):
        if getattr(task, name) is not None:
            faults += choice_faults(f"{where}.{name}", getattr(task, name), options)
    if not isinstance(task.shuffle, bool) and not (isinstance(task.shuffle, str) and task.shuffle == "group_by_length"):
        refuse("shuffle", 'True, False or "group_by_length"')
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        if getattr(task, name) is not None and not callable(getattr(task, name)):
            refuse(name, "a function")
    callbacks = task.callbacks
    if not isinstance(callbacks, (list, tuple)) or not all(isinstance(item, TrainerCallback) for item in callbacks):
        refuse("callbacks", "a list of TrainerCallback objects")
        return faults
    for callback in callbacks:
        if heard := [event for event in EVENTS if hears(callback, event)]:
            got = f"{type(callback).__name__} with {', '.join(heard)}"
            fix = (
                "Give it to MultiTaskTrainer(callbacks=[...]); a Task's callbacks have on_train_begin and on_train_end."
            )
            refuse("callbacks", "callbacks with events of one task", fix, got=got)
    return faults


def _combination_faults(task: Task, where: str, loss: FoundLoss) -> list[Fault]:
    """Return faults of settings that do not go together, given the loss: evaluations, rows, and the reference."""
    faults: list[Fault] = []

    def refuse(name: str, allowed: str, fix: str = "", *, got: str = "") -> None:
        faults.append(Fault(f"{where}.{name}", got or shown(getattr(task, name)), allowed, fix))

    rule = task.early_stopping
    if rule is not None and not isinstance(rule, EarlyStopping):
        refuse("early_stopping", "EarlyStopping(metric=..., patience=...)")
        rule = None
    metrics = {"early_stopping.metric": rule and rule.metric, "metric_for_best_model": task.metric_for_best_model}
    metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, str)}
    if rule is not None and len(set(map(metric_key, metrics.values()))) > 1:
        refuse("metric_for_best_model", f"{rule.metric!r}, the metric of early_stopping, or None")
    if task.greater_is_better is not None and task.metric_for_best_model is None:
        refuse("greater_is_better", "None without metric_for_best_model")
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
            refuse("eval_dataset", f"held-out rows, because {name} is set")
        if name != "eval_on_start" and is_real(task.eval_steps) and task.eval_steps == 0:
            refuse("eval_steps", f"more than 0, because {name} is set", got="0")
    given = task.eval_generate
    if given is not None and given is not False:
        if given is not True and not isinstance(given, GenerateOptions):
            fix = "Write GenerateOptions(**options)." if isinstance(given, dict) else ""
            refuse("eval_generate", "True, False, or GenerateOptions(max_new_tokens=..., metrics=...)", fix)
        elif task.is_classification:
            refuse("eval_generate", "None for sequence classification, which does not generate text")
        elif task.eval_dataset is None:
            refuse("eval_generate", "None if eval_dataset is not set", "Give held-out rows with prompts.")
        elif isinstance(task.eval_dataset, dict):
            refuse("eval_generate", "None with several data sets", "Give one as eval_dataset.")
    known = () if loss.objective is None or loss.args is None else loss.objective.metric_names(loss.args)
    if task.eval_dataset is not None and known and not task.has_own_metrics:
        # What `compute_metrics` returns is only known when it is called, so only its absence is judged.
        known = (*known, *((task.generate_options and task.generate_options.metric_names) or ()))
        if isinstance(task.eval_dataset, dict):
            known = tuple(f"eval_{name}{key.removeprefix('eval')}" for name in task.eval_dataset for key in known)
        fix = "Set compute_metrics so that it returns this metric."
        for name, metric in metrics.items():
            if metric_key(metric) not in known:
                refuse(name, f"{' or '.join(known)} if compute_metrics is not set", fix, got=shown(metric))
    if callable(task.compute_metrics):
        if loss.objective is not None and not loss.objective.has_logits:
            allowed = "None with this objective, whose rows have no labels to compare logits with"
            fix = f"Its evaluations report {', '.join(known)}." if known else ""
            refuse("compute_metrics", allowed, fix, got="a function")
        if task.eval_dataset is None:
            refuse("compute_metrics", "None if eval_dataset is not set", got="a function")
    is_stream = task.train_dataset is not None and not hasattr(task.train_dataset, "__len__")
    mode, name = task.truncation_mode, loss.objective.name if loss.objective is not None else "sft"
    if task.packing is True and (is_stream or name != "sft"):
        fix = "Rows of a step are computed without padding anyway; read a stream into a list to pack it."
        refuse("packing", 'False for a stream and for objectives other than "sft"', fix)
    can_keep_end = name in ("sft", "dpo") and task.packing is not True
    if not isinstance(mode, str) or mode not in (("keep_start", "keep_end") if can_keep_end else ("keep_start",)):
        refuse("truncation_mode", '"keep_start", or "keep_end" for the objectives sft and dpo without packing')
    if is_stream and isinstance(task.shuffle, str):
        refuse("shuffle", "True or False for a stream, which is read in order")
    if is_stream and not task.max_steps:
        refuse("max_steps", "a number of steps, because a stream has no length")
    reference = task.reference
    if reference is not None and (not isinstance(reference, str) or reference not in ("adapter", "backbone")):
        refuse("reference", "'adapter' or 'backbone'")
    elif reference == "adapter" and task.init_adapter is None:
        refuse("reference", "'backbone' without init_adapter", "Set init_adapter to a saved adapter.")
    elif reference is not None and loss.args is not None and not loss.args.needs_reference:
        refuse("reference", "None with a loss that has no reference")
    return faults


# ----------------------------------------------------------------------------------------- what a task trains with


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperParameters:
    """A task's settings, completed from the run's arguments.

    Names and meanings are those of `Task` and `transformers.TrainingArguments`. Steps are optimizer steps of this task.
    Here `eval_steps` is 0 for never, -1 for the end of each epoch, and below 1 a share of all steps of the task.
    """

    train_batch_size: int
    learning_rate: float
    num_train_epochs: float
    max_steps: int
    weight_decay: float
    lr_scheduler_type: str
    lr_scheduler_kwargs: dict[str, Any] | None
    warmup_steps: float
    max_grad_norm: float
    optim: str
    optim_args: str | None
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    seed: int
    max_length: int
    eval_steps: float
    save_steps: float
    data_timeout_s: float
    eval_delay: float = 0
    eval_on_start: bool = False
    dataloader_drop_last: bool = False
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float = 0.0
    loraplus_lr_ratio: float | None = None
    router_aux_loss_coef: float | None = None


def resolve(task: Task, args: MultiTaskTrainingArguments) -> HyperParameters:
    """Return the settings that a task trains with: its own, or else those of the run.

    A task that sets `num_train_epochs` but not `max_steps` is not limited by the run's `max_steps`.
    """

    def pick(name: str) -> Any:
        of_task = getattr(task, name)
        value = getattr(args, name) if of_task is None else of_task
        return getattr(value, "value", value)

    # `max_steps` takes precedence over epochs, so the run's own would override the epochs of this task.
    max_steps = pick("max_steps")
    if task.max_steps is None and task.num_train_epochs is not None:
        max_steps = -1
    load_best = bool(pick("load_best_model_at_end")) and task.eval_dataset is not None
    metric = pick("metric_for_best_model") if task.eval_dataset is not None else None
    # Trainer's default; a callback that stops early needs a metric, too.
    if metric is None and (load_best or task.stops_by_callback or pick("lr_scheduler_type") == PLATEAU):
        metric = "loss"
    # The run's direction is that of the run's metric.
    greater = task.greater_is_better if task.metric_for_best_model else pick("greater_is_better")
    # The best adapter is chosen by a metric, so held-out rows are evaluated at least once an epoch for it.
    eval_steps: float = 0
    strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
    follows = args.save_strategy == "best" or pick("lr_scheduler_type") == PLATEAU
    needs_best = task.early_stopping is not None or task.stops_by_callback or load_best or follows
    if task.eval_dataset is None:
        eval_steps = 0
    elif task.eval_steps is not None:
        eval_steps = task.eval_steps
    elif strategy == "steps":
        eval_steps = args.eval_steps or args.logging_steps
    elif strategy == "epoch" or needs_best:
        eval_steps = -1
    batch_size = task.train_batch_size or args.per_device_train_batch_size * args.gradient_accumulation_steps
    settings: dict[str, Any] = {
        "train_batch_size": batch_size,
        "max_steps": max_steps,
        "eval_steps": eval_steps,
        "save_steps": task.save_steps or 0,
        "load_best_model_at_end": load_best,
        "metric_for_best_model": metric,
        "greater_is_better": greater,
        "neftune_noise_alpha": pick("neftune_noise_alpha") or 0.0,
        "loraplus_lr_ratio": task.loraplus_lr_ratio,
        "router_aux_loss_coef": task.router_aux_loss_coef,
    }
    others = {item.name: pick(item.name) for item in fields(HyperParameters) if item.name not in settings}
    return HyperParameters(**settings, **others)


def task_arguments(hyper: HyperParameters, args: MultiTaskTrainingArguments) -> MultiTaskTrainingArguments:
    """Return a copy of the run's arguments with one task's settings, for code that reads `TrainingArguments`."""
    # A copy, as new arguments would be checked and completed a second time.
    copied = copy.copy(args)
    for item in fields(HyperParameters):
        if item.name != "train_batch_size":  # a property of TrainingArguments that cannot be set
            setattr(copied, item.name, getattr(hyper, item.name))
    strategies = {-1.0: IntervalStrategy.EPOCH, 0.0: IntervalStrategy.NO}
    copied.eval_strategy = strategies.get(float(hyper.eval_steps), IntervalStrategy.STEPS)
    if hyper.metric_for_best_model is not None and hyper.greater_is_better is None:
        copied.greater_is_better = greater_is_better(hyper.metric_for_best_model)
    # A callback may write into the copy; the run and the other tasks must not see that.
    vars(copied).update(
        {key: copy.deepcopy(value) for key, value in vars(copied).items() if isinstance(value, (dict, list))}
    )
    return copied
