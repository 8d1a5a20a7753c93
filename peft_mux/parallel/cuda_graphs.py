"""`CapturedPasses`: forward and backward of a pass as one CUDA graph, captured once for each shape and replayed.

A step of small tasks launches thousands of small kernels, and the host may take longer to launch them than the device
to run them; a graph is launched at once. What Python does in a pass, such as hooks of modules, happens when it is
captured and not when it is replayed. Passes that cannot be captured run eagerly, with one warning for each reason.
`benchmarks.gpu` compares replays with eager passes.

A graph replays launches over the same memory, so sizes may not follow the micro-batch: they are rounded up, and the
rest is padding that belongs to no task::

    tokens      a a a b b b b b . . .    the padding is more sequences, of a segment without an adapter
    cu_seqlens  0 3 8 11 11 11           entries that are not used repeat the end: sequences of no token
    targets     0 1 3 4 5 6 10 10        rows that are not used point at the last token, which is always padding

Shape letters: T tokens, S sequences, M targets, N tasks, all with their padding.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from peft_mux.adapters.prompt_kind import encoders_of
from peft_mux.data.batch import MuxBatch, is_chained
from peft_mux.data.packing.passes import round_up
from peft_mux.engine.executor import ChainRunner, RunChain
from peft_mux.engine.work import PassClock
from peft_mux.kernels.attention import MAX_TOKENS
from peft_mux.modeling.adapters.kind import MultiplexedForward
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.rows import Layout
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.backbone.quantized import bits_of
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.heads import output_head
from peft_mux.modeling.objectives.task_objective import MuxOutput
from peft_mux.modeling.stream import NO_ADAPTER, RowSegment, Stream, StreamOrder

MAX_PASSES = 32
"""Graphs that are kept; beyond that, those that were not used for the longest time are dropped."""

AUTO_TOKENS = 2560
"""With `cuda_graphs="auto"`, passes of more tokens run eagerly: they keep a GPU busy while the host launches them."""

TOKEN_STEP = 64
"""Tokens are rounded up to a multiple of this, or of a 32nd to a 16th of them if that is more."""

_TARGET_STEPS = 4
"""Steps from one power of two to the next in which targets are rounded up: each one costs a row of logits."""

_LEAST_TARGETS = 16
_BY_TOKEN = ("input_ids", "position_ids", "labels", "token_places")
_NO_TASK = -1
_ALIGNMENT = 16

_NUM_WARM_UPS = 2
"""The first one builds tables, compiles kernels and settles groups of layers; the second one is as captured."""

Precision = Callable[[], AbstractContextManager[object]]
"""Returns the autocast context to compute in."""


class CannotCaptureError(Exception):
    """A pass does something that no graph can repeat, or finds no room; the message is a clause that says what."""


class CapturedPasses(ChainRunner):
    """Runs micro-batches through graphs if it can.

    Args:
        model: the model, on its device.
        precision: returns the autocast context to compute in.
        make_graph: makes an empty graph, which has the methods of `CudaGraph`; by default one of the model's device.
        is_auto: only capture passes of at most `AUTO_TOKENS` tokens whose shape has come before, while there is room,
            so that captures never replace one another; others run eagerly.

    Attributes:
        num_captures: number of passes captured so far.
        keeps_memory: whether the graphs keep memory: yes.

    Example:
        >>> losses = CapturedPasses(model, nullcontext).run(micro_batch)  # doctest: +SKIP
    """

    keeps_memory = True

    def __init__(
        self,
        model: MultiTaskPeftModel,
        precision: Precision,
        make_graph: Callable[[], CudaGraph] | None = None,
        *,
        is_auto: bool = False,
    ) -> None:
        self._model, self._precision, self._is_auto = model, precision, is_auto
        self._make_graph = make_graph or (self._graph_in_pool if model.device.type == "cuda" else None)
        self._pool_and_stream: tuple[Any, torch.cuda.Stream] | None = None
        self._passes: OrderedDict[tuple[Composition, Shape], CapturedPass] = OrderedDict()
        self._refused: set[Composition] = set()
        self._seen: set[tuple[Composition, Shape]] = set()
        self._order = StreamOrder(lambda name: model.registry.slab_of(name).number, self._has_gradients)
        self._least: dict[tuple[Composition, int], Shape] = {}
        self._model_reasons: dict[tuple[int, bool], str | None] = {}
        self._warned: set[str] = set()
        self.num_captures = 0

    def run_chains(
        self, chains: Sequence[Sequence[MuxBatch]], run_chain: RunChain, clock: PassClock
    ) -> Iterator[tuple[MuxBatch, MuxOutput]]:
        """Run the chains of a step; replay passes that are no part of a longer chain."""
        for chain in chains:
            with clock.timing(chain):
                losses = None if is_chained(chain) else self.run(chain[0])
                outputs = run_chain(chain) if losses is None else [MuxOutput(losses, chain[0].task_names)]
            yield from zip(chain, outputs, strict=True)

    def run(self, batch: MuxBatch) -> torch.Tensor | None:
        """Add a micro-batch's gradients to those of its tasks.

        Args:
            batch: a micro-batch whose tensors are on the host.

        Returns:
            `[N]`, the losses as `MuxOutput` has them; `None` if the pass must run eagerly, and nothing is changed.
        """
        if self._is_auto and batch.num_tokens > AUTO_TOKENS:
            return None
        reason = self._reason_against(batch)
        if reason is None:
            present = batch.task_names
            batch = _with_tasks(batch, self._order.joined(present))
            slabs = [self._model.registry.slab_of(name) for name in batch.task_names]
            for slab in slabs:
                # Before the key is made: binding may move gradients, and an earlier graph would add to the old memory.
                slab.bind_gradients()
            bindings = tuple(slab.num_bindings for slab in slabs)
            composition = Composition(batch.task_names, bindings, self._model.stream.version, self._model.training)
            if composition in self._refused:
                return None
            shape = self._widened(Shape.of(batch), composition)
            key = composition, shape
            if self._is_auto and key not in self._passes and not self._is_worth_capturing(key):
                return None
            try:
                if key not in self._passes:
                    self._passes[key] = self._capture(composition, key[1], batch)
            except CannotCaptureError as error:
                reason = str(error)
            except Exception as error:  # the eager pass will raise what is wrong with the pass itself
                reason = f"capturing failed with {type(error).__name__}: {error}"
            else:
                self._passes.move_to_end(key)
                losses = self._passes[key].replay(batch)
                return losses if present == batch.task_names else _at(losses, batch.task_names, present)
            self._refused.add(composition)
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"passes run eagerly instead of as CUDA graphs, as {reason}.", stacklevel=2)
        return None

    def _capture(self, composition: Composition, shape: Shape, batch: MuxBatch) -> CapturedPass:
        assert self._make_graph is not None, "the reasons against it were asked for"
        self._drop_stale()  # before a new graph takes its memory
        while len(self._passes) >= MAX_PASSES:
            self._passes.popitem(last=False)
        captured = CapturedPass(self._model, composition.tasks, shape, self._precision)
        captured.capture(batch, self._make_graph())
        self.num_captures += 1
        return captured

    def _is_worth_capturing(self, key: tuple[Composition, Shape]) -> bool:
        """Return whether a shape has come before, and no graph must be dropped for it."""
        if key not in self._seen:
            self._seen.add(key)
            return False
        if len(self._passes) >= MAX_PASSES:
            self._drop_stale()
        return len(self._passes) < MAX_PASSES

    def _drop_stale(self) -> None:
        """Drop what belongs to adapters or gradients that have moved: such graphs can never be replayed."""
        for key in [key for key in self._passes if not self._is_current(key[0])]:
            del self._passes[key]
        self._refused = {composition for composition in self._refused if self._is_current(composition)}
        self._seen = {key for key in self._seen if self._is_current(key[0])}
        self._least = {key: shape for key, shape in self._least.items() if self._is_current(key[0])}

    def _widened(self, shape: Shape, composition: Composition) -> Shape:
        """Return a shape as wide as earlier ones of as many tokens: some padding costs less than another graph.

        Sequences without tokens, and a bound that no sequence reaches, cost nothing whatever the number of tokens is.
        """
        least = self._least.setdefault((composition, shape.num_tokens), shape)
        earlier = [shape_before for (tasks, _), shape_before in self._least.items() if tasks == composition]
        wide = shape._replace(
            num_targets=max(shape.num_targets, least.num_targets),
            num_sequences=max(shape.num_sequences, *(shape_before.num_sequences for shape_before in earlier)),
            longest=max(shape.longest, *(shape_before.longest for shape_before in earlier)),
        )
        self._least[composition, shape.num_tokens] = wide
        return wide

    def _has_gradients(self, name: str) -> bool:
        if name not in self._model.tasks:
            return False
        return all(page.values.grad is not None for page in self._model.registry.slab_of(name).pages)

    def _is_current(self, composition: Composition) -> bool:
        if composition.version != self._model.stream.version:
            return False
        slabs = map(self._model.registry.slab_of, composition.tasks)
        return composition.num_bindings == tuple(slab.num_bindings for slab in slabs)

    def _graph_in_pool(self) -> CudaGraph:
        """Return an empty graph; the first call makes the pool and the stream that all graphs share."""
        if self._pool_and_stream is None:
            self._pool_and_stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._model.device)
        return CudaGraph(*self._pool_and_stream)

    def _reason_against(self, batch: MuxBatch) -> str | None:
        if self._make_graph is None:
            return f"there are none on a {self._model.device.type}"
        if batch.input_ids.device.type != "cpu":
            return "a micro-batch did not come from the host"
        if any(batch.target_columns) or batch.token_type_ids is not None:
            return "rows bring numbers for each token"
        if batch.shared is not None:
            return "rows with a common prefix share tokens, different ones in each step"
        key = self._model.stream.version, self._model.training
        # Kept, as going through all modules takes long, and they change only with the tables or the mode.
        if key not in self._model_reasons:
            self._model_reasons = {key: reason_against(self._model)}
        return self._model_reasons[key]


def reason_against(model: MultiTaskPeftModel) -> str | None:
    """Return why no pass of a model can be captured, as far as its modules tell, or `None`.

    Each reason is computed slice by slice of the rows of a task, or of a sequence, which differ from step to step.

    Args:
        model: the model, in the mode (training or not) that it will run in.
    """
    objectives = model.objectives
    reasons = (objectives.of(name).eager_reason(objectives.args_of(name)) for name in model.tasks)
    reason = next(filter(None, reasons), None)
    if reason is not None:
        return reason
    if model.noise.alphas:
        return "a task adds noise to its embeddings (neftune_noise_alpha)"
    if model.router_loss.coefficients:
        return "a task balances routers (router_aux_loss_coef)"
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


class Composition(NamedTuple):
    """What is written into a graph in addition to its shape.

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


