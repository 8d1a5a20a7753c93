"""The part of `MultiTaskTrainer` that knows of processes: it places the model, and moves a run to other replicas."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from peft_mux.checkpoint import RunFolder
from peft_mux.deployment_planning import redeploy as decide_on_move
from peft_mux.engine.isolation import LastGood
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.task_state import TaskState, split_state
from peft_mux.engine.whole_state import gather_task
from peft_mux.engine.work import StepExecutor
from peft_mux.errors import CheckpointError, ConfigError, UnsupportedModelError
from peft_mux.evaluation import RowShare
from peft_mux.model_part import ModelPart
from peft_mux.optim import TaskOptimizer
from peft_mux.scheduler.redeployment import DEFAULT_RESTART_S
from peft_mux.snapshot import put_snapshot, take_snapshot
from peft_mux.task import TaskStatus
from peft_mux.task_evaluation import TaskEvaluator
from peft_mux.task_run import TaskRun, TaskTable
from peft_mux.team import layout_of_text

if TYPE_CHECKING:
    from peft_mux.arguments import MultiTaskTrainingArguments
    from peft_mux.backbone import Backbone
    from peft_mux.data.collator import ChunkPackingCollator
    from peft_mux.planning import Planner
    from peft_mux.run_log import RunLog
    from peft_mux.saving import Saver
    from peft_mux.scheduler.plan import Plan
    from peft_mux.task import Task
    from peft_mux.team import Team


class DeployedRun:
    """Holds this process's part of the model and what runs it.

    Moving to other replicas (L section 5.1) is saving all tasks, making every part anew and going on from what was
    saved; the backbone is read again from where it came, never written.
    """

    args: MultiTaskTrainingArguments
    model: Any
    tasks: list[Task]
    table: TaskTable
    state: Any
    callback_handler: Any
    _source: Backbone
    _collator: ChunkPackingCollator
    _planner: Planner
    _log: RunLog
    _saver: Saver
    _team: Team
    _part: ModelPart
    _outline: Any
    _class_counts: dict[str, int]
    _executor: StepExecutor | None
    _evaluator: TaskEvaluator | None
    _max_tokens: int
    _plannable: list[TaskRun]
    _plan_of_run: Callable[[], Plan]
    _planner_of_model: Callable[[], Planner]
    _replan: Callable[[], Plan]
    is_in_train: bool
    _move_to: ModelPart | None = None
    _deployed_for: tuple[str, ...] = ()
    _restart_s: float = DEFAULT_RESTART_S
    _fingerprint: str | None = None

    def redeploy(self, replicas: str) -> None:
        """Move the run to other replicas; while `train` runs, at the next step. Every process calls this alike.

        Args:
            replicas: as LobRA writes them, such as "<2,1>, <1,1>x2"; for as many processes as there are.

        Raises:
            ConfigError: if there are not as many processes, or the model cannot be read again.
        """
        layout = layout_of_text(replicas, self.args.world_size)
        part = ModelPart(self._source, self.args, layout, self._team.processes.rank)
        part.check(self.tasks, self._outline.backbone)
        self._check_can_move()
        self._move_to = part
        if not self.is_in_train:
            self._move()

    def _check_can_move(self) -> None:
        if not isinstance(self._source.model, str):
            raise ConfigError(
                "redeploy: got a model that is an object; allowed: a hub id or folder, from which every process reads"
                " its new part. Give the trainer the folder of the model."
            )
        if self.args.save_strategy == "no":
            raise ConfigError(
                'redeploy: got save_strategy="no"; allowed: "steps", as tasks go on from what is saved in between.'
            )

    def _moves(self) -> bool:
        """Move to other replicas if that was asked for, or pays now that tasks have come or gone; return whether."""
        names = tuple(run.name for run in self._plannable)
        has_changed, self._deployed_for = names != (self._deployed_for or names), names
        if self._move_to is None and has_changed and self.args.redeploy:
            self._move_to = self._part_that_pays()
        if self._move_to is None:
            return False
        self._move()
        return True

    def _part_that_pays(self) -> ModelPart | None:
        """Return this process's part of a better deployment; rank 0 decides, as times differ between processes."""
        processes = self._team.processes
        replicas = processes.gather(self._replicas_that_pay() if processes.is_main else "")[0]
        if not replicas:
            return None
        return ModelPart(self._source, self.args, ParallelLayout.parse(replicas), processes.rank)

    def _replicas_that_pay(self) -> str:
        """Return better replicas for the present tasks; "" where there are none, or they cannot be had."""
        world_size = self._team.processes.world_size
        try:
            decision = decide_on_move(
                self._planner_of_model(), self._plannable, self._team.layout, restart_s=self._restart_s
            )
            self._log.say(str(decision))
            layout = ParallelLayout.parse(decision.new)
            if not decision.pays or layout.world_size != world_size:
                return ""
            ModelPart(self._source, self.args, layout, 0).check(self.tasks, self._outline.backbone)
        except (ConfigError, UnsupportedModelError) as error:
            self._log.warn(f"the run stays on {self._team.layout}: {error}")
            return ""
        return decision.new

    @property
    def _replicas_to_move_to(self) -> str:
        """Replicas to which the run moves before its next step; "" for none."""
        return "" if self._move_to is None else str(self._move_to.layout)

    def _move(self) -> None:
        part, self._move_to = self._move_to, None
        assert part is not None, "asked for before"
        started, before, layout = time.perf_counter(), self._team.layout, part.layout
        was_placed = self._executor is not None
        if self._executor is not None:
            self._save_for_move()
            self._team.processes.wait_for_all()
            self._executor.close()
            self._part.close()
            self._forget_model()
        self._team.layout, self._part = layout, part
        self._planner.num_replicas = layout.num_replicas
        self._executor, self.model = None, self._source.describe(self.tasks, self._class_counts)
        self._outline = part.outline(self.model, self.tasks, self._class_counts)
        if was_placed:
            self._materialise()
            self._restore_after_move()
        self._restart_s = seconds = time.perf_counter() - started
        self._log.event("redeployed", replicas=str(layout), before=str(before), seconds=seconds)
        self._log.say(f"replicas {layout} instead of {before}, after {seconds:.1f} s")

    def _forget_model(self) -> None:
        """Let go of the old part, so that it is not held beside the new one."""
        self._executor = self._evaluator = self.model = self.model_wrapped = self.callback_handler.model = None
        for callbacks in self._log.callbacks.values():
            callbacks.handler.model = None
        for run in self.table:
            run.optimizer = run.last_good = None
        assert self._saver.folder is not None, "redeploy is refused without a folder"
        self._saver.folder.model = self._planner.model = self._outline = None
        self._part = None
        gc.collect()

    def _save_for_move(self) -> None:
        if not all(self._team.processes.gather(self._saver.save_run())):
            raise CheckpointError(
                f"redeploy: the tasks could not be saved at step {self.state.global_step}, so they stay where they are;"
                " allowed: a folder that can be written to. Free space in output_dir."
            )

    def _restore_after_move(self) -> None:
        folder = self._saver.folder
        assert folder is not None, "redeploy is refused without a folder"
        self._team.processes.wait_for_all()  # others read what the first one has written
        folder.model = self.model
        for run in self.table:
            if run.status is TaskStatus.WAITING:
                continue
            if run.status.is_final:
                self._restore_ended(run, folder)
                continue
            self._equip(run)
            folder.restore(run, run.step, self._log.warn)
        for callbacks in self._log.callbacks.values():
            callbacks.handler.model = self.model

    def _restore_ended(self, run: TaskRun, folder: RunFolder) -> None:
        """Read the adapter of a task that has ended; where that was not written, the task has nothing here."""
        try:
            weights = self.model.saved_weights(run.name, folder.task_folder(run.name))
            put_snapshot(run, self.model, TaskState(weights, {}, {}, {}))
        except CheckpointError as error:
            self._log.warn(f'task "{run.name}": its adapter is not here any more: {error}')

    def _materialise(self) -> None:
        """Load the weights, if the model is still a description, and place the model."""
        if self._executor is not None:
            return
        self._team.processes.connect()
        self._planner.cuts.clear()  # one process alone may have planned before, for other tasks
        plan = None if self._part.num_stages == 1 else self._plan_of_run()
        self.model = self._part.load(self.model, self.tasks, self._class_counts, plan, self._team.processes)
        if self._part.is_whole:
            self._outline = self.model
        self.model_wrapped = self.callback_handler.model = self.model
        if self.args.uses_checkpointing:
            self.model.activation_checkpointing_enable(**self.args.checkpointing_kwargs)
        self.model.train()
        self._executor = self._part.executor(self.model, plan, self._team.processes)
        holds_parts = not self._team.layout.is_data_parallel
        self._saver.gather = self._gather if holds_parts else None
        self._saver.agree = self._all_have if holds_parts else bool
        self._evaluator = TaskEvaluator(
            self._executor, self._collator, self._max_tokens, self._log, self._saver, self._share_of_rows
        )

    @property
    def _acts_alone(self) -> bool:
        """Whether this process needs no other to evaluate and save: it has a whole model, and no rows are shared."""
        is_whole = self._team.layout.is_data_parallel and not self.args.shard_backbone
        evaluates = any(run.eval_data is not None for run in self.table)
        return self._team.processes.is_alone or (is_whole and not evaluates)

    @property
    def _share_of_rows(self) -> RowShare:
        """Which held-out rows the replica of this process evaluates."""
        layout, processes = self._team.layout, self._team.processes
        return RowShare(layout.place(processes.rank).replica, layout.num_replicas, processes.gather)

    def _all_have(self, saved: bool) -> bool:
        """Whether no process has failed to save."""
        return all(self._team.processes.gather(saved))

    def _gather(self, run: TaskRun, *, only_weights: bool = False) -> TaskState | None:
        """Return a task's state out of the parts of the first replica, on the first process."""
        if self._part.place.replica > 0:
            return None
        if only_weights:
            own = TaskState(split_state(self.model.task_parameters(run.name), None).weights, {}, {}, {})
        else:
            own = take_snapshot(run, self.model)
        return gather_task(self._team.processes, self._team.layout, self.model.task_pieces(run.name), own)

    def _equip(self, run: TaskRun) -> None:
        """Give a task its optimizer and its last good copy."""
        parameters, slab = self.model.task_parameters(run.name), self.model.task_slab(run.name)
        run.optimizer = TaskOptimizer(run.name, parameters, run.hyper, run.num_steps, self.args, slab)
        run.last_good = LastGood({f"page_{number}": page.values for number, page in enumerate(slab.pages)})

    def _folder_to_read(self, root: Any) -> RunFolder:
        """Return a run's folder from which tasks are restored into this process's part."""
        folder = self._saver.folder
        if folder is not None and root == folder.root:
            return folder
        return RunFolder(root, self.model, is_writer=self._saver.is_writer, fingerprint=self._fingerprint)
