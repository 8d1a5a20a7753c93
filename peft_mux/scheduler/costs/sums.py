"""`PassParts`: what one pass computes between the sums over the devices of a stage."""

# MERGED: `StageTerms`: the seconds of a stage of any layers, from which the layers of a backbone are cut into stages.
# MERGED: Sums, maxima and minima over all ranges of consecutive tasks, as arrays `[M, M]`: entry [i, j] is of tasks i
# MERGED: to j.
# MERGED: Seconds of attention in M Eq. 3, which depend on the lengths of sequences, and how many calls they take.
# MERGED: How many layers of each stage have adapters, and what a backward leaves out below: `Depth`, `TaskDepths`.
# MERGED: `Sums`: what the tasks of an hTask amount to in M Eq. 3.
# MERGED: What the tasks of an hTask amount to in M Eq. 3: in its mean micro-batch, and in those of every range of
# MERGED: tasks.
# MERGED: What the tasks of an hTask amount to in M Eq. 3 in real passes: `pass_sums`.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peft_mux.data.packing.passes import Member
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.model_shape import MOST_READ, StageSize
from peft_mux.scheduler.costs.profile import Profile


@dataclass(frozen=True, slots=True)
class PassParts:
    """Seconds of the parts of one pass on each of the devices that share its layers.

    Forward and backward together where nothing else is said.

    Attributes:
        tokens: tokens of the pass.
        targets: loss terms of the pass.
        attention_s: norm, q/k/v, attention and output projection of one layer, adapters included.
        mlp_s: norm, MLP and adapters of one layer.
        first_s: what lies before the layers.
        head_s: output head and loss.
        overhead_s: what the pass takes whatever its size.
        sum_s: one sum of hidden states `[T, D]` over the devices.
        head_sum_s: one sum of three numbers a target, for one block of the loss.
        head_gradient_sum_s: the sum of the gradient of the targets' hidden states.
        head_block_rows: rows of a block of the loss.
        forward_fraction: the part of a layer's seconds that is its forward.
    """

    tokens: float
    targets: float
    attention_s: float
    mlp_s: float
    first_s: float
    head_s: float
    overhead_s: float
    sum_s: float
    head_sum_s: float
    head_gradient_sum_s: float
    head_block_rows: int
    forward_fraction: float

    @property
    def num_head_blocks(self) -> int:
        """Blocks of rows in which the loss is computed, one at least."""
        return max(1, math.ceil(self.targets / self.head_block_rows))

    def computed_share(self, num_layers: int) -> float:
        """Return the part of a pass that is left where all sums are hidden.

        Args:
            num_layers: layers of the whole model.
        """
        computed_s = num_layers * (self.attention_s + self.mlp_s) + self.first_s + self.head_s + self.overhead_s
        sums_s = 4 * num_layers * self.sum_s + self.num_head_blocks * self.head_sum_s + self.head_gradient_sum_s
        return computed_s / (computed_s + sums_s) if computed_s else 0.0

    def of_size(self, tokens: float, targets: float) -> PassParts:
        """Return the parts of a pass of another size, in proportion: enough to order subgraphs by.

        Args:
            tokens: tokens of the other pass.
            targets: loss terms of the other pass.
        """
        by_tokens = tokens / self.tokens if self.tokens else 1.0
        by_targets = targets / self.targets if self.targets else 1.0
        scaled = {name: by_tokens * getattr(self, name) for name in ("attention_s", "mlp_s", "first_s", "sum_s")}
        scaled |= {name: by_targets * getattr(self, name) for name in ("head_s", "head_gradient_sum_s")}
        return replace(self, tokens=float(tokens), targets=float(targets), **scaled)


