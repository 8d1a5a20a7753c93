"""`LoraPass`: the rows of one pass, bound to the adapters that work on them, for layers that are computed in groups.

On a GPU with Triton, what launches need to know (where each adapter lies, its rank, its scale) is gathered once for
each set of tasks and kept by `LoraGroups`; a pass adds only which rows are whose. Anywhere else, and wherever kernels
cannot serve an adapter, the same result comes from products on slices (`peft_mux.kernels.lora.reference`).
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from peft_mux.kernels import philox
from peft_mux.kernels.availability import runs_kernels
from peft_mux.kernels.lora.function import PASSES, LoraGroupFunction
from peft_mux.kernels.lora.group import Adapter, Base, KernelCall, LoraGroup, SliceCall, Tables
from peft_mux.kernels.lora.launch import DTYPES
from peft_mux.kernels.lora.reference import Rows
from peft_mux.kernels.lora.tables import SegmentTables
from peft_mux.modeling.slabs import TaskSlab

if TYPE_CHECKING:
    from peft_mux.modeling.stream import RowSegment

_MAX_COMPOSITIONS = 32


class KernelGroup(Protocol):
    """Layers whose adapters are computed together by kernels.

    Attributes:
        members: the forwards of the layers.
        number: the number by which `LoraGroups` knows the group.
        num_columns: columns that any tasks may need for each row, beside the activations.
    """

    members: Any
    number: int
    num_columns: int

    @property
    def is_training(self) -> bool:
        """Whether adapters drop out."""
        ...

    @property
    def widths(self) -> list[int]:
        """Output features of each layer."""
        ...

    def bases(self) -> list[Base]:
        """Return the frozen part of each layer, as far as it is computed with the adapters."""
        ...

    def tables(
        self,
        adapters: tuple[str, ...],
        slabs: Sequence[TaskSlab | None],
        dtype: torch.dtype,
        watched: frozenset[int],
    ) -> Tables | None:
        """Return what launches need to know for a set of tasks, or `None` where kernels cannot serve it.

        Args:
            adapters: internal id of each segment's task.
            slabs: the slab of each; `None` where it has none.
            dtype: the dtype of the activations.
            watched: ids of parameters whose gradients have to pass through autograd.
        """
        ...


class LoraGroups:
    """Tables of all groups of a model, for each set of tasks that shares a pass.

    Args:
        slab_of: the slab of an adapter, by its internal id; `None` where it has none.

    """

    def __init__(self, slab_of: Callable[[str], TaskSlab | None]) -> None:
        """Start empty."""
        self._slab_of = slab_of
        self._compositions: OrderedDict[tuple[Any, ...], Composition] = OrderedDict()
        self._num_enrolled = 0
        self._telling: dict[str, bool] = {}
        # Weakly, as groups belong to their layers, which may be regrouped or removed.
        self._groups: weakref.WeakValueDictionary[int, KernelGroup] = weakref.WeakValueDictionary()

    def begin_pass(
        self, segments: tuple[RowSegment, ...], places: torch.Tensor, *, has_fixed_size: bool = False
    ) -> LoraPass:
        """Return a pass over the rows of the given segments; see `LoraPass`."""
        return LoraPass(self, segments, places, has_fixed_size=has_fixed_size)

    def clear(self) -> None:
        """Forget all tables; needed whenever an adapter came, went or moved."""
        self._compositions.clear()
        self._telling.clear()

    def tells(self, adapter: str) -> bool:
        """Whether all weights of an adapter are in linear layers of the groups; see `PassMaker.tells`."""
        if adapter not in self._telling:
            slab = self._slab_of(adapter)
            members = [member for group in self._groups.values() for member in group.members]
            # Of other layers, such as experts, nothing is known here.
            linear = [member for member in members if hasattr(member, "weights_of")]
            held = {id(weight) for member in linear for weight in member.weights_of(adapter)}
            own = set() if slab is None else slab.parameter_ids
            self._telling[adapter] = bool(own) and own <= held
        return self._telling[adapter]

    def watched(self, adapters: tuple[str, ...]) -> frozenset[int]:
        """Return the ids of parameters whose gradients somebody waits to see pass through autograd."""
        slabs = (self._slab_of(adapter) for adapter in adapters)
        return frozenset(number for slab in slabs if slab is not None for number in slab.watched())

    def enroll(self, group: KernelGroup) -> int:
        """Return a number for a group of layers, by which compiled graphs find it."""
        self._num_enrolled += 1
        self._groups[self._num_enrolled] = group
        return self._num_enrolled

    def group(self, number: int) -> KernelGroup:
        """Return the group of a number."""
        return self._groups[number]

    def composition(
        self,
        adapters: tuple[str, ...],
        dtype: torch.dtype,
        *,
        is_training: bool,
        watched: frozenset[int] = frozenset(),
    ) -> Composition:
        """Return the tables of a set of tasks that share a pass.

        Args:
            adapters: internal id of each segment's task.
            dtype: the dtype of the activations.
            is_training: whether adapters drop out.
            watched: ids of parameters that slices serve.
        """
        slabs = [self._slab_of(adapter) for adapter in adapters]
        bindings = tuple(0 if slab is None else slab.num_bindings for slab in slabs)
        # All that tables depend on: gradients move when they are bound anew, and dropout goes with training.
        key = adapters, bindings, dtype, is_training, watched
        if key not in self._compositions:
            self._compositions[key] = Composition(adapters, slabs, dtype, watched)
        self._compositions.move_to_end(key)
        # Tasks that take turns would otherwise leave tables of every combination behind.
        while len(self._compositions) > _MAX_COMPOSITIONS:
            self._compositions.popitem(last=False)
        return self._compositions[key]


class Composition:
    """Tables of all groups of a model for one set of tasks, made when a group is first computed.

    Args:
        adapters: internal id of each segment's task.
        slabs: the slab of each; `None` where it has none.
        dtype: the dtype of the activations.
        watched: ids of parameters that slices serve.
    """

    def __init__(
        self,
        adapters: tuple[str, ...],
        slabs: Sequence[TaskSlab | None],
        dtype: torch.dtype,
        watched: frozenset[int],
    ) -> None:
        """Start without tables."""
        self._of_tables = adapters, slabs, dtype, watched
        self._found: dict[int, Tables | None] = {}

    def tables(self, group: KernelGroup) -> Tables | None:
        """Return what launches need to know of a group, or `None` where kernels cannot serve it."""
        number = group.number
        if number not in self._found:
            self._found[number] = group.tables(*self._of_tables)
        return self._found[number]


def linear_tables(
    members: Sequence[Any],
    adapters: tuple[str, ...],
    slabs: Sequence[TaskSlab | None],
    dtype: torch.dtype,
    watched: frozenset[int],
) -> LoraGroup | None:
    """Return what launches need to know of linear layers that are computed together; see `KernelGroup.tables`."""
    layers = []
    for member in members:
        found = [_adapter(member, name, slab, dtype, watched) for name, slab in zip(adapters, slabs, strict=True)]
        if any(item is _UNSERVED for item in found):
            return None
        layers.append([item if isinstance(item, Adapter) else None for item in found])
    try:
        return LoraGroup(layers, [member.name for member in members])
    except ValueError as error:
        say_once(str(error))
        return None


_UNSERVED = object()


def _adapter(
    member: Any, adapter: str, slab: TaskSlab | None, dtype: torch.dtype, watched: frozenset[int]
) -> Adapter | object | None:
    """Return where kernels find an adapter, `None` where the task has none here, or `_UNSERVED`."""
    layer = member.module
    if not member.is_grouped(adapter):
        return None
    weights = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    # Kernels write gradients in place, which a hook on the parameter would not see.
    if slab is None or dtype not in DTYPES or any(id(weight) in watched for weight in weights):
        return _UNSERVED
    a, b = (slab.factor(weight, dtype) for weight in weights)
    # Kernels add gradients up in fp32 only.
    if a is None or b is None or any(f.gradient is not None and f.gradient.dtype != torch.float32 for f in (a, b)):
        return _UNSERVED
    return Adapter(a.values, b.values, a.gradient, b.gradient, layer.scaling[adapter], member.dropout_of(adapter))


@functools.cache
def say_once(reason: str) -> None:
    """Tell why kernels do not serve some layers, once."""
    warnings.warn(f"adapters of some layers are computed task by task: {reason}", stacklevel=2)


class LoraPass:
    """One pass of one micro-batch: whose rows are where.

    Args:
        groups: the tables of the model's groups of layers.
        segments: rows of each task.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        has_fixed_size: whether `update` may bring other rows of the same adapters, up to T of them; launches of such a
            pass may be captured and replayed.

    Attributes:
        anchor: scalar that requires gradients.
        handle: stands for the pass in compiled graphs.
        found: in a pass of fixed size, the tables of each group that was computed, by its number and the dtype; `None`
            where kernels cannot serve it. They live as long as the pass: captured launches go on reading them.
    """

    def __init__(
        self,
        groups: LoraGroups,
        segments: tuple[RowSegment, ...],
        places: torch.Tensor,
        *,
        has_fixed_size: bool = False,
    ) -> None:
        """Cut the rows into tiles where kernels will run."""
        self._groups = groups
        self.segments, self.places = segments, places
        self.adapters = tuple(segment.adapter for segment in segments)
        # Where nothing below trains, activations need no gradient, and outputs would not either.
        self.anchor = torch.zeros((), device=places.device, requires_grad=True)
        self._has_fixed_size = has_fixed_size
        # The table of passes would keep a captured pass, and with it the memory of its tables, alive.
        self.handle = PASSES.add(_weakly(self._find) if has_fixed_size else self._find)
        self.found: dict[tuple[int, torch.dtype], Tables | None] = {}
        self._tables: SegmentTables | None = None
        self._watched: frozenset[int] = frozenset()
        self._compositions: dict[tuple[torch.dtype, bool], Composition] = {}
        if runs_kernels(places.device):
            # Once a pass and not once a layer, as every parameter of every task is looked at.
            self._watched = groups.watched(self.adapters)
            sizes = {"max_tokens": len(places), "max_segments": len(segments)} if has_fixed_size else {}
            self._tables = SegmentTables(*_lengths_and_seeds(segments), device=places.device, **sizes)

    def update(self, segments: tuple[RowSegment, ...]) -> None:
        """Let a pass of fixed size stand for other rows of the same adapters, in the same memory.

        Args:
            segments: one of each adapter, in the same order; it may be empty.

        Raises:
            ValueError: if the adapters are others, or there are more rows than the pass was made for.
        """
        if tuple(segment.adapter for segment in segments) != self.adapters:
            raise ValueError(f"adapters of the segments are not {', '.join(self.adapters)}, of which the pass is.")
        if self._tables is not None:
            self._tables.update(*_lengths_and_seeds(segments))
        self.segments = segments

    def reason_against_capture(self) -> str | None:
        """Return why a computed pass of fixed size cannot be captured; `None` where kernels served all groups."""
        for (number, _), tables in self.found.items():
            if not tables:
                return f"kernels do not serve the adapters of {self._groups.group(number).members[0].name}"
        return None if self.found else "adapters are not computed by kernels"

    def outputs(
        self, group: KernelGroup, x: torch.Tensor, dtype: torch.dtype, needed: tuple[Rows, ...] | None = None
    ) -> tuple[torch.Tensor, ...] | None:
        """Return `[..., K]` of each layer of a group through the kernels; `None` where they cannot serve it.

        Args:
            group: the layers that are computed together.
            x: `[..., D]`, the activations that all of them read, T rows.
            dtype: the dtype to compute in.
            needed: the rows whose gradients a layer below needs; all by default, and in a pass of fixed size.
        """
        tables = self.tables_of(group, dtype)
        if tables is None or self._tables is None:
            return None
        bases = group.bases()
        # Captured launches are replayed for other rows.
        if needed is not None and not self._has_fixed_size:
            bases = [base._replace(needed=needed) for base in bases]
        call = KernelCall(tables, bases, self._tables, self.places)
        # Where activations want a gradient already, the anchor would only be one more edge of the graph.
        return LoraGroupFunction.apply(x, None if x.requires_grad else self.anchor, call, dtype)

    def compiled_outputs(self, group: KernelGroup, x_TD: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the same as one opaque operator of a compiled graph."""
        x_TD = x_TD.to(dtype)
        *outputs, _ = torch.ops.peft_mux.lora_group(
            x_TD, self.anchor, self.handle, group.number, group.widths, group.num_columns
        )
        return tuple(outputs)

    def _find(self, number: int, dtype: torch.dtype) -> KernelCall | SliceCall:
        group = self._groups.group(number)
        tables = self.tables_of(group, dtype)
        if tables is not None and self._tables is not None:
            return KernelCall(tables, group.bases(), self._tables, self.places, group.num_columns)
        slices = [member.slice_of(self.segments) for member in group.members]
        return SliceCall(slices, self.places, group.num_columns)

    def tables_of(self, group: KernelGroup, dtype: torch.dtype) -> Tables | None:
        """Return what launches need to know of a group in this pass; `None` where kernels cannot serve it."""
        if self._tables is None:
            return None
        if not self._has_fixed_size:
            return self._composition(group, dtype).tables(group)
        # Kept by the pass itself: the groups' own tables may be dropped while captured launches read them.
        key = group.number, dtype
        if key not in self.found:
            self.found[key] = self._composition(group, dtype).tables(group)
        return self.found[key]

    def _composition(self, group: KernelGroup, dtype: torch.dtype) -> Composition:
        """Return the tables of the tasks of this pass, which are looked up once and not once a layer."""
        key = dtype, group.is_training
        if key not in self._compositions:
            self._compositions[key] = self._groups.composition(
                self.adapters, dtype, is_training=key[1], watched=self._watched
            )
        return self._compositions[key]


def _weakly(find: Callable[[int, torch.dtype], Any]) -> Callable[[int, torch.dtype], Any]:
    """Return the same method without keeping its pass alive: whoever captures one holds it himself."""
    method = weakref.WeakMethod(find)

    def find_now(group: int, dtype: torch.dtype) -> Any:
        bound = method()
        assert bound is not None, "a captured pass lives while it computes"
        return bound(group, dtype)

    return find_now


def _lengths_and_seeds(segments: Sequence[RowSegment]) -> tuple[list[int], list[int]]:
    """Return the rows of each segment, and the task's and step's half of its dropout key."""
    lengths = [segment.end - segment.start for segment in segments]
    return lengths, [philox.hash_seed(segment.task_seed, segment.step) for segment in segments]
