"""`Objective`: one loss that a task may be trained towards, and all of them by name.

Two levels. What a pass computes once for all its tasks, whatever their losses, is the `OutputHead`'s: for language
models one linear cross-entropy over the targets of all tasks. A loss is a pure function of what that gave for *one*
task in *one* micro-batch. A new one is a class in a file of this folder, registered there, and imported in
`__init__.py`::

    class MyLoss(TokenObjective):
        name, loss_types = "my-loss", ("plain",)  # a task asks for it with Task(objective="my-loss")

        def loss(self, outputs: TokenOutputs, args: LossArgs) -> TaskLoss:
            return TaskLoss(outputs.mean_over_tokens(outputs.nll_M**2))

    register_objective(MyLoss())

A loss divides by sums over the task's *global* batch (`outputs.totals`), so no split into micro-batches and no number
of processes changes its gradient (promise 1 of the design).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, Protocol

import torch
from peft import PromptLearningConfig

from peft_mux.data.batch import MuxBatch
from peft_mux.data.formats import RowForm
from peft_mux.errors import Fault, closest, raise_faults, shown
from peft_mux.modeling.backbone.head_kinds import HeadKind, head_kind_for
from peft_mux.modeling.objectives.arguments import SEVERAL, LossArgs, read_args
from peft_mux.modeling.objectives.head import OutputHead
from peft_mux.modeling.objectives.outputs import TaskLoss

OWN = "own"
"""Name of the entry that runs a user's own function."""


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
    def peft_config(self) -> Any:
        """Configuration of the adapter, whose `task_type` tells the kind of head."""
        ...

    @property
    def train_dataset(self) -> Any:
        """The rows, whose columns tell the loss where `objective` does not."""
        ...


