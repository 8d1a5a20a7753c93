"""`Opening`: what `train` does before its first step: connect, check the run folder, load, restore the tasks, plan."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft_mux.checkpoint.records import record_paths, task_settings
from peft_mux.checkpoint.run_folder import (
    STATE_FOLDER,
    RunFolder,
    open_other_folder,
    refuse_held_folder,
    require_state,
    resume_tasks,
    was_restarted,
)
from peft_mux.checkpoint.saver import ENVIRONMENT_NAME, describe_tasks, environment_of
from peft_mux.engine.agreement import require_consistent
from peft_mux.engine.tasks.active_task import BestMetric, LossMean, new_state, run_interval
from peft_mux.errors import (
    CheckpointError,
    ConfigError,
    Fault,
    installed_version,
    raise_faults,
)
from peft_mux.log.metrics_file import MetricsLog
from peft_mux.modeling.backbone.digests import fingerprint
from peft_mux.storage import write_file
from peft_mux.task import TaskStatus
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run, RunPlans

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "peft-mux")
_ARGUMENTS_OF_ONE_PROCESS = frozenset({"local_rank", "log_level", "log_level_replica", "logging_dir"})
"""Arguments that may differ between processes."""


class Opening:
    """Prepares everything for the next step of a run.

    Args:
        run: the run to open.
        placement: the model of this process.
        plans: makes the first plan.
        choose_replicas: called before the model is loaded; decides on which replicas, if they are not given.
    """

    def __init__(self, run: Run, placement: Placement, plans: RunPlans, choose_replicas: Callable[[], None]) -> None:
        self._run, self._placement, self._plans = run, placement, plans
        self._has_trained = False
        self._choose_replicas = choose_replicas

    def connect(self, resume: str | bool | None) -> str | bool | None:
        """Connect the processes and compare what they were given; return what to resume from.

        Args:
            resume: the argument of `train`; if it is not set, that of the run counts until it has trained once. With
                "auto" the run in `output_dir` is resumed if there is one, and so is one that a launcher has restarted.

        Raises:
            CheckpointError: if the last step was cut off while tasks were updated, or there is nothing to resume from.
            ConfigError: on every process, naming each rank and field that differs, or why `upload_to` cannot be read.
            ProcessError: if another process does not come.
        """
        run = self._run
        # The argument of the run is for its beginning, or it would throw away what this trainer has done since.
        resume = resume or (None if self._has_trained else run.args.resume_from_checkpoint)
        if not resume and run.is_updating:
            raise CheckpointError(
                "train must resume with train(resume_from_checkpoint=True) from the last saved state, because step "
                f"{run.state.global_step + 1} was cut off while its tasks were updated."
            )
        run.processes.connect()
        # Before anything is loaded: unequal settings are reported in seconds, and could hang the run later on.
        if not run.processes.is_alone:
            # The argument of `train` takes precedence over that of the run, which has the same name.
            arguments = {
                key: value for key, value in run.args.to_dict().items() if key not in _ARGUMENTS_OF_ONE_PROCESS
            }
            facts: dict[str, Any] = {
                "version": {name: installed_version(name) or "not installed" for name in _PACKAGES},
                "args": {**arguments, "resume_from_checkpoint": resume or None},
                "tasks": {task.name: task_settings(task) for task in run.table},
            }
            require_consistent(run.processes, facts)
        is_first = not resume and not self._has_trained and run.args.save_strategy != "no"
        # Whether there is a run at `upload_to`, and none in the run folder: only the process that writes looks.
        has_copy, unread = False, []
        try:
            has_copy = any(observer.holds_run() for observer in run.log.observers)
            has_copy = has_copy and not record_paths(run.root / STATE_FOLDER)
        except ConfigError as error:
            unread.append(str(error))
        if run.args.upload_to and (unread := [text for texts in run.processes.gather(unread) for text in texts]):
            raise ConfigError(unread[0])
        if resume == "auto" or is_first:
            # Whether all processes see the same folder is checked later.
            holds_run = was_restarted(run.root) if is_first else has_copy or bool(record_paths(run.root / STATE_FOLDER))
            resume = any(run.processes.gather(run.saver.is_writer and holds_run)) or None
        if has_copy and not resume:
            raise CheckpointError(
                f"args.upload_to must be a place without a run, got {run.args.upload_to}, which holds one. Resume it "
                "with train(resume_from_checkpoint=True) or peft-mux train FILE --resume, or name another place."
            )
        if has_copy and resume is True:
            return resume  # what is copied is checked later
        root = run.root if resume is True else Path(resume or "")
        # The process that writes answers for all. The run's own folder, if it exists, is locked first, to find out
        # whether another process uses it.
        if resume and run.saver.is_writer and not (root == run.root and root.is_dir()):
            require_state(root)
        return resume

    @contextmanager
    def opened(self, resume: str | bool | None) -> Iterator[None]:
        """Connect, keep the run folder in the `with` block, load the model, restore the tasks, and plan.

        Args:
            resume: the argument of `train`: `True` for the newest state in the run folder, another run's folder, or
                nothing to continue from where the run is.

        Raises:
            CheckpointError: if there is nothing to resume from, or the folder holds a run that is not resumed.
            ConfigError: if processes differ, do not see the same run folder, or nothing fits into memory.
        """
        saver, root, processes = self._run.saver, self._run.root, self._run.processes
        # Connected first, so that the others learn at once if another process uses the folder.
        resume = self.connect(resume)
        with saver.keep_folder(root, continues=not resume):
            if resume is True and not record_paths(root / STATE_FOLDER):
                for observer in self._run.log.observers:
                    observer.fetch()
            if self._run.args.save_strategy != "no" and not processes.is_alone:
                # A new name, which no network file system remembers as absent; what a crash leaves is removed later on.
                probe = f".tmp-{uuid.uuid4().hex}" if saver.is_writer else ""
                if probe:
                    (root / probe).touch()
                probe = max(processes.gather(probe))
                sees = processes.gather(((root / probe).exists(), f"{socket.gethostname()}:{root.absolute()}"))
                if saver.is_writer:
                    (root / probe).unlink(missing_ok=True)
                blind = ", ".join(
                    f"{where} (rank {rank})" for rank, (has_seen, where) in enumerate(sees) if not has_seen
                )
                if blind:
                    fix = "Set output_dir to a folder on a disk that all machines share."
                    allowed = f"the same folder for every process, {sees[0][1]} as on rank 0"
                    raise_faults([Fault("args.output_dir", f"another one in {blind}", allowed, fix)])
            saver.note_loading("model")
            # Checked before weights are loaded.
            if resume and saver.is_writer:
                require_state(root if resume is True else Path(resume))
            if not resume and saver.is_writer and saver.folder is None and self._run.args.save_strategy != "no":
                refuse_held_folder(root)
            self.open(resume)
            yield

    def open(self, resume: str | bool | None) -> None:
        """Load the model, open the run folder, restore the tasks, and plan; see `opened`.

        Raises:
            ConfigError: on every process, naming a frozen weight that several of them hold and that differs.
        """
        run, args, root, saver = self._run, self._run.args, self._run.root, self._run.saver
        self._choose_replicas()
        whole: dict[str, str] = {}  # a digest of each frozen weight
        faults = []
        for rank, digests in enumerate(run.processes.gather(self._placement.load())):
            odd = next((name for name in digests if whole.get(name, digests[name]) != digests[name]), None)
            if odd is not None:
                where = f"rank {rank}: model.frozen weights (digest) of {odd}"
                allowed = f"{whole[odd]}, as on the processes before it"
                faults.append(Fault(where, digests[odd], allowed, "Start every process with the same model."))
            whole = {**digests, **whole}  # the first process that holds a weight sets the rule for the others
        raise_faults(faults)
        backbone = fingerprint(type(self._placement.model.backbone).__name__, whole)
        if saver.folder is None and args.save_strategy != "no":
            saver.folder = RunFolder(
                root,
                self._placement.model,
                keep=args.save_total_limit,
                is_writer=saver.is_writer,
                fingerprint=backbone,
            )
        if saver.is_writer:
            root.mkdir(parents=True, exist_ok=True)
        run.log.open(MetricsLog(root if saver.is_writer else None))
        numerics = None
        if resume:
            numerics = self._restore(root if resume is True else Path(resume), backbone)
        elif not self._has_trained and saver.folder is not None:
            # Records of a run that was killed before its first save are not part of this one.
            run.log.metrics.truncate_after(-1)
        # Drop the gradients of a step that was cut off: the step is taken again, from its beginning.
        for task in run.table:
            if task.optimizer is not None:
                task.optimizer.zero_gradients()
        self._has_trained = True
        # After the tasks are restored, as those that have ended or are paused take no part in a plan.
        plan = self._plans.replan(numerics)
        if saver.is_writer:
            describe_tasks(root, args, run.table)
            write_file(root / "plan.json", plan.to_json().encode())
            write_file(root / ENVIRONMENT_NAME, json.dumps(environment_of(args), indent=2).encode())
        # The stop request of the previous training would end this one before its first step. Not later than here: once
        # signals are handled, one of them may have asked for a stop.
        run.control.should_training_stop = False

    def _restore(self, root: Path, backbone: str) -> Mapping[str, Any]:
        """Put all tasks back to where a run's newest state left them; return what decided its last bits, by name.

        Raises:
            CheckpointError: if there is no such state, or it lacks a task that has taken steps in this trainer: its
                initial weights are gone.
        """
        run, saver = self._run, self._run.saver
        stepped = [task.name for task in run.table if task.step > 0]
        for task in run.table:
            if self._has_trained:  # forget everything but the weights, before a state is loaded
                task.end(TaskStatus.WAITING)
                task.step, task.num_tokens, task.best_weights = 0, 0, {}
                task.best, task.loss_mean = BestMetric(task.task, task.hyper), LossMean()
                task.last_loss = task.last_gradient_norm = task.last_learning_rate = float("nan")
                task.state = new_state(task.hyper, run.args, task.num_steps, task.loader.steps_per_epoch)
            # A state is read into an optimizer, so every task needs one first.
            if task.status is TaskStatus.WAITING:
                self._placement.start(task)
        folder = saver.folder
        if folder is None or root != folder.root:
            folder = open_other_folder(root, self._placement.model, is_writer=saver.is_writer, fingerprint=backbone)
        run.processes.wait_for_all()  # others read the folder when the first one has put it in order
        record = resume_tasks(folder, run.table, run.log.warn)
        run.state.global_step = record.run_step
        lost = [name for name in stepped if name not in record.tasks and name not in record.removed]
        if lost:
            raise CheckpointError(
                "resume_from_checkpoint must have all tasks that have taken steps in this trainer, got "
                f"{folder.root}, whose newest state does not have {', '.join(lost)}. Make a new trainer to resume "
                "with, or remove the task and register it again."
            )
        run.is_updating = False
        # Steps after the state are taken again, and must not be in the file twice.
        run.log.metrics.truncate_after(run.state.global_step)
        saver.take_over(folder, record.numerics, run.log.warn)
        return record.numerics

    def begin(self) -> None:
        """Switch the run to training, and call `on_train_begin`."""
        run = self._run
        run.saver.note_loading("")
        # From here on commands wait for a step boundary, those of on_train_begin below included.
        run.is_in_train = True
        run.log.begin()
        run.log.begin_rows(*run.table)
        # The initial status of tasks is not a change to report.
        run.table.collect()
        for task in run.table:
            task.train_loss = LossMean()
        run.state.logging_steps = run_interval(run.args.logging_steps, run.table)
        run.state.max_steps = max((task.num_steps for task in run.table), default=0)
        run.state.num_train_epochs = max((task.state.num_train_epochs for task in run.table), default=0)
        run.callbacks.call("on_train_begin")
        for callbacks in run.log.callbacks.values():
            callbacks.call("on_train_begin")
