"""The part of `MultiTaskTrainer` that plans: before a run, when tasks come or go, and for devices that are not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from peft_mux.engine.dispatcher import Dispatcher
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.profile import Profile
from peft_mux.task import TaskStatus
from peft_mux.task_run import TaskRun, TaskTable

if TYPE_CHECKING:
    from peft_mux.arguments import MultiTaskTrainingArguments
    from peft_mux.backbone import Backbone
    from peft_mux.data.collator import ChunkPackingCollator
    from peft_mux.planning import Planner
    from peft_mux.team import Team


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
    _executor: Any
    _dispatcher: Dispatcher | None
    _team: Team
    _start: Callable[[TaskRun], None]

    def plan(self, devices: str | None = None) -> Plan:
        """Return what would run together, in how many passes, how fast, and in how much memory; allocates nothing.

        Args:
            devices: plan for other devices than this machine's, such as "4xA100-80GB", as stages of a pipeline.

        Raises:
            ConfigError: if nothing fits into memory, naming the cheapest fixes; or for unknown devices.
        """
        running = [run.name for run in self.table.running]
        return self._planner_of_model().plan(self._plannable, running=running, devices=devices)

    def measure_profile(self, budget_s: float = 60.0) -> Profile:
        """Measure how long the parts of a step take on this device, for `cost_profile`; reads and changes no weights.

        Args:
            budget_s: seconds that this may take.
        """
        from peft_mux.profiling import profile_backbone

        dtype = torch.bfloat16 if self.args.bf16 else self._source.dtype
        return profile_backbone(self.model, device=self.args.device, dtype=dtype, budget_s=budget_s)

    def _replan(self) -> Plan:
        """Plan anew, start the tasks that are admitted now, and follow the plan from the next step on."""
        plan = self._planner_of_model().replan(self._plannable, running=[run.name for run in self.table.running])
        admitted = {name for htask in plan.htasks for name in htask.tasks}
        for run in list(self.table):
            if run.status is TaskStatus.WAITING and run.name in admitted and self._executor is not None:
                self._start(run)
        reasons = {one.name: one.reason for one in plan.waiting}
        for run in self.table:
            if run.status is TaskStatus.WAITING:
                run.reason = reasons.get(run.name, "")
        self._plan, self._dispatcher = plan, Dispatcher(plan, self._collator, self._team.processes)
        return plan

    @property
    def _plannable(self) -> list[TaskRun]:
        return [run for run in self.table if not run.status.is_final and run.status is not TaskStatus.PAUSED]

    def _planner_of_model(self) -> Planner:
        self._planner.model = self.model  # a description at first, and then the model itself
        return self._planner
