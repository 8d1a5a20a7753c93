"""`Plan`: a frozen, serialisable account of what runs together, in how many passes, how fast, and in how much memory.

The engine executes a plan and nothing else; the same value prints, draws and travels as JSON. Tasks of an hTask share
every pass (spatial multiplexing); hTasks follow each other (temporal multiplexing); on several stages, hTasks of a
bucket share a pipeline clock and buckets are interleaved by the template (M §3.3, §3.4).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peft_mux.scheduler.bands import MEMORY, time_band
from peft_mux.scheduler.costs.latency_sums import PassParts
from peft_mux.scheduler.costs.link import Link
from peft_mux.scheduler.costs.memory import MemoryEstimate
from peft_mux.scheduler.pipeline.gantt import gantt_text, memory_bars_text, save_gantt
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import Simulation, simulate
from peft_mux.scheduler.pipeline.template import PipelineTemplate
from peft_mux.scheduler.plan_html import plan_html
from peft_mux.scheduler.planner.policies import POLICIES, policy_words
from peft_mux.scheduler.planner.values import HTask, PlannedPass, TurnPlan, Waiting
from peft_mux.scheduler.run_times import RunTimes, run_times
from peft_mux.scheduler.units import bytes_text, seconds_text

__all__ = ["FORMAT_VERSION", "POLICIES", "HTask", "Plan", "TaskShare", "TurnPlan", "Waiting"]

FORMAT_VERSION = 4


@dataclass(frozen=True, slots=True)
class TaskShare:
    """What one task brings into a step.

    Attributes:
        name: name of the task, which no other task of the run has.
        batch_size: sequences of its global batch.
        tokens_per_step: mean tokens of its global batch.
        num_steps: optimizer steps that it takes from its first to its last.
        adapter_parameters: trainable parameters of its adapter.
        computed_share: part of these tokens that is computed where the whole batch is in one pass: less than all where
            its rows begin alike.
        alone_s: predicted seconds of its step if it trained alone on the same devices; 0 where that was not predicted.
    """

    name: str
    batch_size: int
    tokens_per_step: float
    num_steps: int
    adapter_parameters: int
    computed_share: float = 1.0
    alone_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs together, and what it needs.

    Attributes:
        htasks: the hTasks of a step, in the order in which they run.
        shares: what each running task brings into a step, in the order in which the tasks came.
        max_tokens_per_micro_batch: the most tokens of one pass: as asked for, or less where no more fits into memory.
            Only a single sequence that is longer makes a longer pass.
        chunk_size: tokens of a chunk (M §3.5).
        pad_to_chunks: whether each task's part of a stream is filled up to whole chunks.
        memory: predicted peak of the fullest stage by part, in bytes of one device.
        device: name of the device that the plan was made for.
        policy: how tasks were put together, one of `policies.policy_names()`.
        buckets: for each bucket the indices of the hTasks that share its pipeline clock (M §3.4).
        template: what each stage runs, in order; `None` for a plan without running tasks.
        bucket_loads: what each bucket costs on each stage, as the template was timed with.
        step_s: predicted seconds of a step of all tasks, of the busiest replica; 0 where nothing is predicted.
        peak_bytes: predicted peak of each stage, in bytes of one device.
        limit_bytes: memory of a device that the plan may fill, in bytes; `None` for no limit.
        profile_source: where predicted times come from, "measured" or "analytic"; "" where nothing is predicted.
        waiting: the tasks that are not in this plan, each with its reason.
        notes: remarks for the reader, such as rows that will be cut.
        num_replicas: replicas among which each task's global batch is divided; hTasks and passes are those of one.
        layers_per_stage: decoder layers of each of the S stages; empty where that was not planned.
        link: the link between stages that the template was timed with; `None` where messages take no time.
        devices_per_stage: devices that share every layer of a stage (tensor parallelism).
        passes: for each replica the passes of a typical step, in the order in which they are made; empty where that was
            not planned.
        turns: how passes take turns where they wait for sums over these devices (M §3.4.2); `None` where they run one
            after another.
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

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step of all tasks."""
        return sum(share.tokens_per_step for share in self.shares)

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted throughput; `None` where nothing is predicted."""
        return self.tokens_per_step / self.step_s if self.step_s else None

    @property
    def run_times(self) -> RunTimes | None:
        """Predicted times of all steps of its tasks, in turn and together; `None` for one task, or where unknown."""
        steps, alone_s = [share.num_steps for share in self.shares], [share.alone_s for share in self.shares]
        return run_times(steps, alone_s, self.step_s)

    @property
    def forecast(self) -> dict[str, Any]:
        """Seconds of a step and peak bytes of the fullest stage, with error bands and sources; seconds of all steps."""
        time = time_band(self.profile_source).around(self.step_s) if self.step_s else None
        times = self.run_times
        run = None if times is None else {**times._asdict(), "ratio": times.ratio}
        return {"step_s": time, "peak_bytes": MEMORY.around(self.memory.peak_bytes), "run": run}

    @property
    def num_stages(self) -> int:
        """S, pipeline stages."""
        return 1 if self.template is None else self.template.num_stages

    @property
    def passes_in_turns(self) -> int:
        """The most passes that take turns; 1 where they run one after another."""
        return 1 if self.turns is None else self.turns.width

    def bucket_of(self, task: str) -> int | None:
        """Return the index of the bucket that a task runs in, or `None` while it waits.

        Args:
            task: name of a task.
        """
        htask = self.htask_of(task)
        return next((number for number, bucket in enumerate(self.buckets) if htask in bucket), None)

    def htask_of(self, task: str) -> int | None:
        """Return the index of the hTask that a task runs in, or `None` while it waits.

        Args:
            task: name of a task.
        """
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
        return "\n".join(
            [*_header(self), *_rows(self), "", *_times(self), self.memory.summary(), *_limit(self)]
            + [f"note  {note}" for note in self.notes[:_MOST_NOTES]]
            + [f"note  ... and {len(self.notes) - _MOST_NOTES} more, in notes"] * (len(self.notes) > _MOST_NOTES)
        )

    def explain(self, task: str) -> str:
        """Return in sentences what one task shares, waits for and needs.

        Args:
            task: name of a task that runs or waits.

        Raises:
            ValueError: for a task that the plan does not know.
        """
        waiting = {one.name: one.reason for one in self.waiting}
        if task in waiting:
            return f"{task} waits: {waiting[task]}"
        index = self.htask_of(task)
        share = next((share for share in self.shares if share.name == task), None)
        if index is None or share is None:
            known = ", ".join([share.name for share in self.shares] + list(waiting))
            raise ValueError(f"task is {task!r}; allowed: {known}.")
        return " ".join(_explanation(self, share, index))

    def gantt(self, width: int = 100) -> str:
        """Return a drawing of a step for the terminal: a row for each stage, a letter for each hTask or bucket.

        Args:
            width: characters of a row, its label included.

        Raises:
            ValueError: for a plan without tasks.
        """
        return gantt_text(self.timeline(), width)

    def save_gantt(self, path: str | Path) -> Path:
        """Draw a step into a .png or .svg file; needs matplotlib.

        Args:
            path: the file to write, whose suffix says its format.

        Raises:
            ValueError: for a plan without tasks, or another kind of file.
        """
        return save_gantt(self.timeline(), Path(path))

    def memory_bars(self) -> str:
        """Return a bar for the peak of each stage, against the limit, or against the fullest where there is none."""
        peaks = self.peak_bytes or (self.memory.peak_bytes,)
        limits = (self.limit_bytes or max(peaks),) * len(peaks)
        return memory_bars_text(peaks, limits, [f"stage {number}" for number in range(len(peaks))])

    def diff(self, other: Plan) -> str:
        """Return what changes from this plan to another, a line each; empty where nothing does.

        Args:
            other: the plan that takes the place of this one.
        """
        return "\n".join([*_changes_of_tasks(self, other), *_changes_of_numbers(self, other)])

    def __str__(self) -> str:
        """Return `summary()`."""
        return self.summary()

    def __repr__(self) -> str:
        """Return `summary()` too: at a prompt the fields would be pages long."""
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
        data: dict[str, Any] = json.loads(text)
        version = data.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version: got {version!r}; allowed: {FORMAT_VERSION}.")
        data.pop("forecast", None)  # follows from the rest
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
            "passes": tuple(tuple(_planned_pass(one) for one in own) for own in data.pop("passes", ())),
            "link": None if (link := data.pop("link")) is None else Link(**link),
            "turns": None if (turns := data.pop("turns", None)) is None else _turn_plan(turns),
        }
        return cls(**read, **data)


def _planned_pass(item: dict[str, Any]) -> PlannedPass:
    return PlannedPass(**{**item, "tasks": tuple(item["tasks"])})


def _bucket_load(item: dict[str, Any]) -> BucketLoad:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in item.items()}
    return BucketLoad(**fields)


def _turn_plan(item: dict[str, Any]) -> TurnPlan:
    return TurnPlan(**{**item, "parts": tuple(PassParts(**parts) for parts in item["parts"])})


# --------------------------------------------------------------------- in words


_MOST_NOTES = 12
"""Notes of a plan that its text has."""


def _header(plan: Plan) -> list[str]:
    htasks = f"{len(plan.htasks)} hTask{'' if len(plan.htasks) == 1 else 's'}"
    stages = "" if plan.num_stages == 1 else f", {plan.num_stages} stages, {len(plan.buckets)} buckets"
    return [
        f"plan  {len(plan.shares)} tasks on {plan.device}, {htasks}{stages}, chunks of {plan.chunk_size} tokens",
        f"  {'task':<{_name_width(plan)}}  hTask  batch  tokens/step   steps  trainable",
    ]


def _rows(plan: Plan) -> list[str]:
    """Return a row for each task, after those of an hTask its passes, and at the end the tasks that wait."""
    width = _name_width(plan)
    lines = []
    for number, htask in enumerate(plan.htasks, start=1):
        lines += [
            f"  {share.name:<{width}}  {number:>5}  {share.batch_size:>5}  {share.tokens_per_step:>11,.0f}"
            f"  {share.num_steps:>6,}  {share.adapter_parameters:>9,}"
            for share in plan.shares
            if share.name in htask.tasks
        ]
        lines += [
            f"  {share.name:<{width}}  computed / asked tokens {share.computed_share:.0%}: its rows begin alike"
            for share in plan.shares
            if share.name in htask.tasks and share.computed_share < 1
        ]
        size = f" of about {htask.tokens_per_micro_batch:,.0f} tokens" if htask.tokens_per_micro_batch else ""
        bound = f" (at most {plan.max_tokens_per_micro_batch:,})"
        time = f", {seconds_text(htask.pass_s)} each" if htask.pass_s else ""
        lines.append(f"  hTask {number}: {_passes(htask)} a step{size}{bound}{time}")
    return lines + _turns(plan) + [f"  {one.name:<{width}}  waits: {one.reason}" for one in plan.waiting]


def _turns(plan: Plan) -> list[str]:
    """Return a line that tells which hTasks take turns; none where passes run one after another."""
    if plan.turns is None:
        return []
    groups = "; ".join(", ".join(str(index + 1) for index in bucket) for bucket in plan.buckets)
    saved = f", which saves {seconds_text(plan.turns.saved_s)} a step" if plan.turns.saved_s else ""
    return [f"  up to {plan.turns.width} passes of a bucket take turns{saved}; hTasks by bucket: {groups}"]


def _name_width(plan: Plan) -> int:
    return max(map(len, ["task", *(share.name for share in plan.shares), *(one.name for one in plan.waiting)]))


def _passes(htask: HTask) -> str:
    return f"{htask.micro_batches} pass{'es' if htask.micro_batches > 1 else ''}"


def _times(plan: Plan) -> list[str]:
    if not plan.step_s or plan.tokens_per_s is None:
        return []
    source = {"measured": "profile measured on this device", "analytic": "analytic profile, not measured"}
    words = source.get(plan.profile_source, plan.profile_source)
    without = ", without the tasks that wait" if plan.waiting else ""
    return [
        f"time ({words})  {seconds_text(plan.step_s)} a step {time_band(plan.profile_source).words},"
        f" {plan.tokens_per_s:,.0f} tokens/s;"
        f" {policy_words(plan.policy)}",
        *([] if plan.run_times is None else [f"        {plan.run_times}{without}"]),
    ]


def _limit(plan: Plan) -> list[str]:
    if plan.limit_bytes is None:
        return []
    share = plan.memory.peak_bytes / plan.limit_bytes
    return [f"        {share:.0%} of the {bytes_text(plan.limit_bytes)} that a device may use"]


def _explanation(plan: Plan, share: TaskShare, index: int) -> list[str]:
    """Return sentences about a task of the hTask `index`: its company, its passes, its time and its parameters."""
    htask, others = plan.htasks[index], _company(plan, share.name)
    company = f"shares its passes with {', '.join(others)}" if others else "has its passes to itself"
    sentences = [
        f"{share.name} {company} (hTask {index + 1} of {len(plan.htasks)}).",
        f"Each step takes {_passes(htask)} of about"
        f" {htask.tokens_per_micro_batch:,.0f} tokens, {share.tokens_per_step:,.0f} of a step's tokens being its own"
        f" ({share.tokens_per_step / max(plan.tokens_per_step, 1):.0%} of all tasks').",
    ]
    neighbours = _turn_neighbours(plan, index)
    if plan.turns is not None and neighbours:
        sentences.append(
            f"Its passes take turns with those of {', '.join(neighbours)}, up to {plan.turns.width} at a time: one"
            " computes while the sums of the others are under way."
        )
    if share.computed_share < 1:
        sentences.append(
            f"Its rows begin alike: of their tokens {share.computed_share:.0%} are computed where they share one pass."
        )
    if plan.step_s:
        htask_s = htask.micro_batches * htask.pass_s
        sentences.append(
            f"Its hTask takes {seconds_text(htask_s)} of the step's {seconds_text(plan.step_s)};"
            f" {share.num_steps:,} steps take {seconds_text(share.num_steps * plan.step_s)} in this company."
        )
    return [*sentences, f"It trains {share.adapter_parameters:,} parameters of its own."]


def _turn_neighbours(plan: Plan, index: int) -> list[str]:
    """Return the tasks of the other hTasks of an hTask's bucket."""
    bucket = next((bucket for bucket in plan.buckets if index in bucket), ())
    return [task for other in bucket if other != index for task in plan.htasks[other].tasks]


