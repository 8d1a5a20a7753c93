"""How many bytes a run needs (M Eq. 5): an analytic estimate, corrected by what can be counted exactly.

Terms follow M Eq. 5: backbone parameters once, adapters with gradients and optimizer state for every task, and
activations for the tokens of the micro-batches in flight, stage by stage.

What Eq. 5 leaves out and a real device does not: optimizer states, which the paper's third-party optimizer holds
elsewhere; the loss, whose logits are workspace; transient buffers of the backward pass; and what an allocator keeps
back. Its M_g, gradients of inputs, is here the gradients of adapters: gradients of activations are transient, and
count as workspace of one micro-batch (the paper itself says that they reuse the memory of M_a).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from peft_mux.scheduler.costs.loads import (
    FrozenParts,
    ModelShape,
    TaskLoad,
    loss_block_rows,
    split_layers,
    weight_gradient_bytes,
)
from peft_mux.scheduler.plan import MemoryEstimate

_OPTIMIZER_BYTES_PER_PARAMETER = 8
"""Two Adam moments in fp32."""
_ADAPTER_ITEM_BYTES = 4
"""Bytes of an fp32 weight of an adapter."""
_ADAPTER_BYTES_PER_PARAMETER = 3 * _ADAPTER_ITEM_BYTES
"""fp32 weight, gradient, and the last good copy."""
_UPDATE_BYTES_PER_PARAMETER = 8
"""Two buffers of the size of the weights while AdamW updates a page."""
_TRANSIENT_COPIES = 4
"""Gradients that a decoder layer holds at once in its backward pass, each as wide as its MLP."""
_GATHERED_COPIES = 2
"""A gathered unit, and the message that it is copied out of, or the one that the next unit arrives in."""
_MANY_TOKENS = 2**40
"""More tokens than any pass has, where the search for a bound ends."""
_ALLOCATOR_MARGINS = {"cpu": 0.6, "cuda": 0.05}
"""Part of the dynamic bytes that the allocator holds beyond them.

