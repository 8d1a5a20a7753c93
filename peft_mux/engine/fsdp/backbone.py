"""`ShardedBackbone`: the frozen weights sharded over data parallel processes (FSDP2), adapters left as they are.

Each decoder layer is a unit that FSDP2 gathers before its forward, frees, gathers again before its backward, and frees
for good. The token embedding and the output head, which tie and adapt and are read in other ways than by one call, are
units of their own that are gathered once a pass, by hand. What is left (final norm, learned positions) is one more::

    forward     rest  embedding  layer 0  layer 1 ... layer L-1  head
    backward    (head, where a task adapts it)  rest  layer L-1 ... layer 0

A loss over a frozen head has its gradient already in the forward pass, and a frozen embedding needs none, so neither
is gathered for backward passes. Weights are only ever gathered: they have no gradients, so nothing is reduced.
Gatherings are collective. Processes that have fewer passes in a step than others take part in those of the others
without computing anything (`agree_on_passes`): no adapter sees a pass that is not its own, not even times zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from peft_mux.engine.processes.processes import Processes
from peft_mux.errors import ConfigError, UnsupportedModelError
from peft_mux.modeling.adapters.injection import is_meta
from peft_mux.modeling.backbone.modules import language_model
from peft_mux.modeling.backbone.quantized import quantized_layers
from peft_mux.modeling.model import MultiTaskPeftModel

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather of this version of torch: the second name is deprecated where the first one exists."""


class _Units(NamedTuple):
    """Modules that are gathered together, each once a pass.

    Attributes:
        base: the base model, whose unit holds what is in no other one.
        embedding: the token embedding; its base layer where a task adapts it.
        layers: the decoder layers, in order.
        head: the output head of a language model; `None` where it stays whole.
    """

    base: Any
    embedding: Any
    layers: tuple[Any, ...]
    head: Any | None

    def all(self) -> tuple[Any, ...]:
        return (self.base, self.embedding, *self.layers, *([] if self.head is None else [self.head]))


