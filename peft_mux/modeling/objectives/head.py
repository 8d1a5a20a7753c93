"""`OutputHead`: what a kind of output head computes on a packed stream, whatever loss is taken of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import TaskBatch
from peft_mux.modeling.attention.read_rows import ReadRows
from peft_mux.modeling.backbone.head_kinds import HeadKind, head_kind_of
from peft_mux.modeling.objectives.outputs import TaskOutputs
from peft_mux.modeling.stream import Stream


@dataclass(frozen=True, slots=True)
class HeadPass:
    """What the output head of a pass is computed with, once the hidden states are there.

    Attributes:
        backbone: the transformers model whose last module or modules are the head.
        stream: reads the micro-batch of the pass.
        adapters: internal adapter id of each task name.
        smoothed: tasks whose losses also read how likely all other words are (`TokenOutputs.spread_M`).
    """

    backbone: Any
    stream: Stream
    adapters: Mapping[str, str]
    smoothed: frozenset[str] = frozenset()


class OutputHead(Protocol):
    """One kind of output head; an entry of `HEADS`."""

    @property
    def kind(self) -> HeadKind:
        """Which backbones end in such a head, and which tasks need one."""
        ...

    @property
    def example_label(self) -> int | None:
        """Class label of a made-up sequence; `None` where sequences need none."""
        ...

    def prepare(self, backbone: Any, adapter: str, classes: int | None, seed: int, *, is_new: bool) -> None:
        """Make what a task trains of the head, after its adapter was injected.

        Args:
            backbone: transformers model that holds the adapter.
            adapter: internal adapter id of the task.
            classes: number of classes of the task; `None` for that of the backbone.
            seed: fixes the weights that are drawn.
            is_new: whether the backbone's own head was made at random rather than loaded.
        """
        ...

    def bypassed(self, backbone: Any) -> AbstractContextManager[None]:
        """Keep the backbone's base model from computing a part of the head by itself, during the `with` block."""
        ...

    def read_rows(self, batch: MuxBatch, backbone: Any) -> ReadRows | None:
        """Return the rows whose hidden states `outputs` and `terms` read; `None` where that is not known."""
        ...

    def outputs(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> Sequence[TaskOutputs]:
        """Return what the losses of each task of a micro-batch read, computed once for all of them.

        Each depends on rows of its own task only, so that nothing of one task reaches another.

        Args:
            hidden_TD: the last hidden states `[T, D]`.
            batch: the micro-batch, its tensors on the device of the hidden states.
            head: what the output head is computed with.
        """
        ...

    def terms(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> torch.Tensor:
        """Return the negative log-likelihoods `[M]` of all targets, for passes that are captured as CUDA graphs."""
        ...

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[torch.Tensor]:
        """Return the logits of every sequence in the order of the stream, from the `[T, D]` last hidden states."""
        ...

    def labels(self, batch: TaskBatch, micro_batch: MuxBatch) -> Iterator[np.ndarray]:
        """Yield the labels of every sequence in the order of the stream, as `compute_metrics` takes them.

        Args:
            batch: the rows of one task.
            micro_batch: the same rows, all of them, as a stream.
        """
        ...


HEADS: dict[str, OutputHead] = {}
"""Every kind of head by the name of its kind."""


def register_head(head: OutputHead) -> None:
    """Add a kind of head to `HEADS`.

    Raises:
        ValueError: if one is registered for this kind already.
    """
    if head.kind.name in HEADS:
        raise ValueError(f'the head "{head.kind.name}" is registered already; allowed: one entry a kind.')
    HEADS[head.kind.name] = head


def head_of(backbone: Any) -> OutputHead:
    """Return the head that a backbone ends in."""
    return HEADS[head_kind_of(backbone).name]