@dataclass(frozen=True, slots=True)
class StageTerms:
    """Forward and backward seconds of one micro-batch: a stage takes its layers' and, at the ends, its end's.

    Attributes:
        added_s: seconds of the layers before each of L layers and after the last one, `[L + 1]`; the backward of layers
            below all adapters is not in them.
        first_s: seconds of what lies before the layers.
        last_s: seconds of what lies after the layers, the loss included, less what the last layer spares.
    """

    added_s: tuple[float, ...]
    first_s: float
    last_s: float

    def stage_s(self, first_layer: int, num_layers: int) -> float:
        """Return the seconds of a stage.

        Args:
            first_layer: the lowest layer of the stage, counted from 0.
            num_layers: layers of the stage.
        """
        end = first_layer + num_layers
        ends_s = (first_layer == 0) * self.first_s + (end == len(self.added_s) - 1) * self.last_s
        return self.added_s[end] - self.added_s[first_layer] + ends_s


def range_sums(values: NDArray[Any]) -> NDArray[Any]:
    """Return the sum of each range of values `[M]`; 0 below the diagonal."""
    # Differences of prefix sums: all M^2 ranges cost no more than the array that holds them.
    ends = np.concatenate(([0.0], np.cumsum(values)))
    return np.triu(ends[None, 1:] - ends[:-1, None])


def range_maxima(values: NDArray[Any]) -> NDArray[Any]:
    """Return the largest of each range of values `[M]` of 0 or more; 0 below the diagonal."""
    return np.maximum.accumulate(np.triu(np.broadcast_to(values, (len(values), len(values)))), axis=1)


def range_minima(values: NDArray[Any]) -> NDArray[Any]:
    """Return the least of each range of values `[M]`; inf below the diagonal."""
    count = len(values)
    return np.minimum.accumulate(np.where(np.tri(count, k=-1, dtype=bool), np.inf, values[None, :]), axis=1)


_LENGTH_STEP = 16
"""Sequences whose lengths round up to the same multiple share an attention call (`peft_mux.modeling.attention`)."""


def attention_s(profile: Profile, loads: Sequence[TaskLoad]) -> NDArray[Any]:
    """Return seconds of the attention products of each task's global batch in one layer, [M]."""
    counts = np.array([len(load.lengths) for load in loads], dtype=int)
    lengths = np.array([length for load in loads for length in load.lengths], dtype=float)
    owner = np.repeat(np.arange(len(loads)), counts)
    shared = np.array([tokens for load in loads for tokens in load.shared or [0] * len(load.lengths)], dtype=float)
    seconds = added_attention_s(profile, lengths, shared) if len(lengths) else lengths
    return np.bincount(owner, weights=seconds, minlength=len(loads))


def added_attention_s(profile: Profile, ends: NDArray[Any], starts: NDArray[Any]) -> NDArray[Any]:
    """Return seconds of the attention products of rows from a token on: what is added to the square of the row."""
    return profile.attention_s(ends) - np.where(starts > 0, profile.attention_s(np.maximum(starts, 1)), 0)


