"""`sweep`: one task with many settings, trained together on one backbone, and ranked by held-out rows.

With `early_stop="halving"`, at a few steps of its training (rungs) a task stays only if it is among the better half. It
is compared with the tasks that have come to the same step, before it or with it, so that tasks that had to wait for
memory are judged like the others (asynchronous successive halving, Li et al. 2020). The tasks that stay are not
touched: a task that ends early changes nothing for them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import ConfigError, Fault, PeftMuxError, closest, raise_faults, shown
from peft_mux.modeling.adapters.files import adapter_names
from peft_mux.reporting.views import Curve, curve_of, number_text, settings_text, table_html
from peft_mux.scheduler.units import aligned
from peft_mux.task import TASK_FIELDS, EarlyStopping, Task, TaskStatus
from peft_mux.trainer.trainer import MultiTaskTrainer

_PEFT = "peft_config."
_FIXED = ("name", "callbacks", "peft_config", "early_stopping", "eval_dataset", "compute_metrics")
_OF_THE_TYPE = ("peft_type",)
"""Fields of an adapter that its class sets, whatever is given."""
_MOST_TASKS = 512


@dataclass(frozen=True, slots=True)
class Contest:
    """The tasks of one sweep.

    Attributes:
        name: name of the task that was swept.
        members: the settings of each of its tasks, by name of that task.
    """

    name: str
    members: Mapping[str, Mapping[str, Any]]


def sweep_tasks(task: Task, grid: Mapping[str, Sequence[Any]]) -> tuple[Contest, list[Task]]:
    """Return a task for each combination of settings, named `<task>-01`, `<task>-02` and so on.

    Args:
        task: the settings that all of them share.
        grid: values by field of the `Task`, or of its adapter as `peft_config.<field>`.

    Raises:
        ConfigError: naming every field and value that cannot be swept.
    """
    raise_faults(_grid_faults(task, grid))
    # Counted before any is made: a range may stand for more than memory holds.
    count = math.prod(map(len, grid.values()))
    if not 2 <= count <= _MOST_TASKS:
        raise ConfigError(f"sweep must have 2 to {_MOST_TASKS} combinations, got {count}.")
    digits = max(2, len(str(count)))
    members, tasks = {}, []
    for number, values in enumerate(product(*grid.values()), start=1):
        settings = dict(zip(grid, values, strict=True))
        of_task = {key: value for key, value in settings.items() if not key.startswith(_PEFT)}
        peft = {key.removeprefix(_PEFT): value for key, value in settings.items() if key.startswith(_PEFT)}
        try:
            config = replace(task.peft_config, **peft)
        except (ValueError, TypeError) as error:
            given = ", ".join(f"{key}={shown(value)}" for key, value in peft.items())
            raise ConfigError(f"sweep: PEFT refuses {given}: {error}") from error
        name = f"{task.name}-{number:0{digits}}"
        tasks.append(replace(task, name=name, peft_config=config, **of_task))
        members[name] = settings
    return Contest(task.name, members), tasks


def _grid_faults(task: Task, grid: Mapping[str, Sequence[Any]]) -> list[Fault]:
    if not isinstance(grid, Mapping):
        return [Fault("sweep", shown(grid), 'a dict of values by field, such as {"learning_rate": [1e-4, 3e-4]}')]
    allowed = [name for name in TASK_FIELDS if name not in _FIXED]
    allowed += [_PEFT + item.name for item in fields(task.peft_config) if item.init and item.name not in _OF_THE_TYPE]
    faults = []
    for name, values in grid.items():
        where = f"sweep.{name}"
        if name not in allowed:
            # The closest name to "rank" would be that of the ranks by layer.
            asked = _PEFT + "r" if name in ("rank", "r", _PEFT + "rank") and _PEFT + "r" in allowed else name
            hint = closest(asked, allowed) or "Fields of the adapter are written peft_config.r."
            faults.append(Fault(where, "a field that cannot be swept", "a field of Task, or peft_config.<field>", hint))
        elif isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            faults.append(Fault(where, shown(values), "a list of at least one value"))
    if not grid:
        faults.append(Fault("sweep", "no settings", 'at least one setting, such as {"learning_rate": [1e-4, 3e-4]}'))
    if task.eval_dataset is None:
        faults.append(Fault(f"tasks.{task.name}.eval_dataset", "None", "held-out rows, because a sweep ranks by them"))
    elif isinstance(task.eval_dataset, dict):
        faults.append(Fault(f"tasks.{task.name}.eval_dataset", "several", "one data set, because a sweep ranks by it"))
    if task.early_stopping is not None:
        allowed_rule = "None, because a sweep evaluates at its own steps"
        fix = 'Use early_stop="halving".'
        faults.append(Fault(f"tasks.{task.name}.early_stopping", "a rule", allowed_rule, fix))
    return faults


def rungs(num_steps: int, num_tasks: int) -> tuple[int, ...]:
    """Return the steps at which tasks are compared: doubling, so that one of `num_tasks` trains to the end.

    Args:
        num_steps: steps of the whole training.
        num_tasks: tasks that begin.
    """
    halvings = math.ceil(math.log2(max(num_tasks, 1)))
    steps = {num_steps // 2 ** (halvings - number) for number in range(halvings)}
    return tuple(sorted(step for step in steps if 0 < step < num_steps))


def losers(values: Mapping[str, float], alive: set[str], *, maximise: bool) -> list[str]:
    """Return which tasks end at a rung: those that are not among the better half of all that have come to it.

    Args:
        values: the metric at this rung of each task that has come to it, ended ones too.
        alive: the tasks among these that have come to it now.
        maximise: whether a greater metric is the better one.
    """

    def cost(name: str) -> float:
        if not math.isfinite(values[name]):
            return math.inf
        return -values[name] if maximise else values[name]

    ranked = sorted(values, key=cost)  # of equal tasks, the first one stays
    better = set(ranked[: math.ceil(len(ranked) / 2)])
    return [name for name in ranked if name in alive and name not in better]


@dataclass(frozen=True, slots=True)
class RankedTask:
    """One task of a sweep.

    Attributes:
        name: name of the task.
        settings: the settings that were swept, by field.
        value: the metric that it is ranked by; `None` if it was never evaluated.
        step: the step at which it had that value.
        num_steps: steps that it would have taken.
        status: how it has ended.
        curve: the metric at each of its evaluations.
        place: folder of its adapter; `None` if nothing was saved.
    """

    name: str
    settings: Mapping[str, Any]
    value: float | None
    step: int
    num_steps: int
    status: str
    curve: Curve
    place: Path | None


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        name: name of the task that was swept.
        metric: the metric that tasks are ranked by.
        ranking: the tasks, best first: those that came further stand before those that ended earlier.
        place: folder with a copy of the best adapter; `None` if nothing was saved.
    """

    name: str
    metric: str
    ranking: tuple[RankedTask, ...]
    place: Path | None = None

    @property
    def best(self) -> RankedTask:
        """The best task."""
        return self.ranking[0]

    def _rows(self) -> list[list[str]]:
        """Return the cells of the ranking, the heads first."""
        rows = [["", "task", *self.best.settings, self.metric, "step", "status"]]
        for number, task in enumerate(self.ranking, start=1):
            settings = [f"{value:g}" if isinstance(value, float) else str(value) for value in task.settings.values()]
            step = f"{task.step}/{task.num_steps}"
            rows.append([str(number), task.name, *settings, number_text(task.value), step, task.status])
        return rows

    def __str__(self) -> str:
        """Return the ranking as a table."""
        rows = self._rows()
        lines = aligned(rows, left=range(len(rows[0])))
        return "\n".join(lines) + (f"\nbest adapter: {self.place}" if self.place else "")

    def _repr_html_(self) -> str:
        """Return the ranking as a table of HTML."""
        return f"<b>sweep {escape(self.name)}</b>{table_html(self._rows())}"

    def plot(self, path: str | Path) -> Path:
        """Draw the metric of each task over its steps into a PNG, the best one thick.

        Args:
            path: the file to write.

        Raises:
            ConfigError: if matplotlib is not installed.
            CheckpointError: if the file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError("plots need matplotlib: pip install matplotlib.") from error
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for number, task in enumerate(self.ranking):
            if task.curve:
                label = settings_text(task.settings) if number < 10 else None
                steps, values = zip(*task.curve, strict=True)
                axes.plot(steps, values, "o-", linewidth=3 if number == 0 else 1, markersize=3, label=label)
        axes.set_xlabel("step")
        axes.set_ylabel(self.metric)
        axes.set_title(f"sweep {self.name}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))  # next to the curves
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=120)
        storage.write_file(Path(path), image.getvalue())
        return Path(path)


class Referee(TrainerCallback):
    """Has tasks evaluated at their rungs and at their end, and ends the losers.

    It reads everything from the logs of the tasks, so that a resumed run continues as the first one would have.

    Args:
        trainer: trains the tasks.
        contests: the sweeps, each a contest of its own.
        metric: name of the metric by which tasks are ranked.
        halves: whether losers end at rungs; otherwise all tasks train to their end.

    Raises:
        ConfigError: if a task of a sweep ends with its best adapter, which the evaluations of the sweep would decide.
    """

    def __init__(self, trainer: MultiTaskTrainer, contests: Iterable[Contest], *, metric: str, halves: bool) -> None:
        """Set the steps at which the tasks are evaluated."""
        self.trainer, self.contests = trainer, tuple(contests)
        self.metric, self.maximise = metric, EarlyStopping(metric=metric).maximise
        self._rungs: dict[str, tuple[int, ...]] = {}
        self._due: dict[str, set[str]] = {}
        for contest in self.contests:
            for name, settings in contest.members.items():
                run = trainer.table[name]
                if run.hyper.load_best_model_at_end:
                    raise ConfigError(
                        f"tasks.{contest.name}.load_best_model_at_end must be False in a sweep, whose evaluations "
                        "decide which adapter is kept, got True. Take the best of the ranking."
                    )
                self._rungs[name] = rungs(run.num_steps, len(contest.members)) if halves else ()
                run.own_eval_steps = frozenset({*self._rungs[name], run.num_steps})
                # Must not change when resumed, or the folder of another sweep would be ranked by these settings. The
                # number of steps follows from two of them.
                length = {"num_steps"} if settings.keys() & {"max_steps", "num_train_epochs"} else set()
                run.swept, run.swept_as = frozenset({*settings, *length}), settings_text(settings)

    def _runs(self, contest: Contest) -> list[ActiveTask]:
        # A task may have been removed meanwhile.
        return [self.trainer.table[name] for name in contest.members if name in self.trainer.table]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note which tasks have come to a rung; they are evaluated now."""
        for contest in self.contests:
            running = [run for run in self._runs(contest) if run.status is TaskStatus.RUNNING]
            self._due[contest.name] = {run.name for run in running if run.step in self._rungs[run.name]}

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide as soon as the last of the tasks that came to a rung was evaluated."""
        for contest in self.contests:
            due = [run for run in self._runs(contest) if run.name in self._due.get(contest.name, ())]
            # One whose evaluation failed is out already.
            alive = [run for run in due if run.status is TaskStatus.RUNNING]
            if not alive or any(self._value(run, run.step) is None for run in alive):
                continue
            self._due[contest.name] = set()
            # By the number of the rung: tasks of a contest may have unequal numbers of steps.
            numbers = {run.name: self._rungs[run.name].index(run.step) for run in alive}
            for number in sorted(set(numbers.values())):
                self._end_losers(contest, number, {name for name, rung in numbers.items() if rung == number})

    def _end_losers(self, contest: Contest, number: int, here: set[str]) -> None:
        """End the tasks that lose among those that have come to a rung now."""
        values: dict[str, float] = {}
        for run in self._runs(contest):
            steps = self._rungs[run.name]
            if number < len(steps) and (value := self._value(run, steps[number])) is not None:
                values[run.name] = value
        out = losers(values, here, maximise=self.maximise)
        for name in out:
            run = self.trainer.table[name]
            run.end(TaskStatus.STOPPED_EARLY, f"halving: {self.metric} {values[name]:.6g} at step {run.step}")
        left = sorted(here - set(out), key=lambda name: values[name], reverse=self.maximise)
        line = ", ".join(f"{name} {values[name]:.4f}" for name in left[:8])
        self.trainer.log_line(f"sweep {contest.name}: {len(left)} of {len(here)} continue: {line}")

    def _value(self, run: ActiveTask, step: int) -> float | None:
        """Return the metric of a task at one of its steps; `None` if it was not evaluated there."""
        entries: list[Mapping[str, Any]] = [entry for entry in run.state.log_history if entry.get("step") == step]
        if points := curve_of(entries, self.metric):
            return points[-1][1]
        return float("nan") if any(self.metric in entry for entry in entries) else None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the run suggest the winning adapter; with several sweeps, that of the first one."""
        rankings = [self.ranking(contest) for contest in self.contests]
        best = [ranking[0].name for ranking in rankings if ranking and ranking[0].value is not None]
        self.trainer.set_best_task(best[0] if best else "")

    def ranking(self, contest: Contest) -> list[RankedTask]:
        """Return the tasks of a sweep, best first: those that came further stand before those that ended earlier."""
        rows = []
        for run in self._runs(contest):
            curve = curve_of(run.state.log_history, self.metric)
            step, value = curve[-1] if curve else (run.step, None)
            place, settings = self.trainer.adapter_folder(run.name), contest.members[run.name]
            rows.append(RankedTask(run.name, settings, value, step, run.num_steps, run.status.value, curve, place))

        def order(row: RankedTask) -> tuple[bool, float, float]:
            value = float("inf") if row.value is None else -row.value if self.maximise else row.value
            # A loss of fewer steps cannot be compared with one of more.
            return row.status == TaskStatus.FAILED, -row.step / max(row.num_steps, 1), value

        return sorted(rows, key=order)


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
        task: the settings that all tasks share; it has held-out rows.
        grid: values by field of the `Task`, or of its adapter as `peft_config.<field>`; all combinations are trained.
        model: the backbone, as `MultiTaskTrainer` takes it.
        args: the arguments of the run.
        early_stop: "halving" ends the worse half of the tasks at doubling steps, so that one or two train to their end;
            by default all do.
        metric: metric of the evaluations to rank by; the smaller the better for names that end with `loss` or
            `perplexity`, otherwise the greater.
        resume_from_checkpoint: as `MultiTaskTrainer.train` takes it.
        **options: further arguments of `MultiTaskTrainer`, such as `processing_class`.

    Returns:
        The ranking, which `print` shows as text and a notebook as a table. If the run is saved, the best adapter is in
        the run folder under the name of the task.

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
    (result,) = end_sweeps(trainer, referee, prints=False)
    trainer.log_line(f"sweep {result.name}: best {result.best.name}, {metric} {number_text(result.best.value)}")
    return result


