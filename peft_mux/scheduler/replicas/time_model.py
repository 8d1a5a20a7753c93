"""Replicas, and how long one takes for its share of a step, from the time of one layer (L section 2.2, Appendix D).

A fine-tuning replica is one copy of the backbone under one parallel configuration (`ParallelConfig`); a deployment has
groups of equal replicas (`ReplicaGroup`).

The forward and backward pass of a layer over a micro-batch of b sequences of s tokens takes t(b, s), one curve for each
tensor parallel degree. `fit_layer` fits the curves to timings; `ReplicaTimeModel` sums them over a step, in one of two
ways, for d_j sequences of s_j tokens and at most M tokens a micro-batch::

    padded (L Eq. 10 to 12)   each bucket has its own micro-batches, d_j / (M // s_j) of them, the last one smaller
    packed (this engine)      passes hold sequences of all buckets: sum_j d_j s_j / M passes

Timings are read from files, or predicted from a profile of one device (`peft_mux.scheduler.replicas.facts`).
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from peft_mux.scheduler.parallel_layout import ParallelConfig


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """All replicas of one configuration in a deployment.

    Attributes:
        config: how every replica of the group is spread over GPUs.
        count: number of replicas in the group (p_i in L).
        max_tokens: most tokens that a micro-batch may have, and so the longest padded sequence (M in L Eq. 10).
        slowness: measured seconds of its replicas over those that the time model predicts for their configuration.
    """

    config: ParallelConfig
    count: int
    max_tokens: int
    slowness: float = 1.0

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole group."""
        return self.count * self.config.num_gpus

    def __str__(self) -> str:
        """Return the paper's notation, such as <2,1>x3."""
        return f"{self.config}x{self.count}"


def layout_text(groups: tuple[ReplicaGroup, ...]) -> str:
    """Return the replicas of a deployment in the paper's notation, such as "<2,1>x1, <1,1>x4".

    Ranks are given to replicas in this order. The largest tensor parallel degrees are first, so that no tensor parallel
    group is on two nodes if a node has a multiple of its devices: L's degrees are powers of two.
    """
    return ", ".join(map(str, in_rank_order(groups)))


def in_rank_order(groups: Iterable[ReplicaGroup]) -> list[ReplicaGroup]:
    """Return the replicas of a deployment in the order of `layout_text`."""
    return sorted(groups, key=lambda group: (-group.config.tp, -group.config.pp))


_NUM_COEFFICIENTS = 6
_LEAST_FIT_GAIN = 1e-12
"""By how much, per measurement, a set of terms must lower the squared error of the best one so far, beyond rounding."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One measurement: forward and backward of one layer with its adapters.

    Attributes:
        tp: tensor parallel degree at which the layer ran.
        length_tokens: tokens of each sequence in the micro-batch.
        num_sequences: sequences in the micro-batch.
        seconds: time of one pass forward and backward.
    """

    tp: int
    length_tokens: int
    num_sequences: int
    seconds: float

    def __post_init__(self) -> None:
        for name in ("tp", "length_tokens", "num_sequences", "seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}. Remove the row.")


@dataclass(frozen=True, slots=True)
class LayerFit:
    """t(b, s) = (c1 b + c2) s^2 + (c3 b + c4) s + (c5 b + c6) of one layer at one tensor parallel degree.

    Attributes:
        coefficients: c1 to c6, all 0 or more, for lengths in tokens and times in seconds.
        mean_relative_error: mean of |fitted / measured - 1| over the measurements of the fit.
    """

    coefficients: tuple[float, float, float, float, float, float]
    mean_relative_error: float = 0.0

    def terms(self, length_tokens: float) -> tuple[float, float]:
        """Return t(b, s) of one length as a line in b: seconds of any micro-batch, and of each sequence in it."""
        c1, c2, c3, c4, c5, c6 = self.coefficients
        s = length_tokens
        return (c2 * s + c4) * s + c6, (c1 * s + c3) * s + c5


