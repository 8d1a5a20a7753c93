"""Measured points as functions: seconds over a count, and seconds of adapters over rank, width and tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Curve:
    """A value over a count, such as seconds over tokens: piecewise linear between measured points.

    Below the first point the value is held (a launch takes its time, however little it does), but no count takes
    nothing; above the last point the last slope goes on, or a s + b s^2 through the last two points where the value
    grows with the square of the count. Noise that makes a later point lower than an earlier one is
    levelled by `measured`.

    Attributes:
        counts: the measured counts, ascending and above 0.
        values: the value at each count, 0 or more, none below the one before.
        is_quadratic: whether the value grows with the square of the count, as the attention product does.

    Raises:
        ValueError: for points that are not so.
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
        """Return the curve of measurements, levelled: the mean of the running maximum and the running minimum.

        Args:
            counts: the counts that were measured, ascending and above 0.
            values: what was measured at each count, such as seconds; noise may make it fall.
            is_quadratic: whether the value grows with the square of the count.
        """
        return cls(_floats(counts), _floats(_levelled(np.asarray(values, dtype=float))), is_quadratic)

    @classmethod
    def proportional(cls, per_unit: float) -> Curve:
        """Return the straight line through 0.

        Args:
            per_unit: the value at a count of 1.
        """
        # Counts are above 0: the first one is so near to it that what is held below is as good as 0.
        return cls((1e-9, 1.0), (per_unit * 1e-9, per_unit))

    def __call__(self, count: ArrayLike) -> Any:
        """Return the value at a count, or at each count of an array."""
        x = np.asarray(count, dtype=float)
        counts, values = np.asarray(self.counts), np.asarray(self.values)
        y = np.where(x > counts[-1], self._beyond(x), np.interp(x, counts, values))
        y = np.where(x <= 0, 0.0, y)
        return float(y) if np.ndim(count) == 0 else y

    def _beyond(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return what lies above the last point."""
        last, value = self.counts[-1], self.values[-1]
        if len(self.counts) == 1:
            # A single point has no slope; a power through 0 is all that can be said.
            return value * (x / last) ** (2 if self.is_quadratic else 1)
        before, value_before = self.counts[-2], self.values[-2]
        # Of a s + b s^2 through both points. Where a count takes no more than at the point before, what is left of a
        # launch outweighs the square, and the slope is the better guess; at b = 0 both agree.
        square = (value / last - value_before / before) / (last - before)
        if self.is_quadratic and square > 0:
            return x * (value / last + square * (x - last))
        return value + (x - last) * (value - value_before) / (last - before)

    def scaled(self, factor: float) -> Curve:
        """Return the curve times a factor.

        Args:
            factor: what every value is multiplied by, 0 or more.
        """
        return replace(self, values=tuple(value * factor for value in self.values))


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """A value over rank, width and tokens: linear in each between the points.

    Beyond the points, rank and width go on in proportion to the last one, tokens as in `Curve`.

    Attributes:
        ranks: the ranks at which values are known, ascending.
        widths: input plus output features at which values are known, ascending.
        tokens: rows of an adapter at which values are known, ascending.
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
        cls, ranks: ArrayLike, widths: ArrayLike, tokens: ArrayLike, values: NDArray[Any], *, level: bool = True
    ) -> AdapterTable:
        """Return the table of measurements; levelled along tokens, then along ranks, where `level` is set.

        Args:
            ranks: the ranks that were measured, ascending.
            widths: the input plus output features that were measured, ascending.
            tokens: the rows of an adapter that were measured, ascending.
            values: what was measured, an array [ranks, widths, tokens].
            level: whether noise is levelled, so that values do not fall along tokens and ranks.
        """
        array = np.asarray(values, dtype=float)
        if level:
            array = np.apply_along_axis(_levelled, 2, array)
            array = np.apply_along_axis(_levelled, 0, array)
        nested = tuple(tuple(_floats(row) for row in plane) for plane in array)
        return cls(_floats(ranks), _floats(widths), _floats(tokens), nested)

    @classmethod
    def constant(cls, value: float) -> AdapterTable:
        """Return a table of one value, whatever is looked up.

        Args:
            value: what every look-up returns.
        """
        return cls((1.0,), (1.0,), (1.0,), (((value,),),))

    def __call__(self, rank: ArrayLike, width: ArrayLike, tokens: ArrayLike, *, grows: bool = True) -> Any:
        """Return the value at a point, or at each point of arrays that broadcast.

        Args:
            rank: R, the rank of the adapter.
            width: input plus output features of the linear layer.
            tokens: rows that the adapter reads; 0 gives 0 where `grows` is set.
            grows: whether the value grows without bound, as times do; otherwise it is held outside of the points.
        """
        r, w, t = np.broadcast_arrays(*(np.asarray(part, dtype=float) for part in (rank, width, tokens)))
        values = np.asarray(self.values, dtype=float)
        ri, rf, rs = _bracket(np.asarray(self.ranks), r)
        wi, wf, ws = _bracket(np.asarray(self.widths), w)
        ti, tf, _ = _bracket(np.asarray(self.tokens), t, extend=grows)
        # Linear in each of the three: the eight corners around a point count by how near it is to them.
        result = np.zeros(r.shape)
        for di, r_part in ((0, 1 - rf), (1, rf)):
            for dj, w_part in ((0, 1 - wf), (1, wf)):
                for dk, t_part in ((0, 1 - tf), (1, tf)):
                    index = _clipped(ri + di, values, 0), _clipped(wi + dj, values, 1), _clipped(ti + dk, values, 2)
                    result = result + r_part * w_part * t_part * values[index]
        if grows:
            if len(self.tokens) == 1:  # a single point has no slope to go on with
                result = result * np.maximum(t / self.tokens[0], 1.0)
            # Rank and width go on in proportion beyond their last points.
            result = np.where(t <= 0, 0.0, np.maximum(result, 0.0) * rs * ws)
        return float(result) if result.ndim == 0 else result

    def scaled(self, factor: float) -> AdapterTable:
        """Return the table times a factor.

        Args:
            factor: what every value is multiplied by, 0 or more.
        """
        values = tuple(tuple(tuple(v * factor for v in row) for row in plane) for plane in self.values)
        return replace(self, values=values)


