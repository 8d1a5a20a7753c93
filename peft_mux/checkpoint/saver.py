"""What decides the last bits of a result beside a task's own settings; a resumed run says what has changed of it."""

# MERGED: `environment.json` of a run folder: with what, and on what, a run was trained; no names of hosts, users or
# MERGED: paths.
# MERGED: `Saver`: when what is written into the run folder, and what a failed write costs: a notice, never the run.

from __future__ import annotations

import copy
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.run_folder import RunFolder, Weights
from peft_mux.checkpoint.task_state import TaskState, take_snapshot
from peft_mux.engine.tasks.task_run import TaskRun, TaskTable, run_interval
from peft_mux.errors import CheckpointError, installed_version
from peft_mux.modeling.attention.varlen import varlen_kernel
from peft_mux.reporting.banner import device_words
from peft_mux.reporting.run_log import RunLog
from peft_mux.scheduler.plan import Plan
from peft_mux.storage import FolderLock
from peft_mux.task import TaskStatus

_ARGUMENTS = (
    "bf16 planner max_tokens_per_micro_batch chunk_size min_chunk_size pad_to_chunks split_long_sequences "
    "share_prefixes last_layer_at_targets memory_limit_gib cost_profile num_micro_batches tensor_parallel_size "
    "pipeline_parallel_size replicas dispatch interleaved_passes pipeline_schedule shard_backbone measured_times "
    "cuda_graphs full_determinism world_size"
).split()
_PACKAGES = ("torch", "transformers", "peft")


def numerics_of(args: MultiTaskTrainingArguments) -> dict[str, Any]:
    """Return what decides the bits of a run here, by name: arguments, versions, device, threads, attention."""
    device = args.device
    is_cuda = device.type == "cuda"
    kernel = varlen_kernel() if is_cuda else None
    return {
        **{name: _plain(getattr(args, name)) for name in _ARGUMENTS},
        **{f"{name} version": installed_version(name) for name in _PACKAGES},
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "threads": None if is_cuda else torch.get_num_threads(),
        "attention": "by groups of equal length" if kernel is None else f"{kernel.library} varlen",
    }


def changed_numerics(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what has changed, by name: before and now. What an older version did not record is not compared."""
    return {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


ENVIRONMENT_NAME = "environment.json"
_PACKAGES_environment = (
    "peft-mux torch transformers peft accelerate datasets tokenizers safetensors numpy triton".split()
)
_GIT_S = 2.0
"""Seconds after which a checkout is left alone: large ones on slow disks take minutes."""


def environment_of(args: MultiTaskTrainingArguments) -> dict[str, Any]:
    """Return versions, the device of this process, the number of processes and the checkout, as plain JSON.

    Args:
        args: the arguments of the run.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: found for name in _PACKAGES_environment if (found := installed_version(name)) is not None},
        "device": device_words(args.device),
        "num_processes": args.world_size,
        "attention": numerics_of(args)["attention"],
        "git": _checkout(),
    }