def _changes_of_tasks(before: Plan, after: Plan) -> list[str]:
    """Return a line for each task that starts, waits or leaves, or shares its passes with others than before."""
    old = {share.name for share in before.shares}
    new = {share.name for share in after.shares}
    waits = {one.name: one.reason for one in after.waiting}
    lines = [f"+ {share.name} starts" for share in after.shares if share.name not in old]
    lines += [
        f"- {share.name} {f'waits: {waits[share.name]}' if share.name in waits else 'leaves'}"
        for share in before.shares
        if share.name not in new
    ]
    for name in (share.name for share in after.shares if share.name in old):
        then, now = _company(before, name), _company(after, name)
        if then != now:
            lines.append(f"~ {name} shares its passes with {_listed(now)}, before with {_listed(then)}")
    return lines


def _changes_of_numbers(before: Plan, after: Plan) -> list[str]:
    lines = []
    shown = {"step_s": seconds_text, "policy": str, "max_tokens_per_micro_batch": str, "passes_in_turns": str}
    for name, text in shown.items():
        then, now = getattr(before, name), getattr(after, name)
        if then != now:
            lines.append(f"~ {name}: {text(then)} -> {text(now)}")
    peaks = before.memory.peak_bytes, after.memory.peak_bytes
    if peaks[0] != peaks[1]:
        lines.append(f"~ peak memory: {bytes_text(peaks[0])} -> {bytes_text(peaks[1])}")
    return lines


def _company(plan: Plan, task: str) -> tuple[str, ...]:
    """Return the other tasks of a task's hTask, none while it waits."""
    index = plan.htask_of(task)
    return () if index is None else tuple(name for name in plan.htasks[index].tasks if name != task)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nobody"
