"""How long an hTask takes on a stage and through the pipeline (M §3.3, Eq. 3 and 4), and how long a step takes.

Where the paper slips or is silent, decided here:

* Eq. 3 writes n_k for the tokens of task k. A micro-batch holds a C-th of a global batch, so that n_k stands for the
  tokens of the global batch over C, and attention and targets are divided alike. Whole sequences do not always divide
  so evenly: it is a mean.
* Eq. 3 knows no attention product, whose time depends on sequence lengths rather than on tokens. It is added as a base
  operator, and so are what lies before the layers (first stage) and the output head with the loss (last stage).
* The fused sets {a} of Eq. 3 are the adapters of one linear layer. Loads tell widths, not names, so that adapters of
  one width form a set; with equal target modules that gives the same sum.
* Eq. 4 doubles the forward, as a frozen backbone has no weight gradients. Where a profile has measured another ratio,
  1 / `forward_fraction` stands in place of the 2.
* Overheads of passes and steps are not in Eq. 3 and 4: `pass_s` and `step_s` add them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peft_mux.scheduler.loads import TaskLoad
from peft_mux.scheduler.memory import ModelShape, split_layers
from peft_mux.scheduler.profile import Profile

_LENGTH_STEP = 16
"""Sequences whose lengths round up to the same multiple share an attention call (`modeling.attention`)."""


class CostModel:
    """Predicts seconds from a profile.

    Args:
        profile: of one layer and the rest, on one device.
        shape: of the backbone.
        num_stages: S of the pipeline.
        devices_per_stage: N_g of Eq. 3, over which base operators are sharded.
        layers_per_stage: S numbers that add up to the layers of the backbone; by default as equal as can be.

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
    ) -> None:
        """Check and remember."""
        _require_count("devices_per_stage", devices_per_stage)
        self.profile = profile
        self.shape = shape
        self.num_stages = num_stages
        self.devices_per_stage = devices_per_stage
        self.layers_per_stage = split_layers(shape.num_layers, num_stages, layers_per_stage)

    # -------------------------------------------------------------- one hTask

    def stage_latency_s(self, loads: Sequence[TaskLoad], *, num_micro_batches: int, stage: int = 0) -> float:
        """Return L^(s)(H): forward seconds of one micro-batch of an hTask on a stage (M Eq. 3).

        Args:
            loads: tasks of the hTask.
            num_micro_batches: C, into which each global batch is split.
            stage: s, from 0.

        Raises:
            ValueError: for no such stage, or C below 1.
        """
        _require_count("num_micro_batches", num_micro_batches)
        if not 0 <= stage < self.num_stages:
            raise ValueError(f"stage is {stage}; allowed: 0 to {self.num_stages - 1}. Count stages from 0.")
        batch = _MeanBatch(self, loads, num_micro_batches)
        return float(self.profile.forward_fraction * batch.stage_s(stage))

    def latency_s(self, loads: Sequence[TaskLoad], num_micro_batches: int) -> float:
        """Return L(H): seconds of all micro-batches of an hTask through the pipeline (M Eq. 4).

        Args:
            loads: tasks of the hTask.
            num_micro_batches: C.
        """
        _require_count("num_micro_batches", num_micro_batches)
        batch = _MeanBatch(self, loads, num_micro_batches)
        return float(_pipeline_s([batch.stage_s(stage) for stage in range(self.num_stages)], num_micro_batches))

    def pass_s(self, loads: Sequence[TaskLoad], num_micro_batches: int) -> float:
        """Return seconds of one micro-batch, forward and backward through all stages one after another.

        Args:
            loads: tasks of the hTask.
            num_micro_batches: C.
        """
        _require_count("num_micro_batches", num_micro_batches)
        batch = _MeanBatch(self, loads, num_micro_batches)
        return float(sum(batch.stage_s(stage) for stage in range(self.num_stages)) + self.profile.pass_overhead_s)

    # ------------------------------------------------------------- whole steps

    def step_s(self, htasks: Sequence[tuple[Sequence[TaskLoad], int]]) -> float:
        """Return seconds of a step of all hTasks one after another on one device.

        Args:
            htasks: tasks of each hTask, and its number of micro-batches.
        """
        passes_s = sum(count * self.pass_s(loads, count) for loads, count in htasks)
        updates_s = sum(self.optimizer_s(loads) for loads, _ in htasks)
        return float(passes_s + updates_s + self.profile.step_overhead_s)

    def optimizer_s(self, loads: Sequence[TaskLoad]) -> float:
        """Return seconds of the updates of all tasks, on the stage with most layers."""
        if not loads:
            return 0.0
        share = max(self.layers_per_stage) / self.shape.num_layers
        return float(np.sum(self.profile.optimizer_s(share * np.array([load.trainable_parameters for load in loads]))))

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
            loads_in_order: M tasks, as fusion orders them.
            num_micro_batches: C.
            fits: is given the tokens of one micro-batch of each range, float [M, M] (the longest sequence where that is
                more; 0 below the diagonal), and returns bool [M, M]: whether that fits into memory (Eq. 5). `None`
                where everything does.

        Returns:
            Seconds, float [M, M]; entry [i, j] is that of tasks i to j, both included. inf below the diagonal and where
            a range does not fit.

        Raises:
            ValueError: for C below 1, or a `fits` that answers in another shape.
        """
        _require_count("num_micro_batches", num_micro_batches)
        ranges = _Ranges(self, loads_in_order, num_micro_batches)
        latency = _pipeline_s([ranges.stage_s(stage) for stage in range(self.num_stages)], num_micro_batches)
        latency = np.where(ranges.is_range, latency, math.inf)
        if fits is None:
            return latency
        verdicts = np.asarray(fits(ranges.micro_batch_tokens()), dtype=bool)
        if verdicts.shape != latency.shape:
            raise ValueError(
                f"fits returned shape {verdicts.shape}; allowed: {latency.shape}. Answer element by element."
            )
        return np.where(verdicts, latency, math.inf)

    # ---------------------------------------------------------------- internal

    def stage_sum_s(self, stage: int, sums: _Sums) -> Any:
        """Return forward and backward seconds of a stage from sums over the tasks of an hTask, or of many."""
        layers = self.layers_per_stage[stage]
        base_s = layers * sums.layer_s
        if stage == 0:
            base_s = base_s + self.profile.embedding_s(sums.tokens)
        if stage == self.num_stages - 1:
            base_s = base_s + self.profile.head_s(sums.targets)
        return base_s / self.devices_per_stage + layers * sums.adapters_s


@dataclass(frozen=True, slots=True)
class _Sums:
    """What an hTask's mean micro-batch amounts to: numbers, or arrays over many hTasks.

    Attributes:
        tokens: of the micro-batch.
        targets: of the micro-batch.
        layer_s: of one layer, the attention product included.
        adapters_s: of one layer, fused.
    """

    tokens: Any
    targets: Any
    layer_s: Any
    adapters_s: Any


class _TaskTerms:
    """What each of M tasks adds to the sums of Eq. 3, as arrays, for one number of micro-batches.

    Attributes:
        tokens: [M], of a micro-batch.
        targets: [M].
        attention_s: [M], of one layer.
        weighted_s: [W, M], sum of u_a t_a over a task's adapters of each of W widths.
        alone_s: [W, M], sum of t_a likewise.
    """

    def __init__(self, cost: CostModel, loads: Sequence[TaskLoad], num_micro_batches: int) -> None:
        self.tokens = np.array([load.tokens for load in loads], dtype=float) / num_micro_batches
        self.targets = np.array([load.num_targets for load in loads], dtype=float) / num_micro_batches
        self.attention_s = _attention_s(cost.profile, loads) / num_micro_batches
        self.weighted_s, self.alone_s = _adapters_s(cost.profile, loads, self.tokens)


def _attention_s(profile: Profile, loads: Sequence[TaskLoad]) -> NDArray[Any]:
    """Return seconds of the attention products of each task's global batch in one layer, [M]."""
    counts = np.array([len(load.lengths) for load in loads], dtype=int)
    lengths = np.array([length for load in loads for length in load.lengths], dtype=float)
    owner = np.repeat(np.arange(len(loads)), counts)
    seconds = profile.attention_s(lengths) if len(lengths) else lengths
    return np.bincount(owner, weights=seconds, minlength=len(loads))


