"""Which loss a task is trained towards, as its fields and the columns of its rows tell; and what is wrong with them."""

# MERGED: `TaskObjectives`: which loss each task of a model is trained towards, and the losses of a pass.
# MERGED: Shape letters: T tokens, M targets, N tasks, D hidden features.

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from peft import PromptLearningConfig

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.modeling.backbone.modules import HeadKind, head_kind_for
from peft_mux.modeling.objectives.objective import (
    OBJECTIVES,
    OWN,
    SEVERAL,
    HeadPass,
    LossArgs,
    Objective,
    OutputHead,
    Statistics,
    TaskLoss,
    TaskOutputs,
    default_args,
    head_of,
    objective_for,
    objectives_of,
    read_args,
)
from peft_mux.user_code import OwnCodeError


class TrainedTask(Protocol):
    """What a task says of the loss that it is trained towards."""

    @property
    def name(self) -> str:
        """Name of the task."""
        ...

    @property
    def objective(self) -> Any:
        """Name of the loss, or a function of the task's own; `None` for what its rows and its adapter tell."""
        ...

    @property
    def loss_type(self) -> Any:
        """Name of the variant; `None` for the first of the loss."""
        ...

    @property
    def objective_args(self) -> Any:
        """Arguments of the loss by name."""
        ...

    @property
    def label_smoothing_factor(self) -> Any:
        """Share of the loss that all words have alike; `None` for that of the run."""
        ...

    @property
    def peft_config(self) -> Any:
        """Configuration of the adapter, whose `task_type` tells the kind of head."""
        ...

    @property
    def train_dataset(self) -> Any:
        """The rows, whose columns tell the loss where `objective` does not."""
        ...


def objective_faults(task: TrainedTask, where: str) -> list[Fault]:
    """Return what is wrong with a task's `objective`, `loss_type` and `objective_args`, all at once."""
    objective, faults = _find(task, where)
    if objective is None:
        return faults
    loss_type, type_faults = _loss_type(objective, task, where)
    args, more = read_args(
        objective.Args, _given(task), loss_type or objective.loss_types[0], f"{where}.objective_args"
    )
    found = [*faults, *type_faults, *more, *_label_faults(objective, task, where)]
    found += smoothing_faults(objective, task.label_smoothing_factor, f"{where}.label_smoothing_factor")
    return found if args is None else found + _reference_faults(objective, args, task, where)


def _reference_faults(objective: Objective, args: LossArgs, task: TrainedTask, where: str) -> list[Fault]:
    """Return a fault where a loss wants the backbone without a prompt: its rows have virtual tokens in them."""
    wanted = objective.reference_columns
    is_brought = bool(wanted) and columns_of(task.train_dataset).issuperset(wanted)
    if not isinstance(task.peft_config, PromptLearningConfig) or not objective.needs_reference(args) or is_brought:
        return []
    bring = f"Bring {' and '.join(wanted)} with the rows, or train" if wanted else "Train"
    got = f"{objective.name} with {type(task.peft_config).__name__}"
    allowed = "losses without a reference for adapters of prompts"
    return [Fault(f"{where}.objective", got, allowed, f"{bring} an adapter on layers such as LORA.")]


def _label_faults(objective: Objective, task: TrainedTask, where: str) -> list[Fault]:
    needed, given = objective.row_form.num_labels, getattr(task, "num_labels", None)
    if needed is None or given in (None, needed):
        return []
    return [Fault(f"{where}.num_labels", shown(given), f"{needed} or None with the objective {objective.name}")]


def objective_of(task: TrainedTask) -> Objective:
    """Return the loss that a task is trained towards.

    Raises:
        ConfigError: if there is none of that name for the task's kind of head.
    """
    objective, faults = _find(task, f"tasks.{task.name}")
    raise_faults(faults)
    assert objective is not None, "no loss is a fault"
    return objective


def args_of(task: TrainedTask, smoothing: float | None = None) -> LossArgs:
    """Return the arguments of the loss that a task is trained towards.

    Args:
        task: the task.
        smoothing: its `label_smoothing_factor`, that of the run included; by default what the task itself says.

    Raises:
        ConfigError: naming every argument that cannot be used.
    """
    objective, where = objective_of(task), f"tasks.{task.name}"
    loss_type, faults = _loss_type(objective, task, where)
    raise_faults(faults)
    args, faults = read_args(objective.Args, _given(task), loss_type or "", f"{where}.objective_args")
    raise_faults(faults)
    assert args is not None, "no arguments are a fault"
    share = task.label_smoothing_factor if smoothing is None else smoothing
    # What is no number is told where numbers are looked at.
    return replace(args, label_smoothing_factor=share) if isinstance(share, (int, float)) and share else args


