"""Tensor parallelism: a multi-task model is turned into one of n shards of it, in place (M section 3.4.2).

Frozen weights are cut as Megatron-LM cuts them, and every task's A and B to match (`peft_mux.modeling.pieces`)::

    column-parallel    W [K/n, D]    A whole, partial gradient    B [K/n, R]
    row-parallel       W [K, D/n]    A [R, D/n]                   B whole, partial gradient
    head               W [V/n, D]    as column-parallel; a view of the embedding where they are tied
    everything else    whole on all shards, which compute the same bits

Modules keep their classes, and the model code of transformers runs as it is; hooks put the sums in where shards have to
speak (`peft_mux.modeling.tensor_layers`). The bias of a row-parallel layer is shard 0's alone.

Shape letters: K output features, D input features, R rank, V vocabulary, n shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.philox import Window
from peft_mux.kernels.sharded_cross_entropy import ShardLinks
from peft_mux.modeling.layers import frozen_weight
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.pieces import Piece
from peft_mux.modeling.slabs import TaskSlab
from peft_mux.modeling.stages import PassThrough, decoder_parts
from peft_mux.modeling.tensor_layers import read_by_shards, sum_output
from peft_mux.modeling.tensor_plan import HEAD_NUMBERS, BlockPlan, Ranges, blocks_of, shard_ranges
from peft_mux.modeling.vocabulary import VocabularyShard, sum_words

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class LayerShard:
    """How a linear layer is cut.

    Attributes:
        name: within the backbone.
        is_row: by its inputs; otherwise by its outputs.
        size: of the whole dimension that is cut.
        ranges: of it that lie here.
    """

    name: str
    is_row: bool
    size: int
    ranges: Ranges

    @property
    def num_held(self) -> int:
        """Features of the cut dimension that lie here."""
        return sum(end - start for start, end in self.ranges)

    def take(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what lies here of a tensor, contiguous and in memory of its own."""
        piece = Piece(tuple(whole.shape), dim, self.ranges)
        return piece.take(whole).clone(memory_format=torch.contiguous_format)

    def piece(self, factor: str, part: torch.Tensor) -> Piece:
        """Return what a process holds of an adapter's A ("lora_A") or B ("lora_B").

        Args:
            factor: which.
            part: that lies here.
        """
        if self.is_row == (factor == "lora_B"):
            return Piece.whole(part.shape)
        dim = 1 if self.is_row else 0
        shape = (part.shape[0], self.size) if self.is_row else (self.size, part.shape[1])
        return Piece(shape, dim, self.ranges)


