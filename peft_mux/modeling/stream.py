"""`Stream`: what the attached modules need to know about the micro-batch that is in flight.

Adapted layers get no extra arguments from model code, so each holds a reference to its model's one `Stream`: which
rows belong to which task (Dispatch, M §3.2), and where a token stands in its task's global batch (for dropout).
Outside a multiplexed pass the stream is idle, and every attached module behaves as PEFT and transformers wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.kernels import philox
from peft_mux.modeling.key_values import KeyValueStore
from peft_mux.modeling.lora_pass import LoraGroups, LoraPass


class RowSegment(NamedTuple):
    """Consecutive rows of one task.

    Attributes:
        adapter: internal adapter id of the task.
        start: first row.
        end: one past the last row.
        task_seed: seed of the task.
        step: optimizer step of the task.
    """

    adapter: str
    start: int
    end: int
    task_seed: int
    step: int

    def draw_seed(self, module_name: str) -> int:
        """Return the seed of this task's dropout draws in one module."""
        return philox.draw_seed(self.task_seed, self.step, module_name)


class Stream:
    """The micro-batch in flight, shared by all attached modules of one model.

    Attributes:
        batch: the micro-batch, or `None` while idle.
        segments: rows of each task in the activations that modules see now.
        places: int64 `[rows]`, place of each row in its task's global batch.
        num_rows: rows that modules see now: the tokens, or fewer inside `selected_rows`.
        lora_pass: rows bound to adapters, for layers that see every token; `None` while idle or inside `selected_rows`.
        num_attention_calls: how often packed attention ran, since the stream was made.
        num_passes: how often a batch was dispatched; recomputations count.
        key_values: of long sequences, between the passes of their parts.

    Args:
        groups: tables of the model's adapters; none by default.
    """

    def __init__(self, groups: LoraGroups | None = None) -> None:
        """Make an idle stream."""
        self.groups = groups or LoraGroups(lambda adapter: None)
        self.lora_pass: LoraPass | None = None
        self.batch: MuxBatch | None = None
        self.segments: tuple[RowSegment, ...] = ()
        self.places: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self.num_rows = 0
        self.num_attention_calls = 0
        self.num_passes = 0
        self.key_values = KeyValueStore()

    @property
    def is_idle(self) -> bool:
        """Whether no multiplexed pass is running."""
        return self.batch is None

    @contextmanager
    def reading(
        self, batch: MuxBatch, adapters: Mapping[str, str], lora_pass: LoraPass | None = None
    ) -> Iterator[Stream]:
        """Dispatch the rows of `batch` for the time of the `with` block.

        Args:
            batch: the micro-batch, its tensors on the model's device.
            adapters: internal adapter id of each task name.
            lora_pass: of the same batch, where activations are recomputed; made by default.
        """
        before = self.batch, self.segments, self.places, self.num_rows, self.lora_pass
        self.num_passes += 1
        self.batch = batch
        self.segments = _segments(batch, batch.task_offsets, adapters)
        self.places = batch.token_places
        self.num_rows = batch.num_tokens
        self.lora_pass = lora_pass or LoraPass(self.groups, self.segments, self.places)
        try:
            yield self
        finally:
            self.batch, self.segments, self.places, self.num_rows, self.lora_pass = before

    @contextmanager
    def selected_rows(
        self, offsets: tuple[int, ...], places: torch.Tensor, adapters: Mapping[str, str]
    ) -> Iterator[Stream]:
        """Let modules see a selection of rows, sorted by task: pooled sequences, or rows that have a target.

        Args:
            offsets: of the tasks of the batch among the selected rows, `N + 1` numbers.
            places: int64 `[rows]`.
            adapters: internal adapter id of each task name.
        """
        assert self.batch is not None, "rows can only be selected inside reading()"
        before = self.segments, self.places, self.num_rows, self.lora_pass
        self.segments = _segments(self.batch, offsets, adapters)
        self.places, self.num_rows, self.lora_pass = places, offsets[-1], None
        try:
            yield self
        finally:
            self.segments, self.places, self.num_rows, self.lora_pass = before


def _segments(batch: MuxBatch, offsets: tuple[int, ...], adapters: Mapping[str, str]) -> tuple[RowSegment, ...]:
    return tuple(
        RowSegment(adapters[name], start, end, seed, step)
        for name, start, end, seed, step in zip(
            batch.task_names, offsets[:-1], offsets[1:], batch.task_seeds, batch.task_steps, strict=True
        )
        if end > start
    )
