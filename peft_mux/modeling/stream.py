"""`Stream`: the micro-batch in flight, as attached layers read it. `KeyValueStore`: keys and values between passes.

Adapted layers get no extra arguments from model code, so each of them holds a reference to its model's one `Stream`. It
says which rows belong to which task (Dispatch, M §3.2) and which place a token has in its task's global batch (for
dropout). Between two passes the stream is idle, and every attached module behaves as PEFT and transformers wrote it.

`KeyValueStore` connects the parts of a long sequence (M §3.5: KV reuse across chunks). A part attends to the keys and
values of all parts before it, which belong to the graphs of earlier passes. So a later pass reads detached copies,
leaves of its own graph; gradients gather there, and the earlier pass reads them in its own backward::

    part 0   x0 -> k0, v0 ..................... dk0, dv0 -> dx0     third
                    | detached                    ^ what the leaves have gathered
    part 1   x1 -> k1, v1, reads leaves of 0 .. dk1, dv1 -> dx1     second
                    | detached                    ^
    part 2   x2 -> reads leaves of 0 and 1                          first backward

Keys are kept as attention sees them, after rotary embedding. A leaf shares its memory with what the pass computed.

`StreamOrder` includes tasks without rows in a pass as empty segments. With rows of unequal length, almost every pass
holds another set of tasks, and tables of kernels and CUDA graphs, which are made for a set of tasks, would be made
again and again.

Shape letters: T tokens, N tasks, G key-value heads, L tokens of a part, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from peft_mux.data.batch import MuxBatch, SequencePart
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels import philox


@contextmanager
def temporary_attributes(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of one object in the `with` block, and restore its previous own attributes afterwards.

    On a module they hide its methods and submodules of these names.
    """
    attributes = vars(target)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)


@contextmanager
def in_mode(model: Any, *, training: bool) -> Iterator[None]:
    """Let a model train or evaluate in the `with` block, and restore its mode afterwards."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)


class Kept(NamedTuple):
    """Keys and values of one part in one layer.

    Attributes:
        layer: name of the attention module.
        part: the tokens of a sequence that they belong to.
        computed: keys and values `[G, L, C]` in the graph of their pass.
        leaves: the same values, as later parts read them.
    """

    layer: str
    part: SequencePart
    computed: tuple[torch.Tensor, torch.Tensor]
    leaves: tuple[torch.Tensor, torch.Tensor]

    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors, with their gradients, that later parts add to the backward of this part's pass."""
        pairs = zip(self.computed, self.leaves, strict=True)
        return [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]


