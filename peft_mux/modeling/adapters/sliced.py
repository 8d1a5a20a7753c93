"""PEFT's own layer, task by task on its rows: for any adapted layer without a fused path, and a kind made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from peft import PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from torch import nn

from peft_mux.errors import Fault
from peft_mux.modeling.adapters.fields import (
    complete_heads,
    field_faults,
    task_type_faults,
    type_faults,
    types_of_defaults,
)
from peft_mux.modeling.adapters.kind import (
    CutLayers,
    CutOfLayer,
    MultiplexedForward,
    ReplicaLayout,
    SavedForm,
    Shapes,
    SlabOf,
)
from peft_mux.modeling.backbone.modules import adaptable_modules
from peft_mux.modeling.slabs import Slot, plain_slot
from peft_mux.modeling.stream import PassMaker, RowSegment, Stream
from peft_mux.scheduler.costs.loads import AdapterLoad

_COMMON_FIELDS = frozenset({"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"})


class SlicedAdapter(MultiplexedForward):
    """PEFT's own layer, task by task on its rows; for layers that treat every token by itself.

    The layer may lie around layers of other tasks and PEFT types, and dropout may lie in it: while it runs for one
    task, the stream tells them of that task's rows alone. Where all of them hand their inputs on to the frozen layer as
    they are, that one runs once over the stream (BaseOp, M §3.2), and each layer finds its rows of the output ready.

    Args:
        module: the module whose `forward` this is.
        name: the module's name within the backbone.
        stream: what tells the module which rows are whose.
        draws: whether the layer draws random numbers in training; then they are those of the task's step, the same in
            all of its micro-batches.
        shares_base: whether the layer calls the frozen one with the inputs that it gets itself.
    """

    def __init__(
        self, module: nn.Module, name: str, stream: Stream, *, draws: bool = False, shares_base: bool = False
    ) -> None:
        super().__init__(module, name, stream)
        self._draws, self._shares_base = draws, shares_base

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what PEFT's layer returns for `x`, row by row of the stream where one is read."""
        layer: Any = self.module
        if not self.stream.is_idle:
            return self.multiplexed(x)
        # Layers of several tasks lie around one another, and not every type's gives way to the next by itself.
        if layer.disable_adapters or not any(self._has(adapter) for adapter in layer.active_adapters):
            return layer.base_layer(x, *args, **kwargs)
        with _on_frozen_layer(layer):
            return self.original(x, *args, **kwargs)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all tasks, in stream order: `[1, T, K]` for token ids, else `[..., K]`."""
        is_ids, segments = not x.is_floating_point(), self.stream.segments
        rows = self._rows(x)
        owners = [self._owner(segment.adapter) for segment in segments]
        below = self._below
        # No task adapts this layer, so it runs once over the stream and nothing is sliced.
        if not any(owners):
            return below(rows if is_ids else x)
        parts = []
        ready = self._ready(rows, below, owners)
        for segment, owner, part, y in zip(segments, owners, self.by_segment(rows, 1), ready, strict=True):
            with self.stream.only(segment):
                if owner is None:
                    parts.append(below(part) if y is None else y)
                else:
                    parts.append(owner.run(part, segment, y))
        # Joined from slices and not masked: 0 * NaN would carry one task's NaN to the others.
        y = torch.cat(parts, dim=1)
        return y if is_ids else y.view(*x.shape[:-1], -1)

    def _ready(
        self, rows: torch.Tensor, below: Any, owners: Sequence[SlicedAdapter | None]
    ) -> Sequence[torch.Tensor | None]:
        """Return for each segment what the layer below gives, computed at once; `None` where its owner wants others."""
        hands_on = [owner is None or owner._shares_base for owner in owners]
        num_rows = sum(
            segment.end - segment.start for segment, is_so in zip(self.stream.segments, hands_on, strict=True) if is_so
        )
        # Of the others' rows the output is of no use; where they are most of them, it would cost more than it saves.
        if not rows.is_floating_point() or 2 * num_rows < self.stream.num_rows:
            return (None,) * len(owners)
        parts = self.by_segment(below(rows), 1)
        return [part if is_so else None for part, is_so in zip(parts, hands_on, strict=True)]

    def run(self, rows: torch.Tensor, segment: RowSegment, ready: torch.Tensor | None = None) -> torch.Tensor:
        """Return what PEFT's layer gives for one task.

        Args:
            rows: the task's rows, `[1, T, D]`, or token ids `[1, T]`.
            segment: whose rows they are.
            ready: what the frozen layer gives for them, where that is known.
        """
        layer: Any = self.module
        before = layer._active_adapter
        # The attribute, as PEFT's `set_adapter` would switch gradients on and off as well.
        layer._active_adapter = [segment.adapter]
        try:
            with _on_frozen_layer(layer) as frozen, _knowing(frozen, rows, ready), self._drawing(rows, segment):
                return self.original(rows)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # Some types look at their own numbers, or invert them: a task that has diverged would end all of them.
            if self._is_finite(segment.adapter):
                raise
            return (layer.get_base_layer()(rows) if ready is None else ready) * float("nan")
        finally:
            layer._active_adapter = before

    def _is_finite(self, adapter: str) -> bool:
        """Whether all that a task trains here are numbers, also what layers of it share."""
        own = (weight for name, weight in self.module.named_parameters() if adapter in name.split("."))
        return all(bool(weight.isfinite().all()) for weight in own)

    def _drawing(self, rows: torch.Tensor, segment: RowSegment) -> AbstractContextManager[None]:
        if not (self._draws and self.module.training):
            return nullcontext()
        return _seeded(segment.draw_seed(self.name), rows.device)

    @property
    def _below(self) -> Any:
        """The first module inside that is not such a layer: what rows of no task here go through."""
        module: Any = self.module
        while _sliced(module) is not None:
            module = module.base_layer
        return module

    def _owner(self, adapter: str) -> SlicedAdapter | None:
        """Return the forward of this layer, or of one inside it, that holds an adapter."""
        module: Any = self.module
        while (forward := _sliced(module)) is not None:
            if not module.disable_adapters and forward._has(adapter):
                return forward
            module = module.base_layer
        return None

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return self.rows(x, 1).view(1, -1)
        # Norms of single heads see `[1, T, heads, features]`.
        if x.dim() > 3 and tuple(x.shape[:2]) == (1, self.stream.num_rows):
            return x
        return self.rows(x, x.shape[-1]).unsqueeze(0)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this layer can be captured: how many rows a task has differs from pass to pass."""
        is_embedding = isinstance(self.module.get_base_layer(), nn.Embedding)  # type: ignore[operator]
        what = "a task adapts embeddings" if is_embedding else "a task's adapter runs on its own rows"
        return f"{what} ({self.name})"

    def _has(self, adapter: str) -> bool:
        layer: Any = self.module
        return any(adapter in getattr(layer, name) for name in layer.adapter_layer_names)


