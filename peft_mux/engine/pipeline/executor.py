"""`BucketBarriers`: how a bucket's step ends on all stages while other buckets are under way, in a window of steps.

Adapters of tasks are disjoint. So before the forwards of a bucket's next step, its own tasks must have stepped on every
stage, and nobody else. Whether a task steps, and how its gradient is clipped, follows from its loss, known on the last
stage, and from the norm of its whole gradient, of which each stage holds a part::

    stage 0      ... B(k) <- figures | update -> figures, F(k + 1) ...        time goes to the right
    stage 1   ... B(k) -> figures ...           update -> figures, F(k + 1)
    stage 2  B(k) -> figures ...                             update, F(k + 1)

Losses and squared norms (figures, `[2, N]` of the N tasks of the bucket) go down behind the last gradient and add up;
the first stage knows all of them as its own last backward is done, and sends them up before the next hidden states. So
they are on the way that backwards and forwards take in any case, and nobody waits longer for them than for these.
"""

# MERGED: The pipeline engine: forward and backward of a plan's micro-batches through S stages in S processes (M
# MERGED: §3.4.1).
# MERGED: Each process runs its own list of a template, in order, and nothing decides anything on the way: an action
# MERGED: takes its
# MERGED: input from the virtual stage before, computes, and hands its result on. Orders and shapes are known to all,
# MERGED: as every
# MERGED: process makes the same micro-batches from the same rows. What may wait for what, and why that always ends,
# MERGED: is told in
# MERGED: `peft_mux.engine.pipeline.links`.

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.executor import has_prepasses, prepared, tasks_of
from peft_mux.engine.gradients import BundledAllReduce, GradientSync
from peft_mux.engine.pipeline.actions import StageActions, StageTraffic
from peft_mux.engine.pipeline.links import FIGURES_DTYPE, PipelineLinks, StepEnd, StepEnds
from peft_mux.engine.pipeline.plan import PipelinePlan, forwards_only
from peft_mux.engine.pipeline.stage import StageModel
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import PassClock, StepResult, StepSums, StepWork, pack, unpack
from peft_mux.errors import PlanError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.objective import OWN
from peft_mux.scheduler.pipeline.simulator import Span
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Slot
from peft_mux.scheduler.plan import Plan

