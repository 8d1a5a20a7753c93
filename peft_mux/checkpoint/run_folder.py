"""`RunFolder`: the adapters and checkpoints of a run on disk, and the records that say which belong together.

::

    <output_dir>/
      metrics.jsonl  plan.json  config.json  environment.json
      run.lock  run.lock.json                while a process trains here: which one
      state/run-00000030.json                which checkpoint of which task; written last
      <task>/adapter_config.json  adapter_model.safetensors       the task's adapter, loadable by plain PEFT
      <task>/adapter_checksums.json          sizes and SHA-256 of these two
      <task>/checkpoint-30/                  the same, plus optimizer, last good and best weights, state
      <task>/best/                           the adapter of the best evaluation, with early stopping

Everything is safetensors and JSON, with tensors by parameter name, so that a run can resume with any number and layout
of processes. Folders appear whole or not at all (`peft_mux.storage`). Data position, schedule and dropout are functions
of the task's step and seed, so they need no state beyond those numbers.
"""

from __future__ import annotations

import json
import os
import platform
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerState

from peft_mux import storage
from peft_mux.checkpoint.records import (
    FORMAT_VERSION,
    STATE_NAME,
    ChangedSettingsError,
    RecordedTask,
    RunRecord,
    check_settings,
    read_record,
    read_task_state,
    record_path,
    record_paths,
    restore_callbacks,
    task_state,
)
from peft_mux.checkpoint.task_state import BEST, LAST_GOOD, TaskState, put_snapshot
from peft_mux.engine.tasks.active_task import ActiveTask, TaskTable
from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.files import ADAPTER_NAMES, CONFIG_NAME, WEIGHTS_NAME, adapter_names
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.task import TaskStatus

Weights = Mapping[str, torch.Tensor]
"""By parameter name."""
STATE_FOLDER = "state"
_OF_OPTIMIZER = ("moments", "settings", "schedule")


class ForeignCheckpointError(CheckpointError):
    """A file of another run is where this run's file should be; an older checkpoint does not explain it."""


