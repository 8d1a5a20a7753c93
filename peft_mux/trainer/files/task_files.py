"""Card, picture and tokenizer files of a task, written when it has ended, or the run has."""

from __future__ import annotations

from peft_mux.checkpoint.sharing.task_extras import write_extras
from peft_mux.own_code import describe_error
from peft_mux.tasks.task_run import TaskRun
from peft_mux.trainer.run import Run


def write_task_files(run: Run, own: TaskRun) -> None:
    """Write what lies beside a task's adapter, where that lies on the disk as it is now; a failure is told of.

    Args:
        run: the run.
        own: the task.
    """
    folder = run.saver.place(own)
    if folder is None or not run.saver.is_writer:
        return
    handler = run.callbacks.handler
    config = getattr(getattr(handler.model, "backbone", None), "config", None)
    try:
        write_extras(
            folder,
            own,
            num_tasks=len(list(run.table)) + len(run.log.removed),
            tokenizer=handler.processing_class,
            vocab_size=getattr(config, "vocab_size", None),
        )
    # The adapter is safe; what lies beside it is no reason to end a run.
    except Exception as error:
        run.log.warn(f"{folder}: its card could not be written ({describe_error(error)})")
