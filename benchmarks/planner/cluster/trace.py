"""Traces of fine-tuning tasks for the cluster replay (M §5.4): when they come, how long they run, and what they are.

A trace says when a task is submitted and how long it runs alone. What it trains is drawn by a seeded recipe, as the
paper does ("randomly generated configurations for each task") without naming the distributions. Here each of the
batch sizes and ranks of a `Recipe` is equally likely; so is each dataset.
"""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass
from pathlib import Path

from peft_mux.scheduler.costs.loads import AdapterLoad, ModelShape, TaskLoad

DATASET_TOKENS = {"sst2": 64, "openbookqa": 128, "rte": 256}
"""Length to which every sequence of a dataset is padded or cut (M §5.1)."""


@dataclass(frozen=True, slots=True, order=True)
class TaskKind:
    """What a task trains; tasks of one kind are equal to the planner.

    Attributes:
        tokens_per_sequence: the task's own length, up to which its user pays for padding.
        batch_size: sequences of the global batch.
        rank: rank of LoRA on the four projections of attention.

    Raises:
        ValueError: for a number below 1.
    """

    tokens_per_sequence: int
    batch_size: int
    rank: int

    def __post_init__(self) -> None:
        for field in ("tokens_per_sequence", "batch_size", "rank"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be 1 or more, got {getattr(self, field)}. Correct the kind of task.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch that the user asked for: effective tokens (M §5.3)."""
        return self.tokens_per_sequence * self.batch_size

    def load(self, name: str, shape: ModelShape, *, padded_to: int | None = None) -> TaskLoad:
        """Return the task for the planner; every token is a target, as with padding to a fixed length.

        Args:
            name: name that the planner knows the task by.
            shape: layers and widths of the backbone.
            padded_to: tokens to which each sequence is padded for others' sake; `None` for no such padding.

        Raises:
            ValueError: for padding to less than the task's own length.
        """
        length = padded_to or self.tokens_per_sequence
        if length < self.tokens_per_sequence:
            raise ValueError(
                f"padded_to must be {self.tokens_per_sequence} or more, the task's own length, got {length}."
            )
        query_width = shape.hidden_size + shape.attention_size
        key_width = shape.hidden_size + shape.key_value_size
        # Query, key, value and output: the last one is as wide as the first, with inputs and outputs exchanged.
        widths = (query_width, key_width, key_width, query_width)
        return TaskLoad(
            name=name,
            lengths=(length,) * self.batch_size,
            num_targets=length * self.batch_size,
            adapters=tuple(AdapterLoad(self.rank, width) for width in widths),
            trainable_parameters=shape.num_layers * self.rank * sum(widths),
        )


@dataclass(frozen=True, slots=True)
class TracedTask:
    """One task of a trace.

    Attributes:
        submit_s: when it is submitted, in seconds since the start of the trace.
        duration_s: seconds that it takes alone on an instance of the reference system.
        kind: what the task trains.

    Raises:
        ValueError: for a negative time, or a duration that is not above 0.
    """

    submit_s: float
    duration_s: float
    kind: TaskKind

    def __post_init__(self) -> None:
        if not 0 <= self.submit_s < math.inf:
            raise ValueError(f"submit_s must be 0 or more, got {self.submit_s}. Count from the start of the trace.")
        if not 0 < self.duration_s < math.inf:
            raise ValueError(f"duration_s must be more than 0, got {self.duration_s}. Leave out tasks that never ran.")


@dataclass(frozen=True, slots=True)
class Recipe:
    """From what the kinds of a trace's tasks are drawn, each value equally likely.

    Attributes:
        datasets: names in `DATASET_TOKENS`; one for M's Uniform case, several for Non-uniform.
        batch_sizes: sequences of a global batch.
        ranks: ranks of LoRA on the projections of attention.
        seed: fixes the draws of kinds.

    Raises:
        ValueError: for an empty choice or an unknown dataset.
    """

    datasets: tuple[str, ...]
    batch_sizes: tuple[int, ...] = (16, 32, 64)
    ranks: tuple[int, ...] = (8, 16, 32)
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("datasets", "batch_sizes", "ranks"):
            if not getattr(self, field):
                raise ValueError(f"{field} must have at least one value to draw from.")
        for name in self.datasets:
            if name not in DATASET_TOKENS:
                raise ValueError(f"datasets must be of {', '.join(DATASET_TOKENS)}, got {name!r}.")

    def draw(self, count: int) -> tuple[TaskKind, ...]:
        """Return the kinds of the first `count` tasks; more of them begin with the same ones."""
        random_state = random.Random(self.seed)
        return tuple(
            TaskKind(
                DATASET_TOKENS[random_state.choice(self.datasets)],
                random_state.choice(self.batch_sizes),
                random_state.choice(self.ranks),
            )
            for _ in range(count)
        )


UNIFORM = Recipe(("openbookqa",))
"""One dataset for all tasks; M does not say which one it replays, so the middle of the three."""

NON_UNIFORM = Recipe(tuple(DATASET_TOKENS))
"""A dataset drawn for each task."""


def read_trace(path: Path, recipe: Recipe, *, every: int = 1, until_s: float = math.inf) -> tuple[TracedTask, ...]:
    """Read a CSV file with the columns submit_s and duration_s, and draw what each task trains.

    Args:
        path: the CSV file; columns other than these two are not read.
        recipe: draws what each task trains.
        every: takes each n-th task only, for a lighter load.
        until_s: leaves out tasks submitted at this time or later, in seconds since the start of the trace.

    Returns:
        Tasks by time of submission, equal ones in the order of the file; those that ran 0 seconds are left out.

    Raises:
        ValueError: for a missing column, a value that is no number, or `every` below 1.
    """
    if every < 1:
        raise ValueError(f"every must be 1 or more, got {every}. Use 1 for all tasks.")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        lacking = [name for name in ("submit_s", "duration_s") if name not in (reader.fieldnames or ())]
        if lacking:
            raise ValueError(f"{path.name} must be CSV with submit_s and duration_s, but has no column {lacking[0]}.")
        rows = [_parse_times(row, number, path) for number, row in enumerate(reader, start=2)]
    # A task that ran 0 seconds has no work to replay.
    rows = sorted((row for row in rows if row[1] > 0), key=lambda row: row[0])[::every]
    rows = [row for row in rows if row[0] < until_s]
    kinds = recipe.draw(len(rows))
    return tuple(TracedTask(submit, duration, kind) for (submit, duration), kind in zip(rows, kinds, strict=True))


def _parse_times(row: dict[str, str], line: int, path: Path) -> tuple[float, float]:
    """Return submission and duration of one row, in seconds."""
    try:
        return float(row["submit_s"]), float(row["duration_s"])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"line {line} of {path.name} must have numbers of seconds, got submit_s {row['submit_s']!r} and "
            f"duration_s {row['duration_s']!r}."
        ) from error
