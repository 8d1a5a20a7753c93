"""`TensorParallelModel`: a multi-task model, cut in place to what one tensor parallel rank holds (M section 3.4.2).

Frozen weights are cut as Megatron-LM cuts them, and every task's A and B to match
(`peft_mux.modeling.sharding.pieces`)::

    column-parallel    W [K/n, D]    A whole, partial gradient    B [K/n, R]
    row-parallel       W [K, D/n]    A [R, D/n]                   B whole, partial gradient
    head               W [V/n, D]    as column-parallel; a view of the embedding where they are tied
    everything else    whole on all ranks, which compute the same bits

Modules keep their classes, and the model code of transformers runs as it is; hooks put the all-reduces in
(`peft_mux.modeling.sharding.sums`). The bias of a row-parallel layer is rank 0's alone.

Shape letters: K output features, D input features, R rank of an adapter, V vocabulary, n tensor parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.engine.tensor.cut import Ranges, blocks_of, held_ranges
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.cross_entropy.vocab_parallel import TensorParallelLinks
from peft_mux.kernels.philox import Window
from peft_mux.modeling.adapters.kind import KINDS, kind_of_layer, kind_of_parameter
from peft_mux.modeling.backbone.families import Block, family_of
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.sharding.pass_through import PassThrough
from peft_mux.modeling.sharding.pieces import Piece
from peft_mux.modeling.sharding.sums import reduce_input_gradient, reduce_output
from peft_mux.modeling.sharding.vocabulary import VocabParallelHead, complete_logits

_PEFT_PREFIX = "base_model.model."
"""What PEFT's names of parameters have before the backbone's own names."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """How a linear layer is cut.

    Attributes:
        name: name of the layer within the backbone.
        is_row: whether the layer is row-parallel, cut by its inputs; otherwise it is column-parallel.
        size: length of the whole dimension that is cut.
        ranges: indices of that dimension that this process holds.
    """

    name: str
    is_row: bool
    size: int
    ranges: Ranges

    @property
    def num_held(self) -> int:
        """Features of the cut dimension that this process holds."""
        return sum(end - start for start, end in self.ranges)

    def take(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what this process holds of a tensor, contiguous and in memory of its own.

        Args:
            whole: the whole weight or bias.
            dim: the dimension that is cut.
        """
        piece = Piece(tuple(whole.shape), dim, self.ranges)
        # A view would keep the whole weight in memory, of which the process is to hold 1/n.
        return piece.take(whole).clone(memory_format=torch.contiguous_format)

    def piece(self, dim: int | None, part: torch.Tensor) -> Piece:
        """Return which part of a parameter of an adapter on this layer a process holds.

        Args:
            dim: the dimension of the parameter that is cut with the layer; `None` where every rank holds all of it.
            part: the tensor that the process holds of it.
        """
        if dim is None:
            return Piece.whole(part.shape)
        shape = tuple(self.size if index == dim else length for index, length in enumerate(part.shape))
        return Piece(shape, dim, self.ranges)