class _Gathering:
    """How FSDP2 gathers a unit here: counted, timed, and with an error that says who is missing."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.num_bytes = 0
        self.num_gatherings = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.num_gatherings += 1
        self.num_bytes += (dist.get_world_size(group) - 1) * input_tensor.numel() * input_tensor.element_size()
        with self.processes.communicating("the gathering of frozen weights"):
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class ShardedBackbone:
    """A model whose frozen weights are sharded over processes; made by `shard_backbone`.

    Args:
        model: the model, whose units FSDP2 has sharded.
        processes: the processes that hold one shard each.
        units: the modules that are gathered together.

    Attributes:
        model: the model, with its adapters, slabs and names as before.
        processes: the processes that hold one shard each.
    """

    def __init__(self, model: MultiTaskPeftModel, processes: Processes, units: _Units) -> None:
        """Remember the units, and watch over those that FSDP2 does not free by itself."""
        self.model, self.processes = model, processes
        self._units = units
        self._is_unsharded = False
        self._gathering = _Gathering(processes)
        for unit in units.all():
            unit.set_custom_all_gather(self._gathering)
        # Its backward reads no weights; FSDP2 would gather it there all the same, once more in each pass.
        units.embedding.set_unshard_in_backward(False)
        # Before FSDP2's own hook of this unit: what was left is freed before more is gathered.
        units.base.register_forward_pre_hook(self._free_ends, prepend=True)
        units.embedding.register_forward_hook(_require_gradients)
        units.layers[0].register_forward_pre_hook(self._free_embedding)

    @property
    def num_bytes(self) -> int:
        """Bytes of frozen weights that this process has received so far."""
        return self._gathering.num_bytes

    @property
    def num_gatherings(self) -> int:
        """How often this process has gathered a unit so far."""
        return self._gathering.num_gatherings

    @property
    def local_bytes(self) -> int:
        """Bytes of frozen weights that this process holds between passes; about 1/n of the whole."""
        own = {id(item) for name in self.model.tasks for item in self.model.task_parameters(name).values()}
        return sum(_local_bytes(item) for item in self.model.backbone.parameters() if id(item) not in own)

    def bytes_per_pass(self, *, with_backward: bool = True) -> int:
        """Return the bytes of frozen weights that a process receives in one pass: the closed form.

        A unit of weights `[K_i, ...]` over n processes brings the other n - 1 shards of `ceil(K_i / n)` rows each.

        Args:
            with_backward: whether the pass has a backward.
        """
        units = self._forward_order() + (self._backward_order() if with_backward else [])
        return sum(self._received_bytes(unit) for unit in units)

    def agree_on_passes(self, chain_lengths: Sequence[int]) -> list[int]:
        """Return the longest chain of passes at each position of a step, over all processes, which all call this.

        Every process then runs, position by position, as many forwards and after them as many backwards as that: its
        own, and `join_forwards` before and `join_backwards` after them for what it lacks.

        Args:
            chain_lengths: number of passes of each of this process's own chains, in order.
        """
        longest = max(chain_lengths, default=0)
        # Two numbers first, as the lists differ in length between processes, and an exchange needs one length.
        counts = self.processes.exchange([len(chain_lengths), longest])
        num_positions = max(number for number, _ in counts)
        if max(longest for _, longest in counts) <= 1:
            return [1] * num_positions
        padded = [*chain_lengths, *[0] * (num_positions - len(chain_lengths))]
        return [max(lengths) for lengths in zip(*self.processes.exchange(padded), strict=True)]

    def join_forwards(self, num_passes: int) -> None:
        """Take part in forwards of other processes: units are gathered in their order, and freed at once.

        Args:
            num_passes: number of passes that this process has fewer than others.
        """
        self._free_ends()
        for unit in self._forward_order() * num_passes:
            unit.unshard()
            # Freed at once: the joining process computes nothing, so gathered weights are only memory here.
            unit.reshard()

    def join_backwards(self, num_passes: int) -> None:
        """Take part in backwards of other processes: units are gathered in their order, and freed at once.

        Args:
            num_passes: number of passes that this process has fewer than others.
        """
        for unit in self._backward_order() * num_passes:
            unit.unshard()
            unit.reshard()

    @contextmanager
    def unsharded(self) -> Iterator[MultiTaskPeftModel]:
        """Hold all frozen weights in every process for the time of the `with` block, without gradients.

        All processes must enter and leave it; within, each computes what it likes: generation with sequences of any
        length, `verify`, or anything that one process does alone. It takes the memory of the whole backbone.
        """
        units = self._units.all()
        self._free_ends()
        self._is_unsharded = True
        try:
            for unit in units:
                # Else the first forward within the block would free them, and the second gather, which others may not
                # run.
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            with torch.no_grad():
                yield self.model
        finally:
            self._is_unsharded = False
            for unit in units:
                # Freeing is local, so it is safe also where only this process has failed.
                unit.reshard()
                unit.set_reshard_after_forward(self._frees_itself(unit), recurse=False)

    # --------------------------------------------------------------- internal

    def _forward_order(self) -> list[Any]:
        units = self._units
        return [units.base, units.embedding, *units.layers, *self._heads()]

    def _backward_order(self) -> list[Any]:
        is_adapted = isinstance(self.model.backbone.get_output_embeddings(), BaseTunerLayer)
        return [*(self._heads() if is_adapted else []), self._units.base, *reversed(self._units.layers)]

    def _heads(self) -> list[Any]:
        return [] if self._units.head is None else [self._units.head]

    def _frees_itself(self, unit: Any) -> bool:
        return unit is self._units.base or any(unit is layer for layer in self._units.layers)

    def _received_bytes(self, unit: Any) -> int:
        num_others = self.processes.world_size - 1
        shards = (_padded_shard_bytes(item, self.processes.world_size) for item in self._weights_of(unit))
        return num_others * sum(shards)

    def _weights_of(self, unit: Any) -> Iterator[DTensor]:
        """Yield the sharded weights of a unit, but not those of units below it."""
        # The base model holds all other units as submodules; FSDP2 gathers it without what these have taken.
        below = {id(other) for other in self._units.all() if other is not unit}
        stack = [unit]
        while stack:
            module = stack.pop()
            yield from (item for item in module.parameters(recurse=False) if isinstance(item, DTensor))
            stack += [child for child in module.children() if id(child) not in below]

    def _free_ends(self, *_: Any) -> None:
        """Free what the pass before has left gathered (a head that plain PEFT code called)."""
        if not self._is_unsharded:
            self._units.embedding.reshard()
            if self._units.head is not None:
                self._units.head.reshard()

    def _free_embedding(self, *_: Any) -> None:
        """Free the token embedding once the first layer begins: FSDP2 was told not to."""
        if not self._is_unsharded:
            self._units.embedding.reshard()


def shard_backbone(model: MultiTaskPeftModel, processes: Processes, mesh: DeviceMesh) -> ShardedBackbone:
    """Shard the frozen weights of a model over processes, in place.

    Each process must hold the same whole weights; it keeps 1/n of them. Call this after the packing was probed and the
    fingerprint was taken, both of which read whole weights. Poolers and classification heads stay whole. Before, the
    whole backbone lies in every process: the peak of memory is that of loading it, plus one process's shard of the
    unit that is being sharded. The shard of a tied weight that needs padding, as n does not divide
    its rows, lies there twice. Move or cast the model before: FSDP2 keeps device and dtype from the first gathering on.

    Args:
        model: the whole model, on its device, with any tasks; more may be registered later.
        processes: the processes of the run; each holds the whole backbone so far.
        mesh: device mesh of one dimension over all processes, on a group of its own (see `gathering_mesh`).

    Raises:
        ConfigError: if the weights are quantised, on no device, or divided already.
        UnsupportedModelError: if the decoder layers cannot be told.
    """
    _check(model)
    backbone = model.backbone
    units = _Units(backbone.base_model, _embedding(backbone), _decoder_layers(backbone), _head(backbone))
    kept = _kept_whole(backbone)
    is_tied = units.head is not None and units.head.weight is units.embedding.weight
    # The warning of models that end with a reshape; nothing here changes an output in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # From the leaves up: what a unit below has sharded, the base model no longer takes as its own.
    for unit in units.layers:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
    fully_shard(units.embedding, mesh=mesh, reshard_after_forward=False)
    if units.head is not None:
        fully_shard(units.head, mesh=mesh, reshard_after_forward=False)
        if is_tied:
            units.head.weight = units.embedding.weight  # one shard for both; each gathers it when it is needed
    fully_shard(units.base, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
    return ShardedBackbone(model, processes, units)


def gathering_mesh(processes: Processes) -> DeviceMesh:
    """Return a mesh over all processes on a group of its own; every process must call this.

    Sums of gradients run in another group at their own pace, and must not come between gatherings.

    Args:
        processes: the processes of the run, connected.
    """
    return DeviceMesh.from_group(processes.open_group(), processes.device.type)


def is_sharded(model: MultiTaskPeftModel) -> bool:
    """Whether the frozen weights of a model are sharded over processes."""
    return isinstance(model.backbone.base_model, FSDPModule)


def _check(model: MultiTaskPeftModel) -> None:
    if is_sharded(model):
        raise ConfigError("shard_backbone: got a model that is divided already; allowed: a whole one, once.")
    if is_meta(model.backbone):
        raise ConfigError("shard_backbone: got a model without weights; allowed: one that is loaded.")
    quantised = next((name for name, *_ in quantized_layers(model.backbone)), None)
    if quantised is not None:
        raise ConfigError(
            f"shard_backbone: got a backbone whose layer {quantised} is quantised; allowed: weights in a floating "
            "point type. Set shard_backbone=False, or load the backbone without quantization."
        )


def _decoder_layers(backbone: Any) -> tuple[nn.Module, ...]:
    config = backbone.config.get_text_config()
    count = next((getattr(config, key) for key in ("num_hidden_layers", "n_layer") if hasattr(config, key)), None)
    found = [
        item for item in language_model(backbone).modules() if isinstance(item, nn.ModuleList) and len(item) == count
    ]
    if not found:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} has no list of {count} decoder layers; allowed with shard_backbone=True: "
            "models whose layers are one such list. Set shard_backbone=False."
        )
    return tuple(found[0])


def _embedding(backbone: Any) -> Any:
    module = backbone.get_input_embeddings()
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _head(backbone: Any) -> Any | None:
    module = backbone.get_output_embeddings()
    module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return module if type(module) is nn.Linear else None


def _kept_whole(backbone: Any) -> set[nn.Parameter]:
    """Return the parameters that stay whole: what is trained, or read without a call of its own."""
    kept = {item for item in backbone.parameters() if item.requires_grad}
    pooler = getattr(backbone.base_model, "pooler", None)
    return kept | (set(pooler.parameters()) if isinstance(pooler, nn.Module) else set())


def _require_gradients(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Let every layer of every pass have a backward, whatever tasks are in it: processes must gather alike."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def _local_bytes(parameter: torch.Tensor) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()


def _padded_shard_bytes(parameter: DTensor, num_shards: int) -> int:
    rows = -(-parameter.shape[0] // num_shards)
    return rows * (parameter.numel() // max(1, parameter.shape[0])) * parameter.element_size()