def _adapters_s(profile: Profile, loads: Sequence[TaskLoad], tokens: NDArray[Any]) -> tuple[Any, Any]:
    """Return u_a t_a and t_a, summed over each task's adapters of each width: two [W, M]."""
    rows = [(k, adapter.rank, adapter.width) for k, load in enumerate(loads) for adapter in load.adapters]
    widths = sorted({width for _, _, width in rows})
    shape = max(len(widths), 1), len(loads)
    if not rows:
        return np.zeros(shape), np.zeros(shape)
    owner, rank, width = (np.array(column) for column in zip(*rows, strict=True))
    alone_s = profile.adapter_s(rank, width, tokens[owner])
    weighted_s = profile.adapter_utilization(rank, width, tokens[owner]) * alone_s
    place = np.searchsorted(widths, width) * len(loads) + owner
    size = shape[0] * shape[1]
    sums = (np.bincount(place, weights=part, minlength=size).reshape(shape) for part in (weighted_s, alone_s))
    weighted, alone = sums
    return weighted, alone


class _MeanBatch:
    """One hTask's mean micro-batch."""

    def __init__(self, cost: CostModel, loads: Sequence[TaskLoad], num_micro_batches: int) -> None:
        self.cost = cost
        terms = _TaskTerms(cost, loads, num_micro_batches)
        tokens, calls = terms.tokens.sum(), _attention_calls(loads, num_micro_batches)
        attention_s = terms.attention_s.sum() + calls * cost.profile.attention_call_s
        longest_s = terms.alone_s.max(axis=1) if loads else 0.0
        self.sums = _Sums(
            tokens=tokens,
            targets=terms.targets.sum(),
            layer_s=cost.profile.layer_s(tokens) + attention_s,
            adapters_s=np.maximum(terms.weighted_s.sum(axis=1), longest_s).sum(),
        )

    def stage_s(self, stage: int) -> Any:
        """Return forward and backward seconds on a stage."""
        return self.cost.stage_sum_s(stage, self.sums)


