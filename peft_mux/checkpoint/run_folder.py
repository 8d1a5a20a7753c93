"""The adapter at the root of a task's folder: what it is replaced by, and repaired from."""

# MERGED: Which states of a run are kept: the newest, and every checkpoint that they name.
# MERGED: Checkpoints of a run: one folder a task and step, and one record that says which of them belong together.
# MERGED:     <output_dir>/
# MERGED:       metrics.jsonl  plan.json  config.json  environment.json
# MERGED:       run.lock                               while a process trains here: who
# MERGED:       state/run-00000030.json                which checkpoint of which task; written last
# MERGED:       <task>/adapter_config.json  adapter_model.safetensors       the task's adapter, loadable by plain PEFT
# MERGED:       <task>/adapter_checksums.json          size and SHA-256 of these two
# MERGED:       <task>/checkpoint-30/                  the same, plus optimizer, last good and best weights, state
# MERGED:       <task>/best/                           the adapter of the best evaluation, where early stopping is set
# MERGED: Everything is safetensors and JSON, tensors by the names of parameters, so that any number and layout of
# MERGED: processes goes
# MERGED: on from it; folders appear whole or not at all (`peft_mux.storage`). Data position, schedule and
# MERGED: dropout are functions of the task's step and seed, so they need no state beyond those numbers.
# MERGED: How the folder of a run is opened: one's own to write to, another one's to read.
# MERGED: Going on with a run: its newest record says where each task stands.

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peft_mux import storage
from peft_mux.checkpoint.records import (
    FORMAT_VERSION,
    READABLE_VERSIONS,
    STATE_NAME,
    ChangedSettingsError,
    Generations,
    RecordedTask,
    RunRecord,
    SavedTask,
    check_settings,
    goes_on,
    read_records,
    read_task_state,
    record_path,
    record_paths,
    task_state,
    told_changes,
)
from peft_mux.checkpoint.task_state import BEST, LAST_GOOD, TaskState, put_snapshot
from peft_mux.engine.tasks.task_run import TaskRun, TaskTable
from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.files import ADAPTER_NAMES, CONFIG_NAME, WEIGHTS_NAME
from peft_mux.modeling.backbone.shape import backbone_fingerprint
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.task import TaskStatus


def replace_adapter(folder: Path, scratch: Path) -> None:
    """Let the files of an adapter take the place of those of a task, each whole or not at all.

    Args:
        folder: the folder of the task, which holds its checkpoints too and so cannot be swapped.
        scratch: folder on the same file system with an adapter and its checksums, which are moved.

    Raises:
        OSError: if a file cannot be moved.
    """
    # Gone first and back last: a crash between two files must not leave the checksums of others.
    (folder / storage.CHECKSUMS_NAME).unlink(missing_ok=True)
    for file in (*ADAPTER_NAMES, storage.CHECKSUMS_NAME):
        # The configuration is the same at every save.
        if file != CONFIG_NAME or not _is_same(folder / file, scratch / file):
            storage.replace_file(scratch / file, folder / file)


def _is_same(present: Path, new: Path) -> bool:
    try:
        return not present.is_symlink() and storage.read_regular(present) == new.read_bytes()
    except OSError:
        return False


def mend_adapter(folder: Path, checkpoint: Path, say: Callable[[str], None]) -> None:
    """Repair the adapter of an ended task from the checkpoint that it ended with; write checksums where there are none.

    Args:
        folder: the folder of the task.
        checkpoint: a folder with the same adapter, which was verified.
        say: called with what is wrong and what is done, where anything is.

    Raises:
        CheckpointError: if the adapter cannot be written.
    """
    fault = _fault(folder, checkpoint)
    if fault:
        say(f"{fault} It is taken from {checkpoint}.")
    elif (folder / storage.CHECKSUMS_NAME).exists():
        return
    # What is whole stays, as that of earlier versions, which wrote no checksums.
    source = checkpoint if fault else folder
    try:
        with storage.scratch_folder(folder) as scratch:
            for file in ADAPTER_NAMES:
                (scratch / file).write_bytes((source / file).read_bytes())
            storage.write_checksums(scratch, ADAPTER_NAMES)
            replace_adapter(folder, scratch)
    except OSError as error:
        raise CheckpointError(f"{folder}: the adapter could not be written ({error}).") from error


def _fault(folder: Path, checkpoint: Path) -> str:
    """Return in a sentence what is wrong with an adapter; "" where it is that of the checkpoint."""
    try:
        if (folder / storage.CHECKSUMS_NAME).exists():
            storage.verify_checksums(folder, ADAPTER_NAMES)
        is_same = storage.digest_file(folder / WEIGHTS_NAME) == storage.digest_file(checkpoint / WEIGHTS_NAME)
        # Not compared: which backbone it names may differ.
        json.loads(storage.read_regular(folder / CONFIG_NAME))
    except CheckpointError as error:
        return str(error)
    except (OSError, ValueError, RecursionError) as error:
        return f"{folder}: got no readable adapter ({error})."
    return "" if is_same else f"{folder / WEIGHTS_NAME}: got other weights than those that the task ended with."