class KeyValueStore:
    """Holds, for each layer of a process, what later parts of unfinished sequences will read.

    An entry lives from the forward of its part to the backward; without gradients, to the forward of the last part.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[str, int]], dict[int, Kept]] = {}
        self._recorded: list[Kept] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values that are held."""
        leaves = [leaf for parts in self._kept.values() for kept in parts.values() for leaf in kept.leaves]
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves)

    @contextmanager
    def recording(self) -> Iterator[list[Kept]]:
        """Record what a forward pass keeps in a list for its backward; `release` it afterwards."""
        recorded: list[Kept] = []
        with temporary_attributes(self, _recorded=recorded):
            yield recorded

    def keep(self, layer: str, part: SequencePart, keys_GLC: torch.Tensor, values_GLC: torch.Tensor) -> None:
        """Keep the keys and values of a part that more of its sequence follows.

        A pass whose activations are recomputed has kept them already; then nothing happens.

        Raises:
            UnsupportedModelError: if a layer attends twice in one pass.
            RuntimeError: if gradients are needed and no list records what their backward needs.
        """
        parts = self._kept.setdefault((layer, part.sequence), {})
        # While activations are recomputed nothing is recorded: what the first forward kept is still valid.
        if self._recorded is None and torch.is_grad_enabled():
            if part.start in parts:
                return
            raise RuntimeError(
                f'a part of a sequence of task "{part.task}" ran outside a chain, so gradients would not reach it. '
                "Use the chains of parts that peft_mux.engine.executor runs, or torch.no_grad()."
            )
        # The second attention's keys would replace those of the first one.
        if any(kept.layer == layer and kept.part == part for kept in self._recorded or ()):
            raise UnsupportedModelError(
                f"{layer} must attend once per pass, because otherwise its keys and values cannot be separated. Set "
                "split_long_sequences=False."
            )
        if part.start == 0:
            parts.clear()  # a step that failed may have left something
        computed = keys_GLC, values_GLC
        # Detached, so that the backward of a later part ends here and not in the graph of an earlier pass.
        keys, values = (tensor.detach().requires_grad_(tensor.requires_grad) for tensor in computed)
        kept = Kept(layer, part, computed if torch.is_grad_enabled() else (keys, values), (keys, values))
        parts[part.start] = kept
        if self._recorded is not None:
            self._recorded.append(kept)

    def earlier(
        self, layer: str, part: SequencePart, window: int | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values `[G, L, C]` of the parts before one, in order.

        Args:
            layer: name of the attention module.
            part: the part whose queries read them.
            window: a query sees this many tokens, itself included; keys outside are left out. `None` for all.
        """
        parts = self._kept.get((layer, part.sequence), {})
        earlier = [parts[start] for start in sorted(parts) if start < part.start]
        # A gap would give a wrong result without an error: attention cannot know that keys are missing.
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
        """Free what a layer holds of a sequence: without a backward pass, its last part is the last reader."""
        self._kept.pop((layer, part.sequence), None)

    def release(self, recorded: list[Kept]) -> None:
        """Free what a pass has kept, after its backward; `recorded` is the list of `recording`, which is emptied."""
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


NO_ADAPTER = ""
"""Adapter id that no layer knows: the one of padding, and of rows in a pass without adapters."""

Passes = Mapping[str, Any]
"""The pass of each kind of adapters that is attached, by the kind's name."""

_NO_PASSES: Passes = {}


class Stream:
    """The micro-batch in flight, shared by all attached modules of one model.

    Attributes:
        makers: what makes the passes of a kind of adapters (`peft_mux.modeling.adapters.lora.lora_pass.LoraGroups`), by
            the kind's name; for kinds that have tasks in the model.
        version: changes whenever an adapter came, went or moved; what was derived from addresses before is stale.
        batch: the micro-batch, or `None` while idle.
        segments: rows of each task in the activations that modules see now.
        places: int64 `[rows]`, place of each row in its task's global batch.
        num_rows: rows that modules see now: the tokens, or fewer where tokens are shared or rows selected.
        passes: the pass of each kind of adapters, for layers that see these rows; empty while idle or where layers
            compute a selection of rows slice by slice.
        num_attention_calls: how often packed attention ran, since the stream was made.
        num_passes: how often a batch was dispatched; recomputations count.
        key_values: keys and values of long sequences, between the passes of their parts.
        bound: tasks whose rows are bound to their adapters, the rows of others to none; `None` for all tasks.
        adapters_not_reached: adapters that no layer of the pass in flight has applied yet: nothing below needs the
            gradients of their rows. Empty where that is not known.
        lowest_layers: number of the lowest layer, in the whole model, that has weights of an adapter; 0 where rows go
            all the way down. A pipeline stage, which does not see the layers below it, gets these numbers.
        routing: what the routers of this pass write into (`RoutedTokens`); `None` if no balancing loss is wanted.
    """

    def __init__(self) -> None:
        self.makers: dict[str, Any] = {}
        self.version = 0
        self.batch: MuxBatch | None = None
        self.segments: tuple[RowSegment, ...] = ()
        self.places: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self.num_rows = 0
        self.passes: Passes = _NO_PASSES
        self.num_attention_calls = 0
        self.num_passes = 0
        self.key_values = KeyValueStore()
        self.bound: Collection[str] | None = None
        self.adapters_not_reached: frozenset[str] = frozenset()
        self.lowest_layers: dict[str, int] = {}
        self.routing: Any = None

    @property
    def is_idle(self) -> bool:
        """Whether no multiplexed pass is running."""
        return self.batch is None

    # ------------------------------------------------------------------ a pass

    def reading(
        self,
        batch: MuxBatch,
        adapters: Mapping[str, str],
        passes: Passes | None = None,
        not_reached: frozenset[str] = frozenset(),
        routing: Any = None,
    ) -> AbstractContextManager[None]:
        """Dispatch the rows of `batch` for the time of the `with` block.

        Args:
            batch: the micro-batch, its tensors on the model's device.
            adapters: internal adapter id of each task name.
            passes: passes that were made of the same batch before, where activations are recomputed or captured.
            not_reached: `adapters_not_reached` when what is recomputed now was first computed.
            routing: what the routers of the pass write into.
        """
        # Recomputations count, so that layers see what a pass before has left over.
        self.num_passes += 1
        segments = self.segments_of(batch, batch.computed_offsets, adapters)
        places = batch.computed(batch.token_places)
        # Restored at the end, as a recomputation may run during another batch's pass.
        return temporary_attributes(
            self,
            batch=batch,
            segments=segments,
            places=places,
            num_rows=batch.num_computed,
            # Given ones where there are any: captured launches read their tables, at their addresses.
            passes=passes or self.begin_passes(segments, places),
            adapters_not_reached=not_reached,
            routing=routing,
        )

    def segments_of(
        self, batch: MuxBatch, offsets: Sequence[int], adapters: Mapping[str, str]
    ) -> tuple[RowSegment, ...]:
        """Return the rows of each task that has some.

        Args:
            batch: the micro-batch.
            offsets: offsets of the batch's tasks among the rows, `N + 1` numbers.
            adapters: internal adapter id of each task name.
        """
        bound = adapters if self.bound is None else self.bound
        return tuple(
            RowSegment(adapters[name] if name in bound else NO_ADAPTER, start, end, seed, step)
            for name, start, end, seed, step in zip(
                batch.task_names, offsets[:-1], offsets[1:], batch.task_seeds, batch.task_steps, strict=True
            )
            if end > start
        )

    def begin_passes(
        self, segments: tuple[RowSegment, ...], places: torch.Tensor, *, has_fixed_size: bool = False
    ) -> dict[str, Any]:
        """Return the pass of each attached kind of adapters for given rows; see `LoraPass`."""
        return {
            name: maker.begin_pass(segments, places, has_fixed_size=has_fixed_size)
            for name, maker in self.makers.items()
        }

    def clear_tables(self) -> None:
        """Make every kind drop the places of adapters; needed when one is added, removed or moved."""
        # Captured passes compare it, as the addresses that they replay may be others now.
        self.version += 1
        for maker in self.makers.values():
            maker.clear()

    def without_adapters(self, *, but: Collection[str] = ()) -> AbstractContextManager[None]:
        """Run the passes of the `with` block through the backbone only: no layer applies an adapter.

        Args:
            but: tasks whose rows keep their adapters.
        """
        return temporary_attributes(self, bound=but)

    # ----------------------------------------------------- rows of a pass

    def selected_rows(
        self, offsets: Sequence[int], places: torch.Tensor, adapters: Mapping[str, str]
    ) -> AbstractContextManager[None]:
        """Let modules see a selection of rows, sorted by task: pooled sequences, or rows that have a target.

        Args:
            offsets: offsets of the batch's tasks among the selected rows, `N + 1` numbers.
            places: int64 `[rows]`, place of each selected row in its task's global batch.
            adapters: internal adapter id of each task name.
        """
        assert self.batch is not None, "rows can only be selected inside reading()"
        segments = self.segments_of(self.batch, offsets, adapters)
        # Without tables of their own for these rows, layers compute slice by slice.
        return temporary_attributes(self, segments=segments, places=places, num_rows=offsets[-1], passes=_NO_PASSES)

    def only(self, segment: RowSegment) -> AbstractContextManager[None]:
        """Let modules see the rows of one of the stream's segments alone, out of those that they see now."""
        num_rows = segment.end - segment.start
        rows, places = segment._replace(start=0, end=num_rows), self.places[segment.start : segment.end]
        return temporary_attributes(self, segments=(rows,), places=places, num_rows=num_rows, passes=_NO_PASSES)

    # ------------------------------------------------ how deep gradients go

    def reset_adapter_tracking(self, first_layer: int | None = None) -> None:
        """Begin a pass whose gradients end, for the rows of each task, at the lowest layer with its adapter.

        Args:
            first_layer: number of the lowest layer of a pipeline stage; adapters without weights below it are still to
                come, perhaps in a later stage. `None` for a whole model.
        """
        assert self.batch is not None, "only a pass can begin"
        if first_layer is not None:
            self.adapters_not_reached = self.adapters_above(first_layer, self.segments)
            return
        adapters = [segment.adapter for segment in self.segments if segment.adapter != NO_ADAPTER]
        self.adapters_not_reached = frozenset(
            adapter for adapter in adapters if any(maker.is_linear_only(adapter) for maker in self.makers.values())
        )

    def adapters_above(self, first_layer: int, segments: Sequence[RowSegment]) -> frozenset[str]:
        """Return the adapters of some rows that have no weights below a layer; none where that is not known."""
        lowest, least = self.lowest_layers, max(1, first_layer)
        return frozenset(segment.adapter for segment in segments if lowest.get(segment.adapter, 0) >= least)


MAX_TASKS = 64
"""Absent tasks are left out beyond this number: each is one more program in a kernel's reductions."""


class StreamOrder:
    """The tasks that have had rows so far.

    Args:
        number_of: returns a task's place among all tasks; streams are sorted by it as a rule.
        may_be_absent: whether a task without rows may be named.
    """

    def __init__(self, number_of: Callable[[str], int], may_be_absent: Callable[[str], bool]) -> None:
        self._number_of, self._may_be_absent = number_of, may_be_absent
        self._known: set[str] = set()

    def joined(self, present: Sequence[str]) -> tuple[str, ...]:
        """Return the tasks of a pass and the tasks that had rows before, in their order.

        Args:
            present: the tasks of the pass, in stream order, each once.

        Returns:
            `present` alone if it is not sorted, or if there are too many tasks.
        """
        known = {name for name in self._known if name in present or self._may_be_absent(name)} | set(present)
        ordered = sorted(known, key=self._number_of)
        if len(known) > MAX_TASKS or [name for name in ordered if name in present] != list(present):
            return tuple(present)
        self._known = known
        return tuple(ordered)