class _Ranges:
    """Mean micro-batches of all ranges of consecutive tasks, as [M, M] arrays."""

    def __init__(self, cost: CostModel, loads: Sequence[TaskLoad], num_micro_batches: int) -> None:
        self.cost = cost
        count = len(loads)
        terms = _TaskTerms(cost, loads, num_micro_batches)
        self.is_range = np.arange(count)[None, :] >= np.arange(count)[:, None]
        tokens = self._added(terms.tokens)
        attention_s = self._added(terms.attention_s)
        if cost.profile.attention_call_s:
            attention_s += cost.profile.attention_call_s * _attention_calls_of_ranges(loads, num_micro_batches)
        pairs = zip(terms.weighted_s, terms.alone_s, strict=True)
        self.sums = _Sums(
            tokens=tokens,
            targets=self._added(terms.targets),
            layer_s=cost.profile.layer_s(tokens) + attention_s,
            adapters_s=sum(
                (np.maximum(self._added(weighted), self._maxima(alone)) for weighted, alone in pairs),
                np.zeros((count, count)),
            ),
        )
        self.longest = self._maxima(np.array([max(load.lengths, default=0) for load in loads], dtype=float))

    def stage_s(self, stage: int) -> Any:
        """Return forward and backward seconds on a stage."""
        return self.cost.stage_sum_s(stage, self.sums)

    def micro_batch_tokens(self) -> NDArray[Any]:
        """Return the tokens of a micro-batch: the mean, or the longest sequence, which is not split."""
        return np.where(self.is_range, np.maximum(self.sums.tokens, self.longest), 0.0)

    def _added(self, values: NDArray[Any]) -> NDArray[Any]:
        ends = np.concatenate(([0.0], np.cumsum(values)))
        return np.where(self.is_range, ends[None, 1:] - ends[:-1, None], 0.0)

    def _maxima(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.maximum.accumulate(np.where(self.is_range, values[None, :], 0.0), axis=1)


def _attention_calls(loads: Sequence[TaskLoad], num_micro_batches: int) -> float:
    """Return the attention calls of a micro-batch in one layer: its groups of near-equal length.

    A micro-batch of a C-th of the sequences has at most as many groups as sequences.
    """
    lengths = [length for load in loads for length in load.lengths]
    groups = len({-(-length // _LENGTH_STEP) for length in lengths})
    return min(groups, len(lengths) / num_micro_batches)


def _attention_calls_of_ranges(loads: Sequence[TaskLoad], num_micro_batches: int) -> NDArray[Any]:
    """Return `_attention_calls` of every range, [M, M]; 0 below the diagonal."""
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
