"""The best dispatch of one deployment after another, until none that is left can be better (L Appendix A).

With the replicas fixed, L Eq. 2 is an integer linear programme; it is solved for each deployment in the order of lower
bounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from peft_mux.scheduler.dispatching.ilp import solve_ilp
from peft_mux.scheduler.dispatching.problem import DispatchProblem, length_based, relocate
from peft_mux.scheduler.units import RELATIVE_ROUNDING

_WAVE = 32
"""Number of deployments in a wave: the first are timed by rules, and the order of bounds is checked again after it."""
_LEAST_LIMIT_S = 1.0
"""What a solver gets even if less of the budget is left: with hardly any time it finds nothing at all."""
_TRIED_BY_RULES = 2048
"""Number of deployments from which the rules choose a wave after the first one, so that a good one is found early."""


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """How each programme is solved.

    Attributes:
        solver: name of a PuLP solver, a PuLP solver itself, or None for the default of `solve_ilp`.
        time_limit_s: seconds after which the best answer found so far is taken; one that is reached makes the answer
            depend on the machine.
        relative_gap: how far above its optimum each answer may be, relative to it.
        budget_s: seconds for all programmes together; None for as long as it takes.
    """

    solver: Any
    time_limit_s: float
    relative_gap: float
    budget_s: float | None

    @property
    def slack(self) -> float:
        """Relative difference of two times that does not count."""
        return max(self.relative_gap, RELATIVE_ROUNDING)


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """What is known of one deployment.

    Attributes:
        step_s: seconds of its slowest replica in the form of Eq. 2.
        status: how the time was found: "solved", by the solver; "bound met", as fast as the bound by a rule; "time
            limit", the best known when that was reached; "solver failed", the best that a rule finds.
        error: the solver's error if it failed, its kind first; else empty.
    """

    step_s: float
    status: str
    error: str = ""


def solve_plan(problem: DispatchProblem, bound_s: float, options: SolverOptions) -> PlanAnswer:
    """Return the time of one deployment; without the solver if a rule already meets the bound.

    Args:
        problem: the linear form of the expected batch on the deployment's replicas.
        bound_s: seconds that no dispatch can stay below; 0 if no bound is known.
        options: how the programme is solved.
    """
    known = relocate(problem, length_based(problem))
    known_s = float(problem.group_s(known).max())
    # The solver would be asked to come no nearer to the optimum than that.
    if known_s <= bound_s * (1 + options.slack):
        return PlanAnswer(known_s, "bound met")
    try:
        answer = solve_ilp(
            problem, known, solver=options.solver, time_limit_s=options.time_limit_s, relative_gap=options.relative_gap
        )
    except Exception as error:  # any solver may be plugged in; one that fails leaves the rule's answer
        return PlanAnswer(known_s, "solver failed", f"{type(error).__name__}: {error}")
    if answer is None:
        return PlanAnswer(known_s, "time limit")
    ceilings, is_proven = answer
    # The solver has a little room above the known answer, which may therefore be the better one.
    return PlanAnswer(min(known_s, float(problem.group_s(ceilings).max())), "solved" if is_proven else "time limit")


def restrict(full: DispatchProblem, counts: np.ndarray) -> DispatchProblem:
    """Return the problem of one deployment.

    Args:
        full: the linear form with one group of one replica for each candidate configuration.
        counts: replicas of each candidate, int64 of shape `(candidates,)`.
    """
    rows = np.flatnonzero(counts)
    return replace(
        full,
        sequence_s=full.sequence_s[rows],
        constant_s=full.constant_s[rows],
        num_replicas=counts[rows],
        max_tokens=full.max_tokens[rows],
        num_gpus=full.num_gpus[rows],
    )


def times_by_rules(full: DispatchProblem, plans: Iterable[np.ndarray]) -> np.ndarray:
    """Return the seconds of deployments by the rules alone: never below what `solve_plan` would find."""
    step_s = []
    for counts in plans:
        problem = restrict(full, counts)
        step_s.append(float(problem.group_s(relocate(problem, length_based(problem))).max()))
    return np.array(step_s)


class BestFirstSearch:
    """Solves deployments in the order of their bounds, until none that is left can be better or the budget is spent.

    Of equally fast ones the first is the best. With `prune`, a deployment whose bound is above the best time, or after
    it within the relative gap, is not solved; that loses nothing but such a difference. At least the first few are
    solved, or timed by rules with `prune`, whatever the budget.

    Args:
        full: the linear form with one group of one replica for each candidate configuration.
        plans: replicas of each candidate in each deployment, int64 of shape `(plans, candidates)`, in ascending order
            of bounds.
        bounds_s: seconds below which no dispatch of each deployment stays in the form of Eq. 2, of shape `(plans,)`,
            the exchange included.
        options: how each programme is solved, and how long all may take.
        prune: whether the bounds may be used at all.
        exchange_s: seconds that each deployment takes in addition, of shape `(plans,)`.

    Attributes:
        answers: what is known of each deployment that was solved, by its row.
        best_row: the row of the fastest deployment.
        best_s: its seconds in the form of Eq. 2.
        unreached: rows of deployments that might be faster, and for which the budget left no time.
        gap: part of its time by which the best could be beaten at most, by one of these or by one that the solver did
            not end; 0 without any.
        solve_s: seconds that solving took.
    """

    def __init__(
        self,
        full: DispatchProblem,
        plans: np.ndarray,
        bounds_s: np.ndarray,
        options: SolverOptions,
        *,
        prune: bool,
        exchange_s: np.ndarray,
    ) -> None:
        start = time.perf_counter()
        self._full, self._plans, self._bounds_s, self._options, self._prune = full, plans, bounds_s, options, prune
        self._exchange_s = exchange_s
        self._deadline = np.inf if options.budget_s is None else start + options.budget_s
        self.answers: dict[int, PlanAnswer] = {}
        self.best_s, self.best_row = np.inf, -1
        if prune:
            # A first time to prune by: the rules cost far less than a solver.
            known_s = times_by_rules(full, plans[:_WAVE]) + self._exchange_s[:_WAVE]
            self.best_row = int(np.argmin(known_s))
            self.best_s = float(known_s[self.best_row])
        reached = self._solve_in_order()
        # The best may be one that only the rules timed, before the time was spent.
        self.answers.setdefault(self.best_row, PlanAnswer(self.best_s, "time limit"))
        left = range(reached, len(plans))
        self.unreached = {row for row in left if row not in self.answers and self._could_gain(row)}
        settled = [row for row, answer in self.answers.items() if answer.status in ("solved", "bound met")]
        unsettled = [row for row in self.answers.keys() - set(settled) if self._could_gain(row)]
        self.gap = float(1 - min(bounds_s[[*self.unreached, *unsettled]], default=self.best_s) / self.best_s)
        self.solve_s = time.perf_counter() - start

    def _solve_in_order(self) -> int:
        """Solve in the order of bounds; return the first row that was not looked at."""
        num_plans = len(self._plans)
        for start in range(0, num_plans, _WAVE):
            if self.answers and time.perf_counter() >= self._deadline:
                return start
            if start == _WAVE and self._prune:
                # Bounds alone hardly tell the next deployments apart: those that the rules time best come first.
                near = range(start, min(start + _TRIED_BY_RULES, num_plans))
                rows = [row for row in near if self._could_be_best(row)]
                reached_s = times_by_rules(self._full, self._plans[rows]) + self._exchange_s[rows]
                order = np.argsort(reached_s, kind="stable")
                self._solve([rows[index] for index in order[:_WAVE]])
            rows = range(start, min(start + _WAVE, num_plans))
            better = [row for row in rows if not self._prune or self._could_be_best(row)]
            if not better:
                return num_plans  # bounds ascend: no later row can be better either
            left = [row for row in better if row not in self.answers]
            num_solved = self._solve(left)
            if num_solved < len(left):
                return left[num_solved]
        return num_plans

    def _solve(self, rows: Sequence[int]) -> int:
        """Solve deployments in order until the deadline, at least the first; return how many were solved."""
        for num_solved, row in enumerate(rows):
            if num_solved and time.perf_counter() >= self._deadline:
                return num_solved
            left_s = max(self._deadline - time.perf_counter(), _LEAST_LIMIT_S)
            options = replace(self._options, time_limit_s=min(self._options.time_limit_s, left_s))
            # If bounds may not prune, they may not end a solve early either.
            added_s = float(self._exchange_s[row])
            bound_s = float(self._bounds_s[row]) - added_s if self._prune else 0.0
            solved = solve_plan(restrict(self._full, self._plans[row]), bound_s, options)
            answer = self.answers[row] = replace(solved, step_s=solved.step_s + added_s)
            # Rows are not solved in order, yet of equally fast deployments the first row is the best.
            is_first = row < self.best_row and answer.step_s <= self.best_s * (1 + RELATIVE_ROUNDING)
            if is_first or answer.step_s < self.best_s * (1 - RELATIVE_ROUNDING):
                self.best_s, self.best_row = answer.step_s, row
        return len(rows)

    def _could_gain(self, row: int) -> bool:
        """Return whether a deployment's bound is below the best time by more than the gap."""
        return self._bounds_s[row] < self.best_s * (1 - self._options.slack)

    def _could_be_best(self, row: int) -> bool:
        """Return whether a deployment may be faster than the best one, or come before it and be as fast."""
        if row <= self.best_row:
            return self._bounds_s[row] <= self.best_s * (1 + RELATIVE_ROUNDING)
        return self._could_gain(row)
