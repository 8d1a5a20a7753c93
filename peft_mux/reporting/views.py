"""Numbers in few characters, for tables and charts."""

# MERGED: `TaskTimes`: for how long each task has taken steps, in this process, and what share of their time was its
# MERGED: own.
# MERGED: `RunView`, what is shown of a run at one moment, and `RunWatch`, which makes it of tasks that train.
# MERGED: Everything in a view was measured, but for the time left, which goes on as the last steps went.

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from peft_mux.reporting.metrics_file import steps_at_ends, training_seconds


def counted(number: int, word: str) -> str:
    """Return a number with its noun, such as `1 step` or `1,200 steps`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def number_text(value: float | None) -> str:
    """Return a loss in six characters or so, whatever its size."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def rate_text(tokens_per_s: float | None) -> str:
    """Return a rate in a few characters, such as 9.8k; "-" for none."""
    if tokens_per_s is None:
        return "-"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if tokens_per_s >= 10 * size or (unit == "M" and tokens_per_s >= size):
            return f"{tokens_per_s / size:.1f}{unit}"
    return f"{tokens_per_s:,.0f}"


def time_text(seconds: float | None) -> str:
    """Return a time as 0:07, 12:03 or 3:25:00; "-" for none."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shortened(text: str, width: int, mark: str = "…") -> str:
    """Return a name in at most so many characters: its middle goes, as the names of a sweep differ at their ends.

    Args:
        text: the name.
        width: characters that there are.
        mark: what stands for the middle.
    """
    if len(text) <= width:
        return text
    kept = max(width - len(mark), 0)
    return (text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :])[: max(width, 0)]


def share_text(share: float | None) -> str:
    """Return a share of a whole, from 0 to 1, in percent; "-" where there is none."""
    return "-" if share is None else f"{share:.0%}"


class ShownTask(Protocol):
    """What is read of a task; a `TaskRun` is one."""

    step: int
    num_steps: int
    status: Any
    reason: str
    last_loss: float
    num_tokens: int
    state: Any

    @property
    def name(self) -> str:
        """Name of the task."""
        ...


class TaskTimes:
    """Adds up the seconds of the steps that each task took part in, with all that lay between them.

    Tasks of a step share its passes, which have no times of their own; so its seconds are divided by the tokens that
    each of them has trained in it. These parts are what shares are made of: those of all tasks add up to 1.

    Args:
        clock: returns seconds; another one for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Have seen no step."""
        self._clock, self._last_s = clock, clock()
        self._steps: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._own_seconds: defaultdict[str, float] = defaultdict(float)

    def begin(self, tasks: Iterable[ShownTask]) -> None:
        """Count from here on."""
        tasks = tuple(tasks)
        self._last_s = self._clock()
        self._steps = {task.name: task.step for task in tasks}
        self._tokens = {task.name: task.num_tokens for task in tasks}
        # Where a task was put back to a saved state, it stands elsewhere than it ended.
        self._first = dict(self._steps)
        self._seconds.clear()
        self._own_seconds.clear()

    def advance(self, tasks: Iterable[ShownTask]) -> None:
        """Count a step, or several, for the tasks that have taken it."""
        now, tokens = self._clock(), {}
        for task in tasks:
            if task.step > self._steps.setdefault(task.name, 0):
                self._seconds[task.name] += now - self._last_s
                self._first.setdefault(task.name, 0)
                tokens[task.name] = max(task.num_tokens - self._tokens.get(task.name, 0), 0)
            self._steps[task.name], self._tokens[task.name] = task.step, task.num_tokens
        total = sum(tokens.values())
        for name, own in tokens.items():
            self._own_seconds[name] += (now - self._last_s) * (own / total if total else 1 / len(tokens))
        self._last_s = now

    def seconds(self, name: str) -> float:
        """Return the seconds of a task since its training began here."""
        return self._seconds.get(name, 0.0)

    def share(self, name: str) -> float | None:
        """Return a task's share of the seconds of all steps since training began here; `None` before the first."""
        total_s = sum(self._own_seconds.values())
        return self._own_seconds.get(name, 0.0) / total_s if total_s else None

    def num_steps(self, task: ShownTask) -> int:
        """Return how many steps a task has taken since its training began here."""
        return max(0, task.step - self._first.get(task.name, 0))


Curve = tuple[tuple[int, float], ...]
"""Points of a curve: step of the task, and value."""

