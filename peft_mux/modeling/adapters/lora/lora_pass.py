"""`LoraPass`: the rows of one pass, bound to the adapters that work on them, for layers that are computed in groups.

On a GPU with Triton, what launches need to know (where each adapter lies, its rank, its scale) is gathered once for
each set of tasks and kept by `LoraGroups`; a pass adds only which rows belong to which task. Anywhere else, and if
kernels cannot serve an adapter, the same result comes from products on slices (`peft_mux.kernels.lora.reference`).

A *group* is what `LoraGroups.enroll` takes: an object with `members` (the forwards of its layers) and `number`. It is a
`LinearGroup` of LoRA, or one layer of Adapter Tuning. A member gives its `GroupedAdapter`s.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from peft_mux.kernels import philox
from peft_mux.kernels.availability import runs_kernels
from peft_mux.kernels.lora.group import Adapter, KernelCall, LoraGroup, LoraGroupFunction
from peft_mux.kernels.lora.reference import Rows
from peft_mux.kernels.lora.tables import DTYPES, SegmentTables
from peft_mux.modeling.slabs import TaskSlab
from peft_mux.modeling.stream import RowSegment, StreamOrder

_MAX_COMPOSITIONS = 32


class GroupedAdapter(NamedTuple):
    """An adapter of a layer that the grouped product computes: A `[R, D]`, B `[K, R]`, its scale, its dropout now."""

    a: nn.Parameter
    b: nn.Parameter
    scale: float
    dropout: float


class LoraGroups:
    """The groups of one model, and their tables for each set of tasks that shares a pass.

    Args:
        slab_of: returns the slab of an adapter, by its internal id; `None` if it has none.

    Attributes:
        slab_of: see above.
        composes: whether passes include absent adapters; not if one of them keeps kernels from serving the others.
        groups: groups by number, weakly, because they belong to their layers, which may be regrouped or removed.
    """

    def __init__(self, slab_of: Callable[[str], TaskSlab | None]) -> None:
        self.groups: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.slab_of = slab_of
        self._tables: OrderedDict[tuple[Any, ...], dict[int, LoraGroup | None]] = OrderedDict()
        self._num_enrolled = 0
        self._is_linear_only: dict[str, bool] = {}
        self.clear()

    def begin_pass(
        self, segments: tuple[RowSegment, ...], places: torch.Tensor, *, has_fixed_size: bool = False
    ) -> LoraPass:
        """Return a pass over the rows of the given segments; see `LoraPass`."""
        return LoraPass(self, segments, places, has_fixed_size=has_fixed_size)

    def with_absent(self, segments: tuple[RowSegment, ...]) -> tuple[RowSegment, ...]:
        """Return the segments of a pass, and empty ones of the adapters that have rows in other passes only.

        So all passes of a set of tasks use the same tables. What kernels compute for a task follows from that task
        alone, whatever other segments there are.
        """
        present = {segment.adapter: segment for segment in segments}
        # Segments without an adapter share one name, so they have no place in an order. A pass may have no rows.
        is_ordered = len(present) == len(segments) > 0 and all(self.slab_of(name) is not None for name in present)
        if not self.composes or not is_ordered:
            return segments
        adapters = self._order.joined(tuple(present))
        found, end = [], segments[0].start
        for name in adapters:
            found.append(present[name] if name in present else segments[0]._replace(adapter=name, start=end, end=end))
            end = found[-1].end
        return tuple(found)

    def _may_be_absent(self, adapter: str) -> bool:
        """Whether tables may name an adapter without rows: its gradients are in place, and no hook watches them."""
        slab = self._slab(adapter)
        return all(page.values.grad is not None for page in slab.pages) and not slab.watched()

    def clear(self) -> None:
        """Drop all tables, which hold adapters; needed when an adapter is added, removed or moved."""
        self._tables.clear()
        self._is_linear_only.clear()
        self.composes = True
        self._order = StreamOrder(lambda adapter: self._slab(adapter).number, self._may_be_absent)

    def _slab(self, adapter: str) -> TaskSlab:
        slab = self.slab_of(adapter)
        assert slab is not None, "adapters with rows in a pass that kernels compute have slabs"
        return slab

    def enroll(self, group: Any) -> int:
        """Return a number for a group of layers, by which its tables are kept."""
        self._num_enrolled += 1
        self.groups[self._num_enrolled] = group
        return self._num_enrolled

    def is_linear_only(self, adapter: str) -> bool:
        """Return whether all weights of an adapter are in linear layers of the groups.

        These layers remove it from `Stream.adapters_not_reached`; nothing is known here of others, such as experts.
        """
        if adapter not in self._is_linear_only:
            slab = self.slab_of(adapter)
            held = set()
            for layer in [member.module for group in self.groups.values() for member in group.members]:
                for part in (getattr(layer, name, {}) for name in ("lora_A", "lora_B", "lora_magnitude_vector")):
                    held |= {id(weight) for weight in part[adapter].parameters()} if adapter in part else set()
            own = set() if slab is None else {number for page in slab.pages for number in page.entries}
            self._is_linear_only[adapter] = bool(own) and own <= held
        return self._is_linear_only[adapter]

    def tables(
        self, adapters: tuple[str, ...], dtype: torch.dtype, *, is_training: bool, watched: frozenset[int]
    ) -> dict[int, LoraGroup | None]:
        """Return the tables of the tasks that share a pass, by the group's number, as far as groups were computed.

        Args:
            adapters: internal id of each segment's task.
            dtype: the dtype of the activations.
            is_training: whether adapters drop out.
            watched: ids of parameters whose gradients have to pass through autograd.
        """
        slabs = [self.slab_of(adapter) for adapter in adapters]
        bindings = tuple(0 if slab is None else slab.num_bindings for slab in slabs)
        # All that tables depend on: gradients move when they are bound again, and dropout goes with training.
        key = adapters, bindings, dtype, is_training, watched
        tables = self._tables.setdefault(key, {})
        self._tables.move_to_end(key)
        # Tasks that take turns would otherwise leave tables of every combination behind.
        while len(self._tables) > _MAX_COMPOSITIONS:
            self._tables.popitem(last=False)
        return tables

    def make_tables(
        self, group: Any, adapters: tuple[str, ...], dtype: torch.dtype, watched: frozenset[int]
    ) -> LoraGroup | None:
        """Return what launches need to know of layers that are computed together; `None` if kernels cannot serve them.

        The arguments are those of `tables`.
        """
        layers: list[list[Adapter | None]] = []
        for member in group.members:
            layers.append([])
            for name in adapters:
                own: GroupedAdapter | None = member.grouped(name)
                if own is None:
                    layers[-1].append(None)
                    continue
                slab = self.slab_of(name)
                # Kernels write gradients in place, which a hook on the parameter would not see.
                if slab is None or dtype not in DTYPES or not watched.isdisjoint((id(own.a), id(own.b))):
                    return None
                a, b = slab.factor(own.a, dtype), slab.factor(own.b, dtype)
                if a is None or b is None:
                    return None
                # Kernels add gradients up in fp32 only.
                if any(one.gradient is not None and one.gradient.dtype != torch.float32 for one in (a, b)):
                    return None
                layers[-1].append(Adapter(a.values, b.values, a.gradient, b.gradient, own.scale, own.dropout))
        try:
            return LoraGroup(layers, [member.name for member in group.members])
        except ValueError as error:
            say_once(str(error))
            return None


@functools.cache
def say_once(reason: str) -> None:
    """Warn once why kernels do not serve some layers."""
    warnings.warn(f"adapters of some layers are computed task by task: {reason}", stacklevel=2)


class LoraPass:
    """One pass of one micro-batch.

    Args:
        groups: the model's groups of layers, and their tables.
        segments: rows of each task.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        has_fixed_size: whether `update` may bring other rows of the same adapters, up to T of them; launches of such a
            pass may be captured and replayed.

    Attributes:
        anchor: scalar that requires gradients.
        segment_tables: which rows belong to which task, for launches; `None` if no kernels run.
        found: in a pass of fixed size, the tables of each group that was computed, by its number and the dtype; `None`
            if kernels cannot serve it. They live as long as the pass: captured launches read them at every replay.
    """

    def __init__(
        self,
        groups: LoraGroups,
        segments: tuple[RowSegment, ...],
        places: torch.Tensor,
        *,
        has_fixed_size: bool = False,
    ) -> None:
        """Cut the rows into tiles if kernels will run."""
        self._groups = groups
        self.segments, self.places = segments, places
        has_kernels = runs_kernels(places.device)
        if has_kernels and not has_fixed_size:
            segments = groups.with_absent(segments)
        self.adapters = tuple(segment.adapter for segment in segments)
        # If nothing below trains, activations need no gradient, and outputs would not either.
        self.anchor = torch.zeros((), device=places.device, requires_grad=True)
        self._has_fixed_size = has_fixed_size
        self.found: dict[tuple[int, torch.dtype], LoraGroup | None] = {}
        self.segment_tables: SegmentTables | None = None
        self._watched: frozenset[int] = frozenset()
        self._tables: dict[tuple[torch.dtype, bool], dict[int, LoraGroup | None]] = {}
        if has_kernels:
            # Once a pass and not once a layer, because every parameter of every task is looked at.
            slabs = (groups.slab_of(adapter) for adapter in self.adapters)
            self._watched = frozenset(number for slab in slabs if slab is not None for number in slab.watched())
            sizes = {"max_tokens": len(places)} if has_fixed_size else {}
            self.segment_tables = SegmentTables(*_lengths_and_seeds(segments), device=places.device, **sizes)

    def update(self, segments: tuple[RowSegment, ...]) -> None:
        """Let a pass of fixed size stand for other rows of the same adapters, in the same memory.

        Args:
            segments: one of each adapter, in the same order; it may be empty.

        Raises:
            ValueError: if the adapters are others, or there are more rows than the pass was made for.
        """
        if tuple(segment.adapter for segment in segments) != self.adapters:
            raise ValueError(f"adapters of the segments must be {', '.join(self.adapters)}, as in the pass.")
        if self.segment_tables is not None:
            self.segment_tables.update(*_lengths_and_seeds(segments))
        self.segments = segments

    def reason_against_capture(self) -> str | None:
        """Return why a computed pass of fixed size cannot be captured; `None` if kernels served all groups."""
        for (number, _), tables in self.found.items():
            if not tables:
                return f"kernels do not serve the adapters of {self._groups.groups[number].members[0].name}"
        return None if self.found else "adapters are not computed by kernels"

    def outputs(
        self, group: Any, x: torch.Tensor, dtype: torch.dtype, needed: tuple[Rows, ...] | None = None
    ) -> tuple[torch.Tensor, ...] | None:
        """Return `[..., K]` of each layer of a group through the kernels; `None` if they cannot serve it.

        Args:
            group: the linear layers that are computed together.
            x: `[..., D]`, the activations that all of them read, T rows.
            dtype: the dtype to compute in.
            needed: the rows whose gradients a layer below needs; all by default, and in a pass of fixed size.
        """
        tables = self.tables_of(group, dtype)
        if tables is None or self.segment_tables is None:
            return None
        bases = group.bases()
        # Captured launches are replayed for other rows.
        if needed is not None and not self._has_fixed_size:
            bases = [base._replace(needed=needed) for base in bases]
        call = KernelCall(tables, bases, self.segment_tables, self.places)
        # If activations require a gradient already, the anchor would only be one more edge of the graph.
        return LoraGroupFunction.apply(x, None if x.requires_grad else self.anchor, call, dtype)

    def tables_of(self, group: Any, dtype: torch.dtype) -> LoraGroup | None:
        """Return what launches need to know of a group in this pass; `None` if kernels cannot serve it."""
        if self.segment_tables is None:
            return None
        if self._has_fixed_size and (group.number, dtype) in self.found:
            return self.found[group.number, dtype]
        # Looked up once a pass and not once a layer.
        key = dtype, group.members[0].module.training
        if key not in self._tables:
            self._tables[key] = self._groups.tables(self.adapters, dtype, is_training=key[1], watched=self._watched)
        made = self._tables[key]
        if group.number not in made:
            made[group.number] = self._groups.make_tables(group, self.adapters, dtype, self._watched)
            if made[group.number] is None:
                self._groups.composes = False
            if self.places.is_cuda and (stream := torch.accelerator.current_stream()).stream_id != 0:
                # Passes in turns have a stream each, and read tables and first copies of weights that others have made.
                stream.synchronize()
        tables = made[group.number]
        # Kept by the pass itself: the groups' own tables may be dropped while captured launches read them.
        if self._has_fixed_size:
            self.found[group.number, dtype] = tables
        return tables


def _lengths_and_seeds(segments: Sequence[RowSegment]) -> tuple[list[int], list[int]]:
    """Return the rows of each segment, and the task's and step's half of its dropout key."""
    lengths = [segment.end - segment.start for segment in segments]
    return lengths, [philox.hash_seed(segment.task_seed, segment.step) for segment in segments]