class RunFolder:
    """The output folder of a run.

    Args:
        root: the folder; made if it does not exist.
        model: the model whose adapters are written and read.
        keep: how many checkpoints are kept of each task, and how many records of the run; `None` for all.
        is_writer: whether this process writes; one that only reads leaves the folder as it is.
        fingerprint: digest of the frozen weights of the whole backbone, which records of the run contain.

    Attributes:
        removed: tasks that were removed from the run and have not been registered again, by name.
        generations: how many tasks of a name were removed before the present one, if any.
        run_id: id of the run, by which its files are known from those of another run; "" before the first write.

    Raises:
        CheckpointError: if the folder cannot be written to, or a link stands where the run would write.
    """

    def __init__(
        self,
        root: Path,
        model: MultiTaskPeftModel,
        *,
        keep: int | None = None,
        is_writer: bool = True,
        fingerprint: str = "",
    ) -> None:
        """Make the folder, and clean up what a crash left behind."""
        self.root, self.model, self.keep = root, model, keep
        self.removed: dict[str, RecordedTask] = {}
        self.generations: dict[str, int] = {}
        self.run_id = ""
        self.fingerprint, self._is_writer = fingerprint, is_writer
        self._restored_from: dict[str, Path] = {}
        self._newest: bytes | None = None
        if not is_writer:
            return
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._state_folder()
            # Before anything is read: a folder that a crash left moved aside may be the checkpoint to resume from.
            storage.remove_stale(root)
            for folder in root.iterdir():
                if folder.is_dir() and not folder.is_symlink():
                    storage.remove_stale(folder)
        except OSError as error:
            raise storage.unwritable(root, error) from error

    def task_folder(self, name: str) -> Path:
        """Return a task's folder, which is made if needed; no name or link leads out of the run folder."""
        folder = storage.safe_child(self.root, name)
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f'task "{name}": its folder {folder} could not be created ({error}). Free space on its disk, or make '
                "it writable."
            ) from error
        return folder

    def _state_folder(self) -> Path:
        """Return the folder of the records to write into, which is made if needed; a link is refused."""
        folder = self.root / STATE_FOLDER
        if folder.is_symlink():
            raise CheckpointError(
                "output_dir must not have links, because files behind them would be overwritten, got the link "
                f"{folder}. Remove the link."
            )
        folder.mkdir(exist_ok=True)
        return folder

    # ---------------------------------------------------------------- adapters and checkpoints

    def save_adapter(self, name: str, weights: Weights | None = None) -> None:
        """Write a task's adapter at the root of its folder, each file whole or not at all.

        Args:
            name: the name of the task.
            weights: the weights of the whole adapter, if the model holds only a part of it.
        """
        self._replace_adapter(name, lambda scratch: self.model.save_task(name, scratch, weights))

    def _replace_adapter(self, name: str, fill: Callable[[Path], None]) -> None:
        """Replace a task's adapter by the one with which `fill` fills a scratch folder."""
        folder = self.task_folder(name)
        try:
            # In a scratch folder, because PEFT writes in place. The task's folder cannot be swapped: it also holds
            # checkpoints.
            with storage.scratch_folder(folder) as scratch:
                fill(scratch)
                storage.write_checksums(scratch, adapter_names(scratch))
                # Checksums are removed first and written last: a crash between two files must not leave those of other
                # files.
                (folder / storage.CHECKSUMS_NAME).unlink(missing_ok=True)
                for file in (*adapter_names(scratch), storage.CHECKSUMS_NAME):
                    present, new = folder / file, scratch / file
                    # The configuration is the same at every save.
                    is_same = file == CONFIG_NAME and present.is_file() and not present.is_symlink()
                    if not is_same or present.read_bytes() != new.read_bytes():
                        storage.replace_file(new, present)
        except OSError as error:
            raise CheckpointError(f'task "{name}": its adapter could not be written ({error}).') from error

    def save_best(self, task: ActiveTask, weights: Weights | None = None) -> None:
        """Write a task's adapter as its best so far."""
        storage.write_folder(
            self.task_folder(task.name) / "best",
            lambda scratch: self.model.save_task(task.name, scratch, weights),
            facts={"format_version": FORMAT_VERSION, **self._identity(task.name, task.step)},
        )

    def save_task(self, task: ActiveTask, snapshot: TaskState | None, weights: Weights | None = None) -> Path:
        """Write a checkpoint from which the task resumes exactly; return its folder.

        Args:
            task: the task.
            snapshot: the state of the whole task.
            weights: the weights of the whole adapter, if the model holds only a part of it.
        """
        folder = self.task_folder(task.name) / f"checkpoint-{task.step}"
        self.run_id = self.run_id or uuid.uuid4().hex

        def fill(scratch: Path) -> None:
            self.model.save_task(task.name, scratch, weights)
            state = task_state(task)
            if task.optimizer is not None:
                assert snapshot is not None, "the process that writes has the whole state"
                tensors, tree = storage.pack_state({name: getattr(snapshot, name) for name in _OF_OPTIMIZER})
                storage.save_tensors(scratch / "optimizer.safetensors", tensors)
                state["optimizer"] = tree
                for copy in (LAST_GOOD, BEST):
                    storage.save_tensors(scratch / f"{copy}.safetensors", snapshot.copies[copy])
            (scratch / STATE_NAME).write_text(json.dumps(state, indent=1), encoding="utf-8")

        facts = {"format_version": FORMAT_VERSION, "run": self.run_id, **self._identity(task.name, task.step)}
        storage.write_folder(folder, fill, facts=facts)
        return folder

    def restore(self, task: ActiveTask, step: int, warn: Callable[[str], None]) -> None:
        """Restore a task from its checkpoint of `step`, or from the newest valid one before it.

        Args:
            task: the task, registered, with its optimizer built.
            step: the step that the run record names.
            warn: called with a line for everything that differs from the record.

        Raises:
            CheckpointError: if no checkpoint of the task is valid, or its settings have changed.
        """
        folder = storage.safe_child(self.root, task.name)
        if not folder.exists():
            # What the refusal below tells users to do if no checkpoint is valid.
            warn(f'task "{task.name}": {folder} is gone; the task is trained from the start.')
            return
        steps = [number for number in storage.numbered_folders(folder) if number <= step]
        if step not in steps:
            gone = folder / f"checkpoint-{step}"
            warn(f'task "{task.name}": {gone} or its manifest is gone. Trying the checkpoint before it.')
        for candidate in reversed(steps):
            path = folder / f"checkpoint-{candidate}"
            try:
                # Checked by name, so that a folder copied from another task is not taken for this one's.
                facts = storage.verify_folder(path, expect={"generation": None, **self._identity(task.name, candidate)})
                if self.run_id and facts.get("run") != self.run_id:
                    raise ForeignCheckpointError(
                        f'task "{task.name}": {path} must be of run {self.run_id}, as the records in '
                        f"{self.root / STATE_FOLDER} are, got one of run {facts.get('run')}. Put back that of this "
                        "run, or remove it to resume from the one before. To continue the other run, resume from its "
                        "own folder: train(resume_from_checkpoint=FOLDER)."
                    )
                self._load(task, path, warn)
            except (ChangedSettingsError, ForeignCheckpointError):
                raise
            except CheckpointError as error:
                warn(f'task "{task.name}": {error} Trying the checkpoint before it.')
                continue
            self._restored_from[task.name] = path
            return
        raise CheckpointError(
            f'task "{task.name}" has no valid checkpoint up to step {step} in {folder}. Restore the checkpoint '
            "folder, or remove the task's folder to train the task again from the start."
        )

    def _load(self, task: ActiveTask, folder: Path, say: Callable[[str], None]) -> None:
        """Restore a task from a folder whose files are intact."""
        saved = read_task_state(folder / STATE_NAME)
        step, status, optimizer = saved["step"], saved["status"], saved["optimizer"]
        if folder.name != f"checkpoint-{step}":
            raise CheckpointError(f"{folder} must have the state of the step in its name, got step {step}.")
        changed = check_settings(task, saved["settings"])  # before anything of the task is changed
        # A task that had taken all its steps may now be given more of them.
        has_more_steps = status is TaskStatus.SUCCEEDED and task.num_steps > step
        try:
            snapshot = TaskState(self.model.saved_weights(task.name, folder), {}, {}, {})
            if optimizer is not None:
                fields = storage.unpack_state(storage.load_tensors(folder / "optimizer.safetensors"), optimizer)
                copies = {copy: storage.load_tensors(folder / f"{copy}.safetensors") for copy in (LAST_GOOD, BEST)}
                snapshot = TaskState(snapshot.weights, **fields, copies=copies)
            task.step, task.num_tokens, task.last_loss = step, saved["num_tokens"], saved["last_loss"]
            task.loss_mean.total, task.loss_mean.count = saved["loss_mean"]
            task.best.load(saved["best"])
            restore_callbacks(task, saved["callbacks"])
            task.state = TrainerState(**{**asdict(task.state), **saved["trainer_state"]})
            task.state.best_metric, task.state.best_global_step = task.best.value, task.best.step
            if (optimizer is None and not has_more_steps) or task.optimizer is None:
                task.end(status, saved["reason"])
            # Also for an ended task, whose adapter users keep using.
            put_snapshot(task, self.model, snapshot, from_step=step if changed else None)
            if task.optimizer is not None:
                task.status, task.reason = (TaskStatus.RUNNING, "") if has_more_steps else (status, saved["reason"])
        except torch.OutOfMemoryError:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        # The files match their manifest, so the checkpoint was crafted, and torch may raise anything.
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder} has a state that does not fit the task ({type(error).__name__}: {error})."
            ) from error
        if changed and status.is_final and not has_more_steps:
            say(f'task "{task.name}": has ended, so other settings have no effect: {changed}')
        elif changed:
            restart = (
                "; its optimizer starts again, because it is not kept for a task that has ended"
                if has_more_steps
                else ""
            )
            say(f'task "{task.name}": resumes from step {step} with other settings: {changed}{restart}')

    def newest_checkpoint(self, name: str) -> Path | None:
        """Return the newest intact checkpoint of a task; `None` if there is none, or its folder cannot be read."""
        with suppress(CheckpointError):
            for step in reversed(storage.numbered_folders(self.root / name)):
                path = self.root / name / f"checkpoint-{step}"
                with suppress(CheckpointError):
                    storage.verify_folder(path, expect={"generation": None, **self._identity(name, step)})
                    return path
        return None

    def mend_adapter(self, name: str, say: Callable[[str], None]) -> None:
        """Compare the adapter of an ended task with the checkpoint that it was restored from, and repair it from there.

        Args:
            name: a task that `restore` has restored.
            say: called with a line if the adapter is repaired.

        Raises:
            CheckpointError: if it cannot be written.
        """
        checkpoint = self._restored_from.get(name)
        if checkpoint is None or not self._is_writer:
            return
        folder, fault = self.task_folder(name), ""
        try:
            storage.verify_checksums(folder, ADAPTER_NAMES)
            if storage.digest_file(folder / WEIGHTS_NAME) != storage.digest_file(checkpoint / WEIGHTS_NAME):
                fault = f"{folder / WEIGHTS_NAME} does not have the weights with which the task ended."
            # Only read: the name of the backbone in it may differ.
            json.loads(storage.read_regular(folder / CONFIG_NAME))
        except CheckpointError as error:
            fault = str(error)
        except (OSError, ValueError, RecursionError) as error:
            fault = f"{folder} has no readable adapter ({error})."
        if not fault:
            return
        say(f'task "{name}": {fault} It is taken from {checkpoint}.')

        def copy(scratch: Path) -> None:
            for file in adapter_names(checkpoint):
                (scratch / file).write_bytes((checkpoint / file).read_bytes())

        self._replace_adapter(name, copy)

    def _identity(self, name: str, step: int) -> dict[str, Any]:
        """Return what distinguishes a checkpoint from those of other tasks, including an earlier one of this name."""
        generation = self.generations.get(name, 0)
        return {"task": name, "step": step, **({"generation": generation} if generation else {})}

    # ---------------------------------------------------------------- records of the run

    def records(self, warn: Callable[[str], None] | None = None) -> list[tuple[RunRecord, Path]]:
        """Return the valid run records, oldest first; `warn` is called for each one that is not valid."""
        readable = []
        for path in record_paths(self.root / STATE_FOLDER):
            try:
                readable.append((read_record(path), path))
            except CheckpointError as error:
                if warn is not None:
                    warn(f"{error} Trying the record before it.")
        # By the number in the record, never by the time of the file, which copying changes.
        return sorted(readable, key=lambda item: item[0].run_step)

    def save_record(self, run_step: int, runs: list[ActiveTask], numerics: Mapping[str, Any]) -> None:
        """Write which checkpoints belong together, and delete what is older than `keep` allows.

        Every task must have been saved before; the record makes its step the one to resume from.

        Args:
            run_step: steps of the run.
            runs: its tasks, in the order of the stream.
            numerics: what decides the last bits of its results.

        Raises:
            OSError: if old files cannot be deleted.
        """
        tasks = {
            task.name: RecordedTask(task.status, task.reason, task.step, self.generations.get(task.name, 0))
            for task in runs
            if task.status is not TaskStatus.REMOVED
        }
        self.run_id = self.run_id or uuid.uuid4().hex
        fields = FORMAT_VERSION, self.fingerprint, tasks, self.removed, numerics, self.run_id, launch_id()
        self._write_record(RunRecord(run_step, *fields))
        if self.keep is None:
            return
        # After the new record, so that a crash in between leaves too many checkpoints rather than too few; and records
        # before the checkpoints that they name, so that no record ever names one that is gone.
        records = self.records()
        for _, path in records[: -self.keep]:
            path.unlink()
        needed: dict[str, set[Path]] = {}
        for record, _ in records[-self.keep :]:
            for name, entry in record.tasks.items():
                needed.setdefault(name, set()).add(self.root / name / f"checkpoint-{entry.step}")
        for name, folders in needed.items():
            # Tasks end at different steps, so a checkpoint that a kept record names may be old by its number.
            storage.prune(storage.safe_child(self.root, name), keep=self.keep, protect=folders)

    def amend_record(self) -> None:
        """Update the removed tasks in the newest record; leave everything else unchanged."""
        record, _ = self.records()[-1]
        # A task that was registered again is not in the record; it starts over if that record is resumed.
        tasks = {
            name: task
            for name, task in record.tasks.items()
            if name not in self.removed and task.generation == self.generations.get(name, 0)
        }
        self._write_record(replace(record, tasks=tasks, removed=self.removed))

    def _write_record(self, record: RunRecord) -> None:
        content = record.to_bytes()
        storage.write_file(record_path(self._state_folder(), record.run_step), content)
        self._newest = content

    def refuse_other_writer(self) -> None:
        """Refuse a folder that another trainer has written to since this one did.

        Raises:
            CheckpointError: naming the folder.
        """
        paths = record_paths(self.root / STATE_FOLDER)
        if self._newest is None or not paths:
            return
        try:
            is_own = storage.read_regular(paths[-1]) == self._newest
        except OSError:
            is_own = False
        if not is_own:
            raise CheckpointError(
                f"output_dir {self.root} has changed: another trainer has written to it since this one trained. Make "
                "a new trainer and call train(resume_from_checkpoint=True) to continue from there."
            )


