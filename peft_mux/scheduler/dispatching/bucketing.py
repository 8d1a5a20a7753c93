"""Checks of arguments that dispatch and deployment share."""

# MERGED: Dynamic bucketing: the padded lengths of one step, chosen so that as little as possible is padded (L section
# MERGED: 4.3).
# MERGED: Sequences are counted by interval of length; a dynamic programme over the non-empty intervals then merges
# MERGED: these into at
# MERGED: most R buckets. What a bucket costs in time, and where it runs, is decided in `dispatch.py`.
# MERGED:     interval ends      256   512   768  1024  1280
# MERGED:     sequences            9     4     0     1     2
# MERGED:     R = 2 boundaries         | 512              | 1280      9 padded by 256, 1 padded by 256, besides what
# MERGED:                                                             lies inside each interval

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def check_at_least_one(**numbers: int) -> None:
    """Refuse numbers below 1.

    Args:
        numbers: each number by the name of the argument that it came in.

    Raises:
        ValueError: with the first of them that is below 1.
    """
    for field, number in numbers.items():
        if number < 1:
            raise ValueError(f"{field} is {number}; allowed: 1 or more.")


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
        mean_lengths: mean tokens of the sequences of each bucket, rounded up; its boundary where it is empty.

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

    @property
    def padding_ratio(self) -> float:
        """Share of the padded tokens that is padding, 0 to 1; 0 for no sequences."""
        return self.padding_tokens / self.padded_tokens if self.padded_tokens else 0.0

    def bucket_of(self, lengths: Sequence[int]) -> np.ndarray:
        """Return the bucket of each sequence: int64, shape `(len(lengths),)`.

        Raises:
            ValueError: for a length that no bucket holds.
        """
        return _bucket_of(_checked_lengths(lengths), self.boundaries)


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
        ValueError: for no lengths, a length below 1 or above all `limits`, or fewer than one bucket or token.
    """
    check_at_least_one(num_buckets=num_buckets, interval=interval)
    sizes = _checked_lengths(lengths)
    ends = _interval_ends(sizes, interval, limits)
    candidates, counts = np.unique(ends, return_counts=True)
    chosen = candidates[_merge_intervals(candidates, counts, num_buckets)]
    return fixed_bucketing(lengths, [int(boundary) for boundary in chosen])


def fixed_bucketing(lengths: Sequence[int], boundaries: Sequence[int]) -> Bucketing:
    """Return the bucketing of a batch at given boundaries, the baseline of L Figure 8; buckets may be empty.

    Args:
        lengths: lengths of all sequences of the batch, in tokens, in any order.
        boundaries: padded length of each bucket in tokens, ascending.

    Raises:
        ValueError: for no lengths, boundaries that do not ascend from 1 or more, or a length above the last one.
    """
    padded_lengths = [int(boundary) for boundary in boundaries]
    if not padded_lengths or padded_lengths[0] < 1 or any(np.diff(padded_lengths) < 1):
        raise ValueError(f"boundaries are {padded_lengths}; allowed: one or more, ascending, from 1 token up.")
    sizes = _checked_lengths(lengths)
    buckets = _bucket_of(sizes, padded_lengths)
    counts = np.bincount(buckets, minlength=len(padded_lengths))
    padding_tokens = int((np.asarray(padded_lengths)[buckets] - sizes).sum())
    tokens = np.bincount(buckets, weights=sizes, minlength=len(padded_lengths))
    means = np.where(counts > 0, np.ceil(tokens / np.maximum(counts, 1)), padded_lengths).astype(np.int64)
    return Bucketing(tuple(padded_lengths), tuple(counts.tolist()), padding_tokens, tuple(means.tolist()))


def uniform_boundaries(
    max_length: int, num_buckets: int = DEFAULT_NUM_BUCKETS, interval: int = DEFAULT_INTERVAL_TOKENS
) -> tuple[int, ...]:
    """Return boundaries at equal distances up to `max_length`, each a multiple of `interval` but for the last.

    Fewer than `num_buckets` where there are fewer intervals.

    Args:
        max_length: the last boundary, in tokens.
        num_buckets: most boundaries that are returned.
        interval: what boundaries are multiples of, in tokens.

    Raises:
        ValueError: for an argument below 1.
    """
    check_at_least_one(max_length=max_length, num_buckets=num_buckets, interval=interval)
    num_intervals = -(-max_length // interval)
    ends = [-(-num_intervals * bucket // num_buckets) * interval for bucket in range(1, num_buckets + 1)]
    return tuple(sorted({min(end, max_length) for end in ends}))


def interval_tokens(longest: int) -> int:
    """Return the width of an interval that suits a batch: 256 tokens as in L section 4.3, finer for short sequences.

    Args:
        longest: tokens of the longest sequence of the batch.
    """
    # The largest power of two that gives so many intervals.
    width = 2 ** max(0, (longest // _INTERVALS_OF_LONGEST).bit_length() - 1)
    return min(DEFAULT_INTERVAL_TOKENS, max(_LEAST_INTERVAL_TOKENS, width))


def _interval_ends(sizes: np.ndarray, interval: int, limits: Sequence[int]) -> np.ndarray:
    """Return the last token of each size's interval: the next multiple, or the least limit that holds it if lower."""
    ends = -(-sizes // interval) * interval
    if not len(limits):
        return ends
    ascending = np.unique(np.asarray(limits, dtype=np.int64))
    if sizes.max() > ascending[-1]:
        raise ValueError(
            f"lengths[{int(sizes.argmax())}] is {int(sizes.max())}; allowed: at most {int(ascending[-1])}, the longest "
            "that any replica supports. Truncate the sequence, or use larger replicas."
        )
    return np.minimum(ends, ascending[np.searchsorted(ascending, sizes, side="left")])


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
    sequences = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * ends)])
    # With one bucket, all of the first i intervals are padded to the end of the i-th.
    state = ends * sequences[1:] - tokens[1:]
    last_before: list[np.ndarray] = []
    for _ in range(num_buckets - 1):
        state, before = _one_bucket_more(state, ends, sequences, tokens)
        last_before.append(before)
    # The last interval ends a bucket whatever is chosen; from there the choices are followed back.
    boundaries = [num_intervals - 1]
    for before in reversed(last_before):
        if boundaries[-1] == 0:
            break
        boundaries.append(int(before[boundaries[-1]]))
    return sorted(set(boundaries))


