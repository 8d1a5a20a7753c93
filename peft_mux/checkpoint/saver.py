"""`Saver`: writes the files of a run; a failed write is reported and never ends the run.

Next to adapters and checkpoints these are `config.json` (all settings), `plan.json`, and `environment.json`: the
versions, device and commit that a run was trained with, but no names of hosts, users or paths.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.records import RecordedTask
from peft_mux.checkpoint.run_folder import RunFolder, Weights
from peft_mux.checkpoint.task_state import TaskState, take_snapshot
from peft_mux.engine.allocator import device_words
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.active_task import ActiveTask, TaskTable, run_interval
from peft_mux.errors import CheckpointError, installed_version
from peft_mux.log.run_log import RunLog
from peft_mux.modeling.adapters.files import ADAPTER_NAMES
from peft_mux.modeling.attention.varlen import varlen_kernel
from peft_mux.task import TaskStatus

ENVIRONMENT_NAME = "environment.json"
_NUMERIC_ARGUMENTS = (
    "bf16 planner max_tokens_per_micro_batch chunk_size min_chunk_size pad_to_chunks split_long_sequences "
    "share_prefixes memory_limit_gib cost_profile num_micro_batches tensor_parallel_size "
    "pipeline_parallel_size replicas dispatch interleaved_passes pipeline_schedule shard_backbone reduce_dtype "
    "measured_times cuda_graphs full_determinism world_size"
).split()
_NUMERIC_PACKAGES = ("torch", "transformers", "peft")
_PACKAGES = "peft-mux torch transformers peft accelerate datasets tokenizers safetensors numpy triton".split()
_GIT_TIMEOUT_S = 2.0
"""Seconds that git may take: in a large checkout on a slow disk it takes minutes."""

# ---------------------------------------------------------------- what a run was trained with


def numerics_of(args: MultiTaskTrainingArguments) -> dict[str, Any]:
    """Return what decides the last bits of results, by name: arguments, versions, device, threads, attention."""
    device = args.device
    is_cuda = device.type == "cuda"
    kernel = varlen_kernel() if is_cuda else None
    values = {name: getattr(args, name) for name in _NUMERIC_ARGUMENTS}
    values["max_tokens_per_micro_batch"] = args.pass_tokens()
    return {
        **{
            name: value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in values.items()
        },
        **{f"{name} version": installed_version(name) for name in _NUMERIC_PACKAGES},
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "threads": None if is_cuda else torch.get_num_threads(),
        "attention": "by groups of equal length" if kernel is None else f"{kernel.library} varlen",
        "liger": (installed_version("liger-kernel") if is_cuda and args.use_liger_kernel else None) or "not used",
    }


def environment_of(args: MultiTaskTrainingArguments) -> dict[str, Any]:
    """Return versions, the device of this process, the number of processes and the commit, as plain JSON."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in _PACKAGES if (version := installed_version(name)) is not None},
        "device": device_words(args.device),
        "num_processes": args.world_size,
        "attention": numerics_of(args)["attention"],
        "git": commit_of_script(),
    }


