"""`ShardedBackbone`: frozen weights sharded over data parallel processes (FSDP2); adapters are not sharded.

Each decoder layer is a unit that FSDP2 gathers before its forward, frees, gathers again before its backward, and frees.
The token embedding and the output head may be tied or adapted, and are not only used through their forward, so each is
a unit that is gathered manually once per pass. The rest (final norm, learned positions) is the unit of the base model.
A process that holds the whole backbone has one part that passes go through; a pipeline stage has one part for each of
its virtual stages, with the embedding in the first one and the head in the last one::

    forward     rest  embedding  layer 0  layer 1 ... layer L-1  head
    backward    (head, if a task adapts it)  rest  layer L-1 ... layer 0

A loss over a frozen head computes its gradient in the forward pass, and a frozen embedding needs none, so neither is
gathered for backward passes. Weights are only gathered, never reduced, because they have no gradients.

All-gathers are collective. The processes that share weights are all processes of the run, or the processes that hold
the same pipeline stage, one in each replica::

    rank      0                    1                    2                    3
    replica   0                    0                    1                    1
    stage     0                    1                    0                    1
    holds     half of stage 0      half of stage 1      half of stage 0      half of stage 1

Processes that have fewer passes in a step than others join the all-gathers of the others without computing anything.
In a pipeline all replicas follow one template and reach its actions in the same order; after its own passes of an
action, a replica joins the additional passes of others. So an action waits only for earlier actions of the template on
other stages, and for the same action in other replicas; `parallel.pipeline.links` says what NCCL needs besides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.executor import ChainRunner, RunChain
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import PassClock
from peft_mux.errors import ConfigError, UnsupportedModelError
from peft_mux.modeling.backbone.modules import is_meta, language_model
from peft_mux.modeling.backbone.quantized import quantized_layers
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.heads import HeadWeights
from peft_mux.modeling.objectives.task_objective import MuxOutput
from peft_mux.modeling.pieces import PassThrough
from peft_mux.scheduler.parallel_layout import ParallelLayout


def shard_backbone(
    model: MultiTaskPeftModel,
    processes: Processes,
    stage: Any = None,
    layout: ParallelLayout | None = None,
) -> ShardedBackbone:
    """Shard the frozen weights of a model over processes (FSDP2), in place; all processes of the run must call this.

    Each process must hold the same complete weights, of all layers or of its stage, and keeps 1/n of them. Call this
    after probing the packing and computing the fingerprint, which read complete weights, and after casting the model.
    The model may be on the CPU: each unit is moved to the device of the processes and cut before the next one, so that
    a device never holds more than its shards and one unit. What is not sharded (adapters, poolers, classification
    heads) is moved by the caller.

    Args:
        model: the whole model, or a stage of it, with any tasks; more may be registered later.
        processes: the processes of the run, connected.
        stage: the `StageModel` that the model is of; by default all processes hold the whole backbone.
        layout: which process holds which stage of which replica, if the model is a stage.

    Raises:
        ConfigError: if the weights are quantised, not loaded, or sharded already.
        UnsupportedModelError: if the decoder layers cannot be found.
    """
    # The same stage of equal replicas has the same weights.
    sets = [range(processes.world_size)] if layout is None else layout.ranks_by("stage", "tp_rank")
    # Separate groups, because sums of gradients must not be interleaved with all-gathers in one group.
    groups = [processes.open_group(ranks) for ranks in sets]
    mesh = DeviceMesh.from_group(next(group for group in groups if group is not None), processes.device.type)
    return ShardedBackbone(model, processes, mesh, stage)


class ShardedBackbone(ChainRunner):
    """A model whose frozen weights are sharded over processes; created by `shard_backbone`.

    Args:
        model: the model, or a stage of one; its weights are sharded in place.
        processes: the processes of the run.
        mesh: one-dimensional device mesh over the processes that hold the same weights.
        stage: see `shard_backbone`.

    Attributes:
        model: the model, with unchanged adapters, slabs and names.
        processes: the processes of the run.
        virtual_stages: numbers of the virtual stages of this process.
        num_bytes: bytes of frozen weights that this process has received so far.
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        processes: Processes,
        mesh: DeviceMesh,
        stage: Any = None,
    ) -> None:
        """Shard the units, and add hooks for those that FSDP2 does not free by itself."""
        backbone = model.backbone
        if isinstance(backbone.base_model, FSDPModule):
            raise ConfigError("shard_backbone needs a whole model, got one that is already divided.")
        if is_meta(backbone):
            raise ConfigError("shard_backbone needs a loaded model, got one without weights.")
        quantised = next((name for name, *_ in quantized_layers(backbone)), None)
        if quantised is not None:
            raise ConfigError(
                f"shard_backbone needs weights in a floating point type, got a backbone whose layer {quantised} is "
                "quantised. Set shard_backbone=False, or load the backbone without quantization."
            )
        self.model, self.processes = model, processes
        self.num_bytes = 0
        self._base: Any = backbone.base_model
        self._layers = _decoder_layers(backbone)
        ends = (backbone.get_input_embeddings(), backbone.get_output_embeddings())
        embedding, head = (end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends)
        self._embedding: Any = None if isinstance(embedding, PassThrough) else embedding
        self._head: Any = head if type(head) is nn.Linear else None
        self._ends = [end for end in (self._embedding, self._head) if end is not None]
        self.virtual_stages: tuple[int, ...] = (0,) if stage is None else stage.virtual_stages
        self._last_virtual_stage = 0 if stage is None else stage.layout.last_virtual_stage
        self._numbers = {
            number: tuple(self._layers) if stage is None else stage.layout.layers_of(number)
            for number in self.virtual_stages
        }
        self._shard(mesh)
        if self._head is not None:
            self._head.head_weights = ShardedHeadWeights(self._head)
        for unit in (self._base, *self._ends, *self._layers.values()):
            unit.set_custom_all_gather(_Gathering(self))
        # Let each unit prefetch only the next unit of the backward of the same pass. By default FSDP2 prefetches in the
        # order of the latest forward, which belongs to another pass if several are in flight, so that processes with
        # different numbers of passes would gather in different orders. A unit that lists itself prefetches nothing,
        # while an empty list selects FSDP2's default; the base model is a unit of several parts.
        self._base.set_modules_to_backward_prefetch([self._base])
        for virtual_stage in self.virtual_stages:
            order = [self._layers[number] for number in reversed(self._numbers[virtual_stage])]
            for unit, following in zip(order, [*order[1:], order[-1]], strict=True):
                unit.set_modules_to_backward_prefetch([following])
        # Before FSDP2's own hook of this unit: what was left is freed before more is gathered.
        self._base.register_forward_pre_hook(self._free_ends, prepend=True)
        if self._embedding is not None:
            # Its backward reads no weights, but FSDP2 would gather it again in each backward pass.
            self._embedding.set_unshard_in_backward(False)
            self._embedding.register_forward_hook(_require_gradients)
            # FSDP2 is configured not to free the embedding, so the first layer frees it.
            first = next(iter(self._layers.values()))
            first.register_forward_pre_hook(lambda *_: self._embedding.reshard())
        if len(self.virtual_stages) > 1:
            # Done while all layers are in place: in a pass the base model holds only the layers of one virtual stage,
            # and FSDP2 would treat each layer of the others as a separate root.
            self._base._get_fsdp_state()._lazy_init()

    def agree_on_passes(self, chain_lengths: Sequence[int]) -> list[int]:
        """Return the longest chain of passes at each position of a step over all processes; all must call this.

        At each position, every process then runs that many forwards followed by that many backwards: its own, and
        `join_forwards` before and `join_backwards` after them for the missing ones.

        Args:
            chain_lengths: number of passes of each of this process's own chains, in order.
        """
        # Exchange two numbers first, because the lists differ in length between processes, and an exchange needs equal
        # lengths.
        counts = self.processes.exchange([len(chain_lengths), max(chain_lengths, default=0)])
        num_positions = max(number for number, _ in counts)
        if max(longest for _, longest in counts) <= 1:
            return [1] * num_positions
        padded = [*chain_lengths, *[0] * (num_positions - len(chain_lengths))]
        return [max(lengths) for lengths in zip(*self.processes.exchange(padded), strict=True)]

    def run_chains(
        self, chains: Sequence[Sequence[MuxBatch]], run_chain: RunChain, clock: PassClock
    ) -> Iterator[tuple[MuxBatch, MuxOutput]]:
        """Run the chains of this process, and join the passes that others have more of; all processes call this."""
        # First of all, as all processes gather the weights of each pass.
        longest = self.agree_on_passes([len(chain) for chain in chains])
        for chain, most in zip(chains, longest, strict=False):
            # Passes of others: forwards before its own and backwards after them, so that every process gathers in one
            # order, all forwards of the position and then all backwards.
            with clock.timing(chain):
                self.join_forwards(most - len(chain))
                outputs = run_chain(chain)
                self.join_backwards(most - len(chain))
            yield from zip(chain, outputs, strict=True)
        # Positions at which only other processes have chains.
        for most in longest[len(chains) :]:
            self.join_forwards(most)
            self.join_backwards(most)

    @contextmanager
    def joining(self, num_passes: int) -> Iterator[None]:
        """Join the forward passes that other processes have more of, after those of the `with` block."""
        most = max(self.agree_on_passes([num_passes]))
        yield
        self.join_forwards(most - num_passes)

    def join_forwards(self, num_passes: int, virtual_stage: int = 0) -> None:
        """Join forwards of other processes: gather units in their order, and free them immediately.

        Args:
            num_passes: number of additional passes of other processes.
            virtual_stage: which of this process's parts they go through.
        """
        self._free_ends()
        for unit in self.forward_units(virtual_stage) * num_passes:
            unit.unshard()
            # Freed immediately, because the joining process computes nothing.
            unit.reshard()

    def join_backwards(self, num_passes: int, virtual_stage: int = 0) -> None:
        """Join backwards of other processes: gather units in their order, and free them immediately.

        Args:
            num_passes: number of additional passes of other processes.
            virtual_stage: which of this process's parts they go through.
        """
        for unit in self.backward_units(virtual_stage) * num_passes:
            unit.unshard()
            unit.reshard()

    def begin_backward(self, virtual_stage: int) -> None:
        """Gather the unit of the base model before the backward of a pass; called by executors of pipeline stages.

        If a part ends with a layer, FSDP2 is not triggered reliably: whether the output of the base model belongs to
        the graph depends on the model code after the layers. If the part has the head, FSDP2 does this itself: a head
        that a task adapts is gathered first, and joining processes gather in the same order.

        Args:
            virtual_stage: which of this process's parts the pass goes through.
        """
        if virtual_stage != self._last_virtual_stage:
            self._base.unshard()

    def forward_units(self, virtual_stage: int = 0) -> list[Any]:
        """Return the units that a forward gathers, in order."""
        embedding = [self._embedding] if virtual_stage == 0 and self._embedding is not None else []
        is_last = virtual_stage == self._last_virtual_stage
        head = [self._head] if is_last and self._head is not None else []
        layers = [self._layers[number] for number in self._numbers[virtual_stage]]
        return [self._base, *embedding, *layers, *head]

    def backward_units(self, virtual_stage: int = 0) -> list[Any]:
        """Return the units that a backward gathers, in order; a frozen head has its gradient from the forward."""
        is_adapted = isinstance(self.model.backbone.get_output_embeddings(), BaseTunerLayer)
        is_last = virtual_stage == self._last_virtual_stage
        head = [self._head] if is_last and self._head is not None and is_adapted else []
        layers = [self._layers[number] for number in reversed(self._numbers[virtual_stage])]
        return [*head, self._base, *layers]

    def _shard(self, mesh: DeviceMesh) -> None:
        """Shard every unit with FSDP2, except for parameters that are trained or read without calling their module."""
        kept = {item for item in self.model.backbone.parameters() if item.requires_grad}
        pooler = getattr(self._base, "pooler", None)
        kept |= set(pooler.parameters()) if isinstance(pooler, nn.Module) else set()
        is_tied = len(self._ends) == 2 and self._head.weight is self._embedding.weight
        # Ignore the warning for models that end with a reshape; no output is modified in place here.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        # From the leaves up, so that the base model does not include parameters that a unit below has sharded.
        for unit in self._layers.values():
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
        for end in self._ends:
            fully_shard(end, mesh=mesh, reshard_after_forward=False)
        if is_tied:
            self._head.weight = self._embedding.weight  # one shard for both; each gathers it when it is needed
        fully_shard(self._base, mesh=mesh, reshard_after_forward=True, ignored_params=kept)

    def _free_ends(self, *_: Any) -> None:
        """Free units that the previous pass has left gathered (a head that was called by plain PEFT code)."""
        for end in self._ends:
            end.reshard()


