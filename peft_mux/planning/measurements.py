"""`Measurements`: the steps of a run as they were timed, compared with their plan, and replicas with one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peft_mux.engine.work import StepResult, StepWork
from peft_mux.log.recorders import PassReport
from peft_mux.parallel.dispatch import DispatchClock
from peft_mux.planning.planner import Planner
from peft_mux.scheduler.plan import Plan
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run, StepTime

_STEPS_OF_A_WINDOW = 50
"""After so many steps a slow replica is reported."""
_LEAST_WAIT_S, _LEAST_SHARE = 1.0, 0.1
"""Shorter waits are not reported: in seconds of a window, and relative to the time of its passes."""


def slow_replica(passes_s: Sequence[Sequence[float]]) -> tuple[int, float, float] | None:
    """Return the replica for which the others wait, the wait in seconds, and its share of the time; `None` for none.

    In each step the others wait for the slowest replica, for the time between the end of its passes and those of the
    next slowest. A replica that is stopped once and one that is always slow both add up to a long wait. Ranks of one
    replica wait for each other within their passes, so they cannot be compared.

    Args:
        passes_s: seconds of the passes of each step, by replica.
    """
    steps = np.array(passes_s)
    if not len(steps):
        return None
    ordered = np.sort(steps, axis=1)
    waits_s = np.bincount(steps.argmax(axis=1), ordered[:, -1] - ordered[:, -2], minlength=steps.shape[1])
    replica = int(waits_s.argmax())
    waited_s, share = float(waits_s[replica]), float(waits_s[replica] / max(ordered[:, -1].sum(), 1e-9))
    return None if waited_s < _LEAST_WAIT_S or share < _LEAST_SHARE else (replica, waited_s, share)


class Measurements:
    """Times the steps of a run and compares them with their plan; the planner's `correction` learns from them.

    Args:
        run: the present run.
        placement: the model of this process, whose executor times passes.
        planner: prices the passes of a step.

    Attributes:
        pass_report: the passes and tokens of this process's replica, as planned and as run.
        dispatch_clock: time of dividing rows among unequal replicas under all plans; `None` before the first one.
    """

    def __init__(self, run: Run, placement: Placement, planner: Planner) -> None:
        self._run, self._placement, self._planner = run, placement, planner
        self.pass_report = self._counted_before = PassReport()
        self.dispatch_clock: DispatchClock | None = None
        self._plan: Plan | None = None
        self._waited_s = 0.0
        self._replicas_s: list[list[float]] = []

    def begin_step(self) -> None:
        """Note the time that this process has spent waiting for others so far."""
        self._waited_s = self._run.processes.waited_s

    def count_passes(self, plan: Plan, work: StepWork, *, repeats: bool = False) -> None:
        """Count whether a step has the passes that its plan says.

        Args:
            plan: the plan that the step follows.
            work: the step.
            repeats: whether it takes the place of the last one that was counted.
        """
        self._plan = plan
        replica = self._run.replica
        planned = plan.passes[replica] if replica < len(plan.passes) else None
        self._counted_before = self._counted_before if repeats else self.pass_report
        self.pass_report = self._counted_before.after(planned, work.micro_batches)

    def record_step(self, result: StepResult, seconds: float, *, num_steps: int = 1) -> StepTime:
        """Return what the last step took on this process, or zeros if this process is alone and has compared it.

        Args:
            result: the result of the step.
            seconds: seconds of its passes and updates.
            num_steps: number of steps that took this time each, if a pipeline is not flushed between them.
        """
        plan, times = self._plan, self._placement.executor.clock.take()
        self._run.log.times.add_steps(plan, seconds, num_steps, times)
        correction, prices = self._planner.correction, None
        # Prices take the host some time, also if they are not used.
        if correction.learns_from_next_step:
            width = 1 if plan is None else plan.passes_in_turns
            prices = self._planner.prices(self._placement.part.place.stage, width)
        if prices is not None:
            # In a window of steps without a flush, the time between passes is unknown: nothing is learnt from it.
            between_s = seconds - times.span_s - (self._run.processes.waited_s - self._waited_s)
            correction.observe_passes(times, between_s, result.num_tokens, prices)
        # With its plan: by the time that the processes have exchanged their times, there may be another one.
        step = StepTime(plan, sum(result.num_tokens.values()), seconds, times.span_s)
        if not self._run.processes.is_alone:
            return step
        self.compare_step(step, seconds)
        return StepTime()

    def compare_step(self, step: StepTime, slowest_s: float, process_s: Sequence[float] = ()) -> None:
        """Compare a step with its prediction, and replicas with one another; nothing for no step.

        Args:
            step: what it took on this process.
            slowest_s: what it took on the slowest process.
            process_s: seconds of the passes of each process, by rank; none for a process that is alone.
        """
        layout = self._run.layout
        if step != StepTime() and layout.num_replicas > 1:
            replica_s = [0.0] * layout.num_replicas
            for place, passes_s in zip(layout.places, process_s, strict=True):
                replica_s[place.replica] = max(replica_s[place.replica], passes_s)
            self._replicas_s.append(replica_s)
            if len(self._replicas_s) >= _STEPS_OF_A_WINDOW:
                self.report_slow_replica()
        if step.plan is None:
            return
        correction = self._planner.correction
        correction.observe(step.plan, step.num_tokens, slowest_s)
        left = {task.name: task.num_steps - task.step for task in self._run.table.running}
        forecast = correction.compare_with_plan(step.plan, left)
        if forecast is not None:
            ratio, predicted_s, line = forecast
            self._run.log.say(line)
            self._run.log.event("forecast", ratio=ratio, predicted_s=predicted_s, corrected_s=predicted_s * ratio)

    def exchange(self) -> None:
        """Exchange what each process has learnt of times; every process calls this at once."""
        correction = self._planner.correction
        correction.agree(self._run.processes.gather(correction.numbers()))

    def forget_replicas(self) -> None:
        """Forget the times of replicas, which are not compared with those that have moved."""
        self._replicas_s = []

    def report_slow_replica(self) -> None:
        """Log the ranks of the replica that the others have waited for since the last report, if the wait was long."""
        slow, num_steps = slow_replica(self._replicas_s), len(self._replicas_s)
        self.forget_replicas()
        if slow is not None:
            replica, waited_s, share = slow
            ranks = [rank for rank, place in enumerate(self._run.layout.places) if place.replica == replica]
            subject = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
            self._run.log.say(
                f"{subject} slow: in the last {num_steps} steps the other replicas waited {waited_s:.1f} s for"
                f" {'it' if len(ranks) == 1 else 'them'}, {share:.0%} of the time of passes"
            )
            self._run.log.event("slow_rank", ranks=ranks, waited_s=waited_s, share=share, num_steps=num_steps)