def open_other_folder(root: Path, model: MultiTaskPeftModel, *, is_writer: bool, fingerprint: str) -> RunFolder:
    """Open the folder of another run, to read its state.

    What a crash left behind there is cleaned up, unless a process trains there or the folder cannot be written to.

    Args:
        root: the folder of that run.
        model: the model whose adapters are read.
        is_writer: whether this process cleans up.
        fingerprint: digest of the frozen weights of the whole backbone.
    """
    lock = storage.FolderLock(root)
    if is_writer and root.is_dir():
        try:
            lock.acquire()
        except CheckpointError:
            is_writer = False
    try:
        return RunFolder(root, model, is_writer=is_writer and lock.is_held, fingerprint=fingerprint)
    finally:
        lock.release()


def refuse_held_folder(root: Path) -> None:
    """Refuse to begin a run in a folder that holds one, unless a launcher has restarted that run.

    Raises:
        CheckpointError: if it does.
    """
    if record_paths(root / STATE_FOLDER) and not was_restarted(root):
        raise CheckpointError(
            f"output_dir must be a new folder, got {root}, which holds a run. Resume it with "
            "train(resume_from_checkpoint=True) or peft-mux train FILE --resume, or delete it to train from the "
            "start."
        )


def launch_id() -> str:
    """Return the launch of this process, as words: job of Slurm, run of torchrun, its agent, and the process itself."""
    words = [f"job={os.environ['SLURM_JOB_ID']}"] if "SLURM_JOB_ID" in os.environ else []
    if "TORCHELASTIC_RUN_ID" in os.environ:
        agent = psutil.Process(os.getppid())
        words += [f"run={os.environ['TORCHELASTIC_RUN_ID']}"]
        words += [f"agent={platform.node()}/{agent.pid}/{agent.create_time():.2f}", f"process={os.getpid()}"]
    return " ".join(words)


