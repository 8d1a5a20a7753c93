"""`PipelinePlan`: the template that a pipeline follows, and the tasks of its buckets.

A template refers to micro-batch k of bucket b. A step has micro-batches of hTasks, as many of each as its rows need,
which may be more or fewer than the C of the plan. They are spread evenly and in order over the C micro-batches of their
bucket; hTasks of one bucket run one after another within an action::

    bucket 0, C = 4         0        1        2     3
    hTask x, 4 passes       x0       x1       x2    x3
    hTask y, 2 passes       y0                y1

Passes that share a long sequence (`peft_mux.data.batch`) stay together in one micro-batch of their bucket: its forward
runs them in order, its backward in reverse. Each pass is sent to the next stage as soon as it has finished, so one part
can be in a stage while the previous part is in the next one. Such a micro-batch holds all parts of its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peft_mux.data.batch import MuxBatch, chains_of
from peft_mux.data.packing.passes import slot_of
from peft_mux.errors import PlanError
from peft_mux.scheduler.pipeline.list_scheduler import Links
from peft_mux.scheduler.pipeline.simulator import simulate, window_step_s
from peft_mux.scheduler.plan import Action, BucketLoad, PipelineTemplate, Plan, Slot


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The part of a plan that a pipeline follows.

    Attributes:
        template: what each stage runs, in order.
        htasks: for each hTask, names of the tasks that share its passes.
        buckets: for each bucket of the template, indices of the hTasks in it.
        loads: the cost of each bucket with which the template was timed; empty if unknown.
        links: the links between stages with which the template was timed.

    Raises:
        PlanError: if the template has another number of buckets, or if a task occurs twice.
    """

    template: PipelineTemplate
    htasks: tuple[tuple[str, ...], ...]
    buckets: tuple[tuple[int, ...], ...]
    loads: tuple[BucketLoad, ...] = ()
    links: Links = None

    def __post_init__(self) -> None:
        buckets = {action.bucket for row in self.template.actions for action in row}
        if buckets != set(range(len(self.buckets))):
            raise PlanError(
                f"the template must refer to the plan's buckets, 0 to {len(self.buckets) - 1}, got {sorted(buckets)}. "
                "Build the template from the loads of these buckets."
            )
        names = [name for htask in self.htasks for name in htask]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PlanError(f"each task must be in one hTask, got {', '.join(twice)} in several.")

    @classmethod
    def of(cls, plan: Plan) -> PipelinePlan:
        """Return the part of a run's plan that a pipeline follows.

        Raises:
            PlanError: for a plan without tasks.
        """
        if plan.template is None:
            raise PlanError("the plan must have at least one running task, got none.")
        htasks = tuple(htask.tasks for htask in plan.htasks)
        return cls(plan.template, htasks, plan.buckets, plan.bucket_loads, plan.links)

    @property
    def gains_by_windows(self) -> bool:
        """Whether steps without flushes between them are predicted to be faster than steps with them."""
        if not self.loads:
            return False
        flushed_s = simulate(self.template, self.loads, links=self.links).makespan_s
        return window_step_s(self.template, self.loads, links=self.links) < flushed_s

    def slots(self, micro_batches: Sequence[MuxBatch], step: int = 0) -> dict[Slot, list[MuxBatch]]:
        """Map each micro-batch of the template to the micro-batches of a step; some may have none.

        Args:
            micro_batches: micro-batches of a step, each of tasks of one hTask.
            step: number of that step in a template of several.

        Raises:
            PlanError: if a micro-batch has a task that is not in the plan, or tasks of several hTasks.
        """
        htask_of = {name: index for index, htask in enumerate(self.htasks) for name in htask}
        passes: dict[int, list[MuxBatch]] = {index: [] for index in range(len(self.htasks))}
        for micro_batch in micro_batches:
            homes = {htask_of.get(name) for name in micro_batch.task_names}
            if None in homes or len(homes) != 1:
                raise PlanError(
                    "a micro-batch must have tasks of one hTask of the plan "
                    f"({'; '.join(', '.join(htask) for htask in self.htasks)}), got "
                    f"{', '.join(micro_batch.task_names)}. Dispatch the step with the plan that the pipeline follows."
                )
            passes[homes.pop()].append(micro_batch)  # type: ignore[index]
        # C of each bucket; any stage would do, as each runs every micro-batch.
        counts = dict.fromkeys(range(len(self.buckets)), 0)
        for action in self.template.actions[0]:
            counts[action.bucket] = max(counts[action.bucket], 1 + action.micro_batch)
        slots: dict[Slot, list[MuxBatch]] = {
            Slot(bucket, number, step): [] for bucket, count in counts.items() for number in range(count)
        }
        for bucket, members in enumerate(self.buckets):
            for htask_passes in (passes[htask] for htask in members):
                number = 0
                for chain in chains_of(htask_passes):
                    # By the number of its first pass, for the whole chain: parts of a sequence must not be in
                    # different micro-batches of the template.
                    slots[Slot(bucket, slot_of(number, len(htask_passes), counts[bucket]), step)].extend(chain)
                    number += len(chain)
        return slots


def forwards_only(like: PipelineTemplate, num_micro_batches: int) -> PipelineTemplate:
    """Return a template of the same pipeline with the forwards of the micro-batches of one bucket, one by one."""
    rows = tuple(
        tuple(
            Action("F", 0, number, stage, chunk)
            for number in range(num_micro_batches)
            for chunk in range(like.num_chunks)
        )
        for stage in range(like.num_stages)
    )
    return PipelineTemplate("mux", like.num_stages, like.num_chunks, rows)
