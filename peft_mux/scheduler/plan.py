"""`Plan`: a frozen, serialisable account of what runs together, in how many passes, how fast, and in how much memory.

The engine executes a plan and nothing else; the same value prints, draws and travels as JSON. Tasks of an hTask share
every pass (spatial multiplexing); hTasks follow each other (temporal multiplexing); on several stages, hTasks of a
bucket share a pipeline clock and buckets are interleaved by the template (M §3.3, §3.4).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peft_mux.scheduler.link import Link
from peft_mux.scheduler.memory import MemoryEstimate
from peft_mux.scheduler.pipeline_load import BucketLoad
from peft_mux.scheduler.pipeline_template import PipelineTemplate
from peft_mux.scheduler.simulator import Simulation, simulate

FORMAT_VERSION = 3

POLICIES = ("mux", "together", "interleaved", "sequential")
"""mux: M's planner. together: one hTask (SL-PEFT). interleaved: one hTask a task. sequential: task by task."""


@dataclass(frozen=True, slots=True)
class TaskShare:
    """What one task brings into a step.

    Attributes:
        name: of the task.
        batch_size: sequences of its global batch.
        tokens_per_step: mean tokens of its global batch.
        num_steps: optimizer steps that it takes.
        adapter_parameters: trainable parameters.
    """

    name: str
    batch_size: int
    tokens_per_step: float
    num_steps: int
    adapter_parameters: int


@dataclass(frozen=True, slots=True)
class HTask:
    """Tasks that are fused spatially: their tokens share every pass through the backbone (M §3.3).

    Attributes:
        tasks: in stream order.
        micro_batches: C, passes per step at the mean number of tokens.
        tokens_per_micro_batch: mean tokens of a pass.
        pass_s: predicted seconds of a pass, forward and backward, over all stages.
    """

    tasks: tuple[str, ...]
    micro_batches: int
    tokens_per_micro_batch: float = 0.0
    pass_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task that takes no steps yet.

    Attributes:
        name: of the task.
        reason: why, and what would let it run.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs together, and what it needs.

    Attributes:
        htasks: run one after another in each step.
        shares: what each task brings.
        max_tokens_per_micro_batch: bound of one pass: as asked for, or less where no more fits into memory. Only a
            single sequence that is longer makes a longer pass.
        chunk_size: tokens of a chunk (M §3.5).
        pad_to_chunks: whether each task's part of a stream is filled up to whole chunks.
        memory: predicted peak of the fullest stage, by part.
        device: what it was made for.
        policy: how tasks were put together, one of `POLICIES`.
        buckets: hTasks, by index, that share a pipeline clock (M §3.4).
        template: what each stage runs, in order.
        bucket_loads: what the template was timed with.
        step_s: predicted seconds of a step of all tasks, of the busiest replica; 0 where nothing is predicted.
        peak_bytes: predicted for each stage.
        limit_bytes: memory of a device that the plan may fill; `None` for no limit.
        profile_source: where predicted times come from, "measured" or "analytic"; "" where nothing is predicted.
        waiting: tasks that are not in this plan.
        notes: remarks for the reader, such as rows that will be cut.
        num_replicas: among which each task's global batch is divided; hTasks and passes are those of one of them.
        layers_per_stage: decoder layers of each of the S stages; empty where that was not planned.
        link: between stages, that the template was timed with; `None` where messages take no time.
        devices_per_stage: that share every layer of a stage (tensor parallelism); bytes are those of one of them.
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

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step of all tasks."""
        return sum(share.tokens_per_step for share in self.shares)

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted throughput; `None` where nothing is predicted."""
        return self.tokens_per_step / self.step_s if self.step_s else None

    @property
    def num_stages(self) -> int:
        """S, pipeline stages."""
        return 1 if self.template is None else self.template.num_stages

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
        """Return the plan as a table."""
        from peft_mux.scheduler.plan_text import summary

        return summary(self)

    def explain(self, task: str) -> str:
        """Return in sentences what one task shares, waits for and needs.

        Raises:
            ValueError: for a task that the plan does not know.
        """
        from peft_mux.scheduler.plan_text import explain

        return explain(self, task)

    def gantt(self, width: int = 100) -> str:
        """Return a drawing of a step for the terminal: a row for each stage, a letter for each hTask or bucket.

        Raises:
            ValueError: for a plan without tasks.
        """
        from peft_mux.scheduler.gantt import gantt_text

        return gantt_text(self.timeline(), width)

    def save_gantt(self, path: str | Path) -> Path:
        """Draw a step into a .png or .svg file; needs matplotlib.

        Raises:
            ValueError: for a plan without tasks, or another kind of file.
        """
        from peft_mux.scheduler.gantt import save_gantt

        return save_gantt(self.timeline(), Path(path))

    def memory_bars(self) -> str:
        """Return a bar for the peak of each stage, against the limit, or against the fullest where there is none."""
        from peft_mux.scheduler.gantt import memory_bars_text

        peaks = self.peak_bytes or (self.memory.peak_bytes,)
        limits = (self.limit_bytes or max(peaks),) * len(peaks)
        return memory_bars_text(peaks, limits, [f"stage {number}" for number in range(len(peaks))])

    def diff(self, other: Plan) -> str:
        """Return what changes from this plan to another, a line each; empty where nothing does."""
        from peft_mux.scheduler.plan_text import diff

        return diff(self, other)

    def __str__(self) -> str:
        """Return `summary()`."""
        return self.summary()

    def to_json(self) -> str:
        """Return the plan as JSON."""
        data = asdict(self)
        data["template"] = None if self.template is None else self.template.to_dict()
        return json.dumps({"format_version": FORMAT_VERSION, **data}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            ValueError: for another format version.
        """
        data: dict[str, Any] = json.loads(text)
        version = data.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version: got {version!r}; allowed: {FORMAT_VERSION}.")
        template = data.pop("template")
        read = {
            "htasks": tuple(HTask(**{**item, "tasks": tuple(item["tasks"])}) for item in data.pop("htasks")),
            "shares": tuple(TaskShare(**item) for item in data.pop("shares")),
            "memory": MemoryEstimate(**data.pop("memory")),
            "buckets": tuple(tuple(bucket) for bucket in data.pop("buckets")),
            "template": None if template is None else PipelineTemplate.from_dict(template),
            "bucket_loads": tuple(_bucket_load(item) for item in data.pop("bucket_loads")),
            "peak_bytes": tuple(data.pop("peak_bytes")),
            "waiting": tuple(Waiting(**item) for item in data.pop("waiting")),
            "notes": tuple(data.pop("notes")),
            "layers_per_stage": tuple(data.pop("layers_per_stage")),
            "link": None if (link := data.pop("link")) is None else Link(**link),
        }
        return cls(**read, **data)


def _bucket_load(item: dict[str, Any]) -> BucketLoad:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in item.items()}
    return BucketLoad(**fields)