def _checkout() -> dict[str, Any] | None:
    """Return the commit of the script's folder, and whether files differ from it; `None` outside of a checkout."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules"]
    # Whoever works in the checkout meanwhile does not find it locked.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        found = subprocess.run(
            command,
            cwd=_script_folder(),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
            check=True,
        )
    # No git, no checkout, one of another user, or one that takes too long.
    except (OSError, subprocess.SubprocessError):
        return None
    heads, changes = [], []
    for line in found.stdout.decode(errors="replace").splitlines():
        (heads if line.startswith("# ") else changes).append(line)
    commits = [line.split()[-1] for line in heads if line.startswith("# branch.oid ")]
    is_born = commits and commits[0] != "(initial)"
    return {"commit": commits[0], "is_dirty": bool(changes)} if is_born else None


def _script_folder() -> Path:
    """Return the folder of the script that was started; the working directory for commands, notebooks and prompts."""
    here, script = Path.cwd(), getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None or not (path := Path(script).resolve()).is_file():
        return here
    # What stands in an installation, such as peft-mux, pytest or a notebook's kernel, is not what was written for this.
    installed = (Path(sys.prefix).resolve(), Path(__file__).resolve().parents[1])
    return here if any(path.is_relative_to(folder) for folder in installed) else path.parent


class Gather(Protocol):
    """Makes the full state of a task out of the parts of all processes."""

    def __call__(self, run: TaskRun, *, only_weights: bool = False) -> TaskState | None:
        """Return the state on the process that writes, `None` on the others; all call this."""
        ...


class Saver:
    """Writes adapters and states of a run.

    Args:
        table: all tasks of the run.
        args: the arguments of the run, which say what is saved when.
        log: takes notices of what could not be saved.
        is_writer: whether this process writes; the others go the same way without.

    Attributes:
        folder: the folder of the run, once it is open; `None` where nothing is to be saved (`save_strategy="no"`).
        is_writer: whether this process writes.
        num_states: states of the whole run that were written, the same number on all processes that save together.
        decided_by: gives what has decided the plan beside the arguments, by name, which becomes part of the states.
        unsaved: tasks that have ended and whose adapter could not be written.
    """

    def __init__(
        self, table: TaskTable, args: MultiTaskTrainingArguments, log: RunLog, *, is_writer: bool = True
    ) -> None:
        """Save nothing until a folder is opened."""
        self.folder: RunFolder | None = None
        self.table, self.args, self.log, self.is_writer = table, args, log, is_writer
        self._gather: Gather | None = None
        self._agree: Callable[[bool], bool] = bool
        self._saved_step: int | None = None
        self.num_states = 0
        self.decided_by: Callable[[], Mapping[str, float]] = dict
        self.unsaved: set[str] = set()
        self._adapter_steps: dict[str, int] = {}
        self._lock: FolderLock | None = None

    @contextmanager
    def keep_folder(self, root: Path, *, goes_on: bool = True) -> Iterator[None]:
        """Keep the run folder from other writers in the `with` block; what one process writes no other writes too.

        Args:
            root: the folder, made where it is absent.
            goes_on: whether this trainer goes on from where it is, rather than from what the folder holds.

        Raises:
            CheckpointError: naming who else keeps it, or why it cannot be written to; or if another trainer has written
                to it since this one has.
        """
        if not self.is_writer:
            yield
            return
        self._lock = self._lock or FolderLock(root)
        self._lock.acquire()
        try:
            if self.folder is not None and goes_on:
                self.folder.refuse_other_writer()
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep the folder for one write, where the run does not train."""
        if self._lock is None or self._lock.is_held:
            yield
            return
        with self.keep_folder(self._lock.root):
            yield

    def open(self, folder: RunFolder) -> None:
        """Save into a folder from now on."""
        self.folder = folder

    def use_model(self, model: Any) -> None:
        """Save another model's adapters from now on; `None` while there is none."""
        if self.folder is not None:
            self.folder.use_model(model)

    def use_full_model(self) -> None:
        """Save what this process holds, which is all of every task."""
        self._gather, self._agree = None, bool

    def use_parts(self, gather: Gather, agree: Callable[[bool], bool]) -> None:
        """Save what all processes hold together, each of them a part of every task.

        Args:
            gather: returns the full state of a task on the writer and `None` on the others, which all call it.
            agree: returns whether all processes have saved.
        """
        self._gather, self._agree = gather, agree

    def is_due(self) -> bool:
        """Whether the run step just taken calls for a state of all tasks."""
        if self.args.save_strategy == "epoch":
            return any(run.is_at_epoch_end for run in self.table.running)
        every = run_interval(self.args.save_steps, self.table) if self.args.save_strategy == "steps" else 0
        return bool(every) and self.log.state.global_step % every == 0

    @property
    def is_current(self) -> bool:
        """Whether the present step is saved already, or nothing is to be."""
        return self.folder is None or self._saved_step == self.log.state.global_step

    def note_change(self) -> None:
        """Count what is saved as old: tasks have come, gone, or rest since, within the same step."""
        self._saved_step = None

    def save_run(self) -> bool:
        """Write a state from which all tasks resume together; return whether it was written."""
        saved = True
        for run in self.table:
            # The others would wait for a process that does not gather, so a failure ends nothing but the writing.
            if not run.status.is_final and (saved or self._gather is not None):
                saved = self._save_task(run, is_wanted=saved) and saved
        if saved:
            numerics = {**numerics_of(self.args), **self.decided_by()}
            saved = self._safely(
                lambda folder: folder.save_record(self.log.state.global_step, list(self.table), numerics)
            )
        # Every process must call a step saved or not alike, or only some would save it again at the end.
        saved = self._agree(saved)
        if saved:
            self._saved_step = self.log.state.global_step
            self.num_states += 1
        return saved

    def save_due_tasks(self, names: list[str]) -> None:
        """Write a checkpoint of each task whose own `save_steps` are over."""
        for name in names:
            run = self.table[name]
            every = run.save_every
            if run.status is TaskStatus.RUNNING and every and run.step % every == 0:
                self._save_task(run, with_adapter=False)

    def save_ended(self, run: TaskRun) -> str:
        """Write the adapter and the last state of a task that has ended, and read the adapter back.

        Returns:
            Why its adapter is not on the disk; "" where it is, or nothing is to be saved.
        """
        # The files of a removed task are those that it had when it left.
        if self.folder is None or run.status is TaskStatus.REMOVED:
            return ""
        snapshot, weights = self._collect(run)

        def write_adapter(folder: RunFolder) -> None:
            folder.save_adapter(run.name, weights)
            folder.verify_adapter(run.name)

        failure = self._failure(write_adapter)
        # Also where that failed: the state holds the adapter too.
        self._failure(lambda folder: folder.save_task(run, _present(snapshot), weights))
        if not self._agree(not failure) and not failure:
            failure = "another process could not write it"
        self.unsaved.discard(run.name)
        if failure:
            self.unsaved.add(run.name)
        else:
            self._adapter_steps[run.name] = run.step
        return failure

    def place(self, run: TaskRun) -> Path | None:
        """Return the folder with the adapter of a task as it is now; `None` where the disk has none or an older one."""
        if self.folder is None or self._adapter_steps.get(run.name) != run.step or run.name in self.unsaved:
            return None
        return self.folder.root / run.name

    def newest_copy(self, name: str) -> str:
        """Return in a sentence where the newest intact copy of a task lies."""
        folder = None if self.folder is None else self.folder.newest_checkpoint(name)
        return "There is no copy of it on the disk." if folder is None else f"Its newest copy is {folder}."

    def save_best(self, run: TaskRun) -> None:
        """Write a task's adapter as its best so far."""
        # Gathered before `_safely`, in which only the writer does anything.
        weights = self.full_weights(run)
        self._safely(lambda folder: folder.save_best(run, weights))

    def save_adapter(self, name: str) -> bool:
        """Write a task's adapter; return whether it was written."""
        if self.folder is None:
            return False
        weights = self.full_weights(self.table[name])
        is_saved = self._safely(lambda folder: folder.save_adapter(name, weights))
        if is_saved:
            self._adapter_steps[name] = self.table[name].step
        return is_saved

    # ----------------------------------------------------- tasks that leave and come again

    def note_removed(self, run: TaskRun) -> None:
        """Let a removal outlive this process: whoever resumes the run leaves the task removed.

        Args:
            run: the task, taken out of the table.
        """
        self.unsaved.discard(run.name)
        self._adapter_steps.pop(run.name, None)
        if self.folder is not None:
            self.folder.generations.note_removed(run.name, run.reason, run.step)
            self._amend()

    def note_arrival(self, name: str) -> None:
        """Let a task that comes under the name of a removed one outlive this process as a new one."""
        if self.folder is not None and self.folder.generations.note_arrival(name):
            self._amend()

    def describe_arrivals(self, root: Path) -> None:
        """Put the settings of tasks that have come into `config.json`, beside those of tasks that have left.

        The file is written when training begins, whether or not anything else is saved, so it is kept in step likewise.

        Args:
            root: the run folder.
        """
        if self.is_writer:
            self._attempt(lambda: describe_tasks(root, self.args, self.table, keeps=True))

    def _amend(self) -> None:
        """Put what has changed into the newest record, or write a first one; every process calls this alike."""
        assert self.folder is not None, "asked for only where something is saved"
        # A record tells of all tasks, so a first one needs the states of them all.
        if self._agree(not self.is_writer or self.folder.has_record()):
            self._safely(lambda folder: folder.amend_record())
        else:
            self.save_run()

    def take_over(self, other: RunFolder, say: Callable[[str], None]) -> None:
        """Take over the run that another folder holds, or this one's own: what it knew of, and its ended tasks.

        Args:
            other: the folder from which the tasks were restored.
            say: called with a line for each thing that is other than it was.

        Raises:
            CheckpointError: if the adapter of an ended task cannot be written.
        """
        self._saved_step = None  # what this trainer has saved since is not what the tasks went back to
        self._say_changed_numerics(other, say)
        if self.folder is not None and self.folder is not other:
            self.folder.generations = copy.deepcopy(other.generations)
        for run in self.table:
            if not run.status.is_final or self.folder is None:
                continue
            if self.folder is not other:  # what has ended elsewhere is part of what this folder is resumed from
                if failure := self.save_ended(run):
                    raise CheckpointError(failure)
            else:
                self.folder.mend_adapter(run.name, say)
                # A removed task may have left without an adapter.
                if (self.folder.root / run.name / storage.CHECKSUMS_NAME).exists():
                    self._adapter_steps[run.name] = run.step

    def _say_changed_numerics(self, other: RunFolder, say: Callable[[str], None]) -> None:
        record, _ = other.records()[-1]
        for name, (before, now) in changed_numerics(record.numerics, numerics_of(self.args)).items():
            say(f"resumed with another {name}: {before!r} before, {now!r} now; the last bits of results may differ")
            self.log.event("numerics_changed", name=name, before=before, now=now)

    def full_weights(self, run: TaskRun) -> Weights | None:
        """Return a task's full weights on the writer, where processes hold parts of them; every process calls this."""
        state = None if self._gather is None else self._gather(run, only_weights=True)
        return None if state is None else state.weights

    def _collect(self, run: TaskRun) -> tuple[TaskState | None, Weights | None]:
        """Return state and weights of a task on the process that writes; all that hold parts of it take part."""
        assert self.folder is not None, "asked for only where something is saved"
        if self._gather is not None:
            snapshot = self._gather(run)
            return snapshot, None if snapshot is None else snapshot.weights
        # PEFT selects the weights from the model.
        return (take_snapshot(run, self.folder.model) if self.is_writer else None), None

    def _save_task(self, run: TaskRun, *, with_adapter: bool = True, is_wanted: bool = True) -> bool:
        """Write one task; where processes hold parts of it, all take part, also in what is not wanted any more."""
        if self.folder is None:
            return False
        # Also where the writing is given up or is not this process's: the others send or wait.
        snapshot, weights = self._collect(run)

        def write(folder: RunFolder) -> None:
            if with_adapter:
                folder.save_adapter(run.name, weights)
                self._adapter_steps[run.name] = run.step
            folder.save_task(run, _present(snapshot), weights)

        return is_wanted and self._safely(write)

    def _safely(self, write: Callable[[RunFolder], object]) -> bool:
        """Write, and go on training when it fails: a full disk must not cost the run."""
        return self.folder is not None and not self._failure(write)

    def _failure(self, write: Callable[[RunFolder], object]) -> str:
        """Write into the folder, where anything is saved; return why that failed, "" where it did not."""
        folder = self.folder
        return "" if folder is None or not self.is_writer else self._attempt(lambda: write(folder))

    def _attempt(self, write: Callable[[], object]) -> str:
        """Write, and go on training when it fails; return why it did, "" where it did not."""
        try:
            with self._kept():
                write()
        # Whatever the disk says; what deletes old checkpoints says it in its own words.
        except (CheckpointError, OSError) as error:
            self.log.warn(f"not saved at step {self.log.state.global_step}: {error}")
            self.log.event("save_failed", reason=str(error))
            return str(error) or type(error).__name__
        return ""


