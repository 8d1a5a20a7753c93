"""`MemoryShortage`: a step for which memory does not suffice is taken again in smaller passes."""

from __future__ import annotations

import gc
import time

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.processes.processes import Processes
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.errors import MemoryBudgetError
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.run import Run

_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""What torch says in a plain `RuntimeError` where the memory of a CPU is used up."""


class MemoryShortage:
    """Runs steps, and halves the tokens of passes where the device has no memory for them.

    A task's step does not depend on how its rows were cut into passes, so that nothing is lost but the time of the
    attempt; the smaller size is kept from then on, also in the states that are saved. Only where this process is alone:
    others would wait for the sums of a step that is begun anew.

    Args:
        run: the run under way.
        processes: the processes of the run.
        placement: the model of this process.
        plans: cuts the rows of a step into passes.
    """

    def __init__(self, run: Run, processes: Processes, placement: Placement, plans: PlanFollower) -> None:
        """Have enough memory so far."""
        self._run, self._processes, self._placement, self._plans = run, processes, placement, plans

    def run(self, work: StepWork, started: float) -> tuple[StepResult, float]:
        """Compute losses and gradients of a step.

        Args:
            work: the step.
            started: when it began, by `time.perf_counter`.

        Returns:
            What came of it, and when the attempt that succeeded began.

        Raises:
            MemoryBudgetError: if there is no memory for a pass of a single row.
        """
        while True:
            try:
                return self._placement.placed.executor.run(work), started
            except (RuntimeError, MemoryError) as error:
                if not self._processes.is_alone or not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            # Behind the block: the traceback of the error holds the activations of the pass.
            work, started = self._smaller(work, reason), time.perf_counter()

    def _smaller(self, work: StepWork, reason: str) -> StepWork:
        self._forget_step()
        # By what a pass computes, which its bound counts: tokens that rows share are there once.
        largest = max(work.micro_batches, key=lambda micro_batch: micro_batch.num_computed)
        if len(largest.row_sequences) < 2 and not self._run.args.split_long_sequences:
            raise MemoryBudgetError(_too_long(largest, reason))
        most = max(1, largest.num_computed // 2)
        self._run.log.say(
            f"out of memory in a pass of {largest.num_computed:,} tokens ({reason}): the step is taken again, in passes"
            f" of at most {most:,} from now on"
        )
        self._run.log.event("out_of_memory", tokens=largest.num_computed, max_tokens=most, reason=reason)
        return self._plans.smaller_work(work, most)

    def _forget_step(self) -> None:
        """Drop all that the passes of a step have left, whose memory the next attempt needs."""
        for run in self._run.table:
            if run.optimizer is not None:
                run.optimizer.zero_gradients()
        model = self._placement.placed.model
        model.stream.key_values.clear()
        model.objectives.take_failures()
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or the machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error)


def _too_long(micro_batch: MuxBatch, reason: str) -> str:
    name = micro_batch.task_names[0]
    return (
        f"tasks.{name}: a pass of one row of {micro_batch.num_tokens:,} tokens does not fit into memory ({reason}); "
        "allowed: rows that do. Set max_length, gradient_checkpointing=True, bf16=True or split_long_sequences=True,"
        " or quantise the backbone; then go on with train(resume_from_checkpoint=True)."
    )
