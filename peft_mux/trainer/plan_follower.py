"""`PlanFollower`: the plan of a run, made anew whenever tasks come or go, and the work that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.dispatch import DispatchClock, DispatchedShares
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.steps import BatchesAhead, StepSource
from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.engine.work import StepResult, StepTimes, StepWork
from peft_mux.errors import PeftMuxError
from peft_mux.planning.deployment import report_deployment
from peft_mux.planning.learning import Forecast
from peft_mux.planning.planner import Planner
from peft_mux.planning.replica_facts import LayerProfile, run_time_model
from peft_mux.reporting.pass_report import PassReport, StepSeconds, TokenCounts
from peft_mux.scheduler.costs.profile import Parts, factors_of
from peft_mux.scheduler.deployment.report import DeploymentReport
from peft_mux.scheduler.dispatching.ahead import ReplicaRates
from peft_mux.scheduler.plan import Plan
from peft_mux.task import TaskStatus
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run, StepTime
from peft_mux.trainer.world import World

_SAVED_AS = "time factor, "
_MOST_TOKENS = "most tokens of a pass"


class FollowedPlan(NamedTuple):
    """A plan and what came of it.

    Attributes:
        plan: the plan; `None` where there was none.
        num_steps: steps that followed it.
        times: the passes of the last of these, as they were timed on this process.
    """

    plan: Plan | None = None
    num_steps: int = 0
    times: StepTimes = StepTimes()


class PlanFollower:
    """Makes plans and follows them.

    What is admitted by a plan is started; what is not waits with a reason, until a plan made anew admits it.
    `plan` only answers, `replan` makes the plan that is followed, and `next_work` turns that one into steps.

    Args:
        run: the run under way.
        world: all processes of the run.
        placement: the model of this process, which starts the tasks that a plan admits.
        planner: makes the plans of this run.
        collator: packs the rows of each step.

    Attributes:
        planner: makes the plans, and learns from the times of steps.
        current: the plan that is followed; `None` before the first one.
        pass_report: the passes of this process's replica, as planned and as run.
        seconds: what the passes and updates of all steps took on this process.
        token_counts: computed and asked tokens of these passes.
        followed: the plan that was followed for most steps so far, and its last step as it was timed on this process.
    """

    def __init__(
        self, run: Run, world: World, placement: Placement, planner: Planner, collator: ChunkPackingCollator
    ) -> None:
        """Follow no plan yet."""
        self.planner = planner
        self.current: Plan | None = None
        self._run, self._world, self._placement, self._collator = run, world, placement, collator
        # Rows that were read early belong to their tasks, and outlive a plan.
        self._ahead = BatchesAhead(run.log.delays.note)
        self._steps: StepSource | None = None
        self._clock: DispatchClock | None = None
        self._last_step: StepTime | None = None
        self._forecast = Forecast()
        self.pass_report = PassReport()
        self.seconds = StepSeconds()
        self.followed = self._following = FollowedPlan()
        self.token_counts = TokenCounts()
        self._counted_before = self.pass_report, self.token_counts
        self._waited_s = 0.0
        self._looked_at = 0
        self._rates: ReplicaRates | None = None
        self._rates_of: ParallelLayout | None = None
        placement.subscribe(self._follow_model)
        run.saver.decided_by = self._factors_in_force

    def _follow_model(self) -> None:
        """Plan for the model that there is now, and for as many replicas as there are now."""
        self.planner.plan_for(self._placement.outline, num_replicas=self._world.layout.num_replicas)

    # ------------------------------------------------------------------ plans

    def plan(
        self, devices: str | None = None, *, num_stages: int | None = None, devices_per_stage: int | None = None
    ) -> Plan:
        """Return the plan for this run's processes, or for other devices; nothing is changed.

        Args:
            devices: devices that are not here, such as "4xA100-80GB"; by default the run's own processes.
            num_stages: stages of a pipeline over `devices`; by default as the arguments ask, or one of all devices.
            devices_per_stage: devices that share each layer; by default as the arguments ask.

        Raises:
            ConfigError: if nothing fits into memory, or for devices that are unknown or cannot be divided so.
        """
        runs = self._run.table.plannable
        other = {"devices": devices, "num_stages": num_stages, "devices_per_stage": devices_per_stage}
        pipeline = self.own_pipeline if devices is None else other
        plan = self.planner.plan(runs, running=self._running_names, **pipeline)
        names = {name for htask in plan.htasks for name in htask.tasks}
        if len(names) < 2:
            return plan
        # Only for who asks: each task is planned by itself for this, which replans need not wait for.
        alone_s = self.alone_s([run for run in runs if run.name in names], **pipeline)
        shares = (replace(share, alone_s=alone_s.get(share.name, 0.0)) for share in plan.shares)
        return replace(plan, shares=tuple(shares))

    def alone_s(self, runs: Sequence[TaskRun], **pipeline: Any) -> dict[str, float]:
        """Return the predicted seconds of a step of each task if it trained alone; none where that cannot be told.

        Args:
            runs: the tasks, ended ones too.
            **pipeline: what they would train on; by default the run's own processes.
        """
        try:
            return self.planner.alone_s(runs, **(pipeline or self.own_pipeline))
        # A task that fits beside others fits alone; but whatever a plan fails on, what is told beside it is no reason.
        except (PeftMuxError, ValueError):
            return {}

    def plan_stages(self) -> Plan:
        """Return the plan by which a model is cut into stages, the same on every process."""
        # One process alone may have planned before, and for other tasks.
        self.planner.forget_cuts()
        return self._plan_here()

    def _plan_here(self) -> Plan:
        return self.planner.plan(self._run.table.plannable, running=self._running_names, **self.own_pipeline)

    def plan_deployment(self, devices: str | None, measured: LayerProfile | None) -> DeploymentReport:
        """Return the replicas that would train these tasks fastest (L section 4.2)."""
        return report_deployment(self.planner, self._run.table.plannable, devices, measured=measured)

    def replan(self) -> Plan:
        """Make the plan anew from what was learnt, follow it, and start the tasks that it admits.

        Raises:
            ConfigError: if not even one task fits into memory.
        """
        table = self._run.table
        if self._decides:
            self.planner.correction.take_up()
        plan = self._plan_here()
        self.planner.correction.begin_plan()
        admitted = {name for htask in plan.htasks for name in htask.tasks}
        reasons = {one.name: one.reason for one in plan.waiting}
        for run in [run for run in table if run.status is TaskStatus.WAITING]:
            # A plan may be made before there are weights; then the one that `train` begins with starts the tasks.
            if run.name in admitted and self._placement.is_placed:
                self._placement.start(run)
            if run.status is TaskStatus.WAITING:
                run.reason = reasons.get(run.name, "")
        self._steps = self._new_steps(plan)
        self.current = plan if self._steps is None else self._with_dispatched_rows(plan, self._steps.shares)
        self._run.callbacks.news.plan = self.current
        if self._placement.is_placed:
            self._placement.placed.executor.follow(plan)
        return plan

    def _with_dispatched_rows(self, plan: Plan, shares: DispatchedShares) -> Plan:
        """Return the plan with the passes of unlike replicas, whose rows are dispatched as those of a step are."""
        if not shares.looks_ahead:
            return plan
        names = {name for htask in plan.htasks for name in htask.tasks}
        runs = [run for run in self._run.table.plannable if run.name in names]
        rows = shares.typical_rows(self.planner.typical_batches(runs))
        if rows is None:
            return plan
        bound = plan.max_tokens_per_micro_batch
        return self.planner.with_rows(plan, runs, rows, [min(bound, most or bound) for most in shares.max_tokens])

    def replan_if_faster(self) -> bool:
        """Plan anew where the times that were measured make another plan faster; every process calls this alike.

        Looked at every `replan_steps` steps, and only if a part takes another time than the plan was made with; the
        other plan has to be faster by `replan_gain`, so that plans do not alternate.

        Returns:
            Whether there is another plan now.
        """
        run, correction, processes = self._run, self.planner.correction, self._world.processes
        # Since the last look, as a pipeline that is not flushed takes several steps between two looks.
        if not self._decides or self.current is None or run.state.global_step - self._looked_at < run.args.replan_steps:
            return False
        self._looked_at = run.state.global_step
        self.share_times()
        if not correction.differs:
            return False
        gain = self.planner.gain_of(
            self.current,
            correction.agreed,
            run.table.plannable,
            running=self._running_names,
            **self.own_pipeline,
        )
        # Unlike replicas have unlike plans, and all of them change theirs or none, as they begin it together.
        gain = max(microns / 1e6 for (microns,) in processes.exchange([round(gain * 1e6)]))
        if gain < run.args.replan_gain:
            return False
        run.log.say(f"another plan is {gain:.0%} faster by the times that were measured: {correction.agreed}")
        run.log.event("replanned", gain=gain, **correction.agreed._asdict())
        self.replan()
        return True

    def share_times(self) -> None:
        """Let all processes know what each of them has learnt of times; every one of them calls this alike."""
        correction = self.planner.correction
        correction.agree(self._world.processes.gather(correction.fit.numbers()))

    def _factors_in_force(self) -> dict[str, float]:
        """Return what a state has to hold so that the run goes on with the plan that it has."""
        factors = self.planner.correction.factors._asdict() if self._decides else {}
        found = {_SAVED_AS + name: factor for name, factor in factors.items()}
        return found if self.planner.most_tokens is None else {**found, _MOST_TOKENS: self.planner.most_tokens}

    def restore_times(self, saved: Mapping[str, Any]) -> None:
        """Plan as the run did whose state is gone on from; rates of replicas are measured anew.

        Args:
            saved: what decided the bits of that run, by name, of which factors are read if there are any.
        """
        self._looked_at = 0
        self.planner.most_tokens = saved.get(_MOST_TOKENS)
        factors = factors_of({name: saved.get(_SAVED_AS + name) for name in Parts._fields})
        if self._decides and factors is not None:
            self.planner.correction.restore(factors)

    @property
    def _decides(self) -> bool:
        """Whether measured times change what runs together."""
        return self._run.args.measured_times == "plan"

    @property
    def max_tokens(self) -> int:
        """Tokens that a pass may hold, as far as it is known what fits into memory."""
        asked = self._run.args.max_tokens_per_micro_batch
        return asked if self.current is None else self.current.max_tokens_per_micro_batch

    @property
    def dispatch_clock(self) -> DispatchClock | None:
        """What dividing rows among unlike replicas has cost; `None` where no plan has been followed."""
        return self._clock if self._steps is None else self._steps.shares.clock

    @property
    def _running_names(self) -> list[str]:
        return [run.name for run in self._run.table.running]

    @property
    def own_pipeline(self) -> dict[str, Any]:
        """How the processes of this run share the backbone, as the planner is told."""
        return {
            "num_stages": self._placement.part.num_stages,
            # All processes must admit the same tasks: unlike replicas plan as the least divided kind would.
            "devices_per_stage": self._placement.part.tp_size if self._world.layout.are_alike else 1,
            "schedule": self._run.args.pipeline_schedule,
        }

    def _new_steps(self, plan: Plan) -> StepSource | None:
        """Return what turns a plan into steps; `None` where there is nothing to do."""
        if self._steps is not None:
            # What dividing has cost is told of the whole run, over all its plans.
            self._steps.shares.close()
            self._clock = self._steps.shares.clock
        layout, processes, runs = self._world.layout, self._world.processes, self._run.table.plannable
        if not runs:
            return None
        times = None if layout.are_alike else run_time_model(self.planner, runs, layout)
        policy: Any = self._run.args.dispatch
        cuts_rows = self._run.args.split_long_sequences
        if self._decides and (self._rates is None or self._rates_of != layout):
            self._rates, self._rates_of = ReplicaRates(layout.num_replicas), layout
        options: dict[str, Any] = {"policy": policy, "clock": self._clock, "rates": self._rates}
        shares = DispatchedShares(layout, times, processes, cuts_rows=cuts_rows, **options)
        return StepSource(plan, self._collator, processes, layout, shares, self._ahead)

    # ------------------------------------------------------------------ steps

    def next_work(self) -> StepWork:
        """Return the next step of all running tasks; where that takes time, the one after it is begun."""
        assert self._steps is not None, "a run that has running tasks follows a plan"
        running = self._run.table.running
        self._waited_s = self._world.processes.waited_s
        work = self._steps.next(running)
        self._compare_passes(work)
        self._run.log.rows.step(running)
        # Begun before this step runs, so that reading and dividing the next one are hidden behind it.
        self._steps.prepare(run for run in running if run.name not in work.failures)
        return work

    def smaller_work(self, work: StepWork, max_tokens: int) -> StepWork:
        """Return the same step in smaller passes, and plan for passes of so many tokens from now on.

        Args:
            work: the step, which no task has taken.
            max_tokens: the most tokens of a pass that are left to try.
        """
        self.planner.most_tokens = max_tokens
        self._ahead.put_back()
        self.pass_report, self.token_counts = self._counted_before
        self.replan()
        assert self._steps is not None, "a run that has running tasks follows a plan"
        again = self._steps.next(run for run in self._run.table.running if run.name not in work.failures)
        self._compare_passes(again)
        return replace(again, failures={**work.failures, **again.failures})

    def next_works(self, num_steps: int) -> list[StepWork]:
        """Return the next steps of all running tasks, or fewer where rows cannot be read.

        Args:
            num_steps: number of steps, within which no task ends.
        """
        assert self._steps is not None, "a run that has running tasks follows a plan"
        self._waited_s = self._world.processes.waited_s
        works = self._steps.window(self._run.table.running, num_steps)
        self._run.log.rows.step(self._run.table.running)
        for work in works:
            self._compare_passes(work)
        return works

    def _compare_passes(self, work: StepWork) -> None:
        """Count whether a step has the passes that the plan says."""
        replica = self._world.layout.place(self._world.processes.rank).replica
        self._counted_before = self.pass_report, self.token_counts
        self.token_counts = self.token_counts.after(work.micro_batches)
        if self.current is not None and replica < len(self.current.passes):
            self.pass_report = self.pass_report.after(self.current.passes[replica], work.micro_batches)

    def drop_read_ahead(self, name: str) -> None:
        """Forget what was read early of a task that was removed."""
        self._ahead.drop(name)

    # ------------------------------------------------------------------ times

    def record_step_time(self, result: StepResult, seconds: float, *, num_steps: int = 1) -> None:
        """Remember what the step just taken took on this process; a process that is alone learns from it at once.

        Args:
            result: what came of the step.
            seconds: seconds of its passes and updates.
            num_steps: so many steps took this time each, where a pipeline is not flushed between them.
        """
        times = self._placement.placed.executor.clock.take()
        before = self._following.num_steps if self._following.plan is self.current else 0
        self.seconds.add(seconds, num_steps, is_first=not before)
        self._following = FollowedPlan(self.current, before + num_steps, times)
        if self._following.num_steps >= self.followed.num_steps:
            self.followed = self._following
        width = 1 if self.current is None else self.current.passes_in_turns
        prices = self.planner.prices(self._placement.part.place.stage, width)
        if prices is not None:
            # Of a window of steps that is not flushed, nothing lies between passes that could be told: it says nothing.
            between_s = seconds - times.span_s - (self._world.processes.waited_s - self._waited_s)
            self.planner.correction.observe_passes(times, between_s, result.num_tokens, prices)
        # With its plan: by the time that the processes have told their times, there may be another one.
        self._last_step = StepTime(self.current, sum(result.num_tokens.values()), seconds, times.span_s)
        if self._world.processes.is_alone:
            self.observe_step_time(seconds)

    @property
    def last_step_s(self) -> float:
        """Seconds of the last step that nothing was learnt from yet; 0 where there is none."""
        return 0.0 if self._last_step is None else self._last_step.seconds

    @property
    def last_passes_s(self) -> float:
        """Seconds of these from the first pass to the end of the last one."""
        return 0.0 if self._last_step is None else self._last_step.passes_s

    def observe_step_time(self, seconds: float, process_s: Sequence[float] = ()) -> None:
        """Compare the last step with its prediction, once, and replicas with one another.

        Args:
            seconds: what the step took: here, or on the slowest process.
            process_s: seconds of the passes of each process, by rank; none for a process that is alone.
        """
        last, self._last_step = self._last_step, None
        if last is None or last.plan is None:
            return
        correction = self.planner.correction
        correction.observe(last.plan, last.num_tokens, seconds)
        left = {run.name: run.num_steps - run.step for run in self._run.table.running}
        found = self._forecast.held_against(last.plan, correction.time_ratio, left)
        if found is not None:
            self._run.log.say(found.line)
            predicted = {"predicted_s": found.predicted_s, "corrected_s": found.corrected_s}
            self._run.log.event("forecast", ratio=found.ratio, **predicted)
        if self._steps is not None and len(process_s) > 1:
            self._steps.shares.observe(process_s)
