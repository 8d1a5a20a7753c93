"""A `forward` that reads the stream: what all attached modules share (M §3.2)."""

# MERGED: `AdapterKind`: what a PEFT type needs to be trained here, and the registry of all kinds.
# MERGED: A kind is one object for the whole process; what belongs to one model (tables of where its adapters lie,
# MERGED: say) is in the
# MERGED: `PassMaker` that the kind makes for it. A new kind is one new file that registers itself with
# MERGED: `register_kind`; a PEFT
# MERGED: layer without a path of its own needs no more than a `peft_mux.modeling.adapters.sliced.SlicedKind`.

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux.errors import Fault, UnsupportedModelError
from peft_mux.modeling.slabs import Slot, TaskSlab
from peft_mux.modeling.stream import PassMaker, Stream
from peft_mux.scheduler.costs.loads import AdapterLoad

_WRAPPING = re.compile(r"\.modules_to_save\.[^.]+|\.t\d{6}$|\.base_layer(?=\.|$)")
"""Parts of names on which no draw may depend: a task's internal id, and which other layers lie around this one."""


class MultiplexedForward:
    """A `forward` that reads the stream, and gives way to the module's own while the stream is idle.

    Args:
        module: the module whose `forward` this is.
        name: the module's name within the backbone.
        stream: what tells the module which rows are whose.

    Attributes:
        module: the module whose `forward` this is.
        name: within the backbone, as if the module were the only one that was put there.
        stream: what tells the module which rows are whose.
        original: the module's own `forward`.
        adds_own_biases: whether it adds what tasks have of the biases of the frozen layer inside the module.
        group: the layers that are computed together with this one; `None` where there is nothing of the sort.
    """

    group: Any = None
    adds_own_biases: bool = False

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        self.module = module
        # Draws depend on the name, which must be the same alone and beside adapters of other types.
        self.name = _WRAPPING.sub("", name)
        self.stream = stream
        # Bound before it is replaced: merging, saving and `generate` go on through it.
        self.original = module.forward

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the module returns for `x`, row by row of the stream where one is read."""
        if self.stream.is_idle:
            return self.original(x, *args, **kwargs)
        return self.multiplexed(x)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the module's output for the rows of the stream in flight."""
        raise NotImplementedError

    def reason_against_graphs(self) -> str | None:
        """Return a clause that says why no pass through this module can be captured now; `None` where it can."""
        return None

    def by_segment(self, x: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Return the rows of each of the stream's segments, out of all rows that modules see now.

        Args:
            x: activations, with the rows of the stream in one dimension.
            dim: that dimension.
        """
        # Together and not one by one: in the backward pass each slice would make a gradient as tall as the stream.
        return x.split([segment.end - segment.start for segment in self.stream.segments], dim)

    def rows(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Return `x` as `[rows, width]`, having checked that its rows are the stream's."""
        self.check_rows(x, width)
        return x.reshape(-1, width)

    def check_rows(self, x: torch.Tensor, width: int) -> None:
        """Refuse an `x` whose rows are not the stream's."""
        if x.numel() != self.stream.num_rows * width:
            raise UnsupportedModelError(
                f"{self.name} ({type(self.module).__name__}) was called with a tensor of shape {list(x.shape)}, which "
                f"is not one row for each of the {self.stream.num_rows} rows of the stream; allowed: layers that see "
                "every token once, in order. Take this module out of target_modules (experts of a mixture, for one, "
                "see tokens that were regrouped), or set the dropout to 0."
            )


SlabOf = Callable[[str], TaskSlab | None]
"""Returns the slab of an adapter, by its internal id; `None` where it has none."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a task's whole parameters, by their PEFT names without the adapter id."""

CutLayers = Mapping[str, bool]
"""Layers that tensor parallelism cuts, by the end of their names: whether by their inputs, else by their outputs."""


class LayerGroup(Protocol):
    """Layers that are computed together, as profiles measure them."""

    @property
    def members(self) -> Sequence[MultiplexedForward]:
        """The forwards of the layers."""
        ...

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `[T, K]` of each layer for the `[T, D]` activations that all of them read."""
        ...


class CutOfLayer(Protocol):
    """How a linear layer is cut by tensor parallelism."""

    @property
    def is_row(self) -> bool:
        """Whether it is cut by its inputs; otherwise by its outputs."""
        ...

    @property
    def num_held(self) -> int:
        """Features of the cut dimension that lie in this process."""
        ...

    def take(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what lies in this process of a tensor whose dimension `dim` is the one that is cut."""
        ...


class ReplicaLayout(Protocol):
    """How the processes of a run share the work, as far as kinds of adapters ask."""

    @property
    def is_data_parallel(self) -> bool:
        """Whether every process holds the whole model."""
        ...

    @property
    def replicas(self) -> Sequence[Any]:
        """The replicas, each with `tp`, the number of processes among which its layers are cut."""
        ...

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether some layers are cut among processes."""
        ...


class SavedForm(Protocol):
    """Between what a task trains and what is written to its adapter's folder, where these differ."""

    def saved(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that are written, by key, for those of the adapter as PEFT would write it."""
        ...

    def loaded(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the adapter for those that were written, and take on what else was written."""
        ...

    def shape(self, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor as it is written, for its key and its shape in the adapter."""
        ...

    def write_config(self, config: Any) -> None:
        """Write into a copy of the adapter's configuration what is true of the form that is written."""
        ...

    def write_plainly(self) -> None:
        """Let PEFT's layers hold the form that is written, for merging; training cannot go on after it."""
        ...


class AdapterKind(Protocol):
    """What the product asks of a PEFT type; nothing outside a kind's own room names the type.

    Attributes:
        peft_type: under which PEFT, and the registry, know it.
        name: the key under which a `Stream` holds its passes.
        title: how messages to the user call it.
        layer_type: the class of PEFT's layers of this type.
        default_targets: target modules that PEFT adapts where a configuration names none, by type of the backbone.
        draws_itself: whether its forwards draw dropout for themselves; otherwise the dropout modules inside its layers
            are given draws that belong to each task.
        can_be_cut: whether tensor parallelism can cut its adapters; then `cut_dim` and `cut` tell how.
        lies_apart: whether each of its adapters has a tuner and layers of its own
            (`peft_mux.modeling.adapters.tuners`); otherwise one layer of PEFT's holds the adapters of all tasks.
    """

    peft_type: PeftType
    name: str
    title: str
    layer_type: type[BaseTunerLayer]
    default_targets: Mapping[str, Any]
    draws_itself: bool
    can_be_cut: bool
    lies_apart: bool

    # ------------------------------------------------------- configurations

    def is_config(self, config: PeftConfig) -> bool:
        """Return whether a configuration is of the class that this kind reads."""
        ...

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return what is wrong with the fields of a configuration, whatever the backbone.

        Args:
            config: the adapter configuration of one task.
            where: prefix of the fields, such as `tasks.sql.peft_config`.
        """
        ...

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Return why a backbone cannot have an adapter, whatever its targets.

        Args:
            config: the adapter configuration of one task, which has no `faults`.
            backbone: the transformers model that is to be adapted.
            where: prefix of the fields, such as `tasks.sql.peft_config`.
        """
        ...

    def adaptable(self, backbone: nn.Module) -> Mapping[str, nn.Module]:
        """Return the modules of a backbone that may be targets, by name; mostly its linear layers and embeddings."""
        ...

    def width_faults(self, config: Any, modules: Mapping[str, nn.Module], where: str) -> list[Fault]:
        """Return what does not fit the modules that will be adapted.

        Args:
            config: the adapter configuration of one task, which has no `faults`.
            modules: linear and embedding modules that it targets, by name.
            where: prefix of the fields, such as `tasks.sql.peft_config`.
        """
        ...

    def complete(self, config: Any, backbone: Any) -> None:
        """Write into a task's own copy of a configuration what `get_peft_model` would.

        Args:
            config: the copy, which is written into.
            backbone: the transformers model that will be adapted.
        """
        ...

    def injecting(self) -> AbstractContextManager[None]:
        """Return what surrounds PEFT's injection of an adapter of this kind, so that the backbone stays as it is."""
        ...

    def narrow(self, config: Any, modules: Sequence[str]) -> None:
        """Let a copy of a configuration adapt the given modules and no others.

        Args:
            config: the copy, which is written into.
            modules: full names of the modules within the backbone.
        """
        ...

    def sample_config(self, rank: int) -> PeftConfig | None:
        """Return an adapter of a rank on all linear layers, whose time a profile measures; `None` where none does."""
        ...

    # --------------------------------------------------------------- passes

    def pass_maker(self, slab_of: SlabOf) -> PassMaker | None:
        """Return what makes the passes of one model; `None` where layers need to know no more than the stream tells.

        Args:
            slab_of: finds the adapters of that model.
        """
        ...

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return the multiplexed forward for a layer that PEFT injected; `None` to leave it as it is.

        Args:
            module: a layer of class `layer_type`.
            name: the layer's name within the backbone.
            stream: what the layer will ask which rows are whose.
        """
        ...

    def arrange(self, model: nn.Module, stream: Stream) -> None:
        """Let attached layers of a model know one another; called once after all are attached."""
        ...

    # ----------------------------------------------------------- parameters

    def owns(self, parameter_name: str) -> bool:
        """Return whether a parameter is one of this kind's adapters, by its PEFT name; heads of tasks are not."""
        ...

    def site_of(self, parameter_name: str) -> str:
        """Return the name of the layer that a parameter of this kind's adapters sits on."""
        ...

    def slot(self, name: str, parameter: nn.Parameter) -> Slot:
        """Return how a parameter of a task lies in its slab; see `peft_mux.modeling.slabs.SlabLayout`."""
        ...

    def saved_form(self, backbone: nn.Module, adapter: str) -> SavedForm | None:
        """Return how an adapter is saved where that is not as PEFT holds it; mostly `None`.

        Args:
            backbone: the model, as PEFT made it for adapters of this type.
            adapter: internal id of the adapter.
        """
        ...

    def loads(self, shapes: Shapes, cut: CutLayers) -> list[AdapterLoad]:
        """Return what the adapters of a task cost in a pass: one load for each layer that they sit on.

        Args:
            shapes: shapes of the task's parameters; those of heads are passed over.
            cut: layers that tensor parallelism cuts.
        """
        ...

    # ---------------------------------------------------------- parallelism

    def cut_dim(self, parameter_name: str, *, is_row: bool) -> int | None:
        """Return which dimension of a parameter tensor parallelism cuts; `None` for one that every shard holds whole.

        Args:
            parameter_name: name of a parameter that this kind owns, on a layer that is cut.
            is_row: whether the layer is cut by its inputs; otherwise by its outputs.
        """
        ...

    def cut(self, layer: Any, cut: CutOfLayer) -> None:
        """Cut every adapter of a layer whose frozen weight was cut.

        Args:
            layer: PEFT's layer, whose adapters still have their whole shapes.
            cut: how its frozen weight was cut.
        """
        ...

    def refusals(self, layout: ReplicaLayout, where: str) -> list[Fault]:
        """Return why a task of this kind cannot be trained on a layout of processes.

        Args:
            layout: how the processes of the run share the work.
            where: prefix of the fields, such as `tasks.sql`.
        """
        ...


@runtime_checkable
class PenalisedKind(Protocol):
    """What a kind offers besides, whose adapters are trained towards more than their task's loss."""

    def penalty(self, config: Any, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return what is added to a task's loss, once in each of its steps; a scalar.

        Args:
            config: the adapter configuration of the task.
            parameters: the task's parameters, by their PEFT names without the adapter id.
        """
        ...


KINDS: dict[PeftType, AdapterKind] = {}
"""Every PEFT type that can be trained; the first ones lie closest to the frozen layers where types share one."""


def register_kind(kind: AdapterKind) -> AdapterKind:
    """Let tasks of a PEFT type be trained.

    Args:
        kind: what the type needs; takes the place of one that was registered for it before.

    Returns:
        the kind that was given.
    """
    KINDS[kind.peft_type] = kind
    _kind_of_class.cache_clear()
    return kind


def unregister_kind(peft_type: PeftType) -> None:
    """Refuse tasks of a PEFT type from now on; no model may hold one."""
    del KINDS[peft_type]
    _kind_of_class.cache_clear()


def find_kind(config: PeftConfig) -> AdapterKind | None:
    """Return the kind of a configuration; `None` where its type cannot be trained."""
    # Configurations can be changed after they are made, and not everything can be looked up.
    kind = KINDS.get(config.peft_type) if isinstance(config.peft_type, PeftType) else None
    return kind if kind is not None and kind.is_config(config) else None


def kind_of(config: PeftConfig) -> AdapterKind:
    """Return the kind of a configuration that was checked.

    Raises:
        KeyError: if no kind is registered for its type.
    """
    kind = find_kind(config)
    if kind is None:
        raise KeyError(config.peft_type)
    return kind


def kind_of_layer(layer: Any) -> AdapterKind | None:
    """Return the kind that a layer of PEFT's belongs to: of several that fit, the most special one."""
    return _kind_of_class(type(layer))


@functools.cache
def _kind_of_class(layer_class: type) -> AdapterKind | None:
    # PEFT's layer classes may inherit from one another, so several kinds can fit.
    fitting = [kind for kind in KINDS.values() if issubclass(layer_class, kind.layer_type)]
    return max(fitting, key=lambda kind: len(kind.layer_type.__mro__), default=None)


def kind_of_parameter(name: str) -> AdapterKind | None:
    """Return the kind whose adapters a parameter is one of, by its PEFT name; `None` for heads and frozen weights."""
    return next((kind for kind in KINDS.values() if kind.owns(name)), None)


def profiled_config(rank: int) -> PeftConfig:
    """Return the adapter of a rank whose time profiles measure: that of the first kind that has one.

    Raises:
        LookupError: if no kind has one.
    """
    for kind in KINDS.values():
        config = kind.sample_config(rank)
        if config is not None:
            return config
    raise LookupError("no kind of adapters that is registered can be measured by rank.")