def smoothing_faults(objective: Objective, share: float | None, where: str, fix: str = "") -> list[Fault]:
    """Return a fault where a task's labels shall be smoothed but its loss has none to smooth.

    Args:
        objective: the loss of the task.
        share: its `label_smoothing_factor`, or that of the run.
        where: path of the field, for messages.
        fix: what to do instead, beside the smoothing that the loss may have of its own.
    """
    if objective.takes_smoothing or not isinstance(share, (int, float)) or not share:
        return []
    able = ", ".join(entry.name for entry in OBJECTIVES.values() if entry.takes_smoothing)
    own = "Its own label_smoothing is one of objective_args." if hasattr(objective.Args, "label_smoothing") else ""
    got = f"{shown(share)} with the objective {objective.name}"
    return [Fault(where, got, f"0 or None; more for {able}, whose targets are words", f"{fix} {own}".strip())]


def given_references(task: TrainedTask) -> tuple[str, ...]:
    """Return the columns that every row of a task has to bring: a learnt prompt has no pass without it."""
    objective, is_prompt = objective_of(task), isinstance(task.peft_config, PromptLearningConfig)
    return objective.reference_columns if is_prompt and objective.needs_reference(args_of(task)) else ()


def columns_of(dataset: Any) -> set[str]:
    """Return the columns of a dataset as far as they are known without reading it; none of a stream without names."""
    try:
        names = getattr(dataset, "column_names", None)
    except Exception:  # the dataset's own code, whose faults are told where rows are read
        return set()
    if isinstance(names, (list, tuple)):
        return {str(name) for name in names}
    if isinstance(dataset, (list, tuple)) and dataset and isinstance(dataset[0], Mapping):
        return {str(name) for name in dataset[0]}
    return set()


def _find(task: TrainedTask, where: str) -> tuple[Objective | None, list[Fault]]:
    """Return the loss of a task, or why there is none.

    This is the only place that tells a classifier from a language model by what a task says.
    """
    kind = head_kind_for(getattr(task.peft_config, "task_type", None))
    wanted: Any = getattr(task.objective, "value", task.objective)
    if wanted is None:
        return _default(kind, columns_of(task.train_dataset)), []
    if callable(wanted):
        entry = OBJECTIVES.get(OWN)
        if entry is not None and entry.head.kind == kind:
            return entry, []
        fix = 'Leave the task_type of the adapter open, or "CAUSAL_LM".'
        return None, [Fault(f"{where}.objective", f"a function for {kind.name} tasks", _listed(kind), fix)]
    names = [entry.name for entry in objectives_of(kind)]
    if not isinstance(wanted, str) or wanted not in names:
        got = f"{shown(wanted)} for {kind.name} tasks"
        hint = closest(wanted, names) if isinstance(wanted, str) else ""
        return None, [Fault(f"{where}.objective", got, _listed(kind), hint)]
    return OBJECTIVES[wanted], []


def _listed(kind: HeadKind) -> str:
    return ", ".join(entry.name for entry in objectives_of(kind))


def _default(kind: HeadKind, columns: Iterable[str]) -> Objective:
    """Return the loss that rows with these columns are for; the most special of several."""
    present = set(columns)
    fitting = [entry for entry in objectives_of(kind) if entry.row_form.marks and set(entry.row_form.marks) <= present]
    return max(fitting, key=lambda entry: len(entry.row_form.marks), default=objective_for(kind))


def _loss_type(objective: Objective, task: TrainedTask, where: str) -> tuple[str | None, list[Fault]]:
    """Return the variant that a task names, several of them joined by `SEVERAL`; or why there is none."""
    given: Any = getattr(task.loss_type, "value", task.loss_type)
    if given is None:
        return objective.loss_types[0], []
    is_list = isinstance(given, (list, tuple)) and bool(given) and objective.takes_several
    names: list[Any] = list(given) if is_list else [given]
    faults = [
        _loss_type_fault(objective, name, where)
        for name in names
        # Whatever stands there, also what compares element by element.
        if not isinstance(name, str) or name not in objective.loss_types
    ]
    if not faults and len(set(names)) < len(names):
        faults = [Fault(f"{where}.loss_type", shown(given), "each loss once", "Weigh it with loss_weights.")]
    return (None, faults) if faults else (SEVERAL.join(map(str, names)), [])


def _loss_type_fault(objective: Objective, given: Any, where: str) -> Fault:
    allowed = f"{', '.join(objective.loss_types)} (objective {objective.name})"
    # Most often the name of a loss that stands in the other field.
    fix = ""
    if isinstance(given, str) and given in objective.refused_loss_types:
        fix = f"{given} is not supported: {objective.refused_loss_types[given]}."
    elif isinstance(given, str):
        fix = f'Set objective="{given}".' if given in OBJECTIVES else closest(given, list(objective.loss_types))
    return Fault(f"{where}.loss_type", shown(given), allowed, fix)


def _given(task: TrainedTask) -> object:
    """Return the arguments that a task gives; a function of its own is one of them."""
    if not callable(task.objective) or not isinstance(task.objective_args, (Mapping, type(None))):
        return task.objective_args
    return {**(task.objective_args or {}), "function": task.objective}


