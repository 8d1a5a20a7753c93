"""How many layers of each stage have adapters, and what a backward leaves out below: `Depth`, `TaskDepths`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.sums.ranges import range_minima, range_sums

_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Depth:
    """Where the adapters of a micro-batch lie in each of S stages: `[S]`, or of many micro-batches `[S, ...]`.

    Attributes:
        adapted: layers with adapters: a mean over the tasks, weighted with what each takes of such a layer.
        layers: layers below the adapters of all its tasks, through which no gradient goes.
        rows: in the layers above those, tokens of the tasks that have no adapter there or below, times these layers and
            the part of their products that is spared. Attention and norms are computed for them all the same.
    """

    adapted: _Array
    layers: _Array
    rows: _Array

    @property
    def forward(self) -> Depth:
        """The same of a forward, which goes through all layers."""
        return replace(self, layers=np.zeros_like(self.layers), rows=np.zeros_like(self.rows))


class TaskDepths:
    """How far the backwards of M tasks go down through the stages.

    Args:
        loads: the loads of the tasks.
        layers: layers of each of the S stages.
    """

    def __init__(self, loads: Sequence[TaskLoad], layers: Sequence[int]) -> None:
        self._counts = np.array(layers, dtype=float)
        self._first = np.cumsum(self._counts) - self._counts
        self._lowest, self._share = (
            np.array([getattr(load, name) for load in loads], dtype=float) for name in ("lowest_layer", "unmet_share")
        )
        below = self._layers_below(self._lowest)
        # Of each stage and task, the layers whose products its rows are spared, and those with its adapters: [S, M].
        self._spared, self._adapted = self._share * below, self._counts[:, None] - below
        parameters = np.array([load.trainable_parameters for load in loads], dtype=float)
        # The products of adapters take about as long as they have parameters and tokens.
        self._weight = parameters / np.maximum(self._counts.sum() - self._lowest, 1.0)

    def of(self, tokens: _Array) -> Depth:
        """Return the depth of micro-batches of these tokens of each task, `[M]` or `[P, M]`."""
        lowest = np.where(tokens > 0, self._lowest, np.inf).min(axis=-1, initial=np.inf)
        weights = self._weight * tokens
        adapted = self._mean(self._adapted @ weights.T, weights.sum(axis=-1))
        return self._depth(lowest, self._spared @ tokens.T, tokens @ self._share, adapted)

    def of_ranges(self, tokens: _Array) -> Depth:
        """Return the depth of every range of consecutive tasks, of which micro-batches have these tokens `[M]`."""
        lowest = range_minima(np.where(tokens > 0, self._lowest, np.inf))
        spared = np.stack([range_sums(own * tokens) for own in self._spared])
        weights = self._weight * tokens
        adapted = self._mean(np.stack([range_sums(own * weights) for own in self._adapted]), range_sums(weights))
        return self._depth(lowest, spared, range_sums(self._share * tokens), adapted)

    def _depth(self, lowest: _Array, spared: _Array, shares: _Array, adapted: _Array) -> Depth:
        layers = self._layers_below(np.where(np.isinf(lowest), 0.0, lowest))
        return Depth(adapted, layers, spared - layers * shares)

    def _mean(self, sums: _Array, weights: _Array) -> _Array:
        """Return sums `[S, ...]` over their weights; all layers of the stage where there is no weight."""
        counts = self._counts.reshape(-1, *(1,) * weights.ndim)
        if not self._lowest.any():
            return np.broadcast_to(counts, sums.shape)
        return np.where(weights > 0, sums / np.where(weights > 0, weights, 1.0), counts)

    def _layers_below(self, lowest: _Array) -> _Array:
        """Return how many layers of each stage lie below these layers `[...]`: `[S, ...]`."""
        first, counts = (one.reshape(-1, *(1,) * lowest.ndim) for one in (self._first, self._counts))
        return np.clip(lowest - first, 0.0, counts)
