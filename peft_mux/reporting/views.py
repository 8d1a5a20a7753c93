"""What is shown of a run at one moment (`RunView`), and numbers in few characters.

`RunWatch` makes views of tasks that train, `view_of` of a task at rest, and `view_of_records` of the `metrics.jsonl` of
a run that another process trains. Tables, pages, notebooks and commands are drawn from views. Everything in a view was
measured, except the time left, which assumes that the last steps were typical.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from peft_mux.log.recorders import RunTimes

if TYPE_CHECKING:  # commands that only read metrics import this module, and need neither transformers nor PEFT
    from peft_mux.engine.tasks.active_task import ActiveTask

Curve = tuple[tuple[int, float], ...]
"""Points of a curve: step of the task, and value."""
_NO_METRIC = re.compile("step|epoch|loss|total_flos|train_.*|.*runtime|.*_per_second")
"""What log histories have besides metrics."""
_OF_TASKS = ("data", "train", "eval", "status")
"""Events of `metrics.jsonl` about a task that has begun."""
_WINDOW_S = 20.0
"""Rates are measured over about this many seconds."""
_GAP_S = 0.25
_FAST, _SLOW = 0.9, 0.98
_FLAT = 0.002
"""Relative difference of the two means below which a loss neither falls nor rises."""
_MOST_LINES = 200
"""Last lines of a run that are kept."""

# ---------------------------------------------------------------- numbers in few characters


def number_text(value: float | None) -> str:
    """Return a loss in about six characters, whatever its size."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def shortened(text: str, width: int, mark: str = "…") -> str:
    """Return a name in at most `width` characters; its middle goes, because names in a sweep differ at their ends."""
    if len(text) <= width:
        return text
    kept = max(width - len(mark), 0)
    return (text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :])[: max(width, 0)]


def drop_columns(widths: dict[str, int], first_to_go: Iterable[str], width: int, least: int) -> int:
    """Remove columns, in a given order, until a row of `width` characters has `least` for its name; return its room.

    Args:
        widths: the widths of all columns but the name, in place; two spaces stand between columns.
        first_to_go: which columns may go, in this order.
        width: characters of a row.
        least: characters that the name needs.
    """
    room = width - sum(column + 2 for column in widths.values())
    for name in first_to_go:
        if room < least and name in widths:
            room += widths.pop(name) + 2
    return room


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return settings of a task by name in few characters, such as `lr=2e-4 r=8`."""
    words = []
    for name, value in settings.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if isinstance(value, float) and 0 < abs(value) < 0.01:
            text = re.sub(r"\.?0*e-0*", "e-", f"{value:.3e}")
        words.append(f"{'lr' if name == 'learning_rate' else name.rpartition('.')[2]}={text}")
    return " ".join(words)


def share_text(share: float | None) -> str:
    """Return a share of a whole, from 0 to 1, in percent; "-" for none."""
    return "-" if share is None else f"{share:.0%}"


def table_html(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as a table of HTML, below the heads in the first row."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines[1:])
    return f"<table><tr>{lines[0].replace('td>', 'th>')}</tr>{body}</table>"


def curve_of(records: Iterable[Any], key: str) -> Curve:
    """Return the points that records have of one number; records without it, or with no finite one, are skipped.

    Args:
        records: entries of a log history, or of `metrics.jsonl`.
        key: name of the number, such as `eval_loss`.
    """
    points = []
    for record in records:
        try:
            point = int(record["step"]), float(record[key])
        # In a damaged file there may be anything in place of a number.
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(point[1]):
            points.append(point)
    return tuple(points)


def held_out_loss(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the key of the held-out loss that is shown: `eval_loss`, or the loss of the first of several data sets."""
    keys = (key for record in records for key in record if key.startswith("eval_") and key.endswith("loss"))
    return next(keys, "eval_loss")


