"""The best dispatch of one deployment after another, until none that is left can be better (L Appendix A).

With the replicas fixed, L Eq. 2 is an integer linear programme; it is solved for each deployment in the order of lower
bounds, several at a time in processes of their own.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from peft_mux.scheduler.dispatching.ilp import solve_ilp
from peft_mux.scheduler.dispatching.problem import RELATIVE_ROUNDING, DispatchProblem, length_based, relocate

WAVE = 32
"""Deployments between two looks at the best one so far; fixed, so that the answer does not depend on the workers."""
_LEAST_LIMIT_S = 1.0
"""What a solver gets even where less of the budget is left: with hardly any time it finds nothing at all."""
_WAVES_BEFORE_RULES = 1
"""Solved in the order of bounds alone; small problems end within it."""
_TRIED_BY_RULES = 2048
"""Deployments of which the rules then choose a wave, so that a good one is found before the order of bounds gets there.
"""


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """How each programme is solved.

    Attributes:
        solver: name of a PuLP solver, a PuLP solver itself, or None for the bundled CBC.
        time_limit_s: seconds after which the best answer found so far is taken; one that is reached makes the answer
            depend on the machine.
        relative_gap: how far above its optimum each answer may be, relative to it.
        budget_s: seconds for all programmes together; None for as long as it takes.
    """

    solver: Any = None
    time_limit_s: float = 10.0
    relative_gap: float = 1e-3
    budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class SolvedPlans:
    """What the integer programmes gave.

    Attributes:
        answers: what is known of each deployment that was solved, by its row.
        best: the row of the fastest deployment.
        unreached: rows of deployments that might be faster, and that the budget left no time for.
        gap: part of its time by which the best could be beaten at most, by one of these or by one that the solver did
            not end; 0 without any.
        solve_s: seconds that solving took.
    """

    answers: dict[int, PlanAnswer]
    best: int
    unreached: frozenset[int]
    gap: float
    solve_s: float


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """What is known of one deployment.

    Attributes:
        step_s: seconds of its slowest replica in the form of Eq. 2.
        status: how the time was found: "solved", by the solver; "bound met", where a rule was found as fast as the
            bound; "time limit", the best known when that was reached; "solver failed", the best that a rule finds.
        error: what the solver complained of where it failed, its kind first; else empty.
    """

    step_s: float
    status: str
    error: str = ""

    @property
    def is_settled(self) -> bool:
        """Whether no better answer is left to be found."""
        return self.status in ("solved", "bound met")


_Job = tuple[DispatchProblem, float, SolverOptions]


def solve_plan(problem: DispatchProblem, bound_s: float, options: SolverOptions) -> PlanAnswer:
    """Return the time of one deployment; without the solver where a rule already meets the bound.

    Args:
        problem: the linear form of the expected batch on the deployment's replicas.
        bound_s: seconds that no dispatch can stay below; 0 where no bound is known.
        options: how the programme is solved.
    """
    known = relocate(problem, length_based(problem))
    known_s = float(problem.group_s(known).max())
    # The solver would be asked to come no nearer to the optimum than that.
    if known_s <= bound_s * (1 + max(options.relative_gap, RELATIVE_ROUNDING)):
        return PlanAnswer(known_s, "bound met")
    try:
        answer = solve_ilp(
            problem, known, solver=options.solver, time_limit_s=options.time_limit_s, relative_gap=options.relative_gap
        )
    except Exception as error:  # any solver may be plugged in; one that fails leaves the rule's answer
        return PlanAnswer(known_s, "solver failed", f"{type(error).__name__}: {error}")
    if answer is None:
        return PlanAnswer(known_s, "time limit")
    # The solver has a little room above the known answer, which may therefore be the better one.
    solved_s = min(known_s, float(problem.group_s(answer.ceilings).max()))
    return PlanAnswer(solved_s, "solved" if answer.proven else "time limit")


def greedy_s(problem: DispatchProblem) -> float:
    """Return the seconds of a deployment by the rules alone: never below what `solve_plan` would find."""
    return float(problem.group_s(relocate(problem, length_based(problem))).max())


def restrict(full: DispatchProblem, counts: np.ndarray) -> DispatchProblem:
    """Return the problem of one deployment.

    Args:
        full: the linear form with one group of one replica for each candidate configuration.
        counts: replicas of each candidate, int64 of shape `(candidates,)`.
    """
    rows = np.flatnonzero(counts)
    return DispatchProblem(
        sequence_s=full.sequence_s[rows],
        constant_s=full.constant_s[rows],
        num_replicas=counts[rows],
        num_sequences=full.num_sequences,
        lengths=full.lengths,
        priced_lengths=full.priced_lengths,
        max_tokens=full.max_tokens[rows],
        num_gpus=full.num_gpus[rows],
    )


def solve_plans(
    full: DispatchProblem,
    plans: np.ndarray,
    bounds_s: np.ndarray,
    options: SolverOptions,
    *,
    workers: int,
    prune: bool,
) -> SolvedPlans:
    """Solve deployments in the order of their bounds, until none that is left can be better or the budget is spent.

    Of equally fast ones the first is the best. With `prune`, a deployment whose bound is above the best time, or from
    there on within the relative gap of it, is not solved; that loses nothing but such a difference. At least the first
    few are solved, or timed by rules with `prune`, whatever the budget.

    Args:
        full: the linear form with one group of one replica for each candidate configuration.
        plans: replicas of each candidate in each deployment, int64 of shape `(plans, candidates)`, in ascending order
            of bounds.
        bounds_s: seconds below which no dispatch of each deployment stays in the form of Eq. 2, of shape `(plans,)`.
        options: how each programme is solved, and how long all may take.
        workers: processes that solve; 1 solves in this one.
        prune: whether the bounds may be used at all.
    """
    start = time.perf_counter()
    with _process_pool(workers) as pool:
        run = _BestFirstSearch(full, plans, bounds_s, options, pool, workers, prune)
        reached = run.solve_in_order()
    # The best may be one that only the rules timed, before the time was spent.
    run.answers.setdefault(run.best_row, PlanAnswer(run.best_s, "time limit"))
    unreached = [row for row in range(reached, len(plans)) if row not in run.answers and run.could_gain(row)]
    unsettled = [row for row, answer in run.answers.items() if not answer.is_settled and run.could_gain(row)]
    gap = 1 - min(bounds_s[[*unreached, *unsettled]], default=run.best_s) / run.best_s
    return SolvedPlans(run.answers, run.best_row, frozenset(unreached), float(gap), time.perf_counter() - start)


class _BestFirstSearch:
    """The state of `solve_plans`: its arguments, the answers so far, and the best of them."""

    def __init__(
        self,
        full: DispatchProblem,
        plans: np.ndarray,
        bounds_s: np.ndarray,
        options: SolverOptions,
        pool: Executor | None,
        workers: int,
        prune: bool,
    ) -> None:
        self.full, self.plans, self.bounds_s, self.options = full, plans, bounds_s, options
        self.pool, self.workers, self.prune = pool, workers, prune
        self.deadline = None if options.budget_s is None else time.perf_counter() + options.budget_s
        self.slack = max(options.relative_gap, RELATIVE_ROUNDING)
        self.answers: dict[int, PlanAnswer] = {}
        self.best_s, self.best_row = np.inf, -1
        if prune:
            # A first time to prune by: the rules cost far less than a solver.
            known_s = self._times_by_rules(range(min(WAVE, len(plans))))
            self.best_row = int(np.argmin(known_s))
            self.best_s = known_s[self.best_row]

    def solve_in_order(self) -> int:
        """Solve in the order of bounds; return the first row that was not looked at."""
        for start in range(0, len(self.plans), WAVE):
            if self.answers and _has_passed(self.deadline):
                return start
            if start == _WAVES_BEFORE_RULES * WAVE and self.prune:
                self._solve(self._most_promising(start))
            rows = range(start, min(start + WAVE, len(self.plans)))
            better = [row for row in rows if not self.prune or self._could_be_best(row)]
            if not better:
                return len(self.plans)  # bounds ascend: no later row can be better either
            left = [row for row in better if row not in self.answers]
            num_solved = self._solve(left)
            if num_solved < len(left):
                return left[num_solved]
        return len(self.plans)

    def could_gain(self, row: int) -> bool:
        """Whether a deployment's bound is below the best time by more than the gap."""
        return self.bounds_s[row] < self.best_s * (1 - self.slack)

    def _solve(self, rows: Sequence[int]) -> int:
        """Solve deployments in order until the deadline; return how many were solved."""
        # Where bounds may not prune, they may not end a solve early either.
        bounds_s = self.bounds_s if self.prune else np.zeros(len(self.plans))
        jobs = [(restrict(self.full, self.plans[row]), float(bounds_s[row]), self.options) for row in rows]
        found = _solve_until(jobs, self.pool, self.workers, self.deadline)
        for row, answer in zip(rows, found, strict=False):
            self.answers[row] = answer
            # Waves are not solved in order, yet of equally fast deployments the first row is the best.
            is_first = row < self.best_row and answer.step_s <= self.best_s * (1 + RELATIVE_ROUNDING)
            if is_first or answer.step_s < self.best_s * (1 - RELATIVE_ROUNDING):
                self.best_s, self.best_row = answer.step_s, row
        return len(found)

    def _most_promising(self, start: int) -> list[int]:
        """Return those of the next deployments that the rules time best: bounds alone hardly tell them apart."""
        rows = [row for row in range(start, min(start + _TRIED_BY_RULES, len(self.plans))) if self._could_be_best(row)]
        order = np.argsort(self._times_by_rules(rows), kind="stable")
        return [rows[index] for index in order[:WAVE]]

    def _times_by_rules(self, rows: Sequence[int]) -> list[float]:
        return [greedy_s(restrict(self.full, self.plans[row])) for row in rows]

    def _could_be_best(self, row: int) -> bool:
        """Whether a deployment may be faster than the best one, or come before it and be as fast."""
        if row <= self.best_row:
            return self.bounds_s[row] <= self.best_s * (1 + RELATIVE_ROUNDING)
        return self.could_gain(row)