class ShardedHeadWeights(HeadWeights):
    """Gathers an output head, which losses read without calling it.

    Gathering is collective: every process must read the head equally often, whatever tasks its passes have.

    Args:
        head: the frozen head, a unit of FSDP2.
    """

    def __init__(self, head: Any) -> None:
        self._head = head

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights for the time of the `with` block."""
        # A plain weight is gathered already, by code that will free it.
        if not isinstance(self._head.weight, DTensor):
            yield
            return
        self._head.unshard()
        try:
            yield
        finally:
            self._head.reshard()

    def free_after_backward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden`; once its gradient is known, the head is sharded again."""
        return _CallInBackward.apply(hidden, self._head.reshard)

    def gather_before_backward(self, losses: torch.Tensor) -> torch.Tensor:
        """Return `losses`; before their gradient flows back into the head, it is gathered."""
        return _CallInBackward.apply(losses, self._head.unshard)


class _CallInBackward(torch.autograd.Function):
    """The identity; its backward calls a function before it passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.call()
        return dx, None


@dataclass
class _Gathering:
    """The all-gather that FSDP2 uses, with counters, timing, and errors that name the missing process."""

    backbone: ShardedBackbone

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.backbone.num_bytes += (dist.get_world_size(group) - 1) * input_tensor.nbytes
        with self.backbone.processes.communicating("the gathering of frozen weights"):
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather of this version of torch: the second name is deprecated where the first one exists."""


def _decoder_layers(backbone: Any) -> dict[int, Any]:
    """Return the decoder layers that this process holds, by number."""
    config = backbone.config.get_text_config()
    count = next((getattr(config, key) for key in ("num_hidden_layers", "n_layer") if hasattr(config, key)), None)
    lists = [
        item for item in language_model(backbone).modules() if isinstance(item, nn.ModuleList) and len(item) == count
    ]
    if not lists:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} must keep its {count} decoder layers in one list with "
            "shard_backbone=True. Set shard_backbone=False."
        )
    return {number: layer for number, layer in enumerate(lists[0]) if not isinstance(layer, PassThrough)}


def _require_gradients(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Give every layer of every pass a backward for any set of tasks, because processes must gather in one order."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