def _present(snapshot: TaskState | None) -> TaskState:
    assert snapshot is not None, "the writer has what it writes"
    return snapshot


def describe_run(root: Path, args: MultiTaskTrainingArguments, table: TaskTable, plan: Plan) -> None:
    """Write into the run folder every setting in effect, what runs together, and the versions of what trains it.

    Raises:
        CheckpointError: if they cannot be written.
    """
    describe_tasks(root, args, table)
    storage.write_file(root / "plan.json", plan.to_json().encode())
    storage.write_file(root / ENVIRONMENT_NAME, json.dumps(environment_of(args), indent=2).encode())


def describe_tasks(root: Path, args: MultiTaskTrainingArguments, table: TaskTable, *, keeps: bool = False) -> None:
    """Write into the run folder every setting in effect.

    Args:
        root: the run folder.
        args: the arguments of the run.
        table: the tasks.
        keeps: whether tasks that have left stay in the file.

    Raises:
        CheckpointError: if it cannot be written.
    """
    tasks = {
        run.name: {**asdict(run.hyper), "num_steps": run.num_steps, "peft_config": run.task.peft_config.to_dict()}
        for run in table
    }
    if keeps:
        # Somebody may have edited or removed the file, which nothing is resumed from.
        with suppress(OSError, ValueError, KeyError, TypeError):
            tasks = {**json.loads((root / "config.json").read_text(encoding="utf-8"))["tasks"], **tasks}
    config = json.dumps({"args": args.to_dict(), "tasks": tasks}, indent=2, default=str)
    storage.write_file(root / "config.json", config.encode())
