"""The part of `MultiTaskTrainer` that plans: before a run, when tasks come or go, and for devices that are not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from peft_mux.deployment_facts import run_time_model
from peft_mux.deployment_planning import plan_deployment
from peft_mux.engine.batches_ahead import BatchesAhead
from peft_mux.engine.dispatcher import Dispatcher
from peft_mux.engine.replica_dispatch import DispatchClock, ReplicaShares
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.profile import Profile
from peft_mux.task import TaskStatus
from peft_mux.task_run import TaskRun, TaskTable

if TYPE_CHECKING:
    from peft_mux.arguments import MultiTaskTrainingArguments
    from peft_mux.backbone import Backbone
    from peft_mux.data.collator import ChunkPackingCollator
    from peft_mux.model_part import ModelPart
    from peft_mux.planning import Planner
    from peft_mux.scheduler.deployment_report import DeploymentReport
    from peft_mux.task_evaluation import TaskEvaluator
    from peft_mux.team import Team


class StepTime(NamedTuple):
    """What a step took on this process.

    Attributes:
        plan: that it followed.
        num_tokens: of all tasks, on all processes.
        seconds: of passes and updates.
    """

    plan: Plan | None
    num_tokens: int
    seconds: float


class PlannedRun:
    """Makes plans and follows them.

    What is admitted by a plan is started; what is not waits with a reason, until a plan made anew admits it.
    """

    args: MultiTaskTrainingArguments
    model: Any
    table: TaskTable
    _source: Backbone
    _collator: ChunkPackingCollator
    _planner: Planner
    _plan: Plan | None
    _last_step: StepTime | None
    _executor: Any
    _evaluator: TaskEvaluator | None
    _dispatcher: Dispatcher | None
    _ahead: BatchesAhead
    _clock: DispatchClock | None = None
    _team: Team
    _part: ModelPart
    _outline: Any
    _start: Callable[[TaskRun], None]

    def plan(self, devices: str | None = None) -> Plan:
        """Return what would run together, in how many passes, how fast, and in how much memory; allocates nothing.

        Args:
            devices: plan for other devices than this machine's, such as "4xA100-80GB", as stages of a pipeline.

        Raises:
            ConfigError: if nothing fits into memory, naming the cheapest fixes; or for unknown devices.
        """
        if devices is None:
            return self._plan_of_run()
        running = [run.name for run in self.table.running]
        return self._planner_of_model().plan(self._plannable, running=running, devices=devices)

    def _plan_of_run(self) -> Plan:
        """Return the plan for the processes that there are; nothing is changed."""
        running = [run.name for run in self.table.running]
        return self._planner_of_model().plan(self._plannable, running=running, **self._own_pipeline)

    @property
    def _own_pipeline(self) -> dict[str, Any]:
        return {
            "num_stages": self._part.num_stages,
            # All processes must admit the same tasks: unlike replicas plan as the least divided kind would.
            "devices_per_stage": self._part.num_shards if self._team.layout.are_alike else 1,
            "schedule": self.args.pipeline_schedule,
        }

    def plan_deployment(self, devices: str | None = None) -> DeploymentReport:
        """Return the replicas that would train these tasks fastest (LobRA), and what stands beside them.

        Args:
            devices: such as "16xA100-40GB"; by default those that the run was started on.

        Raises:
            ConfigError: for unknown devices, no tasks, or tasks that no replica can hold.
        """
        return plan_deployment(self._planner_of_model(), self._plannable, devices)

    def measure_profile(self, budget_s: float = 60.0, *, folder: Path | None = None, refresh: bool = False) -> Profile:
        """Measure how long the parts of a step take on this device, for `cost_profile`; reads and changes no weights.

        Where there are several processes, each must call this, and the link between them is measured too.

        Args:
            budget_s: seconds that this may take.
            folder: of stored profiles, from which one that fits is read instead; `None` to store nothing.
            refresh: measure although a stored profile fits.
        """
        from peft_mux.profiling import profile_backbone
        from peft_mux.profiling_link import measure_link

        device = self.args.device
        return profile_backbone(
            self.model,
            device=device,
            dtype=torch.bfloat16 if self.args.bf16 else self._source.dtype,
            budget_s=budget_s,
            folder=folder,
            refresh=refresh,
            link=measure_link(device),
        )

    def _replan(self) -> Plan:
        """Plan anew, start the tasks that are admitted now, and follow the plan from the next step on."""
        running = [run.name for run in self.table.running]
        plan = self._planner_of_model().replan(self._plannable, running=running, **self._own_pipeline)
        admitted = {name for htask in plan.htasks for name in htask.tasks}
        for run in list(self.table):
            if run.status is TaskStatus.WAITING and run.name in admitted and self._executor is not None:
                self._start(run)
        reasons = {one.name: one.reason for one in plan.waiting}
        for run in self.table:
            if run.status is TaskStatus.WAITING:
                run.reason = reasons.get(run.name, "")
        self._plan = plan
        self._dispatcher = self._new_dispatcher(plan)
        if self._executor is not None:
            self._executor.follow(plan)
        if self._evaluator is not None:
            self._evaluator.max_tokens = self._max_tokens
        return plan

    def _learn(self, seconds: float) -> None:
        """Let the planner compare the last step with its prediction, once."""
        if self._last_step is not None and self._last_step.plan is not None:
            self._planner_of_model().observe(self._last_step.plan, self._last_step.num_tokens, seconds)
        self._last_step = None

    @property
    def _max_tokens(self) -> int:
        """Tokens that a pass may hold, as far as it is known what fits into memory."""
        asked = self.args.max_tokens_per_micro_batch
        return asked if self._plan is None else self._plan.max_tokens_per_micro_batch

    def _new_dispatcher(self, plan: Plan) -> Dispatcher | None:
        """Return what follows a plan; `None` where there is nothing to do."""
        if self._dispatcher is not None:
            self._dispatcher.shares.close()
            self._clock = self._dispatcher.shares.clock
        layout, processes, runs = self._team.layout, self._team.processes, self._plannable
        if not runs:
            return None
        times = None if layout.are_alike else run_time_model(self._planner_of_model(), runs, layout)
        policy: Any = self.args.dispatch
        cuts_rows = self.args.split_long_sequences
        shares = ReplicaShares(layout, times, processes, policy=policy, clock=self._clock, cuts_rows=cuts_rows)
        return Dispatcher(plan, self._collator, processes, layout, shares, self._ahead)

    @property
    def _plannable(self) -> list[TaskRun]:
        return [run for run in self.table if not run.status.is_final and run.status is not TaskStatus.PAUSED]

    def _planner_of_model(self) -> Planner:
        self._planner.model = self._outline  # a description at first, and then the model itself, if it is whole
        return self._planner