def was_restarted(root: Path) -> bool:
    """Whether a launcher has restarted this process, and an earlier attempt of the same launch trained in a folder.

    A first attempt that was refused, because another run is in the folder, wrote no record there.
    """
    current = set(launch_id().split())
    for path in reversed(record_paths(root / STATE_FOLDER) if current else []):
        with suppress(CheckpointError):  # torn, as the attempt before was killed
            shared = {word.partition("=")[0] for word in current & set(read_record(path).launch.split()) - {"run=none"}}
            # torchrun counts restarts only on the node whose worker died, so the agent of rank 0 may count none.
            is_other_worker = "agent" in shared and "process" not in shared
            counts = {"job": "SLURM_RESTART_COUNT", "run": "TORCHELASTIC_RESTART_COUNT"}
            was_counted = any(os.environ.get(counts[name], "0") not in ("", "0") for name in shared & counts.keys())
            return is_other_worker or was_counted
    return False


def require_state(root: Path) -> None:
    """Require that a folder holds a state to resume from; whether it is intact is checked when it is read.

    Raises:
        CheckpointError: if it holds none.
    """
    if not record_paths(root / STATE_FOLDER):
        raise _without_state(root)


def _without_state(root: Path) -> CheckpointError:
    return CheckpointError(
        f"resume_from_checkpoint must be the output_dir of a run that has saved at least once, got {root}, which "
        "holds no state of a run. Call train() without it to begin, or peft-mux train without --resume."
    )


