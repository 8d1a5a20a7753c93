"""CUDA graphs as the engine uses them: all share one memory pool, and nothing in it outlives a replay."""

# MERGED: What a captured pass reads: tensors of a fixed shape that every micro-batch of that shape is written into.
# MERGED: A graph replays launches over the same memory, so sizes may not follow the micro-batch: they are rounded up,
# MERGED: and what is
# MERGED: left over is padding that belongs to nobody.
# MERGED:     tokens      a a a b b b b b . . .    the padding is one more sequence, of a segment without an adapter
# MERGED:     cu_seqlens  0 3 8 11 11 11           entries that are not used repeat the end: sequences of no token
# MERGED: targets     0 1 3 4 5 6 10 10        rows that are not used point at the last token, which is always padding
# MERGED: Shape letters: T tokens, S sequences, M targets, N tasks, all with their padding.
# MERGED: `CapturedPass`: forward and backward of one shape of micro-batch as one graph.
# MERGED: What Python does in a pass (hooks of modules, say) happens when it is captured, and not when it is replayed.
# MERGED: Shape letters: N tasks.
# MERGED: Whether a captured pass computes what the eager one does: what `cuda_graphs="auto"` asks before it uses one.
# MERGED: Two things are held against each other, losses and gradients of each task, all from gradients of zero:
# MERGED: * a pass over the padded memory of a graph against the plain one (`reason_against_padding`). A product of
# MERGED: another height
# MERGED:   may be rounded otherwise, so they have to agree within the rounding of their dtype.
# MERGED: * a replay against eager passes over the same memory (`reason_against_replay`). Where these agree with each
# MERGED: other bit
# MERGED: for bit, the replay has to as well. Where they do not (flash attention adds up in an order of its own in
# MERGED: each backward
# MERGED:   pass), the replay may be as far from them as twice their greatest distance from each other.
# MERGED: Both wait for the device, and leave gradients as they were.
# MERGED: `CapturedPasses`: passes of one plan as CUDA graphs, captured once for each shape and replayed.
# MERGED: A step of small tasks launches thousands of small kernels, and the host may take longer to launch them than
# MERGED: the device
# MERGED: to run them. A graph is launched at once.
# MERGED: What cannot be captured runs eagerly, with one warning for each reason: see `reason_against`, and
# MERGED: `CannotCaptureError`.
# MERGED: Where nobody has asked for graphs, but they may be used ("auto"), a shape that comes for the first time runs
# MERGED: over the
# MERGED: memory of its graph to be, without one, and when it comes again it is captured. Both are proven equal to the
# MERGED: eager pass
# MERGED: before they count (`proof.py`); where they are not, no more graphs are tried. So a shape has the same bits
# MERGED: in every
# MERGED: pass, be there a graph or not, and no graph is made of what comes once.

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.adapters.kind import MultiplexedForward
from peft_mux.modeling.adapters.prompts.kinds import encoders_of
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.rows import Layout
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.backbone.quantized import bits_of
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.heads import output_head
from peft_mux.modeling.stream import NO_ADAPTER, RowSegment, Stream

_NUM_WARM_UPS = 2
"""In the first one tables are built, kernels compiled and groups of layers settled; the second one is as captured."""


class CannotCaptureError(Exception):
    """A pass does something that no graph can repeat, or finds no room; the message is a clause that says what."""


class Graph(Protocol):
    """Launches that are recorded once and repeated over the same memory."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run what will be captured until nothing is left that happens only at first."""
        ...

    def capture(self, run: Callable[[], None]) -> None:
        """Record what a call launches, without launching it."""
        ...

    def replay(self) -> None:
        """Launch what was recorded, without waiting."""
        ...


class CudaGraphs:
    """Makes graphs that share a pool.

    They may be replayed in any order, one after another: what a replay leaves behind lies outside of the pool.

    Args:
        device: the CUDA device that the graphs run on.
    """

    def __init__(self, device: torch.device) -> None:
        """Make nothing yet: what fails then fails the first capture, and not a run that may do without."""
        self._device = device
        self._pool_and_stream: tuple[Any, torch.cuda.Stream] | None = None

    def __call__(self) -> CudaGraph:
        """Return an empty graph; the first call makes the pool, and the stream that graphs are captured on.

        Raises:
            CannotCaptureError: if the device has less memory left than a pass takes: graphs keep theirs for good, and
                passes that run eagerly need theirs beside it.
        """
        if self._pool_and_stream is None:
            # Asked once: later graphs find their room in the pool of the first one.
            _require_room(self._device)
            self._pool_and_stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        return CudaGraph(*self._pool_and_stream)