def prune_states(root: Path, records_folder: Path, *, keep: int) -> None:
    """Delete records of a run beyond the newest, and checkpoints of its tasks beyond the newest that no record names.

    Args:
        root: the folder of the run.
        records_folder: the folder that its records lie in.
        keep: number of records, and of checkpoints of each task, that are kept.

    Raises:
        OSError: if something cannot be deleted.
    """
    records = read_records(records_folder)
    for _, path in records[:-keep]:
        # Records before the checkpoints that they name: none may ever name one that is gone.
        path.unlink()
    needed: dict[str, set[Path]] = {}
    for record, _ in records[-keep:]:
        for name, entry in record.tasks.items():
            needed.setdefault(name, set()).add(root / name / f"checkpoint-{entry.step}")
    for name, folders in needed.items():
        # Tasks end at different steps, so a checkpoint that a kept record names may be old by number.
        storage.prune(root / name, keep=keep, protect=folders)


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


def open_other_folder(
    root: Path, model: MultiTaskPeftModel, *, is_writer: bool = True, fingerprint: str | None = None
) -> RunFolder:
    """Open the folder of another run, to read its state.

    What a crash has left behind there is put in order first, unless a process trains there or the folder cannot be
    written to; then it is read as it is.

    Args:
        root: the folder of that run.
        model: the model whose adapters are read.
        is_writer: whether this process puts anything in order.
        fingerprint: digest of the whole backbone, where the model holds only a part of it.
    """
    lock = storage.FolderLock(root)
    if is_writer and root.is_dir():
        try:
            lock.acquire()
        except CheckpointError:
            is_writer = False
    try:
        is_writer = is_writer and lock.is_held
        return RunFolder(root, model, is_writer=is_writer, fingerprint=fingerprint)
    finally:
        lock.release()


def open_run_folder(
    root: Path,
    model: MultiTaskPeftModel,
    *,
    keep: int | None,
    is_resumed: bool,
    is_writer: bool = True,
    fingerprint: str | None = None,
) -> RunFolder:
    """Open the folder that a run writes to; a process that does not write looks at nothing.

    Args:
        root: the folder, made where it is absent.
        model: the model whose adapters are written and read.
        keep: how many checkpoints are kept of each task, and how many records of the run; `None` for all.
        is_resumed: whether the run goes on with what is there.
        is_writer: whether this process writes.
        fingerprint: digest of the whole backbone, where the model holds only a part of it.

    Raises:
        CheckpointError: if it holds a run that is not resumed, whose state would be mixed with the new one's.
    """
    if is_writer and not is_resumed:
        refuse_held_folder(root)
    return RunFolder(root, model, keep=keep, is_writer=is_writer, fingerprint=fingerprint)


def refuse_held_folder(root: Path) -> None:
    """Refuse to begin a run in a folder that holds one.

    Raises:
        CheckpointError: if it does.
    """
    if record_paths(root / STATE_FOLDER):
        raise CheckpointError(
            f"output_dir: got {root}, which holds a run; allowed: a new folder, or to go on with it: "
            "train(resume_from_checkpoint=True), or peft-mux train FILE --resume. Delete it to train anew."
        )


def require_state(root: Path) -> None:
    """Require that a folder holds a state to go on from; whether it is intact is looked at when it is read.

    Raises:
        CheckpointError: if it holds none.
    """
    if not record_paths(root / STATE_FOLDER):
        raise CheckpointError(
            f"resume_from_checkpoint: got {root}, which holds no state of a run; allowed: the output_dir of a run that "
            "has saved at least once. Call train() without it to begin, or peft-mux train without --resume."
        )


def resume_tasks(folder: RunFolder, table: TaskTable, say: Callable[[str], None]) -> int:
    """Put all tasks back to where the newest record of a run left them; return its run step.

    Args:
        folder: the folder of the run that goes on.
        table: the tasks of the run, started; they are brought into the order of the record.
        say: called with a line for each task left out, and for each checkpoint that is not valid.

    Raises:
        CheckpointError: if there is no record, the backbone is another one, or a task cannot be restored.
    """
    records = folder.records(say)
    if not records:
        raise CheckpointError(
            f"resume_from_checkpoint: got {folder.root}, which holds no state of a run; allowed: the output_dir of a "
            "run that has saved at least once. Call train() without it to begin."
        )
    record, path = records[-1]
    if record.version not in READABLE_VERSIONS:
        raise CheckpointError(
            f"{path}: got format version {record.version}; allowed: {FORMAT_VERSION}, which this version of "
            "peft_mux reads. Resume with the version that wrote it, or train into a new output_dir."
        )
    if record.backbone != folder.fingerprint:
        raise CheckpointError(
            f"resume_from_checkpoint: got {folder.root}, whose tasks were trained on other weights than those of "
            "`model`; allowed: the same backbone in the same dtype. Load that one, or train into a new output_dir."
        )
    folder.generations = Generations(record)
    for name, entry in record.tasks.items():
        if name in table:
            folder.restore(table[name], entry.step, say)
        else:
            say(f'task "{name}" of the resumed run is not among the tasks given now; it is left out, its files stay')
    for run in table:
        if run.name not in record.tasks and run.name not in record.removed:
            say(f'task "{run.name}" is not part of the resumed run; it begins with its first step')
    for name, entry in record.removed.items():
        if name in table:
            table[name].step = entry.step
            table[name].end(TaskStatus.REMOVED, f"removed from the run at step {entry.step}")
            say(f'task "{name}" was removed from the run; it stays removed, and its files as they are')
    # The order of tasks in the stream is part of the rounding of sums.
    table.reorder(list(record.tasks))
    return record.run_step
