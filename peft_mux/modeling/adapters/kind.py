"""Adapter kinds: how tasks of a PEFT type are trained here, and the `forward` of adapted layers.

An `AdapterKind` describes one PEFT type. One object serves the whole process; what belongs to one model, such as tables
of where its adapters lie, is held by what the kind's `pass_maker` returns for it. The methods of the base class are
those of a type whose layers run as PEFT wrote them, so that most types override little or nothing.

A `MultiplexedForward` replaces the `forward` of an adapted layer, on the instance (M §3.2): modules, parameters and
their names stay PEFT's. While no packed batch is in flight, the layer's own `forward` runs, so that `generate`, merging
and saving work as in PEFT.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import Fault, UnsupportedModelError
from peft_mux.modeling.attention.attention_stream import Prefixes
from peft_mux.modeling.backbone.modules import (
    adaptable_modules,
    classifier_around,
    head_kind_for,
    head_kind_of,
    is_meta,
)
from peft_mux.modeling.slabs import SlabLayout, TaskSlab, plain_slot
from peft_mux.modeling.stream import Stream

PREFIX = "prompt_encoder."
"""The beginning of the names of all parameters of prompts."""

EMBEDDINGS = "prompt_embeddings"
"""PEFT's name of what a prompt's encoder makes, in files."""

_WRAPPING = re.compile(r"\.modules_to_save\.[^.]+|\.t\d{6}$|\.base_layer(?=\.|$)")
"""Parts of names on which no draw may depend: a task's internal id, and which other layers lie around this one."""