def attention_calls(loads: Sequence[TaskLoad], num_micro_batches: int) -> float:
    """Return the attention calls of a micro-batch in one layer: its groups of near-equal length.

    A micro-batch of a C-th of the sequences has at most as many groups as sequences.
    """
    lengths = [length for load in loads for length in load.lengths]
    groups = len({-(-length // _LENGTH_STEP) for length in lengths})
    return min(groups, len(lengths) / num_micro_batches)


def attention_calls_of_ranges(loads: Sequence[TaskLoad], num_micro_batches: int) -> NDArray[Any]:
    """Return `attention_calls` of every range, [M, M]; 0 below the diagonal."""
    count = len(loads)
    groups = [np.unique(-(-np.array(load.lengths, dtype=int) // _LENGTH_STEP)) for load in loads]
    num_sequences = np.cumsum([0, *(len(load.lengths) for load in loads)])
    calls = np.zeros((count, count))
    # Read from the last task to the first: the first task at or after i that has a group.
    width = 1 + max((int(own[-1]) for own in groups if len(own)), default=0)
    first = np.full(width, count)
    for start in range(count - 1, -1, -1):
        first[groups[start]] = start
        calls[start] = np.cumsum(np.bincount(first, minlength=count + 1)[:count])
        calls[start] = np.minimum(calls[start], (num_sequences[1:] - num_sequences[start]) / num_micro_batches)
    return np.triu(calls)


def attention_calls_of_passes(
    number: NDArray[np.int64], lengths: NDArray[np.int64], num_passes: int
) -> NDArray[np.int64]:
    """Return the attention calls of each pass in one layer: its groups of near-equal length, `[P]`."""
    groups = -(-lengths // _LENGTH_STEP)
    found = np.unique(np.stack([number, groups], axis=1), axis=0)
    return np.bincount(found[:, 0], minlength=num_passes)


_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Depth:
    """Where the adapters of a micro-batch lie in each of S stages: `[S]`, or of many micro-batches `[S, ...]`.

    Attributes:
        adapted: layers with adapters: a mean over the tasks, weighted with what each takes of such a layer.
        layers: layers below the adapters of all its tasks, through which no gradient goes.
        rows: in the layers above those, tokens of the tasks that have no adapter there or below, times these layers and
            the part of their products that is spared. Attention and norms are computed for them all the same.
    """

    adapted: _Array
    layers: _Array
    rows: _Array

    @property
    def forward(self) -> Depth:
        """The same of a forward, which goes through all layers."""
        return replace(self, layers=np.zeros_like(self.layers), rows=np.zeros_like(self.rows))


class TaskDepths:
    """How far the backwards of M tasks go down through the stages.

    Args:
        loads: the loads of the tasks.
        layers: layers of each of the S stages.
    """

    def __init__(self, loads: Sequence[TaskLoad], layers: Sequence[int]) -> None:
        self._counts = np.array(layers, dtype=float)
        self._first = np.cumsum(self._counts) - self._counts
        self._lowest, self._share = (
            np.array([getattr(load, name) for load in loads], dtype=float) for name in ("lowest_layer", "unmet_share")
        )
        below = self._layers_below(self._lowest)
        # Of each stage and task, the layers whose products its rows are spared, and those with its adapters: [S, M].
        self._spared, self._adapted = self._share * below, self._counts[:, None] - below
        parameters = np.array([load.trainable_parameters for load in loads], dtype=float)
        # The products of adapters take about as long as they have parameters and tokens.
        self._weight = parameters / np.maximum(self._counts.sum() - self._lowest, 1.0)

    def of(self, tokens: _Array) -> Depth:
        """Return the depth of micro-batches of these tokens of each task, `[M]` or `[P, M]`."""
        lowest = np.where(tokens > 0, self._lowest, np.inf).min(axis=-1, initial=np.inf)
        weights = self._weight * tokens
        adapted = self._mean(self._adapted @ weights.T, weights.sum(axis=-1))
        return self._depth(lowest, self._spared @ tokens.T, tokens @ self._share, adapted)

    def of_ranges(self, tokens: _Array) -> Depth:
        """Return the depth of every range of consecutive tasks, of which micro-batches have these tokens `[M]`."""
        lowest = range_minima(np.where(tokens > 0, self._lowest, np.inf))
        spared = np.stack([range_sums(own * tokens) for own in self._spared])
        weights = self._weight * tokens
        adapted = self._mean(np.stack([range_sums(own * weights) for own in self._adapted]), range_sums(weights))
        return self._depth(lowest, spared, range_sums(self._share * tokens), adapted)

    def _depth(self, lowest: _Array, spared: _Array, shares: _Array, adapted: _Array) -> Depth:
        layers = self._layers_below(np.where(np.isinf(lowest), 0.0, lowest))
        return Depth(adapted, layers, spared - layers * shares)

    def _mean(self, sums: _Array, weights: _Array) -> _Array:
        """Return sums `[S, ...]` over their weights; all layers of the stage where there is no weight."""
        counts = self._counts.reshape(-1, *(1,) * weights.ndim)
        if not self._lowest.any():
            return np.broadcast_to(counts, sums.shape)
        return np.where(weights > 0, sums / np.where(weights > 0, weights, 1.0), counts)

    def _layers_below(self, lowest: _Array) -> _Array:
        """Return how many layers of each stage lie below these layers `[...]`: `[S, ...]`."""
        first, counts = (one.reshape(-1, *(1,) * lowest.ndim) for one in (self._first, self._counts))
        return np.clip(lowest - first, 0.0, counts)


@dataclass(frozen=True, slots=True)
class Sums:
    """What an hTask's mean micro-batch amounts to: numbers, or arrays over many hTasks.

    Attributes:
        tokens: tokens of the micro-batch.
        targets: loss terms of the micro-batch.
        products_s: seconds of one layer's products with frozen weights, and of its norms, on one device.
        attention_s: seconds of one layer's attention product on one device.
        calls_s: seconds of the launches of one layer's attention calls.
        adapters_s: seconds of all adapters of one layer that every task adapts, fused as in Eq. 3.
        depth: in how many layers of each stage adapters lie, and what a backward leaves out below.
    """

    tokens: Any
    targets: Any
    products_s: Any
    attention_s: Any
    calls_s: Any
    adapters_s: Any
    depth: Depth

    @property
    def forward(self) -> Sums:
        """The same for a forward, which goes through all layers."""
        return replace(self, depth=self.depth.forward)

    def unread_s(self, profile: Profile, share: float, devices: int) -> tuple[Any, Any]:
        """Return what the last layer spares that computes some rows alone: seconds of its products and its adapters.

        Args:
            profile: seconds of the parts of a step on one device.
            share: part of a layer's products that is made for the rows alone that a loss reads.
            devices: devices that share each layer.
        """
        if not share:
            return 0.0, 0.0
        read = np.minimum(self.targets, self.tokens)
        share = share * ((read > 0) & (read <= MOST_READ * self.tokens))
        products_s = share * (self.products_s - profile.layer_s(read)) / devices
        return products_s, share * self.adapters_s * (1 - read / np.maximum(self.tokens, 1e-9))


class _TaskTerms:
    """What each of M tasks adds to the sums of Eq. 3, as arrays, for one number of micro-batches.

    Attributes:
        tokens: tokens of a micro-batch, [M].
        targets: loss terms of a micro-batch, [M].
        attention_s: seconds of the attention products of one layer, [M].
        weighted_s: sum of u_a t_a over a task's adapters of each of W widths, [W, M].
        alone_s: sum of t_a over the same adapters, [W, M].
    """

    def __init__(self, profile: Profile, loads: Sequence[TaskLoad], num_micro_batches: int, size: StageSize) -> None:
        self.tokens = np.array([load.tokens for load in loads], dtype=float) / num_micro_batches
        self.targets = np.array([load.num_targets for load in loads], dtype=float) / num_micro_batches
        self.attention_s = attention_s(profile, loads) / num_micro_batches
        self.weighted_s, self.alone_s = _adapters_s(profile, loads, self.tokens, size.devices)


def mean_batch(profile: Profile, loads: Sequence[TaskLoad], num_micro_batches: int, size: StageSize) -> Sums:
    """Return the sums of one hTask's mean micro-batch.

    Args:
        profile: seconds of the parts of a step on one device.
        loads: the loads of the tasks of the hTask.
        num_micro_batches: C, into which each global batch is split.
        size: the layers of each stage, and the devices that share them; factors of adapters are as wide as their part.
    """
    terms = _TaskTerms(profile, loads, num_micro_batches, size)
    tokens, calls = terms.tokens.sum(), attention_calls(loads, num_micro_batches)
    # NumPy refuses the maximum over no tasks.
    longest_s = terms.alone_s.max(axis=1) if loads else 0.0
    return Sums(
        tokens=tokens,
        targets=terms.targets.sum(),
        products_s=profile.layer_s(tokens),
        attention_s=terms.attention_s.sum(),
        calls_s=calls * profile.attention_call_s,
        # Eq. 3: fused adapters share the device by u_a, but none ends before it would alone.
        adapters_s=np.maximum(terms.weighted_s.sum(axis=1), longest_s).sum(),
        depth=TaskDepths(loads, size.layers).of(terms.tokens),
    )


def uniform_batch(
    profile: Profile, loads: Sequence[TaskLoad], num_sequences: int, length: int, size: StageSize
) -> Sums:
    """Return the sums of a micro-batch of sequences of one length, of which each task has its part of the tokens.

    Args:
        profile: seconds of the parts of a step on one device.
        loads: the loads whose tokens, targets and adapters are taken; their lengths are not.
        num_sequences: number of sequences of the micro-batch.
        length: tokens of each sequence.
        size: the layers of each stage, and the devices that share them; factors of adapters are as wide as their part.
    """
    tokens = num_sequences * length
    all_tokens = sum(load.tokens for load in loads) or 1
    parts = np.array([load.tokens for load in loads], dtype=float) / all_tokens
    weighted_s, alone_s = _adapters_s(profile, loads, tokens * parts, size.devices)
    longest_s = alone_s.max(axis=1) if loads else 0.0
    return Sums(
        tokens=tokens,
        targets=tokens * sum(load.num_targets for load in loads) / all_tokens,
        products_s=profile.layer_s(tokens),
        attention_s=num_sequences * profile.attention_s(length),
        calls_s=profile.attention_call_s,
        adapters_s=np.maximum(weighted_s.sum(axis=1), longest_s).sum(),
        depth=TaskDepths(loads, size.layers).of(tokens * parts),
    )


class RangeBatches:
    """Mean micro-batches of all ranges of consecutive tasks, as [M, M] arrays.

    Args:
        profile: seconds of the parts of a step on one device.
        loads: the loads of M tasks, as fusion orders them.
        num_micro_batches: C, into which each global batch is split.
        size: the layers of each stage, and the devices that share them.

    Attributes:
        is_range: where the last task does not come before the first, bool [M, M].
        sums: the sums of each range.
        longest: tokens of each range's longest sequence, [M, M].
    """

    def __init__(self, profile: Profile, loads: Sequence[TaskLoad], num_micro_batches: int, size: StageSize) -> None:
        count = len(loads)
        terms = _TaskTerms(profile, loads, num_micro_batches, size)
        self.is_range = np.tri(count, dtype=bool).T
        tokens = range_sums(terms.tokens)
        # Counting the groups of all ranges takes a loop over tasks, which is left out where calls cost nothing.
        calls_s: Any = 0.0
        if profile.attention_call_s:
            calls_s = profile.attention_call_s * attention_calls_of_ranges(loads, num_micro_batches)
        pairs = zip(terms.weighted_s, terms.alone_s, strict=True)
        self.sums = Sums(
            tokens=tokens,
            targets=range_sums(terms.targets),
            products_s=profile.layer_s(tokens),
            attention_s=range_sums(terms.attention_s),
            calls_s=calls_s,
            adapters_s=sum(
                (np.maximum(range_sums(weighted), range_maxima(alone)) for weighted, alone in pairs),
                np.zeros((count, count)),
            ),
            depth=TaskDepths(loads, size.layers).of_ranges(terms.tokens),
        )
        self.longest = range_maxima(np.array([max(load.lengths, default=0) for load in loads], dtype=float))

    def micro_batch_tokens(self) -> NDArray[Any]:
        """Return the tokens of a micro-batch: the mean, or the longest sequence, which is not split."""
        return np.maximum(self.sums.tokens, self.longest)


def _adapters_s(
    profile: Profile, loads: Sequence[TaskLoad], tokens: NDArray[Any], devices: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return u_a t_a and t_a on each device, summed over each task's adapters of each width: two [W, M]."""
    rows = [
        (k, adapter.rank, adapter.device_width(devices)) for k, load in enumerate(loads) for adapter in load.adapters
    ]
    widths = sorted({width for _, _, width in rows})
    shape = max(len(widths), 1), len(loads)
    if not rows:
        return np.zeros(shape), np.zeros(shape)
    owner, rank, width = (np.array(column) for column in zip(*rows, strict=True))
    alone_s = profile.adapter_s(rank, width, tokens[owner])
    weighted_s = profile.adapter_utilization(rank, width, tokens[owner]) * alone_s
    # The place of each adapter in a flat [W, M] array, so that one bincount adds all of them up.
    place = np.searchsorted(widths, width) * len(loads) + owner
    size = shape[0] * shape[1]
    sums = (np.bincount(place, weights=part, minlength=size).reshape(shape) for part in (weighted_s, alone_s))
    weighted, alone = sums
    return weighted, alone


def pass_sums(profile: Profile, loads: Sequence[TaskLoad], passes: Sequence[Sequence[Member]], size: StageSize) -> Sums:
    """Return the sums of each of P passes, as arrays `[P]`.

    Args:
        profile: seconds of the parts of a step on one device.
        loads: the loads of M tasks, whose loss terms are spread evenly over their tokens.
        passes: the members of each pass, whose `task` counts these loads.
        size: the layers of each stage, and the devices that share them; factors of adapters are as wide as their part.
    """
    num_passes, num_tasks = len(passes), len(loads)
    members = [(number, *member) for number, own in enumerate(passes) for member in own]
    columns = np.array(members, dtype=np.int64).reshape(len(members), 6).T
    number, task, _, start, end, shared = columns
    tokens = np.zeros((num_passes, num_tasks))
    np.add.at(tokens, (number, task), end - start - shared)
    targets_per_token = np.array([load.num_targets / max(load.tokens, 1) for load in loads])
    # A part sees the keys and values before it, and so does what a row has for itself of those that it shares.
    attention_s = added_attention_s(profile, end.astype(float), start + shared)
    return Sums(
        tokens=tokens.sum(axis=1),
        targets=tokens @ targets_per_token,
        products_s=profile.layer_s(tokens.sum(axis=1)),
        attention_s=np.bincount(number, weights=attention_s, minlength=num_passes),
        calls_s=profile.attention_call_s * attention_calls_of_passes(number, end - start, num_passes),
        adapters_s=_adapters_of_passes_s(profile, loads, tokens, size.devices),
        depth=TaskDepths(loads, size.layers).of(tokens),
    )


def _adapters_of_passes_s(
    profile: Profile, loads: Sequence[TaskLoad], tokens: NDArray[np.float64], devices: int
) -> NDArray[np.float64]:
    """Return the seconds of all adapters of one layer in each pass, fused as in Eq. 3, `[P]`."""
    adapters = [
        (task, adapter.rank, adapter.device_width(devices))
        for task, load in enumerate(loads)
        for adapter in load.adapters
    ]
    total_s = np.zeros(len(tokens))
    for width in sorted({width for _, _, width in adapters}):
        own = [(task, rank) for task, rank, one in adapters if one == width]
        task, rank = (np.array(column) for column in zip(*own, strict=True))
        number, place = np.nonzero(tokens[:, task])
        held = tokens[number, task[place]]
        alone_s = profile.adapter_s(rank[place], width, held)
        weighted_s = profile.adapter_utilization(rank[place], width, held) * alone_s
        # A task's own adapters of one width run one after another, and no pass ends before those of one task would.
        of_task = np.zeros_like(tokens)
        np.add.at(of_task, (number, task[place]), alone_s)
        total_s += np.maximum(np.bincount(number, weights=weighted_s, minlength=len(tokens)), of_task.max(axis=1))
    return total_s
