"""How long a replica takes for its share of a step, fitted from timings of one layer (L section 2.2, Appendix D).

A layer's forward and backward pass over a micro-batch of b sequences of s tokens takes t(b, s), a curve for each tensor
parallel degree; Eq. 10 to 12 make a replica's step of it. Nothing is measured here: timings are read from files, or
come from `costs.py`.
"""

# MERGED: `PackedTimeModel`: seconds of a replica that packs its sequences into passes, where L Eq. 10 to 12 pad
# MERGED: buckets.
# MERGED: The engine pads nothing and puts sequences of all buckets into the same passes, so that a replica makes as
# MERGED: many passes
# MERGED: as its tokens fill, and not some for each bucket with a remainder of its own. The curve of a layer stays the
# MERGED: paper's:
# MERGED: t(b, s) = fixed(s) + each(s) b        sum_j d_j each(s_j) + passes * fixed + bubble        passes =
# MERGED: ceil(tokens / M)
# MERGED: `PlannedTimeModel`: the price of a replica by MuxTune's plans, in the linear form that L Eq. 2 and 3 are
# MERGED: solved in.
# MERGED: A whole plan for every dispatch that a solver looks at would take hours. So a configuration is planned for a
# MERGED: few loads
# MERGED: (`ReplicaPlanner`), and a step of d_j sequences padded to s_j is fitted as
# MERGED:     fixed + each * sum d_j + token * sum d_j s_j + square * sum d_j s_j^2
# MERGED: with no coefficient below 0: what a step costs at all (filling a pipeline, launches, updates), a sequence,
# MERGED: its tokens,
# MERGED: and its attention. Lengths are those of buckets, so that the fit takes in that plans pack rows and do not
# MERGED: pad them.
# MERGED: A `ReplicaTimeModel` from what MuxTune's planner knows: a profile of one device and the memory model.
# MERGED: LobRA profiles a layer at each tensor parallel degree (L Appendix D). Where that was not done, the times of
# MERGED: a layer at
# MERGED: any degree follow from a profile of one device by M Eq. 3, as `CostModel` has it. The curve of Eq. 10 is
# MERGED: then fitted to
# MERGED: these times as to measured ones.

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from peft_mux.scheduler.costs.hardware import Cluster, Link
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.model_shape import ModelShape
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.replicas.configs import ParallelConfig

FORMAT_VERSION = 1

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
        for field in ("tp", "length_tokens", "num_sequences", "seconds"):
            if not getattr(self, field) > 0 or not math.isfinite(getattr(self, field)):
                raise ValueError(f"{field} is {getattr(self, field)}; allowed: more than 0. Remove the row.")


@dataclass(frozen=True, slots=True)
class LayerFit:
    """t(b, s) = (c1 b + c2) s^2 + (c3 b + c4) s + (c5 b + c6) of one layer at one tensor parallel degree.

    Attributes:
        coefficients: c1 to c6, all 0 or more, for lengths in tokens and times in seconds.
        mean_relative_error: mean of |fitted / measured - 1| over the measurements of the fit.
        num_measurements: number of measurements that the curve was fitted to.
    """

    coefficients: tuple[float, float, float, float, float, float]
    mean_relative_error: float = 0.0
    num_measurements: int = 0

    def __post_init__(self) -> None:
        # A curve that falls somewhere would make a replica faster for being given more work.
        if len(self.coefficients) != _NUM_COEFFICIENTS or not all(0 <= c < math.inf for c in self.coefficients):
            raise ValueError(f"coefficients are {self.coefficients}; allowed: six finite numbers of 0 or more.")

    def layer_s(self, num_sequences: float, length_tokens: float) -> float:
        """Return t(b, s) in seconds; 0 for no sequences, as no micro-batch is run for them."""
        if num_sequences == 0:
            return 0.0
        fixed_s, each_s = self.terms(length_tokens)
        return fixed_s + each_s * num_sequences

    def terms(self, length_tokens: float) -> tuple[float, float]:
        """Return t(b, s) as a line in b: seconds of a micro-batch of this length at all, and of each sequence in it."""
        c1, c2, c3, c4, c5, c6 = self.coefficients
        s = length_tokens
        # For one length the curve is a line in b; sums over micro-batches and the form of the ILP rest on that.
        return (c2 * s + c4) * s + c6, (c1 * s + c3) * s + c5