UpdateTasks = Callable[[int, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Collection[str]]
"""Steps tasks by their losses and gradient norms in a step of the window; returns those that step no more in it."""


class BucketBarriers:
    """Ends the steps of buckets on one stage of a window.

    Args:
        model: the part of the model that lies here.
        links: the channels of this stage.
        gradients: knows which cells of a gradient this process counts.
        row: the list of this stage.
        num_stages: S, stages of the pipeline.
        tasks: for each bucket the names of its tasks that take the steps, in stream order; only buckets that have some.
        sums: losses of each step, complete on the last stage where backwards are done.
        update: steps tasks.
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        links: PipelineLinks,
        gradients: BundledAllReduce,
        row: Sequence[Action],
        *,
        num_stages: int,
        tasks: Mapping[int, Sequence[str]],
        sums: Sequence[StepSums],
        update: UpdateTasks,
    ) -> None:
        """Read where steps end in the list."""
        self._model, self._links, self._gradients = model, links, gradients
        self._ends, self._tasks, self._sums, self._update = StepEnds(row), tasks, sums, update
        self._is_last = links.stage == num_stages - 1
        self._dead: set[str] = set()
        self._figures: dict[StepEnd, torch.Tensor] = {}
        self.norms: list[dict[str, torch.Tensor]] = [{} for _ in sums]
        """Norm of the whole gradient of each task, by step of the window."""

    def before(self, action: Action) -> None:
        """Update a bucket's tasks before the first forward of their next step; called before every action."""
        end = self._ends.before.get(action)
        if end is not None:
            self._end_step(end)

    def after(self, action: Action) -> None:
        """Hand down what is known of a bucket's step behind its last backward; called after every action."""
        end = self._ends.after.get(action)
        if end is not None and end.bucket in self._tasks:
            self._hand_down(end)

    def finish(self) -> None:
        """Update the tasks of all buckets after their last step; called when the list is over."""
        for end in self._ends.last:
            self._end_step(end)

    def _hand_down(self, end: StepEnd) -> None:
        names = self._tasks[end.bucket]
        squares_N = self._gradients.squared_norms(names)
        if self._is_last:
            losses_N = torch.stack([self._sums[end.step].losses[name] for name in names])
            figures = torch.stack([losses_N.to(FIGURES_DTYPE), squares_N])
        else:
            figures = self._links.incoming["B", self._links.stage + 1].take(end)
            figures[1] += squares_N
        for index, name in enumerate(names):
            # An update may fail on one stage alone. Then no stage may step the task again.
            if name in self._dead:
                figures[1, index] = float("nan")
        if self._links.stage > 0:
            self._links.outgoing["B", self._links.stage - 1].put(end, figures)
        else:
            self._figures[end] = figures

    def _end_step(self, end: StepEnd) -> None:
        """Take losses and norms from the stage before, hand them on, and let the tasks of a bucket step."""
        names = self._tasks.get(end.bucket)
        if names is None:
            return
        stage = self._links.stage
        figures = self._links.incoming["F", stage - 1].take(end) if stage > 0 else self._figures.pop(end)
        if not self._is_last:
            # Before the update, which the next stage can then make at the same time.
            self._links.outgoing["F", stage + 1].put(end, figures)
        losses_N, norms_N = figures[0].float(), figures[1].sqrt().float()
        norms = dict(zip(names, norms_N.unbind(), strict=True))
        self.norms[end.step] |= norms
        self._dead.update(self._update(end.step, dict(zip(names, losses_N.unbind(), strict=True)), norms))
        # Kernels in another dtype read copies of the weights.
        self._model.prepare_pass(names)


T = TypeVar("T")


class PipelineExecutor:
    """Runs the micro-batches of a step through the pipeline; to its caller what `Executor` is on one device.

    Args:
        model: the stage of this process, on its device, in training mode.
        plan: the plan to follow.
        processes: the processes of the run; `torch.distributed` is initialised where there are several stages.
        pipelines: global ranks of the stages of every pipeline of the run; by default one of ranks 0 to S - 1.
        bf16: run under bfloat16 autocast; that of `actions` where these are given.
        sync: sums the gradients of all replicas and computes norms; by default nothing is summed.
        actions: computes the passes of an action; by default one after another.

    Attributes:
        actions: computes the passes of an action.
        on_action: called after each action of this process, for measurements; `None` for nothing.
        spans: beginning and end of each action of the last step on this process, in seconds since its first action,
            by the host's clock.
        most_in_flight: largest number of micro-batches that this process held at once in the last step.

    Raises:
        PlanError: if the template is of another pipeline than the model was cut for.
        ProcessError: if another stage does not come within the time limit.

    Example:
        >>> executor = PipelineExecutor(stage_model, plan, processes)  # doctest: +SKIP
        >>> executor.run(work).losses  # doctest: +SKIP
    """

    def __init__(
        self,
        model: StageModel,
        plan: Plan | PipelinePlan,
        processes: Processes,
        *,
        pipelines: Sequence[Sequence[int]] | None = None,
        bf16: bool = False,
        sync: GradientSync | None = None,
        actions: StageActions | None = None,
    ) -> None:
        """Open the channels."""
        self.model, self.processes = model, processes
        self.actions = actions or StageActions(model, bf16=bf16)
        self.mux_model = model.model
        self.sync = sync or GradientSync(model.model, Processes())
        self.device = model.model.device
        self.on_action: Callable[[Action], None] | None = None
        self.spans: tuple[Span, ...] = ()
        self.most_in_flight = 0
        self.clock = PassClock(self.device)
        self.follow(plan)
        stages, num_chunks = range(model.layout.num_stages), model.layout.num_chunks
        self.links = PipelineLinks(pipelines or (stages,), num_chunks, processes)
        if self.links.stage != model.stage:
            raise PlanError(
                f"the model holds stage {model.stage}; allowed: stage {self.links.stage}, as rank {processes.rank} has"
                " in its pipeline. Cut the model for that one."
            )
        self._step_sums = [self.actions.sums]  # of each step of the template
        self._barriers: BucketBarriers | None = None

    def follow(self, plan: Plan | PipelinePlan) -> None:
        """Follow another plan from the next step on; a plan without running tasks changes nothing.

        Args:
            plan: the plan of the run, or the part of it that a pipeline follows.

        Raises:
            PlanError: if its template is of another pipeline than the model was cut for.
        """
        # Without a task there is no template, yet forward passes go on through the pipeline of the last one.
        if not (isinstance(plan, Plan) and plan.template is None and hasattr(self, "plan")):
            self._follow_template(PipelinePlan.of(plan) if isinstance(plan, Plan) else plan)
        if isinstance(plan, Plan):
            self.actions.follow(plan)

    def _follow_template(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self._windows: dict[int, PipelineTemplate] = {}
        self._gains: bool | None = None
        template, layout = self.plan.template, self.model.layout
        if (template.num_stages, template.num_chunks) != (layout.num_stages, layout.num_chunks):
            raise PlanError(
                f"the template has {template.num_stages} stages of {template.num_chunks} chunks; allowed:"
                f" {layout.num_stages} of {layout.num_chunks}, for which the model was cut."
            )

    def run(self, work: StepWork) -> StepResult:
        """Compute the loss of every task and add its gradients to its parameters, on every stage its own.

        The sum of a task's gradients over replicas begins when its last backward here is done, while others still run.

        Args:
            work: the micro-batches of this process's replica, the same on all of its stages.

        Returns:
            The losses, on every process.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
            PlanError: if the work is not of the plan.
        """
        with self._closing_on_failure():
            micro_batches = prepared(self, work.micro_batches, work.tasks, total=self.sync.total)
            self.model.prepare(work.tasks)
            self._begin_sums([work.tasks])
            # Within the block: it may communicate too, and a process that fails here must not leave its neighbours
            # waiting.
            self.sync.begin(work)
            self.clock.start_step()
            self._execute(self.plan.template, self.plan.slots(micro_batches))
            # Before the sync ends: the leader of a replica is on stage 0, and only the last stage has computed losses.
            self._share_sums()
            failures = self.mux_model.objectives.take_failures()
            return self.sync.finish(replace(_result(work, self._step_sums[0]), loss_failures=failures))

    def gains_by_windows(self, tasks: Sequence[str]) -> bool:
        """Return whether steps of tasks can be taken without flushes between them, and are predicted to be faster so.

        They can where each gradient lies in one process alone, and where no loss needs passes before those of its step,
        or is a function of a task's own, whose failures are told at the end of each step.

        Args:
            tasks: names of the tasks that take the steps, the same on every process; all processes call this.

        Raises:
            ProcessError: if the processes do not hold the tasks together.
        """
        if self._gains is None:
            self._gains = self.plan.gains_by_windows
        gradients = self.sync.bundled
        has_own = any(self.mux_model.objectives.of(name).name == OWN for name in tasks)
        if not self._gains or gradients is None or has_own or has_prepasses(self.mux_model, tasks):
            return False
        gradients.exchange_holdings(tasks)
        return all(len(cell.holders) == 1 for name in tasks for cell in gradients.cells_of(name).cells)

    def run_window(self, works: Sequence[StepWork], update: UpdateTasks) -> list[StepResult]:
        """Take several steps of the same tasks, between which the pipeline is not flushed.

        The tasks of a bucket are updated on each stage when their own step is over, while others are under way. One
        that must not step takes no further step, and what its passes add to its gradients is of no account.

        Args:
            works: the micro-batches of each step, in order, for tasks with which `gains_by_windows` is true.
            update: steps tasks; called on every stage once for each step of each bucket.

        Returns:
            What came of each step, on every process.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
            PlanError: if the work is not of the plan.
        """
        tasks, gradients = works[0].tasks, self.sync.bundled
        assert gradients is not None, "gains_by_windows was asked"
        if len(works) not in self._windows:
            self._windows[len(works)] = self.plan.window(len(works))
        template = self._windows[len(works)]
        slots = {slot: own for step, work in enumerate(works) for slot, own in self._slots_of(work, step)}
        buckets = [[name for name in tasks if name in self.plan.tasks_of(i)] for i in range(len(self.plan.buckets))]
        with self._closing_on_failure():
            self.model.prepare(tasks)
            self._begin_sums([work.tasks for work in works])
            self._barriers = barriers = BucketBarriers(
                self.mux_model,
                self.links,
                gradients,
                template.actions[self.model.stage],
                num_stages=template.num_stages,
                tasks={bucket: names for bucket, names in enumerate(buckets) if names},
                sums=self._step_sums,
                update=update,
            )
            self.clock.start_step()
            self._execute(template, slots, {bucket: len(names) for bucket, names in enumerate(buckets) if names})
            self._share_sums()
            return [_result(*one) for one in zip(works, self._step_sums, barriers.norms, strict=True)]

    def _slots_of(self, work: StepWork, step: int) -> Iterator[tuple[Slot, list[MuxBatch]]]:
        self.sync.num_tokens += sum(micro_batch.num_tokens for micro_batch in work.micro_batches)
        yield from self.plan.slots(work.micro_batches, step).items()

    def non_finite_tasks(self, micro_batches: Sequence[MuxBatch]) -> list[str]:
        """Return the tasks whose loss is not finite in a forward pass, on every process; nothing is changed.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
        """
        return sorted(name for name, loss in self.forward_losses(micro_batches).items() if not loss.isfinite())

    def forward_losses(self, micro_batches: Sequence[MuxBatch]) -> dict[str, torch.Tensor]:
        """Return the loss of each task in a forward pass, summed over the micro-batches, on every process.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
        """
        return self.forward_sums(micro_batches).losses

    @torch.no_grad()
    def forward_sums(self, micro_batches: Sequence[MuxBatch]) -> StepSums:
        """Return losses and statistics of a forward pass, summed over the micro-batches, on every process.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
        """
        tasks = tasks_of(micro_batches)
        with self._closing_on_failure():
            ready = prepared(self, micro_batches, tasks)
            self.model.prepare(tasks)
            self._begin_sums([tasks])
            # One bucket: without backwards nothing is held, so the plan's order has nothing to gain.
            num_slots = self._most_passes(len(ready))
            slots = {Slot(0, number): list(ready[number : number + 1]) for number in range(num_slots)}
            self._execute(forwards_only(self.plan.template, num_slots), slots)
            self._share_sums()
            return self._step_sums[0]

    @torch.no_grad()
    def forward_terms(self, micro_batches: Sequence[MuxBatch]) -> list[torch.Tensor | None]:
        """Return the negative log-likelihoods `[M]` of each on the last stage, `None` on the others; all call this.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
        """
        return [self._through(micro_batch, self.model.target_losses) for micro_batch in micro_batches]

    @torch.no_grad()
    def sequence_logits(self, micro_batch: MuxBatch) -> list[torch.Tensor] | None:
        """Return the logits of every sequence on the last stage, `None` on the others, which all call this.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
        """
        return self._through(micro_batch, self.model.sequence_logits)

    def _through(self, micro_batch: MuxBatch, last: Callable[[MuxBatch, torch.Tensor | None], T]) -> T | None:
        """Take a micro-batch through without gradient; return what `last` makes of it, on the last stage."""
        self.model.prepare(micro_batch.task_names)
        template, batch = forwards_only(self.plan.template, 1), micro_batch.to(self.device)
        found = None
        with self._closing_on_failure():
            traffic = self._begin_traffic(template, {Slot(0, 0): [micro_batch]})
            for action in template.actions[self.model.stage]:
                virtual_stage = self.model.layout.virtual_stage(action.stage, action.chunk)
                hidden_TD = traffic.take(action, 0)
                with self.actions.precision():
                    if traffic.goes_on(action):
                        output = self.model.forward(virtual_stage, batch, hidden_TD).output
                        traffic.put(action, 0, output.to(self.model.dtype))
                    else:
                        found = last(batch, hidden_TD)
            traffic.flush()
        return found

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the last stage, on every stage."""
        values = values.float().clone()
        self.links.broadcast(values, self.model.layout.num_stages - 1)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return what every process of the run has given, by rank."""
        return self.sync.gather(value)

    def close(self) -> None:
        """Close the channels; all stages call this when none of them waits for another."""
        self.links.close()

    def precision(self) -> AbstractContextManager[object]:
        """Return the autocast context of the run."""
        return self.actions.precision()

    # --------------------------------------------------------------- actions

    def _most_passes(self, num_passes: int) -> int:
        """Return how many places for passes a list of forwards has here, of which this process has so many."""
        return num_passes

    def _begin_sums(self, tasks: Sequence[Sequence[str]]) -> None:
        """Begin to add up what the passes of each step give, by its tasks."""
        self._step_sums = [StepSums(self.mux_model, own, self.device) for own in tasks]

    def _execute(
        self,
        template: PipelineTemplate,
        slots: Mapping[Slot, list[MuxBatch]],
        num_tasks: Mapping[int, int] | None = None,
    ) -> None:
        """Execute this stage's list.

        Args:
            template: the list of each stage.
            slots: the passes of each micro-batch of the template.
            num_tasks: number of tasks that step with each bucket, in a window.
        """
        stage = self.model.stage
        traffic = self._begin_traffic(template, slots, num_tasks)
        self.most_in_flight, spans, begin = 0, [], time.perf_counter()
        for action in template.actions[stage]:
            self.actions.sums = self._step_sums[action.step]
            if self._barriers is not None:
                self._barriers.before(action)
            # After the barrier, which may wait for other processes.
            start, traffic.waited_s = time.perf_counter(), 0.0
            (self.actions.forward if action.kind == "F" else self.actions.backward)(action)
            spans.append(Span(stage, action, start - begin, time.perf_counter() - begin))
            self.clock.add(action.slot, time.perf_counter() - start - traffic.waited_s)
            self.most_in_flight = max(self.most_in_flight, self.actions.num_in_flight)
            self._end_backward(action)
            if self.on_action is not None:
                self.on_action(action)
        if self._barriers is not None:
            self._barriers.finish()
        traffic.flush()
        self.spans = tuple(spans)
        self.clock.spanned(time.perf_counter() - begin)

    def _begin_traffic(
        self,
        template: PipelineTemplate,
        slots: Mapping[Slot, list[MuxBatch]],
        num_tasks: Mapping[int, int] | None = None,
    ) -> StageTraffic:
        traffic = StageTraffic(self.links, self.model, template, slots, num_tasks)
        self.actions.begin(slots, traffic)
        return traffic

    def _end_backward(self, action: Action) -> None:
        """Let sums of gradients begin: the backward of chunk 0 is the last one of a micro-batch in this process."""
        if action.kind == "B" and action.chunk == 0:
            self.clock.end(action.slot, self.actions.slots[action.slot])
        if self._barriers is not None:
            self._barriers.after(action)
        elif action.kind == "B" and action.chunk == 0:
            for micro_batch in self.actions.slots[action.slot]:
                self.sync.after_backward(micro_batch)

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        """Break the connections where this process fails, so that its neighbours see it at once."""
        try:
            yield
        except BaseException:
            self.links.close()
            self.actions.drop()
            raise
        finally:
            self._barriers = None

    # ---------------------------------------------------------------- losses

    def _share_sums(self) -> None:
        """Take losses and statistics from the last stage, which broadcasts them to all stages in one message."""
        steps = [sums for sums in self._step_sums if sums.losses]
        if steps:
            packed = [pack(sums.losses, sums.statistics) for sums in steps]
            parts = self.shared(torch.cat(packed)).split([len(one) for one in packed])
            for sums, figures in zip(steps, parts, strict=True):
                sums.losses, sums.statistics = unpack(figures, sums.losses, sums.statistics)


def _result(work: StepWork, sums: StepSums, norms: dict[str, torch.Tensor] | None = None) -> StepResult:
    stream_tokens = sum(micro_batch.num_tokens for micro_batch in work.micro_batches)
    return StepResult(sums.losses, work.num_tokens, stream_tokens, work.failures, norms, sums.statistics)
