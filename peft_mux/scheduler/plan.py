"""`Plan`: a frozen, serialisable description of what runs together, in how many passes, how fast, and in which memory.

The engine executes a plan and nothing else. Tasks of an hTask share every pass (spatial multiplexing); hTasks follow
each other (temporal multiplexing); on several stages, hTasks of a bucket share a pipeline clock and buckets are
interleaved by the template (M §3.3, §3.4).

A plan is data: fields, what follows from them at once, and JSON. `plan_views.py` has the functions that print, draw and
simulate it, and registers those that are also methods, so that training by a plan needs none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.costs.memory import MemoryEstimate
from peft_mux.scheduler.costs.profile import from_plain
from peft_mux.scheduler.pipeline.list_scheduler import BucketLoad
from peft_mux.scheduler.pipeline.template import PipelineTemplate
from peft_mux.scheduler.planner.values import (
    HTask,
    PlannedPass,
    PredictedTimes,
    TaskShare,
    TurnPlan,
    Waiting,
    run_times,
)
from peft_mux.scheduler.units import MEMORY, time_band

FORMAT_VERSION = 5
VIEWS: dict[str, Callable[..., Any]] = {}
"""The functions of `plan_views.py` that are also methods of a plan, by name; they are there once it is imported."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: which tasks run together, and their time and memory.

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
        links: the link from each stage to the next, and from the last to the first, that the template was timed with;
            empty if messages take no time.
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
    links: tuple[Link, ...] = ()
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
    def run_times(self) -> PredictedTimes | None:
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
    def num_stages(self) -> int:
        """S, pipeline stages."""
        return 1 if self.template is None else self.template.num_stages

    @property
    def passes_in_turns(self) -> int:
        """The most passes that take turns; 1 if they run one after another."""
        return 1 if self.turns is None else self.turns.width

    def htask_of(self, task: str) -> int | None:
        """Return the index of the hTask that a task runs in, or `None` while it waits."""
        return next((index for index, htask in enumerate(self.htasks) if task in htask.tasks), None)

    def company_of(self, task: str) -> list[str]:
        """Return the other tasks of a task's hTask, none while it waits."""
        index = self.htask_of(task)
        return [] if index is None else [name for name in self.htasks[index].tasks if name != task]

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
            ValueError: for another format version, or a field that is missing.
        """
        data = json.loads(text)
        version = data.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version must be {FORMAT_VERSION}, got {version!r}.")
        data.pop("forecast", None)  # follows from the rest
        try:
            template = None if data["template"] is None else PipelineTemplate.from_dict(data.pop("template"))
            return from_plain(cls, {**data, "template": template})
        except (LookupError, TypeError) as error:
            raise ValueError(f"plan must be what to_json wrote, but lacks or misnames a field ({error}).") from error

    # ---------------------------------------------------------------- views

    def summary(self, columns: int | None = None) -> str:
        """Return the plan as a table, a row for each task under its hTask.

        Args:
            columns: characters of a row of the table; longer names of tasks have a line of their own. By default rows
                have any length.
        """
        return VIEWS["summary"](self, columns)

    def explain(self, task: str) -> str:
        """Return in sentences what one task shares, waits for and needs.

        Raises:
            ValueError: for a task that the plan does not know.
        """
        return VIEWS["explain"](self, task)

    def diff(self, other: Plan) -> str:
        """Return what changes from this plan to the one that replaces it, a line each; empty if nothing does.

        First the tasks that start, wait or leave, or share their passes with other tasks than before, then numbers.
        """
        return VIEWS["diff"](self, other)

    def gantt(self, width: int = 100) -> str:
        """Return a drawing of a step for the terminal: a row for each stage, a letter for each hTask or bucket.

        Args:
            width: characters of a row, its label included.

        Raises:
            ValueError: for a plan without tasks.
        """
        return VIEWS["gantt"](self, width)

    def save_gantt(self, path: str | Path) -> Path:
        """Draw a step, and its memory below, into a .png or .svg file; needs matplotlib.

        Args:
            path: the file to write, whose suffix says its format.

        Raises:
            ValueError: for a plan without tasks, or another kind of file.
        """
        return VIEWS["save_gantt"](self, path)

    def __repr__(self) -> str:
        """Return `summary()`, also for `str`: at a prompt the fields would be pages long."""
        return self.summary()

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the summary, the time line of a step, and its memory."""
        return VIEWS["html"](self)
