"""Whether a pipeline is drained after nearly every step, as far as that is known when a plan is made.

The engine decides it step by step (`peft_mux.trainer.loop`), as logs, evaluations and files come due. A plan only has
to know which of the two ways most steps go: few large buckets of many micro-batches are faster where it is drained,
and many small ones where it is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.modeling.objectives.objective import OWN
from peft_mux.modeling.objectives.task_objective import objective_of
from peft_mux.planning.targets import Target
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.tasks.task_run import TaskRun
from peft_mux.tasks.window import run_interval

_LEAST_STEPS = 4
"""Steps between two logs below which a pipeline counts as drained: a window of two has half of the flushes left."""


def is_drained(
    args: MultiTaskTrainingArguments, target: Target, runs: Sequence[TaskRun], loads: Sequence[TaskLoad]
) -> bool:
    """Return whether plans should be compared by steps that end in a flush.

    Args:
        args: the arguments of the run.
        target: what the plan is for.
        runs: the tasks that could take steps.
        loads: what they bring into a step.
    """
    if args.pipeline_flush != "auto" or target.num_stages == 1:
        return True
    # Where gradients are summed over processes, all of them meet at the end of every step.
    if target.num_replicas > 1 or target.devices_per_stage > 1:
        return True
    if args.logging_strategy == "steps" and run_interval(args.logging_steps, runs) < _LEAST_STEPS:
        return True
    has_passes_before = any(load.has_reference_forward or load.has_batch_forward for load in loads)
    is_read_ahead = any(run.loader.steps_per_epoch is None for run in runs)
    return has_passes_before or is_read_ahead or any(objective_of(run.task).name == OWN for run in runs)