# ---------------------------------------------------------------- views


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task at one moment.

    Attributes:
        name: name of the task.
        status: its status, a word of the glossary.
        step: optimizer steps taken.
        num_steps: optimizer steps to take.
        reason: why it waits, failed or stopped; "" if there is nothing to say.
        loss: mean of its last losses, newer ones counting more; `None` before its first step.
        trend: whether that mean falls ("down"), rises ("up") or neither ("flat"); "" if it is too early to say.
        eval_loss: its last held-out loss; `None` before the first.
        tokens_per_s: its tokens per second over the last steps; `None` if it takes none.
        left_s: seconds that its other steps take if they are like the last ones; `None` if it takes none.
        losses: its logged losses.
        eval_losses: its held-out losses.
        share: its share of the run, from 0 to 1, of `RunView.share_of`; `None` if unknown.
        loss_kind: what its loss is; losses of two kinds cannot be compared. "" if unknown.
        settings: how it differs from other tasks of its sweep; "" for other tasks.
        metrics: its logged and its held-out values of each other metric, by name; empty in views that do not show them.
    """

    name: str
    status: str
    step: int
    num_steps: int
    reason: str = ""
    loss: float | None = None
    trend: str = ""
    eval_loss: float | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None
    losses: Curve = ()
    eval_losses: Curve = ()
    share: float | None = None
    loss_kind: str = ""
    settings: str = ""
    metrics: Mapping[str, tuple[Curve, Curve]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name, with what is special about it."""
        return f"{self.name} ({self.settings})" if self.settings else self.name


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment.

    Attributes:
        tasks: its tasks, in the order in which they came.
        step: steps of the run.
        seconds: seconds since the first step began.
        memory_bytes: what this process holds now: of its GPU, else of the host; `None` if unknown.
        total_bytes: memory of that device.
        lines: what was logged, oldest first; terminals print it instead.
        is_interrupted: whether no process trains it, though some tasks have steps left.
        share_of: what `TaskView.share` is a share of: "time" of the steps (steps of several tasks are divided by their
            tokens), or "tokens" that were trained on.
    """

    tasks: tuple[TaskView, ...]
    step: int = 0
    seconds: float = 0.0
    memory_bytes: int | None = None
    total_bytes: int | None = None
    lines: tuple[str, ...] = ()
    is_interrupted: bool = False
    share_of: str = "time"

    @property
    def shows_shares(self) -> bool:
        """Whether the shares of its tasks are known, and there are several."""
        return len(self.tasks) > 1 and any(task.share is not None for task in self.tasks)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all tasks over the last steps; 0 if none were taken."""
        return sum(task.tokens_per_s or 0.0 for task in self.tasks)

    @property
    def with_losses(self) -> list[TaskView]:
        """The tasks that have a curve."""
        return [task for task in self.tasks if task.losses or task.eval_losses]

    @property
    def left_s(self) -> float | None:
        """Seconds until the last running task ends if all continue as they are; `None` if none runs."""
        return max((task.left_s for task in self.tasks if task.left_s is not None), default=None)


def interrupted(view: RunView) -> RunView:
    """Return the view of a run that no process trains: its running tasks as interrupted; unchanged if none ran.

    Their recorded status stays "running", with which they resume. A view is for people, who would wait for them.
    """
    if all(task.status != "running" for task in view.tasks):
        return view
    left = {"status": "interrupted", "tokens_per_s": None, "left_s": None}
    tasks = tuple(replace(task, **left) if task.status == "running" else task for task in view.tasks)
    return replace(view, tasks=tasks, is_interrupted=True)


def view_of(task: ActiveTask, *, with_curves: bool = True) -> TaskView:
    """Return what a task shows by itself, whether or not it trains: its last loss instead of a mean, and no rates."""
    history = task.state.log_history
    # Of a task that is never evaluated, each frame of the live table would search the whole history.
    newest_first, key = reversed(history) if task.eval_data else (), f"{next(iter(task.eval_data), 'eval')}_loss"
    logged = (entry[key] for entry in newest_first if key in entry)
    return TaskView(
        task.name,
        str(task.status),
        task.step,
        task.num_steps,
        task.reason,
        loss=task.last_loss if math.isfinite(task.last_loss) else None,
        eval_loss=next(filter(math.isfinite, logged), None),
        losses=curve_of(history, "loss") if with_curves else (),
        eval_losses=curve_of(history, key) if with_curves else (),
        loss_kind=task.loss_kind,
        settings=task.swept_as,
    )


def metrics_of(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Curve, Curve]]:
    """Return the curves of all metrics of a task but its loss, of training rows and of held-out rows, by name.

    Args:
        records: entries of its log history.
    """
    names = dict.fromkeys(key.removeprefix("eval_") for record in records for key in record)
    curves = {name: (curve_of(records, name), curve_of(records, f"eval_{name}")) for name in names}
    return {name: curve for name, curve in curves.items() if any(curve) and not _NO_METRIC.fullmatch(name)}


class _Sample(NamedTuple):
    """Where a task stood at one time."""

    seconds: float
    step: int
    num_tokens: int