def _own_faults(config: Any, where: str) -> list[Fault]:
    """Return what PEFT says of a configuration that was changed since it was made, which PEFT itself does not see."""
    try:
        replace(config)
    except (TypeError, ValueError, LookupError, ImportError) as error:
        return [Fault(where, type(config).__name__, "what PEFT takes", f"PEFT refuses it: {error}")]
    return []


def _sliced(module: Any) -> SlicedAdapter | None:
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, SlicedAdapter) else None


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let torch's generators draw from a seed, and put them back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.random.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def _on_frozen_layer(layer: Any) -> Iterator[Any]:
    """Let a layer lie bare around the frozen one, as it does alone: some types look at what is inside them."""
    before = layer._modules["base_layer"]
    # Past `setattr`, which would register and check the module anew in every pass.
    frozen = layer._modules["base_layer"] = layer.get_base_layer()
    try:
        yield frozen
    finally:
        layer._modules["base_layer"] = before


@contextmanager
def _knowing(frozen: Any, rows: torch.Tensor, output: torch.Tensor | None) -> Iterator[None]:
    """Let a frozen layer give an output that is known already for these rows; other inputs it computes as ever."""
    if output is None:
        yield
        return
    before, original = frozen.__dict__.get("forward"), frozen.forward
    frozen.forward = lambda x, *args, **kwargs: output if x is rows else original(x, *args, **kwargs)
    try:
        yield
    finally:
        if before is None:
            del frozen.forward
        else:
            frozen.forward = before