_OF_TASKS = ("data", "train", "eval", "status")
"""Events of `metrics.jsonl` that tell of a task which has begun."""
_WINDOW_S = 20.0
"""Rates are those of about so many seconds."""
_GAP_S = 0.25
_FAST, _SLOW = 0.9, 0.98
_FLAT = 0.002
"""Relative difference of the two means below which a loss neither falls nor rises."""


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task at one moment.

    Attributes:
        name: name of the task.
        status: where it stands, a word of the glossary.
        step: optimizer steps taken.
        num_steps: optimizer steps to take.
        reason: why it waits, failed or stopped; "" where there is nothing to say.
        loss: mean of its last losses, newer ones counting more; `None` before its first step.
        trend: whether that mean falls ("down"), rises ("up") or neither ("flat"); "" where it cannot be told yet.
        eval_loss: its last held-out loss; `None` before the first.
        tokens_per_s: its tokens a second over the last steps; `None` where it takes none.
        left_s: seconds that its other steps take if they go on like the last ones; `None` where it takes none.
        losses: its logged losses.
        eval_losses: its held-out losses.
        share: its share of the run, from 0 to 1, of what `RunView.share_of` says; `None` where that is not known.
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


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment.

    Attributes:
        tasks: its tasks, in the order in which they came.
        step: steps of the run.
        seconds: seconds since the first step began.
        tokens_per_s: tokens a second of all tasks over the last steps; `None` where none were taken.
        memory_bytes: what this process holds now: of its GPU, else of the host; `None` where that is not known.
        total_bytes: memory of that device.
        lines: what was logged, oldest first; terminals print it instead.
        is_interrupted: whether nobody trains it, though tasks of it would take more steps.
        share_of: what `TaskView.share` is of: "time" of the steps, those of several tasks divided by their tokens, or
            "tokens" that were trained.
    """

    tasks: tuple[TaskView, ...]
    step: int = 0
    seconds: float = 0.0
    tokens_per_s: float | None = None
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
    def left_s(self) -> float | None:
        """Seconds until the last running task ends if all go on as they do; `None` where none runs."""
        return max((task.left_s for task in self.tasks if task.left_s is not None), default=None)

    def count(self, status: str) -> int:
        """Return how many tasks have a status."""
        return sum(task.status == status for task in self.tasks)


class _Sample(NamedTuple):
    seconds: float
    step: int
    num_tokens: int


class _Watched:
    """Means of one task's losses, and where it stood over the last seconds."""

    def __init__(self, now: float, task: ShownTask) -> None:
        self.step = task.step
        self._means = {_FAST: 0.0, _SLOW: 0.0}
        self._num_losses = self._num_read = 0
        self._samples = deque([_Sample(now, task.step, task.num_tokens)])
        self.eval_loss: float | None = None
        self._read_history(task)

    def _read_history(self, task: ShownTask) -> None:
        """Look for a held-out loss in what was logged since the last look, as histories get long."""
        history = task.state.log_history
        self._num_read = self._num_read if self._num_read <= len(history) else 0
        if points := curve_of(history[self._num_read :], "eval_loss"):
            self.eval_loss = points[-1][1]
        self._num_read = len(history)

    def observe(self, now: float, task: ShownTask) -> None:
        self._read_history(task)
        if task.step > self.step and math.isfinite(task.last_loss):
            self._num_losses += 1
            for decay in self._means:
                self._means[decay] = decay * self._means[decay] + (1 - decay) * task.last_loss
        if str(task.status) != "running" or task.step < self.step:
            # A task that rests has no rate, and one that was put back to a saved state another one.
            self._samples.clear()
        self.step = task.step
        if not self._samples or now - self._samples[-1].seconds >= _GAP_S:
            self._samples.append(_Sample(now, task.step, task.num_tokens))
        while len(self._samples) > 2 and now - self._samples[1].seconds > _WINDOW_S:
            self._samples.popleft()

    def mean(self, decay: float = _FAST) -> float | None:
        # Divided by the weights so far, as a mean that begins at 0 would be too small.
        return self._means[decay] / (1 - decay**self._num_losses) if self._num_losses else None

    @property
    def trend(self) -> str:
        fast, slow = self.mean(_FAST), self.mean(_SLOW)
        if fast is None or slow is None or self._num_losses < 3:
            return ""
        if abs(fast - slow) <= _FLAT * abs(slow):
            return "flat"
        return "down" if fast < slow else "up"

    def rates(self, now: float, task: ShownTask) -> tuple[float | None, float | None]:
        """Return tokens and steps a second; `None` where the task takes none."""
        if not self._samples or str(task.status) != "running":
            return None, None
        first = self._samples[0]
        seconds, steps = now - first.seconds, task.step - first.step
        if seconds <= 0 or steps <= 0:
            return None, None
        return (task.num_tokens - first.num_tokens) / seconds, steps / seconds


