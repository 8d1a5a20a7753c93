"""Keys and values of long sequences between the passes of their parts (M §3.5: KV reuse across chunks).

A part of a sequence attends to the keys and values of all parts before it. What a layer computed them with belongs to
the graph of an earlier pass, so a later pass reads detached copies, leaves of its own graph. Gradients then gather in
the leaves, and the earlier pass takes them up in its own backward::

    part 0   x0 -> k0, v0 ..................... dk0, dv0 -> dx0     third
                    | detached                    ^ what the leaves have gathered
    part 1   x1 -> k1, v1, reads leaves of 0 .. dk1, dv1 -> dx1     second
                    | detached                    ^
    part 2   x2 -> reads leaves of 0 and 1                          first backward

Keys are kept as attention sees them, after rotary embedding. A leaf shares its memory with what the pass computed.

Shape letters: G key-value heads, L tokens of a part, C channels of a head.
"""

# MERGED: `Stream`: what the attached modules need to know about the micro-batch that is in flight.
# MERGED: Adapted layers get no extra arguments from model code, so each holds a reference to its model's one
# MERGED: `Stream`: which
# MERGED: rows belong to which task (Dispatch, M §3.2), and where a token stands in its task's global batch (for
# MERGED: dropout).
# MERGED: Outside a multiplexed pass the stream is idle, and every attached module behaves as PEFT and transformers
# MERGED: wrote it.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from peft_mux.data.batch import MuxBatch, SequencePart
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels import philox


class Kept(NamedTuple):
    """Keys and values of one part in one layer.

    Attributes:
        layer: name of the attention module.
        part: the tokens of a sequence that they are of.
        computed: keys and values `[G, L, C]` in the graph of their pass.
        leaves: the same values, as later parts read them.
    """

    layer: str
    part: SequencePart
    computed: tuple[torch.Tensor, torch.Tensor]
    leaves: tuple[torch.Tensor, torch.Tensor]

    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what later parts add to the backward of this part's pass: tensors and their gradients."""
        pairs = zip(self.computed, self.leaves, strict=True)
        return [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]


class KeyValueStore:
    """Holds, for each layer of a process, what later parts of unfinished sequences will read.

    From the forward of a part to its backward; without gradients, to the forward of the last part.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._kept: dict[tuple[str, tuple[str, int]], dict[int, Kept]] = {}
        self._recorded: list[Kept] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values that are held."""
        leaves = [leaf for parts in self._kept.values() for kept in parts.values() for leaf in kept.leaves]
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves)

    @contextmanager
    def recording(self) -> Iterator[list[Kept]]:
        """Note what a forward pass keeps, in a list that its backward needs, and `release` after it."""
        before, self._recorded = self._recorded, []
        try:
            yield self._recorded
        finally:
            self._recorded = before

    def keep(self, layer: str, part: SequencePart, keys_GLC: torch.Tensor, values_GLC: torch.Tensor) -> None:
        """Keep what later parts will read.

        A pass whose activations are recomputed has kept its keys and values already; then nothing happens.

        Args:
            layer: name of the attention module.
            part: a part that more of its sequence follows.
            keys_GLC: keys `[G, L, C]` after rotary embedding.
            values_GLC: values `[G, L, C']`.

        Raises:
            UnsupportedModelError: if a layer attends twice in one pass.
            RuntimeError: if gradients are wanted, and nobody records what their backward needs.
        """
        parts = self._kept.setdefault((layer, part.sequence), {})
        # Nobody records while activations are recomputed: what the first forward kept still holds.
        if self._recorded is None and torch.is_grad_enabled():
            if part.start in parts:
                return
            raise RuntimeError(
                f'a part of a sequence of task "{part.task}" ran outside a chain, so that gradients would not reach it;'
                " allowed: chains of parts that peft_mux.engine.executor runs, or passes under torch.no_grad()."
            )
        # Kept once more under the same name, the second attention's keys would take the place of the first's.
        if any(kept.layer == layer and kept.part == part for kept in self._recorded or ()):
            raise UnsupportedModelError(
                f"{layer} attends more than once in a pass, so its keys and values cannot be told apart; allowed: one"
                " attention a layer. Set split_long_sequences=False."
            )
        if part.start == 0:
            parts.clear()  # a step that failed may have left something
        computed = keys_GLC, values_GLC
        leaves = _leaf(keys_GLC), _leaf(values_GLC)
        parts[part.start] = kept = Kept(layer, part, computed if torch.is_grad_enabled() else leaves, leaves)
        if self._recorded is not None:
            self._recorded.append(kept)

    def earlier(
        self, layer: str, part: SequencePart, window: int | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values `[G, L, C]` of the parts before one, in order; within its window, if it has one.

        Args:
            layer: name of the attention module.
            part: the part whose queries read them.
            window: a query sees this many tokens, itself included; `None` for all.
        """
        parts = self._kept.get((layer, part.sequence), {})
        earlier = [parts[start] for start in sorted(parts) if start < part.start]
        # A gap would be a wrong result and no error: attention cannot know that keys are missing.
        assert [0, *(kept.part.end for kept in earlier)] == [*(kept.part.start for kept in earlier), part.start], (
            f"parts before token {part.start} of a sequence of {part.task} are missing in {layer}"
        )
        # The oldest key that the part's first query sees; later queries do not see as far back.
        first = 0 if window is None else max(0, part.start - window + 1)
        return [
            (keys[:, max(0, first - kept.part.start) :], values[:, max(0, first - kept.part.start) :])
            for kept in earlier
            if kept.part.end > first
            for keys, values in (kept.leaves,)
        ]

    def forget(self, layer: str, part: SequencePart) -> None:
        """Free what a layer holds of a sequence; where there is no backward, its last part is the last reader."""
        self._kept.pop((layer, part.sequence), None)

    def release(self, recorded: list[Kept]) -> None:
        """Free what a pass has kept, after its backward; all later parts are done then.

        Args:
            recorded: the list of `recording`; it is emptied.
        """
        for kept in recorded:
            parts = self._kept.get((kept.layer, kept.part.sequence), {})
            # Chains run their backwards in reverse, so parts go from the last to the first.
            parts.pop(kept.part.start, None)
            if not parts:
                self.forget(kept.layer, kept.part)
        recorded.clear()

    def clear(self) -> None:
        """Free everything: a step that failed leaves its chains unfinished."""
        self._kept.clear()


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    # Detached, so that the backward of a later part ends here and does not run through the graph of an earlier pass.
    return tensor.detach().requires_grad_(tensor.requires_grad)


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
