"""`Stream`: what the attached modules need to know about the micro-batch that is in flight.

Adapted layers get no extra arguments from model code, so each holds a reference to its model's one `Stream`: which
rows belong to which task (Dispatch, M §3.2), and where a token stands in its task's global batch (for dropout).
Outside a multiplexed pass the stream is idle, and every attached module behaves as PEFT and transformers wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.kernels import philox
from peft_mux.modeling.key_values import KeyValueStore


class RowSegment(NamedTuple):
    """Consecutive rows of one task.

    Attributes:
        adapter: internal adapter id of the task.
        start: number of the first row.
        end: number of the row after the last one.
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


class AdapterPass(Protocol):
    """One pass of one micro-batch, as the layers of one kind of adapters see it."""

    def update(self, segments: tuple[RowSegment, ...]) -> None:
        """Let a pass of fixed size stand for other rows of the same adapters, in the same memory.

        Args:
            segments: the rows of each adapter, in the same order; a segment may be empty.
        """
        ...

    def reason_against_capture(self) -> str | None:
        """Return a clause that says why a computed pass of fixed size cannot be replayed; `None` where it can."""
        ...


class PassMaker(Protocol):
    """What one kind of adapters keeps for one model, and makes the passes of its layers from."""

    def begin_pass(
        self, segments: tuple[RowSegment, ...], places: torch.Tensor, *, has_fixed_size: bool = False
    ) -> AdapterPass:
        """Return what the layers of this kind need to know of one pass.

        Args:
            segments: the rows of each task.
            places: int64 `[T]`, place of each row in its task's global batch.
            has_fixed_size: whether other rows of the same adapters, up to T of them, will take the place of these.
        """
        ...

    def clear(self) -> None:
        """Forget where adapters lie; called whenever one came, went or moved."""
        ...

    def tells(self, adapter: str) -> bool:
        """Whether all weights of an adapter are in layers that take it out of `Stream.unmet` when they are computed."""
        ...


NO_ADAPTER = ""
"""Adapter id that no layer knows: that of padding, and of rows in a pass without adapters."""

Passes = Mapping[str, Any]
"""The pass of each kind of adapters that is attached, by the kind's name."""

_NO_PASSES: Passes = {}


