"""Checkpoints of a run: one folder a task and step, and one record that says which of them belong together.

    <output_dir>/
      metrics.jsonl  plan.json  config.json  environment.json
      run.lock                               while a process trains here: who
      state/run-00000030.json                which checkpoint of which task; written last
      <task>/adapter_config.json  adapter_model.safetensors       the task's adapter, loadable by plain PEFT
      <task>/adapter_checksums.json          size and SHA-256 of these two
      <task>/checkpoint-30/                  the same, plus optimizer, last good and best weights, state
      <task>/best/                           the adapter of the best evaluation, where early stopping is set

Everything is safetensors and JSON, tensors by the names of parameters, so that any number and layout of processes goes
on from it; folders appear whole or not at all (`peft_mux.storage`). Data position, schedule and
dropout are functions of the task's step and seed, so they need no state beyond those numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peft_mux import storage
from peft_mux.checkpoint.adapter_folder import mend_adapter, replace_adapter
from peft_mux.checkpoint.retention import prune_states
from peft_mux.checkpoint.run_record import (
    FORMAT_VERSION,
    Generations,
    RecordedTask,
    RunRecord,
    read_records,
    record_path,
    record_paths,
)
from peft_mux.checkpoint.snapshot import BEST, LAST_GOOD, put_snapshot
from peft_mux.checkpoint.task_file import (
    STATE_NAME,
    ChangedSettingsError,
    SavedTask,
    check_settings,
    goes_on,
    read_task_state,
    task_state,
    told_changes,
)
from peft_mux.checkpoint.task_state import TaskState
from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.files import ADAPTER_NAMES
from peft_mux.modeling.backbone.fingerprint import backbone_fingerprint
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.task import TaskStatus
from peft_mux.tasks.task_run import TaskRun

Weights = Mapping[str, torch.Tensor]
"""By parameter name."""

STATE_FOLDER = "state"
_OF_OPTIMIZER = ("moments", "settings", "schedule")


class RunFolder:
    """The output folder of a run.

    Args:
        root: the folder, made where it is absent.
        model: the model whose adapters are written and read.
        keep: how many checkpoints are kept of each task, and how many records of the run; `None` for all.
        is_writer: whether this process writes; one that only reads leaves the folder as it is.
        fingerprint: digest of the whole backbone, where the model holds only a part of it.

    Attributes:
        generations: which tasks were removed from the run, and which have come again under their names.

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
        fingerprint: str | None = None,
    ) -> None:
        """Make the folder and clear away what a crash left behind."""
        self.root = root
        self.model = model
        self.keep = keep
        self.generations = Generations()
        self._fingerprint = fingerprint
        self._is_writer = is_writer
        self._restored_from: dict[str, Path] = {}
        self._newest: bytes | None = None
        if is_writer:
            try:
                self._put_in_order()
            except OSError as error:
                raise storage.unwritable(root, error) from error

    def _put_in_order(self) -> None:
        """Make the folder, and clear away what a crash left behind."""
        self.root.mkdir(parents=True, exist_ok=True)
        if (self.root / STATE_FOLDER).is_symlink():
            raise CheckpointError(
                f"output_dir: got {self.root / STATE_FOLDER}, which is a link; allowed: a run folder without links, as "
                "what they lead to would be written over. Remove the link."
            )
        (self.root / STATE_FOLDER).mkdir(exist_ok=True)
        # Before anything is read: a folder that a crash left moved aside may be the checkpoint to resume from.
        storage.remove_stale(self.root)
        for folder in self.root.iterdir():
            if folder.is_dir() and not folder.is_symlink():
                storage.remove_stale(folder)

    def use_model(self, model: Any) -> None:
        """Write and read another model's adapters from now on; `None` while there is none."""
        self.model = model

    def task_folder(self, name: str) -> Path:
        """Return a task's folder; no name leads out of the run folder, not even through a link."""
        folder = storage.safe_child(self.root, name)
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f'task "{name}": its folder {folder} could not be made ({error}); allowed: a folder in which this'
                " process may write. Free space on its disk, or make it writable."
            ) from error
        return folder

    # -------------------------------------------------------------- writing

    @property
    def fingerprint(self) -> str:
        """Digest of the frozen weights."""
        if self._fingerprint is None:
            self._fingerprint = backbone_fingerprint(self.model.backbone)
        return self._fingerprint

    def save_adapter(self, name: str, weights: Weights | None = None) -> None:
        """Write a task's adapter at the root of its folder, each file whole or not at all.

        Args:
            name: the name of the task.
            weights: the weights of the whole adapter, where the model holds only a part of it.
        """
        folder = self.task_folder(name)
        try:
            # Through a scratch folder, as PEFT writes in place; the task's folder also holds checkpoints and cannot be
            # swapped.
            with storage.scratch_folder(folder) as scratch:
                self.model.save_task(name, scratch, weights)
                storage.write_checksums(scratch, ADAPTER_NAMES)
                replace_adapter(folder, scratch)
        except OSError as error:
            raise CheckpointError(f'task "{name}": its adapter could not be written ({error}).') from error

    def verify_adapter(self, name: str) -> None:
        """Read a task's adapter back.

        Raises:
            CheckpointError: if it is not on the disk as it was written.
        """
        storage.verify_checksums(self.task_folder(name), ADAPTER_NAMES)

    def save_best(self, run: TaskRun, weights: Weights | None = None) -> None:
        """Write a task's adapter as its best so far."""
        folder = self.task_folder(run.name) / "best"
        self._write(folder, run, lambda scratch: self.model.save_task(run.name, scratch, weights))

    def save_task(self, run: TaskRun, snapshot: TaskState, weights: Weights | None = None) -> Path:
        """Write a checkpoint from which the task resumes exactly; return its folder.

        Args:
            run: the task that is written.
            snapshot: the state of the whole task.
            weights: the weights of the whole adapter, where the model holds only a part of it.
        """
        folder = self.task_folder(run.name) / f"checkpoint-{run.step}"

        def fill(scratch: Path) -> None:
            self.model.save_task(run.name, scratch, weights)
            state = task_state(run)
            if run.optimizer is not None:
                tensors, tree = storage.pack_state({name: getattr(snapshot, name) for name in _OF_OPTIMIZER})
                storage.save_tensors(scratch / "optimizer.safetensors", tensors)
                state["optimizer"] = tree
                for copy in (LAST_GOOD, BEST):
                    storage.save_tensors(scratch / f"{copy}.safetensors", snapshot.copies[copy])
            (scratch / STATE_NAME).write_text(json.dumps(state, indent=1), encoding="utf-8")

        self._write(folder, run, fill)
        return folder

    def _write(self, folder: Path, run: TaskRun, fill: Callable[[Path], None]) -> None:
        facts = {"format_version": FORMAT_VERSION, **self._identity(run.name, run.step)}
        storage.write_folder(folder, fill, facts=facts)

    def save_record(self, run_step: int, runs: list[TaskRun], numerics: Mapping[str, Any]) -> None:
        """Write which checkpoints belong together, and drop what is older than `keep` allows.

        Every task must have been saved before; the record is what makes its step the one to resume from.

        Args:
            run_step: steps of the run.
            runs: its tasks, in the order of the stream.
            numerics: what decides the last bits of its results.
        """
        tasks = {
            run.name: RecordedTask(run.status, run.reason, run.step, self.generations.of(run.name))
            for run in runs
            if run.status is not TaskStatus.REMOVED
        }
        # After all tasks: a record names only checkpoints that are whole on the disk.
        removed = self.generations.removed
        self._write_record(RunRecord(run_step, FORMAT_VERSION, self.fingerprint, tasks, removed, numerics))
        # After the new record, so that a crash in between leaves too many checkpoints rather than too few.
        if self.keep is not None:
            prune_states(self.root, self.root / STATE_FOLDER, keep=self.keep)

    def _write_record(self, record: RunRecord) -> None:
        content = record.to_bytes()
        storage.write_file(record_path(self.root / STATE_FOLDER, record.run_step), content)
        self._newest = content

    def _identity(self, name: str, step: int) -> dict[str, Any]:
        """Return what tells a checkpoint from those of other tasks, also of one of the same name before it."""
        generation = self.generations.of(name)
        return {"task": name, "step": step, **({"generation": generation} if generation else {})}

    def has_record(self) -> bool:
        """Whether the run can be resumed at all."""
        return bool(self.records())

    def amend_record(self) -> None:
        """Let the newest record tell which tasks are removed now; what else it tells of stays as it is."""
        record, _ = self.records()[-1]
        # A task that has come again is not in the record, as it was not in the run; it begins anew where that resumes.
        tasks = {name: task for name, task in record.tasks.items() if self.generations.has(name, task)}
        self._write_record(replace(record, tasks=tasks, removed=self.generations.removed))

    def refuse_other_writer(self) -> None:
        """Refuse a folder to which another trainer has written since this one did.

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
                f"output_dir: got {self.root}, to which another trainer has written since this one trained; allowed: to"
                " go on where that one is. Make a new trainer and call train(resume_from_checkpoint=True)."
            )

    # -------------------------------------------------------------- reading

    def records(self, warn: Callable[[str], None] | None = None) -> list[tuple[RunRecord, Path]]:
        """Return the valid run records, oldest first; `warn` is told of each one that is not."""
        return read_records(self.root / STATE_FOLDER, warn)

    def record_paths(self) -> list[Path]:
        """Return the run records, valid or not."""
        return record_paths(self.root / STATE_FOLDER)

    def restore(self, run: TaskRun, step: int, warn: Callable[[str], None]) -> None:
        """Put a task back to its checkpoint of `step`, or to the newest valid one before it.

        Args:
            run: the task, registered, with its optimizer built.
            step: the step that the run record names.
            warn: called with task and file, when that checkpoint is not valid and an older one is taken.

        Raises:
            CheckpointError: if no checkpoint of the task is valid, or its settings have changed.
        """
        if not storage.safe_child(self.root, run.name).exists():
            # What the refusal below tells users to do where no checkpoint is valid.
            warn(f'task "{run.name}": {self.root / run.name} is gone; the task is trained anew.')
            return
        folder = self.task_folder(run.name)
        if step not in storage.numbered_folders(folder):
            gone = folder / f"checkpoint-{step}"
            warn(f'task "{run.name}": {gone} or its manifest is gone. Trying the checkpoint before it.')
        steps = sorted((number for number in storage.numbered_folders(folder) if number <= step), reverse=True)
        for candidate in steps:
            path = folder / f"checkpoint-{candidate}"
            try:
                # With the names expected, lest a folder of another task, copied here, be taken for this one's.
                expected = {"generation": None, **self._identity(run.name, candidate)}
                storage.verify_folder(path, expect=expected)
                self._load(run, path, warn)
            except ChangedSettingsError:
                raise
            except CheckpointError as error:
                warn(f'task "{run.name}": {error} Trying the checkpoint before it.')
                continue
            self._restored_from[run.name] = path
            return
        raise CheckpointError(
            f'task "{run.name}": got no valid checkpoint up to step {step} in {folder}; allowed: an intact '
            "checkpoint folder. Restore it, or remove the task's folder to train the task anew."
        )

    def _load(self, run: TaskRun, folder: Path, say: Callable[[str], None]) -> None:
        saved = read_task_state(folder / STATE_NAME)
        if folder.name != f"checkpoint-{saved.step}":
            raise CheckpointError(f"{folder}: got a state of step {saved.step}; allowed: that of its own name.")
        # Before anything of the run is changed.
        changed = check_settings(run, saved.settings)
        try:
            self._put(run, saved, self._snapshot(run, folder, saved), is_changed=bool(changed))
        except torch.OutOfMemoryError:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        # All files are as they were sealed, so the checkpoint was made up; what torch says of it is as varied.
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder}: got a state that does not fit the task ({type(error).__name__}: {error}); allowed: one that"
                " a run has written."
            ) from error
        if told := told_changes(run, saved, changed):
            say(told)

    def _put(self, run: TaskRun, saved: SavedTask, snapshot: TaskState, *, is_changed: bool) -> None:
        saved.put(run)
        has_more = goes_on(run, saved)
        if (saved.optimizer is None and not has_more) or run.optimizer is None:
            run.end(saved.status, saved.reason)
        # Also for an ended task, whose adapter users go on using.
        put_snapshot(run, self.model, snapshot, from_step=saved.step if is_changed else None)
        if run.optimizer is not None:
            run.status, run.reason = (TaskStatus.RUNNING, "") if has_more else (saved.status, saved.reason)

    def _snapshot(self, run: TaskRun, folder: Path, saved: SavedTask) -> TaskState:
        weights = self.model.saved_weights(run.name, folder)
        if saved.optimizer is None:
            return TaskState(weights, {}, {}, {})
        own = storage.unpack_state(storage.load_tensors(folder / "optimizer.safetensors"), saved.optimizer)
        copies = {copy: storage.load_tensors(folder / f"{copy}.safetensors") for copy in (LAST_GOOD, BEST)}
        return TaskState(weights, **own, copies=copies)

    def newest_checkpoint(self, name: str) -> Path | None:
        """Return the newest intact checkpoint of a task; `None` where there is none."""
        folder = self.root / name
        for step in reversed(storage.numbered_folders(folder)):
            path = folder / f"checkpoint-{step}"
            try:
                storage.verify_folder(path, expect={"generation": None, **self._identity(name, step)})
            except (CheckpointError, OSError):
                continue
            return path
        return None

    def mend_adapter(self, name: str, say: Callable[[str], None]) -> None:
        """Hold the adapter of an ended task against the checkpoint that it was restored from; repair it from there.

        Args:
            name: a task that `restore` has put back.
            say: called with a line where it is repaired.

        Raises:
            CheckpointError: if it cannot be written.
        """
        source = self._restored_from.get(name)
        if source is not None and self._is_writer:
            mend_adapter(self.task_folder(name), source, lambda fault: say(f'task "{name}": {fault}'))
