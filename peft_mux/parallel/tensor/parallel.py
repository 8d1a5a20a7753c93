"""`TensorParallelModel`: a multi-task model, cut in place to the part of one tensor parallel rank (M section 3.4.2).

Frozen weights are cut as Megatron-LM cuts them, and every task's A and B to match (`peft_mux.modeling.pieces`)::

    column-parallel    W [K/n, D]    A whole, partial gradient    B [K/n, R]
    row-parallel       W [K, D/n]    A [R, D/n]                   B whole, partial gradient
    experts            [E, K/n, D] and [E, D, K/n], frozen: each rank has a part of every expert
    head               W [V/n, D]    as column-parallel; a view of the embedding if they are tied
    everything else    whole on all ranks, which compute the same bits

Modules keep their classes, and the model code of transformers runs unmodified; hooks add the all-reduces
(`peft_mux.parallel.tensor.regions`). Only rank 0 has the bias of a row-parallel layer. All communication goes through
`TensorLinks.all_reduce`, or through `TurnLinks` around it if passes are interleaved.

Shape letters: K output features, D input features, R rank of an adapter, V vocabulary, n tensor parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.engine.processes import Pending, Processes
from peft_mux.errors import ProcessError, UnsupportedModelError
from peft_mux.kernels.cross_entropy.linear import TensorParallelLinks
from peft_mux.kernels.philox import Window
from peft_mux.modeling.adapters.kind import KINDS, kind_of_layer, kind_of_parameter
from peft_mux.modeling.adapters.lora.layer import rows_needed_now
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.pieces import PassThrough, Piece
from peft_mux.parallel.tensor.cut import CAN_BE_CUT, Block, Ranges, blocks_of, cut_dim, features, held_ranges
from peft_mux.parallel.tensor.regions import (
    VocabParallelHead,
    count_own_heads,
    norm_over_all_ranks,
    reduce_input_gradient,
    reduce_output,
)

_WHAT = "a sum over the shards of a stage"


class TensorLinks:
    """All-reduces over the tensor parallel group of this process.

    Every process of the run must create one, with the same groups.

    Args:
        groups: global ranks of every tensor parallel group of the run, from `ParallelLayout.tensor_groups`.
        processes: the processes of the run, connected.

    Attributes:
        index: rank of this process within its group.
        size: number of ranks in its group.
        num_bytes: bytes of the tensors that were summed so far.

    Raises:
        ProcessError: if another process does not join within the time limit.
    """

    def __init__(self, groups: Sequence[Sequence[int]], processes: Processes) -> None:
        """Create the groups in the same order on every process."""
        ranks = next(list(group) for group in groups if processes.rank in group)
        self.index, self.size = ranks.index(processes.rank), len(ranks)
        self.num_bytes = 0
        self._processes = processes
        self._group: Any = None
        # Every process creates every group, including others' groups: `new_group` is collective over the whole run.
        for group in groups:
            if len(group) > 1:
                self._group = processes.open_group(group) or self._group

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start to replace a tensor by its sum over the group, with the same bits on all of its ranks.

        Args:
            tensor: contiguous tensor on the device, with the same shape on every rank; all ranks must start their
                all-reduces in the same order.
        """
        if self.size == 1:
            return Pending(None, self._processes)
        if self._group is None:
            raise ProcessError(
                "the connections between these shards are closed, because the run has moved to other replicas or a "
                "pass has failed. Get the run's current model from trainer.model."
            )
        self.num_bytes += tensor.nbytes
        with self._processes.communicating(_WHAT):
            return Pending(dist.all_reduce(tensor, group=self._group, async_op=True), self._processes, _WHAT)

    def close(self) -> None:
        """Close the connections, so that no other rank keeps waiting for this process."""
        # Cleared first, so that a later pass gets the error of `all_reduce` instead of using a closed group.
        group, self._group = self._group, None
        if group is not None:
            self._processes.close_group(group)


PEFT_PREFIX = "base_model.model."
"""Prefix of PEFT's parameter names before the backbone's own names."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """How a linear layer is cut.

    Attributes:
        name: name of the layer within the backbone.
        is_row: whether the layer is row-parallel, cut by its inputs; otherwise it is column-parallel.
        size: size of the whole dimension that is cut.
        ranges: indices of that dimension that this process holds.
    """

    name: str
    is_row: bool
    size: int
    ranges: Ranges

    @property
    def num_held(self) -> int:
        """Number of features of the cut dimension that this process holds."""
        return sum(end - start for start, end in self.ranges)

    def take(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this process's part of a weight or bias that is cut along `dim`, as a contiguous copy."""
        piece = Piece(tuple(whole.shape), dim, self.ranges)
        # A view would keep the whole weight in memory.
        return piece.take(whole).clone(memory_format=torch.contiguous_format)


