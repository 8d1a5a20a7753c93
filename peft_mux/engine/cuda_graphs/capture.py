"""`CapturedPass`: forward and backward of one shape of micro-batch as one graph.

What Python does in a pass (hooks of modules, say) happens when it is captured, and not when it is replayed.

Shape letters: N tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.cuda_graphs.graph import CannotCaptureError, Graph
from peft_mux.engine.cuda_graphs.inputs import Shape, StaticInputs
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.rectangles import Layout
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.stream import NO_ADAPTER, RowSegment, Stream

Precision = Callable[[], AbstractContextManager[object]]
"""Returns the autocast context to compute in."""


class CapturedPass:
    """One graph, and all memory that its launches read and write.

    Args:
        model: the model, on its device; the gradients of the tasks are bound.
        tasks: names of the N tasks, in stream order.
        shape: sizes that the micro-batches are padded to.
        precision: returns the autocast context to compute in.

    Attributes:
        losses_N: float32 `[N]` losses of the last pass.
    """

    def __init__(self, model: MultiTaskPeftModel, tasks: tuple[str, ...], shape: Shape, precision: Precision) -> None:
        """Allocate the inputs; nothing is captured yet."""
        self._model, self._precision = model, precision
        self._graph: Graph | None = None
        self._inputs = StaticInputs(shape, tasks, model.device)
        self._adapters = [model.adapter_of(name) for name in tasks]
        self._slabs = [model.registry.slab_of(name) for name in tasks]
        rows, places = self._segments(self._inputs.batch), self._inputs.batch.token_places
        self._passes = model.stream.begin_passes(rows, places, has_fixed_size=True)
        self._attention = _FixedAttention(model.stream, self._inputs.batch, shape.longest)
        self.losses_N = torch.zeros(len(tasks), device=model.device)

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._graph is not None

    def compute(self, batch: MuxBatch) -> torch.Tensor:
        """Do without a graph what a replay does, over the same memory.

        Args:
            batch: a micro-batch of the same tasks and shape, on the host.

        Returns:
            the losses `[N]` of the pass, one a task.

        Raises:
            CannotCaptureError: if the pass depends on more than its inputs' contents; gradients are as they were then.
        """
        self._fill(batch)
        before = self._copies()
        try:
            self._compute()
            self._check_served()
        except BaseException:
            self._put_back(before)
            raise
        return self.losses_N.clone()

    def capture(self, batch: MuxBatch, graph: Graph) -> None:
        """Record the pass; gradients stay as they are.

        Args:
            batch: a micro-batch of the same tasks and shape, on the host, to warm up with.
            graph: the graph to record into, still empty.

        Raises:
            CannotCaptureError: if the pass depends on more than its inputs' contents.
        """
        # Warming up runs real backwards, whose gradients would otherwise count in the step beside those of the replay.
        with self.as_they_were():
            self._fill(batch)
            graph.warm_up(self._compute)
            # After the warm-up: only a pass that has run knows which of its adapters kernels serve.
            self._check_served()
            graph.capture(self._compute)
        self._graph = graph

    def replay(self, batch: MuxBatch) -> torch.Tensor:
        """Add a micro-batch's gradients to those of its tasks, and return its losses `[N]`, without waiting.

        Args:
            batch: a micro-batch of the same tasks and shape, on the host.
        """
        assert self._graph is not None, "it was captured"
        self._fill(batch)
        self._graph.replay()
        return self.losses_N.clone()  # the next replay overwrites them

    def gradients(self) -> list[torch.Tensor]:
        """Return the buffers that hold the gradients of the tasks."""
        return [page.values.grad for slab in self._slabs for page in slab.pages if page.values.grad is not None]

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Bring the gradients back that tasks had before the `with` block."""
        before = self._copies()
        try:
            yield
        finally:
            self._put_back(before)

    def _copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(gradient, gradient.clone()) for gradient in self.gradients()]

    def _put_back(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for gradient, copy in copies:
            gradient.copy_(copy)

    def _fill(self, batch: MuxBatch) -> None:
        self._inputs.fill(batch)
        segments = self._segments(batch)
        for adapter_pass in self._passes.values():
            adapter_pass.update(segments)

    def _segments(self, batch: MuxBatch) -> tuple[RowSegment, ...]:
        """Return the rows of each task, and last those of the padding."""
        columns = self._adapters, batch.task_offsets[:-1], batch.task_offsets[1:], batch.task_seeds, batch.task_steps
        tasks = [RowSegment(*row) for row in zip(*columns, strict=True)]
        return (*tasks, RowSegment(NO_ADAPTER, batch.num_tokens, self._inputs.shape.num_tokens, 0, 0))

    def _compute(self) -> None:
        """Run the pass that is captured: forward, losses, backward."""
        # Within the graph, as every replay must see the weights as they are then.
        for slab in self._slabs:
            slab.refresh_copies()
        with self._precision():
            terms_M = self._model.packed.target_losses(self._inputs.batch, self._passes, self._attention)
            losses_N = self._inputs.per_task(terms_M)
        losses_N.sum().backward()
        self.losses_N.copy_(losses_N.detach())

    def _check_served(self) -> None:
        """Refuse a pass in which some adapter is computed without kernels, slice by slice of sizes that change."""
        for adapter_pass in self._passes.values():
            reason = adapter_pass.reason_against_capture()
            if reason is not None:
                raise CannotCaptureError(reason)


class _FixedAttention(AttentionStream):
    """Attention whose launches do not depend on how long each sequence is.

    Args:
        stream: the stream of the model.
        batch: the static micro-batch that the graph reads.
        longest: number of tokens that no sequence exceeds.
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
