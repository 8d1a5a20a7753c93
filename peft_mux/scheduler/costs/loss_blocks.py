"""How many rows of logits the loss holds at a time, as the kernels decide it; pure numbers, for the memory model."""

from __future__ import annotations

# These are the numbers of `block_rows` in `peft_mux.kernels.cross_entropy`, which this folder may not import, as it
# needs torch; a test compares the two.
_LOSS_BLOCK_ELEMENTS = {"cpu": 2**22}
_DEFAULT_LOSS_BLOCK_ELEMENTS = 2**26
_LEAST_BLOCK_ROWS = 16
_TILE_ROWS = 128


def loss_block_rows(vocab_size: int, device_type: str) -> int:
    """Return how many rows of logits the loss holds at a time.

    Args:
        vocab_size: V, words of the head; where tensor parallelism cuts it, those of one device.
        device_type: "cuda" or "cpu", whose kernels take blocks of different size.
    """
    elements = _LOSS_BLOCK_ELEMENTS.get(device_type, _DEFAULT_LOSS_BLOCK_ELEMENTS)
    rows = max(_LEAST_BLOCK_ROWS, elements // vocab_size)
    return rows // _TILE_ROWS * _TILE_ROWS if device_type != "cpu" and rows >= _TILE_ROWS else rows
