"""Times of operators from data-sheet numbers: what a plan stands on where nothing could be measured.

Matrix products take the longer of arithmetic and of reading the weights; element-wise operators and adapters take their
bytes. Launches are added for a layer, which counts those of its attention product, for an adapter and for the head;
those of the embedding are part of what a pass costs whatever its size. Numbers without a data sheet stand here as
assumptions, and nothing was measured for them. Good for comparing plans rather than for promising seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from peft_mux.scheduler.costs.hardware import Device
from peft_mux.scheduler.costs.model_shape import ModelShape

_BANDWIDTH_PART = 0.85
"""Of the stated bandwidth, what streaming kernels are assumed to reach."""
_ATTENTION_PART = 0.6
"""Of the efficiency of products, what fused attention is assumed to reach."""
_LAUNCH_S = {"cpu": 2e-5}
_GPU_LAUNCH_S = 4e-6
_LAYER_OPERATORS = 30
"""Launches of one decoder layer, forward and backward, without adapters."""
_ADAPTER_LAUNCHES = 6
"""Of one adapter: shrink, expand, and four products of the backward pass."""
_ELEMENTWISE_READS = 14
"""Times that a layer's element-wise operators read or write a hidden state, forward and backward."""
_ADAPTER_SATURATION_ELEMENTS = 2**21
"""Tokens times width at which one adapter alone keeps a data-centre GPU busy."""
_FORWARD_HEAD_PASSES = 2
"""Products of the output head: logits and the gradient of the hidden states; the frozen head gets none."""


class Roofline:
    """Times of operators under the two roofs of a device: arithmetic and bandwidth.

    Args:
        device: the data sheet of the device.
        shape: the shape of the backbone.
        num_devices: devices by which the cost model will divide base operators.
    """

    def __init__(self, device: Device, shape: ModelShape, num_devices: int) -> None:
        """Work out the roofs."""
        self.shape = shape
        self.num_devices = num_devices
        self.is_cpu = device.name == "cpu"
        self.launch_s = _LAUNCH_S.get(device.name, _GPU_LAUNCH_S)
        self.flops_per_s = device.flops_per_s * device.efficiency
        self.bytes_per_s = device.memory_bytes_per_s * _BANDWIDTH_PART
        d, i, a, k = shape.hidden_size, shape.intermediate_size, shape.attention_size, shape.key_value_size
        # Of a mixture all experts are read in a pass of any size, and each token computes with some of them.
        self._read_i = (shape.held_intermediate_size or i) / i
        self.linears = ((d, a), (d, k), (d, k), (a, d), (d, i), (d, i), (i, d))

    @property
    def widths(self) -> tuple[int, ...]:
        """Input plus output features of the linear layers of a decoder layer."""
        return tuple(inputs + outputs for inputs, outputs in self.linears)

    def bytes_s(self, num_bytes: NDArray[Any]) -> NDArray[Any]:
        """Return the seconds of reading or writing bytes.

        Args:
            num_bytes: bytes that pass through the memory of the device.
        """
        return num_bytes / self.bytes_per_s

    def product_s(self, tokens: NDArray[Any], elements: int, held: float = 1.0) -> NDArray[Any]:
        """Return the seconds of one product of rows with a frozen matrix, on one device's share.

        Args:
            tokens: rows of the product.
            elements: elements of the frozen matrix that a row is multiplied with.
            held: elements of the whole matrix, of which a row needs a part, over those.
        """
        # Eq. 3 divides by the devices; a product too small to fill its share takes more than that part.
        reading = held * elements * self.shape.activation_bytes / self.bytes_per_s
        return np.maximum(2 * tokens * elements / self.flops_per_s, reading + self.num_devices * self.launch_s)

    def layer_s(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Return the seconds of a decoder layer without attention product and adapters.

        Args:
            tokens: tokens of the stream.
        """
        # Forward and gradient of the input: frozen weights get no gradient.
        held = (1.0,) * 4 + (self._read_i,) * 3
        products = sum(
            (2 * self.product_s(tokens, d * k, h) for (d, k), h in zip(self.linears, held, strict=True)),
            np.zeros_like(tokens),
        )
        moved = _ELEMENTWISE_READS * tokens * (self.shape.hidden_size + self.shape.intermediate_size)
        return products + self.bytes_s(moved * self.shape.activation_bytes) + _LAYER_OPERATORS * self.launch_s

    def attention_s(self, length: NDArray[Any]) -> NDArray[Any]:
        """Return the seconds of the attention product of one sequence.

        Args:
            length: tokens of the sequence.
        """
        # Causal: half of the scores. Two products forward, five backward (scores are computed anew).
        flops = 7 * length**2 * self.shape.attention_size
        moved = 8 * length * (2 * self.shape.attention_size + 2 * self.shape.key_value_size)
        arithmetic = flops / (self.flops_per_s * _ATTENTION_PART)
        return np.maximum(arithmetic, self.bytes_s(moved * self.shape.activation_bytes))

    def adapter_s(self, rank: NDArray[Any], width: NDArray[Any], tokens: NDArray[Any]) -> NDArray[Any]:
        """Return the seconds of one adapter, by bytes: x is read twice, dx updated, y updated, dy read; factors once.

        Args:
            rank: R, the rank of the adapter.
            width: input plus output features of the linear layer.
            tokens: rows that the adapter reads.
        """
        moved = tokens * width * 2.5 * self.shape.activation_bytes + 8 * rank * width + 12 * rank * tokens
        # Two operations a weight and token: for the results, the gradient of the input and that of the factors.
        arithmetic = 6 * tokens * rank * width / self.flops_per_s
        launches = _ADAPTER_LAUNCHES * self.launch_s
        return np.maximum(arithmetic, moved / self.bytes_per_s) + launches

    def utilization(self, width: NDArray[Any], tokens: NDArray[Any]) -> NDArray[Any]:
        """Return the part of the device that an adapter keeps busy; all of a CPU, where they run in turn.

        Args:
            width: input plus output features of the linear layer.
            tokens: rows that the adapter reads.
        """
        if self.is_cpu:
            return np.ones(np.broadcast(width, tokens).shape)
        return np.clip(width * tokens / _ADAPTER_SATURATION_ELEMENTS, 0.02, 1.0)

    def head_s(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return the seconds of output head and loss.

        Args:
            targets: loss terms of the pass.
        """
        product = self.product_s(targets, self.shape.hidden_size * self.shape.vocab_size)
        logits = 4 * targets * self.shape.vocab_size * self.shape.activation_bytes
        return _FORWARD_HEAD_PASSES * product + self.bytes_s(logits)