def _rates(first: _Sample, last: _Sample, num_steps: int) -> dict[str, float | None]:
    """Return the rate of a task between two samples and the time that is left by it; `None` if it took no step."""
    seconds, steps = last.seconds - first.seconds, last.step - first.step
    if not seconds > 0 or steps <= 0:
        return {"tokens_per_s": None, "left_s": None}
    tokens_per_s = (last.num_tokens - first.num_tokens) / seconds
    return {"tokens_per_s": tokens_per_s, "left_s": (num_steps - last.step) * seconds / steps}


@dataclass
class _Watched:
    """Means of one task's losses, and where it stood over the last seconds."""

    step: int
    means: dict[float, float] = field(default_factory=lambda: {_FAST: 0.0, _SLOW: 0.0})
    num_losses: int = 0
    samples: deque[_Sample] = field(default_factory=deque)

    def observe(self, now_s: float, task: ActiveTask) -> None:
        """Take the present state of the task into account."""
        if task.step > self.step and math.isfinite(task.last_loss):
            self.num_losses += 1
            for decay in self.means:
                self.means[decay] = decay * self.means[decay] + (1 - decay) * task.last_loss
        if str(task.status) != "running" or task.step < self.step:
            # A paused task has no rate, and one that was restored to an earlier state has another one.
            self.samples.clear()
        self.step = task.step
        if not self.samples or now_s - self.samples[-1].seconds >= _GAP_S:
            self.samples.append(_Sample(now_s, task.step, task.num_tokens))
        while len(self.samples) > 2 and now_s - self.samples[1].seconds > _WINDOW_S:
            self.samples.popleft()

    def view(self, now_s: float, task: ActiveTask, share: float | None, *, with_curves: bool) -> TaskView:
        """Return what is shown of the task now."""
        view, trend = view_of(task, with_curves=with_curves), ""
        # Divided by the sum of the weights so far, because the mean starts at 0.
        means = [mean / (1 - decay**self.num_losses) for decay, mean in self.means.items() if self.num_losses]
        if self.num_losses >= 3:
            fast, slow = means
            trend = "down" if fast < slow else "up"
            trend = "flat" if abs(fast - slow) <= _FLAT * abs(slow) else trend
        rates: dict[str, Any] = {}
        if self.samples and str(task.status) == "running":
            rates = _rates(self.samples[0], _Sample(now_s, task.step, task.num_tokens), task.num_steps)
        return replace(view, loss=means[0] if means else view.loss, trend=trend, share=share, **rates)


