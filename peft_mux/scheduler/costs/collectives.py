"""Seconds of collectives among the devices of a stage, or replicas that divide the backbone: rings over one link.

A ring of n devices adds a message of b bytes up in 2 (n - 1) rounds of b / n bytes each, and gathers n parts of b / n
bytes in n - 1 rounds. Nothing here is overlapped with computing: what passes in turns hide of it (M section 3.4.2) is
for `peft_mux.scheduler.planner.turn_times` to say.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from peft_mux.scheduler.costs.kernel_buffers import loss_block_rows
from peft_mux.scheduler.costs.link import Link
from peft_mux.scheduler.costs.model_shape import ModelShape

ALL_REDUCES_PER_LAYER = 4
"""After attention and after the MLP, forward and backward, over the devices that a layer is cut into."""
_NUMBERS_PER_TARGET = 3
"""Of each device: greatest logit, sum of exponentials, logit of the target (`peft_mux.kernels.cross_entropy`)."""
_FLOAT_BYTES = 4


def all_reduce_s(link: Link | None, num_devices: int, num_bytes: Any) -> Any:
    """Return the seconds of one sum over devices.

    Args:
        link: the link between two of the devices; `None` where messages take no time.
        num_devices: n, the devices of the ring.
        num_bytes: bytes of the message that is added up; a number, or an array of them.
    """
    if link is None or num_devices == 1:
        # Zero in the shape of `num_bytes`, which may be an array.
        return 0.0 * num_bytes
    # A reduce-scatter and an all-gather, of n - 1 rounds each.
    return 2 * (num_devices - 1) * link.transfer_s(num_bytes / num_devices)


def all_gather_s(link: Link | None, num_devices: int, num_bytes: Any) -> Any:
    """Return the seconds in which every device gets the whole of what lies divided among all.

    Args:
        link: the link between two of the devices; `None` where messages take no time.
        num_devices: n, the devices of the ring.
        num_bytes: bytes of the whole, of which each device has a part; a number, or an array of them.
    """
    if link is None or num_devices == 1:
        return 0.0 * num_bytes
    return (num_devices - 1) * link.transfer_s(num_bytes / num_devices)


def layer_all_reduces_s(link: Link | None, num_devices: int, shape: ModelShape, tokens: Any) -> Any:
    """Return the seconds of the all-reduces of one layer, forward and backward, each over hidden states `[T, D]`.

    Args:
        link: the link between the devices of a stage; `None` where messages take no time.
        num_devices: n, the devices that share the layer.
        shape: the shape of the backbone, for D and the bytes of an element.
        tokens: T, tokens of the micro-batch; a number, or an array of them.
    """
    num_bytes = tokens * shape.hidden_size * shape.activation_bytes
    return ALL_REDUCES_PER_LAYER * all_reduce_s(link, num_devices, num_bytes)


def loss_all_reduces_s(link: Link | None, num_devices: int, shape: ModelShape, targets: Any, device_type: str) -> Any:
    """Return the seconds of the all-reduces of a loss whose vocabulary is cut.

    Each block of rows adds three numbers a target and device up; the gradient of the hidden states is one sum.

    Args:
        link: the link between the devices of a stage; `None` where messages take no time.
        num_devices: n, the devices among which the words are divided.
        shape: the shape of the backbone, for its words and its hidden size.
        targets: loss terms of a micro-batch; a number, or an array of them.
        device_type: "cuda" or "cpu", which decides the rows of a block of the loss.
    """
    block_s, gradient_s, blocks = loss_sums(link, num_devices, shape, targets, device_type)
    return (targets > 0) * (blocks * block_s + gradient_s)


def loss_sums(
    link: Link | None, num_devices: int, shape: ModelShape, targets: Any, device_type: str
) -> tuple[Any, Any, Any]:
    """Return the seconds of one block's sum and of the gradient's, and the number of blocks.

    Args:
        link: the link between the devices of a stage; `None` where messages take no time.
        num_devices: n, the devices among which the words are divided.
        shape: the shape of the backbone, for its words and its hidden size.
        targets: loss terms of a micro-batch; a number, or an array of them.
        device_type: "cuda" or "cpu", which decides the rows of a block of the loss.
    """
    rows = loss_block_rows(-(-shape.vocab_size // num_devices), device_type)
    # At least one, so that nothing is divided by 0 where there are no targets.
    blocks = np.maximum(-(-targets // rows), 1)
    num_bytes = targets * (_NUMBERS_PER_TARGET * num_devices * _FLOAT_BYTES) / blocks
    gradient_s = all_reduce_s(link, num_devices, targets * shape.hidden_size * shape.activation_bytes)
    return all_reduce_s(link, num_devices, num_bytes), gradient_s, blocks