def _require_room(device: torch.device) -> None:
    free_bytes, _ = torch.cuda.mem_get_info(device)
    # What passes so far took at most, beside what is there between them.
    pass_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    if free_bytes < pass_bytes:
        raise CannotCaptureError(
            f"the GPU has {free_bytes >> 20} MiB left, of {pass_bytes >> 20} MiB that a pass takes"
        )


class CudaGraph:
    """One graph.

    Args:
        pool: memory pool in which its intermediate results lie.
        stream: stream to capture on; it is used for nothing else, so that what is allocated there is safe from reuse.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Make an empty graph."""
        self._pool, self._stream = pool, stream
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run on the stream that will capture, as libraries set themselves up stream by stream."""
        current = torch.cuda.current_stream(self._stream.device)
        # Each stream waits for the other: the warm-up reads what was launched before it, and what follows reads its
        # results.
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(_NUM_WARM_UPS):
                    run()
        finally:
            current.wait_stream(self._stream)

    def capture(self, run: Callable[[], None]) -> None:
        """Record a call.

        Raises:
            RuntimeError: if it does what cannot be recorded, such as waiting for the device.
        """
        # The outer block brings the stream back even where ending the capture raises. Other threads may go on calling
        # CUDA meanwhile: new tasks arrive on them.
        with torch.cuda.stream(self._stream):
            with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()

    def replay(self) -> None:
        """Launch on the current stream."""
        self._graph.replay()


TOKEN_STEP = 256
"""Tokens are rounded up to a multiple of this."""

_TARGET_STEPS = 8
"""Steps from one power of two to the next in which targets are rounded up: each one costs a row of logits."""

_LEAST_TARGETS = 16

_NOBODY = -1
_ALIGNMENT = 16
_DTYPES = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


class Shape(NamedTuple):
    """Sizes of a captured pass; micro-batches of one shape share a graph.

    Attributes:
        num_tokens: T, number of tokens; at least one of them is padding.
        num_sequences: S, number of sequences; one of them is the padding.
        num_targets: M, number of targets.
        longest: number of tokens that no sequence exceeds, the padding included.
        has_token_types: whether the tokens have types.
    """

    num_tokens: int
    num_sequences: int
    num_targets: int
    longest: int
    has_token_types: bool

    @classmethod
    def of(cls, batch: MuxBatch) -> Shape:
        """Return the shape that a micro-batch is padded to."""
        # One more than there are: unused targets point at the last token, which must belong to nobody.
        num_tokens = _round_up(batch.num_tokens + 1, TOKEN_STEP)
        return cls(
            num_tokens=num_tokens,
            num_sequences=_power_of_two(batch.num_sequences + 1),
            num_targets=_round_up_finely(batch.target_offsets[-1]),
            # The padding is one more sequence, of up to `TOKEN_STEP` tokens.
            longest=_power_of_two(max(*batch.sequence_lengths, TOKEN_STEP)),
            has_token_types=batch.token_type_ids is not None,
        )


class StaticInputs:
    """The tensors of one shape for one set of tasks, in one buffer on the device.

    Args:
        shape: sizes that micro-batches are padded to.
        task_names: names of the N tasks, in stream order.
        device: device of the model.

    Attributes:
        shape: sizes that micro-batches are padded to.
        batch: the tensors as a micro-batch. Of what it says on the host, only the number of tokens and the names are
            true, as nothing else stays the same.
        owner_M: int64 `[M]`, index of each target's task.
        weight_M: float32 `[M]`, what each target's loss is multiplied with.
    """

    def __init__(self, shape: Shape, task_names: tuple[str, ...], device: torch.device) -> None:
        """Allocate; nothing is written yet."""
        self.shape = shape
        self._layout = _Layout(shape)
        self._buffer = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        parts = self._layout.tensors(self._buffer)
        self.owner_M, self.weight_M = parts["owners"], parts["weights"]
        self._task_N = torch.arange(len(task_names), device=device)
        nothing = (0,) * len(task_names)
        self.batch = MuxBatch(
            input_ids=parts["input_ids"][None],
            position_ids=parts["position_ids"][None],
            labels=parts["labels"][None],
            target_rows=parts["target_rows"],
            target_offsets=(*nothing, shape.num_targets),
            token_places=parts["token_places"],
            cu_seqlens=parts["cu_seqlens"],
            task_offsets=(*nothing, shape.num_tokens),
            sequence_offsets=(*nothing, shape.num_sequences),
            sequence_lengths=(shape.num_tokens,),
            task_names=task_names,
            task_seeds=nothing,
            task_steps=nothing,
            loss_weights=(0.0,) * len(task_names),
            token_type_ids=parts["token_type_ids"][None] if shape.has_token_types else None,
        )

    def fill(self, batch: MuxBatch) -> None:
        """Write a micro-batch of the same tasks, in one copy to the device that nobody waits for.

        Args:
            batch: a micro-batch whose tensors are on the host.

        Raises:
            ValueError: if the micro-batch has another shape, or other tasks.
        """
        if Shape.of(batch) != self.shape or batch.task_names != self.batch.task_names:
            raise ValueError(
                f"{Shape.of(batch)} of tasks {', '.join(batch.task_names)}; allowed: {self.shape} of tasks "
                f"{', '.join(self.batch.task_names)}."
            )
        # One buffer and one copy: a copy for each tensor would cost as many launches, which graphs are there to save.
        host = np.zeros(self._layout.num_bytes, dtype=np.uint8)
        _write(batch, self._layout.arrays(host))
        source = torch.from_numpy(host)
        # Pinned anew every time: the memory is handed back once the copy is done, which may be after the next step.
        if self._buffer.is_cuda:
            source = source.pin_memory()
        self._buffer.copy_(source, non_blocking=True)

    def per_task(self, terms_M: torch.Tensor) -> torch.Tensor:
        """Return `[N]`, the weighted sum of each task's own losses.

        Others' losses are left out, not multiplied by 0, which would hand on a NaN.

        Args:
            terms_M: `[M]` loss of each target.
        """
        own_NM = self.owner_M == self._task_N[:, None]
        return torch.where(own_NM, terms_M * self.weight_M, 0.0).sum(dim=1)


class _Slot(NamedTuple):
    begin: int
    end: int
    dtype: type[np.generic]


class _Layout:
    """Where each tensor lies in the buffer."""

    def __init__(self, shape: Shape) -> None:
        by_token = ["input_ids", "position_ids", "labels", "token_places"]
        by_token += ["token_type_ids"] if shape.has_token_types else []
        sizes: list[tuple[str, int, type[np.generic]]] = [(name, shape.num_tokens, np.int64) for name in by_token]
        sizes += [("target_rows", shape.num_targets, np.int64), ("owners", shape.num_targets, np.int64)]
        sizes += [("weights", shape.num_targets, np.float32), ("cu_seqlens", shape.num_sequences + 1, np.int32)]
        self._slots: dict[str, _Slot] = {}
        self.num_bytes = 0
        for name, count, dtype in sizes:
            end = self.num_bytes + count * np.dtype(dtype).itemsize
            self._slots[name] = _Slot(self.num_bytes, end, dtype)
            # A view of another dtype has to begin at a multiple of its own size.
            self.num_bytes = _round_up(end, _ALIGNMENT)

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of the buffer on the device."""
        return {name: buffer[slot.begin : slot.end].view(_DTYPES[slot.dtype]) for name, slot in self._slots.items()}

    def arrays(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parts of a buffer on the host."""
        return {name: buffer[slot.begin : slot.end].view(slot.dtype) for name, slot in self._slots.items()}


def _write(batch: MuxBatch, parts: dict[str, np.ndarray]) -> None:
    """Write a micro-batch and its padding over zeros.

    All padding tokens have id, place and position 0, which every model knows, and label 0, which every head has.
    """
    for name in ("input_ids", "position_ids", "labels", "token_places", "token_type_ids"):
        values = getattr(batch, name)
        if values is not None:
            parts[name][: batch.num_tokens] = values.reshape(-1).numpy()
    num_targets = batch.target_offsets[-1]
    counts = np.diff(batch.target_offsets)
    parts["target_rows"][:] = len(parts["input_ids"]) - 1
    parts["target_rows"][:num_targets] = batch.target_rows.numpy()
    parts["owners"][:] = _NOBODY
    parts["owners"][:num_targets] = np.repeat(np.arange(len(counts)), counts)
    parts["weights"][:num_targets] = np.repeat(np.asarray(batch.loss_weights, dtype=np.float32), counts)
    parts["cu_seqlens"][:] = len(parts["input_ids"])
    parts["cu_seqlens"][: batch.num_sequences + 1] = batch.cu_seqlens.numpy()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _round_up_finely(value: int) -> int:
    """Round up so that little is padding and yet few sizes occur."""
    value = max(value, 1)
    return _round_up(value, max(_power_of_two(value) // 2 // _TARGET_STEPS, _LEAST_TARGETS))


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
            terms_M = self._model.target_losses(self._inputs.batch, self._passes, self._attention)
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


_NUM_REPEATS = 3
_SLACK = 2.0
_ROUNDING = {torch.bfloat16: 1e-1, torch.float16: 2e-2}
_FINE_ROUNDING = 1e-4
"""Greatest relative distance from the plain pass: of a whole gradient, through all layers."""

Pass = Callable[[MuxBatch], torch.Tensor]
"""Adds a micro-batch's gradients to those of its tasks, and returns its losses `[N]`."""


def reason_against_padding(captured: CapturedPass, batch: MuxBatch, plain: Pass, dtype: torch.dtype) -> str | None:
    """Return why a pass over padded memory may not take the place of the plain one, or `None`.

    Args:
        captured: the pass, captured or not.
        batch: a micro-batch of its tasks and shape, on the host.
        plain: the eager pass over the micro-batch as it is.
        dtype: what the backbone computes in.

    Raises:
        CannotCaptureError: if the pass depends on more than its inputs' contents.
    """
    with captured.as_they_were():
        padded = _results(captured, batch, captured.compute)
        as_it_is = _results(captured, batch, plain)
    limit = _ROUNDING.get(dtype, _FINE_ROUNDING)
    for index, (mine, theirs) in enumerate(zip(padded, as_it_is, strict=True)):
        distance = _distance(mine, theirs)
        if not distance <= limit:
            return f"padding changes {_what(index)} by {distance:.1e}, more than the rounding of {dtype}"
    return None


def reason_against_replay(captured: CapturedPass, batch: MuxBatch) -> str | None:
    """Return why a replay may not take the place of an eager pass over the same memory, or `None`.

    Args:
        captured: the pass as it was captured.
        batch: a micro-batch of its tasks and shape, on the host.
    """
    with captured.as_they_were():
        replayed = _results(captured, batch, captured.replay)
        repeats = [_results(captured, batch, captured.compute) for _ in range(_NUM_REPEATS)]
    for index, mine in enumerate(replayed):
        theirs = [repeat[index] for repeat in repeats]
        spread = max(_distance(one, other) for one, other in itertools.combinations(theirs, 2))
        distance = min(_distance(mine, one) for one in theirs)
        if not distance <= _SLACK * spread:
            return (
                f"a replay differs from the eager pass by {distance:.1e} of {_what(index)}, where eager passes differ "
                f"from each other by {spread:.1e}"
            )
    return None


def _what(index: int) -> str:
    return "the losses" if index == 0 else "a gradient"


def _results(captured: CapturedPass, batch: MuxBatch, run: Pass) -> Sequence[torch.Tensor]:
    """Return the losses, and then the gradients, of a pass by itself."""
    gradients = captured.gradients()
    for gradient in gradients:
        gradient.zero_()
    return [run(batch).detach().clone(), *(gradient.clone() for gradient in gradients)]


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the relative distance of two tensors; infinite where only one of them is finite in some place."""
    # A task may be poisoned already: what is not finite has to be so in both, and the rest is compared.
    is_finite = one.isfinite()
    if not torch.equal(is_finite, other.isfinite()):
        return float("inf")
    mine, theirs = (torch.where(is_finite, tensor, 0.0).double() for tensor in (one, other))
    difference, norm = float((mine - theirs).norm()), float(theirs.norm())
    return difference / norm if norm > 0 else difference


MAX_PASSES = 32
"""Graphs that are kept; of more, those that were not used for the longest time are dropped."""


class Composition(NamedTuple):
    """What is written into a graph beside its shape.

    Attributes:
        tasks: names of the tasks, in stream order.
        num_bindings: how often the gradients of each task were bound; another number means that they lie elsewhere.
        version: version of the tables of the model's stream; another one means that adapters lie elsewhere.
        is_training: whether adapters drop out.
    """

    tasks: tuple[str, ...]
    num_bindings: tuple[int, ...]
    version: int
    is_training: bool


class _UnequalError(Exception):
    """A pass is not what the eager one is; the message is a clause that says by how much."""


class CapturedPasses:
    """Runs micro-batches through graphs where it can.

    Args:
        model: the model, on its device.
        precision: returns the autocast context to compute in.
        make_graph: makes an empty graph; by default one of the model's device.
        plain: the eager pass, that graphs are proven against before they are used; `None` for no proof.

    Attributes:
        num_captures: number of passes captured so far.

    Example:
        >>> losses = CapturedPasses(model, nullcontext).run(micro_batch)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        precision: Precision,
        make_graph: Callable[[], Graph] | None = None,
        *,
        plain: Pass | None = None,
    ) -> None:
        """Start without a graph."""
        self._model, self._precision, self._plain = model, precision, plain
        if make_graph is None and model.device.type == "cuda":
            make_graph = CudaGraphs(model.device)
        self._make_graph = make_graph
        self._passes: OrderedDict[tuple[Composition, Shape], CapturedPass] = OrderedDict()
        self._refused: set[Composition] = set()
        self._model_reasons: dict[tuple[int, bool], str | None] = {}
        self._warned: set[str] = set()
        self._has_given_up = False
        self._proven: set[Composition] = set()
        self.num_captures = 0

    def run(self, batch: MuxBatch) -> torch.Tensor | None:
        """Add a micro-batch's gradients to those of its tasks.

        Args:
            batch: a micro-batch whose tensors are on the host.

        Returns:
            `[N]`, the losses as `MuxOutput` has them; `None` where the pass has to be run eagerly, and nothing is
            changed.
        """
        if self._has_given_up:
            return None
        reason = self._reason_against(batch)
        if reason is not None:
            self._warn_once(reason)
            return None
        key = self._composition(batch.task_names), Shape.of(batch)
        if key[0] in self._refused:
            return None
        if key in self._passes:
            self._passes.move_to_end(key)
            if self._passes[key].is_captured:
                return self._passes[key].replay(batch)
        return self._run_first(key, batch)

    def _composition(self, tasks: tuple[str, ...]) -> Composition:
        slabs = [self._model.registry.slab_of(name) for name in tasks]
        for slab in slabs:
            # Before the key is made: binding may lay gradients elsewhere, and a graph of before would add to the old
            # memory.
            slab.bind_gradients()
        bindings = tuple(slab.num_bindings for slab in slabs)
        return Composition(tasks, bindings, self._model.stream.version, self._model.training)

    def _run_first(self, key: tuple[Composition, Shape], batch: MuxBatch) -> torch.Tensor | None:
        """Run a pass that has no graph yet, and capture it where it is time; where that fails, remember and warn."""
        composition, _ = key
        try:
            if key in self._passes or self._plain is None:
                return self._capture(key, batch)
            captured = self._make(key)
            if composition not in self._proven:
                self._prove(reason_against_padding(captured, batch, self._plain, self._dtype()))
                self._proven.add(composition)
            return captured.compute(batch)
        except CannotCaptureError as error:
            self._passes.pop(key, None)
            self._refuse(composition, str(error))
        except Exception as error:  # what is wrong with the pass itself, the eager one will raise
            self._passes.pop(key, None)
            self._refuse(composition, str(error) if isinstance(error, _UnequalError) else _said(error))
            if self._plain is not None:
                # Graphs that nobody has asked for are worth no second try.
                self._has_given_up = True
                self._passes.clear()
        return None

    def _make(self, key: tuple[Composition, Shape]) -> CapturedPass:
        """Keep a new pass under its key; there is no graph of it yet."""
        # Before a new graph takes its memory: graphs of adapters that have moved can never be replayed again.
        self._drop_stale()
        while len(self._passes) >= MAX_PASSES:
            self._passes.popitem(last=False)
        composition, shape = key
        self._passes[key] = CapturedPass(self._model, composition.tasks, shape, self._precision)
        return self._passes[key]

    def _capture(self, key: tuple[Composition, Shape], batch: MuxBatch) -> torch.Tensor:
        """Capture a pass, prove it where nobody has asked for it, and replay it."""
        assert self._make_graph is not None, "the reasons against it were asked for"
        captured = self._passes[key] if key in self._passes else self._make(key)
        captured.capture(batch, self._make_graph())
        self.num_captures += 1
        if self._plain is not None:
            self._prove(reason_against_replay(captured, batch))
        return captured.replay(batch)

    def _prove(self, reason: str | None) -> None:
        if reason is not None:
            raise _UnequalError(reason)

    def _dtype(self) -> torch.dtype:
        """Return what the backbone computes in."""
        device_type = self._model.device.type
        with self._precision():
            has_autocast = torch.is_autocast_enabled(device_type)
            return torch.get_autocast_dtype(device_type) if has_autocast else self._model.backbone.dtype

    def _refuse(self, composition: Composition, reason: str) -> None:
        self._refused.add(composition)
        self._warn_once(reason)

    def _drop_stale(self) -> None:
        """Free the graphs whose adapters or gradients have moved or gone."""
        for key in [key for key in self._passes if not self._is_current(key[0])]:
            del self._passes[key]
        self._refused = {composition for composition in self._refused if self._is_current(composition)}
        self._proven = {composition for composition in self._proven if self._is_current(composition)}

    def _is_current(self, composition: Composition) -> bool:
        if composition.version != self._model.stream.version:
            return False
        bindings = tuple(self._model.registry.slab_of(name).num_bindings for name in composition.tasks)
        return bindings == composition.num_bindings

    def _reason_against(self, batch: MuxBatch) -> str | None:
        if self._make_graph is None:
            return f"there are none on a {self._model.device.type}"
        if batch.input_ids.device.type != "cpu":
            return "a micro-batch did not come from the host"
        if any(batch.target_columns):
            return "rows bring numbers for each token"
        if batch.shared is not None:
            return "rows that begin alike share tokens, others in each step"
        key = self._model.stream.version, self._model.training
        # Kept, as going through all modules takes long, and they change only with the tables or the mode.
        if key not in self._model_reasons:
            self._model_reasons = {key: reason_against(self._model)}
        return self._model_reasons[key]

    def _warn_once(self, reason: str) -> None:
        """Warn, once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"passes run eagerly instead of as CUDA graphs, as {reason}.", stacklevel=2)


def _said(error: Exception) -> str:
    return f"capturing failed with {type(error).__name__}: {error}"


def reason_against(model: MultiTaskPeftModel) -> str | None:
    """Return why no pass of a model can be captured, as far as its modules tell, or `None`.

    Each of them computes slice by slice of the rows of a task, or of a sequence, which differ from step to step.

    Args:
        model: the model, in the mode (training or not) that it will run in.
    """
    objectives = model.objectives.of_all(model.tasks)
    reason = next((objective.eager_reason for objective in objectives if objective.eager_reason), None)
    if reason is not None:
        return reason
    if model.objectives.smoothed(model.tasks):
        return "a task smooths its labels (label_smoothing_factor)"
    if model.noise.alphas:
        return "a task adds noise to its embeddings (neftune_noise_alpha)"
    if encoders_of(model):
        return "a task's prompt stands before each of its sequences"
    if frozen_weight(output_head(model.backbone)[0])[0] is None:
        return "a task adapts the output head, or it is quantised"
    for name, module in model.backbone.named_modules():
        forward = module.__dict__.get("forward")
        reason = forward.reason_against_graphs() if isinstance(forward, MultiplexedForward) else None
        if reason is not None:
            return reason
        if bits_of(module) is not None:
            return f"layers are quantised ({name})"
    return None