class StreamLosses(NamedTuple):
    """The losses of a micro-batch.

    Attributes:
        losses_N: `[N]`, each task's part of the mean over its global batch.
        statistics: for each task its statistics `[K]`; `None` for tasks whose loss has none.
    """

    losses_N: torch.Tensor
    statistics: Statistics


class _Assigned(NamedTuple):
    # A name, not an objective: it stays the same where a model is copied or sent to another process.
    objective: str
    args: LossArgs


class TaskObjectives:
    """The losses of the tasks on one backbone, all of which read its one head.

    Args:
        backbone: transformers model that all tasks share.

    Attributes:
        head: what the backbone ends in.
        failures: by task, why its own loss function has failed since this was last asked for with `take_failures`.
        own_seconds: by task, for how long loss functions of tasks' own ran since this was last emptied.
    """

    def __init__(self, backbone: Any) -> None:
        """Begin with the first loss of the backbone's head for every task."""
        self.head: OutputHead = head_of(backbone)
        default = objective_for(self.head.kind)
        self._default = _Assigned(default.name, default_args(default))
        self._by_task: dict[str, _Assigned] = {}
        self.failures: dict[str, str] = {}
        self.own_seconds: Counter[str] = Counter()
        self._are_rows_made_up = False

    @contextmanager
    def of_made_up_rows(self) -> Iterator[None]:
        """Let every task have the default loss in the `with` block: rows that are made up are tokens alone."""
        before, self._are_rows_made_up = self._are_rows_made_up, True
        try:
            yield
        finally:
            self._are_rows_made_up = before

    def assign(self, task: str, objective: Objective, args: LossArgs | None = None) -> None:
        """Train a task towards another loss than the first of the head.

        Args:
            task: name of the task.
            objective: the loss.
            args: its arguments; by default what stands where nothing is set.

        Raises:
            ConfigError: if it is a loss of another head.
        """
        if objective.head.kind != self.head.kind:
            raise ConfigError(
                f"tasks.{task}.objective: got {objective.name!r}, a loss of {objective.head.kind.name} tasks; allowed: "
                f"those of {self.head.kind.name} tasks."
            )
        self._by_task[task] = _Assigned(objective.name, default_args(objective) if args is None else args)

    def forget(self, task: str) -> None:
        """Drop what was assigned to a task; another task of this name begins with the first loss of the head."""
        self._by_task.pop(task, None)
        self.failures.pop(task, None)
        self.own_seconds.pop(task, None)

    def adopt(self, task: str, others: TaskObjectives) -> None:
        """Train a task towards the loss that it has in another model."""
        self._by_task[task] = others._assigned(task)

    def of(self, task: str) -> Objective:
        """Return the loss of a task."""
        return OBJECTIVES[self._assigned(task).objective]

    def args_of(self, task: str) -> LossArgs:
        """Return the arguments of a task's loss."""
        return self._assigned(task).args

    def statistic_names(self, task: str) -> tuple[str, ...]:
        """Return the names of the statistics of a task's loss."""
        return self.of(task).statistic_names(self.args_of(task))

    def smoothed(self, tasks: Iterable[str]) -> frozenset[str]:
        """Return those of some tasks that smooth their labels."""
        return frozenset(task for task in tasks if self.args_of(task).label_smoothing_factor)

    def of_all(self, tasks: Sequence[str]) -> list[Objective]:
        """Return the different losses of some tasks, in the order in which they come first."""
        return [OBJECTIVES[name] for name in dict.fromkeys(self._assigned(task).objective for task in tasks)]

    def losses(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> StreamLosses:
        """Return the losses of a micro-batch: each task's part of the mean over its global batch.

        Args:
            hidden_TD: the last hidden states `[T, D]`.
            batch: micro-batch that the hidden states are of.
            head: what the output head is computed with.
        """
        head = replace(head, smoothed=self.smoothed(batch.task_names))
        found = [self._loss(outputs) for outputs in self.head.outputs(hidden_TD, batch, head)]
        return StreamLosses(torch.stack([one.loss for one in found]), tuple(one.statistics for one in found))

    def take_failures(self) -> dict[str, str]:
        """Return why losses of tasks' own have failed, by task, and forget it."""
        failures, self.failures = self.failures, {}
        return failures

    def _loss(self, outputs: TaskOutputs) -> TaskLoss:
        """Return the loss of one task; NaN, which fails the task, where its own function has failed."""
        objective, args = self.of(outputs.task), self.args_of(outputs.task)
        if objective.name != OWN:
            return objective.loss(outputs, args)
        began = time.perf_counter()
        try:
            return objective.loss(outputs, args)
        except OwnCodeError as error:
            self.failures[outputs.task] = f"objective: {error}"
            # With a graph, as a pass of this task alone would have nothing to differentiate.
            return TaskLoss(outputs.anchor * float("nan"))
        finally:
            self.own_seconds[outputs.task] += time.perf_counter() - began  # type: ignore[assignment]

    def _assigned(self, task: str) -> _Assigned:
        return self._default if self._are_rows_made_up else self._by_task.get(task, self._default)
