"""`ResolvedTask`: a `Task` with everything that follows from its settings and the run's, worked out once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from peft import PeftConfig

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.data.formats import RowForm
from peft_mux.errors import Fault, raise_faults
from peft_mux.modeling.backbone.modules import HeadKind
from peft_mux.modeling.objectives.objective import LossArgs, Objective
from peft_mux.modeling.objectives.task_objective import find_loss
from peft_mux.task import HyperParameters, Task, resolve


@dataclass(frozen=True, slots=True)
class ResolvedTask:
    """A task whose settings are complete and whose loss is known.

    Attributes:
        task: the task as its user has written it.
        hyper: its hyper-parameters, completed by the arguments of the run.
        objective: the loss that it is trained towards.
        loss_args: the arguments of the loss.
        num_labels: number of classes of the task's own head; `None` if it has none, or its rows have not been read yet.
    """

    task: Task
    hyper: HyperParameters
    objective: Objective
    loss_args: LossArgs
    num_labels: int | None = None

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    @property
    def peft_config(self) -> PeftConfig:
        """Configuration of its adapter."""
        return self.task.peft_config

    @property
    def head_kind(self) -> HeadKind:
        """The kind of output head that its loss reads."""
        return self.objective.head.kind

    @property
    def row_form(self) -> RowForm:
        """The form of the rows that its loss reads."""
        return self.objective.rows(self.loss_args)

    @property
    def needs_reference(self) -> bool:
        """Whether its loss compares with log-probabilities of a frozen model (`has_adapter_reference` says which)."""
        return self.objective.needs_reference(self.loss_args)

    @property
    def has_adapter_reference(self) -> bool:
        """Whether the reference of its loss is the adapter that it begins from."""
        return self.needs_reference and self.task.init_adapter is not None and self.task.reference != "backbone"


def resolve_tasks(tasks: Iterable[Task], args: MultiTaskTrainingArguments) -> list[ResolvedTask]:
    """Return the tasks with their settings completed by those of the run.

    Raises:
        ConfigError: naming everything that is wrong with the losses of the tasks.
    """
    resolved: list[ResolvedTask] = []
    faults: list[Fault] = []
    for task in tasks:
        hyper, loss = resolve(task, args), find_loss(task, f"tasks.{task.name}")
        faults += loss.faults
        if loss.objective is not None and loss.args is not None:
            loss_args = replace(loss.args, label_smoothing_factor=hyper.label_smoothing_factor)
            resolved.append(ResolvedTask(task, hyper, loss.objective, loss_args))
    raise_faults(faults)
    return resolved


def configs_of(tasks: Sequence[ResolvedTask]) -> dict[str, PeftConfig]:
    """Return the `PeftConfig` of each task by name."""
    return {task.name: task.peft_config for task in tasks}


def seeds_of(tasks: Sequence[ResolvedTask]) -> dict[str, int]:
    """Return the seed of each task by name."""
    return {task.name: task.hyper.seed for task in tasks}


def num_labels_of(tasks: Sequence[ResolvedTask]) -> dict[str, int]:
    """Return the number of classes of each task that has its own head, by name."""
    return {task.name: task.num_labels for task in tasks if task.num_labels is not None}
