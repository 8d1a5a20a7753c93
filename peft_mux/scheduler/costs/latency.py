"""Seconds of collectives among the devices of a stage, or replicas that divide the backbone: rings over one link.

A ring of n devices adds a message of b bytes up in 2 (n - 1) rounds of b / n bytes each, and gathers n parts of b / n
bytes in n - 1 rounds. Nothing here is overlapped with computing: what passes in turns hide of it (M section 3.4.2) is
for `peft_mux.scheduler.planner.times` to say.
"""

# MERGED: Seconds of a stage of a pipeline, from what the tasks of an hTask amount to: `StageTimes` (M Eq. 3).
# MERGED: How long an hTask takes on a stage and through the pipeline (M §3.3, Eq. 3 and 4), and how long a step takes.
# MERGED: Where the paper slips or is silent, decided here:
# MERGED: * Eq. 3 writes n_k for the tokens of task k. A micro-batch holds a C-th of a global batch, so that n_k
# MERGED: stands for the
# MERGED: tokens of the global batch over C, and attention and targets are divided alike. Whole sequences do not
# MERGED: always divide
# MERGED:   so evenly: it is a mean.
# MERGED: * Eq. 3 knows no attention product, whose time depends on sequence lengths rather than on tokens. It is
# MERGED: added as a base
# MERGED: operator, and so are what lies before the layers (first stage) and the output head with the loss (last
# MERGED: stage).
# MERGED: * The fused sets {a} of Eq. 3 are the adapters of one linear layer. Loads tell widths, not names, so that
# MERGED: adapters of
# MERGED:   one width form a set; with equal target modules that gives the same sum.
# MERGED: * Eq. 3 divides base operators by N_g. What tensor parallelism leaves whole is not divided here: the
# MERGED: embedding and the
# MERGED: launches of attention calls; of an adapter, the factor that is not cut. Products that are too small to fill
# MERGED: a part of
# MERGED:   a device take more than a part of the time, which is for the profile to say (`analytic_profile` does).
# MERGED: * Eq. 3 leaves the sums over the devices of a stage out, as M §3.4.2 hides them. They are added in full
# MERGED: here; where
# MERGED:   passes take turns, `peft_mux.scheduler.planner.times` charges what others' computing does not hide, from
# MERGED:   `pass_parts`. The gatherings of a backbone that replicas divide (FSDP2) are added in full, too.
# MERGED: * Eq. 4 doubles the forward, as a frozen backbone has no weight gradients. Where a profile has measured
# MERGED: another ratio,
# MERGED:   1 / `forward_fraction` stands in place of the 2.
# MERGED: * Overheads of passes and steps are not in Eq. 3 and 4: `pass_s` and `step_s` add them.
# MERGED: * Eq. 3 and 4 compute every row in every layer, and its gradient. What the last layer spares where it
# MERGED: computes the rows
# MERGED: alone that a loss reads is taken off the last stage, and what a backward spares below each task's lowest
# MERGED: adapter off
# MERGED: the stages of these layers: products of its rows, and below the adapters of all tasks the whole backward.
# MERGED: Virtual
# MERGED: stages of a device are taken to be neighbours. A profile holds layers of all rows, so that nothing is taken
# MERGED: off twice.
# MERGED: * Eq. 3 has the same adapters in every layer. Here a task's lie in the layers from its lowest adapter on,
# MERGED: alike.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from peft_mux.data.packing.passes import Member
from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.costs.loads import TaskLoad, loss_block_rows
from peft_mux.scheduler.costs.model_shape import FrozenParts, ModelShape, StageSize, split_layers
from peft_mux.scheduler.costs.profile import Parts, Profile, least_pass_s
from peft_mux.scheduler.costs.sums import (
    PassParts,
    RangeBatches,
    StageTerms,
    Sums,
    mean_batch,
    pass_sums,
    uniform_batch,
)

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


