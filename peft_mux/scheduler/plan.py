"""`Plan`: a frozen, serialisable account of what runs together, in how many passes, and in how much memory.

The engine executes a plan and nothing else; the same value prints and travels as JSON. On one device all tasks share
one hTask (spatial multiplexing, M §3.3).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from peft_mux.scheduler.memory import MemoryEstimate

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class TaskShare:
    """What one task brings into a step.

    Attributes:
        name: of the task.
        batch_size: sequences of its global batch.
        tokens_per_step: mean tokens of its global batch.
        num_steps: optimizer steps that it takes.
        adapter_parameters: trainable parameters.
    """

    name: str
    batch_size: int
    tokens_per_step: float
    num_steps: int
    adapter_parameters: int


@dataclass(frozen=True, slots=True)
class HTask:
    """Tasks that are fused spatially: their tokens share every pass through the backbone (M §3.3).

    Attributes:
        tasks: in stream order.
        micro_batches: passes per step, at the mean number of tokens.
    """

    tasks: tuple[str, ...]
    micro_batches: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs together, and what it needs.

    Attributes:
        htasks: run one after another in each step.
        shares: what each task brings.
        max_tokens_per_micro_batch: bound of one pass.
        chunk_size: tokens of a chunk (M §3.5).
        pad_to_chunks: whether each task's part of a stream is filled up to whole chunks.
        memory: estimated peak, by part.
        device: what it was made for.
        notes: remarks for the reader, such as rows that will be cut.
    """

    htasks: tuple[HTask, ...]
    shares: tuple[TaskShare, ...]
    max_tokens_per_micro_batch: int
    chunk_size: int
    pad_to_chunks: bool
    memory: MemoryEstimate
    device: str
    notes: tuple[str, ...] = field(default=())

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step of all tasks."""
        return sum(share.tokens_per_step for share in self.shares)

    def summary(self) -> str:
        """Return the plan as a table."""
        width = max([len("task"), *(len(share.name) for share in self.shares)])
        lines = [
            f"plan  {len(self.shares)} tasks on {self.device}, {len(self.htasks)} hTask"
            f"{'s' if len(self.htasks) > 1 else ''}, chunks of {self.chunk_size} tokens",
            f"  {'task':<{width}}  hTask  batch  tokens/step   steps  trainable",
        ]
        for number, htask in enumerate(self.htasks, start=1):
            for share in self.shares:
                if share.name in htask.tasks:
                    lines.append(
                        f"  {share.name:<{width}}  {number:>5}  {share.batch_size:>5}  {share.tokens_per_step:>11,.0f}"
                        f"  {share.num_steps:>6,}  {share.adapter_parameters:>9,}"
                    )
            lines.append(
                f"  hTask {number}: {htask.micro_batches} pass{'es' if htask.micro_batches > 1 else ''} a step of "
                f"at most {self.max_tokens_per_micro_batch:,} tokens"
            )
        lines += ["", self.memory.summary()]
        lines += [f"note  {note}" for note in self.notes]
        return "\n".join(lines)

    def __str__(self) -> str:
        """Return `summary()`."""
        return self.summary()

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            ValueError: for another format version.
        """
        data: dict[str, Any] = json.loads(text)
        version = data.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version: got {version!r}; allowed: {FORMAT_VERSION}.")
        htasks = tuple(HTask(tuple(item["tasks"]), item["micro_batches"]) for item in data.pop("htasks"))
        shares = tuple(TaskShare(**item) for item in data.pop("shares"))
        memory = MemoryEstimate(**data.pop("memory"))
        return cls(htasks=htasks, shares=shares, memory=memory, notes=tuple(data.pop("notes")), **data)