def commit_of_script() -> dict[str, Any] | None:
    """Return the commit of the script's folder, and whether files differ from it; `None` outside of a checkout."""
    # Commands, notebooks and prompts have no script; what is part of an installation (peft-mux, pytest, the kernel of a
    # notebook) is not the user's.
    folder, script = Path.cwd(), getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and (path := Path(script).resolve()).is_file():
        installed = (Path(sys.prefix).resolve(), Path(__file__).resolve().parents[1])
        folder = folder if any(path.is_relative_to(place) for place in installed) else path.parent
    try:
        shown = subprocess.run(
            ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules"],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # the checkout is not locked for others meanwhile
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    # No git, no checkout, one of another user, or one that takes too long.
    except (OSError, subprocess.SubprocessError):
        return None
    lines = shown.stdout.decode(errors="replace").splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if not commits or commits[0] == "(initial)":
        return None
    return {"commit": commits[0], "is_dirty": any(not line.startswith("# ") for line in lines)}


def task_config(task: ActiveTask) -> dict[str, Any]:
    """Return every setting of a task in effect."""
    return {**asdict(task.hyper), "num_steps": task.num_steps, "peft_config": task.task.peft_config.to_dict()}


def describe_tasks(root: Path, args: MultiTaskTrainingArguments, table: TaskTable, *, keeps: bool = False) -> None:
    """Write every setting in effect into `config.json`; with `keeps`, tasks that have left stay in the file.

    Raises:
        CheckpointError: if it cannot be written.
    """
    tasks = {task.name: task_config(task) for task in table}
    if keeps:
        # A user may have edited or removed the file; nothing is resumed from it.
        with suppress(OSError, ValueError, KeyError, TypeError):
            tasks = {**json.loads(storage.read_regular(root / "config.json"))["tasks"], **tasks}
    config = json.dumps({"args": args.to_dict(), "tasks": tasks}, indent=2, default=str)
    storage.write_file(root / "config.json", config.encode())


# ---------------------------------------------------------------- when what is saved


class Saver:
    """Writes adapters and states of a run.

    Args:
        table: all tasks of the run.
        args: the arguments of the run, which say what is saved when.
        log: takes notices of what could not be saved.
        processes: all processes of the run; the first one writes, and the others take the same steps without writing.

    Attributes:
        is_writer: whether this process writes.
        folder: the folder of the run; `None` before it is opened, and if nothing is saved (`save_strategy="no"`).
        num_states: states of the whole run that were written, the same number on all processes that save together.
        decided_by: returns what decided the plan besides the arguments, by name, which becomes part of the states.
        unsaved: tasks that have ended and whose adapter could not be written, with the status and the reason with which
            they would have ended; `None` if only the process that writes knows these.
        saved_step: step of the run at which all tasks were saved; `None` if they have changed since.
        gather: `gather(task, only_weights=False)` returns the full state of a task on the process that writes and
            `None` on the others; `None` if each process holds all of every task.
        lock: reserves the folder; a program that reads the rows of the run may hold it already.
    """

    def __init__(self, table: TaskTable, args: MultiTaskTrainingArguments, log: RunLog, processes: Processes) -> None:
        self.folder: RunFolder | None = None
        self.table, self.args, self.log, self.is_writer = table, args, log, processes.is_main
        self._processes = processes
        self.num_states = 0
        self.decided_by: Callable[[], Mapping[str, float]] = dict
        self.unsaved: dict[str, tuple[TaskStatus, str] | None] = {}
        self.gather: Callable[..., TaskState | None] | None = None
        self.saved_step: int | None = None
        self._adapter_steps: dict[str, int] = {}
        self.lock: storage.FolderLock | None = None

    @contextmanager
    def keep_folder(self, root: Path, *, continues: bool = True) -> Iterator[None]:
        """Lock the run folder against other writers in the `with` block; only the process that writes does.

        Args:
            root: the folder; made if it does not exist.
            continues: whether this trainer continues from its own state, rather than from what the folder holds.

        Raises:
            CheckpointError: naming who holds the lock, or why the folder cannot be written to; or if another trainer
                has written to it since this one has.
        """
        if not self.is_writer:
            yield
            return
        self.lock = self.lock or storage.FolderLock(root)
        if not self.lock.is_held:
            self.lock.acquire()
        try:
            if self.folder is not None and continues:
                self.folder.refuse_other_writer()
            yield
        finally:
            self.lock.release()

    def note_loading(self, loading: str) -> None:
        """Publish what is being loaded: "model", or "" when training begins; a failed write is ignored."""
        if self.lock is not None and self.lock.is_held:
            with suppress(CheckpointError):
                self.lock.note_loading(loading)

    # ---------------------------------------------------------------- states of the run

    def is_due(self) -> bool:
        """Whether a state of all tasks is due after the run step just taken."""
        if self.args.save_strategy == "epoch":
            return any(task.is_at_epoch_end for task in self.table.running)
        every = run_interval(self.args.save_steps, self.table) if self.args.save_strategy == "steps" else 0
        return bool(every) and self.log.state.global_step % every == 0

    @property
    def is_current(self) -> bool:
        """Whether the present step is saved already, or nothing is to be saved."""
        return self.folder is None or self.saved_step == self.log.state.global_step

    def save_run(self) -> bool:
        """Write a state from which all tasks resume together; return whether it was written."""
        is_saved, folder = True, self.folder
        for task in self.table:
            # After a failure the other processes still wait for one that gathers, so only the writing is skipped.
            if not task.status.is_final and (is_saved or self.gather is not None):
                is_saved = self._save_task(task, is_wanted=is_saved) and is_saved
        if is_saved and folder is not None:
            step, numerics = self.log.state.global_step, {**numerics_of(self.args), **self.decided_by()}
            is_saved = not self.attempt(lambda: folder.save_record(step, list(self.table), numerics))
        # All processes must agree, or only some would save the step again at the end.
        is_saved = self._have_all_saved(is_saved and folder is not None)
        if is_saved:
            self.saved_step = self.log.state.global_step
            self.num_states += 1
        return is_saved

    def save_due_tasks(self, names: Iterable[str], asking: Container[str] = ()) -> list[ActiveTask]:
        """Write a checkpoint of each task whose own `save_steps` are over, or that asks; return those now saved."""
        running = [task for task in map(self.table.__getitem__, names) if task.status is TaskStatus.RUNNING]
        due = [
            task for task in running if task.name in asking or (task.save_every and task.step % task.save_every == 0)
        ]
        return [task for task in due if self._save_task(task, with_adapter=False)]

    def _save_task(self, task: ActiveTask, *, with_adapter: bool = True, is_wanted: bool = True) -> bool:
        """Write one task, and return whether it was written; all processes that hold parts of it call this."""
        folder = self.folder
        if folder is None:
            return False
        # Also if this process does not write, or writes nothing more: the others send or wait.
        snapshot, weights = self._collect(task)

        def write() -> None:
            if with_adapter:
                folder.save_adapter(task.name, weights)
                self._adapter_steps[task.name] = task.step
            folder.save_task(task, snapshot, weights)

        return is_wanted and not self.attempt(write)

    def take_over(self, other: RunFolder, before: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Continue the run of a folder that the tasks were restored from: its removed and its ended tasks.

        Args:
            other: that folder, which may be this run's own.
            before: the `numerics` of the record that was resumed from.
            say: called with a line for everything that has changed.

        Raises:
            CheckpointError: if the adapter of an ended task cannot be written.
        """
        self.saved_step = None  # what this trainer has saved since is not what the tasks went back to
        # What an older version did not record is not compared.
        for name, now in numerics_of(self.args).items():
            if before.get(name, now) != now:
                was = f"{before[name]!r} before, {now!r} now"
                say(f"resumed with another {name}: {was}; the last bits of results may differ")
                self.log.event("numerics_changed", name=name, before=before[name], now=now)
        if self.folder is None:
            return
        if self.folder is not other:
            self.folder.removed, self.folder.generations = dict(other.removed), dict(other.generations)
        for task in [task for task in self.table if task.status.is_final]:
            if self.folder is not other:  # tasks that have ended there are part of what this folder is resumed from
                if failure := self.save_ended(task):
                    raise CheckpointError(failure)
            else:
                self.folder.mend_adapter(task.name, say)
                # A removed task may have left without an adapter.
                if (self.folder.root / task.name / storage.CHECKSUMS_NAME).exists():
                    self._adapter_steps[task.name] = task.step

    # ---------------------------------------------------------------- adapters

    def save_adapter(self, name: str) -> bool:
        """Write a task's adapter; return whether it was written."""
        folder = self.folder
        if folder is None:
            return False
        weights = self.full_weights(self.table[name])
        is_saved = not self.attempt(lambda: folder.save_adapter(name, weights))
        if is_saved:
            self._adapter_steps[name] = self.table[name].step
        return is_saved

    def save_best(self, task: ActiveTask) -> None:
        """Write a task's adapter as its best so far."""
        folder, weights = self.folder, self.full_weights(task)
        if folder is not None:
            self.attempt(lambda: folder.save_best(task, weights))

    def save_ended(self, task: ActiveTask) -> str:
        """Write the adapter and the last state of a task that has ended, and read the adapter back.

        Returns:
            Why its adapter is not on disk; "" if it is, or nothing is to be saved.
        """
        folder = self.folder
        # The files of a removed task are those that it had when it left.
        if folder is None or task.status is TaskStatus.REMOVED:
            return ""
        snapshot, weights = self._collect(task)

        def write_adapter() -> None:
            folder.save_adapter(task.name, weights)
            storage.verify_checksums(folder.task_folder(task.name), ADAPTER_NAMES)

        failure = self.attempt(write_adapter)
        # Also if that failed: the state holds the adapter too.
        self.attempt(lambda: folder.save_task(task, snapshot, weights))
        if not self._have_all_saved(not failure) and not failure:
            failure = "another process could not write it"
        self.unsaved.pop(task.name, None)
        if failure:
            self.unsaved[task.name] = task.status, task.reason
        else:
            self._adapter_steps[task.name] = task.step
        return failure

    def _have_all_saved(self, is_saved: bool) -> bool:
        """Return whether all processes have saved, if they save together."""
        return is_saved if self.gather is None else all(self._processes.gather(is_saved))

    def place(self, task: ActiveTask) -> Path | None:
        """Return the folder with the present adapter of a task; `None` if the disk has none or an older one."""
        if self.folder is None or self._adapter_steps.get(task.name) != task.step or task.name in self.unsaved:
            return None
        return self.folder.root / task.name

    def full_weights(self, task: ActiveTask) -> Weights | None:
        """Return a task's full weights on the process that writes, if processes hold parts; all of them call this."""
        state = None if self.gather is None else self.gather(task, only_weights=True)
        return None if state is None else state.weights

    def _collect(self, task: ActiveTask) -> tuple[TaskState | None, Weights | None]:
        """Return state and weights of a task on the process that writes; all that hold parts of it call this."""
        assert self.folder is not None, "called only if something is saved"
        if self.gather is not None:
            snapshot = self.gather(task)
            return snapshot, None if snapshot is None else snapshot.weights
        # PEFT selects the weights from the model.
        return (take_snapshot(task, self.folder.model) if self.is_writer else None), None

    # ---------------------------------------------------------------- tasks that leave and arrive

    def note_removed(self, task: ActiveTask) -> None:
        """Record that a task was removed, so that it stays removed when the run is resumed."""
        self.unsaved.pop(task.name, None)
        self._adapter_steps.pop(task.name, None)
        if self.folder is not None:
            generation = self.folder.generations.get(task.name, 0)
            self.folder.removed[task.name] = RecordedTask(TaskStatus.REMOVED, task.reason, task.step, generation)
            self._amend(self.folder)

    def note_arrival(self, name: str) -> None:
        """Record that a task which has the name of a removed one, whose files are not its own, is a new task."""
        folder = self.folder
        if folder is not None and (before := folder.removed.pop(name, None)) is not None:
            folder.generations[name] = before.generation + 1
            self._amend(folder)

    def _amend(self, folder: RunFolder) -> None:
        """Put what has changed into the newest record, or write a first one; all processes call this."""
        # A record covers all tasks, so a first one needs the states of all of them.
        records: list[Any] = []
        self.attempt(lambda: records.extend(folder.records()))
        if self._have_all_saved(not self.is_writer or bool(records)):
            self.attempt(folder.amend_record)
        else:
            self.save_run()

    def attempt(self, write: Callable[[], object]) -> str:
        """Write on the process that writes; log a failure and return it, so that a full disk does not end the run."""
        if not self.is_writer:
            return ""
        # Between two trainings the folder is locked for each write.
        is_locked = self.lock is None or self.lock.is_held
        try:
            with nullcontext() if self.lock is None or is_locked else self.keep_folder(self.lock.root):
                write()
        except (CheckpointError, OSError) as error:
            self.log.warn(f"not saved at step {self.log.state.global_step}: {error}")
            self.log.event("save_failed", reason=str(error))
            return str(error) or type(error).__name__
        return ""
