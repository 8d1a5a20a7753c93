"""How long an hTask takes on a stage and through the pipeline (M §3.3, Eq. 3 and 4), and how long a step takes.

Where the paper slips or is silent, decided here:

* Eq. 3 writes n_k for the tokens of task k. A micro-batch holds a C-th of a global batch, so that n_k stands for the
  tokens of the global batch over C, and attention and targets are divided alike. Whole sequences do not always divide
  so evenly: it is a mean.
* Eq. 3 knows no attention product, whose time depends on sequence lengths rather than on tokens. It is added as a base
  operator, and so are what lies before the layers (first stage) and the output head with the loss (last stage).
* The fused sets {a} of Eq. 3 are the adapters of one linear layer. Loads tell widths, not names, so that adapters of
  one width form a set; with equal target modules that gives the same sum.
* Eq. 3 divides base operators by N_g. What tensor parallelism leaves whole is not divided here: the embedding and the
  launches of attention calls; of an adapter, the factor that is not cut. Products that are too small to fill a part of
  a device take more than a part of the time, which is for the profile to say (`analytic_profile` does).
* Eq. 3 leaves the sums over the devices of a stage out, as M §3.4.2 hides them. They are added in full here; where
  passes take turns, `peft_mux.scheduler.planner.turn_times` charges what others' computing does not hide, from
  `pass_parts`. The gatherings of a backbone that replicas divide (FSDP2) are added in full, too.
* Eq. 4 doubles the forward, as a frozen backbone has no weight gradients. Where a profile has measured another ratio,
  1 / `forward_fraction` stands in place of the 2.
* Overheads of passes and steps are not in Eq. 3 and 4: `pass_s` and `step_s` add them.
* Eq. 3 and 4 compute every row in every layer, and its gradient. What the last layer spares where it computes the rows
  alone that a loss reads is taken off the last stage, and what a backward spares below each task's lowest adapter off
  the stages of these layers: products of its rows, and below the adapters of all tasks the whole backward. Virtual
  stages of a device are taken to be neighbours. A profile holds layers of all rows, so that nothing is taken off twice.
* Eq. 3 has the same adapters in every layer. Here a task's lie in the layers from its lowest adapter on, alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peft_mux.packing.passes import Member
from peft_mux.scheduler.costs.collectives import all_reduce_s, loss_sums
from peft_mux.scheduler.costs.kernel_buffers import loss_block_rows
from peft_mux.scheduler.costs.link import Link
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.measured.parts import Parts
from peft_mux.scheduler.costs.model_shape import ModelShape, StageSize, split_layers
from peft_mux.scheduler.costs.profile import Profile, least_pass_s
from peft_mux.scheduler.costs.stage_times import StageTimes
from peft_mux.scheduler.costs.sums.batches import RangeBatches, mean_batch, uniform_batch
from peft_mux.scheduler.costs.sums.pass_parts import PassParts
from peft_mux.scheduler.costs.sums.real_passes import pass_sums
from peft_mux.scheduler.costs.sums.stage_terms import StageTerms


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