@dataclass(frozen=True, slots=True)
class ReplicaTimeModel:
    """Seconds of a replica's step (L Eq. 10 to 12); a `TimeModel` of `peft_mux.scheduler.replicas.configs`.

    A stage of a pipeline has `num_layers / pp` layers, rounded up: the slowest stage sets the pace. Embedding, head,
    optimizer and the exchange between replicas and stages are not in it, as in the paper, which profiles one layer.
    Where the paper's notation slips: t(r_j, s_j) of Eq. 10 and 12 counts only for a remainder r_j above 0, as the fit
    is not 0 there, and the maximum of Eq. 12 is over the micro-batches that there are; both follow from Eq. 11.

    Attributes:
        fits: the curve of one layer, by tensor parallel degree.
        num_layers: decoder layers of the whole backbone.
        max_tokens: most tokens of a micro-batch, by configuration; its keys are what can be deployed.

    Example:
        >>> fit = LayerFit((0, 0, 1e-6, 0, 0, 1e-3))
        >>> model = ReplicaTimeModel({1: fit}, num_layers=2, max_tokens={ParallelConfig(1, 1): 2048})
        >>> round(model.step_s(ParallelConfig(1, 1), counts=[3], lengths=[1024], max_tokens=2048), 6)
        0.010144
    """

    fits: Mapping[int, LayerFit]
    num_layers: int
    max_tokens: Mapping[ParallelConfig, int]

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers is {self.num_layers}; allowed: 1 or more.")
        if not self.max_tokens:
            raise ValueError("max_tokens is empty; allowed: one configuration or more. Read a table or use a model.")
        for config, tokens in self.max_tokens.items():
            if tokens < 1:
                raise ValueError(f"max_tokens of {config} is {tokens}; allowed: 1 or more. Leave {config} out.")
            self.largest_stage(config)  # raises where there is no fit, or fewer layers than stages

    @property
    def configurations(self) -> tuple[ParallelConfig, ...]:
        """Return what can be deployed: by GPUs, then by tensor parallel degree."""
        return tuple(sorted(self.max_tokens, key=lambda config: (config.num_gpus, config)))

    def step_s(self, config: ParallelConfig, counts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> float:
        """Return the seconds of one replica for `counts[j]` sequences padded to `lengths[j]` (L Eq. 12).

        With one stage this is Eq. 10, and for one length that fills its micro-batches it is Eq. 11.

        Args:
            config: how the replica is spread over GPUs.
            counts: sequences of each bucket on this replica.
            lengths: padded length of each bucket in tokens.
            max_tokens: most tokens of a micro-batch on this replica.

        Raises:
            ValueError: for a length above `max_tokens`, or a configuration without a fit.
        """
        fit, num_layers = self.largest_stage(config)
        buckets = _bucket_terms(fit, num_layers, tuple(lengths), max_tokens)
        total_s = 0.0
        longest_s = 0.0
        for count, (size, fixed_s, each_s) in zip(counts, buckets, strict=True):
            if not count:
                continue
            # Eq. 10: full micro-batches of b_j sequences, and one of the remainder r_j.
            full, rest = divmod(count, size)
            # t(b, s) is linear in b, so that all micro-batches of a bucket are summed at once.
            total_s += (full + (rest > 0)) * fixed_s + count * each_s
            largest_s = fixed_s + (size if full else rest) * each_s
            if largest_s > longest_s:
                longest_s = largest_s
        # Eq. 12: the pipeline fills and drains with the costliest micro-batch.
        return total_s + (config.pp - 1) * longest_s

    def linear_terms(self, config: ParallelConfig, lengths: Sequence[int], max_tokens: int) -> tuple[np.ndarray, float]:
        """Return seconds per sequence of each length within full micro-batches, and seconds of the bubble.

        The first never exceeds what `step_s` takes for a sequence. The second is the bubble of the costliest of these
        lengths, and so never less than that of `step_s`. Shapes: `(len(lengths),)` float64, and a scalar.

        Args:
            config: how the replica is spread over GPUs.
            lengths: padded length of each bucket in tokens.
            max_tokens: most tokens of a micro-batch on this replica.
        """
        fit, num_layers = self.largest_stage(config)
        buckets = _bucket_terms(fit, num_layers, tuple(lengths), max_tokens)
        full_s = np.array([fixed_s + size * each_s for size, fixed_s, each_s in buckets])
        sizes = np.array([size for size, _, _ in buckets])
        # The bubble of the costliest length, whether or not it gets sequences: a maximum over choices is not linear.
        return full_s / sizes, (config.pp - 1) * float(full_s.max(initial=0.0))

    def throughput(self, config: ParallelConfig, length_tokens: int, num_micro_batches: int) -> float:
        """Return tokens per GPU and second over full micro-batches of one length (L Table 3, Eq. 11).

        Args:
            config: a configuration of `max_tokens`.
            length_tokens: tokens of each sequence; 0 is returned where none fits.
            num_micro_batches: full micro-batches over which the throughput is taken.
        """
        max_tokens = self.max_tokens[config]
        size = max_tokens // length_tokens
        if not size:
            return 0.0
        seconds = self.step_s(config, [size * num_micro_batches], [length_tokens], max_tokens)
        return size * num_micro_batches * length_tokens / (seconds * config.num_gpus)

    def to_json(self) -> str:
        """Return the model as JSON."""
        limits = [
            {"tp": config.tp, "pp": config.pp, "max_tokens": self.max_tokens[config]} for config in self.configurations
        ]
        fits = {str(tp): asdict(fit) for tp, fit in sorted(self.fits.items())}
        return json.dumps(
            {"format_version": FORMAT_VERSION, "num_layers": self.num_layers, "fits": fits, "max_tokens": limits}
        )

    @classmethod
    def from_json(cls, text: str) -> ReplicaTimeModel:
        """Return the model that `to_json` wrote.

        Raises:
            ValueError: for another format version.
        """
        data: dict[str, Any] = json.loads(text)
        if data.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"format_version: got {data.get('format_version')!r}; allowed: {FORMAT_VERSION}.")
        fits = {
            int(tp): LayerFit(tuple(fit["coefficients"]), fit["mean_relative_error"], fit["num_measurements"])
            for tp, fit in data["fits"].items()
        }
        limits = {ParallelConfig(row["tp"], row["pp"]): row["max_tokens"] for row in data["max_tokens"]}
        return cls(fits, data["num_layers"], limits)

    def largest_stage(self, config: ParallelConfig) -> tuple[LayerFit, int]:
        """Return the fit of a configuration, and how many layers its largest stage has."""
        fit = self.fits.get(config.tp)
        if fit is None:
            raise ValueError(
                f"tp of {config} is {config.tp}; allowed: {sorted(self.fits)}, which have a fit. Profile a layer at it."
            )
        if config.pp > self.num_layers:
            raise ValueError(f"pp of {config} is {config.pp}; allowed: at most num_layers = {self.num_layers}.")
        return fit, -(-self.num_layers // config.pp)


def fit_layer(measurements: Iterable[LayerTime]) -> dict[int, LayerFit]:
    """Return the curve of each tensor parallel degree: least squares of the relative error, no coefficient below 0.

    Relative errors weigh a short micro-batch as much as a long one. The paper names only "curve fitting"; the sign is
    ours, so that a curve never falls, not between its measurements and not beyond. The optimum is exact: it is the
    plain least-squares solution over some of the six terms, and all 63 choices are tried.

    Args:
        measurements: timings of one layer at one or more tensor parallel degrees, in any order.

    Raises:
        ValueError: where the measurements of a degree do not tell six terms apart.
    """
    by_degree: dict[int, list[LayerTime]] = {}
    for measurement in measurements:
        by_degree.setdefault(measurement.tp, []).append(measurement)
    return {tp: _fit_degree(tp, by_degree[tp]) for tp in sorted(by_degree)}


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
            raise ValueError(f"sp of {config} in {path} is {row['sp']}; allowed: 1. Remove the row.")
        if config in limits:
            raise ValueError(f"{config} comes twice in {path}; allowed: once. Remove one of the rows.")
        limits[config] = int(row["max_tokens"])
    return limits


# Dispatch asks for the time of very many counts over the same few lengths.
@lru_cache(maxsize=4096)
def _bucket_terms(
    fit: LayerFit, num_layers: int, lengths: tuple[int, ...], max_tokens: int
) -> tuple[tuple[int, float, float], ...]:
    """Return for each length how many sequences fill a micro-batch (b_j), and a stage's `LayerFit.terms`."""
    if lengths and max(lengths) > max_tokens:
        raise ValueError(
            f"lengths has {max(lengths)}; allowed: at most max_tokens = {max_tokens}. Use more GPUs a replica."
        )
    rows = []
    for length in lengths:
        fixed_s, each_s = fit.terms(length)
        rows.append((max_tokens // length, num_layers * fixed_s, num_layers * each_s))
    return tuple(rows)


def _fit_degree(tp: int, measurements: list[LayerTime]) -> LayerFit:
    """Return the curve of one tensor parallel degree."""
    lengths = np.array([measurement.length_tokens for measurement in measurements], dtype=np.float64)
    sizes = np.array([measurement.num_sequences for measurement in measurements], dtype=np.float64)
    seconds = np.array([measurement.seconds for measurement in measurements])
    terms = np.stack([sizes * lengths**2, lengths**2, sizes * lengths, lengths, sizes, np.ones_like(sizes)], axis=1)
    # Divided by what was measured, a perfect fit is 1 everywhere.
    relative = terms / seconds[:, None]
    # b s^2 is some 10^8 times as large as 1: columns of like size keep the solution well-conditioned.
    scale = np.sqrt((relative**2).mean(axis=0))
    columns = relative / scale
    if np.linalg.matrix_rank(columns) < _NUM_COEFFICIENTS:
        raise ValueError(
            f"the {len(measurements)} measurements of tp {tp} do not tell {_NUM_COEFFICIENTS} terms apart; allowed: "
            "three or more lengths, each with two or more micro-batch sizes. Measure more."
        )
    coefficients = non_negative_least_squares(columns, np.ones(len(measurements))) / scale
    error = float(np.abs(relative @ coefficients - 1).mean())
    c1, c2, c3, c4, c5, c6 = coefficients.tolist()
    return LayerFit((c1, c2, c3, c4, c5, c6), error, len(measurements))


def non_negative_least_squares(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return argmin over x >= 0 of |columns x - target|, by trying every support, the largest first.

    Args:
        columns: float64 of shape `(rows, unknowns)`, of a few unknowns.
        target: float64 of shape `(rows,)`.
    """
    best = np.zeros(columns.shape[1])
    least = float(target @ target)
    # The optimum over x >= 0 is the unconstrained one over the terms that it does not hold at 0.
    for size in range(columns.shape[1], 0, -1):
        for support in itertools.combinations(range(columns.shape[1]), size):
            part = columns[:, support]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            residual = float(((part @ solution - target) ** 2).sum())
            if (solution >= 0).all() and residual < least - _LEAST_FIT_GAIN * len(target):
                best = np.zeros(columns.shape[1])
                best[list(support)] = solution
                least = residual
        if size == columns.shape[1] and least < float(target @ target) and (best > 0).all():
            break  # the unconstrained optimum is allowed, and no smaller support can be better
    return best


def _read_rows(path: str | Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file, which must have these columns and may have more."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has columns {reader.fieldnames}; allowed: with {missing} too. Add them.")
        return list(reader)


@dataclass(frozen=True, slots=True)
class PackedTimeModel:
    """A `TimeModel` of `peft_mux.scheduler.replicas.configs` for replicas that pack; lengths are those of sequences.

    Attributes:
        padded: the curves of one layer, the layers, and what each configuration holds.
    """

    padded: ReplicaTimeModel

    @property
    def max_tokens(self) -> Mapping[ParallelConfig, int]:
        """Most tokens of a pass, by configuration."""
        return self.padded.max_tokens

    @property
    def configurations(self) -> tuple[ParallelConfig, ...]:
        """What can be deployed: by GPUs, then by tensor parallel degree."""
        return self.padded.configurations

    def step_s(self, config: ParallelConfig, counts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> float:
        """Return the seconds of one replica for `counts[j]` sequences of `lengths[j]` tokens; 0 for none.

        Args:
            config: how the replica is spread over GPUs.
            counts: sequences of each bucket on this replica.
            lengths: tokens of the sequences of each bucket.
            max_tokens: most tokens of a pass on this replica.

        Raises:
            ValueError: for a configuration without a fit.
        """
        tokens = sum(count * length for count, length in zip(counts, lengths, strict=True))
        if not tokens:
            return 0.0
        fit, num_layers = self.padded.largest_stage(config)
        total_s, fullest_s, filled = 0.0, 0.0, tokens / max_tokens
        for count, length in zip(counts, lengths, strict=True):
            if count:
                full_s = self._full_pass_s(config, length, max_tokens)
                total_s += count * length / max_tokens * full_s
                fullest_s = max(fullest_s, full_s)
        # What is not full costs what a pass costs at all; so the seconds never fall with another row.
        empty_s, share = num_layers * fit.terms(0)[0], min(1.0, filled)
        total_s += (-(-tokens // max_tokens) - filled) * empty_s
        return total_s + (config.pp - 1) * (share * fullest_s + (1 - share) * empty_s)

    def linear_terms(self, config: ParallelConfig, lengths: Sequence[int], max_tokens: int) -> tuple[np.ndarray, float]:
        """Return seconds of a sequence of each length within full passes, and those of the costliest pass's bubble.

        Args:
            config: how the replica is spread over GPUs.
            lengths: tokens of the sequences of each bucket.
            max_tokens: most tokens of a pass on this replica.
        """
        full_s = np.array([self._full_pass_s(config, length, max_tokens) for length in lengths], dtype=np.float64)
        return full_s * np.asarray(lengths) / max_tokens, (config.pp - 1) * float(full_s.max(initial=0.0))

    def _full_pass_s(self, config: ParallelConfig, length: int, max_tokens: int) -> float:
        """Return the seconds that the largest stage takes for a pass filled with sequences of one length."""
        fit, num_layers = self.padded.largest_stage(config)
        fixed_s, each_s = fit.terms(length)
        return num_layers * (fixed_s + each_s * max_tokens / length)


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What a replica was planned for, and what its plan takes.

    Attributes:
        counts: sequences of each bucket.
        lengths: padded length of each bucket in tokens.
        seconds: seconds of a step under the plan.
        weight: how much it counts in a fit.
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: float
    weight: float = 1.0

    @property
    def sums(self) -> tuple[float, float, float, float]:
        """1 and the sums over sequences of 1, their tokens and the squares of these; what a fit is linear in."""

        def total(power: int) -> float:
            pairs = zip(self.counts, self.lengths, strict=True)
            return float(sum(count * length**power for count, length in pairs))

        return 1.0, total(0), total(1), total(2)


@dataclass(frozen=True, slots=True)
class PlannedTerms:
    """The linear form of one configuration.

    Attributes:
        fixed_s: seconds of a step that has any sequence.
        each_s: seconds of a sequence, whatever its length.
        token_s: seconds of a token.
        square_s: seconds of a sequence by the square of its tokens.
        mean_relative_error: mean of |fitted / planned - 1| over the loads that it was fitted to.
    """

    fixed_s: float
    each_s: float
    token_s: float
    square_s: float
    mean_relative_error: float = 0.0

    def sequence_s(self, length: float) -> float:
        """Return the seconds of a sequence padded to `length` tokens, besides the fixed ones."""
        return self.each_s + (self.token_s + self.square_s * length) * length


def fit_terms(loads: Iterable[PlannedLoad]) -> PlannedTerms:
    """Return the linear form of least squares of the weighted relative error, no coefficient below 0.

    Args:
        loads: what plans take for some loads of one configuration, one or more; those that fit nowhere do not count.

    Raises:
        ValueError: where no load has a plan.
    """
    known = [load for load in loads if np.isfinite(load.seconds)]
    if not known:
        raise ValueError("loads has no plan that fits; allowed: one or more. Leave the configuration out.")
    columns = np.array([load.sums for load in known]) / np.array([[load.seconds] for load in known])
    weights = np.sqrt([load.weight for load in known])
    # Columns differ by many powers of ten.
    scale = columns.max(axis=0)
    solution = non_negative_least_squares(columns / scale * weights[:, None], weights) / scale
    error = float(np.abs(columns @ solution - 1).mean())
    fixed_s, each_s, token_s, square_s = solution.tolist()
    return PlannedTerms(fixed_s, each_s, token_s, square_s, error)


@dataclass(frozen=True, slots=True)
class PlannedTimeModel:
    """Seconds of a replica's step by fitted plans; a `DeployableTimeModel` of `peft_mux.scheduler.replicas.configs`.

    Attributes:
        terms: the linear form of each configuration.
        max_tokens: the longest sequence that each configuration holds.
    """

    terms: Mapping[ParallelConfig, PlannedTerms]
    max_tokens: Mapping[ParallelConfig, int]

    def __post_init__(self) -> None:
        if not self.terms or set(self.terms) != set(self.max_tokens):
            raise ValueError(
                f"terms has {', '.join(map(str, self.terms)) or 'nothing'}, max_tokens "
                f"{', '.join(map(str, self.max_tokens)) or 'nothing'}; allowed: the same configurations, one or more."
            )

    @property
    def configurations(self) -> tuple[ParallelConfig, ...]:
        """Return what can be deployed: by GPUs, then by tensor parallel degree."""
        return tuple(sorted(self.max_tokens, key=lambda config: (config.num_gpus, config)))

    def step_s(self, config: ParallelConfig, counts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> float:
        """Return the seconds of one replica for `counts[j]` sequences padded to `lengths[j]`; as `TimeModel` has it."""
        terms, total_s = self.terms[config], 0.0
        for count, length in zip(counts, lengths, strict=True):
            if count:
                total_s += count * terms.sequence_s(length)
        return total_s + terms.fixed_s if any(counts) else 0.0

    def linear_terms(self, config: ParallelConfig, lengths: Sequence[int], max_tokens: int) -> tuple[np.ndarray, float]:
        """Return seconds per sequence of each length, and of any at all; exactly those of `step_s`."""
        terms = self.terms[config]
        return np.array([terms.sequence_s(length) for length in lengths], dtype=np.float64), terms.fixed_s

    def throughput(self, config: ParallelConfig, length_tokens: int, num_micro_batches: int) -> float:
        """Return tokens per GPU and second over full micro-batches of one length; 0 where none fits.

        Args:
            config: a configuration of `max_tokens`.
            length_tokens: tokens of each sequence.
            num_micro_batches: full micro-batches over which the throughput is taken.
        """
        size = self.max_tokens[config] // length_tokens
        if not size:
            return 0.0
        seconds = self.step_s(config, [size * num_micro_batches], [length_tokens], self.max_tokens[config])
        return size * num_micro_batches * length_tokens / (seconds * config.num_gpus)


_LENGTH_POINTS = 8
"""Lengths at which a layer is timed; a fit needs three or more."""
_SIZE_POINTS = 4
"""Micro-batch sizes at which each length is timed, besides 1 and 2; a fit needs two or more."""
_SHORTEST_TOKENS = 16
_UNBOUNDED_TOKENS = 2**40
"""As far as `MemoryModel.max_tokens` searches; where so many tokens fit, memory bounds nothing."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What the costs of a replica depend on.

    Attributes:
        shape: layers and widths of the backbone.
        profile: times of one layer on one device.
        loads: what each task that is trained brings into a step.
        memory: memory model of one device that holds the whole backbone; each configuration puts its own numbers of
            stages and of devices a stage in place of the model's.
        limit_bytes: memory of one device that may be filled; `None` for no limit.
        pass_tokens: most tokens that a run puts into one pass; a longer sequence makes a pass of its own.
        links: the devices and the links between them; `None` where shards use the link of the profile.
        supports: says whether the engine can divide the backbone as a configuration does; by default it always can.
    """

    shape: ModelShape
    profile: Profile
    loads: tuple[TaskLoad, ...]
    memory: MemoryModel
    limit_bytes: int | None
    pass_tokens: int
    links: Cluster | None = None
    supports: Callable[[ParallelConfig], bool] = lambda config: True

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of all tasks; 1 where there are none."""
        return max((load.longest for load in self.loads), default=1) or 1


def memory_tokens(facts: ReplicaFacts, config: ParallelConfig) -> int | None:
    """Return the most tokens of a micro-batch that a replica's memory holds; `None` for no limit, 0 for none at all.

    With 1F1B stage s of S holds S - s micro-batches at once; the fullest stage counts.
    """
    if facts.limit_bytes is None:
        return None
    model, limit = memory_of(facts, config), facts.limit_bytes
    tokens = min(
        model.max_tokens(facts.loads, limit, in_flight=config.pp - stage, stage=stage) for stage in range(config.pp)
    )
    return None if tokens >= _UNBOUNDED_TOKENS else tokens


def least_bytes(facts: ReplicaFacts, config: ParallelConfig) -> int:
    """Return the bytes that the fullest device of a replica holds with micro-batches of one token."""
    model = memory_of(facts, config)
    return max(model.peak_bytes(facts.loads, 1, in_flight=config.pp - stage, stage=stage) for stage in range(config.pp))


def memory_of(facts: ReplicaFacts, config: ParallelConfig) -> MemoryModel:
    """Return the memory model of one device of a replica, its layers cut as evenly as can be."""
    # A cut of layers that was chosen for another number of stages does not apply.
    return replace(facts.memory, num_stages=config.pp, devices_per_stage=config.tp, layers_per_stage=None)


def token_limits(facts: ReplicaFacts, configs: Iterable[ParallelConfig]) -> dict[ParallelConfig, int]:
    """Return M of L Eq. 10 by configuration: the tokens that memory holds, and no more than a pass of the run ever has.

    Configurations that hold nothing are left out.
    """
    # A sequence longer than a pass makes a pass of its own.
    most = max(facts.pass_tokens, facts.longest)
    limits: dict[ParallelConfig, int] = {}
    for config in configs:
        tokens = memory_tokens(facts, config)
        if tokens != 0:
            limits[config] = most if tokens is None else min(most, tokens)
    return limits


def replica_time_model(facts: ReplicaFacts, configs: Sequence[ParallelConfig]) -> ReplicaTimeModel:
    """Return the time model of these configurations, made from the profile.

    Raises:
        ValueError: where not one of the configurations holds a token.
    """
    limits = token_limits(facts, configs)
    degrees = sorted({config.tp for config in limits})
    most = max(limits.values(), default=_SHORTEST_TOKENS)
    times = [time for tp in degrees for time in layer_times(facts, tp, most)]
    return ReplicaTimeModel(fit_layer(times), facts.shape.num_layers, limits)


def layer_times(facts: ReplicaFacts, tp: int, max_tokens: int) -> list[LayerTime]:
    """Return forward and backward times of one layer at a tensor parallel degree, over lengths and micro-batch sizes.

    Eq. 10 knows layers only: head, embedding and the overhead of a pass are spread over them.

    Args:
        facts: what the costs of the run's replicas depend on.
        tp: tensor parallel degree at which the layer runs.
        max_tokens: tokens of the largest micro-batch that any configuration may have.
    """
    # Below this, rounding down would make some of the lengths equal.
    longest = max(max_tokens, _LENGTH_POINTS * _SHORTEST_TOKENS)
    lengths = sorted({int(length) for length in np.geomspace(_SHORTEST_TOKENS, longest, _LENGTH_POINTS)})
    cost = CostModel(facts.profile, facts.shape, devices_per_stage=tp, tensor_link=tensor_link(facts, tp))
    times = []
    for length in lengths:
        # Sizes 1 and 2 are timed at every length, even where two sequences exceed M: without them the terms of Eq. 10
        # with b cannot be told from those without.
        largest = max(2, longest // length)
        for size in sorted({int(size) for size in np.geomspace(1, largest, _SIZE_POINTS)} | {1, 2}):
            seconds = cost.uniform_pass_s(facts.loads, size, length)
            times.append(LayerTime(tp, length, size, seconds / facts.shape.num_layers))
    return times


def tensor_link(facts: ReplicaFacts, tp: int) -> Link | None:
    """Return the link between the devices that share every layer; `None` where none is known.

    Args:
        facts: what the costs of the run's replicas depend on.
        tp: tensor parallel degree.
    """
    if facts.links is None:
        return facts.profile.link
    # The shards of a layer are neighbours: they leave a node only where it has too few devices.
    return facts.links.intra_node if tp <= facts.links.devices_per_node else facts.links.inter_node