class TensorShards:
    """One shard of a model: what was cut, and how tasks that come later are taken in.

    Args:
        model: whole, or cut to a stage; it becomes the shard.
        links: to the other shards.

    Attributes:
        model: the shard.
        links: to the other shards.
        layers: that were cut, by name within the backbone.

    Raises:
        UnsupportedModelError: for an architecture, a number of shards or a layer that cannot be cut; nothing is
            changed then.

    Example:
        >>> shards = TensorShards(model, TensorLinks(layout.tensor_groups, processes))  # doctest: +SKIP
        >>> model(mux_batch).losses.sum().backward()  # on every shard with the same batch  # doctest: +SKIP
    """

    def __init__(self, model: MultiTaskPeftModel, links: ShardLinks) -> None:
        """Cut the frozen weights, and every task's adapter to match."""
        self.model, self.links = model, links
        self.layers: dict[str, LayerShard] = {}
        self._sums: dict[str, tuple[nn.Module, Any]] = {}
        if links.size == 1:
            return
        blocks = blocks_of(model.backbone, links.size)
        planned = list(self._planned(blocks))
        head = self._planned_head()
        for shard in [*planned, *([] if head is None else [head])]:
            _check_layer(model.backbone.get_submodule(shard.name), shard.name)
        with torch.no_grad():
            for shard in planned:
                self._cut(shard)
            if head is not None:
                self._cut_head(head)
        self._adjust_blocks(blocks)
        model.num_shards = links.size
        for name in model.tasks:
            model._slabs[name] = TaskSlab(model.task_parameters(name), model.device)
        self.adopt(model.tasks)

    # ------------------------------------------------------------------ tasks

    def adopt(self, names: tuple[str, ...] | list[str]) -> None:
        """Take in tasks whose adapters have the shapes of this shard: register their pieces, and hang sums anew.

        To be called after `register_tasks`, as PEFT draws adapters of the shard's own shapes; what their weights are
        is for `MultiTaskPeftModel.place_whole` to say.

        Args:
            names: of the tasks.
        """
        if self.links.size == 1:
            return
        self._hang_sums()
        for name in names:
            self.forget(name)
            for key, parameter in self.model.task_parameters(name).items():
                self.model.pieces[name, key] = self._piece(key, parameter)
        self.model.stream.groups.clear()

    def forget(self, name: str) -> None:
        """Drop the pieces of a task that has left."""
        for key in [key for key in self.model.pieces if key[0] == name]:
            del self.model.pieces[key]

    def _piece(self, key: str, parameter: nn.Parameter) -> Piece:
        """Return what lies here of a parameter; layers that are not cut compute the same gradient on all shards."""
        layer, factor, leaf = ("", "", *key.removeprefix(_PEFT_PREFIX).rsplit(".", 2))[-3:]
        shard = self.layers.get(layer)
        if shard is None or leaf != "weight" or factor not in ("lora_A", "lora_B"):
            return Piece.whole(parameter.shape, adds=self.links.index == 0)
        return shard.piece(factor, parameter)

    # ---------------------------------------------------------------- cutting

    def _blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each decoder layer that lies here, with its name within the backbone."""
        backbone = self.model.backbone
        prefix = f"{backbone.base_model_prefix}.{decoder_parts(backbone).layers}"
        for index, layer in enumerate(backbone.get_submodule(prefix)):
            if not isinstance(layer, PassThrough):
                yield f"{prefix}.{index}", layer

    def _planned(self, blocks: tuple[BlockPlan, ...]) -> Iterator[LayerShard]:
        """Yield how each linear layer of the decoder will be cut."""
        index, size = self.links.index, self.links.size
        for name, layer in self._blocks():
            for block in blocks:
                parent = f"{name}.{block.module}"
                for leaf, parts in block.columns.items():
                    whole = _features(layer.get_submodule(f"{block.module}.{leaf}"))[1]
                    yield LayerShard(f"{parent}.{leaf}", False, whole, shard_ranges(whole, index, size, parts))
                whole = _features(layer.get_submodule(f"{block.module}.{block.row}"))[0]
                yield LayerShard(f"{parent}.{block.row}", True, whole, shard_ranges(whole, index, size))

    def _planned_head(self) -> LayerShard | None:
        """Return how the output head will be cut; `None` where there is none of a language model here."""
        backbone = self.model.backbone
        head = None if self.model.is_classifier else backbone.get_output_embeddings()
        if head is None or isinstance(head, PassThrough):
            return None
        name = next(name for name, module in backbone.named_modules() if module is head)
        vocab_size = _features(head)[1]
        if vocab_size < self.links.size:
            raise UnsupportedModelError(
                f"{name} has {vocab_size} words for {self.links.size} shards; allowed: at least one word a shard. Set"
                " tensor_parallel_size to less."
            )
        return LayerShard(name, False, vocab_size, shard_ranges(vocab_size, self.links.index, self.links.size))

    def _cut(self, shard: LayerShard) -> None:
        """Cut one linear layer, and the adapters on it."""
        layer: Any = self.model.backbone.get_submodule(shard.name)
        base: Any = getattr(layer, "base_layer", layer)
        is_transposed = isinstance(base, Conv1D)
        weight = shard.take(base.weight.data, 1 if shard.is_row != is_transposed else 0)
        base.weight = nn.Parameter(weight, requires_grad=False)
        if base.bias is not None:
            base.bias = nn.Parameter(self._bias(shard, base.bias.data), requires_grad=False)
        if shard.is_row:
            base.input_window = Window(shard.ranges[0][0], shard.size)
        self._adjust(shard, layer, base)

    def _cut_head(self, shard: LayerShard) -> None:
        """Keep the rows of this shard's words: a view where the embedding is the same weight and stays whole."""
        layer: Any = self.model.backbone.get_submodule(shard.name)
        base: Any = getattr(layer, "base_layer", layer)
        ((first, end),) = shard.ranges
        named = self.model.backbone.named_parameters(remove_duplicate=False)
        is_tied = sum(parameter is base.weight for _, parameter in named) > 1
        weight = base.weight.data[first:end]
        base.weight = nn.Parameter(weight if is_tied else weight.clone(), requires_grad=False)
        if base.bias is not None:
            base.bias = nn.Parameter(base.bias.data[first:end].clone(), requires_grad=False)
        base.vocabulary_shard = VocabularyShard(self.links, first, end, shard.size)
        self._adjust(shard, layer, base)

    def _bias(self, shard: LayerShard, bias_K: torch.Tensor) -> torch.Tensor:
        """Return this shard's part of a bias: outputs of row-parallel layers are added up, so it is shard 0's there."""
        if shard.is_row:
            return bias_K if self.links.index == 0 else torch.zeros_like(bias_K)
        return shard.take(bias_K, 0)

    def _adjust(self, shard: LayerShard, layer: Any, base: Any) -> None:
        """Tell layers their new sizes, and cut A or B of every adapter."""
        self.layers[shard.name] = shard
        features = "in_features" if shard.is_row else "out_features"
        if isinstance(base, Conv1D):
            setattr(base, "nx" if shard.is_row else "nf", shard.num_held)
        else:
            setattr(base, features, shard.num_held)
        if layer is base:
            return
        setattr(layer, features, shard.num_held)
        for linear in (layer.lora_A if shard.is_row else layer.lora_B).values():
            linear.weight.data = shard.take(linear.weight.data, 1 if shard.is_row else 0)
            linear.weight.grad = None
            setattr(linear, features, shard.num_held)

    def _adjust_blocks(self, blocks: tuple[BlockPlan, ...]) -> None:
        """Let each block add up what it hands back, and attention modules know how many heads they have."""
        for _, layer in self._blocks():
            for block in blocks:
                module = layer.get_submodule(block.module)
                read_by_shards(module, self.links)
                if block.is_attention:
                    self._adjust_heads(module)

    def _adjust_heads(self, module: Any) -> None:
        """Tell an attention module how many heads it has now, and which of the whole model's they are."""
        for number in HEAD_NUMBERS:
            if hasattr(module, number):
                setattr(module, number, getattr(module, number) // self.links.size)
        num_heads = self.model.backbone.config.num_attention_heads
        module.head_window = Window(num_heads * self.links.index // self.links.size, num_heads)

    def _hang_sums(self) -> None:
        """Hang the sums of outputs on the layers that model code calls: PEFT wraps some when a task comes."""
        for name, shard in self.layers.items():
            layer = self.model.backbone.get_submodule(name)
            words = getattr(getattr(layer, "base_layer", layer), "vocabulary_shard", None)
            hung, handle = self._sums.get(name, (None, None))
            if hung is layer or not (shard.is_row or words):
                continue
            if handle is not None:
                handle.remove()
            new = sum_output(layer, self.links) if words is None else sum_words(layer, words)
            self._sums[name] = layer, new


def shard_model(model: MultiTaskPeftModel, links: ShardLinks) -> TensorShards:
    """Turn a model, whole or cut to a stage, into one shard of it, in place.

    All shards must hold the same model; each calls this with its own links, and then runs the same passes.

    Args:
        model: with the adapters of its tasks injected.
        links: to the other shards; nothing is changed where there are none.

    Raises:
        UnsupportedModelError: as `TensorShards`.
    """
    return TensorShards(model, links)


def _features(layer: Any) -> tuple[int, int]:
    """Return how many features a linear layer reads and gives."""
    base = getattr(layer, "base_layer", layer)
    return (base.nx, base.nf) if isinstance(base, Conv1D) else (base.in_features, base.out_features)


def _check_layer(layer: Any, name: str) -> None:
    """Refuse what cannot be cut as a matrix."""
    base = getattr(layer, "base_layer", layer)
    if frozen_weight(base)[0] is None:
        raise UnsupportedModelError(
            f"{name} is a {type(base).__name__}; allowed with tensor parallelism: linear layers whose weights are not"
            " quantised. Load the backbone in bf16, or set tensor_parallel_size=1."
        )
    if hasattr(base, "input_window") or hasattr(base, "vocabulary_shard"):
        raise UnsupportedModelError(f"{name} is cut already; allowed: a model that no shard was made of. Load it anew.")
    if layer is not base and not isinstance(layer, LoraLayer):
        raise UnsupportedModelError(
            f"{name} is adapted by a {type(layer).__name__}; allowed with tensor parallelism: LoRA."
        )
