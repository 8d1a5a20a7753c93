"""The best dispatch of one deployment after another, until none that is left can be better (L Appendix A).

With the replicas fixed, L Eq. 2 is an integer linear programme; it is solved for each deployment in the order of lower
bounds, several at a time in processes of their own.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from peft_mux.scheduler.dispatch_ilp import solve_ilp
from peft_mux.scheduler.dispatch_problem import DispatchProblem
from peft_mux.scheduler.dispatch_rules import length_based, relocate

WAVE = 32
"""Deployments between two looks at the best one so far; fixed, so that the answer does not depend on the workers."""
_EQUAL = 1e-9
"""Relative difference of two times that is rounding."""
_LEAST_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """How each programme is solved.

    Attributes:
        solver: name of a PuLP solver, a PuLP solver itself, or None for the bundled CBC.
        time_limit_s: after which the best found so far is taken; one that is reached makes the answer depend on the
            machine.
        relative_gap: how far from its optimum each answer may be.
        budget_s: for all programmes together; None for as long as it takes.
    """

    solver: Any = None
    time_limit_s: float = 10.0
    relative_gap: float = 1e-3
    budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """What the integer programmes gave.

    Attributes:
        answers: of each deployment that was solved, by its row.
        best: row of the fastest.
        unreached: rows of deployments that might be faster, and that the budget left no time for.
        gap: by how much of its time one of these could be faster than the best at most; 0 without any.
        solve_s: that solving took.
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
        how: "solved", by the solver; "bound met", where a rule was found as fast as the bound; "time limit", the best
            known when that was reached; "solver failed", the best that a rule finds.
        error: what the solver complained of where it failed, its kind first; else empty.
    """

    step_s: float
    how: str
    error: str = ""


_Job = tuple[DispatchProblem, float, SolverOptions]


def solve_plan(problem: DispatchProblem, bound_s: float, options: SolverOptions) -> PlanAnswer:
    """Return the time of one deployment; without the solver where a rule already meets the bound."""
    known = relocate(problem, length_based(problem))
    known_s = float(problem.group_s(known).max())
    if known_s <= bound_s * (1 + max(options.relative_gap, _EQUAL)):
        return PlanAnswer(known_s, "bound met")
    try:
        answer = solve_ilp(
            problem, known, solver=options.solver, time_limit_s=options.time_limit_s, relative_gap=options.relative_gap
        )
    except Exception as error:  # any solver may be plugged in; one that fails leaves the rule's answer
        return PlanAnswer(known_s, "solver failed", f"{type(error).__name__}: {error}")
    if answer is None:
        return PlanAnswer(known_s, "time limit")
    solved_s = min(known_s, float(problem.group_s(answer.ceilings).max()))
    return PlanAnswer(solved_s, "solved" if answer.proven else "time limit")


def greedy_s(problem: DispatchProblem) -> float:
    """Return the seconds of a deployment by the rules alone: never below what `solve_plan` would find."""
    return float(problem.group_s(relocate(problem, length_based(problem))).max())


def restrict(full: DispatchProblem, counts: np.ndarray) -> DispatchProblem:
    """Return the problem of one deployment.

    Args:
        full: with one group for each candidate configuration.
        counts: replicas of each, int64 of shape `(candidates,)`.
    """
    rows = np.flatnonzero(counts)
    return DispatchProblem(
        sequence_s=full.sequence_s[rows],
        constant_s=full.constant_s[rows],
        num_replicas=counts[rows],
        num_sequences=full.num_sequences,
        lengths=full.lengths,
        max_tokens=full.max_tokens[rows],
        num_gpus=full.num_gpus[rows],
    )


def search(
    full: DispatchProblem,
    plans: np.ndarray,
    bounds_s: np.ndarray,
    options: SolverOptions,
    *,
    workers: int,
    prune: bool,
) -> Search:
    """Solve deployments in the order of their bounds, until none that is left can be better or the budget is spent.

    Of equally fast ones the first is the best. With `prune`, a deployment whose bound is above the best time, or from
    there on within the relative gap of it, is not solved; that loses nothing but such a difference. At least the first
    few are solved, or timed by rules with `prune`, whatever the budget.

    Args:
        full: with one group for each candidate configuration.
        plans: int64 of shape `(plans, candidates)`, in ascending order of bounds.
        bounds_s: of each; valid for the form of Eq. 2.
        options: of the solver.
        workers: processes; 1 solves in this one.
        prune: whether the bounds may be used at all.
    """
    start, answers = time.perf_counter(), dict[int, PlanAnswer]()
    best_s, best_row = np.inf, -1
    slack = max(options.relative_gap, _EQUAL)
    if prune:
        known_s = [greedy_s(restrict(full, counts)) for counts in plans[:WAVE]]
        best_row = int(np.argmin(known_s))
        best_s = known_s[best_row]
    deadline = None if options.budget_s is None else start + options.budget_s
    reached = 0
    with _pool(workers) as pool:
        while reached < len(plans) and not (answers and _has_passed(deadline)):
            rows = list(range(reached, min(reached + WAVE, len(plans))))
            if prune:
                rows = [row for row in rows if _may_be_better(row, bounds_s[row], best_s, best_row, slack)]
            if not rows:
                reached = len(plans)
                break
            jobs = [(restrict(full, plans[row]), float(bounds_s[row]) if prune else 0.0, options) for row in rows]
            found = _solve_some(jobs, pool, workers, deadline)
            reached = reached + WAVE if len(found) == len(rows) else rows[len(found)]
            for row, answer in zip(rows, found, strict=False):
                answers[row] = answer
                if answer.step_s < best_s * (1 - _EQUAL) or (row < best_row and answer.step_s <= best_s * (1 + _EQUAL)):
                    best_s, best_row = answer.step_s, row
    answers.setdefault(best_row, PlanAnswer(best_s, "time limit"))  # by rules, before the budget was spent
    unreached = [row for row in range(reached, len(plans)) if bounds_s[row] < best_s * (1 - slack)]
    gap = 1 - min(bounds_s[unreached], default=best_s) / best_s
    return Search(answers, best_row, frozenset(unreached), float(gap), time.perf_counter() - start)


def _solve_some(jobs: list[_Job], pool: Executor | None, workers: int, deadline: float | None) -> list[PlanAnswer]:
    """Solve programmes in order until the deadline; at least the first."""
    at_once = 2 * workers if pool else 1
    found: list[PlanAnswer] = []
    while len(found) < len(jobs) and not (found and _has_passed(deadline)):
        group = [_within(job, deadline) for job in jobs[len(found) : len(found) + at_once]]
        found += pool.map(_solve_job, group) if pool else map(_solve_job, group)
    return found


def _within(job: _Job, deadline: float | None) -> _Job:
    """Let a programme take no more than what is left, or a second where that is less."""
    problem, bound_s, options = job
    if deadline is None:
        return job
    left_s = max(deadline - time.perf_counter(), _LEAST_LIMIT_S)
    return problem, bound_s, replace(options, time_limit_s=min(options.time_limit_s, left_s))


def _has_passed(deadline: float | None) -> bool:
    return deadline is not None and time.perf_counter() >= deadline


def _may_be_better(row: int, bound_s: float, best_s: float, best_row: int, slack: float) -> bool:
    return bound_s <= best_s * (1 + _EQUAL) if row <= best_row else bound_s < best_s * (1 - slack)


def _solve_job(job: _Job) -> PlanAnswer:
    return solve_plan(*job)


def _pool(workers: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    if workers == 1:
        return nullcontext()
    # A forked child of a process with threads, such as torch has, may hang.
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