class Stream:
    """The micro-batch in flight, shared by all attached modules of one model.

    Attributes:
        makers: what makes the passes of a kind of adapters, by the kind's name; for kinds that have tasks in the model.
        version: changes whenever an adapter came, went or moved; what was derived from addresses before is stale.
        passes: the pass of each kind, for layers that see every token; empty while idle or inside `selected_rows`.
        batch: the micro-batch, or `None` while idle.
        segments: rows of each task in the activations that modules see now.
        places: int64 `[rows]`, place of each row in its task's global batch.
        num_rows: rows that modules see now: the tokens, or fewer where tokens are shared and inside `selected_rows`.
        num_attention_calls: how often packed attention ran, since the stream was made.
        num_passes: how often a batch was dispatched; recomputations count.
        key_values: keys and values of long sequences, between the passes of their parts.
        has_adapters: whether rows are bound to the adapters of their tasks; if not, to none (`without_adapters`).
        unmet: adapters that the pass in flight has not come to yet: nothing below needs the gradients of their rows.
            Empty where that is not known.
        lowest_layers: of adapters the number of the lowest layer that has weights of them, in the whole model; 0 where
            rows go all the way down. Known of those that a stage was told of, which does not see the layers below it.
        left_out: layers whose outputs nobody reads now; siblings that are computed with them go on without.

    Args:
        makers: what makes the passes of a kind of adapters, by the kind's name; none by default.
    """

    def __init__(self, makers: Mapping[str, PassMaker] | None = None) -> None:
        """Make an idle stream."""
        self.makers: dict[str, PassMaker] = dict(makers or {})
        self.version = 0
        self.passes: Passes = _NO_PASSES
        self.batch: MuxBatch | None = None
        self.segments: tuple[RowSegment, ...] = ()
        self.places: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self.num_rows = 0
        self.num_attention_calls = 0
        self.num_passes = 0
        self.key_values = KeyValueStore()
        self.has_adapters = True
        self.unmet: frozenset[str] = frozenset()
        self.lowest_layers: dict[str, int] = {}
        self.left_out: frozenset[nn.Module] = frozenset()

    def begin_at_the_bottom(self) -> None:
        """Let the pass in flight stop the gradients of each task's rows at its lowest adapter; before any layer of it.

        Raises:
            AssertionError: outside of a pass.
        """
        assert self.batch is not None, "only a pass can begin"
        adapters = [segment.adapter for segment in self.segments if segment.adapter != NO_ADAPTER]
        self.unmet = frozenset(a for a in adapters if any(maker.tells(a) for maker in self.makers.values()))

    def begin_above(self, first_layer: int) -> None:
        """Do so in a stage: adapters without weights below it are still to come, perhaps in a later stage.

        Args:
            first_layer: number of the lowest layer of the stage.
        """
        self.unmet = self.adapters_above(first_layer, self.segments)

    def adapters_above(self, first_layer: int, segments: Sequence[RowSegment]) -> frozenset[str]:
        """Return the adapters of some rows that have no weights below a layer; none where that is not known.

        Args:
            first_layer: number of the layer.
            segments: rows of each task.
        """
        lowest, least = self.lowest_layers, max(1, first_layer)
        return frozenset(one.adapter for one in segments if lowest.get(one.adapter, 0) >= least)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Let the passes of the `with` block be those of the backbone alone: no layer knows the adapter of a row."""
        before, self.has_adapters = self.has_adapters, False
        try:
            yield
        finally:
            self.has_adapters = before

    @property
    def is_idle(self) -> bool:
        """Whether no multiplexed pass is running."""
        return self.batch is None

    def pass_of(self, kind: str) -> Any:
        """Return the pass of a kind of adapters, by the kind's name; `None` while there is none."""
        return self.passes.get(kind)

    def maker_of(self, kind: str) -> Any:
        """Return what makes the passes of an attached kind of adapters, by the kind's name."""
        return self.makers[kind]

    def clear_tables(self) -> None:
        """Let every kind forget where adapters lie; needed whenever one came, went or moved."""
        # Captured passes compare it, as the addresses that they replay may be others now.
        self.version += 1
        for maker in self.makers.values():
            maker.clear()

    def begin_passes(
        self, segments: tuple[RowSegment, ...], places: torch.Tensor, *, has_fixed_size: bool = False
    ) -> dict[str, AdapterPass]:
        """Return the pass of each attached kind of adapters for given rows; see `PassMaker.begin_pass`."""
        return {
            name: maker.begin_pass(segments, places, has_fixed_size=has_fixed_size)
            for name, maker in self.makers.items()
        }

    @contextmanager
    def reading(
        self,
        batch: MuxBatch,
        adapters: Mapping[str, str],
        passes: Passes | None = None,
        unmet: frozenset[str] = frozenset(),
    ) -> Iterator[Stream]:
        """Dispatch the rows of `batch` for the time of the `with` block.

        Args:
            batch: the micro-batch, its tensors on the model's device.
            adapters: internal adapter id of each task name.
            passes: passes that were made of the same batch before, where activations are recomputed or captured.
            unmet: adapters that the pass had not come to yet when what is recomputed now was first computed.
        """
        # Put back at the end, as a recomputation may run amid the pass of another batch.
        before = self.batch, self.segments, self.places, self.num_rows, self.passes, self.unmet
        # Recomputations count, so that layers see what a pass before has left over.
        self.num_passes += 1
        self.batch, self.unmet = batch, unmet
        self.segments = self.segments_of(batch, batch.computed_offsets, adapters)
        self.places = batch.computed(batch.token_places)
        self.num_rows = batch.num_computed
        # Those of before where there are some: captured launches read their tables, at their addresses.
        self.passes = passes or self.begin_passes(self.segments, self.places)
        try:
            yield self
        finally:
            self.batch, self.segments, self.places, self.num_rows, self.passes, self.unmet = before

    @contextmanager
    def selected_rows(
        self, offsets: tuple[int, ...], places: torch.Tensor, adapters: Mapping[str, str]
    ) -> Iterator[Stream]:
        """Let modules see a selection of rows, sorted by task: pooled sequences, or rows that have a target.

        Args:
            offsets: offsets of the batch's tasks among the selected rows, `N + 1` numbers.
            places: int64 `[rows]`, place of each selected row in its task's global batch.
            adapters: internal adapter id of each task name.
        """
        assert self.batch is not None, "rows can only be selected inside reading()"
        with self._seeing(self.segments_of(self.batch, offsets, adapters), places, offsets[-1]):
            yield self

    @contextmanager
    def read_rows(self, rows: torch.Tensor, offsets: tuple[int, ...]) -> Iterator[None]:
        """Let layers see some of the rows that they see now, sorted by task: those whose outputs are read.

        Args:
            rows: int64 `[R]`, their numbers.
            offsets: where each of the batch's tasks begins among them, `N + 1` numbers.
        """
        assert self.batch is not None, "rows can only be read inside reading()"
        segments, owners = [], iter(self.segments)
        for (first, last), (start, end) in zip(pairwise(self.batch.computed_offsets), pairwise(offsets), strict=True):
            owner = next(owners) if last > first else None
            if owner is not None and end > start:
                segments.append(owner._replace(start=start, end=end))
        places = self.places.index_select(0, rows)
        passes = self.begin_passes(tuple(segments), places)
        with self._seeing(tuple(segments), places, offsets[-1], passes):
            yield

    @contextmanager
    def leaving_out(self, modules: frozenset[nn.Module]) -> Iterator[None]:
        """Let layers be left out where others are computed with them, in the `with` block."""
        self.left_out = modules
        try:
            yield
        finally:
            self.left_out = frozenset()

    @contextmanager
    def only(self, segment: RowSegment) -> Iterator[Stream]:
        """Let modules see the rows of one task alone, out of those that they see now.

        Args:
            segment: one of the stream's `segments`.
        """
        num_rows = segment.end - segment.start
        places = self.places[segment.start : segment.end]
        with self._seeing((segment._replace(start=0, end=num_rows),), places, num_rows):
            yield self

    @contextmanager
    def _seeing(
        self,
        segments: tuple[RowSegment, ...],
        places: torch.Tensor,
        num_rows: int,
        # Tables of the passes in flight are of all tokens; without others of these rows, layers fall back to slices.
        passes: Passes = _NO_PASSES,
    ) -> Iterator[None]:
        before = self.segments, self.places, self.num_rows, self.passes
        self.segments, self.places, self.num_rows, self.passes = segments, places, num_rows, passes
        try:
            yield
        finally:
            self.segments, self.places, self.num_rows, self.passes = before

    def segments_of(
        self, batch: MuxBatch, offsets: tuple[int, ...], adapters: Mapping[str, str]
    ) -> tuple[RowSegment, ...]:
        """Return the rows of each task that has some.

        Args:
            batch: the micro-batch.
            offsets: offsets of the batch's tasks among the rows, `N + 1` numbers.
            adapters: internal adapter id of each task name.
        """
        return tuple(
            RowSegment(adapters[name] if self.has_adapters else NO_ADAPTER, start, end, seed, step)
            for name, start, end, seed, step in zip(
                batch.task_names, offsets[:-1], offsets[1:], batch.task_seeds, batch.task_steps, strict=True
            )
            if end > start
        )
