"""Checkpoints of a run: one folder a task and step, and one record that says which of them belong together.

    <output_dir>/
      metrics.jsonl  plan.json  config.json
      state/run-00000030.json                which checkpoint of which task; written last
      <task>/adapter_config.json  adapter_model.safetensors       the task's adapter, loadable by plain PEFT
      <task>/checkpoint-30/                  the same, plus optimizer, last good and best weights, state
      <task>/best/                           the adapter of the best evaluation, where early stopping is set

Everything is safetensors and JSON, tensors by the names of parameters, so that any number and layout of processes goes
on from it; folders appear whole or not at all (`peft_mux.storage`). Data position, schedule and
dropout are functions of the task's step and seed, so they need no state beyond those numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from peft_mux import storage
from peft_mux.checkpoint.snapshot import BEST, LAST_GOOD, put_snapshot
from peft_mux.checkpoint.task_state import TaskState
from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from peft_mux.modeling.backbone.fingerprint import backbone_fingerprint
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.reporting.metrics_file import METRICS_NAME
from peft_mux.task import TaskStatus
from peft_mux.task_names import name_fault
from peft_mux.tasks.table import TaskTable
from peft_mux.tasks.task_run import TaskRun

Weights = Mapping[str, torch.Tensor]
"""By parameter name."""

FORMAT_VERSION = 2
STATE_FOLDER = "state"
_OF_OPTIMIZER = ("moments", "settings", "schedule")
_FREE_TO_CHANGE = frozenset({"eval_steps", "save_steps", "data_timeout_s"})
_NOT_OF_THE_ADAPTER = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
)


class RunFolder:
    """The output folder of a run.

    Args:
        root: the folder, made where it is absent.
        model: the model whose adapters are written and read.
        keep: how many checkpoints are kept of each task, and how many records of the run; `None` for all.
        is_writer: whether this process writes; one that only reads leaves the folder as it is.
        fingerprint: digest of the whole backbone, where the model holds only a part of it.
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
        self._fingerprint = fingerprint
        if not is_writer:
            return
        root.mkdir(parents=True, exist_ok=True)
        self._refuse_links()
        (root / STATE_FOLDER).mkdir(exist_ok=True)
        # Before anything is read: a folder that a crash left moved aside may be the checkpoint to resume from.
        storage.remove_stale(root)
        for folder in root.iterdir():
            if folder.is_dir() and not folder.is_symlink():
                storage.remove_stale(folder)

    def use_model(self, model: Any) -> None:
        """Write and read another model's adapters from now on; `None` while there is none."""
        self.model = model

    def _refuse_links(self) -> None:
        for name in (STATE_FOLDER, METRICS_NAME):
            if (self.root / name).is_symlink():
                raise CheckpointError(
                    f"output_dir: got {self.root / name}, which is a link; allowed: a run folder without links, as "
                    "what they lead to would be written over. Remove the link."
                )

    def task_folder(self, name: str) -> Path:
        """Return a task's folder; no name leads out of the run folder, not even through a link."""
        folder = storage.safe_child(self.root, name)
        folder.mkdir(exist_ok=True)
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
        try:
            folder = self.task_folder(name)
            with storage.scratch_folder(folder) as scratch:
                self.model.save_task(name, scratch, weights)
                for file in (CONFIG_NAME, WEIGHTS_NAME):
                    # Through a scratch folder, as PEFT writes in place; the task's folder also holds checkpoints and
                    # cannot be swapped.
                    storage.write_file(folder / file, (scratch / file).read_bytes())
        except OSError as error:
            raise CheckpointError(f'task "{name}": its adapter could not be written ({error}).') from error

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
            state = _task_state(run)
            if run.optimizer is not None:
                tensors, tree = storage.pack_state({name: getattr(snapshot, name) for name in _OF_OPTIMIZER})
                storage.save_tensors(scratch / "optimizer.safetensors", tensors)
                state["optimizer"] = tree
                for copy in (LAST_GOOD, BEST):
                    storage.save_tensors(scratch / f"{copy}.safetensors", snapshot.copies[copy])
            (scratch / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")

        self._write(folder, run, fill)
        return folder

    def _write(self, folder: Path, run: TaskRun, fill: Callable[[Path], None]) -> None:
        facts = {"task": run.name, "step": run.step, "format_version": FORMAT_VERSION}
        storage.write_folder(folder, fill, facts=facts)

    def save_record(self, run_step: int, runs: list[TaskRun]) -> None:
        """Write which checkpoints belong together, and drop what is older than `keep` allows.

        Every task must have been saved before; the record is what makes its step the one to resume from.
        """
        tasks = {run.name: {"status": run.status.value, "reason": run.reason, "step": run.step} for run in runs}
        record = {
            "format_version": FORMAT_VERSION,
            "run_step": run_step,
            "backbone": self.fingerprint,
            "order": list(tasks),
            "tasks": tasks,
        }
        path = self.root / STATE_FOLDER / f"run-{run_step:08d}.json"
        # After all tasks: a record names only checkpoints that are whole on the disk.
        storage.write_file(path, storage.sealed_json(record))
        # After the new record, so that a crash in between leaves too many checkpoints rather than too few.
        self._prune()

    def _prune(self) -> None:
        if self.keep is None:
            return
        records = self.records()
        for _, path in records[: -self.keep]:
            # Records before the checkpoints that they name: none may ever name one that is gone.
            path.unlink()
        needed: dict[str, set[Path]] = {}
        for record, _ in records[-self.keep :]:
            for name, entry in record["tasks"].items():
                if name_fault(name) is not None:  # not written by us; it may lead out of the folder
                    continue
                needed.setdefault(name, set()).add(self.root / name / f"checkpoint-{entry['step']}")
        for name, folders in needed.items():
            # Tasks end at different steps, so a checkpoint that a kept record names may be old by number.
            storage.prune(self.root / name, keep=self.keep, protect=folders)

    # -------------------------------------------------------------- reading

    def records(self, warn: Callable[[str], None] | None = None) -> list[tuple[dict[str, Any], Path]]:
        """Return the valid run records, oldest first; `warn` is told of each one that is not."""
        found = []
        for path in self.record_paths():
            try:
                found.append((storage.unsealed_json(path), path))
            except CheckpointError as error:
                if warn is not None:
                    warn(f"{error} Trying the record before it.")
        # By the number in the record, never by the time of the file, which copying changes.
        return sorted(found, key=lambda item: item[0]["run_step"])

    def record_paths(self) -> list[Path]:
        """Return the run records, valid or not."""
        return sorted((self.root / STATE_FOLDER).glob("run-*.json"))

    def restore(self, run: TaskRun, step: int, warn: Callable[[str], None]) -> None:
        """Put a task back to its checkpoint of `step`, or to the newest valid one before it.

        Args:
            run: the task, registered, with its optimizer built.
            step: the step that the run record names.
            warn: called with task and file, when that checkpoint is not valid and an older one is taken.

        Raises:
            CheckpointError: if no checkpoint of the task is valid, or its settings have changed.
        """
        folder = self.task_folder(run.name)
        if step not in storage.numbered_folders(folder):
            gone = folder / f"checkpoint-{step}"
            warn(f'task "{run.name}": {gone} or its manifest is gone. Trying the checkpoint before it.')
        steps = sorted((number for number in storage.numbered_folders(folder) if number <= step), reverse=True)
        for candidate in steps:
            path = folder / f"checkpoint-{candidate}"
            try:
                # With the names expected, lest a folder of another task, copied here, be taken for this one's.
                storage.verify_folder(path, expect={"task": run.name, "step": candidate})
            except CheckpointError as error:
                warn(f'task "{run.name}": {error} Trying the checkpoint before it.')
                continue
            self._load(run, path)
            return
        raise CheckpointError(
            f'task "{run.name}": got no valid checkpoint up to step {step} in {folder}; allowed: an intact '
            "checkpoint folder. Restore it, or remove the task's folder to train the task anew."
        )

    def _load(self, run: TaskRun, folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        # Before anything of the run is changed.
        _check_settings(run, state["settings"])
        snapshot = self._snapshot(run, folder, state)
        run.step, run.num_tokens = state["step"], state["num_tokens"]
        run.last_loss = float(state["last_loss"])
        run.loss_mean.total, run.loss_mean.count = state["loss_mean"]
        run.best.load(state["best"])
        run.state = TrainerState(**{**asdict(run.state), **state["trainer_state"]})
        if "optimizer" not in state or run.optimizer is None:
            run.end(TaskStatus(state["status"]), state["reason"])
        # Also for an ended task, whose adapter users go on using.
        put_snapshot(run, self.model, snapshot)
        if run.optimizer is not None:
            run.status, run.reason = TaskStatus(state["status"]), state["reason"]

    def _snapshot(self, run: TaskRun, folder: Path, state: dict[str, Any]) -> TaskState:
        weights = self.model.saved_weights(run.name, folder)
        if "optimizer" not in state:
            return TaskState(weights, {}, {}, {})
        own = storage.unpack_state(storage.load_tensors(folder / "optimizer.safetensors"), state["optimizer"])
        copies = {copy: storage.load_tensors(folder / f"{copy}.safetensors") for copy in (LAST_GOOD, BEST)}
        return TaskState(weights, **own, copies=copies)


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
    folder = RunFolder(root, model, keep=keep, is_writer=is_writer, fingerprint=fingerprint)
    if is_writer and folder.record_paths() and not is_resumed:
        raise CheckpointError(
            f"output_dir: got {root}, which holds a run; allowed: a new folder, or train(resume_from_checkpoint=True) "
            "to go on with it. Delete it to train anew."
        )
    return folder


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
    if record["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: got format version {record['format_version']}; allowed: {FORMAT_VERSION}, which this version of "
            "peft_mux reads. Resume with the version that wrote it, or train into a new output_dir."
        )
    if record["backbone"] != folder.fingerprint:
        raise CheckpointError(
            f"resume_from_checkpoint: got {folder.root}, whose tasks were trained on other weights than those of "
            "`model`; allowed: the same backbone in the same dtype. Load that one, or train into a new output_dir."
        )
    for name, entry in record["tasks"].items():
        if name in table:
            folder.restore(table[name], entry["step"], say)
        else:
            say(f'task "{name}" of the resumed run is not among the tasks given now; it is left out')
    # The order of tasks in the stream is part of the rounding of sums.
    table.reorder(record["order"])
    return record["run_step"]


def _task_state(run: TaskRun) -> dict[str, Any]:
    return {
        "settings": task_settings(run),
        "step": run.step,
        "status": run.status.value,
        "reason": run.reason,
        "num_tokens": run.num_tokens,
        "last_loss": str(run.last_loss),
        "loss_mean": [run.loss_mean.total, run.loss_mean.count],
        "best": run.best.state(),
        "trainer_state": {
            "global_step": run.state.global_step,
            "epoch": run.state.epoch,
            "log_history": run.state.log_history,
        },
    }


def task_settings(run: TaskRun) -> dict[str, Any]:
    """Return what must not change between a checkpoint and its resumption, as plain JSON."""
    config = run.task.peft_config.to_dict()
    settings = {**asdict(run.hyper), "num_steps": run.num_steps, "shuffle": run.task.shuffle}
    settings["peft_config"] = {key: _plain(value) for key, value in config.items() if key not in _NOT_OF_THE_ADAPTER}
    rows = getattr(getattr(run.loader, "dataset", None), "fingerprint", None)
    settings["rows"] = None if rows is None else rows
    # Through JSON, as the saved settings went: tuples become lists and keys strings before they are compared.
    return json.loads(json.dumps(settings, default=str))


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def _check_settings(run: TaskRun, saved: dict[str, Any]) -> None:
    now = task_settings(run)
    changed = [key for key in now if key not in _FREE_TO_CHANGE and saved.get(key) != now[key]]
    if changed:
        listed = ", ".join(f"{key} {saved.get(key)!r} -> {now[key]!r}" for key in changed)
        raise CheckpointError(
            f'task "{run.name}": got other settings than its checkpoint has ({listed}); allowed: the same,'
            " as a resumed run continues the interrupted one."
            " Undo the change, or train under another name or output_dir."
        )