def resume_tasks(folder: RunFolder, table: TaskTable, say: Callable[[str], None]) -> RunRecord:
    """Restore all tasks to where the newest record of a run left them; return that record.

    Args:
        folder: the folder of the run that is resumed.
        table: the tasks of the run, started; they are brought into the order of the record.
        say: called with a line for each task left out, and for each checkpoint that is not valid.

    Raises:
        CheckpointError: if there is no record, the backbone is another one, or a task cannot be restored.
    """
    records = folder.records(say)
    if not records:
        raise _without_state(folder.root)
    record, path = records[-1]
    if record.version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} must have format version {FORMAT_VERSION}, which this version of peft_mux reads, got "
            f"{record.version}. Resume with the version that wrote it, or train into a new output_dir."
        )
    if record.backbone != folder.fingerprint:
        raise CheckpointError(
            f"resume_from_checkpoint must be a run on the same backbone in the same dtype, got {folder.root}, whose "
            "tasks were trained on other weights than those of `model`. Load that backbone, or train into a new "
            "output_dir."
        )
    if record.run and folder.run_id not in ("", record.run):
        raise ForeignCheckpointError(
            f"resume_from_checkpoint: {path} must be of run {folder.run_id}, which this trainer trains, got one "
            f"of run {record.run}. Put back the folder of this run; to continue the other run, make a new trainer."
        )
    folder.run_id = record.run
    folder.removed = dict(record.removed)
    folder.generations = {name: task.generation for name, task in record.tasks.items() if task.generation}
    for name, entry in record.tasks.items():
        if name in table:
            folder.restore(table[name], entry.step, say)
        else:
            say(f'task "{name}" of the resumed run is not among the tasks given now; it is left out, its files stay')
    for task in table:
        if task.name not in record.tasks and task.name not in record.removed:
            say(f'task "{task.name}" is not part of the resumed run; it begins with its first step')
    for name, entry in record.removed.items():
        if name in table:
            table[name].step = entry.step
            table[name].end(TaskStatus.REMOVED, f"removed from the run at step {entry.step}")
            say(f'task "{name}" was removed from the run; it stays removed, and its files as they are')
    # The order of tasks in the stream is part of the rounding of sums.
    table.runs = {name: table[name] for name in dict.fromkeys([*record.tasks, *table.runs]) if name in table}
    return record
