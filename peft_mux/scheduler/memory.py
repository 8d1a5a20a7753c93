"""How many bytes a run needs, from shapes alone: an analytic estimate, not a measurement.

Terms follow M Eq. 5: backbone parameters once, adapters with gradients and optimizer state for every task, and
activations for the tokens of one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GIB = 2**30
_ADAPTER_BYTES_PER_PARAMETER = 4 + 4 + 8 + 4
"""fp32 weight, gradient, two Adam moments, and the last good copy."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the estimate needs to know of a backbone.

    Attributes:
        num_layers: decoder or encoder layers.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        attention_size: query heads times channels.
        key_value_size: key-value heads times channels.
        vocab_size: rows of the output head.
        backbone_bytes: of all backbone parameters and buffers as they are held.
        activation_bytes: of one activation element.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    attention_size: int
    key_value_size: int
    vocab_size: int
    backbone_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak memory by part, in bytes.

    Attributes:
        backbone_bytes: frozen weights.
        adapter_bytes: adapter weights, gradients, optimizer state and last good copies of all tasks.
        activation_bytes: kept by one pass for its backward.
        workspace_bytes: blocks of logits and transient buffers.
    """

    backbone_bytes: int
    adapter_bytes: int
    activation_bytes: int
    workspace_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Sum of all parts."""
        return self.backbone_bytes + self.adapter_bytes + self.activation_bytes + self.workspace_bytes

    def summary(self) -> str:
        """Return one line, in GiB, or MiB where it is less."""
        parts = {
            "backbone": self.backbone_bytes,
            "adapters and optimizers": self.adapter_bytes,
            "activations": self.activation_bytes,
            "workspace": self.workspace_bytes,
        }
        unit, name_of_unit = (_GIB, "GiB") if self.peak_bytes >= _GIB else (2**20, "MiB")
        listed = ", ".join(f"{name} {size / unit:.2f}" for name, size in parts.items())
        return f"memory (analytic estimate)  peak {self.peak_bytes / unit:.2f} {name_of_unit}: {listed}"


def activation_bytes_per_token(shape: ModelShape, *, checkpointing: bool) -> int:
    """Return what one token leaves behind for the backward pass.

    A layer keeps its input, the two normed states, queries, keys, values, attention output, and the gate, up and
    product states of the MLP; with checkpointing only its input, plus one layer's worth while it is recomputed.
    """
    layer = (
        5 * shape.hidden_size + 2 * shape.attention_size + 2 * shape.key_value_size + 4 * shape.intermediate_size
    ) * shape.activation_bytes
    if checkpointing:
        return shape.num_layers * shape.hidden_size * shape.activation_bytes + layer
    return shape.num_layers * layer


def estimate_memory(
    shape: ModelShape,
    adapter_parameters: Sequence[int],
    *,
    max_tokens: int,
    checkpointing: bool,
    block_bytes: int,
) -> MemoryEstimate:
    """Estimate the peak of a run on one device.

    Args:
        shape: of the backbone.
        adapter_parameters: trainable parameters of each task.
        max_tokens: tokens of the largest pass.
        checkpointing: whether activations are recomputed.
        block_bytes: one block of logits in the loss.
    """
    per_token = activation_bytes_per_token(shape, checkpointing=checkpointing)
    transient = 4 * max_tokens * max(shape.intermediate_size, shape.hidden_size) * shape.activation_bytes
    return MemoryEstimate(
        backbone_bytes=shape.backbone_bytes,
        adapter_bytes=sum(adapter_parameters) * _ADAPTER_BYTES_PER_PARAMETER,
        activation_bytes=max_tokens * per_token,
        workspace_bytes=3 * block_bytes + transient,
    )