@dataclass(frozen=True, slots=True)
class ReplicaTimeModel:
    """Seconds of a replica's step.

    A stage of a pipeline has `num_layers / pp` layers, rounded up: the slowest stage sets the pace. Embedding, head,
    optimizer and the exchange between replicas and stages are not in it, as in the paper, which profiles one layer.
    Where the paper's notation slips: t(r_j, s_j) of Eq. 10 and 12 counts only for a remainder r_j above 0, as the fit
    is not 0 there, and the maximum of Eq. 12 is over the micro-batches that exist; both follow from Eq. 11.

    Attributes:
        fits: the curve of one layer, by tensor parallel degree.
        num_layers: decoder layers of the whole backbone.
        max_tokens: most tokens of a micro-batch, by configuration; its keys are the configurations to choose from.
        packs: whether passes hold sequences of all lengths; otherwise buckets are padded, as in the paper.
        slowness: seconds of a step over those of the curve, by configuration, as plans of replicas have shown.

    Raises:
        ValueError: if no configuration is given, or one holds no token, has no fit or more stages than layers.

    Example:
        >>> fit = LayerFit((0, 0, 1e-6, 0, 0, 1e-3))
        >>> model = ReplicaTimeModel({1: fit}, num_layers=2, max_tokens={ParallelConfig(1, 1): 2048})
        >>> round(model.step_s(ParallelConfig(1, 1), counts=[3], lengths=[1024], max_tokens=2048), 6)
        0.010144
    """

    fits: Mapping[int, LayerFit]
    num_layers: int
    max_tokens: Mapping[ParallelConfig, int]
    packs: bool = False
    slowness: Mapping[ParallelConfig, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.max_tokens:
            raise ValueError("max_tokens must have at least one configuration, got none. Read a table or use a model.")
        for config, tokens in self.max_tokens.items():
            if tokens < 1:
                raise ValueError(f"max_tokens of {config} must be 1 or more, got {tokens}. Leave {config} out.")
            self._terms(config, (), tokens)  # raises if there is no fit, or fewer layers than stages

    @property
    def configurations(self) -> tuple[ParallelConfig, ...]:
        """The configurations to choose from: by GPUs, then by tensor parallel degree."""
        return tuple(sorted(self.max_tokens, key=lambda config: (config.num_gpus, config)))

    def groups(self, counts: Mapping[ParallelConfig, int]) -> tuple[ReplicaGroup, ...]:
        """Return so many replicas of each configuration as groups; those of which there are none are left out."""
        return tuple(
            ReplicaGroup(config, int(counts[config]), self.max_tokens[config])
            for config in self.configurations
            if counts.get(config)
        )

    def step_s(self, config: ParallelConfig, counts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> float:
        """Return the seconds in which one replica trains `counts[j]` sequences of `lengths[j]` tokens; 0 for none.

        Padded, this is L Eq. 12: with one stage Eq. 10, and for one length that fills its micro-batches Eq. 11. The
        seconds never fall when a count grows.

        Raises:
            ValueError: for a length above `max_tokens`, or a configuration without a fit.
        """
        empty_s, buckets = self._terms(config, tuple(lengths), max_tokens)
        total_s = longest_s = 0.0
        for count, length, (size, fixed_s, each_s, full_s) in zip(counts, lengths, buckets, strict=True):
            if not count:
                continue
            if self.packs:
                total_s += count * length / max_tokens * full_s
                micro_batch_s = full_s
            else:
                # Eq. 10: full micro-batches of b_j sequences, and one of the remainder r_j. t(b, s) is linear in b, so
                # all micro-batches of a bucket are summed at once.
                full, rest = divmod(count, size)
                total_s += (full + (rest > 0)) * fixed_s + count * each_s
                micro_batch_s = fixed_s + (size if full else rest) * each_s
            if micro_batch_s > longest_s:
                longest_s = micro_batch_s
        if self.packs:
            tokens = sum(count * length for count, length in zip(counts, lengths, strict=True))
            filled = tokens / max_tokens
            # The empty part of the last pass costs what a pass costs at all; so seconds never fall with another row.
            total_s += (-(-tokens // max_tokens) - filled) * empty_s
            share = min(1.0, filled)
            longest_s = share * longest_s + (1 - share) * empty_s if tokens else 0.0
        # Eq. 12: the pipeline fills and drains with the costliest micro-batch.
        return self.slowness.get(config, 1.0) * (total_s + (config.pp - 1) * longest_s)

    def linear_terms(self, config: ParallelConfig, lengths: Sequence[int], max_tokens: int) -> tuple[np.ndarray, float]:
        """Return the form of the ILP: seconds of a sequence of each length, and seconds that any sequence costs.

        A replica takes about `sum_j d_j * per_sequence_s[j] + constant_s`. The first spreads the time of a full
        micro-batch over its sequences and never exceeds what `step_s` takes for one. The second is the bubble of the
        costliest of these lengths, whether or not it gets sequences (a maximum over choices is not linear), and so
        never less than the bubble of `step_s`. Shapes: `(len(lengths),)` float64, and a scalar.
        """
        _, buckets = self._terms(config, tuple(lengths), max_tokens)
        if self.packs:
            full_s = np.array([full_s for _, _, _, full_s in buckets], dtype=np.float64)
            per_sequence_s = full_s * np.asarray(lengths) / max_tokens
        else:
            full_s = np.array([fixed_s + size * each_s for size, fixed_s, each_s, _ in buckets])
            per_sequence_s = full_s / np.array([size for size, _, _, _ in buckets])
        slowness = self.slowness.get(config, 1.0)
        return slowness * per_sequence_s, slowness * (config.pp - 1) * float(full_s.max(initial=0.0))

    def throughput(self, config: ParallelConfig, length_tokens: int, num_micro_batches: int) -> float:
        """Return tokens per GPU and second over full micro-batches of one length (L Table 3); 0 if none fits."""
        max_tokens = self.max_tokens[config]
        size = max_tokens // length_tokens
        if not size:
            return 0.0
        seconds = self.step_s(config, [size * num_micro_batches], [length_tokens], max_tokens)
        return size * num_micro_batches * length_tokens / (seconds * config.num_gpus)

    def _terms(
        self, config: ParallelConfig, lengths: tuple[int, ...], max_tokens: int
    ) -> tuple[float, tuple[tuple[int, float, float, float], ...]]:
        """Return `_stage_terms` of the largest stage of a configuration."""
        fit = self.fits.get(config.tp)
        if fit is None:
            raise ValueError(
                f"tp of {config} must be {sorted(self.fits)}, which have a fit, got {config.tp}. Profile a layer at it."
            )
        if config.pp > self.num_layers:
            raise ValueError(f"pp of {config} must be at most num_layers = {self.num_layers}, got {config.pp}.")
        return _stage_terms(fit, -(-self.num_layers // config.pp), lengths, max_tokens)


# Dispatch asks for the time of very many counts over the same few lengths.
@lru_cache(maxsize=4096)
def _stage_terms(
    fit: LayerFit, num_layers: int, lengths: tuple[int, ...], max_tokens: int
) -> tuple[float, tuple[tuple[int, float, float, float], ...]]:
    """Return the seconds of a stage for an empty pass, and for each length four numbers.

    These are the sequences that fill a micro-batch (b_j in L), the seconds of a micro-batch and of each sequence in it,
    and the seconds of a pass that is full of such sequences.
    """
    if lengths and max(lengths) > max_tokens:
        raise ValueError(
            f"lengths must be at most max_tokens = {max_tokens}, got {max(lengths)}. Use more GPUs per replica."
        )
    rows = []
    for length in lengths:
        fixed_s, each_s = fit.terms(length)
        full_pass_s = num_layers * (fixed_s + each_s * max_tokens / length)
        rows.append((max_tokens // length, num_layers * fixed_s, num_layers * each_s, full_pass_s))
    return num_layers * fit.terms(0)[0], tuple(rows)


def fit_layer(measurements: Iterable[LayerTime]) -> dict[int, LayerFit]:
    """Return the curve of each tensor parallel degree: least squares of the relative error, no coefficient below 0.

    Relative errors weigh a short micro-batch as much as a long one. The paper names only "curve fitting"; the sign is
    our choice, so that a curve never falls, neither between its measurements nor beyond.

    Raises:
        ValueError: if the measurements of a degree do not tell six terms apart.
    """
    by_degree: dict[int, list[LayerTime]] = {}
    for measurement in measurements:
        by_degree.setdefault(measurement.tp, []).append(measurement)
    fits = {}
    for tp, timed in sorted(by_degree.items()):
        lengths = np.array([point.length_tokens for point in timed], dtype=np.float64)
        sizes = np.array([point.num_sequences for point in timed], dtype=np.float64)
        seconds = np.array([point.seconds for point in timed])
        terms = np.stack([sizes * lengths**2, lengths**2, sizes * lengths, lengths, sizes, np.ones_like(sizes)], axis=1)
        # Divided by what was measured, a perfect fit is 1 everywhere.
        relative = terms / seconds[:, None]
        # b s^2 is some 10^8 times as large as 1: columns of like size keep the solution well-conditioned.
        scale = np.sqrt((relative**2).mean(axis=0))
        columns = relative / scale
        if np.linalg.matrix_rank(columns) < _NUM_COEFFICIENTS:
            raise ValueError(
                f"the measurements of tp {tp} must have three or more lengths, each with two or more micro-batch "
                f"sizes, to separate {_NUM_COEFFICIENTS} terms, got {len(timed)} measurements. Measure more."
            )
        coefficients = _non_negative_least_squares(columns, np.ones(len(timed))) / scale
        error = float(np.abs(relative @ coefficients - 1).mean())
        c1, c2, c3, c4, c5, c6 = coefficients.tolist()
        fits[tp] = LayerFit((c1, c2, c3, c4, c5, c6), error)
    return fits


def _non_negative_least_squares(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return argmin over x >= 0 of |columns x - target|, exactly: the plain solution over some of the unknowns.

    All sets of unknowns are tried, the largest first; the others are 0. There are few: 63 sets of six.
    """
    num_unknowns = columns.shape[1]
    best = np.zeros(num_unknowns)
    least = float(target @ target)
    for size in range(num_unknowns, 0, -1):
        for support in itertools.combinations(range(num_unknowns), size):
            part = columns[:, support]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            residual = float(((part @ solution - target) ** 2).sum())
            if (solution >= 0).all() and residual < least - _LEAST_FIT_GAIN * len(target):
                best = np.zeros(num_unknowns)
                best[list(support)] = solution
                least = residual
        if size == num_unknowns and (best > 0).all():
            break  # the unconstrained optimum is allowed, and no smaller set can be better
    return best


def read_layer_profile(path: str | Path) -> tuple[LayerTime, ...]:
    """Read measurements from a CSV file with columns tp, seq_len, mbs and time, the last in milliseconds.

    Raises:
        ValueError: for a missing column or a value that is no number above 0.
    """
    return tuple(
        LayerTime(int(row["tp"]), int(row["seq_len"]), int(row["mbs"]), float(row["time"]) / 1e3)
        for row in _read_rows(path, ("tp", "seq_len", "mbs", "time"))
    )


def read_max_tokens(path: str | Path) -> dict[ParallelConfig, int]:
    """Read the most tokens of a micro-batch from a CSV file with columns tp, pp, max_tokens and perhaps sp.

    Raises:
        ValueError: for a missing column, a configuration that comes twice, or sequence parallelism other than 1.
    """
    limits: dict[ParallelConfig, int] = {}
    for row in _read_rows(path, ("tp", "pp", "max_tokens")):
        config = ParallelConfig(int(row["tp"]), int(row["pp"]))
        if int(row.get("sp") or 1) != 1:
            raise ValueError(f"sp of {config} in {path} must be 1, got {row['sp']}. Remove the row.")
        if config in limits:
            raise ValueError(f"{config} must be once in {path}, got it twice. Remove one of the rows.")
        limits[config] = int(row["max_tokens"])
    return limits


def _read_rows(path: str | Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file, which must have these columns and may have more."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} must have the columns {missing}, got {reader.fieldnames}. Add them.")
        return list(reader)
