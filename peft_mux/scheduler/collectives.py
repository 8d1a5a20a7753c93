"""Seconds of what devices of a stage, or replicas that divide the backbone, tell one another: rings over one link.

A ring of n devices adds a message of b bytes up in 2 (n - 1) rounds of b / n bytes each, and gathers n parts of b / n
bytes in n - 1 rounds. Nothing here is overlapped with computing: M section 3.4.2 hides the sums of one hTask behind
another's products where a bucket has several hTasks, so that these are upper bounds.
"""

from __future__ import annotations

from typing import Any

from peft_mux.scheduler.link import Link
from peft_mux.scheduler.loss_blocks import loss_block_rows
from peft_mux.scheduler.memory import ModelShape

SUMS_PER_LAYER = 4
"""Sums over the shards of a layer: after attention and after the MLP, forward and backward."""
_NUMBERS_PER_TARGET = 3
"""Of each shard: greatest logit, sum of exponentials, logit of the target (`kernels.sharded_cross_entropy`)."""
_FLOAT_BYTES = 4


def all_reduce_s(link: Link | None, num_devices: int, num_bytes: Any) -> Any:
    """Return seconds of one sum over devices.

    Args:
        link: between two of them; `None` where messages take no time.
        num_devices: n.
        num_bytes: of the message; a number, or an array of them.
    """
    if link is None or num_devices == 1:
        return 0.0 * num_bytes
    return 2 * (num_devices - 1) * link.transfer_s(num_bytes / num_devices)


def all_gather_s(link: Link | None, num_devices: int, num_bytes: Any) -> Any:
    """Return seconds in which every device gets the whole of what lies divided among all.

    Args:
        link: between two of them; `None` where messages take no time.
        num_devices: n.
        num_bytes: of the whole; a number, or an array of them.
    """
    if link is None or num_devices == 1:
        return 0.0 * num_bytes
    return (num_devices - 1) * link.transfer_s(num_bytes / num_devices)


def layer_sums_s(link: Link | None, num_devices: int, shape: ModelShape, tokens: Any) -> Any:
    """Return seconds of the sums of one layer, forward and backward, each over hidden states `[T, D]`.

    Args:
        link: between the devices of a stage.
        num_devices: n.
        shape: of the backbone.
        tokens: T; a number, or an array.
    """
    num_bytes = tokens * shape.hidden_size * shape.activation_bytes
    return SUMS_PER_LAYER * all_reduce_s(link, num_devices, num_bytes)


def loss_sums_s(link: Link | None, num_devices: int, shape: ModelShape, targets: Any, device_type: str) -> Any:
    """Return seconds of the sums of a loss whose vocabulary is cut.

    Each block of rows adds three numbers a target and shard up; the gradient of the hidden states is one sum.

    Args:
        link: between the devices of a stage.
        num_devices: n.
        shape: of the backbone.
        targets: of a micro-batch; a number, or an array.
        device_type: "cuda" or "cpu", for the rows of a block.
    """
    rows = loss_block_rows(-(-shape.vocab_size // num_devices), device_type)
    blocks = -(-targets // rows)
    numbers = _NUMBERS_PER_TARGET * num_devices * _FLOAT_BYTES
    # A block's latency counts as often as there are blocks; bytes are those of all targets together.
    latency_s = (blocks - 1) * all_reduce_s(link, num_devices, 0.0)
    gradient_s = all_reduce_s(link, num_devices, targets * shape.hidden_size * shape.activation_bytes)
    return (targets > 0) * (latency_s + all_reduce_s(link, num_devices, targets * numbers) + gradient_s)
