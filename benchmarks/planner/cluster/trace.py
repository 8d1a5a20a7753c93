"""Traces of fine-tuning tasks for the cluster replay (M §5.4): when they come, how long they run, and what they are.

A trace says when a task is submitted and how long it runs alone. What it trains is drawn with a seed, as the paper does
("randomly generated configurations for each task") without naming the distributions. Here each batch size, each rank
and each dataset of a case is equally likely.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import NamedTuple

from peft_mux.scheduler.costs.loads import AdapterLoad, ModelShape, TaskLoad

DATASET_TOKENS = {"sst2": 64, "openbookqa": 128, "rte": 256}
"""Length to which every sequence of a dataset is padded or cut (M §5.1)."""
BATCH_SIZES, RANKS = (16, 32, 64), (8, 16, 32)
CASES = {"Uniform": ("openbookqa",), "Non-uniform": tuple(DATASET_TOKENS)}
"""Datasets of the cases of Figure 21(b). M does not say which one Uniform replays, so the middle of the three."""


class TaskKind(NamedTuple):
    """What a task trains; tasks of one kind are equal to the planner.

    Attributes:
        tokens_per_sequence: the task's own length, up to which its user pays for padding.
        batch_size: sequences of the global batch.
        rank: rank of LoRA on the four projections of attention.
    """

    tokens_per_sequence: int
    batch_size: int
    rank: int

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
        """
        length = padded_to or self.tokens_per_sequence
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


class TracedTask(NamedTuple):
    """One task of a trace.

    Attributes:
        submit_s: when it is submitted, in seconds since the start of the trace.
        duration_s: seconds that it takes alone on an instance of the reference system.
        kind: what the task trains.
    """

    submit_s: float
    duration_s: float
    kind: TaskKind


def read_trace(path: Path, datasets: tuple[str, ...], until_s: float) -> list[TracedTask]:
    """Read a CSV file with the columns submit_s and duration_s, and draw what each task trains.

    Args:
        path: the CSV file.
        datasets: what tasks train on.
        until_s: leaves out tasks submitted at this time or later, in seconds since the start of the trace.

    Returns:
        Tasks by time of submission, equal ones in the order of the file; those that ran 0 seconds are left out.
    """
    with path.open(newline="") as file:
        times = [(float(row["submit_s"]), float(row["duration_s"])) for row in csv.DictReader(file)]
    draw, tasks = random.Random(0), []
    for submit_s, duration_s in sorted(times, key=lambda times_of_task: times_of_task[0]):
        if duration_s > 0 and submit_s < until_s:
            kind = TaskKind(DATASET_TOKENS[draw.choice(datasets)], draw.choice(BATCH_SIZES), draw.choice(RANKS))
            tasks.append(TracedTask(submit_s, duration_s, kind))
    return tasks