def _one_bucket_more(
    state: np.ndarray, ends: np.ndarray, sequences: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return State_{.,j+1} from State_{.,j}, and the boundary before the last at which it is reached.

    Position i stands for the intervals 0..i, so that the last bucket holds the intervals before+1..i. An interval that
    is its own predecessor adds no bucket; this keeps "at most" in the recurrence.

    Args:
        state: least padding of each position with at most j buckets, in tokens, int64 of shape `(U,)`.
        ends: last token of each interval, int64 of shape `(U,)`.
        sequences: sequences before each interval, and of all, int64 of shape `(U + 1,)`.
        tokens: tokens of those sequences, each at the end of its interval, int64 of shape `(U + 1,)`.
    """
    num_intervals = len(ends)
    best = np.empty_like(state)
    before = np.empty(num_intervals, dtype=np.int64)
    rows = np.arange(num_intervals)
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
    return best, before


def _bucket_of(sizes: np.ndarray, boundaries: Sequence[int]) -> np.ndarray:
    """Return the first bucket that holds each size."""
    if sizes.max() > boundaries[-1]:
        raise ValueError(
            f"lengths[{int(sizes.argmax())}] is {int(sizes.max())}; allowed: at most the last boundary, "
            f"{boundaries[-1]}. Truncate the sequence or raise the last boundary."
        )
    # From the left: a length that is equal to a boundary still fits it.
    return np.searchsorted(np.asarray(boundaries), sizes, side="left")


def _checked_lengths(lengths: Sequence[int]) -> np.ndarray:
    """Return the lengths as int64 of shape `(B,)`."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.ndim != 1 or not sizes.size:
        raise ValueError(f"lengths has shape {sizes.shape}; allowed: one length for each of one or more sequences.")
    if sizes.min() < 1:
        raise ValueError(f"lengths[{int(sizes.argmin())}] is {int(sizes.min())}; allowed: 1 token or more.")
    return sizes
