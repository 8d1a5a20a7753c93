"""Which layers of a backbone tensor parallelism cuts, and which indices each rank holds (M section 3.4.2).

The tensor parallel plan of transformers (`peft_mux.parallel.families`) defines which layers are cut, and how::

    colwise, packed_colwise    a linear layer by its outputs; experts of a mixture by the features within an expert
    rowwise                    by its inputs
    colwise_gather_output      cut by outputs here as well: matrices that lie packed in one layer are cut one by one,
    rowwise_split_input        and norms over the whole width of queries or keys are summed
    mla_kv_a_proj, replicated  whole; if heads are cut, its gradient is a sum over the ranks

Transformers has no rules for adapters. Here they are cut like their base layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.adapters.lora.layer import NAME as LORA
from peft_mux.modeling.pieces import PassThrough
from peft_mux.parallel.families import family_of

CAN_BE_CUT = frozenset({LORA})
"""Names of the kinds whose adapters tensor parallelism can cut."""

Ranges = tuple[tuple[int, int], ...]
"""Indices that a tensor parallel rank holds, as ascending (start, end) pairs."""

_COLUMN_STYLES = ("colwise", "colwise_gather_output", "packed_colwise")
_ROW_STYLES = ("rowwise", "rowwise_split_input")
_WHOLE_STYLES = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts", "local_params")
_PACKED = {"gate_up_proj": 2, "c_attn": 3}
"""Layers whose output consists of several equal matrices, by name."""

_WIDE_NORMS = {"q_norm": "q_proj", "k_norm": "k_proj"}
"""Norms of queries and keys, which some architectures compute over all heads, with the layer that they follow."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a decoder layer that tensor parallelism cuts: attention, an MLP, or the experts of a mixture.

    Its column-parallel layers read an input that is equal on all ranks, and its row-parallel layer gives a summand of
    the block's output. So the block needs one sum of its output over the tensor parallel group in the forward pass, and
    one of its input's gradient in the backward pass (Megatron-LM).

    Attributes:
        layer: name of the decoder layer within the backbone.
        module: name of the block within the decoder layer; empty if the layer itself holds the MLP (OPT).
        columns: column-parallel layers by name within the block, or parameters of experts, each with the sizes of the
            matrices that its output consists of.
        row: name of the row-parallel layer, or parameter of experts.
        vectors: parameters by name within the block with one entry, or row, for each head or channel of all heads.
        norms: norms by name within the block that are computed over all heads.
        is_attention: whether the block is cut by heads.
        has_experts: whether `columns` and `row` are parameters of experts, `[E, K, D]`.
    """

    layer: str
    module: str
    columns: Mapping[str, tuple[int, ...]]
    row: str
    vectors: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    is_attention: bool = False
    has_experts: bool = False

    @property
    def name(self) -> str:
        """Name of the block within the backbone."""
        return f"{self.layer}.{self.module}".rstrip(".")

    def inner(self, leaf: str) -> str:
        """Return the name of a module or parameter of the block within the decoder layer."""
        return f"{self.module}.{leaf}".lstrip(".")


def blocks_of(backbone: Any, tp_size: int) -> tuple[Block, ...]:
    """Return the blocks of a backbone's decoder layers that tensor parallelism cuts, layer by layer.

    Args:
        backbone: the transformers model, possibly without weights, possibly a stage of a pipeline.
        tp_size: n, the number of tensor parallel ranks of a stage.

    Raises:
        UnsupportedModelError: if the architecture cannot be cut, or not into this number of parts.
    """
    family, config = family_of(backbone), backbone.config.get_text_config()
    prefix = f"{backbone.base_model_prefix}.{family.layers}"
    blocks: list[Block] = []
    for index, layer in enumerate(backbone.get_submodule(prefix)):
        if not isinstance(layer, PassThrough):
            blocks += _blocks_of_layer(f"{prefix}.{index}", layer, family.tp_plan, config)
    sizes: dict[str, int] = {}
    if any(block.is_attention for block in blocks):
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        sizes = {"num_attention_heads": heads, "num_key_value_heads": groups}
    for block in blocks:
        if not block.is_attention:
            neurons = min(size for parts in block.columns.values() for size in parts)
            sizes["intermediate_size" if block.module in ("mlp", "") else f"neurons of {block.module}"] = neurons
    for field_name, size in sizes.items():
        if size % tp_size:
            divisors = [count for count in range(1, size + 1) if all(other % count == 0 for other in sizes.values())]
            raise UnsupportedModelError(
                "tensor_parallel_size must divide the attention heads, the key-value heads and the neurons, so it "
                f"must be one of {', '.join(map(str, divisors))}, got {tp_size} for {type(backbone).__name__} with "
                f"{field_name}={size}."
            )
    return tuple(blocks)


def _blocks_of_layer(name: str, layer: nn.Module, plan: Mapping[str, str], config: Any) -> Iterator[Block]:
    """Yield the blocks of a decoder layer according to a plan; the layer may have adapters.

    Args:
        name: name of the layer within the backbone.
        layer: the decoder layer.
        plan: the tensor parallel plan of the architecture; some of its entries may only exist in other layers.
        config: the configuration of the language model.
    """

    def odd(where: str, got: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{name}: its tensor parallel plan must have layers cut by outputs ({', '.join(_COLUMN_STYLES)}) before "
            f"one cut by inputs ({', '.join(_ROW_STYLES)}), got {got} at {where!r}. Set tensor_parallel_size=1."
        )

    # The entries of the plan for each module: layers cut by outputs, layers cut by inputs, and vectors.
    modules: dict[str, tuple[dict[str, tuple[int, ...]], list[str], list[str]]] = {}
    for key, style in plan.items():
        parent, _, leaf = key.rpartition(".")
        here = _at(layer, key)
        if here is None or style in _WHOLE_STYLES:
            continue
        columns, rows, vectors = modules.setdefault(parent, ({}, [], []))
        if style in _ROW_STYLES:
            rows.append(leaf)
        elif style not in _COLUMN_STYLES:
            raise odd(leaf, repr(style))
        elif isinstance(here, nn.Parameter) and here.ndim < 3:
            vectors.append(leaf)
        else:
            # The sizes of the matrices that the output of a column-parallel layer consists of.
            whole = features(here)[1]
            if leaf == "qkv_proj":
                heads = config.num_attention_heads
                groups = getattr(config, "num_key_value_heads", None) or heads
                channels = whole // (heads + 2 * groups)
                columns[leaf] = heads * channels, groups * channels, groups * channels
            else:
                count = _PACKED.get(leaf, 2 if style == "packed_colwise" else 1)
                columns[leaf] = (whole // count,) * count
    for module, (columns, rows, vectors) in modules.items():
        if len(rows) != 1 or not columns:
            raise odd(module, f"{sorted(columns)} and {rows}")
        inside = _at(layer, module) if module else layer
        has_experts = isinstance(_at(inside, rows[0]), nn.Parameter)
        if has_experts and {key for key, _ in inside.named_parameters()} - {*columns, *rows}:
            raise odd(module, "experts with other parameters than the plan names")
        norms = []
        for norm, follows in _WIDE_NORMS.items():
            weight = getattr(getattr(inside, norm, None), "weight", None)
            if weight is not None and follows in columns and len(weight) != getattr(inside, "head_dim", None):
                if tuple(weight.shape) != (sum(columns[follows]),):
                    raise odd(norm, f"a norm with weights {tuple(weight.shape)}")
                norms.append(norm)
        vectors += [f"{norm}.weight" for norm in norms]
        yield Block(name, module, columns, rows[0], tuple(vectors), tuple(norms), "att" in module, has_experts)


def features(layer: Any) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer or of an expert parameter `[E, K, D]`."""
    if isinstance(layer, nn.Parameter):
        return layer.shape[2], layer.shape[1]
    base = _frozen(layer)
    return (base.nx, base.nf) if isinstance(base, Conv1D) else (base.in_features, base.out_features)


