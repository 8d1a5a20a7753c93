"""Seconds of a stage of a pipeline, from what the tasks of an hTask amount to: `StageTimes` (M Eq. 3)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from peft_mux.scheduler.costs.collectives import (
    ALL_REDUCES_PER_LAYER,
    all_gather_s,
    layer_all_reduces_s,
    loss_all_reduces_s,
)
from peft_mux.scheduler.costs.frozen_parts import FrozenParts
from peft_mux.scheduler.costs.link import Link
from peft_mux.scheduler.costs.model_shape import ModelShape, StageSize
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.costs.sums.stage_terms import StageTerms
from peft_mux.scheduler.costs.sums.sums import Sums


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
