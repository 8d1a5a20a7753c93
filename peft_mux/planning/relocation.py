"""`Relocation`: chooses the replicas of a run, and moves it to others between two steps (L section 5.1).

A move saves all tasks, builds every part of the model again and resumes from what was saved. The backbone is read again
from its source, never written.
"""

from __future__ import annotations

import time

from peft_mux.checkpoint.task_state import TaskState, put_snapshot
from peft_mux.engine.model_part import ModelPart
from peft_mux.errors import CheckpointError, ConfigError, UnsupportedModelError
from peft_mux.parallel.layout import AUTO, layout_of_text, parse_layout
from peft_mux.planning.deployment import redeploy as decide_on_move
from peft_mux.planning.deployment import report_deployment
from peft_mux.planning.plan_follower import PlanFollower
from peft_mux.scheduler.deployment.deployment_plan import DEFAULT_RESTART_S
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, layout_text
from peft_mux.task import TaskStatus
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run


class _NotSavedError(CheckpointError):
    """A run could not be saved before a move; nothing was released yet."""


class Relocation:
    """Decides whether moving to other replicas pays off, and moves the run.

    Args:
        run: the present run.
        placement: the model of this process; a move builds it again.
        plans: predicts the times of other replicas.

    Raises:
        ConfigError: if `redeploy=True` and the run could never move.
    """

    def __init__(self, run: Run, placement: Placement, plans: PlanFollower) -> None:
        """Check that a run with `redeploy=True` can move; do not move yet."""
        self._run, self._placement, self._plans = run, placement, plans
        self._deployed_for: tuple[str, ...] = ()
        self._restart_s = DEFAULT_RESTART_S
        if run.args.redeploy:
            self._check_can_move()

    def redeploy(self, replicas: str) -> None:
        """Move the run to other replicas: now, or while it trains at the next step. Every process must make this call.

        Args:
            replicas: as LobRA writes them, such as "<2,1>, <1,1>x2"; for as many processes as there are.

        Raises:
            ConfigError: if there are not as many processes, or the model cannot be read again.
        """
        target = self._placement.part_for_layout(layout_of_text(replicas, self._run.args.world_size))
        self._check_can_move()
        self._placement.target = target
        if not self._run.is_in_train:
            self._move(target)

    def choose_replicas(self) -> None:
        """With `replicas="auto"`, take the fastest replicas that use all processes, unless a model is loaded.

        Raises:
            ConfigError: if no replicas can train these tasks on these processes, or the model is an object.
        """
        run, placement, processes = self._run, self._placement, self._run.processes
        if run.args.replicas != AUTO or processes.is_alone or placement.is_loaded:
            return
        if not isinstance(placement.source.model, str):
            raise ConfigError(
                'args.replicas="auto" needs a model that is a hub id or folder, from which every process reads its '
                "part, got a model object. Give the trainer the folder of the model."
            )
        chosen, refused = "", ""
        if processes.is_main:  # predicted times differ between processes
            report = report_deployment(self._plans.planner, run.table.plannable)
            plan, num_processes = report.plan, processes.world_size
            # The chosen deployment is the first. Last come equal replicas, as what is fastest may leave processes idle.
            every = [zip(plan.configurations, candidate.counts, strict=True) for candidate in plan.candidates]
            every += [
                zip([row.config], [num_processes // row.config.num_gpus], strict=True)
                for row in report.configs
                if row.max_tokens >= plan.longest
            ]
            for counts in every:
                text = layout_text(tuple(ReplicaGroup(config, count, 0) for config, count in counts if count))
                layout = parse_layout(text)
                if layout.world_size != num_processes:
                    continue
                try:
                    placement.part_for_layout(layout)
                except (ConfigError, UnsupportedModelError) as error:
                    refused = refused or f": {error}"
                else:
                    chosen = text
                    break
        chosen, refused = processes.gather((chosen, refused))[0]
        if not chosen:
            raise ConfigError(
                f'args.replicas="auto" found no replicas that use all {processes.world_size} processes{refused}. Start '
                "another number of processes, or set replicas."
            )
        layout = parse_layout(chosen)
        if layout != run.layout:
            placement.change_part(placement.part_for_layout(layout))

    def move_if_asked(self) -> bool:
        """Move and plan again if that was asked for, or pays off now that tasks have come or gone.

        Returns:
            Whether the run moved.
        """
        placement = self._placement
        names = tuple(task.name for task in self._run.table.plannable)
        # The first call compares with nothing: the replicas that a run begins on were chosen for these tasks.
        has_changed, self._deployed_for = names != (self._deployed_for or names), names
        if placement.target is None and has_changed and self._run.args.redeploy:
            # Rank 0 decides, as predicted times differ between processes.
            processes = self._run.processes
            if replicas := processes.gather(self._replicas_that_pay() if processes.is_main else "")[0]:
                placement.target = placement.part_for_layout(parse_layout(replicas))
        if placement.target is None:
            return False
        try:
            self._move(placement.target)
        except _NotSavedError as error:
            # A run that trains must not end because a disk is full.
            self._run.log.warn(str(error))
            return False
        self._plans.replan()
        return True

    def _check_can_move(self) -> None:
        """Refuse a run that cannot read its backbone or its tasks again.

        Raises:
            ConfigError: for a model that is an object, or a run that saves nothing.
        """
        if not isinstance(self._placement.source.model, str):
            raise ConfigError(
                "redeploy needs a model that is a hub id or folder, from which every process reads its new part, got "
                "a model object. Give the trainer the folder of the model."
            )
        if self._run.args.save_strategy == "no":
            raise ConfigError(
                'redeploy needs save_strategy="steps", because tasks resume from the state that a move saves, '
                'got save_strategy="no".'
            )

    # ------------------------------------------------------------------ the decision

    def _replicas_that_pay(self) -> str:
        """Return better replicas for the present tasks; "" if there are none, or the run cannot move to them."""
        runs, old = self._run.table.plannable, self._run.layout
        try:
            decision = decide_on_move(self._plans.planner, runs, old, restart_s=self._restart_s)
            self._run.log.say(str(decision))
            layout = parse_layout(decision.new)
            if not decision.pays or layout.world_size != self._run.processes.world_size:
                return ""
            self._placement.part_for_layout(layout)
        except (ConfigError, UnsupportedModelError) as error:
            # A run that trains must not end because no better replicas can be found.
            self._run.log.warn(f"the run stays on {old}: {error}")
            return ""
        return decision.new

    # ------------------------------------------------------------------ the move

    def _move(self, target: ModelPart) -> None:
        """Save all tasks, give up the model, load the part of the new replicas that this process holds, and resume.

        Raises:
            CheckpointError: on every process, if any of them could not save, or the adapter of a task that has ended is
                not on the disk.
        """
        run, processes = self._run, self._run.processes
        with self._placement.lock:  # no other thread may use a model that is released
            self._placement.target = None
            started, before, was_placed = time.perf_counter(), run.layout, self._placement.is_loaded
            if was_placed:
                # No process releases its part before all tasks are saved: if that fails, the model is still there.
                if not all(processes.gather(run.saver.save_run() and not run.saver.unsaved)):
                    raise _NotSavedError(
                        f"redeploy: the tasks could not be saved at step {run.state.global_step}, so they stay on "
                        "their processes. Make output_dir writable, or free space in it."
                    )
                processes.wait_for_all()
            self._placement.change_part(target)
            if was_placed:
                self._placement.load()
                folder = run.saver.folder
                assert folder is not None, "redeploy is refused without a folder"
                processes.wait_for_all()  # others read what the first one has written
                # A waiting task has taken no step: its adapter is initialised from its seed, and it gets an optimizer
                # when it starts.
                for task in [task for task in run.table if task.status is not TaskStatus.WAITING]:
                    if not task.status.is_final:
                        self._placement.make_optimizer(task)
                        folder.restore(task, task.step, run.log.warn)
                        continue
                    model = self._placement.model
                    try:
                        weights = model.saved_weights(task.name, folder.task_folder(task.name))
                        put_snapshot(task, model, TaskState(weights, {}, {}, {}))
                    except CheckpointError as error:
                        # Its adapter was not written, so the task has none here.
                        run.log.warn(f'task "{task.name}": its adapter is missing: {error}')
            # The next decision uses the measured cost of a move.
            self._restart_s = seconds = time.perf_counter() - started
            run.log.event("redeployed", replicas=str(target.layout), before=str(before), seconds=seconds)
            run.log.say(f"replicas {target.layout} instead of {before}, after {seconds:.1f} s")