def add_referee(
    trainer: MultiTaskTrainer, contests: Iterable[Contest], *, early_stop: str | None, metric: str = "eval_loss"
) -> Referee:
    """Compare the tasks of sweeps while a trainer trains them.

    Args:
        trainer: has the tasks of the sweeps, and possibly others.
        contests: the sweeps.
        early_stop: "halving", or `None` to train all tasks to their end.
        metric: metric to rank by.

    Raises:
        ConfigError: for another way to stop early.
    """
    if early_stop not in (None, "halving"):
        raise ConfigError(f'sweep.early_stop must be "halving" or None, got {shown(early_stop)}.')
    referee = Referee(trainer, contests, metric=metric, halves=early_stop is not None)
    if referee.contests:
        trainer.add_callback(referee)
    return referee


def end_sweeps(trainer: MultiTaskTrainer, referee: Referee, *, prints: bool = True) -> list[SweepResult]:
    """Return the ranking of each sweep, show it, and keep a copy of the best adapter under the name of the task.

    Args:
        trainer: the trainer, after `train`.
        referee: the referee that has compared the tasks.
        prints: whether rankings are printed here; otherwise the caller prints them as text or as a table.

    Raises:
        ConfigError: if no task of a sweep was evaluated by the metric.
    """
    results = []
    for contest in referee.contests:
        ranking = referee.ranking(contest)
        if not ranking or (ranking[0].value is None and not trainer.interrupted_by):
            failed = [task.name for task in ranking if task.status == TaskStatus.FAILED]
            reasons = "; ".join(f"{name}: {trainer.table[name].reason}" for name in failed[:3])
            more = f", and {len(failed) - 3} more" if len(failed) > 3 else ""
            known = f"no task has {referee.metric}. Name a metric of its evaluations."
            raise ConfigError(f"sweep {contest.name}: {known}{f' Failed: {reasons}{more}.' if failed else ''}")
        result = SweepResult(contest.name, referee.metric, tuple(ranking), _keep_best(trainer, contest, ranking[0]))
        if prints:
            trainer.log_line(f"sweep {contest.name}\n{result}")
        results.append(result)
    return results


def _keep_best(trainer: MultiTaskTrainer, contest: Contest, best: RankedTask) -> Path | None:
    """Copy the best adapter to a folder with the name of the task that was swept."""
    if best.place is None or not trainer.is_world_process_zero():
        return None
    folder = best.place.parent / contest.name
    lies = f"it is in {best.place}"
    # A task of that name may have come while the sweep trained; and a link may lead elsewhere.
    if contest.name in trainer.task_statuses or folder.is_symlink():
        trainer.log_line(f"sweep {contest.name}: its best adapter is not copied, as {folder} is not its own; {lies}")
        return None
    try:
        folder.mkdir(exist_ok=True)
        for name in adapter_names(best.place):
            storage.write_file(folder / name, (best.place / name).read_bytes())
    except (OSError, PeftMuxError) as error:
        trainer.log_line(f"sweep {contest.name}: its best adapter could not be copied ({error}); {lies}")
        return None
    return folder
