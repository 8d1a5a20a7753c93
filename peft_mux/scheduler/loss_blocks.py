"""How many rows of logits the loss holds at a time, as the kernels decide it; pure numbers, for the memory model."""

from __future__ import annotations

_LOSS_BLOCK_ELEMENTS = {"cpu": 2**22}
_DEFAULT_LOSS_BLOCK_ELEMENTS = 2**26
_LEAST_BLOCK_ROWS = 16
_TILE_ROWS = 128
"""As `kernels.linear_cross_entropy.block_rows` has it; a test compares the two."""


def loss_block_rows(vocab_size: int, device_type: str) -> int:
    """Return how many rows of logits the loss holds at a time.

    Args:
        vocab_size: V; where tensor parallelism cuts the head, the words of one device.
        device_type: "cuda" or "cpu".
    """
    elements = _LOSS_BLOCK_ELEMENTS.get(device_type, _DEFAULT_LOSS_BLOCK_ELEMENTS)
    rows = max(_LEAST_BLOCK_ROWS, elements // vocab_size)
    return rows // _TILE_ROWS * _TILE_ROWS if device_type != "cpu" and rows >= _TILE_ROWS else rows
