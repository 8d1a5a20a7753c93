"""`PartFit`: how much longer each part of a step takes than a profile says, fitted to measured passes (M §4).

A measured pass is a sum over parts, of which the profile tells what each should take: seconds = sum of factor times
predicted seconds. Factors are the least squares of relative errors over all passes, recent ones counting more
(recursive least squares with forgetting, kept as information, which is a sum over passes and so over processes). Passes
of one run look alike, so that parts are told apart only as far as passes differ; what these do not tell is held by a
ridge: parts are as much slower as all together are, unless the passes say otherwise. No factor is below a bound.

Communication grows with the tokens of a pass, as computing does, and has a fixed part, as a pass has: no passes tell it
from these two. So it is measured apart wherever that can be done (`PassTime.waited_s`); elsewhere it stays near what it
was, and what slower links add counts as slower computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from peft_mux.scheduler.costs.profile import AS_PROFILED, Parts

_NOISE = 0.1
"""Relative deviation of a measured pass that says nothing: what a busy host makes of equal passes."""
_FORGETTING = 0.99
"""Weight of a pass over that of the pass after it: some hundred passes count."""
_RIDGE = 1.0
"""Deviation of a part's factor from the common one, relative to it, that is expected before anything is measured."""
_LEAST_SHARE = 0.1
"""What a pass takes at all, and what lies between passes, may be far from any profile: they may take such a share of a
pass, however little was predicted. What grows with tokens and lengths may not: a factor that noise has made of next to
nothing would be extended to the tokens of larger passes."""
_OVERHEADS = np.array([1.0, 0.0, 0.0, 0.0, 0.0, 1.0])
_ROUNDS = 4
"""Of widening the ridge of overheads with what they are found to be, so that it is one of their logarithms, nearly."""
_LEAST_FACTOR = 0.02
_LEAST_OF_COMMON = 0.1
"""No part is taken to be so much faster than all together, whatever passes seem to say."""
_OUTLIER = 3.0
"""Passes that are off by more than so many times the usual residual count less."""
_KINDS = {Parts._fields.index("optimizer"): 1, Parts._fields.index("communication"): 2}
"""Measurements of unlike noise, by the part that most of their seconds are predicted for; all others are of kind 0."""
_COMPUTED = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
"""The parts that one device computes, which are slower or faster together; links are a matter of their own."""


class PartFit:
    """Factors of the parts of a step, learnt pass by pass.

    Args:
        start: the factors to begin with, such as those that an earlier run has learnt.

    Attributes:
        num_passes: how many measurements have counted.

    Example:
        >>> fit = PartFit()
        >>> fit.observe(Parts(tokens=1.0), seconds=2.0)
        >>> round(fit.factors().tokens, 2)
        2.0
    """

    def __init__(self, start: Parts = AS_PROFILED) -> None:
        """Know nothing but the start."""
        self._start = np.array(start)
        self._information = np.zeros((len(start), len(start)))
        self._evidence = np.zeros(len(start))
        self._usual_residuals = [0.5, 0.5, 0.5]
        self.num_passes = 0

    def observe(self, predicted: Parts, seconds: float) -> None:
        """Take a measurement in; one without seconds, or of which nothing was predicted, says nothing.

        Args:
            predicted: seconds of each part by the profile.
            seconds: seconds that all parts together have taken.
        """
        row = np.array(predicted)
        if not (0 < seconds < np.inf and 0 < row.sum() < np.inf):
            return
        expected = float(row @ np.array(self.factors()))
        weight = self._weight(_KINDS.get(int(np.argmax(row)), 0), abs(np.log(seconds / expected)))
        # Relative to the larger of the two: neither a pass that stood still nor a tiny one outweighs the others.
        scale = _NOISE * max(seconds, expected)
        row = row / scale
        self._information = _FORGETTING * self._information + weight * np.outer(row, row)
        self._evidence = _FORGETTING * self._evidence + weight * row * (seconds / scale)
        self.num_passes += 1

    def factors(self) -> Parts:
        """Return what each part takes over the profile's seconds; the start where nothing was measured."""
        common = self._common_factor()
        means = np.where(_COMPUTED > 0, common * self._start, self._start)
        found = means
        for _ in range(_ROUNDS):
            precision = 1.0 / self._deviations(means, found) ** 2
            matrix, target = self._information + np.diag(precision), self._evidence + precision * means
            found = _bounded_solution(matrix, target, np.maximum(_LEAST_FACTOR, _LEAST_OF_COMMON * means))
        return Parts(*found.tolist())

    def numbers(self) -> list[float]:
        """Return what was learnt as plain numbers, which `pooled` takes."""
        return [float(self.num_passes), *self._information.ravel().tolist(), *self._evidence.tolist()]

    def pooled(self, everywhere: Iterable[Sequence[float]]) -> PartFit:
        """Return the fit over the passes of several processes, from the same start.

        Args:
            everywhere: what `numbers` gives on each process, in the same order everywhere, as sums round by it.
        """
        whole = PartFit(Parts(*self._start.tolist()))
        size = len(whole._start)
        for numbers in everywhere:
            whole.num_passes += int(numbers[0])
            whole._information = whole._information + np.array(numbers[1 : 1 + size * size]).reshape(size, size)
            whole._evidence = whole._evidence + np.array(numbers[1 + size * size :])
        return whole

    def _weight(self, kind: int, residual: float) -> float:
        """Return how much a measurement counts by how far it is from what was expected; learn what is usual.

        Args:
            kind: 0 for passes, 1 for what lies between them, 2 for waiting for sums.
            residual: logarithm of measured over expected seconds, without its sign.
        """
        usual = self._usual_residuals[kind]
        limit = _OUTLIER * usual
        # Where all are off, that becomes what is usual: the profile is wrong then, and not the measurements.
        self._usual_residuals[kind] = max(_NOISE, usual + 0.1 * (min(residual, limit) - usual))
        return min(1.0, limit / residual) ** 2 if residual > 0 else 1.0

    def _common_factor(self) -> float:
        """Return the one factor of all computed parts that fits best; 1 where nothing was measured."""
        along = _COMPUTED * self._start
        apart = self._start - along
        curvature = along @ self._information @ along
        if curvature <= 0:
            return 1.0
        return float(max(_LEAST_FACTOR, along @ (self._evidence - self._information @ apart) / curvature))

    def _deviations(self, means: NDArray[np.float64], found: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how far from its mean each part's factor may well be."""
        own = np.diag(self._information)
        whole = self._information.sum()
        ratios = np.sqrt(whole / np.where(own > 0, own, max(whole, 1.0)))
        widened = np.where(_OVERHEADS > 0, np.maximum(found, means * np.maximum(1.0, _LEAST_SHARE * ratios)), means)
        return _RIDGE * widened


def _bounded_solution(
    matrix: NDArray[np.float64], target: NDArray[np.float64], least: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the solution of a positive definite system with no entry below its bound; what falls below is held."""
    free = np.ones(len(target), dtype=bool)
    while True:
        solution = least.copy()
        held = matrix[np.ix_(free, ~free)] @ solution[~free]
        solution[free] = np.linalg.solve(matrix[np.ix_(free, free)], target[free] - held)
        below = np.where(free, solution - least, 0.0)
        if (below >= 0).all():
            return solution
        # One entry less each time, so that it ends, at the optimum or next to it.
        free[int(np.argmin(below))] = False