def _at(module: Any, name: str) -> Any:
    """Return a module or parameter by name; `None` if there is none."""
    for leaf in name.split("."):
        module = getattr(_frozen(module), leaf, None)
    return module


def _frozen(module: Any) -> Any:
    """Return the frozen layer inside its adapters, which are nested if tasks have several PEFT types."""
    while (inner := getattr(module, "base_layer", None)) is not None:
        module = inner
    return module


def held_ranges(parts: Sequence[int], tp_rank: int, tp_size: int) -> Ranges:
    """Return the indices of a dimension that a tensor parallel rank holds.

    Args:
        parts: sizes of the matrices that are concatenated along the dimension, each of which is cut.
        tp_rank: number of the rank within its group.
        tp_size: n, the number of ranks in the group.

    Example:
        >>> held_ranges([12], 1, 2), held_ranges([4, 4, 4], 1, 2)
        (((6, 12),), ((2, 4), (6, 8), (10, 12)))
    """
    ranges, start = [], 0
    for size in parts:
        # Not `size // n` per rank: if a vocabulary is not divisible, ranks differ by a word.
        first, last = (start + size * number // tp_size for number in (tp_rank, tp_rank + 1))
        ranges.append((first, last))
        start += size
    return tuple(ranges)


def cut_dim(parameter_name: str, *, is_row: bool) -> int | None:
    """Return which dimension of an adapter's parameter tensor parallelism cuts; `None` if every shard holds it whole.

    Of LoRA's A that is the input dimension if the layer is cut by its inputs, of B otherwise the output dimension.

    Args:
        parameter_name: PEFT's name of a parameter of an adapter on a layer that is cut.
        is_row: whether the layer is cut by its inputs; otherwise by its outputs.
    """
    factor, dim = (".lora_A.", 1) if is_row else (".lora_B.", 0)
    return dim if factor in parameter_name and parameter_name.endswith(".weight") else None
