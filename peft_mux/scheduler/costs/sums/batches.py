"""What the tasks of an hTask amount to in M Eq. 3: in its mean micro-batch, and in those of every range of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.model_shape import StageSize
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.costs.sums.attention import attention_calls, attention_calls_of_ranges, attention_s
from peft_mux.scheduler.costs.sums.depth import TaskDepths
from peft_mux.scheduler.costs.sums.ranges import range_maxima, range_sums
from peft_mux.scheduler.costs.sums.sums import Sums


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
