"""What kernels hold while they compute, as they decide it: blocks of logits, and sums of weight gradients.

Pure numbers, for the memory model.
"""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.scheduler.costs.loads import TaskLoad

# These are the numbers of `block_rows` in `peft_mux.kernels.cross_entropy`, which this folder may not import, as it
# needs torch; a test compares the two.
_LOSS_BLOCKS = {"cpu": (384, 2**22, 2**27)}
_DEFAULT_LOSS_BLOCKS = (512, 2**26, 2**28)
_LEAST_BLOCK_ROWS = 16
_TILE_ROWS = 128


def loss_block_rows(vocab_size: int, device_type: str) -> int:
    """Return how many rows of logits the loss holds at a time.

    Args:
        vocab_size: V, words of the head; where tensor parallelism cuts it, those of one device.
        device_type: "cuda" or "cpu", whose kernels take blocks of different size.
    """
    fast_rows, logits, most_logits = _LOSS_BLOCKS.get(device_type, _DEFAULT_LOSS_BLOCKS)
    fast = min(fast_rows, most_logits // vocab_size)
    rows = max(_LEAST_BLOCK_ROWS, fast, logits // vocab_size)
    return rows // _TILE_ROWS * _TILE_ROWS if device_type != "cpu" and rows >= _TILE_ROWS else rows


# ----------------------------------------------------------- weight gradients

# These are numbers of `peft_mux.kernels.lora`, which this folder may not import, as it needs torch; a test compares
# what is computed here with what the kernels allocate.
_CHUNK_ROWS = 512
_MAX_JOINT_RANK = 1024
_RANK_STEP = 8
_PART_BYTES = 4
_MOST_JOINT_LAYERS = 3
"""q, k and v: layers that read the same activations, whose factors A are worked on as one."""


def weight_gradient_bytes(loads: Sequence[TaskLoad], tokens: float, hidden_size: int, devices: int = 1) -> float:
    """Return the bytes of the largest sum of weight gradients in a pass of all tasks: fp32 `[chunks, rank, width]`.

    An upper bound: the three adapters of a task of greatest rank are taken to read the same activations.

    Args:
        loads: the loads of the tasks.
        tokens: tokens of the pass.
        hidden_size: width of the residual stream, which one end of each linear layer of a decoder layer has.
        devices: devices that share each layer (tensor parallelism).
    """
    # A chunk never crosses a task, so that each may leave its last one part empty.
    chunks = min(tokens, tokens // _CHUNK_ROWS + len(loads))
    widest = max((_widest_sum(load, hidden_size, devices) for load in loads), default=0.0)
    return chunks * widest * _PART_BYTES


def _widest_sum(load: TaskLoad, hidden_size: int, devices: int) -> float:
    """Return the elements of one chunk of the largest gradient of a task."""
    if not load.adapters:
        return 0.0
    columns = sorted((-(-adapter.rank // _RANK_STEP) * _RANK_STEP for adapter in load.adapters), reverse=True)
    joint = min(sum(columns[:_MOST_JOINT_LAYERS]), max(_MAX_JOINT_RANK, columns[0])) * hidden_size
    wide = max(adapter.rank * (adapter.device_width(devices) - hidden_size) for adapter in load.adapters)
    return max(float(joint), wide)