class Spared(NamedTuple):
    """Forward and backward seconds of what a stage leaves out of a micro-batch: numbers, or arrays over many."""

    products_s: Any = 0.0
    attention_s: Any = 0.0
    adapters_s: Any = 0.0
    communication_s: Any = 0.0

    @property
    def seconds(self) -> Any:
        """All of them."""
        return self.products_s + self.attention_s + self.adapters_s + self.communication_s

    def divided(self, count: int) -> Spared:
        """Return one of `count` equal parts."""
        return Spared(*(part_s / count for part_s in self))


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of each stage on each of its devices, forward and backward together; numbers, or arrays over many hTasks.

    Attributes:
        profile: seconds of the parts of a step on one device.
        shape: the shape of the backbone.
        size: the layers of each stage, and the devices that share them.
        tensor_link: the link between the devices of a stage, and between replicas that divide the backbone.
        backbone_shards: replicas that divide the frozen weights of each stage and gather them in every pass.
    """

    profile: Profile
    shape: ModelShape
    size: StageSize
    tensor_link: Link | None
    backbone_shards: int

    def stage_s(self, stage: int, sums: Sums) -> Any:
        """Return the seconds of a stage, counted from 0."""
        first_s, last_s = self._ends_s(sums)
        is_first, is_last = stage == 0, stage == len(self.size.layers) - 1
        layers_s = self.size.layers[stage] * self._layer_s(sums) + self.adapters_s(stage, sums)
        return layers_s + is_first * first_s + is_last * last_s - self.spared(stage, sums).seconds

    def terms(self, sums_of: Callable[[StageSize], Sums]) -> StageTerms:
        """Return what stages of any cut are made of.

        Args:
            sums_of: returns the sums of a micro-batch for a cut.
        """
        # Each layer is a stage of its own here.
        sums = sums_of(StageSize((1,) * self.shape.num_layers, self.size.devices))
        first_s, last_s = self._ends_s(sums)
        layer_s = self._layer_s(sums)
        layers_s = (
            float(layer_s + self.adapters_s(layer, sums) - self.below_adapters(layer, sums).seconds)
            for layer in range(self.shape.num_layers)
        )
        return StageTerms(
            added_s=tuple(itertools.accumulate(layers_s, initial=0.0)),
            first_s=float(first_s),
            last_s=float(last_s - sum(self._unread_s(sums))),
        )

    def adapters_s(self, stage: int, sums: Sums) -> Any:
        """Return the seconds of the adapters in a stage."""
        return sums.depth.adapted[stage] * sums.adapters_s

    def attention_s(self, sums: Sums) -> Any:
        """Return the seconds of one layer's attention product; its launches are paid on every device."""
        return sums.attention_s / self.size.devices + sums.calls_s

    def spared(self, stage: int, sums: Sums) -> Spared:
        """Return the seconds of what a stage leaves out, forward or backward."""
        below = self.below_adapters(stage, sums)
        if stage < len(self.size.layers) - 1:
            return below
        products_s, adapters_s = self._unread_s(sums)
        return below._replace(products_s=below.products_s + products_s, adapters_s=adapters_s)

    def below_adapters(self, stage: int, sums: Sums) -> Spared:
        """Return the seconds of what the backward of a stage leaves out below the lowest adapters of its tasks."""
        part, layers = 1 - self.profile.forward_fraction, self._layers_below(stage, sums)
        of_rows = sums.depth.rows[stage] / np.maximum(sums.tokens, 1e-9)
        return Spared(
            products_s=part * (layers + of_rows) * sums.products_s / self.size.devices,
            attention_s=part * layers * self.attention_s(sums),
            communication_s=layers * self._sums_s(sums) / 2,
        )

    def forward_fraction(self, stage: int, sums: Sums) -> Any:
        """Return the part of a stage's seconds that is its forward: more where the backward leaves something out."""
        left_s = self.stage_s(stage, sums)
        whole_s = left_s + self.below_adapters(stage, sums).seconds
        return np.minimum(self.profile.forward_fraction * whole_s / np.maximum(left_s, 1e-12), 1.0)

    def host_s(self, stage: int, sums: Sums) -> Any:
        """Return the seconds of the host for the sums of a stage's layers, which are not divided."""
        return (self.size.layers[stage] - self._layers_below(stage, sums) / 2) * self.host_layer_s

    @property
    def device_type(self) -> str:
        """The type of the devices."""
        return "cpu" if self.profile.device.startswith("cpu") else "cuda"

    @property
    def host_layer_s(self) -> float:
        """Seconds of the host for one layer that are not divided: two sums each way, as far as they were measured."""
        overlap = self.profile.overlap
        return 0.0 if self.size.devices == 1 or overlap is None else ALL_REDUCES_PER_LAYER * overlap.host_s

    def _layers_below(self, stage: int, sums: Sums) -> Any:
        """Return the layers of a stage that are not run backward."""
        # Stages that gather their weights are run backward all the same, as replicas gather together.
        is_run = self.backbone_shards > 1 and len(self.size.layers) > 1
        return 0.0 if is_run else sums.depth.layers[stage]

    def _layer_s(self, sums: Sums) -> Any:
        """Return the seconds of one layer without adapters."""
        products_s = sums.products_s / self.size.devices
        # A layer is gathered for its forward and, freed in between, for its backward again.
        gathered_s = self._all_gathers_s(self._frozen_parts.layer_bytes, 2)
        return products_s + self.attention_s(sums) + self._sums_s(sums) + gathered_s

    def _sums_s(self, sums: Sums) -> Any:
        """Return the seconds of one layer's sums over the devices, and of the host for them: half of them each way."""
        reduced_s = layer_all_reduces_s(self.tensor_link, self.size.devices, self.shape, sums.tokens)
        return reduced_s + self.host_layer_s

    def _ends_s(self, sums: Sums) -> tuple[Any, Any]:
        """Return the seconds of what lies before the layers, and after them."""
        parts, devices = self._frozen_parts, self.size.devices
        first_s = self.profile.embedding_s(sums.tokens) + self._all_gathers_s(parts.before_bytes, 1)
        last_s = self.profile.head_s(sums.targets) / devices
        last_s = last_s + self._all_gathers_s(parts.head_bytes, 1) + self._all_gathers_s(parts.after_bytes, 2)
        if devices > 1:
            last_s = last_s + loss_all_reduces_s(self.tensor_link, devices, self.shape, sums.targets, self.device_type)
        return first_s, last_s

    def _unread_s(self, sums: Sums) -> tuple[Any, Any]:
        """Return the seconds of rows that the last layer leaves out: of products, and of adapters."""
        return sums.unread_s(self.profile, self.shape.read_share, self.size.devices)

    def _all_gathers_s(self, num_bytes: int, times: int) -> float:
        """Return the seconds of the all-gathers of one unit of a divided backbone, as many as a pass needs."""
        if self.backbone_shards == 1 or not num_bytes:
            return 0.0
        return times * float(all_gather_s(self.tensor_link, self.backbone_shards, num_bytes))

    @property
    def _frozen_parts(self) -> FrozenParts:
        return self.shape.parts or FrozenParts.even(self.shape.backbone_bytes, self.shape.num_layers)


