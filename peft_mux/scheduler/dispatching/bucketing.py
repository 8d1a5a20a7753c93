"""Dynamic bucketing: the padded lengths of one step, chosen so that as little as possible is padded (L section 4.3).

Sequences are counted by interval of length; a dynamic programme over the non-empty intervals then merges these into at
most R buckets. What a bucket costs in time, and where it runs, is decided in `dispatch.py`. For example::

    interval ends      256   512   768  1024  1280
    sequences            9     4     0     1     2
    R = 2 boundaries         | 512              | 1280      9 padded by 256, 1 padded by 256, in addition to the padding
                                                            inside each interval
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DEFAULT_NUM_BUCKETS = 16
"""R in L (footnote 3)."""
DEFAULT_INTERVAL_TOKENS = 256
"""Width of an interval in L section 4.3."""

_LEAST_INTERVAL_TOKENS = 16
_INTERVALS_OF_LONGEST = 64
"""About as many intervals as sequences of 16K tokens have in L section 4.3; shorter ones get as many."""
_COLUMNS_AT_ONCE = 512
"""Columns of the cost matrix held together, so that memory grows linearly with the number of intervals."""


@dataclass(frozen=True, slots=True)
class Bucketing:
    """Padded lengths of one batch, and how many sequences each has.

    Attributes:
        boundaries: padded length of each bucket in tokens, ascending (s_j in L).
        counts: sequences in each bucket (B_j in L); those longer than the boundary before and no longer than this one.
        padding_tokens: all padding of the batch, inside the intervals too (L footnote 2).
        mean_lengths: mean tokens of the sequences of each bucket, rounded up; its boundary if it is empty.

    Example:
        >>> bucketing = bucket_boundaries([100, 200, 900], num_buckets=2, interval=256)
        >>> bucketing.boundaries, bucketing.counts, bucketing.padding_tokens
        ((256, 1024), (2, 1), 336)
    """

    boundaries: tuple[int, ...]
    counts: tuple[int, ...]
    padding_tokens: int
    mean_lengths: tuple[int, ...] = ()

    @property
    def num_buckets(self) -> int:
        """Buckets, empty ones of fixed boundaries included."""
        return len(self.boundaries)

    @property
    def num_sequences(self) -> int:
        """Sequences of the batch."""
        return sum(self.counts)

    @property
    def padded_tokens(self) -> int:
        """Tokens of the batch after padding."""
        return sum(count * boundary for count, boundary in zip(self.counts, self.boundaries, strict=True))

    def bucket_of(self, lengths: Sequence[int]) -> np.ndarray:
        """Return the first bucket that holds each sequence: int64, shape `(len(lengths),)`.

        Raises:
            ValueError: for a length that no bucket holds.
        """
        sizes = _checked_lengths(lengths)
        if sizes.max() > self.boundaries[-1]:
            raise ValueError(
                f"lengths[{int(sizes.argmax())}] must be at most the last boundary, {self.boundaries[-1]}, got "
                f"{int(sizes.max())}. Truncate the sequence or raise the last boundary."
            )
        # From the left: a length that is equal to a boundary still fits it.
        return np.searchsorted(np.asarray(self.boundaries), sizes, side="left")


def bucket_boundaries(
    lengths: Sequence[int],
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    interval: int = DEFAULT_INTERVAL_TOKENS,
    *,
    limits: Sequence[int] = (),
) -> Bucketing:
    """Return the bucketing of least padding among all of at most `num_buckets` buckets (L Eq. 4).

    In O(B + R U^2) for B sequences and U non-empty intervals. Where the paper's notation slips: Eq. 4 runs to
    State_{U,R} over all U intervals, and so would spend a bucket on lengths that nothing has; here, as footnote 3 says,
    only non-empty intervals take part, and the last boundary is the end of the last of them. Its sum leaves out index
    i+1, whose term is zero. State_{0,j} = 0 for every j makes State_{i,j} the least padding of *at most* j buckets.
    Of several optimal choices the one with the smallest boundaries is taken, the last bucket deciding first.

    Args:
        lengths: lengths of all sequences of the step, in tokens, in any order.
        num_buckets: most buckets that may be made (R in L).
        interval: distance of candidate boundaries, in tokens.
        limits: the longest sequence, in tokens, that each kind of replica supports. An interval ends no later than the
            least limit that holds its sequences, so that rounding up takes no sequence away from a replica that could
            train it.

    Raises:
        ValueError: for no lengths, a length below 1 or above all `limits`.
    """
    sizes = _checked_lengths(lengths)
    # The last token of each size's interval: the next multiple, or the least limit that holds it if that is lower.
    ends = -(-sizes // interval) * interval
    if len(limits):
        ascending = np.unique(np.asarray(limits, dtype=np.int64))
        if sizes.max() > ascending[-1]:
            raise ValueError(
                f"lengths[{int(sizes.argmax())}] must be at most {int(ascending[-1])}, the longest that any replica "
                f"supports, got {int(sizes.max())}. Truncate the sequence, or use larger replicas."
            )
        ends = np.minimum(ends, ascending[np.searchsorted(ascending, sizes, side="left")])
    candidates, counts = np.unique(ends, return_counts=True)
    chosen = candidates[_merge_intervals(candidates, counts, num_buckets)]
    return fixed_bucketing(lengths, [int(boundary) for boundary in chosen])


def fixed_bucketing(lengths: Sequence[int], boundaries: Sequence[int]) -> Bucketing:
    """Return the bucketing of a batch at given boundaries, the baseline of L Figure 8; buckets may be empty.

    Raises:
        ValueError: for no lengths, or a length above the last boundary.
    """
    padded = [int(boundary) for boundary in boundaries]
    sizes = _checked_lengths(lengths)
    buckets = Bucketing(tuple(padded), (), 0).bucket_of(lengths)
    counts = np.bincount(buckets, minlength=len(padded))
    padding_tokens = int((np.asarray(padded)[buckets] - sizes).sum())
    tokens = np.bincount(buckets, weights=sizes, minlength=len(padded))
    means = np.where(counts > 0, np.ceil(tokens / np.maximum(counts, 1)), padded).astype(np.int64)
    return Bucketing(tuple(padded), tuple(counts.tolist()), padding_tokens, tuple(means.tolist()))


def interval_tokens(longest: int) -> int:
    """Return the width of an interval that suits a batch whose longest sequence has so many tokens.

    256 tokens as in L section 4.3, finer for short sequences.
    """
    # The largest power of two that gives so many intervals.
    width = 2 ** max(0, (longest // _INTERVALS_OF_LONGEST).bit_length() - 1)
    return min(DEFAULT_INTERVAL_TOKENS, max(_LEAST_INTERVAL_TOKENS, width))


def _merge_intervals(ends: np.ndarray, counts: np.ndarray, num_buckets: int) -> list[int]:
    """Return which of the ascending `ends` of non-empty intervals are boundaries (L Eq. 4).

    Args:
        ends: last token of each interval, int64 of shape `(U,)`.
        counts: sequences in each interval, all above 0, int64 of shape `(U,)`.
        num_buckets: most boundaries that may be chosen (R in L).
    """
    num_intervals = len(ends)
    # A bucket for every interval: no choice pads less.
    if num_buckets >= num_intervals:
        return list(range(num_intervals))
    # Sequences before each interval and of all, and their tokens, each sequence at the end of its interval.
    sequences = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * ends)])
    # `state[i]` is the least padding of the intervals 0..i. With one bucket, all are padded to the end of the i-th.
    state = ends * sequences[1:] - tokens[1:]
    rows = np.arange(num_intervals)
    last_before: list[np.ndarray] = []
    for _ in range(num_buckets - 1):
        # With one bucket more, the last bucket holds the intervals before+1..i. An interval that is its own
        # predecessor adds no bucket; this keeps "at most" in the recurrence.
        best, before = np.empty_like(state), np.empty_like(rows)
        for start in range(0, num_intervals, _COLUMNS_AT_ONCE):
            columns = np.arange(start, min(start + _COLUMNS_AT_ONCE, num_intervals))
            # In integers: sums of tokens are exact, so that ties are ties on every machine.
            padding = ends[columns] * (sequences[columns + 1] - sequences[rows + 1][:, None]) - (
                tokens[columns + 1] - tokens[rows + 1][:, None]
            )
            total = np.where(rows[:, None] <= columns, state[:, None] + padding, np.iinfo(np.int64).max)
            # argmin takes the first of equal rows, and so the smallest boundary.
            before[columns] = total.argmin(axis=0)
            best[columns] = total.min(axis=0)
        state = best
        last_before.append(before)
    # The last interval ends a bucket whatever is chosen; from there the choices are followed back.
    boundaries = [num_intervals - 1]
    for before in reversed(last_before):
        if boundaries[-1] == 0:
            break
        boundaries.append(int(before[boundaries[-1]]))
    return sorted(set(boundaries))


def _checked_lengths(lengths: Sequence[int]) -> np.ndarray:
    """Return the lengths as int64 of shape `(B,)`; raise `ValueError` for none, or one below 1."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.ndim != 1 or not sizes.size:
        raise ValueError(f"lengths must be one length for each of at least one sequence, got shape {sizes.shape}.")
    if sizes.min() < 1:
        raise ValueError(f"lengths[{int(sizes.argmin())}] must be 1 token or more, got {int(sizes.min())}.")
    return sizes
