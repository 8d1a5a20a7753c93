"""Whether a backbone can be cut for tensor parallelism, and which indices each rank holds (M section 3.4.2).

Which layers are cut, and how, is told by the table of families (`peft_mux.modeling.backbone.families`).
"""

from __future__ import annotations

from typing import Any

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.backbone.families import FAMILIES, Block, Family

Ranges = tuple[tuple[int, int], ...]
"""Indices that a tensor parallel rank holds, as ascending (start, end) pairs."""

_FROZEN_WHOLE = ("replicated_with_grad_allreduce",)
"""Kinds of transformers' plan that ask for nothing here: norms are frozen, so that their gradient is of no interest."""


def blocks_of(backbone: Any, tp_size: int) -> tuple[Block, ...]:
    """Return the blocks of a backbone's decoder layers that tensor parallelism cuts.

    Args:
        backbone: the transformers model, possibly without weights.
        tp_size: n, the number of tensor parallel ranks of a stage.

    Raises:
        UnsupportedModelError: for an architecture that cannot be cut, or not for so many ranks.
    """
    name, config = type(backbone).__name__, backbone.config
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise UnsupportedModelError(
            f"{name} (model type {kind!r}) cannot be cut for tensor parallelism; allowed:"
            f" {', '.join(sorted(FAMILIES))}. Set tensor_parallel_size=1."
        )
    family = FAMILIES[kind]
    _check_against_transformers(backbone, family)
    _check_sizes(name, config, tp_size)
    return family.blocks


def _check_against_transformers(backbone: Any, family: Family) -> None:
    """Refuse a backbone whose own plan says something else than the table of families."""
    plan: dict[str, str] | None = getattr(backbone.config, "base_model_tp_plan", None)
    if plan is None:
        return
    found = {name: style for name, style in plan.items() if style not in _FROZEN_WHOLE}
    if found != family.tp_plan:
        odd = sorted(set(found.items()) ^ set(family.tp_plan.items()))[0]
        raise UnsupportedModelError(
            f"{type(backbone).__name__}: the tensor parallel plan of its configuration differs at {odd[0]} ({odd[1]});"
            f" allowed: {family.tp_plan}. Set tensor_parallel_size=1, or take the transformers version that this was"
            " made for."
        )


def _check_sizes(name: str, config: Any, tp_size: int) -> None:
    heads = config.num_attention_heads
    neurons = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "intermediate_size": neurons,
    }
    for field, size in sizes.items():
        if size % tp_size:
            divisors = [count for count in range(1, size + 1) if all(other % count == 0 for other in sizes.values())]
            raise UnsupportedModelError(
                f"tensor_parallel_size is {tp_size}, and {name} has {field}={size}; allowed: sizes that divide"
                f" the attention heads, the key-value heads and the neurons: {', '.join(map(str, divisors))}."
            )


def held_ranges(size: int, tp_rank: int, tp_size: int, fused: int = 1) -> Ranges:
    """Return the indices of a dimension that a tensor parallel rank holds.

    Args:
        size: length of the whole dimension.
        tp_rank: number of the rank within its group.
        tp_size: n, the number of ranks in the group.
        fused: number of equal matrices that the dimension consists of, each of which is cut; it must divide `size`.

    Example:
        >>> held_ranges(12, 1, 2), held_ranges(12, 1, 2, fused=3)
        (((6, 12),), ((2, 4), (6, 8), (10, 12)))
    """
    part = size // fused
    # Not part // n a rank: a vocabulary need not divide evenly, and then ranks differ by a word.
    first, last = (part * number // tp_size for number in (tp_rank, tp_rank + 1))
    return tuple((index * part + first, index * part + last) for index in range(fused))