class TensorParallelModel:
    """One tensor parallel rank's part of a model: cuts its layers, and registers later tasks.

    All ranks of a group must hold the same model, whole or already cut to a stage, with the adapters of its tasks
    injected. Each rank creates this object with its own links, and then runs the same passes.

    Args:
        model: the model; it is cut in place, unless the group has one rank.
        links: all-reduces over the tensor parallel group.

    Attributes:
        model: the model, cut to the part of this rank.
        layers: how each layer was cut, by name within the backbone.

    Raises:
        UnsupportedModelError: if the architecture or a layer cannot be cut, or not into this number of parts; the model
            is not changed.

    Example:
        >>> parallel = TensorParallelModel(model, TensorLinks(layout.tensor_groups, processes))  # doctest: +SKIP
        >>> model(mux_batch).losses.sum().backward()  # on every rank with the same batch  # doctest: +SKIP
    """

    def __init__(self, model: MultiTaskPeftModel, links: TensorParallelLinks) -> None:
        """Cut the frozen weights, and every task's adapter to match."""
        self.model, self._links = model, links
        self.layers: dict[str, LayerCut] = {}
        self._hooks: dict[str, tuple[nn.Module, Any]] = {}
        if links.size == 1:
            return
        blocks = blocks_of(model.backbone, links.size)
        self._attentions = tuple(f"{block.name}." for block in blocks if block.is_attention)
        self._bare = {f"{block.name}.{leaf}" for block in blocks if not block.module for leaf in block.columns}
        cuts, head = [], self._planned_head()
        for block in blocks:
            if not block.has_experts:
                cuts += [self._planned(f"{block.name}.{leaf}", parts) for leaf, parts in block.columns.items()]
                row = f"{block.name}.{block.row}"
                cuts.append(self._planned(row, features(model.backbone.get_submodule(row))[:1], is_row=True))
        # Everything is checked before anything is cut, so that a rejected model is unchanged.
        for cut in [*cuts, *([] if head is None else [head])]:
            _check_layer(model.backbone.get_submodule(cut.name), cut.name)
        with torch.no_grad():
            for cut in cuts:
                self._cut_layer(cut)
            if head is not None:
                self._cut_head(head)
            for block in blocks:
                self._cut_block(block)
        model.tp_size = links.size
        for name in model.tasks:
            # New flat pages, since parameters have new shapes.
            model.registry.adopt(name, model.task_parameters(name), model.device)
        self.register_pieces(model.tasks)

    def register_pieces(self, names: Sequence[str]) -> None:
        """Record the pieces of tasks whose adapters have the shapes of this rank, and add hooks to new layers.

        To be called after `register_tasks`, because PEFT creates adapters with the rank's own shapes; their weights are
        set by `TaskRegistry.place_whole`.
        """
        if self._links.size == 1:
            return
        backbone, needed_rows = self.model.backbone, partial(rows_needed_now, self.model.stream)
        for name, cut in self.layers.items():
            layer = backbone.get_submodule(name)
            hooked, handle = self._hooks.get(name, (None, None))
            if hooked is layer:
                continue
            # The sum must be outside the adapter, which PEFT may have wrapped around the layer in the meantime: the
            # outputs of A and B, and their gradients, are partial as well.
            words = getattr(getattr(layer, "base_layer", layer), "vocab_parallel_head", None)
            new = None
            if words is not None:
                new = layer.register_forward_hook(words.complete_logits)
            elif cut.is_row:
                new = reduce_output(layer, self._links)
            elif name in self._bare:
                # In other blocks the block does this for all of its column-parallel layers together.
                new = reduce_input_gradient(layer, self._links, needed_rows)
            if handle is not None:
                handle.remove()
            self._hooks[name] = layer, new
        for name in names:
            self.model.registry.forget_pieces(name)
            for key, parameter in self.model.task_parameters(name).items():
                self.model.registry.pieces[name, key] = self._piece(key, parameter)
        self.model.stream.clear_tables()

    def _piece(self, key: str, parameter: nn.Parameter) -> Piece:
        """Return which part of a parameter this process holds."""
        kind = kind_of_parameter(key)
        site = "" if kind is None else kind.site_of(key).removeprefix(PEFT_PREFIX)
        cut = self.layers.get(site)
        if kind is None or cut is None:
            # Layers that are not cut compute the same gradient on all ranks, so only rank 0's is counted. But layers
            # whose output is used by the heads of all ranks (in latent attention) have a partial gradient on each rank.
            leads_to_heads = site.startswith(self._attentions)
            return Piece.whole(parameter.shape, adds=leads_to_heads or self._links.index == 0)
        dim = cut_dim(key, is_row=cut.is_row)
        if dim is None:
            return Piece.whole(parameter.shape)
        shape = tuple(cut.size if index == dim else length for index, length in enumerate(parameter.shape))
        return Piece(shape, dim, cut.ranges)

    # ------------------------------------------------------------------ planning

    def _planned(self, name: str, parts: Sequence[int], *, is_row: bool = False) -> LayerCut:
        return LayerCut(name, is_row, sum(parts), held_ranges(parts, self._links.index, self._links.size))

    def _planned_head(self) -> LayerCut | None:
        """Return how the output head will be cut; `None` if this process has no language model head."""
        backbone = self.model.backbone
        head = backbone.get_output_embeddings() if self.model.objectives.head.kind.is_shared else None
        if head is None or isinstance(head, PassThrough):
            return None
        name = next(name for name, module in backbone.named_modules() if module is head)
        vocab_size = features(head)[1]
        if vocab_size < self._links.size:
            raise UnsupportedModelError(
                f"{name} must have at least one word per shard, got {vocab_size} words for {self._links.size} "
                "shards. Set tensor_parallel_size to less."
            )
        return self._planned(name, [vocab_size])

    # ------------------------------------------------------------------ cutting

    def _cut_layer(self, cut: LayerCut) -> None:
        """Cut one linear layer, and the adapters on it."""
        layer: Any = self.model.backbone.get_submodule(cut.name)
        base: Any = getattr(layer, "base_layer", layer)
        is_transposed = isinstance(base, Conv1D)
        weight = cut.take(base.weight.data, 1 if cut.is_row != is_transposed else 0)
        base.weight = nn.Parameter(weight, requires_grad=False)
        if base.bias is not None:
            bias_K = base.bias.data
            if not cut.is_row:
                bias_K = cut.take(bias_K, 0)
            elif self._links.index > 0:
                # Outputs of row-parallel layers are summed, so only one rank may add the bias. The others have zeros
                # instead of no bias, because Conv1D always adds one.
                bias_K = torch.zeros_like(bias_K)
            base.bias = nn.Parameter(bias_K, requires_grad=False)
        if cut.is_row:
            # The position of its inputs in the whole: dropout is drawn for the whole width, so that shards drop the
            # same elements as a single process.
            base.input_window = Window(cut.ranges[0][0], cut.size)
        self.layers[cut.name] = cut
        size_name = "in_features" if cut.is_row else "out_features"
        if isinstance(base, Conv1D):
            setattr(base, "nx" if cut.is_row else "nf", cut.num_held)
        else:
            setattr(base, size_name, cut.num_held)
        if layer is base:
            return
        setattr(layer, size_name, cut.num_held)
        for linear in (layer.lora_A if cut.is_row else layer.lora_B).values():
            linear.weight.data = cut.take(linear.weight.data, 1 if cut.is_row else 0)
            # One of the whole shape would not fit any more.
            linear.weight.grad = None
            setattr(linear, size_name, cut.num_held)

    def _cut_head(self, cut: LayerCut) -> None:
        """Keep the rows of this rank's words; a view if the weight is tied to the embedding, which stays whole."""
        layer: Any = self.model.backbone.get_submodule(cut.name)
        base: Any = getattr(layer, "base_layer", layer)
        ((first, end),) = cut.ranges
        named = self.model.backbone.named_parameters(remove_duplicate=False)
        is_tied = sum(parameter is base.weight for _, parameter in named) > 1
        whole_VD = base.weight.data
        base.vocab_parallel_head = VocabParallelHead(self._links, first, end, cut.size)
        self._cut_layer(cut)
        if is_tied:  # the embedding needs all rows anyway, and a copy would waste memory
            base.weight = nn.Parameter(whole_VD[first:end], requires_grad=False)

    def _cut_block(self, block: Block) -> None:
        """Cut the other parameters of a block, and add the sum of its input gradient over the ranks."""
        module: Any = self.model.backbone.get_submodule(block.name)
        if block.has_experts:
            # Every (frozen) expert is cut by the features within it.
            for name, parts in block.columns.items():
                self._cut_parameter(module, name, 1, parts)
            self._cut_parameter(module, block.row, 2)
            reduce_output(module, self._links)
        for name in block.vectors:
            home, _, leaf = name.rpartition(".")
            self._cut_parameter(module.get_submodule(home), leaf, 0)
        for name in block.norms:
            norm_over_all_ranks(module.get_submodule(name), self._links)
        if block.is_attention:
            count_own_heads(module, self.model.backbone.config.get_text_config(), self._links)
        if block.module:
            reduce_input_gradient(module, self._links, partial(rows_needed_now, self.model.stream))

    def _cut_parameter(self, home: Any, name: str, dim: int, parts: Sequence[int] = ()) -> None:
        whole = getattr(home, name).data
        cut = self._planned(name, parts or whole.shape[dim : dim + 1])
        setattr(home, name, nn.Parameter(cut.take(whole, dim), requires_grad=False))


def _check_layer(layer: Any, name: str) -> None:
    """Reject a layer that cannot be cut as a matrix."""
    base = getattr(layer, "base_layer", layer)
    if frozen_weight(base)[0] is None:
        raise UnsupportedModelError(
            f"{name} must be a linear layer whose weights are not quantised with tensor parallelism, got "
            f"{type(base).__name__}. Load the backbone in bf16, or set tensor_parallel_size=1."
        )
    if hasattr(base, "input_window") or hasattr(base, "vocab_parallel_head"):
        raise UnsupportedModelError(f"{name} is already cut. Load the model again.")
    kind = kind_of_layer(layer)
    if layer is not base and (kind is None or kind.name not in CAN_BE_CUT):
        allowed = ", ".join(kind.title for kind in KINDS.values() if kind.name in CAN_BE_CUT)
        raise UnsupportedModelError(
            f"the adapter of {name} must be {allowed} with tensor parallelism, got {type(layer).__name__}."
        )
