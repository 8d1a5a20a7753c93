"""Which layers of a backbone tensor parallelism cuts, and how (M section 3.4.2; Megatron-LM).

A decoder block is two blocks that are cut alike: the layers that read the residual stream by their outputs (heads of
attention, neurons of the MLP), the layer that writes into it by its inputs. Each block then needs one sum of its output
over the shards in the forward pass, and one of its input's gradient in the backward pass.

The plan is transformers' own (`base_model_tp_plan`) where the architecture has one; GPT-2's is told here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.stages import PARTS, decoder_parts

Ranges = tuple[tuple[int, int], ...]
"""Indices that a shard holds, as ascending (start, end) pairs."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One block of a decoder layer.

    Attributes:
        module: name within the layer.
        columns: layers in it that are cut by their outputs, and of how many equal parts each one's output consists
            (GPT-2 keeps q, k and v in one layer).
        row: the layer in it that is cut by its inputs.
        is_attention: whether it is cut by heads.
    """

    module: str
    columns: Mapping[str, int]
    row: str
    is_attention: bool


_LLAMA = (
    BlockPlan("self_attn", {"q_proj": 1, "k_proj": 1, "v_proj": 1}, "o_proj", is_attention=True),
    BlockPlan("mlp", {"gate_proj": 1, "up_proj": 1}, "down_proj", is_attention=False),
)
_GPT2 = (
    BlockPlan("attn", {"c_attn": 3}, "c_proj", is_attention=True),
    BlockPlan("mlp", {"c_fc": 1}, "c_proj", is_attention=False),
)
_PLANS = {**dict.fromkeys(PARTS, _LLAMA), "gpt2": _GPT2}
_FROZEN_WHOLE = ("replicated_with_grad_allreduce",)
"""Kinds of transformers' plan that ask for nothing here: norms are frozen, so that their gradient is of no interest."""


def blocks_of(backbone: Any, num_shards: int) -> tuple[BlockPlan, ...]:
    """Return how the decoder layers of a backbone are cut.

    Args:
        backbone: the transformers model.
        num_shards: n.

    Raises:
        UnsupportedModelError: for an architecture that cannot be cut, or not into so many shards.
    """
    name, config = type(backbone).__name__, backbone.config
    kind = getattr(config, "model_type", None)
    if kind not in _PLANS:
        raise UnsupportedModelError(
            f"{name} (model type {kind!r}) cannot be cut for tensor parallelism; allowed: {', '.join(sorted(_PLANS))}."
            " Set tensor_parallel_size=1."
        )
    blocks = _PLANS[kind]
    _check_against_transformers(backbone, blocks)
    _check_sizes(name, config, num_shards)
    return blocks


def _check_against_transformers(backbone: Any, blocks: tuple[BlockPlan, ...]) -> None:
    """Refuse a backbone whose own plan says something else than what is done here."""
    plan: dict[str, str] | None = getattr(backbone.config, "base_model_tp_plan", None)
    if plan is None:
        return
    layers = decoder_parts(backbone).layers
    expected = {f"{layers}.*.{block.module}.{name}": "colwise" for block in blocks for name in block.columns}
    expected |= {f"{layers}.*.{block.module}.{block.row}": "rowwise" for block in blocks}
    found = {name: style for name, style in plan.items() if style not in _FROZEN_WHOLE}
    if found != expected:
        odd = sorted(set(found.items()) ^ set(expected.items()))[0]
        raise UnsupportedModelError(
            f"{type(backbone).__name__}: the tensor parallel plan of its configuration differs at {odd[0]} ({odd[1]});"
            f" allowed: {expected}. Set tensor_parallel_size=1, or take the transformers version that this was made"
            " for."
        )


def _check_sizes(name: str, config: Any, num_shards: int) -> None:
    heads = config.num_attention_heads
    neurons = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "intermediate_size": neurons,
    }
    for field, size in sizes.items():
        if size % num_shards:
            divisors = [count for count in range(1, size + 1) if all(other % count == 0 for other in sizes.values())]
            raise UnsupportedModelError(
                f"tensor_parallel_size is {num_shards}, and {name} has {field}={size}; allowed: sizes that divide"
                f" the attention heads, the key-value heads and the neurons: {', '.join(map(str, divisors))}."
            )


def shard_ranges(size: int, shard: int, num_shards: int, parts: int = 1) -> Ranges:
    """Return the indices that a shard holds of a dimension.

    Args:
        size: of the dimension.
        shard: number of the shard.
        num_shards: n.
        parts: equal parts that the dimension consists of, each of which is cut; it must divide `size`.

    Example:
        >>> shard_ranges(12, 1, 2), shard_ranges(12, 1, 2, parts=3)
        (((6, 12),), ((2, 4), (6, 8), (10, 12)))
    """
    part = size // parts
    first, last = (part * number // num_shards for number in (shard, shard + 1))
    return tuple((index * part + first, index * part + last) for index in range(parts))


HEAD_NUMBERS = ("num_heads", "split_size")
"""Numbers of GPT-2's attention module that count its own heads; Llama's kin read them off the activations."""
