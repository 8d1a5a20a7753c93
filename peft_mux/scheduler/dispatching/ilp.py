"""L Eq. 3 as an integer linear programme, given to any solver that PuLP knows.

Eq. 3 has integers d_ij and rounds d_ij / p_i up. The ceilings x_ij alone say as much: any d_ij <= p_i x_ij with the
right sums is as fast, so that the programme is

    minimise T   subject to   sum_j c_ij x_ij + k_i u_i <= T          for each group i
                              sum_i p_i x_ij >= B_j                   for each bucket j
                              0 <= x_ij <= ceil(B_j / p_i) u_i        x_ij integer, u_i binary

with c_ij seconds per sequence, and k_i seconds for any sequence at all. The paper has no u_i: its k_i would be paid by
a replica that stays idle. Groups with k_i = 0 need none here either.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from peft_mux.scheduler.dispatching.problem import DispatchProblem

_CBC_NAMES = ("PULP_CBC_CMD", "COIN_CMD")
"""The CBC that comes with PuLP, and the name that is left of it in PuLP 4."""

_BOUND_SLACK = 1e-6
"""Relative room above a known makespan, so that rounding inside a solver cannot cut off the known solution."""


def solve_ilp(
    problem: DispatchProblem,
    known: np.ndarray,
    *,
    solver: Any = None,
    time_limit_s: float,
    relative_gap: float,
    start_from_known: bool = False,
) -> tuple[np.ndarray, bool] | None:
    """Return the best ceilings that the solver finds, or None if it finds none.

    Args:
        problem: the linear form of the step.
        known: ceilings that hold every sequence, int64 of shape `(groups, buckets)`; their makespan bounds T from
            above.
        solver: name of a PuLP solver, a PuLP solver itself, or None for HiGHS if it is installed, else bundled CBC.
        time_limit_s: seconds after which the best answer found so far is taken.
        relative_gap: how far above the optimum the answer's makespan may be, relative to it.
        start_from_known: whether a solver that takes a first solution is given `known`.

    Returns:
        Most sequences of each bucket on any replica of each group, int64 of shape `(groups, buckets)`, and whether the
        solver has proven that no answer is better by more than the gap.

    Raises:
        Exception: whatever the solver, an unknown name of one, or an absent PuLP raises.
    """
    import pulp

    known_s = float(problem.group_s(known).max())
    # In units of the known makespan, the absolute tolerances of a solver mean the same for any model.
    unit_s = known_s or 1.0
    programme = pulp.LpProblem("dispatch", pulp.LpMinimize)
    # PuLP 4 makes variables by `add_variable` alone, PuLP 2 by `LpVariable` alone.
    new_variable = getattr(programme, "add_variable", pulp.LpVariable)
    # The known makespan is 1 in these units: no worse solution is worth a branch.
    makespan = new_variable("makespan", 0, 1 + _BOUND_SLACK)
    programme += makespan
    # A ceiling above ceil(B_j / p_i) would hold more than the bucket has.
    most = -(-problem.num_sequences // problem.num_replicas[:, None])
    ceilings = {
        (group, bucket): new_variable(f"x_{group}_{bucket}", 0, int(most[group, bucket]), cat="Integer")
        for group, bucket in np.argwhere(problem.fits & (most > 0)).tolist()
    }
    all_used: dict[int, Any] = {}
    for group, constant_s in enumerate(problem.constant_s.tolist()):
        ceilings_of_group = {bucket: x for (member, bucket), x in ceilings.items() if member == group}
        terms = [float(problem.sequence_s[group, bucket]) / unit_s * x for bucket, x in ceilings_of_group.items()]
        if constant_s and ceilings_of_group:
            # u_i: a group that gets no sequence does not pay its constant.
            used = all_used[group] = new_variable(f"used_{group}", cat="Binary")
            terms.append(constant_s / unit_s * used)
            for bucket, x in ceilings_of_group.items():
                programme += x <= int(most[group, bucket]) * used
        programme += pulp.lpSum(terms) <= makespan
    for bucket, num_sequences in enumerate(problem.num_sequences.tolist()):
        if num_sequences:
            held = [int(problem.num_replicas[group]) * x for (group, other), x in ceilings.items() if other == bucket]
            programme += pulp.lpSum(held) >= num_sequences
    if start_from_known:
        # One left out would count as 0, which is not feasible.
        for (group, bucket), variable in ceilings.items():
            variable.setInitialValue(int(known[group, bucket]))
        for group, variable in all_used.items():
            variable.setInitialValue(int(known[group].any()))
        makespan.setInitialValue(known_s / unit_s)
    programme.solve(_find_solver(pulp, solver, time_limit_s, relative_gap, start_from_known))
    if programme.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    counts = np.zeros(problem.sequence_s.shape, dtype=np.int64)
    for place, variable in ceilings.items():
        counts[place] = round(variable.value() or 0.0)
    # Solvers hold constraints within a tolerance; an answer that rounding makes too small is none.
    if (problem.num_replicas @ counts < problem.num_sequences).any():
        return None
    return counts, programme.sol_status == pulp.LpSolutionOptimal


def _find_solver(pulp: Any, solver: Any, time_limit_s: float, relative_gap: float, start_from_known: bool) -> Any:
    """Return a silent PuLP solver; one that is passed in keeps its own limits."""
    if solver is not None and not isinstance(solver, str):
        return solver
    if solver is None:
        known = pulp.listSolvers()
        # HiGHS is the faster one if its package (highspy) is installed; CBC comes with PuLP.
        has_highs = "HiGHS" in known and pulp.getSolver("HiGHS").available()
        solver = "HiGHS" if has_highs else next(name for name in _CBC_NAMES if name in known)
    options: dict[str, Any] = {"msg": False, "timeLimit": time_limit_s, "gapRel": relative_gap}
    # CBC gets no number of threads: without one it runs in one thread, and `threads=1` was seen to hang (docs/log.md).
    if solver == "HiGHS":
        options |= {"threads": 1, "warmStart": start_from_known}
    elif solver in _CBC_NAMES:
        options |= {"warmStart": start_from_known}
    return pulp.getSolver(solver, **options)