class SlicedKind:
    """A PEFT type whose layers run as PEFT wrote them, task by task; see `AdapterKind`.

    For types whose layers treat every token by itself, change nothing of the backbone, and can be told apart by an
    adapter id. `register_kind(SlicedKind(PeftType.IA3, fields={"feedforward_modules"}))` is all that such a type needs;
    another check, another load or another way to narrow a configuration is a method of a class of its own.

    Args:
        peft_type: a type for which PEFT has a tuner.
        fields: fields of the configuration that may be set, beside those that name target modules.
        reasons: why some other fields may not be set, by name.
        default_targets: target modules where a configuration names none, by type of the backbone; PEFT's by default.
        draws: its layers draw random numbers for whole weights in training; then they draw those of the task's step.
        shares_base: its layers call the frozen ones with the inputs that they get themselves, which then run once for
            all tasks.
    """

    draws_itself: bool = False
    can_be_cut: bool = False
    lies_apart: bool = True

    def __init__(
        self,
        peft_type: PeftType,
        *,
        fields: Sequence[str] | frozenset[str] | set[str] = (),
        reasons: Mapping[str, str] | None = None,
        default_targets: Mapping[str, Any] | None = None,
        draws: bool = False,
        shares_base: bool = False,
    ) -> None:
        """Look the type up in PEFT."""
        tuner = PEFT_TYPE_TO_TUNER_MAPPING[peft_type]
        self.peft_type = peft_type
        self.name = self.title = str(peft_type.value)
        self.layer_type = tuner.tuner_layer_cls
        self.default_targets: Mapping[str, Any] = default_targets or getattr(tuner, "target_module_mapping", None) or {}
        self._draws, self._shares_base = draws, shares_base
        self._mark = f".{tuner.prefix}"
        self._fields, self._reasons = frozenset(fields) | _COMMON_FIELDS, reasons or {}
        self._types = types_of_defaults(PEFT_TYPE_TO_CONFIG_MAPPING[peft_type], self._fields)

    # ------------------------------------------------------- configurations

    def is_config(self, config: PeftConfig) -> bool:
        """Return whether a configuration is of the class that PEFT has for this type."""
        return isinstance(config, PEFT_TYPE_TO_CONFIG_MAPPING[self.peft_type])

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return a fault for every field that is set and not supported, for the task type, and for wrong types."""
        known = field_faults(config, where, supported=self._fields, reasons=self._reasons)
        known += [*task_type_faults(config, where), *type_faults(config, where, self._types, self._fields)]
        return known or _own_faults(config, where)

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Return nothing: what a backbone lacks shows in the modules that are targets."""
        return []

    def adaptable(self, backbone: nn.Module) -> Mapping[str, nn.Module]:
        """Return the linear layers and embeddings of a backbone, by name."""
        return adaptable_modules(backbone)

    def width_faults(self, config: Any, modules: Mapping[str, nn.Module], where: str) -> list[Fault]:
        """Return nothing: what does not fit, PEFT itself refuses."""
        return []

    def complete(self, config: Any, backbone: Any) -> None:
        """Let a classifier's task train its head."""
        complete_heads(config)

    def injecting(self) -> AbstractContextManager[None]:
        """Return nothing: these types change nothing of the backbone."""
        return nullcontext()

    def narrow(self, config: Any, modules: Sequence[str]) -> None:
        """Let a copy of a configuration adapt the given modules and no others."""
        config.target_modules = list(modules)
        for field in _COMMON_FIELDS - {"target_modules"}:
            if hasattr(config, field):
                setattr(config, field, None)

    def sample_config(self, rank: int) -> PeftConfig | None:
        """Return nothing: profiles measure kinds that have a rank."""
        return None

    # --------------------------------------------------------------- passes

    def pass_maker(self, slab_of: SlabOf) -> PassMaker | None:
        """Return nothing: the stream tells all that these layers need."""
        return None

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return PEFT's own forward, sliced."""
        return SlicedAdapter(module, name, stream, draws=self._draws, shares_base=self._shares_base)

    def arrange(self, model: nn.Module, stream: Stream) -> None:
        """Do nothing: each layer runs by itself."""

    # ----------------------------------------------------------- parameters

    def owns(self, parameter_name: str) -> bool:
        """Return whether a parameter bears the prefix of PEFT's tuner."""
        return self._mark in parameter_name

    def site_of(self, parameter_name: str) -> str:
        """Return the name of the layer that a parameter sits on."""
        return parameter_name.partition(self._mark)[0]

    def slot(self, name: str, parameter: nn.Parameter) -> Slot:
        """Return how a parameter of a task lies in its slab: as it is."""
        return plain_slot(name, parameter)

    def saved_form(self, backbone: nn.Module, adapter: str) -> SavedForm | None:
        """Return nothing: adapters are saved as PEFT holds them."""
        return None

    def loads(self, shapes: Shapes, cut: CutLayers) -> list[AdapterLoad]:
        """Return for each layer an adapter of rank 1 that is as wide as the layer's adapter has elements."""
        elements: dict[str, int] = {}
        for name, shape in shapes.items():
            if self.owns(name):
                count = int(torch.Size(shape).numel())
                elements[self.site_of(name)] = elements.get(self.site_of(name), 0) + count
        # None where a type leaves nothing of a small layer to be trained.
        return [AdapterLoad(1, count) for count in elements.values() if count]

    # ---------------------------------------------------------- parallelism

    def cut_dim(self, parameter_name: str, *, is_row: bool) -> int | None:
        """Return nothing: these adapters are not cut."""
        return None

    def cut(self, layer: Any, cut: CutOfLayer) -> None:
        """Refuse, as `refusals` says."""
        raise NotImplementedError(f"{self.title} adapters are not cut among processes.")

    def refusals(self, layout: ReplicaLayout, where: str) -> list[Fault]:
        """Refuse layouts on which a process holds parts of layers: these adapters are not cut (a stage's are whole)."""
        cuts = any(replica.tp > 1 for replica in layout.replicas)
        return self.refuse_parts(layout, where, "its layers are not cut") if cuts else []

    def refuse_parts(self, layout: ReplicaLayout, where: str, reason: str) -> list[Fault]:
        """Return a fault where a process holds a part of the model.

        Args:
            layout: how the processes of the run share the work.
            where: prefix of the fields, such as `tasks.sql`.
            reason: why that cannot be, a clause.
        """
        if layout.is_data_parallel:
            return []
        got, fix = f"{self.title} with replicas {layout}", f"For {reason}; give every process the whole model."
        return [Fault(f"{where}.peft_config", got, "another PEFT type with this layout", fix)]
