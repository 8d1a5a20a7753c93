"""`CapturedPass`: forward and backward of one shape of micro-batch as one graph.

What Python does in a pass (hooks of modules, say) happens when it is captured, and not when it is replayed.

Shape letters: N tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.captured_inputs import Shape, StaticInputs
from peft_mux.engine.cuda_graph import Graph
from peft_mux.modeling.attention import AttentionStream, Layout
from peft_mux.modeling.lora_pass import LoraPass
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.slabs import TaskSlab
from peft_mux.modeling.stream import RowSegment, Stream

Precision = Callable[[], AbstractContextManager[object]]
"""Returns the autocast context to compute in."""

_NO_ADAPTER = ""
"""Adapter id of the padding, which no layer knows."""


class CannotCaptureError(Exception):
    """A pass does something that no graph can repeat; the message is a clause that says what."""


class CapturedPass:
    """One graph, and all memory that its launches read and write.

    Args:
        model: on its device; the gradients of the tasks are bound.
        tasks: names, in stream order.
        shape: of the micro-batches.
        precision: of the run.
        graph: empty.

    Attributes:
        losses_N: float32, of the last replay.
    """

    def __init__(
        self, model: MultiTaskPeftModel, tasks: tuple[str, ...], shape: Shape, precision: Precision, graph: Graph
    ) -> None:
        """Allocate the inputs; nothing is captured yet."""
        self._model, self._precision, self._graph = model, precision, graph
        self._inputs = StaticInputs(shape, tasks, model.device)
        self._adapters = [model.adapter_of(name) for name in tasks]
        self._slabs = [model.task_slab(name) for name in tasks]
        rows = self._segments(self._inputs.batch)
        self._rows = LoraPass(model.stream.groups, rows, self._inputs.batch.token_places, has_fixed_size=True)
        self._attention = _FixedAttention(model.stream, self._inputs.batch, shape.longest)
        self.losses_N = torch.zeros(len(tasks), device=model.device)

    def capture(self, batch: MuxBatch) -> None:
        """Record the pass; gradients stay as they are.

        Args:
            batch: of the same tasks and shape, on the host: what is computed in trial.

        Raises:
            CannotCaptureError: if the pass depends on more than its inputs' contents.
        """
        with _as_they_were(self._slabs):
            self._fill(batch)
            self._graph.warm_up(self._compute)
            self._check_served()
            self._graph.capture(self._compute)

    def replay(self, batch: MuxBatch) -> torch.Tensor:
        """Add a micro-batch's gradients to those of its tasks, and return its losses `[N]`, without waiting.

        Args:
            batch: of the same tasks and shape, on the host.
        """
        self._fill(batch)
        self._graph.replay()
        return self.losses_N.clone()  # the next replay overwrites them

    def _fill(self, batch: MuxBatch) -> None:
        self._inputs.fill(batch)
        self._rows.update(self._segments(batch))

    def _segments(self, batch: MuxBatch) -> tuple[RowSegment, ...]:
        """Return the rows of each task, and last those of the padding."""
        columns = self._adapters, batch.task_offsets[:-1], batch.task_offsets[1:], batch.task_seeds, batch.task_steps
        tasks = [RowSegment(*row) for row in zip(*columns, strict=True)]
        return (*tasks, RowSegment(_NO_ADAPTER, batch.num_tokens, self._inputs.shape.num_tokens, 0, 0))

    def _compute(self) -> None:
        """Do what is captured."""
        for slab in self._slabs:
            slab.refresh_copies()
        with self._precision():
            terms_M = self._model.target_losses(self._inputs.batch, self._rows, self._attention)
            losses_N = self._inputs.per_task(terms_M)
        losses_N.sum().backward()
        self.losses_N.copy_(losses_N.detach())

    def _check_served(self) -> None:
        groups = self._model.stream.groups
        names = [groups.group(number).members[0].name for (number, _), found in self._rows.found.items() if not found]
        if names:
            raise CannotCaptureError(f"kernels do not serve the adapters of {names[0]}")
        if not self._rows.found:
            raise CannotCaptureError("adapters are not computed by kernels")


class _FixedAttention(AttentionStream):
    """Attention whose launches do not depend on how long each sequence is.

    Args:
        stream: of the model.
        batch: the static one.
        longest: tokens that no sequence exceeds.
    """

    def __init__(self, stream: Stream, batch: MuxBatch, longest: int) -> None:
        """Bind the static inputs; names of modules serve attention dropout only, which no kernel has."""
        super().__init__(stream, batch, {})
        self.max_length = longest

    def layout(self, *, is_causal: bool) -> Layout:
        """Refuse: another layout of sequences is another series of launches.

        Raises:
            CannotCaptureError: always.
        """
        raise CannotCaptureError("attention is computed by groups of sequences of equal length")


@contextmanager
def _as_they_were(slabs: Sequence[TaskSlab]) -> Iterator[None]:
    """Bring the gradients back that tasks had before the `with` block."""
    gradients = [page.values.grad for slab in slabs for page in slab.pages if page.values.grad is not None]
    copies = [gradient.clone() for gradient in gradients]
    try:
        yield
    finally:
        for gradient, copy in zip(gradients, copies, strict=True):
            gradient.copy_(copy)
