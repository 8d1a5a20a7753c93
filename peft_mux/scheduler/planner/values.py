"""Inputs and results of the planner, except loads and models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from peft_mux.data.packing.passes import PassRules
from peft_mux.scheduler.costs.latency import PassParts
from peft_mux.scheduler.costs.memory import MemoryEstimate
from peft_mux.scheduler.names import Schedule
from peft_mux.scheduler.pipeline.list_scheduler import BucketLoad, Links
from peft_mux.scheduler.pipeline.template import PipelineTemplate
from peft_mux.scheduler.units import seconds_text


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
class Budget:
    """What a plan may use.

    Attributes:
        max_tokens: the most tokens of one pass; only a single sequence that is longer makes a longer pass.
        limit_bytes: memory of a device that the plan may fill, in bytes; `None` for no limit.
        num_micro_batches: C, passes of each hTask that has as many rows; by default the number is searched for with
            which the predicted step is shortest and fits into memory.
        schedule: the schedule that a pipeline runs. A policy that searches under its own schedule (such as "mux")
            chooses its buckets under that one in any case; this one is then built over them.
        num_chunks: virtual stages of a device, for schedules that interleave them.
        links: the links between neighbouring stages.
        rules: whether rows are cut, and how long chunks are, as the engine's collator has it.
        interleaved_passes: the most passes that take turns while they wait for sums over the devices of a stage;
            "auto" for the number that is predicted to be fastest and fits.
        recomputes: whether activations are recomputed in the backward, as its sums then are.
        drains: whether a pipeline is drained at the end of every step; else plans are compared by steps between which
            it is not, which need fewer micro-batches to keep stages busy.
    """

    max_tokens: int
    limit_bytes: int | None = None
    num_micro_batches: int | None = None
    schedule: Schedule = "mux"
    num_chunks: int = 1
    links: Links = None
    rules: PassRules = field(default_factory=PassRules)
    interleaved_passes: int | Literal["auto"] = 1
    recomputes: bool = False
    drains: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the planner decided, without the particulars of a run that `Plan` adds.

    Attributes:
        htasks: the hTasks of a step, in the order in which they run.
        buckets: for each bucket the indices of the hTasks that share its pipeline clock (M §3.4).
        template: what each stage runs, in order; `None` if nothing runs.
        bucket_loads: what each bucket costs on each stage, as the template was timed with.
        step_s: predicted seconds of a step of all tasks, updates included.
        peak_bytes: predicted peak of each stage, in bytes of one device.
        waiting: the tasks that are left out, each with its reason.
        max_tokens: the most tokens of a pass, as asked for or as fits into memory; more only if a sequence is
            longer.
        memory: the peak of the fullest stage by part; `None` if nothing runs.
        passes: the passes of a typical step, as its rows are cut.
        turns: how passes take turns; `None` if they run one after another.
    """

    htasks: tuple[HTask, ...]
    buckets: tuple[tuple[int, ...], ...]
    template: PipelineTemplate | None
    bucket_loads: tuple[BucketLoad, ...]
    step_s: float
    peak_bytes: tuple[int, ...]
    waiting: tuple[Waiting, ...]
    max_tokens: int
    memory: MemoryEstimate | None
    passes: tuple[PlannedPass, ...] = ()
    turns: TurnPlan | None = None


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
