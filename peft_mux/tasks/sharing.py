"""Which tasks compute what their rows begin with alike once, and why others do not."""

from __future__ import annotations

from collections.abc import Iterable

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.modeling.prefix_sharing import reason_of_adapter
from peft_mux.packing.shared_runs import begin_alike
from peft_mux.tasks.task_run import TaskRun

_SAMPLE_ROWS = 64


def decide_sharing(runs: Iterable[TaskRun], args: MultiTaskTrainingArguments, backbone_reason: str | None) -> None:
    """Let tasks share the tokens that their rows begin with, where that is exact; note why others do not.

    It is noted where it was asked for, and else where rows of the task do begin alike.

    Args:
        runs: the tasks.
        args: the arguments of the run.
        backbone_reason: why no task on the backbone may share (`peft_mux.modeling.prefix_sharing`), or `None`.
    """
    for run in runs:
        reason = backbone_reason or reason_of_adapter(run.task.peft_config)
        if reason is None and run.hyper.neftune_noise_alpha:
            reason = f"its neftune_noise_alpha={run.hyper.neftune_noise_alpha:g} is drawn for each row"
        if reason is None and args.pad_to_chunks:
            reason = "pad_to_chunks=True asks for streams of equal shapes"
        run.loader.shares_prefixes = reason is None and args.share_prefixes is not False
        if reason is None or args.share_prefixes is False:
            continue
        if args.share_prefixes is True or _begin_alike(run):
            run.sharing_remark = f"{run.name}: tokens that rows begin with alike are computed for each row, as {reason}"


def _begin_alike(run: TaskRun) -> bool:
    """Return whether some of the first rows begin alike."""
    return begin_alike(
        row.input_ids[start:end] for row in run.loader.sample(_SAMPLE_ROWS) for start, end in row.sequence_bounds
    )