_MOST_LINES = 200
"""Last lines of a run that are kept."""


class RunWatch:
    """Follows the tasks of a run, and says at any moment what is to be shown of them.

    Told of steps by the thread that trains; asked for views by any thread.

    Args:
        memory: returns bytes held now and bytes of the device; `None` where nobody knows.
        clock: returns seconds; another one for tests.
    """

    def __init__(
        self,
        memory: Callable[[], tuple[int, int] | None] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Follow nothing yet."""
        self._memory, self._clock = memory, clock
        self._tasks: tuple[ShownTask, ...] = ()
        self._watched: dict[str, _Watched] = {}
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._began_s = self._now_s = clock()
        self._num_steps = 0
        self._times = TaskTimes(clock)
        self._lock = threading.Lock()

    def start(self, tasks: Iterable[ShownTask]) -> None:
        """Begin to count time."""
        self._began_s = self._clock()
        self._watched.clear()
        tasks = tuple(tasks)
        with self._lock:
            self._times.begin(tasks)
        self._observe(tasks)

    def advance(self, tasks: Iterable[ShownTask]) -> None:
        """Take note of a step of the run."""
        self._num_steps += 1
        tasks = tuple(tasks)
        with self._lock:
            self._times.advance(tasks)
        self._observe(tasks)

    def log(self, line: str) -> None:
        """Keep a line for those who show lines beside the table."""
        self._lines.append(line)

    def _observe(self, tasks: Iterable[ShownTask]) -> None:
        with self._lock:
            self._now_s, self._tasks = self._clock(), tuple(tasks)
            names = set()
            for task in self._tasks:
                names.add(task.name)
                if task.name in self._watched:
                    self._watched[task.name].observe(self._now_s, task)
                else:
                    self._watched[task.name] = _Watched(self._now_s, task)
            for name in self._watched.keys() - names:
                del self._watched[name]

    def view(self, *, with_curves: bool = False) -> RunView:
        """Return what is to be shown now.

        Args:
            with_curves: whether each task's logged losses are part of it.
        """
        with self._lock:
            tasks = tuple(self._task_view(task, with_curves) for task in self._tasks)
        memory = None if self._memory is None else self._memory()
        return RunView(
            tasks,
            step=self._num_steps,
            seconds=self._clock() - self._began_s,
            tokens_per_s=sum(rates) if (rates := [one.tokens_per_s for one in tasks if one.tokens_per_s]) else None,
            memory_bytes=memory[0] if memory else None,
            total_bytes=memory[1] if memory else None,
            lines=tuple(self._lines),
        )

    def _task_view(self, task: ShownTask, with_curves: bool) -> TaskView:
        watched = self._watched[task.name]
        tokens_per_s, steps_per_s = watched.rates(self._now_s, task)
        last_loss = task.last_loss if math.isfinite(task.last_loss) else None
        return TaskView(
            task.name,
            str(task.status),
            task.step,
            task.num_steps,
            task.reason,
            loss=last_loss if watched.mean() is None else watched.mean(),
            trend=watched.trend,
            eval_loss=watched.eval_loss,
            tokens_per_s=tokens_per_s,
            left_s=(task.num_steps - task.step) / steps_per_s if steps_per_s else None,
            share=self._times.share(task.name),
            losses=curve_of(task.state.log_history, "loss") if with_curves else (),
            eval_losses=curve_of(task.state.log_history, "eval_loss") if with_curves else (),
        )


def view_of(task: ShownTask) -> TaskView:
    """Return what a task shows by itself, whether or not it trains: its last loss in place of a mean, and no rates."""
    held_out = curve_of(task.state.log_history, "eval_loss")
    return TaskView(
        task.name,
        str(task.status),
        task.step,
        task.num_steps,
        task.reason,
        loss=task.last_loss if math.isfinite(task.last_loss) else None,
        eval_loss=held_out[-1][1] if held_out else None,
        losses=curve_of(task.state.log_history, "loss"),
        eval_losses=held_out,
    )


def interrupted(view: RunView) -> RunView:
    """Return a view of a run that nobody trains: its running tasks as interrupted; the same where none ran.

    What a task is recorded as stays "running", which it goes on as; a view is for people, who would wait for it.

    Args:
        view: the run as it was left.
    """
    if not view.count("running"):
        return view
    left = {"status": "interrupted", "tokens_per_s": None, "left_s": None}
    tasks = tuple(replace(task, **left) if task.status == "running" else task for task in view.tasks)
    return replace(view, tasks=tasks, tokens_per_s=None, is_interrupted=True)


def view_of_records(records: Sequence[Mapping[str, Any]], num_steps: Mapping[str, int]) -> RunView:
    """Return what the records of a run show of it, such as those of a run that another process has trained.

    Args:
        records: the records of its `metrics.jsonl`, in order.
        num_steps: steps that each of its tasks is to take, as far as they are known.
    """
    # Tasks that have logged nothing yet are tasks of the run as well.
    by_task: dict[str, list[Mapping[str, Any]]] = {name: [] for name in num_steps}
    for record in records:
        if isinstance(name := record.get("task"), str) and record.get("event") in _OF_TASKS:
            by_task.setdefault(name, []).append(record)
    num_tokens = {name: _last_tokens(own) for name, own in by_task.items()}
    total = sum(num_tokens.values())
    reached = steps_at_ends(records)
    tasks = []
    for name, own in by_task.items():
        losses, held_out = curve_of(own, "loss"), curve_of(own, "eval_loss")
        ends = [record for record in own if record["event"] == "status"]
        step = max([0, *(step for step, _ in (*losses, *held_out)), *reached.get(name, ())])
        status = str(ends[-1].get("status")) if ends else "running" if own else "waiting"
        tokens_per_s, steps_per_s = _pace(own) if status == "running" else (None, None)
        tasks.append(
            TaskView(
                name,
                status,
                step,
                num_steps.get(name, step),
                str(ends[-1].get("reason") or "") if ends else "",
                loss=losses[-1][1] if losses else None,
                eval_loss=held_out[-1][1] if held_out else None,
                tokens_per_s=tokens_per_s,
                left_s=(num_steps.get(name, step) - step) / steps_per_s if steps_per_s else None,
                share=num_tokens[name] / total if total else None,
                losses=losses,
                eval_losses=held_out,
            )
        )
    steps = [step for record in records if isinstance(step := record.get("run_step"), int)]
    rates = [task.tokens_per_s for task in tasks if task.tokens_per_s]
    rate = sum(rates) if rates else None
    # Steps lie between two records, and which task took how much of their time is not in them.
    return RunView(tuple(tasks), max(steps, default=0), training_seconds(records), tokens_per_s=rate, share_of="tokens")


def _last_tokens(records: Sequence[Mapping[str, Any]]) -> int:
    """Return the tokens that a task had been trained on at its last record that tells; 0 where none does."""
    told = (record.get("num_tokens") for record in reversed(records) if record.get("event") in ("train", "eval"))
    return next((own for own in told if isinstance(own, int) and own >= 0), 0)


def _pace(records: Iterable[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Return tokens and steps a second that the last records of a task tell; `None` where they do not."""
    samples: list[_Sample] = []
    for record in records:
        if record.get("event") in ("data", "status"):
            samples.clear()  # it begins, also anew in another process, or goes on after a rest
        elif record.get("event") == "train":
            with suppress(KeyError, TypeError, ValueError, OverflowError):
                samples.append(_Sample(float(record["time"]), int(record["step"]), int(record["num_tokens"])))
    if len(samples) < 2:
        return None, None
    last = samples[-1]
    first = next((one for one in samples[:-1] if last.seconds - one.seconds <= _WINDOW_S), samples[-2])
    seconds, num_steps = last.seconds - first.seconds, last.step - first.step
    if not seconds > 0 or num_steps <= 0:
        return None, None
    return (last.num_tokens - first.num_tokens) / seconds, num_steps / seconds


def curve_of(records: Iterable[Any], key: str) -> Curve:
    """Return the points that records have of one number; records without it, or with no finite one, are passed over.

    Args:
        records: entries of a log history, or of `metrics.jsonl`.
        key: name of the number, such as `eval_loss`.
    """
    points = []
    for record in records:
        try:
            point = int(record["step"]), float(record[key])
        # A changed byte in a file makes anything of a number.
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(point[1]):
            points.append(point)
    return tuple(points)
