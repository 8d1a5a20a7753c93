"""The loss of each task, and the losses of a packed pass over several tasks.

`find_loss` reads the loss of a task from its fields and from the columns of its rows. `TaskObjectives` holds the losses
of all tasks on one backbone and computes them for a micro-batch.

Shape letters: T tokens, N tasks, K statistics, D hidden features.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from peft import PromptLearningConfig

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import ConfigError, Fault, closest, shown
from peft_mux.modeling.backbone.modules import HeadKind, head_kind_for, head_kind_of
from peft_mux.modeling.objectives.objective import (
    HEADS,
    OBJECTIVES,
    OWN,
    SEVERAL,
    LossArgs,
    Objective,
    OutputHead,
    Statistics,
    TaskLoss,
    default_args,
    objectives_of,
    read_args,
)
from peft_mux.user_code import UserCodeError


class FoundLoss(NamedTuple):
    """The loss that a task names.

    Attributes:
        objective: the loss; `None` if there is none of that name.
        args: its arguments; `None` if they, or the loss type, cannot be used.
        faults: everything that is wrong with the fields that name the loss.
    """

    objective: Objective | None
    args: LossArgs | None
    faults: list[Fault]


def find_loss(task: Any, where: str) -> FoundLoss:
    """Return the loss that a `Task` names with its fields, the `task_type` of its adapter and the columns of its rows.

    Args:
        task: the task.
        where: path of the task in messages, such as `tasks.sql`.
    """
    objective, faults = _find_objective(task, where)
    if objective is None:
        return FoundLoss(None, None, faults)
    loss_type, faults = _find_loss_type(objective, task, where)
    given = task.objective_args
    if callable(task.objective) and isinstance(given, (Mapping, type(None))):
        given = {**(given or {}), "function": task.objective}  # a task's own function is one of the arguments
    # With any loss type at first, so that the faults of the arguments are reported together with that of the type.
    args, more = read_args(objective.Args, given, loss_type or objective.loss_types[0], f"{where}.objective_args")
    faults += more
    num_labels = objective.row_form.num_labels
    if num_labels is not None and task.num_labels not in (None, num_labels):
        allowed = f"{num_labels} or None with the objective {objective.name}"
        faults.append(Fault(f"{where}.num_labels", shown(task.num_labels), allowed))
    at = f"{where}.label_smoothing_factor"
    faults += smoothing_faults(objective, loss_type or objective.loss_types[0], task.label_smoothing_factor, at)
    if args is None:
        return FoundLoss(objective, None, faults)
    share = task.label_smoothing_factor
    if isinstance(share, (int, float)) and share:  # other types are refused where numbers are checked
        args = replace(args, label_smoothing_factor=share)
    wanted = objective.reference_columns
    is_brought = bool(wanted) and columns_of(task.train_dataset).issuperset(wanted)
    if isinstance(task.peft_config, PromptLearningConfig) and args.needs_reference and not is_brought:
        # The reference is the backbone without the prompt, but its rows have virtual tokens in them.
        bring = f"Bring {' and '.join(wanted)} with the rows, or train" if wanted else "Train"
        got = objective.name
        allowed = f"a loss without a reference with {type(task.peft_config).__name__}"
        faults.append(Fault(f"{where}.objective", got, allowed, f"{bring} an adapter on layers such as LORA."))
    return FoundLoss(objective, args if loss_type else None, faults)


def smoothing_faults(
    objective: Objective, loss_type: str, share: float | None, where: str, fix: str = ""
) -> list[Fault]:
    """Return a fault if a task smooths its labels but its loss has none to smooth.

    Args:
        objective: the loss of the task.
        loss_type: the variant of it.
        share: its `label_smoothing_factor`, or that of the run.
        where: path of the field, for messages.
        fix: what to do instead.
    """
    if loss_type in objective.smoothed_loss_types or not isinstance(share, (int, float)) or not share:
        return []
    able = ", ".join(entry.name for entry in OBJECTIVES.values() if entry.smoothed_loss_types)
    if hasattr(objective.Args, "label_smoothing"):
        fix = f"{fix} Its own label_smoothing is one of objective_args.".strip()
    variant = f" and loss_type {loss_type}" if objective.smoothed_loss_types else ""
    got = f"{shown(share)} with the objective {objective.name}{variant}"
    allowed = f"0 or None, except for {able}, which have single classes or words as targets"
    return [Fault(where, got, allowed, fix)]


def columns_of(dataset: Any) -> set[str]:
    """Return the columns of a dataset as far as they are known without reading it; none for a stream without names."""
    try:
        names = getattr(dataset, "column_names", None)
    except Exception:  # the dataset's own code, whose faults are reported when its rows are read
        return set()
    if isinstance(names, (list, tuple)):
        return {str(name) for name in names}
    if isinstance(dataset, (list, tuple)) and dataset and isinstance(dataset[0], Mapping):
        return {str(name) for name in dataset[0]}
    return set()


def _find_objective(task: Any, where: str) -> tuple[Objective | None, list[Fault]]:
    """Return the loss of a task, or why there is none."""
    kind = head_kind_for(getattr(task.peft_config, "task_type", None))
    entries = objectives_of(kind)
    wanted = getattr(task.objective, "value", task.objective)
    if wanted is None:
        # The loss that rows with these columns are for; the most special of several.
        present = columns_of(task.train_dataset)
        fitting = [entry for entry in entries if entry.row_form.marks and set(entry.row_form.marks) <= present]
        return max(fitting, key=lambda entry: len(entry.row_form.marks), default=entries[0]), []
    names = [entry.name for entry in entries]
    if callable(wanted):
        entry = OBJECTIVES.get(OWN)
        if entry is not None and entry.head.kind == kind:
            return entry, []
        got, fix = f"a function for {kind.name} tasks", 'Set the task_type of the adapter to None or "CAUSAL_LM".'
    elif isinstance(wanted, str) and wanted in names:
        return OBJECTIVES[wanted], []
    else:
        got = f"{shown(wanted)} for {kind.name} tasks"
        fix = _nearest_loss(wanted, entries) if isinstance(wanted, str) else ""
    return None, [Fault(f"{where}.objective", got, f"one of {', '.join(names)}", fix)]


def _nearest_loss(wanted: str, entries: Iterable[Objective]) -> str:
    """Return advice for a name that no loss has: a name of TRL, the name of a variant, or a typo."""
    entries, name = list(entries), wanted.lower().replace("-", "_")
    for entry in OBJECTIVES.values():
        if name in entry.other_names:
            return entry.other_names[name]
    owners = [entry.name for entry in entries if name in entry.loss_types]
    if owners:
        return f'Set objective="{owners[0]}", loss_type="{name}".'
    return closest(wanted, [entry.name for entry in entries])


def _find_loss_type(objective: Objective, task: Any, where: str) -> tuple[str | None, list[Fault]]:
    """Return the variant that a task names, several of them joined by `SEVERAL`; or why there is none."""
    given: Any = getattr(task.loss_type, "value", task.loss_type)
    if given is None:
        return objective.loss_types[0], []
    is_list = isinstance(given, (list, tuple)) and bool(given) and objective.takes_several
    names: list[Any] = list(given) if is_list else [given]
    faults = []
    for name in names:
        if isinstance(name, str) and name in objective.loss_types:
            continue
        fix = ""
        if isinstance(name, str) and name in objective.refused_loss_types:
            fix = f"{name} is not supported: {objective.refused_loss_types[name]}."
        elif isinstance(name, str):  # most often the name of a loss that belongs in the other field
            fix = f'Set objective="{name}".' if name in OBJECTIVES else closest(name, list(objective.loss_types))
        allowed = f"one of {', '.join(objective.loss_types)} (objective {objective.name})"
        faults.append(Fault(f"{where}.loss_type", shown(name), allowed, fix))
    if not faults and len(set(names)) < len(names):
        faults = [
            Fault(f"{where}.loss_type", shown(given), "a list with each loss once", "Weigh it with loss_weights.")
        ]
    return (None, faults) if faults else (SEVERAL.join(names), [])


@dataclass(frozen=True, slots=True)
class MuxOutput:
    """The losses of a micro-batch, which a multiplexed forward pass returns.

    Attributes:
        losses: `[N]`, each task's part of its mean loss; their sum may be differentiated.
        task_names: the N tasks, in the order of `losses`.
        statistics: for each of them what is logged with its loss, `[K]` without gradient; `None` where nothing is.
    """

    losses: torch.Tensor
    task_names: tuple[str, ...]
    statistics: Statistics = ()


class _Assigned(NamedTuple):
    # A name, not an objective: it stays the same when a model is copied or sent to another process.
    objective: str
    args: LossArgs


def _first_of(kind: HeadKind) -> _Assigned:
    objective = objectives_of(kind)[0]
    return _Assigned(objective.name, default_args(objective))


class TaskObjectives:
    """The losses of the tasks on one backbone; a task reads the backbone's head or, on a language model, its own.

    Args:
        backbone: transformers model that all tasks share.

    Attributes:
        head: the output head of the backbone.
        failures: by task, why its own loss function has failed since the last call of `take_failures`.
        own_seconds: by task, how long its own loss function ran; the reader empties it.
        are_rows_made_up: whether every task has the default loss, as made-up rows are tokens alone.
    """

    def __init__(self, backbone: Any) -> None:
        self.head: OutputHead = HEADS[head_kind_of(backbone).name]
        self._default = _first_of(self.head.kind)
        self._by_task: dict[str, _Assigned] = {}
        self.failures: dict[str, str] = {}
        self.own_seconds: Counter[str] = Counter()
        self.are_rows_made_up = False

    def add(self, task: str, kind: HeadKind) -> None:
        """Add a task that reads a head of this kind, with the first loss of it."""
        self._by_task[task] = _first_of(kind)

    def assign(self, task: str, objective: Objective, args: LossArgs | None = None) -> None:
        """Train a task towards a loss.

        Args:
            task: name of the task.
            objective: the loss.
            args: its arguments; its defaults if `None`.

        Raises:
            ConfigError: if it is a loss of another head.
        """
        kind = self.of(task).head.kind
        if objective.head.kind != kind:
            raise ConfigError(
                f"tasks.{task}.objective must be a loss of {kind.name} tasks, got {objective.name!r}, a "
                f"loss of {objective.head.kind.name} tasks."
            )
        self._by_task[task] = _Assigned(objective.name, default_args(objective) if args is None else args)

    def forget(self, task: str) -> None:
        """Drop everything about a task; another task of this name begins with the first loss of the head."""
        self._by_task.pop(task, None)
        self.failures.pop(task, None)
        self.own_seconds.pop(task, None)

    def _assigned(self, task: str) -> _Assigned:
        return self._default if self.are_rows_made_up else self._by_task.get(task, self._default)

    def of(self, task: str) -> Objective:
        """Return the loss of a task."""
        return OBJECTIVES[self._assigned(task).objective]

    def args_of(self, task: str) -> LossArgs:
        """Return the arguments of a task's loss."""
        return self._assigned(task).args

    def statistic_names(self, task: str) -> tuple[str, ...]:
        """Return the names of the statistics of a task's loss."""
        return self.of(task).statistic_names(self.args_of(task))

    def losses(self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any) -> MuxOutput:
        """Return the losses of a micro-batch: each task's part of the mean over its global batch.

        Args:
            hidden_TD: the last hidden states `[T, D]`.
            batch: micro-batch that the hidden states are of.
            model: the `MultiTaskPeftModel` whose stream reads the micro-batch.
        """
        heads, smoothed, task_losses = self._heads(batch), defaultdict(set), []
        for name, head in zip(batch.task_names, heads, strict=True):
            if self.args_of(name).label_smoothing_factor:
                smoothed[head].add(name)
        # Each head is given the whole stream; what it makes of the rows of tasks of another head is not read.
        by_head = {head: head.outputs(hidden_TD, batch, model, smoothed[head]) for head in dict.fromkeys(heads)}
        for index, head in enumerate(heads):
            outputs = by_head[head][index]
            objective, args = self.of(outputs.task), self.args_of(outputs.task)
            if objective.name != OWN:
                task_losses.append(objective.loss(outputs, args))
                continue
            began = time.perf_counter()
            try:
                task_losses.append(objective.loss(outputs, args))
            except UserCodeError as error:
                self.failures[outputs.task] = f"objective: {error}"
                # NaN fails the task. With a graph: a pass of this task alone would have nothing to differentiate.
                task_losses.append(TaskLoss(outputs.nll_M.sum() * float("nan")))
            self.own_seconds[outputs.task] += time.perf_counter() - began  # type: ignore[assignment]
        losses = torch.stack([task_loss.loss for task_loss in task_losses])
        return MuxOutput(losses, batch.task_names, tuple(task_loss.statistics for task_loss in task_losses))

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any) -> list[torch.Tensor]:
        """Return the logits of every sequence, `[L, V]` of words or `[C]` of classes; see `OutputHead.logits`."""
        heads = self._heads(batch)
        by_head = {head: head.logits(hidden_TD, batch, model) for head in dict.fromkeys(heads)}
        bounds = zip(heads, pairwise(batch.sequence_offsets), strict=True)
        return [logits for head, (first, last) in bounds for logits in by_head[head][first:last]]

    def _heads(self, batch: MuxBatch) -> list[OutputHead]:
        return [self.of(name).head for name in batch.task_names]

    def take_failures(self) -> dict[str, str]:
        """Return why tasks' own loss functions have failed, by task, and forget it."""
        failures, self.failures = self.failures, {}
        return failures
