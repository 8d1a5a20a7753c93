"""Measured points as functions: `Curve` over a count, and `AdapterTable` over rank, width and tokens of an adapter."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Curve:
    """A value over a count, such as seconds over tokens: piecewise linear between measured points.

    Below the first point the value is constant, because a launch takes its time however little it does; a count of 0
    gives 0. Above the last point the last slope continues, or a s + b s^2 through the last two points if the value
    grows with the square of the count.

    Attributes:
        counts: the measured counts, ascending and above 0.
        values: the value at each count, 0 or more, not falling (`measured` levels noise).
        is_quadratic: whether the value grows with the square of the count, as attention does.

    Raises:
        ValueError: for other points.
    """

    counts: tuple[float, ...]
    values: tuple[float, ...]
    is_quadratic: bool = False

    def __post_init__(self) -> None:
        if not self.counts or len(self.counts) != len(self.values):
            raise ValueError(f"counts has {len(self.counts)} and values {len(self.values)} entries; allowed: as many.")
        _require_ascending("counts", self.counts)
        if min(self.values) < 0 or not all(map(math.isfinite, self.values)) or np.any(np.diff(self.values) < 0):
            raise ValueError(
                f"values are {self.values[:5]}; allowed: finite, 0 or more, not falling. Use Curve.measured for "
                "measurements."
            )

    @classmethod
    def measured(cls, counts: ArrayLike, values: ArrayLike, *, is_quadratic: bool = False) -> Curve:
        """Return the curve of measurements; noise that makes a later value lower than an earlier one is levelled."""
        levelled = _levelled(np.asarray(values, dtype=float))
        return cls(tuple(np.asarray(counts, dtype=float).tolist()), tuple(levelled.tolist()), is_quadratic)

    def __call__(self, count: ArrayLike) -> Any:
        """Return the value at a count, or at each count of an array."""
        x = np.asarray(count, dtype=float)
        last, value = self.counts[-1], self.values[-1]
        if len(self.counts) == 1:
            # A single point has no slope: a power through 0 is all that is known.
            beyond = value * (x / last) ** (2 if self.is_quadratic else 1)
        else:
            before, value_before = self.counts[-2], self.values[-2]
            beyond = value + (x - last) * (value - value_before) / (last - before)
            # b of a s + b s^2. If it is not above 0, the cost of a launch outweighs the square: the slope is better.
            square = (value / last - value_before / before) / (last - before)
            if self.is_quadratic and square > 0:
                beyond = x * (value / last + square * (x - last))
        y = np.where(x > last, beyond, np.interp(x, self.counts, self.values))
        y = np.where(x <= 0, 0.0, y)
        return float(y) if np.ndim(count) == 0 else y

    def scaled(self, factor: float) -> Curve:
        """Return the curve times a factor of 0 or more."""
        return replace(self, values=tuple(value * factor for value in self.values))


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """A value over rank, width and tokens: linear in each between the points.

    Beyond the points, rank and width continue in proportion to the last one, tokens as in `Curve`.

    Attributes:
        ranks: the measured ranks, ascending.
        widths: the measured input plus output features, ascending.
        tokens: the measured rows of an adapter, ascending.
        values: the values as nested tuples [ranks, widths, tokens], each 0 or more.

    Raises:
        ValueError: for shapes that do not match, or points that are not ascending.
    """

    ranks: tuple[float, ...]
    widths: tuple[float, ...]
    tokens: tuple[float, ...]
    values: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        for field in ("ranks", "widths", "tokens"):
            _require_ascending(field, getattr(self, field))
        shape = len(self.ranks), len(self.widths), len(self.tokens)
        values = np.asarray(self.values, dtype=float)
        if values.shape != shape or not np.all(np.isfinite(values)) or values.min() < 0:
            raise ValueError(
                f"values have shape {values.shape}; allowed: finite numbers of 0 or more in shape {shape}. Give one "
                "for each rank, width and number of tokens."
            )

    @classmethod
    def measured(
        cls, ranks: ArrayLike, widths: ArrayLike, tokens: ArrayLike, measurements: NDArray[Any], *, level: bool = True
    ) -> AdapterTable:
        """Return the table of measurements `[ranks, widths, tokens]`; `level` levels noise along tokens and ranks."""
        array = np.asarray(measurements, dtype=float)
        if level:
            array = np.apply_along_axis(_levelled, 2, array)
            array = np.apply_along_axis(_levelled, 0, array)
        rank_points, width_points, token_points = (
            tuple(np.asarray(points, dtype=float).tolist()) for points in (ranks, widths, tokens)
        )
        values = tuple(tuple(map(tuple, plane)) for plane in array.tolist())
        return cls(rank_points, width_points, token_points, values)

    @classmethod
    def constant(cls, value: float) -> AdapterTable:
        """Return a table in which every look-up returns `value`."""
        return cls((1.0,), (1.0,), (1.0,), (((value,),),))

    def __call__(self, rank: ArrayLike, width: ArrayLike, tokens: ArrayLike, *, grows: bool = True) -> Any:
        """Return the value at a point, or at each point of arrays that broadcast.

        Args:
            rank: R, the rank of the adapter.
            width: input plus output features of the linear layer.
            tokens: rows that the adapter reads; 0 gives 0 if `grows` is set.
            grows: whether the value continues beyond the points, as times do; a share stays at the last value.
        """
        r, w, t = np.broadcast_arrays(*(np.asarray(part, dtype=float) for part in (rank, width, tokens)))
        values = np.asarray(self.values, dtype=float)
        rank_axis, width_axis = _bracket(self.ranks, r), _bracket(self.widths, w)
        axes = (rank_axis, width_axis, _bracket(self.tokens, t, extend=grows))
        # Trilinear: each of the eight corners around a point counts by how near it is.
        result = np.zeros(r.shape)
        for corner in itertools.product((0, 1), repeat=3):
            weight: Any = 1.0
            index = []
            for upper, (lower, way, _), size in zip(corner, axes, values.shape, strict=True):
                weight = weight * (way if upper else 1 - way)
                index.append(np.minimum(lower + upper, size - 1))
            result = result + weight * values[tuple(index)]
        if grows:
            if len(self.tokens) == 1:  # a single point has no slope to continue
                result = result * np.maximum(t / self.tokens[0], 1.0)
            result = np.where(t <= 0, 0.0, np.maximum(result, 0.0) * rank_axis[2] * width_axis[2])
        return float(result) if result.ndim == 0 else result

    def scaled(self, factor: float) -> AdapterTable:
        """Return the table times a factor of 0 or more."""
        scaled = (np.asarray(self.values) * factor).tolist()
        return replace(self, values=tuple(tuple(map(tuple, plane)) for plane in scaled))


def _bracket(points: tuple[float, ...], x: NDArray[Any], *, extend: bool = False) -> tuple[NDArray[Any], ...]:
    """Return the index of the point at or below each x, the way to the next one, and x over the last point (1 within).

    With `extend` the way may exceed 1 on the last piece, and the ratio is 1.
    """
    ratio = np.ones(x.shape) if extend else np.maximum(x / points[-1], 1.0)
    if len(points) == 1:
        return np.zeros(x.shape, dtype=int), np.zeros(x.shape), ratio
    known = np.asarray(points)
    # Never the last point, so that there is always a next one.
    index = np.clip(np.searchsorted(known, x, side="right") - 1, 0, len(points) - 2)
    way = (x - known[index]) / (known[index + 1] - known[index])
    return index, np.clip(way, 0.0, None if extend else 1.0), ratio


def _levelled(values: NDArray[Any]) -> NDArray[Any]:
    """Return the nearest sequence that does not fall (in the largest difference), never below 0."""
    rising = np.maximum.accumulate(values)
    falling = np.minimum.accumulate(values[::-1])[::-1]
    return np.maximum((rising + falling) / 2, 0.0)


def _require_ascending(field: str, points: tuple[float, ...]) -> None:
    if not points or points[0] <= 0 or any(b <= a for a, b in itertools.pairwise(points)):
        raise ValueError(f"{field} are {points[:5]}; allowed: one or more, above 0, ascending. Sort them.")
