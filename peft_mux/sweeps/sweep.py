"""`sweep`: one task with many settings, trained together on one backbone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.errors import ConfigError, PeftMuxError, shown
from peft_mux.modeling.adapters.files import ADAPTER_NAMES
from peft_mux.reporting.words import number_text
from peft_mux.sweeps.grid import Contest, sweep_tasks
from peft_mux.sweeps.ranking import RankedTask, SweepResult
from peft_mux.sweeps.referee import Referee
from peft_mux.task import Task, TaskStatus
from peft_mux.trainer.trainer import MultiTaskTrainer

EARLY_STOPS = (None, "halving")


def sweep(
    task: Task,
    grid: Mapping[str, Sequence[Any]],
    *,
    model: Any,
    args: MultiTaskTrainingArguments | None = None,
    early_stop: str | None = None,
    metric: str = "eval_loss",
    resume_from_checkpoint: str | bool | None = None,
    **options: Any,
) -> SweepResult:
    """Train a task once for each combination of settings, all together, and rank them by their held-out rows.

    A task that trains to its end becomes exactly what it would have become alone with these settings.

    Args:
        task: what all tasks have in common; it has held-out rows.
        grid: values by field of the `Task`, or of its adapter as `peft_config.<field>`; all combinations are trained.
        model: the backbone, as `MultiTaskTrainer` takes it.
        args: the arguments of the run.
        early_stop: "halving" ends the worse half of the tasks at doubling steps, so that one or two train to their end;
            by default all do.
        metric: metric of the evaluations to rank by; the smaller the better for names that end with `loss` or
            `perplexity`, else the greater.
        resume_from_checkpoint: as `MultiTaskTrainer.train` takes it.
        **options: further arguments of `MultiTaskTrainer`, such as `processing_class`.

    Returns:
        The ranking, which `print` shows as text and a notebook as a table. Where the run is saved, the best adapter
        lies in the run folder under the name of the task.

    Raises:
        ConfigError: naming every setting that cannot be run.

    Example:
        >>> result = sweep(sql, {"learning_rate": [1e-4, 3e-4], "peft_config.r": [8, 16]}, model=name)  # doctest: +SKIP
        >>> print(result, result.best.settings)  # doctest: +SKIP
    """
    contest, tasks = sweep_tasks(task, grid)
    trainer = MultiTaskTrainer(model, args, tasks, **options)
    referee = add_referee(trainer, [contest], early_stop=early_stop, metric=metric)
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    (result,) = end_sweeps(trainer, referee, is_told=False)
    trainer.tell(f"sweep {result.name}: best {result.best.name}, {metric} {number_text(result.best.value)}")
    return result


def add_referee(
    trainer: MultiTaskTrainer, contests: Iterable[Contest], *, early_stop: str | None, metric: str = "eval_loss"
) -> Referee:
    """Let the tasks of sweeps be compared while a trainer trains them.

    Args:
        trainer: has the tasks, and perhaps others.
        contests: the sweeps.
        early_stop: "halving", or `None` to train all tasks to their end.
        metric: metric to rank by.

    Raises:
        ConfigError: for another way to stop early.
    """
    if early_stop not in EARLY_STOPS:
        raise ConfigError(f'sweep.early_stop: got {shown(early_stop)}; allowed: "halving" or None.')
    referee = Referee(trainer, contests, metric=metric, halves=early_stop is not None)
    if referee.contests:
        trainer.add_callback(referee)
    return referee


def end_sweeps(trainer: MultiTaskTrainer, referee: Referee, *, is_told: bool = True) -> list[SweepResult]:
    """Return the ranking of each sweep, show it, and keep a copy of the best adapter under the name of the task.

    Args:
        trainer: has trained.
        referee: has compared the tasks.
        is_told: whether rankings are printed; a caller who is given them prints them as text or as a table.

    Raises:
        ConfigError: if no task of a sweep was evaluated by the metric.
    """
    results = []
    for contest in referee.contests:
        ranking = referee.ranking(contest)
        if not ranking or (ranking[0].value is None and not trainer.interrupted_by):
            known = f"no task has {referee.metric}; allowed: a metric of its evaluations"
            raise ConfigError(f"sweep {contest.name}: {known}.{_failures(trainer, ranking)}")
        result = SweepResult(contest.name, referee.metric, tuple(ranking), _keep_best(trainer, contest, ranking[0]))
        if is_told:
            trainer.tell(f"sweep {contest.name}\n{result}")
        results.append(result)
    return results


def _failures(trainer: MultiTaskTrainer, ranking: Sequence[RankedTask]) -> str:
    """Return why tasks of a sweep have failed, in a sentence; "" where none has."""
    failed = [f"{one.name}: {trainer.table[one.name].reason}" for one in ranking if one.status == TaskStatus.FAILED]
    more = f", and {len(failed) - 3} more" if len(failed) > 3 else ""
    return f" Failed: {'; '.join(failed[:3])}{more}." if failed else ""


def _keep_best(trainer: MultiTaskTrainer, contest: Contest, best: RankedTask) -> Path | None:
    """Copy the best adapter to a folder with the name of the task that was swept."""
    if best.place is None or not trainer.is_world_process_zero():
        return None
    folder = best.place.parent / contest.name
    lies = f"it lies in {best.place}"
    # A task of that name may have come while the sweep trained; and what stands there may lead elsewhere.
    if contest.name in trainer.task_statuses or folder.is_symlink():
        trainer.tell(f"sweep {contest.name}: its best adapter is not copied, as {folder} is not its own; {lies}")
        return None
    try:
        folder.mkdir(exist_ok=True)
        for name in ADAPTER_NAMES:
            storage.write_file(folder / name, (best.place / name).read_bytes())
    except (OSError, PeftMuxError) as error:
        trainer.tell(f"sweep {contest.name}: its best adapter could not be copied ({error}); {lies}")
        return None
    return folder