class CostModel:
    """Predicts seconds from a profile.

    Args:
        profile: seconds of the parts of a step on one device.
        shape: the shape of the backbone.
        num_stages: S, stages of the pipeline.
        devices_per_stage: N_g of Eq. 3, the devices among which tensor parallelism divides base operators.
        layers_per_stage: S numbers that add up to the layers of the backbone; by default as equal as can be.
        tensor_link: the link between the devices of a stage, and between replicas that divide the backbone; by default
            that of the profile. Where neither is known, messages take no time.
        backbone_shards: replicas that divide the frozen weights of each stage (FSDP2) and gather them in every pass.

    Raises:
        ValueError: for counts below 1, or layers that do not add up.

    Example:
        >>> cost = CostModel(profile, shape, num_stages=4)  # doctest: +SKIP
        >>> cost.latency_s([sst2, rte], num_micro_batches=8)  # doctest: +SKIP
    """

    def __init__(
        self,
        profile: Profile,
        shape: ModelShape,
        *,
        num_stages: int = 1,
        devices_per_stage: int = 1,
        layers_per_stage: tuple[int, ...] | None = None,
        tensor_link: Link | None = None,
        backbone_shards: int = 1,
    ) -> None:
        _require_count("devices_per_stage", devices_per_stage)
        _require_count("backbone_shards", backbone_shards)
        self.profile = profile
        self.shape = shape
        self.num_stages = num_stages
        self.devices_per_stage = devices_per_stage
        self.layers_per_stage = split_layers(shape.num_layers, num_stages, layers_per_stage)
        self._size = StageSize(self.layers_per_stage, devices_per_stage)
        self.tensor_link = profile.link if tensor_link is None else tensor_link
        self.backbone_shards = backbone_shards
        self._stages = StageTimes(profile, shape, self._size, self.tensor_link, backbone_shards)

    # -------------------------------------------------------------- one hTask

    def stage_latency_s(self, loads: Sequence[TaskLoad], *, num_micro_batches: int, stage: int = 0) -> float:
        """Return L^(s)(H): forward seconds of one micro-batch of an hTask on a stage (M Eq. 3).

        Args:
            loads: the loads of the tasks of the hTask.
            num_micro_batches: C, into which each global batch is split.
            stage: s, the stage, counted from 0.

        Raises:
            ValueError: for no such stage, or C below 1.
        """
        _require_count("num_micro_batches", num_micro_batches)
        if not 0 <= stage < self.num_stages:
            raise ValueError(f"stage is {stage}; allowed: 0 to {self.num_stages - 1}. Count stages from 0.")
        sums = mean_batch(self.profile, loads, num_micro_batches, self._size)
        # Profiles hold forward and backward together; Eq. 3 asks for the forward.
        return float(self.profile.forward_fraction * self._stages.stage_s(stage, sums.forward))

    def latency_s(self, loads: Sequence[TaskLoad], num_micro_batches: int) -> float:
        """Return L(H): seconds of all micro-batches of an hTask through the pipeline (M Eq. 4).

        Args:
            loads: the loads of the tasks of the hTask.
            num_micro_batches: C, into which each global batch is split.
        """
        _require_count("num_micro_batches", num_micro_batches)
        return float(_pipeline_s(self._stages_s(loads, num_micro_batches), num_micro_batches))

    def pass_s(self, loads: Sequence[TaskLoad], num_micro_batches: int) -> float:
        """Return seconds of one micro-batch, forward and backward through all stages one after another.

        Args:
            loads: the loads of the tasks of the hTask.
            num_micro_batches: C, into which each global batch is split.
        """
        _require_count("num_micro_batches", num_micro_batches)
        return float(sum(self._stages_s(loads, num_micro_batches)) + self.profile.pass_overhead_s)

    def passes_s(self, loads: Sequence[TaskLoad], passes: Sequence[Sequence[Member]]) -> NDArray[Any]:
        """Return seconds of real passes on each stage, forward and backward, `[P, S]`.

        The overhead of a pass is paid on every stage, as each launches its part of it.

        Args:
            loads: the loads of the tasks that share the passes.
            passes: the members of each of the P passes, whose `task` counts these loads.
        """
        sums = pass_sums(self.profile, loads, passes, self._size)
        stages_s = [self._stages.stage_s(stage, sums) for stage in range(self.num_stages)]
        columns = [np.broadcast_to(one, (len(passes),)) for one in stages_s]
        return np.stack(columns, axis=1) + self.profile.pass_overhead_s

    def forward_fractions(self, loads: Sequence[TaskLoad], num_micro_batches: int) -> NDArray[Any]:
        """Return the part of each stage's seconds that is the forward of an hTask's micro-batches, `[S]`.

        Args:
            loads: the loads of the tasks of the hTask.
            num_micro_batches: C, into which each global batch is split.
        """
        if not any(load.lowest_layer for load in loads):
            return np.full(self.num_stages, self.profile.forward_fraction)
        sums = mean_batch(self.profile, loads, num_micro_batches, self._size)
        return np.array([float(self._stages.forward_fraction(stage, sums)) for stage in range(self.num_stages)])

    def pass_parts(self, loads: Sequence[TaskLoad], num_micro_batches: int, *, stage: int = 0) -> PassParts:
        """Return what one mean micro-batch of an hTask computes between the sums over the devices of a stage.

        Profiles know no parts of a layer: its base operators and adapters are divided as their weights are.

        Args:
            loads: the loads of the tasks of the hTask.
            num_micro_batches: C, into which each global batch is split.
            stage: the stage that it goes through, counted from 0.
        """
        _require_count("num_micro_batches", num_micro_batches)
        shape, devices = self.shape, self.devices_per_stage
        sums = mean_batch(self.profile, loads, num_micro_batches, self._size)
        # Evenly over the layers of the stage, of which a pass in turns knows one kind.
        num_layers = self.layers_per_stage[stage]
        spared = self._stages.spared(stage, sums).divided(num_layers)
        backward = self._stages.below_adapters(stage, sums).divided(num_layers)
        adapters_s = self._stages.adapters_s(stage, sums) / num_layers
        whole_s = sums.products_s / devices + self._stages.attention_s(sums) + adapters_s
        left_s = whole_s - backward.products_s - backward.attention_s
        product_s = float(self._stages.attention_s(sums) - spared.attention_s)
        linear_s = float(sums.products_s / devices + adapters_s - spared.products_s - spared.adapters_s)
        attention = 2 * (shape.attention_size + shape.key_value_size)
        share = attention / (attention + 3 * shape.intermediate_size)
        half_host_s = self._stages.host_layer_s / 2
        block_s, gradient_s, _ = loss_sums(self.tensor_link, devices, shape, sums.targets, self._stages.device_type)
        hidden_bytes = float(sums.tokens) * shape.hidden_size * shape.activation_bytes
        return PassParts(
            tokens=float(sums.tokens),
            targets=float(sums.targets),
            attention_s=share * linear_s + product_s + half_host_s,
            mlp_s=(1 - share) * linear_s + half_host_s,
            first_s=float(self.profile.embedding_s(sums.tokens)),
            head_s=float(self.profile.head_s(sums.targets)) / devices,
            overhead_s=self.profile.pass_overhead_s,
            sum_s=float(all_reduce_s(self.tensor_link, devices, hidden_bytes)),
            head_sum_s=float(block_s),
            head_gradient_sum_s=float(gradient_s),
            head_block_rows=loss_block_rows(-(-shape.vocab_size // devices), self._stages.device_type),
            # Of a backward that leaves out some of it, the forward is a larger part.
            forward_fraction=self.profile.forward_fraction * float(whole_s / left_s if left_s else 1.0),
        )

    # ------------------------------------------------------------- whole steps

    def step_s(self, htasks: Sequence[tuple[Sequence[TaskLoad], int]]) -> float:
        """Return seconds of a step of all hTasks one after another on one device.

        Args:
            htasks: for each hTask the loads of its tasks, and its number of micro-batches.
        """
        passes_s = sum(count * self.pass_s(loads, count) for loads, count in htasks)
        return float(passes_s + self.outside_s([load for loads, _ in htasks for load in loads]))

    def outside_s(self, loads: Sequence[TaskLoad]) -> float:
        """Return the seconds of a step that lie outside of its passes: what comes before them, and the updates.

        Args:
            loads: the loads of all tasks that take the step.
        """
        return self.optimizer_s(loads) + self.prepasses_s(loads) + self.profile.step_overhead_s

    def prepasses_s(self, loads: Sequence[TaskLoad]) -> float:
        """Return the seconds of the forwards that the losses of tasks need before the passes of a step.

        Args:
            loads: the loads of all tasks that take the step.
        """
        plain = [replace(load, adapters=()) for load in loads if load.has_reference_forward]
        adapted = [load for load in loads if load.has_batch_forward]
        # As if each were one: how many they are makes a difference only of what a pass costs whatever its size.
        return sum(
            sum(self.stage_latency_s(rows, num_micro_batches=1, stage=stage) for stage in range(self.num_stages))
            + self.profile.pass_overhead_s
            for rows in (plain, adapted)
            if rows
        )

    def optimizer_s(self, loads: Sequence[TaskLoad]) -> float:
        """Return seconds of the updates of all tasks, on the stage with most layers.

        Args:
            loads: the loads of all tasks that take the step.
        """
        if not loads:
            return 0.0
        # Stages update their own layers at the same time, so that the one with most layers ends last.
        share = max(self.layers_per_stage) / self.shape.num_layers
        held = np.array([load.device_parameters(self.devices_per_stage) for load in loads])
        return float(np.sum(self.profile.optimizer_s(share * held)))

    def parts_of_pass(self, loads: Sequence[TaskLoad], *, stage: int = 0) -> Parts:
        """Return the seconds of one pass over exactly these rows on a stage, forward and backward, part by part.

        Args:
            loads: what each task of the pass has in it: the rows of this pass alone, and its adapters.
            stage: s, the stage, counted from 0.
        """
        sums = mean_batch(self.profile, loads, 1, self._size)
        layers, is_first, is_last = self.layers_per_stage[stage], stage == 0, stage == self.num_stages - 1
        ends_s = is_first * self.profile.embedding_s(sums.tokens)
        ends_s += is_last * self.profile.head_s(sums.targets) / self.devices_per_stage
        spared = self._stages.spared(stage, sums)
        tokens_s = layers * sums.products_s / self.devices_per_stage + ends_s - spared.products_s
        attention_s = layers * self._stages.attention_s(sums) - spared.attention_s
        adapters_s = self._stages.adapters_s(stage, sums) - spared.adapters_s
        is_alone = self.devices_per_stage == self.backbone_shards == 1
        # What is left; where nobody is spoken to, that is rounding.
        host_s = float(self._stages.host_s(stage, sums))
        all_s = self._stages.stage_s(stage, sums) - host_s
        communication_s = 0.0 if is_alone else max(0.0, all_s - tokens_s - attention_s - adapters_s)
        seconds = least_pass_s(self.profile) + host_s, tokens_s, attention_s, adapters_s, communication_s
        return Parts(*(float(part_s) for part_s in seconds))

    def update_parts(self, loads: Sequence[TaskLoad]) -> Parts:
        """Return the seconds of a step that lie outside of its passes, as parts.

        Args:
            loads: the loads of all tasks that take the step.
        """
        return Parts(optimizer=self.outside_s(loads))

    def stage_terms(self, loads: Sequence[TaskLoad], num_micro_batches: int) -> StageTerms:
        """Return what stages are made of: seconds of a layer and of the ends, forward and backward.

        Args:
            loads: the loads of the tasks of the hTask.
            num_micro_batches: C, into which each global batch is split.
        """
        _require_count("num_micro_batches", num_micro_batches)
        return self._stages.terms(lambda size: mean_batch(self.profile, loads, num_micro_batches, size))

    def uniform_terms(self, loads: Sequence[TaskLoad], num_sequences: int, length: int) -> StageTerms:
        """Return `stage_terms` of a micro-batch of equal sequences, of which each task has its part of the tokens.

        Args:
            loads: the loads of the tasks whose adapters are run.
            num_sequences: number of sequences of the micro-batch.
            length: tokens of each sequence.
        """
        return self._stages.terms(lambda size: uniform_batch(self.profile, loads, num_sequences, length, size))

    # -------------------------------------------------------------- for fusion

    def latency_matrix(
        self,
        loads_in_order: Sequence[TaskLoad],
        num_micro_batches: int,
        *,
        fits: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
    ) -> NDArray[Any]:
        """Return L(H_{i->j}) of every range of consecutive tasks, for the fusion of Eq. 6.

        Args:
            loads_in_order: the loads of M tasks, as fusion orders them.
            num_micro_batches: C, into which each global batch is split.
            fits: a function that is given the tokens of one micro-batch of each range, float [M, M] (the longest
                sequence where that is more; 0 below the diagonal), and returns bool [M, M]: whether that fits into
                memory (Eq. 5). `None` where everything does.

        Returns:
            Seconds, float [M, M]; entry [i, j] is that of tasks i to j, both included. inf below the diagonal and where
            a range does not fit.

        Raises:
            ValueError: for C below 1, or a `fits` that answers in another shape.
        """
        _require_count("num_micro_batches", num_micro_batches)
        ranges = RangeBatches(self.profile, loads_in_order, num_micro_batches, self._size)
        stages_s = [self._stages.stage_s(stage, ranges.sums) for stage in range(self.num_stages)]
        latency = _pipeline_s(stages_s, num_micro_batches)
        latency = np.where(ranges.is_range, latency, math.inf)
        if fits is None:
            return latency
        verdicts = np.asarray(fits(ranges.micro_batch_tokens()), dtype=bool)
        if verdicts.shape != latency.shape:
            raise ValueError(
                f"fits returned shape {verdicts.shape}; allowed: {latency.shape}. Answer element by element."
            )
        return np.where(verdicts, latency, math.inf)

    def _stages_s(self, loads: Sequence[TaskLoad], num_micro_batches: int) -> list[Any]:
        """Return forward and backward seconds of one micro-batch of an hTask on each stage."""
        sums = mean_batch(self.profile, loads, num_micro_batches, self._size)
        return [self._stages.stage_s(stage, sums) for stage in range(self.num_stages)]


def _pipeline_s(stages_s: Sequence[Any], num_micro_batches: int) -> Any:
    """Return Eq. 4 from the forward and backward seconds of each stage.

    The first term is the paper's: all stages but the last. With unequal stages a pipeline takes all but the slowest;
    with equal ones, which Eq. 4 has in mind, both are the same.
    """
    warm_up_s = sum(stages_s[:-1]) if len(stages_s) > 1 else 0.0
    slowest_s = stages_s[0]
    for stage_s in stages_s[1:]:
        slowest_s = np.maximum(slowest_s, stage_s)
    return warm_up_s + num_micro_batches * slowest_s


def _require_count(field: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{field} is {value}; allowed: 1 or more. Use 1 for no split.")
