"""`CostModel`: how long passes take on each stage of a pipeline, and a step outside of them (M §3.3, Eq. 3 and 4).

Shapes: P passes, S stages, M tasks, W widths of adapters, K different lowest layers.

`PassWork` is what passes amount to whatever the stages: tokens, targets, and seconds of one layer. Most of it is of
real passes, with the rows that they hold. Only the fusion of Eq. 6 compares all M^2 ranges of tasks, whose rows are not
cut into passes: there it is of mean micro-batches, a C-th of each global batch. `CostModel.stage_parts` turns it into
seconds of a stage, part by part; everything else is read off that.

Where the paper slips or is silent, decided here:

* Eq. 3 writes n_k for the tokens of task k. A micro-batch holds a C-th of a global batch, so n_k stands for the tokens
  of the global batch over C, and attention and targets are divided likewise.
* Eq. 3 has no attention product, whose time depends on sequence lengths rather than on tokens. It is added as a base
  operator, and so are what lies before the layers (first stage) and the output head with the loss (last stage).
* The fused sets {a} of Eq. 3 are the adapters of one linear layer. Loads hold widths, not names, so that adapters of
  one width form a set; with equal target modules that gives the same sum.
* Eq. 3 divides base operators by N_g. What tensor parallelism leaves whole is not divided here: the embedding and the
  launches of attention calls; of an adapter, the factor that is not cut. Products that are too small to fill a part of
  a device take more than a part of the time, which the profile includes (`analytic_profile` does so).
* Eq. 3 leaves the sums over the devices of a stage out, as M §3.4.2 hides them. They are added in full here; if passes
  take turns, `peft_mux.scheduler.planner.planned_passes` charges what others' computing does not hide, from
  `pass_parts`. The gatherings of a backbone that replicas divide (FSDP2) are added in full, too. Both are rings: n
  devices add b bytes in 2 (n - 1) rounds of b / n bytes, and gather n parts of b / n bytes in n - 1 rounds.
* Passes that are replayed as CUDA graphs (`graph_tokens` of the profile) compute padding, and wait for no launches.
* Eq. 4 doubles the forward, as a frozen backbone has no weight gradients. If a profile has measured another ratio,
  1 / `forward_fraction` replaces the 2. Overheads of passes are not in Eq. 3 and 4, and are added.
* Eq. 3 has the same adapters in every layer, and the gradient of every row. Here a task's adapters are in the layers
  from its lowest one on, and layers below the lowest adapter of all tasks of a pass have no backward. Rows of single
  tasks that need no gradient are not subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from peft_mux.data.packing.passes import Member
from peft_mux.scheduler.costs.loads import FrozenParts, ModelShape, TaskLoad, loss_block_rows, split_layers
from peft_mux.scheduler.costs.profile import Parts, Profile
from peft_mux.scheduler.plan import Link, PassParts

ALL_REDUCES_PER_LAYER = 4
"""After attention and after the MLP, forward and backward, over the devices that a layer is cut into."""
_NUMBERS_PER_TARGET = 3
"""Of each device: greatest logit, sum of exponentials, logit of the target (`peft_mux.kernels.cross_entropy`)."""
_FLOAT_BYTES = 4
EAGER_PART = 0.06
"""Part of the passes of few enough tokens for a graph whose shape has not come before (measured)."""
_LENGTH_STEP = 16
"""Sequences whose lengths round up to the same multiple share an attention call (`peft_mux.modeling.attention`)."""

_Array = NDArray[Any]


def computed_share(parts: PassParts, num_layers: int) -> float:
    """Return the part of a pass through so many layers that is left if all sums are hidden."""
    computed_s = num_layers * (parts.attention_s + parts.mlp_s) + parts.first_s + parts.head_s + parts.overhead_s
    sums_s = ALL_REDUCES_PER_LAYER * num_layers * parts.sum_s
    sums_s += parts.num_head_blocks * parts.head_sum_s + parts.head_gradient_sum_s
    return computed_s / (computed_s + sums_s) if computed_s else 0.0


def all_reduce_s(link: Link | None, num_devices: int, num_bytes: Any) -> Any:
    """Return the seconds of one sum of messages over a ring of devices; 0 if no link is known."""
    if link is None or num_devices == 1:
        return 0.0 * num_bytes  # in the shape of `num_bytes`, which may be an array
    # A reduce-scatter and an all-gather, of n - 1 rounds each.
    return 2 * (num_devices - 1) * link.transfer_s(num_bytes / num_devices)


class PassWork(NamedTuple):
    """Total loads of passes on one device, as arrays `[P]`, or `[M, M]` over ranges of tasks.

    Attributes:
        tokens: tokens of a pass.
        targets: loss terms of a pass.
        products_s: seconds of one layer's products with frozen weights, and of its norms.
        attention_s: seconds of one layer's attention products.
        calls: attention calls of one layer.
        lowest_layers: the K different lowest layers of the tasks, ascending.
        adapters_s: seconds of the adapters of a layer that lies between one of these and the next, `[K, ...]`.
        lowest: the lowest layer that has an adapter of the pass.
        eager_part: how often such a pass is launched by the host rather than replayed as a CUDA graph.
    """

    tokens: _Array
    targets: _Array
    products_s: _Array
    attention_s: _Array
    calls: _Array
    lowest_layers: tuple[int, ...]
    adapters_s: _Array
    lowest: _Array
    eager_part: _Array


def whole_pass(loads: Sequence[TaskLoad]) -> list[Member]:
    """Return one pass that holds all rows of these loads."""
    return [
        Member(task, index, 0, length, load.shared[index] if load.shared else 0)
        for task, load in enumerate(loads)
        for index, length in enumerate(load.lengths)
    ]


@dataclass(eq=False)
class CostModel:
    """Predicts seconds from a profile.

    Attributes:
        profile: seconds of the parts of a step on one device.
        shape: the shape of the backbone.
        num_stages: S, stages of the pipeline.
        devices_per_stage: N_g of Eq. 3, the devices among which tensor parallelism divides base operators.
        layers_per_stage: S numbers that add up to the layers of the backbone; by default as equal as can be.
        tensor_link: the link between the devices of a stage, and between replicas that divide the backbone; by default
            the profile's. If neither is known, messages take no time.
        backbone_shards: replicas that divide the frozen weights of each stage (FSDP2) and gather them in every pass.

    Raises:
        ValueError: for layers that do not add up.

    Example:
        >>> cost = CostModel(profile, shape, num_stages=4)  # doctest: +SKIP
        >>> cost.passes_s([sst2, rte], passes)  # doctest: +SKIP
    """

    profile: Profile
    shape: ModelShape
    num_stages: int = field(default=1, kw_only=True)
    devices_per_stage: int = field(default=1, kw_only=True)
    layers_per_stage: tuple[int, ...] = field(default=(), kw_only=True)
    tensor_link: Link | None = field(default=None, kw_only=True)
    backbone_shards: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        profile = self.profile
        self.layers_per_stage = split_layers(self.shape.num_layers, self.num_stages, self.layers_per_stage)
        self.tensor_link = profile.link if self.tensor_link is None else self.tensor_link
        self._device_type = "cpu" if profile.device.startswith("cpu") else "cuda"
        # Seconds of the host for one layer that is divided: two sums each way, if they were measured.
        is_known = self.devices_per_stage > 1 and profile.overlap is not None
        self._host_layer_s = ALL_REDUCES_PER_LAYER * profile.overlap.host_s if is_known and profile.overlap else 0.0

    # ---------------------------------------------------------- what passes hold

    def pass_work(self, loads: Sequence[TaskLoad], passes: Sequence[Sequence[Member]]) -> PassWork:
        """Return the total load of each of P passes; the `task` of a member counts these loads."""
        members = [(number, *member) for number, loads_of_pass in enumerate(passes) for member in loads_of_pass]
        number, task, _, start, end, shared = np.array(members, dtype=np.int64).reshape(len(members), 6).T
        tokens = np.zeros((len(passes), len(loads)))
        np.add.at(tokens, (number, task), end - start - shared)
        targets_per_token = np.array([load.num_targets / max(load.tokens, 1) for load in loads])
        # A part sees the keys and values before it, and so does what a row has for itself of those that it shares.
        attention_s = self.profile.attention(end) - self.profile.attention(start + shared)
        groups = np.unique(np.stack([number, -(-(end - start) // _LENGTH_STEP)], axis=1), axis=0)
        weighted_s, alone_s = self._adapter_times(loads, tokens)
        lowest, lowest_layers = _lowest_layers(loads)
        adapters_s = np.zeros((len(lowest_layers), len(passes)))
        for place, layer in enumerate(lowest_layers):
            has_adapter = lowest <= layer
            # Eq. 3: fused adapters share the device by u_a, but none ends before it would alone.
            longest_s = (alone_s * has_adapter).max(axis=-1, initial=0.0)
            adapters_s[place] = np.maximum((weighted_s * has_adapter).sum(axis=-1), longest_s).sum(axis=0)
        computed, eager_part = self._replays(tokens.sum(axis=1), np.bincount(number, shared, len(passes)) > 0)
        return PassWork(
            tokens=tokens.sum(axis=1),
            targets=tokens @ targets_per_token,
            products_s=self.profile.layer(computed),
            attention_s=np.bincount(number, weights=attention_s, minlength=len(passes)),
            calls=np.bincount(groups[:, 0], minlength=len(passes)),
            lowest_layers=lowest_layers,
            adapters_s=adapters_s,
            lowest=np.where(tokens > 0, lowest, self.shape.num_layers).min(axis=1, initial=self.shape.num_layers),
            eager_part=eager_part,
        )

    def _replays(self, tokens: _Array, shares_tokens: _Array) -> tuple[_Array, _Array]:
        """Return the tokens that layers compute, with the padding of passes that are replayed, and `eager_part`.

        Args:
            tokens: tokens of each pass.
            shares_tokens: whether its rows share tokens; such passes are never replayed.
        """
        is_replayed = (tokens > 0) & (tokens <= self.profile.graph_tokens) & ~shares_tokens
        return np.where(is_replayed, graph_size(tokens), tokens), np.where(is_replayed, EAGER_PART, 1.0)

    def _adapter_times(self, loads: Sequence[TaskLoad], tokens: _Array) -> tuple[_Array, _Array]:
        """Return u_a t_a and t_a of Eq. 3, summed over each task's adapters of each width: two `[W, ..., M]`.

        A task's own adapters of one width run one after another. `tokens` of each task are `[..., M]`.
        """
        by_width: dict[float, list[tuple[int, int]]] = {}
        for task, load in enumerate(loads):
            for adapter in load.adapters:
                by_width.setdefault(adapter.device_width(self.devices_per_stage), []).append((task, adapter.rank))
        weighted_s, alone_s = np.zeros((2, len(by_width), *tokens.shape))
        for number, (width, adapters) in enumerate(sorted(by_width.items())):
            tasks, ranks = np.array(adapters).T
            held = tokens[..., tasks]
            place = np.nonzero(held)
            rank, own_tokens = ranks[place[-1]], held[place]
            seconds = self.profile.adapter(rank, width, own_tokens)
            busy = self.profile.utilization(rank, width, own_tokens, grows=False)
            index = (*place[:-1], tasks[place[-1]])
            np.add.at(alone_s[number], index, seconds)
            np.add.at(weighted_s[number], index, busy * seconds)
        return weighted_s, alone_s

    # ------------------------------------------------------------ what they take

    def stage_parts(self, stage: int, work: PassWork) -> Parts:
        """Return the seconds of passes on a stage, forward and backward, part by part (M Eq. 3)."""
        profile, devices, shards = self.profile, self.devices_per_stage, self.backbone_shards
        first, num_layers = sum(self.layers_per_stage[:stage]), self.layers_per_stage[stage]
        is_first, is_last = stage == 0, stage == self.num_stages - 1
        # Stages that gather their weights still run backward, as replicas gather together.
        stops_early = shards == 1 or self.num_stages == 1
        without_backward = np.clip(work.lowest - first, 0, num_layers) * stops_early
        # A layer of which only the forward is run counts as that part of a layer.
        run_layers = num_layers - (1 - profile.forward_fraction) * without_backward
        tokens_s = run_layers * work.products_s / devices
        if is_first:
            tokens_s = tokens_s + profile.embedding(work.tokens)
        if is_last:
            tokens_s = tokens_s + profile.head(work.targets) / devices
        adapters_s = np.zeros(np.shape(work.tokens))
        ends = (*work.lowest_layers[1:], self.shape.num_layers)
        for start, end, layer_s in zip(work.lowest_layers, ends, work.adapters_s, strict=True):
            adapters_s = adapters_s + max(0, min(end, first + num_layers) - max(start, first)) * layer_s
        # Half of a layer's sums are made in its backward.
        summed_layers = num_layers - without_backward / 2
        hidden_bytes = work.tokens * self.shape.hidden_size * self.shape.activation_bytes
        communication_s = summed_layers * ALL_REDUCES_PER_LAYER * all_reduce_s(self.tensor_link, devices, hidden_bytes)
        if is_last and devices > 1:
            block_s, gradient_s, blocks = self._loss_sums_s(work.targets)
            communication_s = communication_s + (work.targets > 0) * (blocks * block_s + gradient_s)
        if shards > 1:
            parts = self.shape.parts or FrozenParts.even(self.shape.backbone_bytes, self.shape.num_layers)
            # Layers, and what is in no other unit, are gathered for the forward and, freed in between, again for the
            # backward. The loss has its gradient in the forward, and a frozen embedding needs none.
            units = [(parts.layer_bytes, 2 * num_layers), (parts.before_bytes, is_first)]
            units += [(parts.head_bytes, is_last), (parts.after_bytes, 2 * is_last)]
            # A gathering is the second half of a sum.
            gathered_s = sum(count * all_reduce_s(self.tensor_link, shards, size) / 2 for size, count in units if size)
            communication_s = communication_s + gathered_s
        attention_s = run_layers * (work.attention_s / devices + work.calls * profile.attention_call_s)
        fixed_s = profile.pass_s + summed_layers * self._host_layer_s
        # The device waits for the host that launches, if that takes longer than what was launched.
        device_s = tokens_s + attention_s + adapters_s
        fixed_s = fixed_s + work.eager_part * np.maximum(run_layers * profile.layer_host_s - device_s, 0.0)
        return Parts(
            fixed=fixed_s,
            tokens=tokens_s,
            attention=attention_s,
            adapters=adapters_s,
            communication=communication_s,
        )

    def forward_share(self, stage: int, work: PassWork) -> Any:
        """Return the part of a stage's seconds that is the forward: more if the backward leaves layers out."""
        if not np.any(work.lowest):
            return self.profile.forward_fraction
        whole_s = self.stage_parts(stage, work._replace(lowest=np.zeros(np.shape(work.lowest)))).total
        return np.minimum(self.profile.forward_fraction * whole_s / self.stage_parts(stage, work).total, 1.0)

    def pass_times(self, loads: Sequence[TaskLoad], passes: Sequence[Sequence[Member]]) -> tuple[_Array, _Array]:
        """Return the forward seconds of real passes on each stage, and those of forward and backward, two `[P, S]`.

        The overhead of a pass is paid on every stage, as each launches its part of it.

        Args:
            loads: the loads of the tasks that share the passes.
            passes: the members of each of the P passes, whose `task` counts these loads.
        """
        return self.work_times(self.pass_work(loads, passes))

    def work_times(self, work: PassWork) -> tuple[_Array, _Array]:
        """Return what `pass_times` does, of passes whose work is known."""
        stages = range(self.num_stages)
        seconds = np.array([self.stage_parts(stage, work).total for stage in stages]).T
        shares = [np.broadcast_to(self.forward_share(stage, work), len(work.tokens)) for stage in stages]
        return np.array(shares).T * seconds, seconds

    def passes_s(self, loads: Sequence[TaskLoad], passes: Sequence[Sequence[Member]]) -> _Array:
        """Return the seconds of real passes on each stage, forward and backward, `[P, S]`."""
        return self.pass_times(loads, passes)[1]

    def pass_parts(self, stage: int, work: PassWork) -> PassParts:
        """Return what a mean one of these passes computes on a stage between the sums over its devices.

        Profiles have no parts of a layer: its base operators and adapters are divided as their weights are.
        """
        shape, profile, devices = self.shape, self.profile, self.devices_per_stage
        tokens, targets = float(np.mean(work.tokens)), float(np.mean(work.targets))
        first_s = float(np.mean(profile.embedding(work.tokens)))
        head_s = float(np.mean(profile.head(work.targets))) / devices
        mean = Parts(*(float(np.mean(part)) for part in self.stage_parts(stage, work)))
        linear_s = mean.tokens + mean.adapters
        linear_s -= (stage == 0) * first_s + (stage == self.num_stages - 1) * head_s
        attention_weights = 2 * (shape.attention_size + shape.key_value_size)
        share = attention_weights / (attention_weights + 3 * shape.intermediate_size)
        # Evenly over the layers of the stage, as passes in turns have one kind of layer.
        num_layers, half_host_s = self.layers_per_stage[stage], self._host_layer_s / 2
        block_s, gradient_s, _ = self._loss_sums_s(targets)
        return PassParts(
            tokens=tokens,
            targets=targets,
            attention_s=(share * linear_s + mean.attention) / num_layers + half_host_s,
            mlp_s=(1 - share) * linear_s / num_layers + half_host_s,
            first_s=first_s,
            head_s=head_s,
            overhead_s=profile.pass_s,
            sum_s=float(all_reduce_s(self.tensor_link, devices, tokens * shape.hidden_size * shape.activation_bytes)),
            head_sum_s=float(block_s),
            head_gradient_sum_s=float(gradient_s),
            head_block_rows=loss_block_rows(-(-shape.vocab_size // devices), self._device_type),
            forward_fraction=float(np.mean(self.forward_share(stage, work))),
        )

    def _loss_sums_s(self, targets: Any) -> tuple[Any, Any, Any]:
        """Return the seconds of the sums of a loss whose vocabulary is cut, and the blocks in which it is computed.

        Each block adds three numbers a target and device up; the gradient of the hidden states is one sum.
        """
        shape, devices = self.shape, self.devices_per_stage
        # At least one block, so that nothing is divided by 0 without targets.
        blocks = np.maximum(-(-targets // loss_block_rows(-(-shape.vocab_size // devices), self._device_type)), 1)
        block_bytes = targets * (_NUMBERS_PER_TARGET * devices * _FLOAT_BYTES) / blocks
        gradient_s = all_reduce_s(self.tensor_link, devices, targets * shape.hidden_size * shape.activation_bytes)
        return all_reduce_s(self.tensor_link, devices, block_bytes), gradient_s, blocks

    # ------------------------------------------------------------------ summaries

    def latency_matrix(self, loads_in_order: Sequence[TaskLoad], num_micro_batches: int) -> _Array:
        """Return L(H_{i->j}) of every range of consecutive tasks, for the fusion of Eq. 6 (M Eq. 4).

        The first term is the paper's: all stages but the last. With unequal stages a pipeline takes all but the
        slowest; with equal ones, which Eq. 4 has in mind, both are the same.

        Args:
            loads_in_order: the loads of M tasks, as fusion orders them.
            num_micro_batches: C, into which each global batch is split.

        Returns:
            Seconds, float [M, M]; entry [i, j] is of tasks i to j, both included; inf below the diagonal.
        """
        # The work of a mean micro-batch of each range; entries below the diagonal mean nothing.
        profile, num_tasks = self.profile, len(loads_in_order)
        of_tasks = [(load.tokens, load.num_targets, len(load.lengths)) for load in loads_in_order]
        tokens, targets, num_rows = np.array(of_tasks, dtype=float).reshape(num_tasks, 3).T / num_micro_batches
        attention_s = np.array(
            [
                np.sum(profile.attention(np.array(load.lengths))) - np.sum(profile.attention(np.array(load.shared)))
                for load in loads_in_order
            ]
        )
        calls = np.zeros((num_tasks, num_tasks))
        if profile.attention_call_s:
            # A micro-batch of a C-th of the sequences has at most as many groups as sequences.
            groups = [{-(-length // _LENGTH_STEP) for length in load.lengths} for load in loads_in_order]
            has_group = np.array([[group in present for group in sorted(set().union(*groups))] for present in groups])
            for start in range(num_tasks):
                calls[start, start:] = np.logical_or.accumulate(has_group[start:]).sum(axis=1)
            calls = np.minimum(calls, range_sums(num_rows))
        weighted_s, alone_s = self._adapter_times(loads_in_order, tokens)
        lowest, lowest_layers = _lowest_layers(loads_in_order)
        adapters_s = np.zeros((len(lowest_layers), num_tasks, num_tasks))
        for place, layer in enumerate(lowest_layers):
            has_adapter = lowest <= layer
            for weighted, alone in zip(weighted_s * has_adapter, alone_s * has_adapter, strict=True):
                longest_s = np.maximum.accumulate(np.triu(np.broadcast_to(alone, (num_tasks, num_tasks))), axis=1)
                adapters_s[place] += np.maximum(range_sums(weighted), longest_s)
        below_diagonal = np.tri(num_tasks, k=-1, dtype=bool)
        lowest_of_range = np.where(below_diagonal, self.shape.num_layers, lowest[None, :])
        shares_tokens = range_sums(np.array([sum(load.shared) for load in loads_in_order], dtype=float)) > 0
        computed, eager_part = self._replays(range_sums(tokens), shares_tokens)
        work = PassWork(
            tokens=range_sums(tokens),
            targets=range_sums(targets),
            products_s=profile.layer(computed),
            attention_s=range_sums(attention_s / num_micro_batches),
            calls=calls,
            lowest_layers=lowest_layers,
            adapters_s=adapters_s,
            lowest=np.minimum.accumulate(lowest_of_range, axis=1),
            eager_part=eager_part,
        )
        stages_s = [self.stage_parts(stage, work).total for stage in range(self.num_stages)]
        latency_s = sum(stages_s[:-1]) + num_micro_batches * np.max(stages_s, axis=0)
        return np.where(below_diagonal, math.inf, latency_s)

    def uniform_pass_s(self, loads: Sequence[TaskLoad], num_sequences: int, length: int) -> float:
        """Return the seconds of a pass of sequences of one length, of which each task has its part of the tokens."""
        tokens, all_tokens = num_sequences * length, sum(load.tokens for load in loads) or 1
        parts = [round(tokens * load.tokens / all_tokens) for load in loads]
        work = self.pass_work(loads, [[Member(task, 0, 0, part) for task, part in enumerate(parts)]])
        attention_s = np.array([num_sequences * self.profile.attention(length)])
        work = work._replace(attention_s=attention_s, calls=np.ones(1))
        return float(sum(self.stage_parts(stage, work).total.sum() for stage in range(self.num_stages)))

    def outside_s(self, loads: Sequence[TaskLoad]) -> float:
        """Return the seconds of a step that lie outside of its passes.

        They are the updates, the step's own overhead, and the forwards that some losses need before the passes. These
        count as one pass, because their number matters only for the overhead of a pass.
        """
        seconds = self.optimizer_s(loads) + self.profile.step_overhead_s
        plain = [replace(load, adapters=()) for load in loads if load.has_reference_forward]
        adapted = [load for load in loads if load.has_batch_forward]
        return seconds + sum(
            float(self.pass_times(rows, [whole_pass(rows)])[0].sum()) for rows in (plain, adapted) if rows
        )

    def optimizer_s(self, loads: Sequence[TaskLoad]) -> float:
        """Return the seconds of the updates of all tasks, on the stage with most layers, which ends last."""
        share = max(self.layers_per_stage) / self.shape.num_layers
        held = np.array([load.device_parameters(self.devices_per_stage) for load in loads])
        return float(np.sum(self.profile.optimizer(share * held)))


def graph_size(tokens: _Array) -> _Array:
    """Return the tokens of the CUDA graph of a pass: at least one of padding, up to a step of its size.

    These are the numbers of `Shape` in `peft_mux.parallel.cuda_graphs`; a test compares the two.
    """
    step = np.maximum(64, 2 ** np.ceil(np.log2(tokens + 1)) // 32)
    return np.ceil((tokens + 1) / step) * step


def range_sums(values: _Array) -> _Array:
    """Return the sum of each range of values `[M]`, as differences of prefix sums `[M, M]`; 0 below the diagonal."""
    ends = np.concatenate(([0.0], np.cumsum(values)))
    return np.triu(ends[None, 1:] - ends[:-1, None])


def _lowest_layers(loads: Sequence[TaskLoad]) -> tuple[_Array, tuple[int, ...]]:
    """Return the lowest layer of each task `[M]`, and the different ones, ascending."""
    lowest = np.array([load.lowest_layer for load in loads], dtype=int)
    return lowest, tuple(sorted(set(lowest.tolist())))
