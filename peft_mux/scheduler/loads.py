"""What the planner knows of a task: the shape of one typical global batch, and its adapters. No model, no data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """One adapter of one linear layer of one decoder layer.

    Attributes:
        rank: R.
        width: input plus output features of the linear layer.

    Raises:
        ValueError: where a number is below 1.
    """

    rank: int
    width: int

    def __post_init__(self) -> None:
        for field in ("rank", "width"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{field} is {getattr(self, field)}; allowed: 1 or more. Leave out layers without an adapter."
                )


@dataclass(frozen=True, slots=True)
class TaskLoad:
    """What one task brings into a step.

    Attributes:
        name: of the task.
        lengths: tokens of each sequence of one typical global batch; empty where no rows are known.
        num_targets: loss terms of that batch.
        adapters: of ONE decoder layer; averaged over the layers where they differ.
        trainable_parameters: of the whole task.
        num_steps: optimizer steps that it takes.
        priority: tasks of higher priority are admitted first.

    Raises:
        ValueError: for a sequence without tokens, or negative numbers.
    """

    name: str
    lengths: tuple[int, ...]
    num_targets: int
    adapters: tuple[AdapterLoad, ...]
    trainable_parameters: int
    num_steps: int = 1
    priority: int = 0

    def __post_init__(self) -> None:
        if min(self.lengths, default=1) < 1:
            raise ValueError(
                f"lengths of task {self.name!r} include {min(self.lengths)}; allowed: 1 token or more. Leave out empty "
                "sequences."
            )
        for field in ("num_targets", "trainable_parameters", "num_steps"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} of task {self.name!r} is {getattr(self, field)}; allowed: 0 or more.")

    @property
    def tokens(self) -> int:
        """Tokens of the global batch (C n_k in M)."""
        return sum(self.lengths)

    @property
    def sum_squares(self) -> int:
        """Sum of the squared sequence lengths, to which attention scores are proportional."""
        return sum(length * length for length in self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, which no micro-batch splits."""
        return max(self.lengths, default=0)
