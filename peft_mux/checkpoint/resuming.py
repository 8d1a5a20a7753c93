"""Going on with a run: its newest record says where each task stands."""

from __future__ import annotations

from collections.abc import Callable

from peft_mux.checkpoint.run_folder import RunFolder
from peft_mux.checkpoint.run_record import FORMAT_VERSION, READABLE_VERSIONS, Generations
from peft_mux.errors import CheckpointError
from peft_mux.task import TaskStatus
from peft_mux.tasks.table import TaskTable


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
