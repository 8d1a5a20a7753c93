"""The best dispatch of one deployment after another, until none that is left can be better (L Appendix A).

With the replicas fixed, L Eq. 2 is an integer linear programme; it is solved for each deployment in the order of lower
bounds, several at a time in processes of their own.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from peft_mux.scheduler.dispatch_ilp import solve_ilp
from peft_mux.scheduler.dispatch_problem import DispatchProblem
from peft_mux.scheduler.dispatch_rules import length_based, relocate

WAVE = 32
"""Deployments between two looks at the best one so far; fixed, so that the answer does not depend on the workers."""
_EQUAL = 1e-9
"""Relative difference of two times that is rounding."""


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """How each programme is solved.

    Attributes:
        solver: name of a PuLP solver, a PuLP solver itself, or None for the bundled CBC.
        time_limit_s: after which the best found so far is taken; one that is reached makes the answer depend on the
            machine.
        relative_gap: how far from its optimum each answer may be.
    """

    solver: Any = None
    time_limit_s: float = 10.0
    relative_gap: float = 1e-3


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
) -> tuple[dict[int, PlanAnswer], int]:
    """Return what was found of the deployments that were solved, by row, and the row of the best.

    Of equally fast ones the first is the best. With `prune`, a deployment whose bound is above the best time, or from
    there on within the relative gap of it, is not solved; that loses nothing but such a difference.

    Args:
        full: with one group for each candidate configuration.
        plans: int64 of shape `(plans, candidates)`, in ascending order of bounds.
        bounds_s: of each; valid for the form of Eq. 2.
        options: of the solver.
        workers: processes; 1 solves in this one.
        prune: whether the bounds may be used at all.
    """
    answers: dict[int, PlanAnswer] = {}
    best_s, best_row = np.inf, -1
    slack = max(options.relative_gap, _EQUAL)
    if prune:
        known_s = [greedy_s(restrict(full, counts)) for counts in plans[:WAVE]]
        best_row = int(np.argmin(known_s))
        best_s = known_s[best_row]
    with _pool(workers) as pool:
        for start in range(0, len(plans), WAVE):
            rows = range(start, min(start + WAVE, len(plans)))
            if prune:
                rows = [row for row in rows if _may_be_better(row, bounds_s[row], best_s, best_row, slack)]
                if not rows:
                    break
            jobs = [(restrict(full, plans[row]), float(bounds_s[row]) if prune else 0.0, options) for row in rows]
            found = list(pool.map(_solve_job, jobs)) if pool else [_solve_job(job) for job in jobs]
            for row, answer in zip(rows, found, strict=True):
                answers[row] = answer
                if answer.step_s < best_s * (1 - _EQUAL) or (row < best_row and answer.step_s <= best_s * (1 + _EQUAL)):
                    best_s, best_row = answer.step_s, row
    return answers, best_row


def _may_be_better(row: int, bound_s: float, best_s: float, best_row: int, slack: float) -> bool:
    return bound_s <= best_s * (1 + _EQUAL) if row <= best_row else bound_s < best_s * (1 - slack)


def _solve_job(job: tuple[DispatchProblem, float, SolverOptions]) -> PlanAnswer:
    return solve_plan(*job)


def _pool(workers: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    if workers == 1:
        return nullcontext()
    # A forked child of a process with threads, such as torch has, may hang.
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