def _solve_until(jobs: list[_Job], pool: Executor | None, workers: int, deadline: float | None) -> list[PlanAnswer]:
    """Solve programmes in order until the deadline; at least the first."""
    # Two for each worker: none idles while another ends, and few are under way when time is up.
    at_once = 2 * workers if pool else 1
    found: list[PlanAnswer] = []
    while len(found) < len(jobs) and not (found and _has_passed(deadline)):
        group = [_with_time_left(job, deadline) for job in jobs[len(found) : len(found) + at_once]]
        found += pool.map(_solve_job, group) if pool else map(_solve_job, group)
    return found


def _with_time_left(job: _Job, deadline: float | None) -> _Job:
    """Return a programme that may take no more than the time that is left, or a second where less is."""
    problem, bound_s, options = job
    if deadline is None:
        return job
    left_s = max(deadline - time.perf_counter(), _LEAST_LIMIT_S)
    return problem, bound_s, replace(options, time_limit_s=min(options.time_limit_s, left_s))


def _has_passed(deadline: float | None) -> bool:
    return deadline is not None and time.perf_counter() >= deadline


def _solve_job(job: _Job) -> PlanAnswer:
    return solve_plan(*job)


def _process_pool(workers: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    if workers == 1:
        return nullcontext()
    # A forked child of a process with threads, such as torch has, may hang.
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
