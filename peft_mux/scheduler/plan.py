"""`Plan`: a frozen, serialisable description of what runs together, in how many passes, how fast, and in which memory.

The engine executes a plan and nothing else; the same value prints, draws and travels as JSON. Tasks of an hTask share
every pass (spatial multiplexing); hTasks follow each other (temporal multiplexing); on several stages, hTasks of a
bucket share a pipeline clock and buckets are interleaved by the template (M §3.3, §3.4).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.costs.latency import PassParts
from peft_mux.scheduler.costs.memory import MemoryEstimate
from peft_mux.scheduler.drawing import MemoryBar, gantt_text, memory_bars_text, plan_html, save_gantt
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import Simulation, simulate
from peft_mux.scheduler.pipeline.template import PipelineTemplate
from peft_mux.scheduler.plan_text import changes_text, plan_text, task_text
from peft_mux.scheduler.planner.values import HTask, PlannedPass, TaskShare, TurnPlan, Waiting
from peft_mux.scheduler.units import MEMORY, seconds_text, time_band


class RunTimes(NamedTuple):
    """Predicted times of the same steps, one task after another and together.

    Attributes:
        in_turn_s: seconds of all steps of one task after another.
        together_s: seconds of the same steps as planned, until the last task has ended.
    """

    in_turn_s: float
    together_s: float

    @property
    def ratio(self) -> float:
        """How many times faster the steps are together."""
        return self.in_turn_s / self.together_s

    def __str__(self) -> str:
        """Return both times and their ratio in one line."""
        return (
            f"one after another {seconds_text(self.in_turn_s)}   together {seconds_text(self.together_s)}   "
            f"{self.ratio:.2g}x (estimate)"
        )


def run_times(num_steps: Sequence[int], alone_s: Sequence[float], step_s: float) -> RunTimes | None:
    """Return both times; `None` for a single task, or if a time is unknown.

    Tasks end at different steps, and the steps after that are not planned. What a step of all tasks saves over their
    steps alone is assumed to shrink in equal parts with each task that ends, to nothing for the last one, as the fixed
    time of passes does.

    Args:
        num_steps: steps of each task.
        alone_s: predicted seconds of a step of each task by itself; 0 if unknown.
        step_s: predicted seconds of a step of all tasks.
    """
    if len(alone_s) < 2 or not all(alone_s) or not any(num_steps) or not step_s:
        return None
    saved_s = (sum(alone_s) - step_s) / (len(alone_s) - 1)
    together_s = running_s = longest_s = 0.0
    # From the task that ends last back to the step in which all run.
    tasks = sorted(zip(num_steps, alone_s, strict=True), reverse=True)
    ends = [*(steps for steps, _ in tasks[1:]), 0]
    for others, ((steps, own_s), end) in enumerate(zip(tasks, ends, strict=True)):
        running_s, longest_s = running_s + own_s, max(longest_s, own_s)
        # A step is never faster than its longest task by itself.
        together_s += (steps - end) * max(running_s - others * saved_s, min(longest_s, step_s))
    return RunTimes(sum(steps * own_s for steps, own_s in tasks), together_s)


FORMAT_VERSION = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs together, and what it needs.

    Attributes:
        htasks: the hTasks of a step, in the order in which they run.
        shares: what each running task brings into a step, in the order in which the tasks came.
        max_tokens_per_micro_batch: the most tokens of one pass: as requested, or less if no more fits into memory.
            Only a single sequence that is longer makes a longer pass.
        chunk_size: tokens of a chunk (M §3.5).
        pad_to_chunks: whether each task's part of a stream is filled up to whole chunks.
        memory: predicted peak of the fullest stage by part, in bytes of one device.
        device: name of the device that the plan was made for.
        policy: how tasks were put together, one of `policies.POLICIES`.
        buckets: for each bucket the indices of the hTasks that share its pipeline clock (M §3.4).
        template: what each stage runs, in order; `None` for a plan without running tasks.
        bucket_loads: what each bucket costs on each stage, as the template was timed with.
        step_s: predicted seconds of a step of all tasks, of the busiest replica; 0 if nothing is predicted.
        peak_bytes: predicted peak of each stage, in bytes of one device.
        limit_bytes: memory of a device that the plan may fill, in bytes; `None` for no limit.
        profile_source: where predicted times come from, "measured" or "analytic"; "" if nothing is predicted.
        waiting: the tasks that are not in this plan, each with its reason.
        notes: remarks for the reader, such as rows that will be cut.
        num_replicas: replicas among which each task's global batch is divided; hTasks and passes are those of one.
        layers_per_stage: decoder layers of each of the S stages; empty if that was not planned.
        link: the link between stages that the template was timed with; `None` if messages take no time.
        devices_per_stage: devices that share every layer of a stage (tensor parallelism).
        passes: for each replica the passes of a typical step, in the order in which they are made; empty if that was
            not planned.
        turns: how passes that wait for sums over these devices take turns (M §3.4.2); `None` if they run one after
            another.
        device_bytes: memory of a device, in bytes; `None` if unknown.
    """

    htasks: tuple[HTask, ...]
    shares: tuple[TaskShare, ...]
    max_tokens_per_micro_batch: int
    chunk_size: int
    pad_to_chunks: bool
    memory: MemoryEstimate
    device: str
    policy: str = "mux"
    buckets: tuple[tuple[int, ...], ...] = ()
    template: PipelineTemplate | None = None
    bucket_loads: tuple[BucketLoad, ...] = ()
    step_s: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    limit_bytes: int | None = None
    profile_source: str = ""
    waiting: tuple[Waiting, ...] = ()
    notes: tuple[str, ...] = field(default=())
    num_replicas: int = 1
    layers_per_stage: tuple[int, ...] = ()
    link: Link | None = None
    devices_per_stage: int = 1
    passes: tuple[tuple[PlannedPass, ...], ...] = ()
    turns: TurnPlan | None = None
    device_bytes: int | None = None

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step of all tasks."""
        return sum(share.tokens_per_step for share in self.shares)

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted throughput; `None` if nothing is predicted."""
        return self.tokens_per_step / self.step_s if self.step_s else None

    @property
    def run_times(self) -> RunTimes | None:
        """Predicted times of all steps of its tasks, in turn and together; `None` for one task, or if unknown."""
        steps, alone_s = [share.num_steps for share in self.shares], [share.alone_s for share in self.shares]
        return run_times(steps, alone_s, self.step_s)

    @property
    def forecast(self) -> dict[str, Any]:
        """Seconds of a step, peak bytes of the fullest stage, both with bands and sources, and times of all steps."""
        time = time_band(self.profile_source).around(self.step_s) if self.step_s else None
        times = self.run_times
        run = {} if times is None else {"run": {**times._asdict(), "ratio": times.ratio}}
        return {"step_s": time, "peak_bytes": MEMORY.around(self.memory.peak_bytes), **run}

    @property
    def memory_bar(self) -> MemoryBar:
        """The parts of the fullest stage's peak, compared with the device or, if that is unknown, with the limit."""
        is_device = self.device_bytes is not None
        return MemoryBar(tuple(self.memory.parts.items()), self.device_bytes or self.limit_bytes, is_device)

    @property
    def num_stages(self) -> int:
        """S, pipeline stages."""
        return 1 if self.template is None else self.template.num_stages

    @property
    def passes_in_turns(self) -> int:
        """The most passes that take turns; 1 if they run one after another."""
        return 1 if self.turns is None else self.turns.width

    def bucket_of(self, task: str) -> int | None:
        """Return the index of the bucket that a task runs in, or `None` while it waits."""
        htask = self.htask_of(task)
        return next((number for number, bucket in enumerate(self.buckets) if htask in bucket), None)

    def htask_of(self, task: str) -> int | None:
        """Return the index of the hTask that a task runs in, or `None` while it waits."""
        return next((index for index, htask in enumerate(self.htasks) if task in htask.tasks), None)

    def timeline(self) -> Simulation:
        """Return when each pass of a step begins and ends on each stage, by simulation.

        Raises:
            ValueError: for a plan without tasks.
        """
        if self.template is None:
            raise ValueError("the plan holds no running task; allowed: plans with at least one, to have a timeline.")
        return simulate(self.template, self.bucket_loads, links=self.link)

    def summary(self) -> str:
        """Return the plan as a table, a row for each task under its hTask."""
        return plan_text(self)

    def explain(self, task: str) -> str:
        """Return in sentences what one task shares, waits for and needs.

        Raises:
            ValueError: for a task that the plan does not know.
        """
        return task_text(self, task)

    def gantt(self, width: int = 100) -> str:
        """Return a drawing of a step for the terminal: a row for each stage, a letter for each hTask or bucket.

        Args:
            width: characters of a row, its label included.

        Raises:
            ValueError: for a plan without tasks.
        """
        return gantt_text(self.timeline(), width)

    def save_gantt(self, path: str | Path) -> Path:
        """Draw a step, and its memory below, into a .png or .svg file; needs matplotlib.

        Args:
            path: the file to write, whose suffix says its format.

        Raises:
            ValueError: for a plan without tasks, or another kind of file.
        """
        return save_gantt(self.timeline(), Path(path), self.memory_bar.draw)

    def memory_bars(self) -> str:
        """Return a bar for the peak of each stage, relative to the limit or, without one, to the fullest stage."""
        peaks = self.peak_bytes or (self.memory.peak_bytes,)
        return memory_bars_text(peaks, (self.limit_bytes or max(peaks),) * len(peaks))

    def diff(self, other: Plan) -> str:
        """Return what changes from this plan to the one that replaces it, a line each; empty if nothing does."""
        return changes_text(self, other)

    def __str__(self) -> str:
        """Return `summary()`."""
        return self.summary()

    def __repr__(self) -> str:
        """Return `summary()`: at a prompt the fields would be pages long."""
        return self.summary()

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the summary, the time line of a step, and its memory."""
        return plan_html(self)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        data = asdict(self)
        data["template"] = None if self.template is None else self.template.to_dict()
        data["forecast"] = self.forecast
        return json.dumps({"format_version": FORMAT_VERSION, **data}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Args:
            text: the JSON of a plan in this format version.

        Raises:
            ValueError: for another format version.
        """
        data = _with_tuples(json.loads(text))
        version = data.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version: got {version!r}; allowed: {FORMAT_VERSION}.")
        data.pop("forecast", None)  # follows from the rest
        for name, kind in (
            ("htasks", HTask),
            ("shares", TaskShare),
            ("bucket_loads", BucketLoad),
            ("waiting", Waiting),
        ):
            data[name] = tuple(kind(**item) for item in data[name])
        data["passes"] = tuple(tuple(PlannedPass(**one) for one in own) for own in data.get("passes", ()))
        data["memory"] = MemoryEstimate(**data["memory"])
        if data["template"] is not None:
            data["template"] = PipelineTemplate.from_dict(data["template"])
        if data["link"] is not None:
            data["link"] = Link(**data["link"])
        if (turns := data.get("turns")) is not None:
            data["turns"] = TurnPlan(**{**turns, "parts": tuple(PassParts(**parts) for parts in turns["parts"])})
        return cls(**data)


def _with_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples for lists."""
    if isinstance(value, dict):
        return {name: _with_tuples(item) for name, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