class MultiplexedForward:
    """A `forward` that computes the rows of all tasks in flight, and the module's own `forward` otherwise.

    Args:
        module: the module whose `forward` this is.
        name: the module's name within the backbone.
        stream: knows which rows belong to which task.

    Attributes:
        module: the module whose `forward` this is.
        name: within the backbone, as if the module were the only one that was put there.
        stream: knows which rows belong to which task.
        original: the module's own `forward`.
        against_graphs: why no pass through the module can be captured, with `{name}` for its name; empty if one can.
        adds_own_biases: whether it adds the biases that tasks train of the frozen layer inside the module.
        group: the layers that are computed together with this one, if there are any.
    """

    group: Any = None
    adds_own_biases: bool = False
    against_graphs: str = ""

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        self.module = module
        # Random draws depend on the name, which must be the same alone and next to adapters of other types.
        self.name = _WRAPPING.sub("", name)
        self.stream = stream
        # Bound before it is replaced: merging, saving and `generate` run through it.
        self.original = module.forward

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the module's output for the rows of the stream, or that of its own `forward` if none is read."""
        if self.stream.is_idle:
            return self.original(x, *args, **kwargs)
        return self.multiplexed(x)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the module's output for the rows of the stream in flight."""
        raise NotImplementedError

    def reason_against_graphs(self) -> str | None:
        """Return a clause that says why no pass through this module can be captured now; `None` if it can."""
        return self.against_graphs.format(name=self.name) or None

    def by_segment(self, x: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Return the rows of each of the stream's segments; `dim` is the dimension of the rows."""
        # Together and not one by one: in the backward pass each slice would make a gradient as tall as the stream.
        return x.split([segment.end - segment.start for segment in self.stream.segments], dim)

    def each_task(self, *rows: torch.Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield each segment of the stream with its rows of some tensors `[T, ...]`.

        Results are concatenated and not added under a mask: 0 * NaN would carry the NaN of one task to the others.
        """
        return zip(self.stream.segments, *map(self.by_segment, rows), strict=True)

    def by_task(
        self, adapters: Container[str], y: torch.Tensor, change: Callable[..., torch.Tensor], *rows: Any
    ) -> torch.Tensor:
        """Return outputs `[..., K]`, those of tasks with something of their own here changed on their rows alone.

        Args:
            adapters: internal ids of the adapters of these tasks.
            y: the outputs so far.
            change: takes a segment, its rows of `y` and of `rows`; returns its new rows.
            rows: further tensors, a row for each row of the stream.
        """
        if not any(segment.adapter in adapters for segment in self.stream.segments):
            return y
        self.check_rows(y, y.shape[-1])
        tasks = self.each_task(y.reshape(-1, y.shape[-1]), *rows)
        return torch.cat([change(*task) if task[0].adapter in adapters else task[1] for task in tasks]).view_as(y)

    def check_rows(self, x: torch.Tensor, width: int) -> None:
        """Refuse an `x` that is not one row of `width` elements for each row of the stream."""
        if x.numel() != self.stream.num_rows * width:
            raise UnsupportedModelError(
                f"{self.name} ({type(self.module).__name__}) must see every token once, in order: one row for each "
                f"of the {self.stream.num_rows} rows of the stream, got a tensor of shape {list(x.shape)}. Take this "
                "module out of target_modules (experts of a mixture, for example, see regrouped tokens), or set the "
                "dropout to 0."
            )


class Category(Enum):
    """The way in which a PEFT type runs when its tasks share a pass."""

    FUSED = "fused"
    SLICED = "sliced"
    WEIGHT_SPACE = "weight-space"
    PROMPT = "prompt/KV"
    REFUSED = "refused"


@dataclass(frozen=True)
class TypeEntry:
    """The facts about one PEFT type.

    Attributes:
        name: name of the member of `PeftType`.
        category: how it runs.
        reasons: why some fields of its configuration must keep their defaults, by field.
        supported: the only fields that may be set; by default, all without a reason against them.
        spans_layers: why a process that holds only some of the layers cannot train it; empty if each layer is
            independent of the others.
        reads_weights: its initial state is computed from frozen weights, and a part of a model lacks some of these.
        needs_weights: it cannot even be described before the frozen weights are loaded.
        draws: it draws random numbers for whole weights in training; they are seeded by the task's step.
        draws_noise: it draws something for each row even without dropout.
        shares_base: its layers pass their own inputs on to the frozen layer, which then runs once for all tasks.
        needs: a package that PEFT imports for it.
        refusal: why tasks of this type are refused; empty for types that are trained.
        nearest: the types closest to a refused one, the closest first.
    """

    name: str
    category: Category = Category.SLICED
    reasons: Mapping[str, str] = field(default_factory=dict)
    supported: Collection[str] | None = None
    spans_layers: str = ""
    reads_weights: bool = False
    needs_weights: bool = False
    draws: bool = False
    draws_noise: bool = False
    shares_base: bool = False
    needs: str = ""
    refusal: str = ""
    nearest: tuple[str, ...] = ()

    @property
    def peft_type(self) -> PeftType | None:
        """The member of PEFT's enumeration; `None` if the installed PEFT has no such type."""
        return PeftType.__members__.get(self.name)

    @property
    def is_importable(self) -> bool:
        """Whether the package that PEFT needs for it is installed."""
        return not self.needs or find_spec(self.needs) is not None


WEIGHTS_ARE_READ = "its initial state is computed from frozen weights"
"""Why a part of a model cannot hold a type that reads weights."""


SlabOf = Callable[[str], TaskSlab | None]
"""Returns the slab of an adapter, by its internal id; `None` if it has none."""


class AdapterKind:
    """One PEFT type: how its configurations are checked, and its layers attached and laid out.

    Args:
        entry: the facts about the type.
        title: name of the type in messages; PEFT's by default.

    Attributes:
        peft_type: the type.
        name: the key under which a `Stream` holds its passes.
        layer_type: class of PEFT's layers of this type.
        default_targets: the target modules of configurations that name none, by type of the backbone.
        has_targets: whether it adapts modules; prompts do not.
        draws_dropout: whether its forwards draw dropout themselves; otherwise the dropout modules inside its layers are
            given draws that belong to each task.
        lies_apart: whether each of its adapters has a tuner and layers of its own
            (`peft_mux.modeling.adapters.tuners`); otherwise one layer of PEFT's holds the adapters of all tasks.
        has_penalty: whether its tasks add `penalty` to their loss.
        slot: returns how a parameter of a task is laid out in its slab (`peft_mux.modeling.slabs.TaskSlab`).
        forward_type: class of the forwards that `attach` returns.
        pass_maker: returns what makes the passes of one model; `None` if layers need no more than the stream.
    """

    has_targets: bool = True
    draws_dropout: bool = False
    lies_apart: bool = True
    has_penalty: bool = False
    slot: SlabLayout = staticmethod(plain_slot)
    forward_type: type[MultiplexedForward] | None = None
    pass_maker: Callable[[SlabOf], Any] | None = None

    def __init__(self, entry: TypeEntry, title: str = "") -> None:
        self.entry = entry
        self.peft_type = PeftType[entry.name]
        self.name = str(self.peft_type.value)
        self.title = title or self.name
        self.config_type = PEFT_TYPE_TO_CONFIG_MAPPING[self.peft_type]
        tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING.get(self.peft_type)
        self.layer_type: type[BaseTunerLayer] | None = getattr(tuner, "tuner_layer_cls", None)
        self.default_targets: Mapping[str, Any] = getattr(tuner, "target_module_mapping", None) or {}
        self._mark = f".{getattr(tuner, 'prefix', '')}" if self.has_targets else PREFIX

    # ------------------------------------------------------- configurations

    def setting_faults(self, config: Any, where: str) -> list[Fault]:
        """Return what is wrong with the values of single fields, in addition to `entry` and what PEFT declares.

        Args:
            config: the adapter configuration of one task, whose fields may have been set to anything.
            where: prefix of the fields, such as `tasks.sql.peft_config`.
        """
        return []

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Return why a backbone, possibly without weights, cannot have an adapter, whatever its targets."""
        if self.entry.needs_weights and is_meta(backbone):
            fix = "Its initial values are computed from the weights: load the model with from_pretrained and pass it."
            return [Fault(where, f"{self.title} on a model without weights", "used on a loaded model", fix)]
        if not (self.entry.reads_weights and isinstance(backbone.base_model, FSDPModule)):
            return []
        got, allowed = f"{self.title} on a sharded backbone", "registered before the backbone is sharded"
        return [
            Fault(where, got, allowed, f"Reason: {WEIGHTS_ARE_READ}. Start a run with it, or set shard_backbone=False.")
        ]

    def adaptable(self, backbone: nn.Module) -> Mapping[str, nn.Module]:
        """Return the modules of a backbone that may be targets, by name; mostly its linear layers and embeddings."""
        return adaptable_modules(backbone)

    def width_faults(self, config: Any, modules: Mapping[str, nn.Module], where: str) -> list[Fault]:
        """Return what does not fit the modules that a configuration targets, by name."""
        return []

    def complete(self, config: Any, backbone: Any) -> None:
        """Write into a task's own copy of a configuration what `get_peft_model` would for this backbone.

        By default, a classifier's task trains its head as well.
        """
        trained = head_kind_for(config.task_type).trained_modules
        if trained:
            config.modules_to_save = [*trained, *(set(config.modules_to_save or ()) - set(trained))]

    def virtual_labels(self, config: Any) -> tuple[int, ...]:
        """Return the label of each virtual token that sequences of a task begin with; mostly none."""
        return ()

    # ----------------------------------------------------- coming and going

    # In all of these `model` is the `MultiTaskPeftModel`, and `adapter` an internal id.

    def open(self, model: Any, backbone: Any, adapter: str, config: PeftConfig) -> None:
        """Initialise a `PeftModel`, of which nothing is there yet, with its first adapter."""
        with warnings.catch_warnings():
            # PEFT reads an older name of transformers, which no user can do anything about.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            PeftModel.__init__(model, backbone, config, adapter, low_cpu_mem_usage=is_meta(backbone))

    def inject(self, model: Any, adapter: str, config: PeftConfig) -> None:
        """Add a further adapter, inside `Tuners.as_peft_model`; PEFT completes `config`."""
        model.add_adapter(adapter, config, low_cpu_mem_usage=is_meta(model.backbone))

    def remove(self, model: Any, adapter: str) -> None:
        """Free an adapter, inside `Tuners.as_peft_model` if it has targets."""
        model.delete_adapter(adapter)

    def call(
        self, model: Any, adapter: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, generate: bool = False
    ) -> Any:
        """Return the output of plain PEFT for the selected adapter: of `generate` if asked for, else of `forward`."""
        has_own_head = head_kind_for(model.peft_config[adapter].task_type) != head_kind_of(model.backbone)
        plain = classifier_around(model.backbone) if has_own_head else model.base_model
        return plain.generate(*args, **kwargs) if generate else plain(*args, **kwargs)

    def to_file(
        self, model: Any, adapter: str, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Return the tensors of an adapter's files for its parameters by name; `None` to take what PEFT selects."""
        return None

    def from_file(
        self, model: Any, adapter: str, state: Mapping[str, torch.Tensor], names: Collection[str]
    ) -> dict[str, torch.Tensor] | None:
        """Return parameters by name for the tensors of `to_file`, without missing ones, and adopt what is frozen there.

        It is `None` where `to_file` is.
        """
        return None

    # --------------------------------------------------------------- passes

    def begin_step(self, model: Any, adapter: str) -> None:
        """Prepare a task's weights for a step; called in every process, also if it has no rows of the task."""

    def put_before_rows(self, model: Any, batch: MuxBatch, arguments: dict[str, Any]) -> Prefixes | None:
        """Put what rows begin with into the arguments of the backbone; of one kind without targets, for all of them.

        Returns:
            learnt keys and values in front of sequences; `None` if there are none.
        """
        return None

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return the multiplexed forward for a layer of class `layer_type`; `None` to leave it as it is."""
        return None if self.forward_type is None else self.forward_type(module, name, stream)

    def connect(self, model: nn.Module, stream: Stream) -> None:
        """Connect attached layers of a model with one another; called once after all are attached."""

    def penalty(self, config: Any, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a scalar that is added to a task's loss once in each of its steps.

        Args:
            config: the adapter configuration of the task.
            parameters: the task's parameters, by their PEFT names without the adapter id.
        """
        raise NotImplementedError

    # ----------------------------------------------------------- parameters

    def owns(self, parameter_name: str) -> bool:
        """Return whether a parameter is part of this kind's adapters, by its PEFT name; heads of tasks are not."""
        return self._mark in parameter_name

    def site_of(self, parameter_name: str) -> str:
        """Return the name of the layer that a parameter of this kind's adapters sits on."""
        return parameter_name.partition(self._mark)[0]


KINDS: dict[PeftType, AdapterKind] = {}
"""Every PEFT type that can be trained; the first ones lie closest to the frozen layer if types share one."""

ENTRIES: dict[str, TypeEntry] = {}
"""The facts about types without a kind of their own, by name: the catalogue adds them, refused ones included."""


def register_kind(kind: AdapterKind) -> AdapterKind:
    """Register how tasks of a PEFT type are trained, in place of an earlier registration; returns the kind."""
    KINDS[kind.peft_type] = kind
    _kind_of_class.cache_clear()
    return kind


def find_kind(config: PeftConfig) -> AdapterKind | None:
    """Return the kind of a configuration; `None` if its type cannot be trained."""
    # Configurations can be changed after they are made, and not every value can be looked up.
    kind = KINDS.get(config.peft_type) if isinstance(config.peft_type, PeftType) else None
    return kind if kind is not None and isinstance(config, kind.config_type) else None


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
    """Return the kind that a layer of PEFT's belongs to: if several fit, the most special one."""
    return _kind_of_class(type(layer))


@functools.cache
def _kind_of_class(layer_class: type) -> AdapterKind | None:
    # PEFT's layer classes may inherit from one another, so several kinds can fit.
    fitting = [kind for kind in KINDS.values() if kind.layer_type and issubclass(layer_class, kind.layer_type)]
    return max(fitting, key=lambda kind: len(kind.layer_type.__mro__), default=None)  # type: ignore[union-attr]


def kind_of_parameter(name: str) -> AdapterKind | None:
    """Return the kind of the adapter that a parameter is part of, by its PEFT name; `None` for heads and the frozen."""
    return next((kind for kind in KINDS.values() if kind.owns(name)), None)


def entry_of(peft_type: PeftType) -> TypeEntry:
    """Return the facts about a PEFT type; one that no kind trains counts as refused."""
    if peft_type in KINDS:
        return KINDS[peft_type].entry
    entry = ENTRIES.get(peft_type.name)
    if entry is not None and entry.refusal:
        return entry
    if entry is None:
        refusal = "this release of peft_mux does not know it"
    elif not entry.is_importable:
        refusal = f"PEFT needs the package {entry.needs} for it, which is not installed"
    else:
        refusal = "it has no kind of its own here"
    return TypeEntry(peft_type.name, Category.REFUSED, refusal=refusal, nearest=("LORA",))