On a CPU, glibc keeps freed blocks of up to 32 MiB in its heap, where later ones of other sizes do not fit: runs were
seen to hold 1.5 to 1.65 times their dynamic bytes. With MALLOC_MMAP_THRESHOLD_=65536 in the environment they hold them
to the percent, and a margin of 0 is right (`benchmarks/planner/accuracy.py` measures both).
"""


def activation_bytes_per_token(shape: ModelShape, *, checkpointing: bool, devices: int = 1) -> float:
    """Return the bytes that one token leaves behind for the backward pass, on each device.

    A layer keeps its input, the two normed states, queries, keys, values, attention output, and the gate, up and
    product states of the MLP; with checkpointing only its input, plus one layer's worth while it is recomputed.
    Tensor parallelism divides heads and neurons; the residual stream and what is as wide is whole on every device.

    Args:
        shape: the shape of the backbone.
        checkpointing: whether activations are recomputed.
        devices: devices that share each layer (tensor parallelism).
    """
    whole = 5 * shape.hidden_size
    divided = 2 * shape.attention_size + 2 * shape.key_value_size + 4 * shape.intermediate_size
    layer = (whole + divided / devices) * shape.activation_bytes
    if checkpointing:
        return shape.num_layers * shape.hidden_size * shape.activation_bytes + layer
    return shape.num_layers * layer


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Predicts the bytes on each device of each stage of a pipeline (M Eq. 5).

    Stages are counted from 0. `tokens` are those of the largest micro-batch; `in_flight` counts the micro-batches whose
    backward is still to come, up to S in 1F1B.

    Attributes:
        shape: the shape of the backbone.
        num_stages: S, stages of the pipeline.
        devices_per_stage: devices among which tensor parallelism divides each layer: linear weights, factors of
            adapters, heads and neurons of activations are divided; norms, embedding and the residual stream are whole
            on each.
        checkpointing: whether each layer's activations are recomputed.
        activation_bytes_per_token: bytes that one token of a pass through all layers keeps for its backward, as counted
            by `peft_mux.planning.profiling.activation_bytes`; `None` for the analytic number.
        allocator_margin: part of the dynamic bytes that the allocator holds beyond them; `None` for the device's
            default.
        layers_per_stage: the layers of each of the S stages; by default as equal as can be.
        device_type: "cuda" or "cpu", which decides the blocks of the loss and the margin of the allocator.
        backbone_shards: replicas that divide the frozen weights of each stage (FSDP2); each gathers one unit at a time.
        optimizer_shards: replicas among which the optimizer states of whole tasks are divided.
        passes_in_turns: passes that compute in turns (M §3.4.2); each of them stops in the middle of a layer or of the
            loss, and holds its transient buffers until its turn comes again.
    """

    shape: ModelShape
    num_stages: int = 1
    devices_per_stage: int = 1
    checkpointing: bool = False
    activation_bytes_per_token: float | None = None
    allocator_margin: float | None = None
    layers_per_stage: tuple[int, ...] | None = None
    device_type: str = "cuda"
    backbone_shards: int = 1
    optimizer_shards: int = 1
    passes_in_turns: int = 1

    @property
    def margin(self) -> float:
        """Part of the dynamic bytes that the allocator holds beyond them."""
        return _ALLOCATOR_MARGINS.get(self.device_type, 0.0) if self.allocator_margin is None else self.allocator_margin

    def static_bytes(self, loads: Sequence[TaskLoad], stage: int = 0) -> int:
        """Return the bytes on each device of a stage that no pass changes: the first two terms of Eq. 5."""
        estimate = self.estimate_stage(loads, 0, 0, stage)
        return estimate.backbone_bytes + estimate.adapter_bytes

    def activation_bytes(self, tokens: float, stage: int = 0) -> int:
        """Return the bytes that one micro-batch in flight keeps on a stage for its backward: M_a of Eq. 5."""
        whole, part = (
            activation_bytes_per_token(self.shape, checkpointing=self.checkpointing, devices=devices)
            for devices in (1, self.devices_per_stage)
        )
        # What was counted is divided as the formula is.
        per_token = part if self.activation_bytes_per_token is None else self.activation_bytes_per_token * part / whole
        return math.ceil(tokens * per_token * (self._num_layers(stage) / self.shape.num_layers))

    def workspace_bytes(self, tokens: float, stage: int = 0, loads: Sequence[TaskLoad] = ()) -> int:
        """Return transient bytes of computing on a stage: of one micro-batch, or of all that take turns.

        The blocks of logits and the gradients of a layer are never there at once, so the greater counts. `loads` are
        the loads of all tasks, for the sums of their adapters' gradients.
        """
        widest = max(self.shape.intermediate_size / self.devices_per_stage, self.shape.hidden_size)
        transient = _TRANSIENT_COPIES * tokens * widest * self.shape.activation_bytes
        if self.device_type == "cuda":
            transient += weight_gradient_bytes(loads, tokens, self.shape.hidden_size, self.devices_per_stage)
        loss = self.loss_bytes(tokens) if stage == self.num_stages - 1 else 0
        return self.passes_in_turns * math.ceil(max(transient, loss))

    def loss_bytes(self, targets: float) -> int:
        """Return the bytes of the blocks of logits in the loss of a micro-batch with so many loss terms."""
        words = -(-self.shape.vocab_size // self.devices_per_stage)
        block_rows = loss_block_rows(words, self.device_type)
        # The fused loss on CUDA works in place on logits of the activations' dtype; elsewhere, and for a part of the
        # vocabulary, there are logits in fp32, and for a moment those that they were made of.
        size = self.shape.activation_bytes
        is_fused = self.device_type == "cuda" and size == 2 and self.devices_per_stage == 1
        bytes_per_logit = size if is_fused or size == 4 else 4 + size
        if self.shape.caps_logits and not is_fused:
            bytes_per_logit += 4  # the slope of the bound at each of them
        return min(block_rows, math.ceil(targets)) * words * bytes_per_logit

    def peak_bytes(self, loads: Sequence[TaskLoad], tokens: float, in_flight: int = 1, stage: int = 0) -> int:
        """Return the most bytes that each device of a stage holds at once, with the adapters of all tasks."""
        return self.estimate_stage(loads, tokens, in_flight, stage).peak_bytes

    def max_tokens(self, loads: Sequence[TaskLoad], limit_bytes: int, in_flight: int = 1, stage: int = 0) -> int:
        """Return the most tokens of a micro-batch with which a stage stays within a limit; 0 if none do."""
        # Bytes never fall as tokens grow.
        fitting = bisect_right(
            range(_MANY_TOKENS + 1),
            limit_bytes,
            key=lambda tokens: self.peak_bytes(loads, tokens, in_flight, stage),
        )
        return max(0, fitting - 1)

    def estimate(self, loads: Sequence[TaskLoad], tokens: float, in_flight: int = 1) -> MemoryEstimate:
        """Return the fullest stage's memory by part."""
        stages = [self.estimate_stage(loads, tokens, in_flight, stage) for stage in range(self.num_stages)]
        return max(stages, key=lambda estimate: estimate.peak_bytes)

    def estimate_stage(
        self, loads: Sequence[TaskLoad], tokens: float, in_flight: int = 1, stage: int = 0
    ) -> MemoryEstimate:
        """Return one stage's memory by part; the allocator's margin counts as workspace."""
        num_layers, devices, parts = self._num_layers(stage), self.devices_per_stage, self.shape.parts
        share = num_layers / self.shape.num_layers
        ends = {"is_first": stage == 0, "is_last": stage == self.num_stages - 1}
        if parts is None:  # Eq. 5 spreads the backbone evenly, embedding and head included
            backbone = self.shape.backbone_bytes * share / devices
        else:
            backbone = parts.device_bytes(num_layers, **ends, devices=devices)
        if self.backbone_shards > 1:
            parts = parts or FrozenParts.even(self.shape.backbone_bytes, self.shape.num_layers)
            # In addition to its part of the weights, a device holds the unit that it computes with.
            before = parts.before_bytes if ends["is_first"] else 0
            after = max(parts.after_bytes, parts.head_bytes) if ends["is_last"] else 0
            gathered = _GATHERED_COPIES * max(parts.layer_bytes, before, after)
            backbone = backbone / self.backbone_shards + gathered
        parameters = share * sum(load.device_parameters(devices) for load in loads)
        # Of whole tasks, the largest may be more than an equal part.
        largest = share * max((load.device_parameters(devices) for load in loads), default=0)
        kept = parameters if self.optimizer_shards == 1 else max(parameters / self.optimizer_shards, largest)
        moments = math.floor(_OPTIMIZER_BYTES_PER_PARAMETER * kept)
        # Kernels read copies in the dtype of the activations, unless that is the dtype of the weights.
        copies = self.shape.activation_bytes if self.shape.activation_bytes != _ADAPTER_ITEM_BYTES else 0
        activations = in_flight * self.activation_bytes(tokens, stage)
        # When tasks are updated, activations are gone and buffers as large as the weights of one task, or on a GPU
        # without Triton as those of all, are there.
        update = _UPDATE_BYTES_PER_PARAMETER * largest
        if self.device_type == "cuda":
            update = max(update, _ADAPTER_ITEM_BYTES * kept)
        workspace = max(self.workspace_bytes(tokens, stage, loads), math.ceil(update) - activations)
        return MemoryEstimate(
            backbone_bytes=math.ceil(backbone),
            adapter_bytes=math.ceil((_ADAPTER_BYTES_PER_PARAMETER + copies) * parameters) + moments,
            activation_bytes=activations,
            workspace_bytes=workspace + math.ceil(self.margin * (activations + workspace)),
            optimizer_bytes=moments,
        )

    def _num_layers(self, stage: int) -> int:
        return split_layers(self.shape.num_layers, self.num_stages, self.layers_per_stage)[stage]
