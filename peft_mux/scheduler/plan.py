"""`Plan`: a frozen, serialisable description of what runs together, in how many passes, how fast, and in which memory.

The engine executes a plan and nothing else; the same value prints, draws and travels as JSON. Tasks of an hTask share
every pass (spatial multiplexing); hTasks follow each other (temporal multiplexing); on several stages, hTasks of a
bucket share a pipeline clock and buckets are interleaved by the template (M §3.3, §3.4).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.costs.memory import MemoryEstimate
from peft_mux.scheduler.costs.profile import from_plain
from peft_mux.scheduler.drawing import (
    MemoryBar,
    gantt_text,
    memory_bars_text,
    memory_html,
    memory_rows,
    save_rows,
    timeline,
    timeline_html,
)
from peft_mux.scheduler.pipeline.launch import BucketLoad
from peft_mux.scheduler.pipeline.simulator import Simulation, simulate
from peft_mux.scheduler.pipeline.template import PipelineTemplate
from peft_mux.scheduler.planner.policies import POLICIES
from peft_mux.scheduler.planner.values import HTask, PlannedPass, TaskShare, TurnPlan, Waiting
from peft_mux.scheduler.units import MEMORY, bytes_text, seconds_text, step_time_text, time_band


class PredictedTimes(NamedTuple):
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


def run_times(num_steps: Sequence[int], alone_s: Sequence[float], step_s: float) -> PredictedTimes | None:
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
    return PredictedTimes(sum(steps * own_s for steps, own_s in tasks), together_s)


FORMAT_VERSION = 5
_MOST_NOTES = 12
"""Notes of a plan that its text has."""
_NUMBERS_WIDTH = 48
"""Characters of a row of the table without the name of its task."""
_SOURCES = {"measured": "profile measured on this device", "analytic": "analytic profile, not measured"}


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
            raise ValueError("the plan must have at least one running task to have a timeline, got none.")
        return simulate(self.template, self.bucket_loads, links=self.links)

    def summary(self, columns: int | None = None) -> str:
        """Return the plan as a table, a row for each task under its hTask.

        Args:
            columns: characters of a row of the table; longer names of tasks have a line of their own. By default rows
                have any length.
        """
        width = max(map(len, ["task", *(share.name for share in self.shares), *(one.name for one in self.waiting)]))
        width = width if columns is None else min(width, max(columns - _NUMBERS_WIDTH, 4))
        htasks = f"{len(self.htasks)} hTask{'' if len(self.htasks) == 1 else 's'}"
        stages = "" if self.num_stages == 1 else f", {self.num_stages} stages, {len(self.buckets)} buckets"
        lines = [
            f"plan  {len(self.shares)} tasks on {self.device}, {htasks}{stages}, chunks of {self.chunk_size} tokens",
            f"  {'task':<{width}}  hTask  batch  tokens/step   steps  trainable",
        ]
        for number, htask in enumerate(self.htasks, start=1):
            shares = [share for share in self.shares if share.name in htask.tasks]
            lines += [
                f"  {_cell(share.name, width)}  {number:>5}  {share.batch_size:>5}  {share.tokens_per_step:>11,.0f}"
                f"  {share.num_steps:>6,}  {share.adapter_parameters:>9,}"
                for share in shares
            ]
            lines += [
                f"  {share.name:<{width}}  prefix sharing: computes {share.computed_share:.0%} of its tokens"
                for share in shares
                if share.computed_share < 1
            ]
            size = f" of about {htask.tokens_per_micro_batch:,.0f} tokens" if htask.tokens_per_micro_batch else ""
            bound = f" (at most {self.max_tokens_per_micro_batch:,})"
            time = f", {seconds_text(htask.pass_s)} each" if htask.pass_s else ""
            lines.append(f"  hTask {number}: {_passes(htask)} a step{size}{bound}{time}")
        if self.turns is not None:
            groups = "; ".join(", ".join(str(index + 1) for index in bucket) for bucket in self.buckets)
            saved = f", which saves {seconds_text(self.turns.saved_s)} a step" if self.turns.saved_s else ""
            lines.append(f"  up to {self.turns.width} passes of a bucket take turns{saved}; hTasks by bucket: {groups}")
        lines += [f"  {_cell(one.name, width)}  waits: {one.reason}" for one in self.waiting]
        lines.append("")
        if self.step_s and self.tokens_per_s is not None:
            source = _SOURCES.get(self.profile_source, self.profile_source)
            # A plan may come from a process that knows other policies.
            policy = POLICIES[self.policy].words if self.policy in POLICIES else self.policy
            is_measured = self.profile_source == "measured"
            rate = self.tokens_per_s if is_measured else float(f"{self.tokens_per_s:.1g}")
            step = step_time_text(self.step_s, self.profile_source)
            lines.append(f"time ({source})  {step}, {rate:,.0f} tokens/s; {policy}")
            # Without a measured profile, what is gained is less than what the times may be off.
            if self.run_times is not None and is_measured:
                without = ", without the tasks that wait" if self.waiting else ""
                lines.append(f"        {self.run_times}{without}")
        lines += [self.memory.summary(), *self.memory_bar.lines()]
        if self.limit_bytes is not None:
            share = self.memory.peak_bytes / self.limit_bytes
            lines.append(f"        {share:.0%} of the {bytes_text(self.limit_bytes)} that a device may use")
        lines += [f"note  {note}" for note in self.notes[:_MOST_NOTES]]
        if len(self.notes) > _MOST_NOTES:
            lines.append(f"note  ... and {len(self.notes) - _MOST_NOTES} more, in notes")
        return "\n".join(lines)

    def explain(self, task: str) -> str:
        """Return in sentences what one task shares, waits for and needs.

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
            raise ValueError(f"task must be {known}, got {task!r}.")

        htask, others = self.htasks[index], self._company(task)
        company = f"shares its passes with {', '.join(others)}" if others else "has its passes to itself"
        sentences = [
            f"{task} {company} (hTask {index + 1} of {len(self.htasks)}).",
            f"Each step takes {_passes(htask)} of about {htask.tokens_per_micro_batch:,.0f} tokens,"
            f" {share.tokens_per_step:,.0f} of a step's tokens being its own"
            f" ({share.tokens_per_step / max(self.tokens_per_step, 1):.0%} of all tasks').",
        ]
        bucket = next((bucket for bucket in self.buckets if index in bucket), ())
        neighbours = [name for other in bucket if other != index for name in self.htasks[other].tasks]
        if self.turns is not None and neighbours:
            sentences.append(
                f"Its passes take turns with those of {', '.join(neighbours)}, up to {self.turns.width} at a time: one"
                " computes while the sums of the others are in progress."
            )
        if share.computed_share < 1:
            sentences.append(
                f"Its rows share prefixes: {share.computed_share:.0%} of their tokens are computed where they share one"
                " pass."
            )
        if self.step_s:
            sentences.append(
                f"Its hTask takes {seconds_text(htask.micro_batches * htask.pass_s)} of the step's"
                f" {seconds_text(self.step_s)}; {share.num_steps:,} steps take"
                f" {seconds_text(share.num_steps * self.step_s)} in this company."
            )
        return " ".join([*sentences, f"It trains {share.adapter_parameters:,} parameters of its own."])

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
        memory = memory_rows({"planned": self.memory.parts}, self.limit_bytes, self.device_bytes)
        title = f"memory of the fullest stage: {self.memory_bar.words or bytes_text(self.memory.peak_bytes)}"
        passes = "pipeline (light: forward, dark: backward)"
        return save_rows(Path(path), {passes: timeline(self.timeline(), self), title: memory})

    def memory_bars(self) -> str:
        """Return a bar for the peak of each stage, relative to the limit or, without one, to the fullest stage."""
        peaks = self.peak_bytes or (self.memory.peak_bytes,)
        return memory_bars_text(peaks, self.limit_bytes or max(peaks))

    def diff(self, other: Plan) -> str:
        """Return what changes from this plan to the one that replaces it, a line each; empty if nothing does.

        First the tasks that start, wait or leave, or share their passes with other tasks than before, then numbers.
        """
        old = {share.name for share in self.shares}
        new = {share.name for share in other.shares}
        waits = {one.name: one.reason for one in other.waiting}
        lines = [f"+ {share.name} starts" for share in other.shares if share.name not in old]
        lines += [
            f"- {share.name} {f'waits: {waits[share.name]}' if share.name in waits else 'leaves'}"
            for share in self.shares
            if share.name not in new
        ]
        for name in (share.name for share in other.shares if share.name in old):
            then, now = (", ".join(plan._company(name)) or "no other task" for plan in (self, other))
            if then != now:
                lines.append(f"~ {name} shares its passes with {now}, before with {then}")
        shown = {"step_s": seconds_text, "policy": str, "max_tokens_per_micro_batch": str, "passes_in_turns": str}
        for name, text in shown.items():
            if getattr(self, name) != getattr(other, name):
                lines.append(f"~ {name}: {text(getattr(self, name))} -> {text(getattr(other, name))}")
        peaks = self.memory.peak_bytes, other.memory.peak_bytes
        if peaks[0] != peaks[1]:
            lines.append(f"~ peak memory: {bytes_text(peaks[0])} -> {bytes_text(peaks[1])}")
        return "\n".join(lines)

    def _company(self, task: str) -> list[str]:
        """Return the other tasks of a task's hTask, none while it waits."""
        index = self.htask_of(task)
        return [] if index is None else [name for name in self.htasks[index].tasks if name != task]

    def __str__(self) -> str:
        """Return `summary()`."""
        return self.summary()

    def __repr__(self) -> str:
        """Return `summary()`: at a prompt the fields would be pages long."""
        return self.summary()

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the summary, the time line of a step, and its memory."""
        drawn = "" if self.template is None else timeline_html(self) + memory_html(self)
        return f"<pre style='line-height:1.3;overflow:auto'>{escape(self.summary())}</pre>{drawn}"

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


def _cell(name: str, width: int) -> str:
    """Return a name as the first cell of a row; a name that is too long gets a line of its own above the row."""
    return name.ljust(width) if len(name) <= width else f"{name}\n  {'':<{width}}"


def _passes(htask: HTask) -> str:
    return f"{htask.micro_batches} pass{'es' if htask.micro_batches > 1 else ''}"
