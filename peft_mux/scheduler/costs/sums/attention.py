"""Seconds of attention in M Eq. 3, which depend on the lengths of sequences, and how many calls they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.profile import Profile

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
