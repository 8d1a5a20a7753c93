"""`Units`: the modules of a backbone that are gathered together, and in which order a pass gathers them.

A process that holds the whole backbone has one part that passes go through; a stage of a pipeline has one for each of
its virtual stages. Of the ends, a stage has what lies there: the first one the embedding, the last one the head::

    forward     rest  embedding  layer 0  layer 1 ... layer L-1  head
    backward    (head, where a task adapts it)  rest  layer L-1 ... layer 0
"""

# MERGED: `ShardedBackbone`: the frozen weights sharded over data parallel processes (FSDP2), adapters left as they are.
# MERGED: Each decoder layer is a unit that FSDP2 gathers before its forward, frees, gathers again before its
# MERGED: backward, and frees
# MERGED: for good. The token embedding and the output head, which tie and adapt and are read in other ways than by
# MERGED: one call, are
# MERGED: units of their own that are gathered once a pass, by hand. What is left (final norm, learned positions) is
# MERGED: one more. The
# MERGED: order is told in `peft_mux.engine.fsdp.backbone`. Processes that share weights are all of the run, or those
# MERGED: that hold one
# MERGED: stage of a pipeline, one in each replica.
# MERGED: A loss over a frozen head has its gradient already in the forward pass, and a frozen embedding needs none,
# MERGED: so neither
# MERGED: is gathered for backward passes. Weights are only ever gathered: they have no gradients, so nothing is
# MERGED: reduced.
# MERGED: Gatherings are collective. Processes that have fewer passes in a step than others take part in those of the
# MERGED: others
# MERGED: without computing anything (`agree_on_passes`): no adapter sees a pass that is not its own, not even times
# MERGED: zero.

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from peft_mux.engine.processes import Processes
from peft_mux.errors import ConfigError, UnsupportedModelError
from peft_mux.modeling.backbone.modules import is_meta, language_model
from peft_mux.modeling.backbone.quantized import quantized_layers
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.sharding import PassThrough


class PassPart(NamedTuple):
    """The part of a backbone that a pass goes through.

    Attributes:
        layers: numbers of the decoder layers, in order.
        is_first: whether it begins with the embedding.
        is_last: whether it ends with the output head.
    """

    layers: Sequence[int]
    is_first: bool
    is_last: bool


class Units(NamedTuple):
    """Modules that are gathered together.

    Attributes:
        base: the base model, whose unit holds what is in no other one: final norm, learned positions.
        embedding: the token embedding, its base layer where a task adapts it; `None` where it lies elsewhere.
        layers: the decoder layers that lie here, by their numbers, in order.
        head: the output head of a language model; `None` where it stays whole, or lies elsewhere.
    """

    base: Any
    embedding: Any | None
    layers: Mapping[int, Any]
    head: Any | None

    def all(self) -> tuple[Any, ...]:
        """Return every unit once."""
        return (self.base, *self.ends(), *self.layers.values())

    def ends(self) -> tuple[Any, ...]:
        """Return the units that FSDP2 does not free by itself: embedding and head, as far as they are here."""
        return tuple(unit for unit in (self.embedding, self.head) if unit is not None)

    def whole(self) -> PassPart:
        """Return the part of a process that holds all of a backbone."""
        return PassPart(tuple(self.layers), is_first=True, is_last=True)

    def forward_order(self, part: PassPart) -> list[Any]:
        """Return the units that a forward gathers, in order.

        Args:
            part: the part of the backbone that the pass goes through.
        """
        embedding = [self.embedding] if part.is_first and self.embedding is not None else []
        return [self.base, *embedding, *(self.layers[number] for number in part.layers), *self._head_of(part)]

    def backward_order(self, part: PassPart, *, adapts_head: bool) -> list[Any]:
        """Return the units that a backward gathers, in order.

        Args:
            part: the part of the backbone that the pass goes through.
            adapts_head: whether a task adapts the output head; the loss over a frozen one has its gradient already.
        """
        head = self._head_of(part) if adapts_head else []
        return [*head, self.base, *(self.layers[number] for number in reversed(part.layers))]

    def prefetch_in_backward(self, part: PassPart) -> None:
        """Let each unit begin to gather the one that the backward of the same pass comes to next, and no other.

        By itself FSDP2 takes the one that the latest forward has used before: of another pass, where several are in
        flight, so that processes with unlike numbers of passes would gather in unlike orders.

        Args:
            part: the part of the backbone that passes go through.
        """
        order = [self.layers[number] for number in reversed(part.layers)]
        # Who names itself begins nothing, where an empty list would mean FSDP2's own way. The base model does so, as it
        # is one unit of several parts.
        self.base.set_modules_to_backward_prefetch([self.base])
        for unit, following in zip(order, [*order[1:], order[-1]], strict=True):
            unit.set_modules_to_backward_prefetch([following])

    def _head_of(self, part: PassPart) -> list[Any]:
        return [self.head] if part.is_last and self.head is not None else []


