"""How long a replica takes for its share of a step, fitted from timings of one layer (L section 2.2, Appendix D).

A layer's forward and backward pass over a micro-batch of b sequences of s tokens takes t(b, s), a curve for each tensor
parallel degree; Eq. 10 to 12 make a replica's step of it. Nothing is measured here: timings are read from files, or
come from `costs.py`.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

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
