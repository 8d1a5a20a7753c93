"""`Run`: the state of the present run that the parts of a trainer share."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

from transformers import TrainerControl, TrainerState

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.hub import PICTURE_NAME, HubPushes, model_card, needs_tokenizer, write_card
from peft_mux.checkpoint.saver import Saver
from peft_mux.checkpoint.upload import FolderUpload
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.active_task import ActiveTask, TaskTable
from peft_mux.errors import ConfigError
from peft_mux.reporting.callbacks import RunCallbacks
from peft_mux.reporting.page import draw_losses
from peft_mux.reporting.report import RankRecord
from peft_mux.reporting.run_log import RunLog
from peft_mux.reporting.views import view_of
from peft_mux.scheduler.parallel_layout import ParallelLayout
from peft_mux.user_code import describe_error


@dataclass
class Run:
    """The state of a run that all parts share; each part keeps the rest of the state itself.

    Attributes:
        args: the arguments that the trainer was given.
        table: all tasks, with the state of each.
        state: the run's own `TrainerState`; its `global_step` counts steps of the run, not of a task.
        control: what callbacks ask of the run.
        callbacks: the run's own callbacks, called with `state` and `control`.
        log: takes every number and event.
        saver: writes adapters and states.
        hub: uploads adapters (`push_to_hub=True`).
        upload: copies the run folder (`upload_to`), on the process that writes; `None` on others, and if not asked for.
        processes: all processes of the run. They build the same trainer over the same tasks and agree on each step.
        layout: which process makes up which replica; a move to other replicas changes it.
        is_in_train: whether `train` is between its first and its last step.
        is_updating: whether tasks are being updated. If a step was cut off meanwhile, some tasks have taken it and
            others have not, so that training can only resume from a saved state.
        has_trained: whether `train` was called before.
        interrupted_by: number of the signal that ended the last training; 0 for none.
        best_task: the task that the last lines of the run suggest to merge; "" for the first one.
        resume_command: the command of a shell that resumes the run; "" if the user's own program trains.
        records: what each process did in the last training, by rank; empty before it.
    """

    args: MultiTaskTrainingArguments
    table: TaskTable
    state: TrainerState
    control: TrainerControl
    callbacks: RunCallbacks
    log: RunLog
    saver: Saver
    hub: HubPushes
    upload: FolderUpload | None
    processes: Processes
    layout: ParallelLayout
    is_in_train: bool = False
    is_updating: bool = False
    has_trained: bool = False
    interrupted_by: int = 0
    best_task: str = ""
    resume_command: str = ""
    records: tuple[RankRecord, ...] = ()

    @property
    def root(self) -> Path:
        """Folder of the run."""
        return output_folder(self.args)


def make_run(callbacks: RunCallbacks, table: TaskTable, layout: ParallelLayout) -> Run:
    """Return a run that has not begun.

    Args:
        callbacks: the run's own callbacks, with its arguments, its state and its control.
        table: all tasks.
        layout: which process makes up which replica.
    """
    args, state = callbacks.args, callbacks.state
    processes = Processes.of(args)
    is_quiet = args.log_level in ("warning", "error", "critical")
    log = RunLog(table, state, callbacks.log, is_shown=processes.is_main, is_quiet=is_quiet)
    saver = Saver(table, args, log, is_writer=processes.is_main)
    hub = HubPushes(args, output_folder(args), log.warn)
    upload = (
        FolderUpload(args.upload_to, output_folder(args), log.warn) if args.upload_to and processes.is_main else None
    )
    return Run(args, table, state, callbacks.control, callbacks, log, saver, hub, upload, processes, layout)


def output_folder(args: MultiTaskTrainingArguments) -> Path:
    """Return the folder of a run, which need not exist yet."""
    return Path(args.output_dir or "peft_mux_output")


def mark_main_process(state: TrainerState, args: MultiTaskTrainingArguments) -> None:
    """Set whether this process is the one that writes, in the state that callbacks get."""
    state.is_world_process_zero = args.process_index == 0
    state.is_local_process_zero = args.local_process_index == 0


def write_task_files(run: Run, own: ActiveTask, folder: Path | None = None) -> None:
    """Write the extra files of a task's saved adapter (model card, plot, tokenizer); failures are logged, not raised.

    Args:
        run: the run.
        own: the task.
        folder: folder of its adapter; by default the one in the run folder.
    """
    folder = folder or run.saver.place(own)
    if folder is None or not run.saver.is_writer:
        return
    tokenizer = run.callbacks.handler.processing_class
    config = getattr(getattr(run.callbacks.handler.model, "backbone", None), "config", None)
    try:
        view = view_of(own)
        has_picture = max(len(view.losses), len(view.eval_losses)) > 1  # a single point shows nothing
        if has_picture:
            try:
                storage.write_file(folder / PICTURE_NAME, draw_losses([view]))
            except ConfigError:  # matplotlib is an extra
                has_picture = False
        # A tokenizer with more tokens than the backbone knows has been extended.
        if needs_tokenizer(own, tokenizer, getattr(config, "vocab_size", None)):
            if own.task.chat_template is not None:
                tokenizer = copy.deepcopy(tokenizer)  # other tasks use it too
                tokenizer.chat_template = own.task.chat_template
            with storage.scratch_folder(folder) as scratch:
                tokenizer.save_pretrained(str(scratch))
                for path in sorted(scratch.iterdir()):
                    if path.is_file():
                        storage.replace_file(path, folder / path.name)
        num_tasks = len(list(run.table)) + len(run.log.removed)
        card = model_card(folder, own.name, own.step, own, num_tasks=num_tasks, has_picture=has_picture)
        write_card(folder, card)
    except Exception as error:  # the adapter is safe, so this must not end the run
        run.log.warn(f"{folder}: its card could not be written ({describe_error(error)})")
