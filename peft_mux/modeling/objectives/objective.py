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

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from peft_mux.data.formats import RowForm
from peft_mux.errors import raise_faults
from peft_mux.modeling.backbone.head_kinds import HeadKind
from peft_mux.modeling.objectives.arguments import LossArgs, read_args
from peft_mux.modeling.objectives.head import OutputHead
from peft_mux.modeling.objectives.outputs import TaskLoss

OWN = "own"
"""Name of the entry that runs a user's own function."""

Statistics = tuple[torch.Tensor | None, ...]
"""Statistics `[K]` of each task of a stream; `None` for those whose loss has none."""


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
    def takes_smoothing(self) -> bool:
        """Whether `label_smoothing_factor` may be set, which its arguments then have."""
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
    takes_smoothing: bool = False
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


def default_args(objective: Objective) -> LossArgs:
    """Return the arguments of a loss where nothing is set.

    Raises:
        ConfigError: if one has no default.
    """
    args, faults = read_args(objective.Args, None, objective.loss_types[0], f"objective_args of {objective.name}")
    raise_faults(faults)
    assert args is not None, "no arguments are a fault"
    return args
