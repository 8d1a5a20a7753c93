"""What a pipeline executes: a template, and which tasks its buckets stand for.

A template speaks of micro-batch k of bucket b. A step brings micro-batches of hTasks, as many of each as its rows of
this step need, which may be more or fewer than the C that the plan was made with. They are spread over the C
micro-batches of their bucket in order and evenly; hTasks of one bucket follow one another within an action::

    bucket 0, C = 4         0        1        2     3
    hTask x, 4 passes       x0       x1       x2    x3
    hTask y, 2 passes       y0                y1

Passes that share a long sequence (`peft_mux.data.batch`) stay together in one micro-batch of their bucket: its
forward runs them in order, its backward in reverse. Each goes on to the next stage as soon as it is done, so that one
part is in a stage while the part before it is in the next one. Such a micro-batch holds all parts of its sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peft_mux.data.batch import MuxBatch, chains_of
from peft_mux.data.packing.passes import slot_of
from peft_mux.errors import PlanError
from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import build_window, simulate, window_step_s
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Slot
from peft_mux.scheduler.plan import Plan


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The part of a plan that a pipeline follows.

    Attributes:
        template: what each stage runs, in order.
        htasks: for each hTask, names of the tasks that share its passes.
        buckets: for each bucket of the template, indices of the hTasks in it.
        loads: what each bucket costs, as the template was timed with; empty where that is not known.
        link: the link between stages that the template was timed with; `None` where messages take no time.

    Raises:
        PlanError: if the template has another number of buckets, or a task is there twice.
    """

    template: PipelineTemplate
    htasks: tuple[tuple[str, ...], ...]
    buckets: tuple[tuple[int, ...], ...]
    loads: tuple[BucketLoad, ...] = ()
    link: Link | None = None

    def __post_init__(self) -> None:
        found = {action.bucket for row in self.template.actions for action in row}
        if found != set(range(len(self.buckets))):
            raise PlanError(
                f"the template speaks of buckets {sorted(found)}; allowed: those from 0 to {len(self.buckets) - 1},"
                " which the plan has. Build the template from the loads of these buckets."
            )
        names = [name for htask in self.htasks for name in htask]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PlanError(f"tasks {', '.join(twice)} are in several hTasks; allowed: every task in one.")

    @classmethod
    def of(cls, plan: Plan) -> PipelinePlan:
        """Return what a pipeline follows of a plan.

        Args:
            plan: the plan of the run.

        Raises:
            PlanError: for a plan without tasks.
        """
        if plan.template is None:
            raise PlanError("the plan holds no running task; allowed: plans with at least one.")
        htasks = tuple(htask.tasks for htask in plan.htasks)
        return cls(plan.template, htasks, plan.buckets, plan.bucket_loads, plan.link)

    @classmethod
    def of_buckets(cls, template: PipelineTemplate, buckets: Sequence[Sequence[str]]) -> PipelinePlan:
        """Return a plan in which every bucket is one hTask.

        Args:
            template: a template of these buckets.
            buckets: names of the tasks in each bucket.
        """
        return cls(template, tuple(map(tuple, buckets)), tuple((index,) for index in range(len(buckets))))

    @property
    def gains_by_windows(self) -> bool:
        """Whether steps that are not flushed are predicted to be faster than steps that are."""
        if not self.loads:
            return False
        flushed_s = simulate(self.template, self.loads, links=self.link).makespan_s
        return window_step_s(self.template, self.loads, links=self.link) < flushed_s

    def window(self, num_steps: int) -> PipelineTemplate:
        """Return the template of several steps between which the pipeline is not flushed.

        Args:
            num_steps: number of steps, 1 or more.
        """
        return build_window(self.template, self.loads, num_steps, links=self.link)

    def tasks_of(self, bucket: int) -> tuple[str, ...]:
        """Return the names of the tasks in a bucket."""
        return tuple(name for htask in self.buckets[bucket] for name in self.htasks[htask])

    def passes_per_bucket(self) -> dict[int, int]:
        """Return C, the number of micro-batches, of each bucket."""
        counts = dict.fromkeys(range(len(self.buckets)), 0)
        # Any stage would do: each runs every micro-batch.
        for action in self.template.actions[0]:
            counts[action.bucket] = max(counts[action.bucket], 1 + action.micro_batch)
        return counts

    def slots(self, micro_batches: Sequence[MuxBatch], step: int = 0) -> dict[Slot, list[MuxBatch]]:
        """Return which micro-batches each micro-batch of the template stands for; none for some, if they are few.

        Args:
            micro_batches: micro-batches of a step, each of tasks of one hTask.
            step: number of that step in a template of several.

        Raises:
            PlanError: for a micro-batch of a task that is not in the plan, or of tasks of several hTasks.
        """
        of_htask: dict[int, list[MuxBatch]] = {index: [] for index in range(len(self.htasks))}
        for micro_batch in micro_batches:
            of_htask[self._htask_of(micro_batch)].append(micro_batch)
        counts = self.passes_per_bucket()
        slots: dict[Slot, list[MuxBatch]] = {
            Slot(bucket, number, step): [] for bucket, count in counts.items() for number in range(count)
        }
        for bucket, members in enumerate(self.buckets):
            for htask in members:
                _spread(of_htask[htask], Slot(bucket, 0, step), counts[bucket], slots)
        return slots

    def _htask_of(self, micro_batch: MuxBatch) -> int:
        homes = {index for index, htask in enumerate(self.htasks) for name in micro_batch.task_names if name in htask}
        strangers = set(micro_batch.task_names) - {name for htask in self.htasks for name in htask}
        if strangers or len(homes) != 1:
            raise PlanError(
                f"a micro-batch holds tasks {', '.join(micro_batch.task_names)}; allowed: tasks of one hTask of the"
                f" plan ({'; '.join(', '.join(htask) for htask in self.htasks)}). Dispatch the step with the plan that"
                " the pipeline follows."
            )
        return homes.pop()


def _spread(passes: Sequence[MuxBatch], first: Slot, count: int, slots: Mapping[Slot, list[MuxBatch]]) -> None:
    """Spread the passes of an hTask evenly over the `count` micro-batches of its bucket, chains unbroken."""
    number = 0
    for chain in chains_of(passes):
        # By the number of its first pass, and the chain as a whole: parts of a sequence must not be apart in the
        # template.
        slots[first._replace(micro_batch=slot_of(number, len(passes), count))].extend(chain)
        number += len(chain)


def forwards_only(like: PipelineTemplate, num_micro_batches: int) -> PipelineTemplate:
    """Return a template of the same pipeline that takes the micro-batches of one bucket through it, one by one.

    Args:
        like: a template of the pipeline.
        num_micro_batches: micro-batches of the bucket.
    """
    rows = tuple(
        tuple(
            Action("F", 0, number, stage, chunk)
            for number in range(num_micro_batches)
            for chunk in range(like.num_chunks)
        )
        for stage in range(like.num_stages)
    )
    return PipelineTemplate("mux", like.num_stages, like.num_chunks, rows)