class TensorParallelModel:
    """One tensor parallel rank's part of a model: what was cut, and how tasks that come later are taken in.

    Args:
        model: the model, whole or cut to a stage; it is cut in place.
        links: all-reduces over the tensor parallel group.

    Attributes:
        model: the model, cut to what this rank holds.
        links: all-reduces over the tensor parallel group.
        layers: how each layer was cut, by name within the backbone.

    Raises:
        UnsupportedModelError: for an architecture, a number of ranks or a layer that cannot be cut; nothing is
            changed then.

    Example:
        >>> links = TensorLinks(layout.tensor_groups, processes)  # doctest: +SKIP
        >>> parallel = TensorParallelModel(model, links)  # doctest: +SKIP
        >>> model(mux_batch).losses.sum().backward()  # on every rank with the same batch  # doctest: +SKIP
    """

    def __init__(self, model: MultiTaskPeftModel, links: TensorParallelLinks) -> None:
        """Cut the frozen weights, and every task's adapter to match."""
        self.model, self.links = model, links
        self.layers: dict[str, LayerCut] = {}
        self._output_hooks: dict[str, tuple[nn.Module, Any]] = {}
        if links.size == 1:
            return
        blocks = blocks_of(model.backbone, links.size)
        cuts, head = list(self._plan_layers(blocks)), self._plan_head()
        # All is checked before anything is cut, so that a refused model is left as it was.
        for cut in [*cuts, *([] if head is None else [head])]:
            _check_layer(model.backbone.get_submodule(cut.name), cut.name)
        with torch.no_grad():
            for cut in cuts:
                self._cut_layer(cut)
            if head is not None:
                self._cut_head(head)
        self._adjust_blocks(blocks)
        model.tp_size = links.size
        for name in model.tasks:
            # Flat pages anew, since parameters have new shapes.
            model.adopt_parameters(name, model.task_parameters(name))
        self.register_pieces(model.tasks)

    # ------------------------------------------------------------------ tasks

    def register_pieces(self, names: Sequence[str]) -> None:
        """Take in tasks whose adapters have the shapes of this rank: note which pieces they are, and hook new layers.

        To be called after `register_tasks`, as PEFT draws adapters of the rank's own shapes; what their weights are
        is for `MultiTaskPeftModel.place_whole` to say.

        Args:
            names: names of the tasks.
        """
        if self.links.size == 1:
            return
        self._hook_outputs()
        for name in names:
            self.model.registry.forget_pieces(name)
            for key, parameter in self.model.task_parameters(name).items():
                self.model.pieces[name, key] = self._piece(key, parameter)
        self.model.stream.clear_tables()

    def _piece(self, key: str, parameter: nn.Parameter) -> Piece:
        """Return which part of a parameter this process holds."""
        kind = kind_of_parameter(key)
        cut = None if kind is None else self.layers.get(kind.site_of(key).removeprefix(_PEFT_PREFIX))
        if kind is None or cut is None:
            # Layers that are not cut compute the same gradient on all ranks: it counts once, as rank 0's.
            return Piece.whole(parameter.shape, adds=self.links.index == 0)
        return cut.piece(kind.cut_dim(key, is_row=cut.is_row), parameter)

    # --------------------------------------------------------------- planning

    def _decoder_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each decoder layer of this process, with its name within the backbone."""
        backbone = self.model.backbone
        prefix = f"{backbone.base_model_prefix}.{family_of(backbone).layers}"
        for index, layer in enumerate(backbone.get_submodule(prefix)):
            if not isinstance(layer, PassThrough):
                yield f"{prefix}.{index}", layer

    def _plan_layers(self, blocks: tuple[Block, ...]) -> Iterator[LayerCut]:
        """Yield how each linear layer of the decoder will be cut."""
        index, size = self.links.index, self.links.size
        for name, layer in self._decoder_layers():
            for block in blocks:
                parent = f"{name}.{block.module}"
                for leaf, fused in block.columns.items():
                    whole = _features(layer.get_submodule(f"{block.module}.{leaf}"))[1]
                    yield LayerCut(f"{parent}.{leaf}", False, whole, held_ranges(whole, index, size, fused))
                whole = _features(layer.get_submodule(f"{block.module}.{block.row}"))[0]
                yield LayerCut(f"{parent}.{block.row}", True, whole, held_ranges(whole, index, size))

    def _plan_head(self) -> LayerCut | None:
        """Return how the output head will be cut; `None` where there is none of a language model in this process."""
        backbone = self.model.backbone
        head = backbone.get_output_embeddings() if self.model.objectives.head.kind.is_shared else None
        if head is None or isinstance(head, PassThrough):
            return None
        name = next(name for name, module in backbone.named_modules() if module is head)
        vocab_size = _features(head)[1]
        if vocab_size < self.links.size:
            raise UnsupportedModelError(
                f"{name} has {vocab_size} words for {self.links.size} shards; allowed: at least one word a shard. Set"
                " tensor_parallel_size to less."
            )
        return LayerCut(name, False, vocab_size, held_ranges(vocab_size, self.links.index, self.links.size))

    # ---------------------------------------------------------------- cutting

    def _cut_layer(self, cut: LayerCut) -> None:
        """Cut one linear layer, and the adapters on it."""
        layer: Any = self.model.backbone.get_submodule(cut.name)
        base: Any = getattr(layer, "base_layer", layer)
        is_transposed = isinstance(base, Conv1D)
        weight = cut.take(base.weight.data, 1 if cut.is_row != is_transposed else 0)
        base.weight = nn.Parameter(weight, requires_grad=False)
        if base.bias is not None:
            base.bias = nn.Parameter(self._bias_part(cut, base.bias.data), requires_grad=False)
        if cut.is_row:
            # Where its inputs lie in the whole: dropout draws for the whole width, so that shards drop what one process
            # would.
            base.input_window = Window(cut.ranges[0][0], cut.size)
        self._adjust_sizes(cut, layer, base)

    def _cut_head(self, cut: LayerCut) -> None:
        """Keep the rows of this rank's words: a view where the embedding is the same weight and stays whole."""
        layer: Any = self.model.backbone.get_submodule(cut.name)
        base: Any = getattr(layer, "base_layer", layer)
        ((first, end),) = cut.ranges
        named = self.model.backbone.named_parameters(remove_duplicate=False)
        is_tied = sum(parameter is base.weight for _, parameter in named) > 1
        # Tied, the embedding needs all rows in any case, and a copy of some would be memory for nothing.
        weight = base.weight.data[first:end]
        base.weight = nn.Parameter(weight if is_tied else weight.clone(), requires_grad=False)
        if base.bias is not None:
            base.bias = nn.Parameter(base.bias.data[first:end].clone(), requires_grad=False)
        base.vocab_parallel_head = VocabParallelHead(self.links, first, end, cut.size)
        self._adjust_sizes(cut, layer, base)

    def _bias_part(self, cut: LayerCut, bias_K: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a bias `[K]`."""
        if cut.is_row:
            # Outputs of row-parallel layers are summed, so only one rank may add the bias. Zeros on the others rather
            # than no bias: Conv1D adds one in any case.
            return bias_K if self.links.index == 0 else torch.zeros_like(bias_K)
        return cut.take(bias_K, 0)

    def _adjust_sizes(self, cut: LayerCut, layer: Any, base: Any) -> None:
        """Set the new sizes of a layer, and cut every adapter on it to match."""
        self.layers[cut.name] = cut
        features = "in_features" if cut.is_row else "out_features"
        if isinstance(base, Conv1D):
            setattr(base, "nx" if cut.is_row else "nf", cut.num_held)
        else:
            setattr(base, features, cut.num_held)
        if layer is base:
            return
        setattr(layer, features, cut.num_held)
        kind = kind_of_layer(layer)
        assert kind is not None, "layers were checked before they are cut"
        kind.cut(layer, cut)

    def _adjust_blocks(self, blocks: tuple[Block, ...]) -> None:
        """Let each block sum the gradient of its input over the ranks, and attention modules count their own heads."""
        for _, layer in self._decoder_layers():
            for block in blocks:
                module = layer.get_submodule(block.module)
                reduce_input_gradient(module, self.links)
                if block.is_attention:
                    self._adjust_heads(module)

    def _adjust_heads(self, module: Any) -> None:
        """Set how many heads an attention module has now, and which of the whole model's they are."""
        for count in family_of(self.model.backbone).head_counts:
            setattr(module, count, getattr(module, count) // self.links.size)
        num_heads = self.model.backbone.config.num_attention_heads
        # Attention dropout draws by the number of the head in the whole model.
        module.head_window = Window(num_heads * self.links.index // self.links.size, num_heads)

    def _hook_outputs(self) -> None:
        """Hook the sums of outputs onto the layers that model code calls: PEFT wraps some of them when a task comes."""
        for name, cut in self.layers.items():
            layer = self.model.backbone.get_submodule(name)
            words = getattr(getattr(layer, "base_layer", layer), "vocab_parallel_head", None)
            hooked, handle = self._output_hooks.get(name, (None, None))
            if hooked is layer or not (cut.is_row or words):
                continue
            # The sum has to stand behind the adapter: A and B of a row-parallel layer give partial outputs as well.
            if handle is not None:
                handle.remove()
            new = reduce_output(layer, self.links) if words is None else complete_logits(layer, words)
            self._output_hooks[name] = layer, new


def cut_model(model: MultiTaskPeftModel, links: TensorParallelLinks) -> TensorParallelModel:
    """Cut a model, whole or already cut to a stage, to one tensor parallel rank's part of it, in place.

    All ranks of a group must hold the same model; each calls this with its own links, and then runs the same passes.

    Args:
        model: the model, with the adapters of its tasks injected.
        links: all-reduces over the tensor parallel group; nothing is changed where it has one rank.

    Raises:
        UnsupportedModelError: for an architecture, a number of ranks or a layer that cannot be cut; nothing is
            changed then.
    """
    return TensorParallelModel(model, links)


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
    if hasattr(base, "input_window") or hasattr(base, "vocab_parallel_head"):
        raise UnsupportedModelError(f"{name} is cut already; allowed: a model that no shard was made of. Load it anew.")
    kind = kind_of_layer(layer)
    if layer is not base and (kind is None or not kind.can_be_cut):
        allowed = ", ".join(one.title for one in KINDS.values() if one.can_be_cut)
        raise UnsupportedModelError(
            f"{name} is adapted by a {type(layer).__name__}; allowed with tensor parallelism: {allowed}."
        )