def units_of(backbone: Any) -> Units:
    """Return what is gathered together of a backbone, or of the part of one that a stage holds.

    Args:
        backbone: the transformers model.

    Raises:
        UnsupportedModelError: if the decoder layers cannot be told.
    """
    embedding, head = (_innermost(end) for end in (backbone.get_input_embeddings(), backbone.get_output_embeddings()))
    return Units(
        backbone.base_model,
        None if isinstance(embedding, PassThrough) else embedding,
        _decoder_layers(backbone),
        head if type(head) is nn.Linear else None,
    )


def _decoder_layers(backbone: Any) -> dict[int, Any]:
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
    return {number: layer for number, layer in enumerate(found[0]) if not isinstance(layer, PassThrough)}


def _innermost(module: Any) -> Any:
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather of this version of torch: the second name is deprecated where the first one exists."""


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
        model: the model, or the stage of one, whose units FSDP2 has sharded.
        processes: the processes of the run.
        units: the modules that are gathered together.
        parts: the parts of the backbone that passes go through here, by number of the virtual stage.
        num_shards: processes that hold one shard each.

    Attributes:
        model: the model, with its adapters, slabs and names as before.
        processes: the processes of the run.
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        processes: Processes,
        units: Units,
        parts: Mapping[int, PassPart],
        num_shards: int,
    ) -> None:
        """Remember the units, and watch over those that FSDP2 does not free by itself."""
        self.model, self.processes = model, processes
        self._units, self._parts, self._num_shards = units, parts, num_shards
        self._is_unsharded = False
        self._gathering = _Gathering(processes)
        for unit in units.all():
            unit.set_custom_all_gather(self._gathering)
        for part in parts.values():
            units.prefetch_in_backward(part)
        # Before FSDP2's own hook of this unit: what was left is freed before more is gathered.
        units.base.register_forward_pre_hook(self._free_ends, prepend=True)
        if units.embedding is not None:
            # Its backward reads no weights; FSDP2 would gather it there all the same, once more in each pass.
            units.embedding.set_unshard_in_backward(False)
            units.embedding.register_forward_hook(_require_gradients)
            next(iter(units.layers.values())).register_forward_pre_hook(self._free_embedding)
        if len(parts) > 1:
            # Now, as all layers are in place: within a pass the base model holds those of one virtual stage alone, and
            # FSDP2 would take each of the others, which it meets later, for a model of its own.
            units.base._get_fsdp_state()._lazy_init()

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

    def bytes_per_pass(self, virtual_stage: int = 0) -> int:
        """Return the bytes of frozen weights that a process receives in one forward and backward: the closed form.

        A unit of weights `[K_i, ...]` over n processes brings the other n - 1 shards of `ceil(K_i / n)` rows each.

        Args:
            virtual_stage: which of this process's parts the pass goes through.
        """
        units = self._forward_order(virtual_stage) + self._backward_order(virtual_stage)
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

    def join_forwards(self, num_passes: int, virtual_stage: int = 0) -> None:
        """Take part in forwards of other processes: units are gathered in their order, and freed at once.

        Args:
            num_passes: number of passes that this process has fewer than others.
            virtual_stage: which of this process's parts they go through.
        """
        self._free_ends()
        for unit in self._forward_order(virtual_stage) * num_passes:
            unit.unshard()
            # Freed at once: the joining process computes nothing, so gathered weights are only memory here.
            unit.reshard()

    def join_backwards(self, num_passes: int, virtual_stage: int = 0) -> None:
        """Take part in backwards of other processes: units are gathered in their order, and freed at once.

        Args:
            num_passes: number of passes that this process has fewer than others.
            virtual_stage: which of this process's parts they go through.
        """
        for unit in self._backward_order(virtual_stage) * num_passes:
            unit.unshard()
            unit.reshard()

    def begin_backward(self, virtual_stage: int) -> None:
        """Gather what is in no other unit before the backward of a pass; called by who runs stages.

        Where a part ends with a layer, nothing tells FSDP2 of this: what the base model gives lies outside the graph,
        or does not, by what model code does behind its layers.

        Args:
            virtual_stage: which of this process's parts the pass goes through.
        """
        # With the head in the part this is for FSDP2: a head that a task adapts is gathered first, and processes that
        # join gather in that order.
        if not self._parts[virtual_stage].is_last:
            self._units.base.unshard()

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

    def _forward_order(self, virtual_stage: int) -> list[Any]:
        return self._units.forward_order(self._parts[virtual_stage])

    def _backward_order(self, virtual_stage: int) -> list[Any]:
        is_adapted = isinstance(self.model.backbone.get_output_embeddings(), BaseTunerLayer)
        return self._units.backward_order(self._parts[virtual_stage], adapts_head=is_adapted)

    def _frees_itself(self, unit: Any) -> bool:
        return not any(unit is end for end in self._units.ends())

    def _received_bytes(self, unit: Any) -> int:
        shards = (_padded_shard_bytes(item, self._num_shards) for item in self._weights_of(unit))
        return (self._num_shards - 1) * sum(shards)

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
            for end in self._units.ends():
                end.reshard()

    def _free_embedding(self, *_: Any) -> None:
        """Free the token embedding once the first layer begins: FSDP2 was told not to."""
        if not self._is_unsharded and self._units.embedding is not None:
            self._units.embedding.reshard()


def shard_backbone(
    model: MultiTaskPeftModel,
    processes: Processes,
    mesh: DeviceMesh,
    parts: Mapping[int, PassPart] | None = None,
) -> ShardedBackbone:
    """Shard the frozen weights of a model over processes, in place.

    Each process must hold the same whole weights; it keeps 1/n of them. Call this after the packing was probed and the
    fingerprint was taken, both of which read whole weights. Poolers and classification heads stay whole. Before, the
    whole backbone lies in every process: the peak of memory is that of loading it, plus one process's shard of the
    unit that is being sharded. The shard of a tied weight that needs padding, as n does not divide
    its rows, lies there twice. Move or cast the model before: FSDP2 keeps device and dtype from the first gathering on.

    Args:
        model: the whole model, or a stage of it, on its device, with any tasks; more may be registered later.
        processes: the processes of the run.
        mesh: device mesh of one dimension over the processes that hold the same weights so far, on a group of its own
            (see `gathering_mesh`).
        parts: the parts of the backbone that passes go through here, by number of the virtual stage; by default one of
            all layers and both ends, numbered 0.

    Raises:
        ConfigError: if the weights are quantised, on no device, or divided already.
        UnsupportedModelError: if the decoder layers cannot be told.
    """
    _check(model)
    backbone = model.backbone
    units = units_of(backbone)
    kept = _kept_whole(backbone)
    head, embedding = units.head, units.embedding
    is_tied = head is not None and embedding is not None and head.weight is embedding.weight
    # The warning of models that end with a reshape; nothing here changes an output in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # From the leaves up: what a unit below has sharded, the base model no longer takes as its own.
    for unit in units.layers.values():
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
    for end in units.ends():
        fully_shard(end, mesh=mesh, reshard_after_forward=False)
    if is_tied and head is not None and embedding is not None:
        head.weight = embedding.weight  # one shard for both; each gathers it when it is needed
    fully_shard(units.base, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
    return ShardedBackbone(model, processes, units, parts or {0: units.whole()}, mesh.size())


def gathering_mesh(processes: Processes, sets: Sequence[Sequence[int]] | None = None) -> DeviceMesh:
    """Return a mesh over the processes that share weights, on a group of its own; every process must call this.

    Sums of gradients run in another group at their own pace, and must not come between gatherings.

    Args:
        processes: the processes of the run, connected.
        sets: ranks of the processes that hold the same weights, for each part of the backbone; by default all hold all
            of it.
    """
    groups = [processes.open_group(ranks) for ranks in sets or [range(processes.world_size)]]
    return DeviceMesh.from_group(next(group for group in groups if group is not None), processes.device.type)


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
