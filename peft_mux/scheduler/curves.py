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
        counts: ascending, above 0.
        values: not falling.
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
        """Return the curve of measurements, levelled: the mean of the running maximum and the running minimum."""
        return cls(_floats(counts), _floats(_levelled(np.asarray(values, dtype=float))), is_quadratic)

    @classmethod
    def proportional(cls, per_unit: float) -> Curve:
        """Return the straight line through 0."""
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
            return value * (x / last) ** (2 if self.is_quadratic else 1)
        before, value_before = self.counts[-2], self.values[-2]
        # Of a s + b s^2 through both points. Where a count takes no more than at the point before, what is left of a
        # launch outweighs the square, and the slope is the better guess; at b = 0 both agree.
        square = (value / last - value_before / before) / (last - before)
        if self.is_quadratic and square > 0:
            return x * (value / last + square * (x - last))
        return value + (x - last) * (value - value_before) / (last - before)

    def scaled(self, factor: float) -> Curve:
        """Return the curve times a factor."""
        return replace(self, values=tuple(value * factor for value in self.values))


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """A value over rank, width and tokens: linear in each between the points.

    Beyond the points, rank and width go on in proportion to the last one, tokens as in `Curve`.

    Attributes:
        ranks: ascending.
        widths: ascending.
        tokens: ascending.
        values: [ranks, widths, tokens] nested, 0 or more.

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
        """Return the table of measurements; levelled along tokens, then along ranks, where `level` is set."""
        array = np.asarray(values, dtype=float)
        if level:
            array = np.apply_along_axis(_levelled, 2, array)
            array = np.apply_along_axis(_levelled, 0, array)
        nested = tuple(tuple(_floats(row) for row in plane) for plane in array)
        return cls(_floats(ranks), _floats(widths), _floats(tokens), nested)

    @classmethod
    def constant(cls, value: float) -> AdapterTable:
        """Return a table of one value, whatever is looked up."""
        return cls((1.0,), (1.0,), (1.0,), (((value,),),))

    def __call__(self, rank: ArrayLike, width: ArrayLike, tokens: ArrayLike, *, grows: bool = True) -> Any:
        """Return the value at a point, or at each point of arrays that broadcast.

        Args:
            rank: R.
            width: input plus output features.
            tokens: rows of the adapter; 0 gives 0 where `grows` is set.
            grows: the value grows without bound, as times do; else it is held outside of the points.
        """
        r, w, t = np.broadcast_arrays(*(np.asarray(part, dtype=float) for part in (rank, width, tokens)))
        values = np.asarray(self.values, dtype=float)
        ri, rf, rs = _place(np.asarray(self.ranks), r)
        wi, wf, ws = _place(np.asarray(self.widths), w)
        ti, tf, _ = _place(np.asarray(self.tokens), t, extend=grows)
        result = np.zeros(r.shape)
        for di, r_part in ((0, 1 - rf), (1, rf)):
            for dj, w_part in ((0, 1 - wf), (1, wf)):
                for dk, t_part in ((0, 1 - tf), (1, tf)):
                    index = _clip(ri + di, values, 0), _clip(wi + dj, values, 1), _clip(ti + dk, values, 2)
                    result = result + r_part * w_part * t_part * values[index]
        if grows:
            if len(self.tokens) == 1:
                result = result * np.maximum(t / self.tokens[0], 1.0)
            result = np.where(t <= 0, 0.0, np.maximum(result, 0.0) * rs * ws)
        return float(result) if result.ndim == 0 else result

    def scaled(self, factor: float) -> AdapterTable:
        """Return the table times a factor."""
        values = tuple(tuple(tuple(v * factor for v in row) for row in plane) for plane in self.values)
        return replace(self, values=values)


def _place(
    points: NDArray[Any], x: NDArray[Any], *, extend: bool = False
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the point at or below each x, the way to the next one (0 to 1), and the ratio of x beyond the last one.

    With `extend`, the way may go beyond 1 on the last piece, and the ratio is 1.
    """
    if len(points) == 1:
        zeros = np.zeros(x.shape)
        return zeros.astype(int), zeros, np.ones(x.shape) if extend else np.maximum(x / points[0], 1.0)
    index = np.clip(np.searchsorted(points, x, side="right") - 1, 0, len(points) - 2)
    way = (x - points[index]) / (points[index + 1] - points[index])
    if extend:
        return index, np.maximum(way, 0.0), np.ones(x.shape)
    return index, np.clip(way, 0.0, 1.0), np.maximum(x / points[-1], 1.0)


def _clip(index: NDArray[Any], values: NDArray[Any], axis: int) -> NDArray[Any]:
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
