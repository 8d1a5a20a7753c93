"""Chunks: equal-sized pieces of packs, the unit in which tasks are aligned (M §3.5, second step).

pack of 11 tokens, chunks of 4     | 0 1 2 3 | 4 5 6 7 | 8 9 10 . |
                                     chunk 0   chunk 1   chunk 2 (one token of padding where chunks must be equal)
"""

from __future__ import annotations

from collections.abc import Iterable

from peft_mux.errors import ConfigError


def chunk_size(lengths: Iterable[int], *, minimum: int = 64, override: int | None = None) -> int:
    """Return the chunk size: the greatest power of two that divides all lengths, but no less than `minimum` (M §3.5).

    Args:
        lengths: number of tokens of each sequence.
        minimum: the least chunk size; smaller ones leave kernels too little to do.
        override: the chunk size to take instead; `None` for the rule.

    Raises:
        ConfigError: if `override` or `minimum` is not at least 1.
    """
    for name, value in (("chunk_size", override), ("min_chunk_size", minimum)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}: got {value}; allowed: an integer of at least 1.")
    if override is not None:
        return override
    # The lowest bit that is set in any length is the greatest power of two that divides all of them.
    bits = 0
    for length in lengths:
        bits |= int(length)
    return max(minimum, bits & -bits)


def round_up(tokens: int, size: int) -> int:
    """Return the least multiple of the chunk size that holds `tokens`."""
    return -(-tokens // size) * size
