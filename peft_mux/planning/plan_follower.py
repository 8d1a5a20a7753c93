"""`PlanFollower`: owns the plan of a run, makes another whenever tasks come or go, and turns it into work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from peft_mux.engine.steps import BatchesAhead, StepSource
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.errors import PeftMuxError
from peft_mux.parallel.dispatch import BatchRows, DispatchedShares
from peft_mux.planning.measurements import Measurements
from peft_mux.planning.planner import Planner
from peft_mux.planning.replica_facts import run_time_model
from peft_mux.planning.task_loads import part_of
from peft_mux.scheduler.costs.hardware import Cluster
from peft_mux.scheduler.costs.profile import Parts
from peft_mux.scheduler.dispatching.dispatch import ReplicaRates
from peft_mux.scheduler.parallel_layout import ParallelLayout
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.planned_passes import planned_passes
from peft_mux.task import TaskStatus
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run, StepTime

_SAVED_AS = "time factor, "
_MOST_TOKENS = "most tokens of a pass"


class PlanFollower:
    """Makes plans and follows them.

    A task that a plan admits is started; the others wait with a reason, until a later plan admits them. `plan` only
    answers, `replan` makes the plan that is followed, and `next_works` turns that one into steps. No other part of a
    run keeps a plan.

    Args:
        run: the present run.
        placement: the model of this process, which starts the tasks that a plan admits.
        planner: makes the plans of this run, and has the collator that packs its rows.

    Attributes:
        planner: makes the plans, and learns from the times of steps.
        current: the plan that is followed; `None` before the first one.
        measured: compares each step with the plan that it follows.
        ahead: rows that were read before their step.
    """

    def __init__(self, run: Run, placement: Placement, planner: Planner) -> None:
        self.planner = planner
        self.measured = Measurements(run, placement, planner)
        self.current: Plan | None = None
        self._run, self._placement = run, placement
        # Rows that were read early belong to their tasks, and outlive a plan.
        self.ahead = BatchesAhead(run.log.note_user_code)
        self._steps: StepSource | None = None
        self._looked_at = 0
        self._rates: ReplicaRates | None = None
        self._rates_of: ParallelLayout | None = None
        # Whether measured times change what runs together.
        self._applies_times = run.args.measured_times == "plan"
        run.saver.decided_by, placement.plan_stages = self._saved_decisions, self.plan_stages

    def follow_model(self) -> None:
        """Plan for the model that there is now, and for as many replicas as there are now."""
        self.planner.model, self.planner.num_replicas = self._placement.outline, self._run.layout.num_replicas
        self.measured.forget_replicas()

    # ------------------------------------------------------------------ plans

    def plan(self, devices: str | Cluster | None = None, **stages: int | None) -> Plan:
        """Return the plan for this run's processes, or for other devices; see `MultiTaskTrainer.plan`."""
        tasks = self._run.table.plannable
        pipeline = self.pipeline if devices is None else {"devices": devices, **stages}
        plan = self._plan_for(pipeline)
        names = {name for htask in plan.htasks for name in htask.tasks}
        if len(names) < 2:
            return plan
        # Only here: each task is planned alone for this, which replans need not wait for.
        alone_s = self.alone_s([task for task in tasks if task.name in names], **pipeline)
        return replace(
            plan, shares=tuple(replace(share, alone_s=alone_s.get(share.name, 0.0)) for share in plan.shares)
        )

    def _plan_for(self, pipeline: Mapping[str, Any]) -> Plan:
        running = [task.name for task in self._run.table.running]
        return self.planner.plan(self._run.table.plannable, running=running, **pipeline)

    def alone_s(self, tasks: Sequence[ActiveTask], **pipeline: Any) -> dict[str, float]:
        """Return the predicted seconds of a step of each task if it trained alone; none if that is not known.

        Args:
            tasks: the tasks, ended ones too.
            **pipeline: what they would train on; by default the run's own processes.
        """
        try:
            return self.planner.alone_s(tasks, **(pipeline or self.pipeline))
        # A task that fits together with others fits alone; but no failure of this is a reason to have no plan.
        except (PeftMuxError, ValueError):
            return {}

    def plan_stages(self) -> Plan:
        """Return the plan by which a model is cut into stages, the same on every process."""
        # One process alone may have planned before, and for other tasks.
        self.planner.cuts.clear()
        return self._plan_for(self.pipeline)

    def replan(self, resumed: Mapping[str, Any] | None = None) -> Plan:
        """Make another plan from what was learnt, follow it, and start the tasks that it admits.

        Args:
            resumed: what decided the bits of the run that is resumed, by name, to plan as it did; factors of times are
                among it if that run applied them. Rates of replicas are measured again.

        Raises:
            ConfigError: if not even one task fits into memory.
        """
        correction = self.planner.correction
        if resumed is not None:
            self._looked_at = 0
            self.planner.most_tokens = resumed.get(_MOST_TOKENS)
            factors = [resumed.get(_SAVED_AS + name) for name in Parts._fields]
            if self._applies_times and all(isinstance(factor, float) and 1e-6 < factor < 1e6 for factor in factors):
                correction.restore(Parts(*factors))
        # Rows that were read for a task which has left would be held for the rest of the run.
        self.ahead.keep_only(task.name for task in self._run.table)
        if self._applies_times:
            correction.factors = correction.agreed
        plan = self._plan_for(self.pipeline)
        correction.begin_plan()
        admitted = {name for htask in plan.htasks for name in htask.tasks}
        reasons = {left_out.name: left_out.reason for left_out in plan.waiting}
        for task in [task for task in self._run.table if task.status is TaskStatus.WAITING]:
            # A plan may be made before there are weights; then the one that `train` begins with starts the tasks.
            if task.name in admitted and self._placement.is_loaded:
                self._placement.start(task)
            if task.status is TaskStatus.WAITING:
                task.reason = reasons.get(task.name, "")
        self.follow(plan)
        return plan

    def follow(self, plan: Plan) -> None:
        """Take the next steps by a plan; benchmarks compare plans by this."""
        if self._steps is not None:
            self._steps.shares.close()
        self.current, self._steps = plan, None
        layout, processes, args = self._run.layout, self._run.processes, self._run.args
        tasks = self._run.table.plannable
        if tasks and layout.num_replicas == 1:
            self._steps = StepSource(plan, self.planner.collator, processes, ahead=self.ahead)
        elif tasks:
            if self._applies_times and (self._rates is None or self._rates_of != layout):
                self._rates, self._rates_of = ReplicaRates(layout.num_replicas), layout
            policy: Any = args.dispatch
            shares = DispatchedShares(
                layout,
                None if layout.are_alike else run_time_model(self.planner, tasks, layout),
                processes,
                policy=policy,
                clock=self.measured.dispatch_clock,
                rates=self._rates,
                cuts_rows=args.split_long_sequences,
            )
            self.measured.dispatch_clock = shares.clock
            # The passes of unequal replicas, whose rows are dispatched as in a step.
            names = {name for htask in plan.htasks for name in htask.tasks}
            loads = [self.planner.load_of(task) for task in tasks if task.name in names] if shares.looks_ahead else []
            rows = shares.typical_rows([BatchRows(load.name, 0, load.lengths, load.trie) for load in loads])
            if rows is not None:
                passes = []
                for rows_of, most_tokens in zip(rows, shares.max_tokens, strict=True):
                    bound = min(plan.max_tokens_per_micro_batch, most_tokens or plan.max_tokens_per_micro_batch)
                    parts = [part_of(load, rows_of[load.name]) for load in loads]
                    passes.append(planned_passes(plan.htasks, parts, self.planner.collator.rules, bound))
                self.current = plan = replace(plan, passes=tuple(passes))
            self._steps = StepSource(plan, self.planner.collator, processes, shares, self.ahead)
        self._run.callbacks.plan = plan
        if self._placement.is_loaded:
            self._placement.executor.follow(plan)

    def replan_if_faster(self) -> bool:
        """Follow another plan if it is faster by the times that were measured; every process calls this at once.

        Checked every `replan_steps` steps, and only if the time of a part differs from the one in the plan; the other
        plan must be faster by `replan_gain`, so that plans do not alternate.

        Returns:
            Whether there is another plan now.
        """
        run, correction, processes = self._run, self.planner.correction, self._run.processes
        # Since the last check, as a pipeline that is not flushed takes several steps between two checks.
        steps_since = run.state.global_step - self._looked_at
        if not self._applies_times or self.current is None or steps_since < run.args.replan_steps:
            return False
        self._looked_at = run.state.global_step
        self.measured.exchange()
        if not correction.differs:
            return False
        running = [task.name for task in run.table.running]
        options = {"running": running, **self.pipeline}
        gain = self.planner.gain_of(self.current, correction.agreed, run.table.plannable, **options)
        # Unequal replicas have different plans, and either all of them change theirs or none.
        gain = max(microns / 1e6 for (microns,) in processes.exchange([round(gain * 1e6)]))
        if gain < run.args.replan_gain:
            return False
        run.log.say(f"another plan is {gain:.0%} faster by measured times: {correction.agreed}")
        run.log.event("replanned", gain=gain, **correction.agreed._asdict())
        self.replan()
        return True

    def _saved_decisions(self) -> dict[str, float]:
        """Return what a state must contain so that a resumed run follows the plan that it had."""
        factors = self.planner.correction.factors._asdict() if self._applies_times else {}
        saved = {_SAVED_AS + name: factor for name, factor in factors.items()}
        return saved if self.planner.most_tokens is None else {**saved, _MOST_TOKENS: self.planner.most_tokens}

    def max_tokens(self) -> int:
        """Return the tokens that a pass may hold, as far as is known from the memory."""
        asked = self._run.args.pass_tokens()
        return asked if self.current is None else self.current.max_tokens_per_micro_batch

    @property
    def pipeline(self) -> dict[str, Any]:
        """How the processes of this run share the backbone, as the planner takes it."""
        return {
            "num_stages": self._placement.part.num_stages,
            # All processes must admit the same tasks: unequal replicas plan like the least divided kind.
            "devices_per_stage": self._placement.part.tp_size if self._run.layout.are_alike else 1,
            "schedule": self._run.args.pipeline_schedule,
        }

    # ------------------------------------------------------------------ steps

    def next_works(self, num_steps: int = 1) -> list[StepWork]:
        """Return the next steps of all running tasks, within which no task ends; fewer if rows cannot be read.

        If reading takes time, the step after a single one is begun.
        """
        assert self._steps is not None, "a run that has running tasks follows a plan"
        running = self._run.table.running
        self.measured.begin_step()
        works = self._steps.window(running, num_steps)
        for work in works:
            self.measured.count_passes(self._steps.plan, work)
        self._run.log.step_rows(running)
        if num_steps == 1:
            # Begun before this step runs, so that reading and dividing the next one are hidden behind it.
            self._steps.prepare(task for task in running if task.name not in works[0].failures)
        return works

    def smaller_work(self, work: StepWork, max_tokens: int) -> StepWork:
        """Return the same step in smaller passes, and plan for passes of at most `max_tokens` from now on.

        Args:
            work: the step, which no task has taken.
            max_tokens: the most tokens of a pass that are left to try.
        """
        self.planner.most_tokens = max_tokens
        self.ahead.put_back()
        self.replan()
        assert self._steps is not None, "a run that has running tasks follows a plan"
        again = self._steps.next(task for task in self._run.table.running if task.name not in work.failures)
        self.measured.count_passes(self._steps.plan, again, repeats=True)
        return replace(again, failures={**work.failures, **again.failures})

    def record_step(self, result: StepResult, seconds: float, *, num_steps: int = 1) -> StepTime:
        """Return what the last step took on this process; see `Measurements.record_step`."""
        return self.measured.record_step(result, seconds, num_steps=num_steps)

    def compare_step(self, step: StepTime, slowest_s: float, process_s: Sequence[float]) -> None:
        """Compare a step with its prediction, and give slow replicas fewer rows if measured times are applied.

        Args:
            step: what it took on this process.
            slowest_s: what it took on the slowest process.
            process_s: seconds of the passes of each process in it, by rank; zeros if there was none.
        """
        self.measured.compare_step(step, slowest_s, process_s)
        if self._steps is not None and len(process_s) > 1:
            self._steps.shares.observe(process_s)