def _bracket(
    points: NDArray[Any], x: NDArray[Any], *, extend: bool = False
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the point at or below each x, the way to the next one (0 to 1), and the ratio of x beyond the last one.

    With `extend`, the way may go beyond 1 on the last piece, and the ratio is 1.
    """
    if len(points) == 1:
        zeros = np.zeros(x.shape)
        return zeros.astype(int), zeros, np.ones(x.shape) if extend else np.maximum(x / points[0], 1.0)
    # Never the last point, so that there is always a next one; what lies beyond belongs to the last piece.
    index = np.clip(np.searchsorted(points, x, side="right") - 1, 0, len(points) - 2)
    way = (x - points[index]) / (points[index + 1] - points[index])
    if extend:
        return index, np.maximum(way, 0.0), np.ones(x.shape)
    return index, np.clip(way, 0.0, 1.0), np.maximum(x / points[-1], 1.0)


def _clipped(index: NDArray[Any], values: NDArray[Any], axis: int) -> NDArray[Any]:
    return np.minimum(index, values.shape[axis] - 1)


def _levelled(values: NDArray[Any]) -> NDArray[Any]:
    """Return the nearest sequence that does not fall, in the largest difference; never below 0."""
    rising = np.maximum.accumulate(values)
    falling = np.minimum.accumulate(values[::-1])[::-1]
    return np.maximum((rising + falling) / 2, 0.0)


def _require_ascending(field: str, points: tuple[float, ...]) -> None:
    if not points or points[0] <= 0 or any(b <= a for a, b in zip(points[:-1], points[1:], strict=True)):
        raise ValueError(f"{field} are {points[:5]}; allowed: one or more, above 0, ascending. Sort them.")


def _floats(values: ArrayLike) -> tuple[float, ...]:
    return tuple(float(value) for value in np.asarray(values, dtype=float))