class Objective(Protocol):
    """One loss; an entry of `OBJECTIVES`."""

    @property
    def name(self) -> str:
        """The `Task.objective` that asks for it."""
        ...

    @property
    def loss_types(self) -> tuple[str, ...]:
        """Its variants by their `Task.loss_type`, the default first."""
        ...

    @property
    def refused_loss_types(self) -> Mapping[str, str]:
        """Variants that are known from TRL but not trained towards, and why."""
        ...

    @property
    def takes_several(self) -> bool:
        """Whether `Task.loss_type` may be a list of variants, whose losses are added up."""
        ...

    @property
    def Args(self) -> type[LossArgs]:
        """The dataclass of its arguments."""
        ...

    @property
    def reference_columns(self) -> tuple[str, ...]:
        """Token columns or row values that make the pass without adapters needless, where rows bring all of them."""
        ...

    @property
    def num_batch_values(self) -> int:
        """How many numbers of the whole global batch it needs before its loss can be taken.

        Then a pass without gradient comes first, of which `batch_values` makes these.
        """
        ...

    @property
    def is_default(self) -> bool:
        """Whether tasks of its kind of head have it where nothing tells another one."""
        ...

    @property
    def uses_totals(self) -> bool:
        """Whether it divides by `TaskOutputs.totals`; otherwise by the number of terms (`loss_weight`)."""
        ...

    @property
    def has_logits(self) -> bool:
        """Whether `compute_metrics` may be given the logits and labels of its rows."""
        ...

    @property
    def eager_reason(self) -> str | None:
        """Why a pass with it cannot be captured as a CUDA graph, as a clause; `None` where it can.

        Then its terms are the negative log-likelihoods of the targets.
        """
        ...

    @property
    def head(self) -> OutputHead:
        """The output head that it reads."""
        ...

    @property
    def row_form(self) -> RowForm:
        """The form of the rows that it reads."""
        ...

    @property
    def prepass_sequence(self) -> int | None:
        """Which sequence of each row, from 0, passes without gradient read alone; `None` for none."""
        ...

    def rows(self, args: Any) -> RowForm:
        """Return the form of the rows that a variant of it reads."""
        ...

    def needs_batch_values(self, args: Any) -> bool:
        """Whether a variant of it needs numbers of the whole global batch beforehand."""
        ...

    def needs_reference(self, args: Any) -> bool:
        """Whether it needs the log-probabilities of the backbone without adapters (`TokenOutputs`)."""
        ...

    def statistic_names(self, args: Any) -> tuple[str, ...]:
        """Return the names of the K statistics of `TaskLoss`, those of TRL where it has them."""
        ...

    def batch_values(self, outputs: Any, args: Any) -> torch.Tensor:
        """Return `[num_batch_values]`, the part of a micro-batch in numbers of the global batch."""
        ...

    def loss(self, outputs: Any, args: Any) -> TaskLoss:
        """Return the loss of one task in one micro-batch.

        Args:
            outputs: `TokenOutputs` or `SequenceOutputs`, as its head has it.
            args: its arguments, of class `Args`.
        """
        ...

    def metrics(self, loss: float, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation from its mean loss, and its statistics by name."""
        ...

    def metric_names(self, args: Any) -> tuple[str, ...]:
        """Return the names of the metrics that `metrics` returns."""
        ...


class BaseObjective:
    """What most losses have in common; see `Objective`."""

    row_form: RowForm
    refused_loss_types: Mapping[str, str] = {}
    takes_several: bool = False
    Args: type[LossArgs] = LossArgs
    reference_columns: tuple[str, ...] = ()
    num_batch_values: int = 0
    is_default: bool = False
    uses_totals: bool = True
    has_logits: bool = True
    eager_reason: str | None = "a task's loss is more than the sum over its targets"

    prepass_sequence: int | None = None

    def rows(self, args: Any) -> RowForm:
        """Return one form for all variants."""
        return self.row_form

    def needs_reference(self, args: Any) -> bool:
        """Return that it needs none."""
        return False

    def needs_batch_values(self, args: Any) -> bool:
        """Return whether it has any."""
        return bool(self.num_batch_values)

    def statistic_names(self, args: Any) -> tuple[str, ...]:
        """Return that there are none."""
        return ()

    def batch_values(self, outputs: Any, args: Any) -> torch.Tensor:
        """Refuse: there are none."""
        raise NotImplementedError("a loss with batch values says what they are.")

    def metrics(self, loss: float, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss, and the statistics as they are."""
        return {"eval_loss": loss} | {f"eval_{name}": value for name, value in statistics.items()}

    def metric_names(self, args: Any) -> tuple[str, ...]:
        """Return those of the loss and of the statistics."""
        return ("eval_loss", *(f"eval_{name}" for name in self.statistic_names(args)))


OBJECTIVES: dict[str, Objective] = {}
"""Every loss by its name, in the order in which they were registered."""


def register_objective(objective: Objective) -> None:
    """Add a loss to `OBJECTIVES`.

    Raises:
        ValueError: if its name is taken.
    """
    if objective.name in OBJECTIVES:
        raise ValueError(f'the objective "{objective.name}" is registered already; allowed: a name of its own.')
    OBJECTIVES[objective.name] = objective


def unregister_objective(name: str) -> None:
    """Take a loss out of `OBJECTIVES`; models must no longer hold tasks with it."""
    del OBJECTIVES[name]


def objectives_of(kind: HeadKind) -> list[Objective]:
    """Return every loss of a kind of head that a task may name, the default first."""
    found = [entry for entry in OBJECTIVES.values() if entry.head.kind == kind and entry.name != OWN]
    return sorted(found, key=lambda entry: not entry.is_default)


def objective_for(kind: HeadKind) -> Objective:
    """Return the loss of a kind of head where a task says nothing of it."""
    return objectives_of(kind)[0]


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
    return found if args is None else found + _reference_faults(objective, args, task, where)


def _reference_faults(objective: Objective, args: LossArgs, task: TrainedTask, where: str) -> list[Fault]:
    """Return a fault where a loss wants the backbone without a prompt: its rows have virtual tokens in them."""
    is_prompt = isinstance(task.peft_config, PromptLearningConfig)
    if not is_prompt or not _lacks_reference(objective, args, task):
        return []
    columns = " and ".join(objective.reference_columns)
    fix = f"Bring {columns} with the rows, or train an adapter on layers such as LORA."
    got = f"{objective.name} with {type(task.peft_config).__name__}"
    return [Fault(f"{where}.objective", got, "losses without a reference for adapters of prompts", fix)]


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


def args_of(task: TrainedTask) -> LossArgs:
    """Return the arguments of the loss that a task is trained towards.

    Raises:
        ConfigError: naming every argument that cannot be used.
    """
    objective, where = objective_of(task), f"tasks.{task.name}"
    loss_type, faults = _loss_type(objective, task, where)
    raise_faults(faults)
    args, faults = read_args(objective.Args, _given(task), loss_type or "", f"{where}.objective_args")
    raise_faults(faults)
    assert args is not None, "no arguments are a fault"
    return args


def needs_reference_pass(task: TrainedTask) -> bool:
    """Whether a task's loss needs a pass without adapters: unless its rows bring what that would give."""
    return _lacks_reference(objective_of(task), args_of(task), task)


def _lacks_reference(objective: Objective, args: LossArgs, task: TrainedTask) -> bool:
    wanted = set(objective.reference_columns)
    return objective.needs_reference(args) and not (wanted and wanted <= columns_of(task.train_dataset))


def default_args(objective: Objective) -> LossArgs:
    """Return the arguments of a loss where nothing is set.

    Raises:
        ConfigError: if one has no default.
    """
    args, faults = read_args(objective.Args, None, objective.loss_types[0], f"objective_args of {objective.name}")
    raise_faults(faults)
    assert args is not None, "no arguments are a fault"
    return args


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


def target_counts(batch: MuxBatch) -> list[int]:
    """Return the number of target tokens of each task."""
    return [end - start for start, end in pairwise(batch.target_offsets)]


def row_counts(batch: MuxBatch) -> list[int]:
    """Return the number of rows of each task."""
    return [end - start for start, end in pairwise(batch.row_offsets)]


Statistics = tuple[torch.Tensor | None, ...]
"""Statistics `[K]` of each task of a stream; `None` for those whose loss has none."""

OwnFunction = Callable[[Any], Any]
"""A user's own loss: takes the `TokenOutputs` of its task."""