class RunWatch:
    """Follows the tasks of a run, and returns views of them.

    The thread that trains calls `start` and `advance`; any thread may ask for views.

    Args:
        memory: returns bytes held now and bytes of the device; `None` if unknown.
        clock: returns seconds; tests pass another one.
    """

    def __init__(
        self,
        memory: Callable[[], tuple[int, int] | None] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._memory, self._clock = memory, clock
        self._tasks: tuple[ActiveTask, ...] = ()
        self._watched: dict[str, _Watched] = {}
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._began_s = self._now_s = clock()
        self._num_steps = 0
        self._times = RunTimes(clock)
        self._lock = threading.Lock()

    def start(self, tasks: Iterable[ActiveTask]) -> None:
        """Begin to count time."""
        tasks = tuple(tasks)
        with self._lock:
            self._began_s = self._clock()
            self._watched.clear()
            self._times.begin(tasks)
            self._observe(tasks)

    def advance(self, tasks: Iterable[ActiveTask]) -> None:
        """Take a step of the run into account."""
        tasks = tuple(tasks)
        with self._lock:
            self._num_steps += 1
            self._times.advance(tasks)
            self._observe(tasks)

    def log(self, line: str) -> None:
        """Keep a line, for pages that show lines next to the table."""
        self._lines.append(line)

    def _observe(self, tasks: tuple[ActiveTask, ...]) -> None:
        self._now_s, self._tasks = self._clock(), tasks
        self._watched = {task.name: self._watched.get(task.name) or _Watched(task.step) for task in tasks}
        for task in tasks:
            self._watched[task.name].observe(self._now_s, task)

    def view(self, *, with_curves: bool = False) -> RunView:
        """Return what is to be shown now, with or without the logged losses of each task."""
        with self._lock:
            tasks = tuple(
                self._watched[task.name].view(self._now_s, task, self._times.share(task.name), with_curves=with_curves)
                for task in self._tasks
            )
        memory = None if self._memory is None else self._memory()
        return RunView(
            tasks,
            step=self._num_steps,
            seconds=self._clock() - self._began_s,
            memory_bytes=memory[0] if memory else None,
            total_bytes=memory[1] if memory else None,
            lines=tuple(self._lines),
        )


# ---------------------------------------------------------------- views of metrics.jsonl


def view_of_records(records: Sequence[Mapping[str, Any]], num_steps: Mapping[str, int]) -> RunView:
    """Return the view of a run from its records.

    Args:
        records: the records of its `metrics.jsonl`, in order.
        num_steps: steps that each of its tasks should take, as far as known.
    """
    # Tasks that have logged nothing yet are tasks of the run as well.
    by_task: dict[str, list[Mapping[str, Any]]] = {name: [] for name in num_steps}
    reached: defaultdict[Any, list[Any]] = defaultdict(list)
    for record in records:
        name, steps = record.get("task"), record.get("steps")
        if isinstance(name, str) and record.get("event") in _OF_TASKS:
            by_task.setdefault(name, []).append(record)
            reached[name].append(record.get("step"))
        elif record.get("event") == "interrupted" and isinstance(steps, Mapping):
            for task, step in steps.items():
                reached[task].append(step)
    tokens: dict[str, int] = {}
    tasks = []
    for name, task_records in by_task.items():
        losses, held_out = curve_of(task_records, "loss"), curve_of(task_records, held_out_loss(task_records))
        ends = [record for record in task_records if record["event"] == "status"]
        step = max((step for step in reached[name] if isinstance(step, int)), default=0)
        status = str(ends[-1].get("status")) if ends else "running" if task_records else "waiting"
        token_counts = [record.get("num_tokens") for record in task_records if record["event"] in ("train", "eval")]
        tokens[name] = next((count for count in reversed(token_counts) if isinstance(count, int) and count >= 0), 0)
        samples: list[_Sample] = []
        for record in task_records:
            if record["event"] in ("data", "status"):
                samples.clear()  # it begins, possibly again in another process, or is resumed
            elif record["event"] == "train":
                with suppress(KeyError, TypeError, ValueError, OverflowError):
                    samples.append(_Sample(float(record["time"]), int(record["step"]), int(record["num_tokens"])))
        rates: dict[str, Any] = {}
        if status == "running" and len(samples) > 1:
            last = samples[-1]
            recent = (sample for sample in samples[:-1] if last.seconds - sample.seconds <= _WINDOW_S)
            first = next(recent, samples[-2])
            rates = _rates(first, last, num_steps.get(name, step))
        tasks.append(
            TaskView(
                name,
                status,
                step,
                num_steps.get(name, step),
                str(ends[-1].get("reason") or "") if ends else "",
                loss=losses[-1][1] if losses else None,
                eval_loss=held_out[-1][1] if held_out else None,
                losses=losses,
                eval_losses=held_out,
                loss_kind=next((str(record["loss_kind"]) for record in task_records if record.get("loss_kind")), ""),
                settings=next((str(record["settings"]) for record in task_records if record.get("settings")), ""),
                **rates,
            )
        )
    # Shares are of tokens: records are logged every some steps, and do not say which task took how much of the time.
    total = sum(tokens.values())
    steps = [step for record in records if isinstance(step := record.get("run_step"), int)]
    return RunView(
        tuple(replace(task, share=tokens[task.name] / total if total else None) for task in tasks),
        step=max(steps, default=0),
        seconds=_training_seconds(records),
        share_of="tokens",
    )


def _training_seconds(records: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds of the last training, or of the present one so far, according to records."""
    begun: dict[str, float] = {}
    seconds = last_s = 0.0
    is_over = True
    for record in records:
        time_s, runtime_s = record.get("time"), record.get("train_runtime")
        last_s = float(time_s) if isinstance(time_s, (int, float)) and math.isfinite(time_s) else last_s
        # Tasks log their rows when a training begins, or when they are registered; streams also at its end.
        if record.get("event") == "data":
            begun[str(record.get("task"))] = last_s
        elif record.get("event") == "train":
            is_over = False
        elif isinstance(runtime_s, (int, float)):
            seconds, is_over = float(runtime_s), True
            begun.clear()
        elif record.get("status") == "removed":
            begun.pop(str(record.get("task")), None)
    return seconds if is_over or not begun else max(last_s - min(begun.values()), 0.0)
