"""Steps for which the device has too little memory: `run_within_memory` takes them again, with less.

What follows when a pass finds no memory depends on the layout of the processes::

    one process         the error ends `Executor.run`, and the step is taken again
    data parallelism    passes do not communicate: the process leaves out its other passes and takes part in all sums of
                        the step, so that no process waits; all discard the step, and take it again together
    other layouts       other processes wait within the pass: the error ends the run

The next attempt is without CUDA graphs, if there are any, else in passes of half the tokens. Later steps do the same. A
task's step does not depend on how its rows were cut into passes, so only time is lost.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from peft_mux.engine.executor import ChainRunner, Executor
from peft_mux.engine.tasks.active_task import TaskTable
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.errors import MemoryBudgetError

_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or the machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@contextmanager
def _noting_shortage(reasons: list[str]) -> Iterator[None]:
    """Note why a pass finds no memory, and end the `with` block without an error."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reasons.append(first_line(error))


def run_within_memory(
    executor: Executor,
    work: StepWork,
    table: TaskTable,
    *,
    smaller_work: Callable[[StepWork, int], StepWork],
    cuts_rows: bool,
    say: Callable[[str], None],
    record: Callable[..., None],
) -> tuple[StepResult, float]:
    """Run a step, again and again with less memory until it fits; all processes call this together.

    Args:
        executor: runs the passes of this process.
        work: the micro-batches of the step.
        table: all tasks of the run.
        smaller_work: returns the same step in passes of at most so many tokens.
        cuts_rows: whether a row may be computed in several passes.
        say: prints a line.
        record: writes an event of the run, by its name and facts.

    Returns:
        The result of the step, and the seconds of attempts before the one that fitted.

    Raises:
        MemoryBudgetError: if there is no memory for a pass of a single row.
    """
    model, sync, processes = executor.model, executor.sync, executor.sync.processes
    finishes_sums = not (processes.is_alone or sync.is_deferred or sync.holds_parts)
    began = started = time.perf_counter()
    while True:
        reasons: list[str] = []
        try:
            result = executor.run(work, _noting_shortage(reasons) if finishes_sums else None)
        except (RuntimeError, MemoryError) as error:
            if not processes.is_alone or not is_out_of_memory(error):
                raise
            reasons.append(first_line(error))
        # After the block: the traceback of the error holds the activations of the pass.
        shortage = None
        if reasons:
            # By what a pass computes, which its bound counts: tokens that rows share are there once.
            largest = max(work.micro_batches, key=lambda micro_batch: micro_batch.num_computed)
            rows = len(largest.row_sequences)
            shortage = largest.num_computed, rows, largest.task_names[0], largest.num_tokens, reasons[0]
        if finishes_sums:
            is_short = any(count for (count,) in processes.exchange([int(shortage is not None)]))
            shortages = processes.gather(shortage) if is_short else []
            shortage = max((facts for facts in shortages if facts is not None), default=None)
        if shortage is None:
            return result, started - began
        tokens, rows, task, task_tokens, reason = shortage
        # Drop what the passes have left, whose memory the next attempt needs.
        for task_run in table:
            if task_run.optimizer is not None:
                task_run.optimizer.zero_gradients()
        has_graphs = executor.runner.keeps_memory
        if has_graphs:
            executor.runner = ChainRunner()
        model.stream.key_values.clear()
        model.objectives.take_failures()
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        if has_graphs:
            say(f"out of memory ({reason}): the step is taken again, without CUDA graphs from now on")
        elif rows < 2 and not cuts_rows:
            raise MemoryBudgetError(
                f"tasks.{task}: a pass of one row of {task_tokens:,} tokens does not fit "
                f"into memory ({reason}). Set max_length, gradient_checkpointing=True, bf16=True or "
                "split_long_sequences=True, or quantise the backbone; then resume with "
                "train(resume_from_checkpoint=True)."
            )
        else:
            most = max(1, tokens // 2)
            say(
                f"out of memory in a pass of {tokens:,} tokens ({reason}): the step is taken again, in passes"
                f" of at most {most:,} from now on"
            )
            record("out_of_memory", tokens=tokens, max_tokens=most, reason=reason)
            work = smaller_work(work, most)
        started = time.perf_counter()
