"""`Plan`: a frozen, serialisable description of what runs together, in how many passes, how fast, and in which memory.

The engine executes a plan and nothing else. Tasks of an hTask share every pass (spatial multiplexing); hTasks follow
each other (temporal multiplexing); on several stages, hTasks of a bucket share a pipeline clock and buckets are
interleaved by the template (M §3.3, §3.4).

A plan is data, and so is all that it consists of: fields, what follows from them at once, and JSON. `planner/` makes
plans. `plan_views.py` has the functions that print, draw and simulate one, and registers those that are also methods,
so that training by a plan needs neither.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from peft_mux.scheduler.units import MEMORY, seconds_text, time_band

FORMAT_VERSION = 5
_TEMPLATE_FORMAT_VERSION = 1
VIEWS: dict[str, Callable[..., Any]] = {}
"""The functions of `plan_views.py` that are also methods of a plan, by name; they are there once it is imported."""


@dataclass(frozen=True, slots=True)
class HTask:
    """Tasks that are fused spatially: their tokens share every pass through the backbone (M §3.3).

    Attributes:
        tasks: names of its tasks, in their order in the stream of a pass.
        micro_batches: passes of a typical step.
        tokens_per_micro_batch: mean tokens of a pass.
        pass_s: mean predicted seconds of a pass, forward and backward, over all stages.
    """

    tasks: tuple[str, ...]
    micro_batches: int
    tokens_per_micro_batch: float = 0.0
    pass_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskShare:
    """The load of one task in a step.

    Attributes:
        name: name of the task, which no other task of the run has.
        batch_size: sequences of its global batch.
        tokens_per_step: mean tokens of its global batch.
        num_steps: optimizer steps that it takes from its first to its last.
        adapter_parameters: trainable parameters of its adapter.
        computed_share: part of these tokens that is computed if the whole batch is in one pass: less than all if its
            rows share prefixes.
        alone_s: predicted seconds of its step if it trained alone on the same devices; 0 if that was not predicted.
    """

    name: str
    batch_size: int
    tokens_per_step: float
    num_steps: int
    adapter_parameters: int
    computed_share: float = 1.0
    alone_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """One pass of a typical step.

    Attributes:
        htask: index of its hTask in the plan.
        tasks: names of the tasks that have tokens in it, in the order of its stream.
        tokens: its tokens, without padding.
    """

    htask: int
    tasks: tuple[str, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task that takes no steps yet.

    Attributes:
        name: name of the task, which no other task of the run has.
        reason: why it waits, and what would let it run.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class PassParts:
    """Seconds of the parts of one pass between its sums, on each of the devices that share its layers.

    Forward and backward together unless stated otherwise. `peft_mux.scheduler.subgraphs` simulates with them how
    passes take turns (M §3.4.2).

    Attributes:
        tokens: tokens of the pass.
        targets: loss terms of the pass.
        attention_s: norm, q/k/v, attention and output projection of one layer, adapters included.
        mlp_s: norm, MLP and adapters of one layer.
        first_s: what lies before the layers.
        head_s: output head and loss.
        overhead_s: what the pass takes whatever its size.
        sum_s: one sum of hidden states `[T, D]` over the devices.
        head_sum_s: one sum of three numbers a target, for one block of the loss.
        head_gradient_sum_s: the sum of the gradient of the targets' hidden states.
        head_block_rows: rows of a block of the loss.
        forward_fraction: the part of a layer's seconds that is its forward.
    """

    tokens: float
    targets: float
    attention_s: float
    mlp_s: float
    first_s: float
    head_s: float
    overhead_s: float
    sum_s: float
    head_sum_s: float
    head_gradient_sum_s: float
    head_block_rows: int
    forward_fraction: float

    @property
    def num_head_blocks(self) -> int:
        """Blocks of rows in which the loss is computed, at least one."""
        return max(1, math.ceil(self.targets / self.head_block_rows))

    def of_size(self, tokens: float, targets: float) -> PassParts:
        """Return the parts of a pass of another size, in proportion: enough to order subgraphs by."""
        by_tokens = tokens / self.tokens if self.tokens else 1.0
        by_targets = targets / self.targets if self.targets else 1.0
        scaled = {name: by_tokens * getattr(self, name) for name in ("attention_s", "mlp_s", "first_s", "sum_s")}
        scaled |= {name: by_targets * getattr(self, name) for name in ("head_s", "head_gradient_sum_s")}
        return replace(self, tokens=float(tokens), targets=float(targets), **scaled)


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Passes that go through a stage in turns, as they wait for sums over its devices (M §3.4.2).

    A group is of one bucket (M §3.4.3, case 3); `peft_mux.scheduler.subgraphs` divides a step's passes.

    Attributes:
        width: the most passes of a group.
        parts: what a mean pass of each hTask computes between its sums, for the order of turns; empty if nothing is
            known of that, and tokens order them.
        saved_s: predicted seconds of a step that turns hide of the sums over devices.
    """

    width: int
    parts: tuple[PassParts, ...] = ()
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two devices, with the same figures in both directions.

    Each direction carries one message at a time and is busy for the whole of `transfer_s`.

    Attributes:
        latency_s: seconds that a message takes however small it is.
        bytes_per_s: bandwidth in one direction; inf for a link on which only latency counts.

    Raises:
        ValueError: for a latency that is negative or not finite, or a bandwidth that is not above 0.

    Example:
        >>> Link(latency_s=1.0, bytes_per_s=10.0).transfer_s(20)
        3.0
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s must be 0 or more, and finite, got {self.latency_s}. Give seconds.")
        if not self.bytes_per_s > 0:
            raise ValueError(
                "bytes_per_s must be more than 0 (inf for a link on which only latency counts), got "
                f"{self.bytes_per_s}. Give bytes per second."
            )

    def transfer_s(self, num_bytes: float) -> float:
        """Return the seconds that a message takes; a message without bytes takes the latency."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def slowed(self, factor: float) -> Link:
        """Return the link on which every message takes `factor` times as long."""
        return Link(self.latency_s * factor, self.bytes_per_s / factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLoad:
    """What one micro-batch of a bucket of hTasks costs on each of the S stages (M §3.4.1, "Computation Homogeneity").

    M takes all micro-batches of a bucket as equal. Rows are not split, so some micro-batches are longer: `weights` says
    by how much each differs from the mean. Bytes are those of the largest, which has to fit a limit; messages are of
    the mean.

    Attributes:
        name: the name in messages and drawings.
        forward_s: seconds of a forward on each stage.
        backward_s: seconds of a backward on each stage; empty for the same as `forward_s`, which is M's premise for
            PEFT (no weight gradients of the backbone).
        activation_bytes: bytes held on each stage from the start of the forward until the end of the backward.
        output_bytes: bytes of one message between neighbouring stages, in either direction.
        num_micro_batches: C, micro-batches of the bucket in one iteration.
        weights: seconds of each micro-batch over the mean ones, `forward_s` and `backward_s`; empty if all are equal.

    Raises:
        ValueError: if fields differ in the number of stages, or there is no micro-batch.
    """

    name: str
    forward_s: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    num_micro_batches: int
    backward_s: tuple[float, ...] = ()
    output_bytes: int = 0
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.backward_s:
            # A frozen dataclass can be completed in this way only.
            object.__setattr__(self, "backward_s", self.forward_s)
        lengths = {len(self.forward_s), len(self.backward_s), len(self.activation_bytes)}
        if len(lengths) > 1 or not self.forward_s or self.num_micro_batches < 1:
            raise ValueError(
                f"bucket {self.name!r}: forward_s, backward_s and activation_bytes must have a number for each of at "
                f"least one stage, and num_micro_batches must be 1 or more, got {self}."
            )

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.forward_s)

    def chunk_bytes(self, stage: int, chunk: int, num_chunks: int) -> int:
        """Return the bytes that one virtual stage of a device holds of a micro-batch.

        Args:
            stage: the device, counted from 0.
            chunk: the virtual stage on that device, counted from 0.
            num_chunks: virtual stages of a device.
        """
        share, rest = divmod(self.activation_bytes[stage], num_chunks)
        # The first chunks take the remainder, so that all chunks add up to the whole.
        return share + (chunk < rest)


class Slot(NamedTuple):
    """A micro-batch of a template.

    Attributes:
        bucket: index into the buckets as the caller gave them.
        micro_batch: index of the micro-batch within the bucket.
        step: step of the template, from 0.
    """

    bucket: int
    micro_batch: int
    step: int = 0


class Action(NamedTuple):
    """One forward or backward of one micro-batch through one (virtual) stage.

    Attributes:
        kind: "F" for forward, "B" for backward.
        bucket: index into the buckets as the caller gave them.
        micro_batch: index of the micro-batch within the bucket.
        stage: the device that runs it.
        chunk: the virtual stage on that device; 0 unless virtual stages are interleaved.
        step: step of the template, from 0; 0 in a template of one step.
    """

    kind: str
    bucket: int
    micro_batch: int
    stage: int
    chunk: int = 0
    step: int = 0

    @property
    def slot(self) -> Slot:
        """The micro-batch that it runs."""
        return Slot(self.bucket, self.micro_batch, self.step)

    def __str__(self) -> str:
        """Return it in short, such as F1.0 for bucket 1, micro-batch 0; behind step 0 with the step, as F1.0+2."""
        chunk = f"/{self.chunk}" if self.chunk else ""
        step = f"+{self.step}" if self.step else ""
        return f"{self.kind}{self.bucket}.{self.micro_batch}{chunk}{step}"


@dataclass(frozen=True, slots=True)
class PipelineTemplate:
    """An ordered list of actions for each device.

    Attributes:
        schedule: the schedule that it was built by, one of `names.SCHEDULES`.
        num_stages: S, which is the number of devices.
        num_chunks: virtual stages of each device.
        actions: the actions of each stage in the order in which it runs them, [stage][position].
        num_steps: steps that the lists are of, which are not drained between.
    """

    schedule: str
    num_stages: int
    num_chunks: int
    actions: tuple[tuple[Action, ...], ...]
    num_steps: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types; an action becomes [kind, bucket, micro_batch, chunk, step] in its stage's list.

        The step is left out where there is only one.
        """
        width = 4 if self.num_steps == 1 else 5
        return {
            "format_version": _TEMPLATE_FORMAT_VERSION,
            "schedule": self.schedule,
            "num_stages": self.num_stages,
            "num_chunks": self.num_chunks,
            "actions": [
                [[a.kind, a.bucket, a.micro_batch, a.chunk, a.step][:width] for a in row] for row in self.actions
            ],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PipelineTemplate:
        """Return the template that `to_dict` wrote.

        Args:
            data: the JSON types of a template in this format version.

        Raises:
            ValueError: for another format version, or a field that is missing.
        """
        version = data.get("format_version")
        if version != _TEMPLATE_FORMAT_VERSION:
            raise ValueError(f"format_version must be {_TEMPLATE_FORMAT_VERSION}, got {version!r}.")
        try:
            rows = tuple(
                tuple(Action(kind, bucket, micro_batch, stage, *rest) for kind, bucket, micro_batch, *rest in row)
                for stage, row in enumerate(data["actions"])
            )
            num_steps = 1 + max((action.step for row in rows for action in row), default=0)
            return cls(data["schedule"], data["num_stages"], data["num_chunks"], rows, num_steps)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"template must be what to_dict wrote, but lacks or misnames a field ({error})."
            ) from error


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak memory by part, in bytes.

    Attributes:
        backbone_bytes: frozen weights and buffers of the backbone.
        adapter_bytes: adapter weights, gradients, optimizer state and last good copies of all tasks.
        activation_bytes: what one pass keeps for its backward.
        workspace_bytes: blocks of logits and transient buffers.
        optimizer_bytes: the part of `adapter_bytes` that is optimizer state.
    """

    backbone_bytes: int
    adapter_bytes: int
    activation_bytes: int
    workspace_bytes: int
    optimizer_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Sum of all parts."""
        return self.backbone_bytes + self.adapter_bytes + self.activation_bytes + self.workspace_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part by its name, in the order in which they are printed and drawn."""
        return {
            "backbone": self.backbone_bytes,
            "adapters": self.adapter_bytes - self.optimizer_bytes,
            "optimizers": self.optimizer_bytes,
            "activations": self.activation_bytes,
            "workspace": self.workspace_bytes,
        }

    def summary(self) -> str:
        """Return one line, in GiB, or in MiB for less than one."""
        unit, name_of_unit = (2**30, "GiB") if self.peak_bytes >= 2**30 else (2**20, "MiB")
        listed = ", ".join(f"{name} {size / unit:.2f}" for name, size in self.parts.items())
        return f"memory (analytic estimate)  peak {self.peak_bytes / unit:.2f} {name_of_unit} {MEMORY.words}: {listed}"


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
        alone_s: predicted seconds of a step of each task in a run of its own; 0 if unknown.
        step_s: predicted seconds of a step of all tasks.
    """
    if len(alone_s) < 2 or not all(alone_s) or not any(num_steps) or not step_s:
        return None
    saved_s = (sum(alone_s) - step_s) / (len(alone_s) - 1)
    together_s = running_s = longest_s = 0.0
    # From the task that ends last back to the step in which all run.
    tasks = sorted(zip(num_steps, alone_s, strict=True), reverse=True)
    ends = [*(steps for steps, _ in tasks[1:]), 0]
    for others, ((steps, task_s), end) in enumerate(zip(tasks, ends, strict=True)):
        running_s, longest_s = running_s + task_s, max(longest_s, task_s)
        # A step is never faster than its longest task by itself.
        together_s += (steps - end) * max(running_s - others * saved_s, min(longest_s, step_s))
    return PredictedTimes(sum(steps * task_s for steps, task_s in tasks), together_s)


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


def from_plain(kind: Any, value: Any) -> Any:
    """Return a value of JSON as an annotation has it: dataclasses for objects, tuples for lists."""
    arguments = get_args(kind)
    if isinstance(value, dict) and arguments:  # a dataclass or `None`
        kind = next(filter(is_dataclass, arguments), None)
    if isinstance(value, dict):
        kinds = get_type_hints(kind)
        return kind(**{name: from_plain(kinds[name], item) for name, item in value.items()})
    if isinstance(value, list):
        kinds = itertools.repeat(arguments[0]) if arguments[-1] is ... else arguments
        return tuple(from_plain(kind_of_item, item) for kind_of_item, item in zip(kinds, value, strict=False))
    return value