class Shape(NamedTuple):
    """Sizes of a captured pass; micro-batches of one shape share a graph.

    Attributes:
        num_tokens: T, number of tokens; at least one of them is padding.
        num_sequences: S, number of sequences; the last ones are the padding, in short rows.
        num_targets: M, number of targets.
        longest: number of tokens that no sequence exceeds, the padding included.
    """

    num_tokens: int
    num_sequences: int
    num_targets: int
    longest: int

    @classmethod
    def of(cls, batch: MuxBatch) -> Shape:
        """Return the shape that a micro-batch is padded to."""
        num_targets = max(batch.target_offsets[-1], 1)
        # Fine steps where there are few, so that little is padding and yet few sizes occur.
        target_step = max(_power_of_two(num_targets) // 2 // _TARGET_STEPS, _LEAST_TARGETS)
        # One more than there are: unused targets point at the last token, which must belong to no task.
        least_tokens = batch.num_tokens + 1
        token_step = max(TOKEN_STEP, _power_of_two(least_tokens) // 32)
        return cls(
            num_tokens=round_up(least_tokens, token_step),
            num_sequences=_power_of_two(batch.num_sequences + -(-token_step // MAX_TOKENS)),
            num_targets=round_up(num_targets, target_step),
            longest=_power_of_two(max(*batch.sequence_lengths, MAX_TOKENS)),
        )


def _with_tasks(batch: MuxBatch, names: tuple[str, ...]) -> MuxBatch:
    """Return a micro-batch whose host-side fields name more tasks, which have no rows.

    Args:
        batch: the micro-batch.
        names: its tasks in their order, and others in between.
    """
    if names == batch.task_names:
        return batch
    numbers = {name: number for number, name in enumerate(batch.task_names)}
    task_offsets, target_offsets, sequence_offsets = [0], [0], [0]
    for name in names:
        after = numbers[name] + 1 if name in numbers else None
        for padded, offsets in (
            (task_offsets, batch.task_offsets),
            (target_offsets, batch.target_offsets),
            (sequence_offsets, batch.sequence_offsets),
        ):
            padded.append(padded[-1] if after is None else offsets[after])
    return replace(
        batch,
        task_names=names,
        task_offsets=tuple(task_offsets),
        target_offsets=tuple(target_offsets),
        sequence_offsets=tuple(sequence_offsets),
        task_seeds=tuple(batch.task_seeds[numbers[name]] if name in numbers else 0 for name in names),
        task_steps=tuple(batch.task_steps[numbers[name]] if name in numbers else 0 for name in names),
        loss_weights=tuple(batch.loss_weights[numbers[name]] if name in numbers else 0.0 for name in names),
    )


def _at(losses_N: torch.Tensor, names: tuple[str, ...], present: tuple[str, ...]) -> torch.Tensor:
    """Return the losses of the tasks that are present, without waiting for the device."""
    places = torch.tensor([names.index(name) for name in present])
    places = places.pin_memory() if losses_N.is_cuda else places
    return losses_N[places.to(losses_N.device, non_blocking=True)]


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


class CapturedPass:
    """One graph, and all memory that its launches read and write.

    Args:
        model: the model, on its device; the gradients of the tasks are bound.
        tasks: names of the N tasks, in stream order.
        shape: sizes that the micro-batches are padded to.
        precision: returns the autocast context to compute in.
    """

    def __init__(self, model: MultiTaskPeftModel, tasks: tuple[str, ...], shape: Shape, precision: Precision) -> None:
        """Allocate the inputs; nothing is captured yet."""
        self._model, self._precision = model, precision
        self._graph: CudaGraph | None = None
        self._inputs = StaticInputs(shape, tasks, model.device)
        self._adapters = [model.adapter_of(name) for name in tasks]
        self._slabs = [model.registry.slab_of(name) for name in tasks]
        rows, places = self._segments(self._inputs.batch), self._inputs.batch.token_places
        self._passes = model.stream.begin_passes(rows, places, has_fixed_size=True)
        self._attention = _FixedAttention(model.stream, self._inputs.batch, shape.longest)
        self._losses_N = torch.zeros(len(tasks), device=model.device)
        self._task_N = torch.arange(len(tasks), device=model.device)

    def capture(self, batch: MuxBatch, graph: CudaGraph) -> None:
        """Record the pass into an empty graph; gradients stay as they are.

        Args:
            batch: a micro-batch of the same tasks and shape, on the host, to warm up with.
            graph: the graph.

        Raises:
            CannotCaptureError: if the pass depends on more than its inputs' contents.
        """
        # Warming up runs real backwards, whose gradients would otherwise count in the step in addition to the replay's.
        gradients = [page.values.grad for slab in self._slabs for page in slab.pages if page.values.grad is not None]
        before = [gradient.clone() for gradient in gradients]
        try:
            self._fill(batch)
            graph.warm_up(self._compute)
            # After the warm-up: only a pass that has run knows which of its adapters kernels serve. Others are computed
            # slice by slice of sizes that change.
            for adapter_pass in self._passes.values():
                reason = adapter_pass.reason_against_capture()
                if reason is not None:
                    raise CannotCaptureError(reason)
            graph.capture(self._compute)
        finally:
            for gradient, copy in zip(gradients, before, strict=True):
                gradient.copy_(copy)
        self._graph = graph

    def replay(self, batch: MuxBatch) -> torch.Tensor:
        """Add a micro-batch's gradients to those of its tasks, and return its losses `[N]`, without waiting.

        Args:
            batch: a micro-batch of the same tasks and shape, on the host.
        """
        assert self._graph is not None, "it was captured"
        self._fill(batch)
        self._graph.replay()
        return self._losses_N.clone()  # the next replay overwrites them

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
        """Run the pass that is captured: forward, losses, backward, with the copies of weights as the step has them."""
        with self._precision():
            terms_M = self._model.target_losses(self._inputs.batch, self._passes, self._attention)
            # Losses of other tasks are left out, not multiplied by 0, which would pass on a NaN.
            own_NM = self._inputs.owner_M == self._task_N[:, None]
            losses_N = torch.where(own_NM, terms_M * self._inputs.weight_M, 0.0).sum(dim=1)
        losses_N.sum().backward()
        self._losses_N.copy_(losses_N.detach())


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
        # With longer rows all go through flash attention: which of them are short differs from replay to replay.
        self.has_short_rows, self.long_rows = longest <= MAX_TOKENS, None

    def layout(self, *, is_causal: bool) -> Layout:
        """Refuse: another layout of sequences is another series of launches.

        Raises:
            CannotCaptureError: always.
        """
        raise CannotCaptureError("attention is computed by groups of sequences of equal length")


class StaticInputs:
    """The tensors that a captured pass reads, for one shape and one set of tasks, in one buffer on the device.

    Args:
        shape: sizes that micro-batches are padded to.
        task_names: names of the N tasks, in stream order.
        device: device of the model.

    Attributes:
        shape: sizes that micro-batches are padded to.
        batch: the tensors as a micro-batch. Of its fields on the host, only the number of tokens and the names are
            true, as nothing else stays the same.
        owner_M: int64 `[M]`, index of each target's task.
        weight_M: float32 `[M]`, the factor of each target's loss.
    """

    def __init__(self, shape: Shape, task_names: tuple[str, ...], device: torch.device) -> None:
        self.shape = shape
        sizes = [(name, shape.num_tokens, torch.int64) for name in _BY_TOKEN]
        sizes += [("target_rows", shape.num_targets, torch.int64), ("owners", shape.num_targets, torch.int64)]
        sizes += [("weights", shape.num_targets, torch.float32), ("cu_seqlens", shape.num_sequences + 1, torch.int32)]
        self._slices: dict[str, tuple[int, int, torch.dtype]] = {}
        num_bytes = 0
        for name, count, dtype in sizes:
            end = num_bytes + count * dtype.itemsize
            self._slices[name] = num_bytes, end, dtype
            # A view of another dtype must start at a multiple of its own size.
            num_bytes = round_up(end, _ALIGNMENT)
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        parts = self._views(self._buffer)
        self.owner_M, self.weight_M = parts["owners"], parts["weights"]
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
        )

    def fill(self, batch: MuxBatch) -> None:
        """Write a micro-batch of the same tasks and shape, in one asynchronous copy to the device.

        All padding tokens have id, place and position 0, which every model knows, and label 0, which every head has.

        Args:
            batch: a micro-batch whose tensors are on the host.
        """
        # One buffer and one copy: a copy for each tensor would cost as many launches, which graphs are there to save.
        host = torch.zeros(self._buffer.numel(), dtype=torch.uint8)
        parts = self._views(host)
        for name in _BY_TOKEN:
            parts[name][: batch.num_tokens] = getattr(batch, name).reshape(-1)
        num_targets = batch.target_offsets[-1]
        counts = torch.tensor(batch.target_offsets).diff()
        owners = torch.arange(len(counts)).repeat_interleave(counts, output_size=num_targets)
        parts["target_rows"].fill_(self.shape.num_tokens - 1)
        parts["target_rows"][:num_targets] = batch.target_rows
        parts["owners"].fill_(_NO_TASK)
        parts["owners"][:num_targets] = owners
        parts["weights"][:num_targets] = torch.tensor(batch.loss_weights)[owners]
        parts["cu_seqlens"].fill_(self.shape.num_tokens)
        parts["cu_seqlens"][: batch.num_sequences + 1] = batch.cu_seqlens
        padding = torch.arange(batch.num_tokens, self.shape.num_tokens, MAX_TOKENS)[1:]
        parts["cu_seqlens"][batch.num_sequences + 1 :][: len(padding)] = padding
        # Pinned memory of its own every time: it is reused once the copy is done, which may be after the next step.
        self._buffer.copy_(host.pin_memory() if self._buffer.is_cuda else host, non_blocking=True)

    def _views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in a buffer, by name."""
        return {name: buffer[begin:end].view(dtype) for name, (begin, end, dtype) in self._slices.items()}


class CudaGraph:
    """One graph; graphs that share a pool may be replayed in any order, as nothing in it outlives a replay.

    Args:
        pool: memory pool in which its intermediate results lie.
        stream: stream to capture on; it is used for nothing else, so memory that is allocated there is safe from reuse.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run on the stream that will capture, as libraries set themselves up for each stream."""
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
        """Record what a call launches, without launching it.

        Raises:
            RuntimeError: if it does what cannot be recorded, such as waiting for the device.
        """
        # The outer block restores the stream even if ending the capture raises. Other threads may call CUDA meanwhile:
        # new tasks arrive on them.
        with torch.cuda.stream(self._stream):
            with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()

    def replay(self) -> None:
        """Launch what was recorded on the current stream, without waiting."""
        self._graph.replay()
