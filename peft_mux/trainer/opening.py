"""`Opening`: what `train` does before its first step: load, open the run folder, restore the tasks, plan, tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peft_mux.checkpoint.run_folder import (
    RunFolder,
    open_other_folder,
    refuse_held_folder,
    require_state,
    resume_tasks,
)
from peft_mux.checkpoint.saver import describe_run, numerics_of
from peft_mux.errors import CheckpointError
from peft_mux.reporting.banner import BackboneFacts, banner_lines
from peft_mux.reporting.metrics_file import MetricsLog
from peft_mux.reporting.screen import make_progress
from peft_mux.task import TaskStatus
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.run import Run
from peft_mux.trainer.world import World


class Opening:
    """Brings a run to where its next step can be taken.

    Args:
        run: the run to open.
        world: all processes of the run.
        placement: the model of this process.
        plans: makes the first plan.
    """

    def __init__(self, run: Run, world: World, placement: Placement, plans: PlanFollower) -> None:
        """Open nothing yet."""
        self._run, self._world, self._placement, self._plans = run, world, placement, plans
        self._has_trained = False

    def connect(self, resume: str | bool | None) -> str | bool | None:
        """Connect the processes, and return what they go on from.

        Args:
            resume: what `train` was told; nothing for what the arguments say, as far as the run has not trained before.

        Raises:
            CheckpointError: if the step before was cut off where only a saved state can be gone on from.
            ConfigError: if processes were given unlike settings.
        """
        # The argument is for a run that begins, or it would throw away what this trainer has done since.
        resume = resume or (None if self._has_trained else self._run.args.resume_from_checkpoint)
        if not resume:
            self._require_whole_step()
        # Compared before anything is loaded: unlike settings are told in seconds, and could be a hang later on.
        self._world.connect(resume=resume)
        return resume

    def check_resumed(self, resume: str | bool | None) -> None:
        """Look for what is to be gone on from, before anything is made or loaded.

        Raises:
            CheckpointError: if it is not there.
        """
        root = self._run.root if resume is True else Path(resume or "")
        # Only the process that writes needs to see the folder. Whether the run's own one, where it is there, belongs to
        # somebody else is found out first, by keeping it.
        if resume and self._run.saver.is_writer and not (root == self._run.root and root.is_dir()):
            require_state(root)

    def check_folder(self, resume: str | bool | None) -> None:
        """Look at the run folder, which this process keeps now, before weights are loaded.

        Raises:
            CheckpointError: if it holds a run that is not resumed, or none to be resumed.
        """
        saver = self._run.saver
        if resume and saver.is_writer:
            require_state(self._run.root if resume is True else Path(resume))
        if not resume and saver.is_writer and saver.folder is None and self._run.args.save_strategy != "no":
            refuse_held_folder(self._run.root)

    def open(self, resume: str | bool | None) -> None:
        """Load the model, open the run folder, restore the tasks, and plan.

        Args:
            resume: `True` for the newest state in the run folder, another run's folder, or nothing to go on from where
                the run is.

        Raises:
            CheckpointError: if there is nothing to resume from, or the folder holds a run that is not resumed.
            ConfigError: if nothing fits into memory.
        """
        placed = self._placement.materialise(self._plans.plan_stages)
        fingerprint = self._world.compare_frozen_weights(type(placed.model.backbone).__name__, placed.samples)
        self._open_folder(fingerprint)
        if resume:
            self._restore(self._run.root if resume is True else Path(resume), fingerprint)
        elif not self._has_trained and self._run.saver.folder is not None:
            # What a run that was killed before its first save has logged is no part of this one.
            self._run.log.metrics.truncate_after(-1)
        self._drop_gradients()
        self._has_trained = True
        # After the tasks are restored, as those that have ended or are paused take no part in a plan.
        plan = self._plans.replan()
        if self._run.saver.is_writer:
            describe_run(self._run.root, self._run.args, self._run.table, plan)
        # A stop that ended the training before this one would end it before its first step. Not later than here: once
        # signals are listened to, one of them may have asked for a stop.
        self._run.control.should_training_stop, self._run.interrupted_by = False, 0

    def _require_whole_step(self) -> None:
        """Refuse to go on from a step that some tasks have taken and others have not.

        Raises:
            CheckpointError: saying what to go on from.
        """
        if self._run.is_updating:
            raise CheckpointError(
                f"train: got a run whose step {self._run.state.global_step + 1} was cut off while its tasks were "
                "updated; allowed: train(resume_from_checkpoint=True), which goes on from the last saved state."
            )

    def _drop_gradients(self) -> None:
        """Forget what a step that was cut off has added up: the step is taken again, from its beginning."""
        for run in self._run.table:
            if run.optimizer is not None:
                run.optimizer.zero_gradients()

    def _open_folder(self, fingerprint: str) -> None:
        """Open the run folder, unless it is open or nothing is to be saved; then the metrics file and the progress."""
        args, root, saver = self._run.args, self._run.root, self._run.saver
        if saver.folder is None and args.save_strategy != "no":
            saver.folder = RunFolder(
                root,
                self._placement.placed.model,
                keep=args.save_total_limit,
                is_writer=saver.is_writer,
                fingerprint=fingerprint,
            )
        if saver.is_writer:
            root.mkdir(parents=True, exist_ok=True)
        self._run.log.open(
            MetricsLog(root if saver.is_writer else None),
            make_progress(enabled=not args.disable_tqdm, is_main_process=args.process_index == 0, device=args.device),
        )

    def _restore(self, root: Path, fingerprint: str) -> None:
        """Start all tasks and put them back to where a run's newest state left them."""
        table, log, saver = self._run.table, self._run.log, self._run.saver
        stepped = [run.name for run in table if run.step > 0]
        for run in table:
            if self._has_trained:
                run.start_over()
            # A state is read into an optimizer, so that every task has to have one first.
            if run.status is TaskStatus.WAITING:
                self._placement.start(run)
        folder = saver.folder
        if folder is None or root != folder.root:
            model = self._placement.placed.model
            folder = open_other_folder(root, model, is_writer=saver.is_writer, fingerprint=fingerprint)
        self._world.processes.wait_for_all()  # others read the folder when the first one has put it in order
        self._run.state.global_step = resume_tasks(folder, table, log.warn)
        self._require_restored(stepped, folder)
        self._plans.restore_times(folder.records()[-1][0].numerics)
        self._run.is_updating = False
        # Steps after the state are taken again, and must not stand in the file twice.
        log.metrics.truncate_after(self._run.state.global_step)
        saver.take_over(folder, log.warn)

    def _require_restored(self, names: Sequence[str], folder: RunFolder) -> None:
        """Require that tasks which have taken steps in this trainer are part of the state that it went back to.

        Raises:
            CheckpointError: naming each that is not: its initial weights are gone.
        """
        saved = {name for record, _ in folder.records()[-1:] for name in (*record.tasks, *record.removed)}
        lost = [name for name in names if name not in saved]
        if lost:
            raise CheckpointError(
                f"resume_from_checkpoint: got {folder.root}, whose newest state does not have {', '.join(lost)}, which "
                "has taken steps in this trainer; allowed: tasks of that state. Make a new trainer to resume with, or "
                "remove the task and register it again."
            )

    def begin(self) -> None:
        """Switch the run to training, and tell callbacks."""
        run = self._run
        # From here on commands wait for a step boundary, those of on_train_begin below among them.
        run.is_in_train = True
        for line in self._banner() if run.log.is_shown else ():
            run.log.say(line)
        run.log.begin()
        run.log.rows.begin(*run.table)
        # Where tasks stand at the beginning is no change to tell of.
        run.table.collect()
        run.callbacks.call("on_train_begin")
        for callbacks in run.log.callbacks.values():
            callbacks.call("on_train_begin")

    def _banner(self) -> list[str]:
        """Return the lines with which the run begins; none where it follows no plan."""
        run, plan = self._run, self._plans.current
        if plan is None:
            return []
        runs = list(run.table)
        model = self._placement.outline
        counts = [sum(own.numel() for own in model.task_parameters(name).values()) for name in model.tasks]
        source, layout = self._placement.source, self._world.layout
        kind = type(model.backbone).__name__
        facts = BackboneFacts(
            source.model if isinstance(source.model, str) else getattr(source.config, "_name_or_path", "") or kind,
            kind,
            model.backbone.num_parameters() - sum(counts),
            str(source.dtype).removeprefix("torch."),
            numerics_of(run.args)["attention"],
        )
        processes = "" if self._world.processes.is_alone else f"{layout.world_size} processes, replicas {layout}"
        return banner_lines(run.args, facts, runs, plan, adapter_parameters=counts, processes=processes, root=run.root)
