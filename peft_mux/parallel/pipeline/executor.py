"""`PipelineExecutor`: forward and backward of a plan's micro-batches through S stages in S processes (M section 3.4.1).

Each process runs its own list of a template in order: an action takes its input from the virtual stage before,
computes, and sends its result on. Orders and shapes are known to all, as every process makes the same micro-batches
from the same rows. What may wait for what, and why that always ends, is explained in `parallel.pipeline.links`.
Between its forward and its backward, a micro-batch holds its input, its output, its graph and the passes of its
adapters; so the template's list says what is in flight, and the memory that it takes.

An action stands for one micro-batch of a bucket, which holds passes of one or several hTasks. With an `Interleaving`
their forwards run in turns, and so do their backwards, a group at a time: the inputs of the group are taken, its passes
run, its results are sent, all in the order of the action, so neighbours see the messages that they expect. Parts of a
long sequence wait for each other and run one after another.

`BucketBarriers` ends the step of a bucket on all stages while other buckets continue, in a window of several steps
without flushes. Adapters of tasks are disjoint, so before the forwards of a bucket's next step only its own tasks must
have stepped on every stage. Whether a task steps, and how its gradient is clipped, follows from its loss, known on the
last stage, and from the norm of its whole gradient, of which each stage holds a part::

    stage 0      ... B(k) <- figures | update -> figures, F(k + 1) ...        time goes to the right
    stage 1   ... B(k) -> figures ...           update -> figures, F(k + 1)
    stage 2  B(k) -> figures ...                             update, F(k + 1)

Losses and squared norms (figures, `[2, N]` of the N tasks of the bucket) go down behind the last gradient and add up;
the first stage knows all of them when its own last backward is done, and sends them up before the next hidden states.
So they travel the way of backwards and forwards, and no stage waits longer for them than for these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from zlib import crc32

import torch

from peft_mux.data.batch import MuxBatch, is_chained
from peft_mux.engine.executor import Executor, UpdateTasks, pass_backward, require_gradients
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import StepResult, StepSums, StepWork, pack, unpack
from peft_mux.errors import PlanError
from peft_mux.modeling.objectives.objective import OWN
from peft_mux.modeling.objectives.task_objective import MuxOutput
from peft_mux.modeling.stream import Kept
from peft_mux.parallel.cells import CellSync
from peft_mux.parallel.fsdp import ShardedBackbone
from peft_mux.parallel.pipeline.links import PipelineLinks
from peft_mux.parallel.pipeline.pipeline_plan import PipelinePlan, forwards_only
from peft_mux.parallel.pipeline.stage import StageModel, StagePass
from peft_mux.parallel.pipeline.traffic import FIGURES_DTYPE, StepEnd, StepEnds, Traffic
from peft_mux.parallel.tensor.interleaving import Interleaving
from peft_mux.scheduler.pipeline.simulator import MOST_STEPS, Span, build_window
from peft_mux.scheduler.plan import Action, PipelineTemplate, Plan, Slot
from peft_mux.scheduler.subgraphs import Direction, Stretch

T = TypeVar("T")

Flight = tuple[torch.Tensor | None, StagePass, list[Kept]]
"""A pass between its forward and its backward at one virtual stage: its input `[T, D]` (`None` at virtual stage 0),
what its forward gave, and the keys and values that later parts of its sequences read."""


class PipelineExecutor(Executor):
    """Runs the micro-batches of a step through the pipeline.

    Args:
        stage: the stage of this process, on its device, in training mode.
        plan: the plan to follow; if weights are sharded, the same in all replicas.
        processes: the processes of the run; `torch.distributed` is initialised if there are several stages.
        pipelines: global ranks of the stages of every pipeline of the run; by default one of ranks 0 to S - 1.
        bf16: run under bfloat16 autocast.
        sync: sums the gradients of all replicas and computes norms; by default nothing is summed.
        interleaving: runs the passes of an action in turns while layers wait for all-reduces; by default one after
            another.
        sharded: the frozen weights of the stage, if they are sharded over the replicas.

    Attributes:
        stage: the stage of this process.
        on_action: called after each action of this process, for measurements.
        spans: beginning and end of each action of the last step on this process, in seconds since its first action,
            by the host's clock.
        most_in_flight: largest number of micro-batches that this process held at once in the last step.

    Raises:
        PlanError: if the template is of another pipeline than the model was cut for.
        ProcessError: if another stage does not come within the time limit.

    Example:
        >>> executor = PipelineExecutor(stage, plan, processes)  # doctest: +SKIP
        >>> executor.run(work).losses  # doctest: +SKIP
    """

    most_steps = MOST_STEPS

    def __init__(
        self,
        stage: StageModel,
        plan: PipelinePlan,
        processes: Processes,
        *,
        pipelines: Sequence[Sequence[int]] | None = None,
        bf16: bool = False,
        sync: GradientSync | None = None,
        interleaving: Interleaving | None = None,
        sharded: ShardedBackbone | None = None,
    ) -> None:
        super().__init__(stage.model, bf16=bf16, sync=sync)
        self.interleaving, self.sharded = interleaving, sharded
        self.stage, self.processes = stage, processes
        self.on_action: Callable[[Action], None] | None = None
        self.spans: tuple[Span, ...] = ()
        self.most_in_flight = 0
        self._flights: dict[tuple[Slot, int], list[Flight]] = {}
        self._most_passes: Mapping[Slot, int] = {}
        self._follow(plan)
        stages, num_chunks = range(stage.layout.num_stages), stage.layout.num_chunks
        self.links = PipelineLinks(pipelines or (stages,), num_chunks, processes)
        if self.links.stage != stage.stage:
            raise PlanError(
                f"the model must be cut for stage {self.links.stage}, which rank {processes.rank} has in its "
                f"pipeline, got stage {stage.stage}."
            )

    def follow(self, plan: Plan) -> None:
        """Follow another plan from the next step on; the template of a plan without running tasks is not followed.

        Raises:
            PlanError: if its template is of another pipeline than the model was cut for.
        """
        # Without a task there is no template, yet forward passes still go through the pipeline of the last one.
        if plan.template is not None:
            self._follow(PipelinePlan.of(plan))
        if self.interleaving is not None:
            self.interleaving.follow(plan)

    def _follow(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self._windows: dict[int, PipelineTemplate] = {}
        self._gains: bool | None = None
        self._compared = False
        template, layout = plan.template, self.stage.layout
        if (template.num_stages, template.num_chunks) != (layout.num_stages, layout.num_chunks):
            raise PlanError(
                f"the template must have {layout.num_stages} stages of {layout.num_chunks} chunks, for which the "
                f"model was cut, got {template.num_stages} of {template.num_chunks}."
            )

    # ------------------------------------------------------------------ steps

    def run(self, work: StepWork, tolerating: AbstractContextManager[object] | None = None) -> StepResult:
        """Compute the loss of every task and add its gradients to its parameters, on every stage its own.

        The sum of a task's gradients over replicas begins when its last backward here is done, while others still run.

        Args:
            work: the micro-batches of this process's replica, the same on all of its stages.
            tolerating: the context of the passes; none may suppress an error, as other stages wait for each pass.

        Returns:
            The losses, on every process.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
            PlanError: if the work is not of the plan.
        """
        with self._closing_on_failure():
            require_gradients()
            micro_batches = self.with_reference_values(work.micro_batches, work.tasks, total=self.sync.total)
            self.model.prepare_pass(work.tasks)
            sums = StepSums(self.model, work.tasks, self.device)
            # Within the block: it may communicate too, and a process that fails here must not leave its neighbours
            # waiting.
            self.sync.begin(work)
            self.clock.start_step()
            with tolerating or nullcontext():
                self._execute(self.plan.template, self.plan.slots(micro_batches), [sums])
            # Before the sync ends: the leader of a replica is on stage 0, and only the last stage has computed losses.
            self._share_sums([sums])
            failures = self.model.objectives.take_failures()
            return self.sync.finish(StepResult.of(work, sums, loss_failures=failures))

    def gains_by_windows(self, tasks: Sequence[str]) -> bool:
        """Return whether steps of tasks can be taken without flushes between them, and are predicted to be faster so.

        They can if each gradient is in one process only, and if no loss needs passes before those of its step or is
        a function of the user's, whose failures are reported at the end of each step.

        Args:
            tasks: names of the tasks that take the steps, the same on every process; all processes call this.

        Raises:
            ProcessError: if the processes do not hold the tasks together.
        """
        if self._gains is None:
            self._gains = self.plan.gains_by_windows
        if not self._gains or not isinstance(self.sync, CellSync):
            return False
        for name in tasks:
            objective, args = self.model.objectives.of(name), self.model.objectives.args_of(name)
            if objective.name == OWN or args.needs_reference or objective.num_batch_values(args):
                return False
            if self.model.adapter_of(name) in self.model.router_loss.coefficients:
                return False
        self.sync.exchange_holdings(tasks)
        return all(len(cell.holders) == 1 for name in tasks for cell in self.sync.cells_of(name).cells)

    def run_window(self, works: Sequence[StepWork], update: UpdateTasks) -> list[StepResult]:
        """Take several steps of the same tasks, between which the pipeline is not flushed.

        The tasks of a bucket are updated on each stage when their own step is over, while others are in progress. One
        that must not step takes no further step, and what its passes add to its gradients is ignored.

        Args:
            works: the micro-batches of each step, in order, for tasks with which `gains_by_windows` is true.
            update: steps tasks; called on every stage once for each step of each bucket.

        Returns:
            The result of each step, on every process.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
            PlanError: if the work is not of the plan.
        """
        tasks, template = works[0].tasks, self._windows.get(len(works))
        if template is None:
            plan, num_steps = self.plan, len(works)
            template = build_window(plan.template, plan.loads, num_steps, links=plan.links)
            self._windows[num_steps] = template
        slots = {
            slot: micro_batches
            for step, work in enumerate(works)
            for slot, micro_batches in self.plan.slots(work.micro_batches, step).items()
        }
        stepping = {}
        for bucket, members in enumerate(self.plan.buckets):
            names = {name for htask in members for name in self.plan.htasks[htask]}
            if bucket_tasks := [name for name in tasks if name in names]:
                stepping[bucket] = bucket_tasks
        with self._closing_on_failure():
            require_gradients()
            self.model.prepare_pass(tasks)
            sums = [StepSums(self.model, work.tasks, self.device) for work in works]
            assert isinstance(self.sync, CellSync), "other sums do not gain by windows"
            barriers = BucketBarriers(self, self.sync, template, stepping, sums, update)
            self.clock.start_step()
            self._execute(template, slots, sums, barriers)
            self._share_sums(sums)
            ends = zip(works, sums, barriers.norms, strict=True)
            return [StepResult.of(work, step_sums, norms=norms) for work, step_sums, norms in ends]

    # ------------------------------------------------------------------ forward passes

    @torch.no_grad()
    def forward_sums(self, micro_batches: Sequence[MuxBatch]) -> StepSums:
        """Return losses and statistics of a forward pass, summed over the micro-batches, on every process.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
        """
        tasks = list(dict.fromkeys(name for micro_batch in micro_batches for name in micro_batch.task_names))
        with self._closing_on_failure():
            ready = self.with_reference_values(micro_batches, tasks)
            self.model.prepare_pass(tasks)
            sums = StepSums(self.model, tasks, self.device)
            # One bucket: without backwards nothing is held, so the plan's order has nothing to gain.
            num_slots = self._most(len(ready))
            slots = {Slot(0, number): list(ready[number : number + 1]) for number in range(num_slots)}
            self._execute(forwards_only(self.plan.template, num_slots), slots, [sums])
            self._share_sums([sums])
            return sums

    @torch.no_grad()
    def forward_terms(self, micro_batches: Sequence[MuxBatch]) -> list[torch.Tensor | None]:
        """Return the negative log-likelihoods `[M]` of each on the last stage, `None` on the others; all call this.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
        """
        num_missing = self._most(len(micro_batches)) - len(micro_batches)
        terms = [self._through(micro_batch, self.stage.target_losses) for micro_batch in micro_batches]
        if self.sharded is not None:
            for _ in range(num_missing):
                for virtual_stage in self.stage.virtual_stages:
                    self.sharded.join_forwards(1, virtual_stage)
        return terms

    @torch.no_grad()
    def sequence_logits(self, micro_batch: MuxBatch) -> list[torch.Tensor] | None:
        """Return the logits of every sequence on the last stage, `None` on the others, which all call this.

        Raises:
            ProcessError: if another stage fails, dies, or does not answer within the time limit.
        """
        return self._through(micro_batch, self.stage.sequence_logits)

    def _through(self, micro_batch: MuxBatch, last: Callable[[MuxBatch, torch.Tensor | None], T]) -> T | None:
        """Take a micro-batch through without gradient; return the result of `last` on the last stage."""
        self.model.prepare_pass(micro_batch.task_names)
        template, batch = forwards_only(self.plan.template, 1), micro_batch.to(self.device)
        result = None
        with self._closing_on_failure():
            traffic = Traffic(self.links, self.stage, template, {Slot(0, 0): [micro_batch]})
            for action in template.actions[self.stage.stage]:
                hidden_TD = traffic.take(action, 0)
                with self.precision():
                    if traffic.target(action) is not None:
                        virtual_stage = self.stage.layout.virtual_stage(action.stage, action.chunk)
                        output_TD = self.stage.forward(virtual_stage, batch, hidden_TD).output
                        traffic.put(action, 0, output_TD.to(self.stage.dtype))
                    else:
                        result = last(batch, hidden_TD)
            self.links.flush()
        return result

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the last stage, on every stage."""
        values = values.float().clone()
        self.links.broadcast(values, self.stage.layout.num_stages - 1)
        return values

    @property
    def sees_whole_batches(self) -> bool:
        """Whether this process holds all layers: never."""
        return False

    def summed_over_stages(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of values of each stage, added up in one order on every stage."""
        summed = torch.zeros_like(values)
        for stage in range(self.stage.layout.num_stages):
            part = values.clone() if stage == self.stage.stage else torch.empty_like(values)
            self.links.broadcast(part, stage)
            summed += part
        return summed

    def close(self) -> None:
        """Close the channels; all stages call this when none of them waits for another."""
        self.links.close()

    # ------------------------------------------------------------------ actions

    def _execute(
        self,
        template: PipelineTemplate,
        slots: Mapping[Slot, Sequence[MuxBatch]],
        sums: Sequence[StepSums],
        barriers: BucketBarriers | None = None,
    ) -> None:
        """Run this stage's list of a template.

        Args:
            template: the list of each stage.
            slots: the passes of each micro-batch of the template.
            sums: take the losses of each step of the template.
            barriers: end the steps of buckets, in a window.
        """
        if self.sharded is not None:
            self._agree_on_passes(template, slots)
        num_tasks = None if barriers is None else {bucket: len(names) for bucket, names in barriers.tasks.items()}
        traffic = Traffic(self.links, self.stage, template, slots, num_tasks)
        self._flights = {}
        self.most_in_flight, spans, begin = 0, [], time.perf_counter()
        for action in template.actions[self.stage.stage]:
            if barriers is not None:
                barriers.before(action)
            # After the barrier, which may wait for other processes.
            start, traffic.waited_s = time.perf_counter(), 0.0
            if action.kind == "F":
                self._forward(action, traffic, sums[action.step])
            else:
                self._backward(action, traffic)
            end = time.perf_counter()
            spans.append(Span(self.stage.stage, action, start - begin, end - begin))
            self.clock.add(action.slot, end - start - traffic.waited_s)
            self.most_in_flight = max(self.most_in_flight, len(self._flights))
            # The backward of chunk 0 is the last one of a micro-batch in this process: sums of gradients may begin.
            if action.kind == "B" and action.chunk == 0:
                self.clock.end(action.slot, slots[action.slot])
                for micro_batch in slots[action.slot] if barriers is None else ():
                    self.sync.after_backward(micro_batch)
            if barriers is not None:
                barriers.after(action)
            if self.on_action is not None:
                self.on_action(action)
        if barriers is not None:
            barriers.finish()
        # At the end of a list alone: within it, a wait for a send could wait for a stage that waits for this one.
        self.links.flush()
        self.spans = tuple(spans)
        self.clock.spanned(time.perf_counter() - begin)

    def _forward(self, action: Action, traffic: Traffic, sums: StepSums) -> None:
        """Run the passes of an action forward; send the results on, or add up the losses of the last virtual stage."""
        virtual_stage = self.stage.layout.virtual_stage(action.stage, action.chunk)
        micro_batches = traffic.slots[action.slot]
        flights = self._flights[action.slot, action.chunk] = []
        for group in self._groups(traffic.numbers(action), micro_batches):
            # All inputs before the passes run in turns: a pass that waited for a neighbour in its turn would stop the
            # other passes.
            inputs = [traffic.take(action, number) for number in group]
            for number, hidden_TD in zip(group, inputs, strict=True):
                if hidden_TD is not None:
                    # A leaf: its gradient goes back to the stage before. Replicas that share weights all go back, as
                    # they gather the same layers, whether or not the tasks of each have adapters so far down.
                    hidden_TD.requires_grad_(self.sharded is not None or traffic.goes_back(action, number))

            def forward(index: int, group: Sequence[int] = group, inputs: Sequence[Any] = inputs) -> Flight:
                with self.model.stream.key_values.recording() as kept, self.precision():
                    batch = micro_batches[group[index]].to(self.device)
                    return inputs[index], self.stage.forward(virtual_stage, batch, inputs[index]), kept

            passes = [micro_batches[number] for number in group]
            for number, flight in zip(group, self._run_group(passes, forward, virtual_stage, "forward"), strict=True):
                if torch.is_grad_enabled():
                    flights.append(flight)
                # In the order of the action, not in that in which turns ended: the receiver has posted its receives so.
                _, passed, _ = flight
                if traffic.target(action) is not None:
                    # Both ends know one dtype, that of the residual stream; under autocast a layer may return another.
                    traffic.put(action, number, passed.output.detach().to(self.stage.dtype))
                else:
                    names = micro_batches[number].task_names
                    sums.add(MuxOutput(passed.output.detach(), names, passed.statistics))
        if self.sharded is not None:
            self.sharded.join_forwards(self._most_passes[action.slot] - len(micro_batches), virtual_stage)

    def _backward(self, action: Action, traffic: Traffic) -> None:
        """Run the passes of an action backward; send the gradients of their inputs to the stage before."""
        virtual_stage = self.stage.layout.virtual_stage(action.stage, action.chunk)
        micro_batches = traffic.slots[action.slot]
        flights = self._flights.pop((action.slot, action.chunk))
        for group in self._groups(traffic.numbers(action), micro_batches):
            gradients = [traffic.take(action, number) for number in group]

            def backward(index: int, group: Sequence[int] = group, gradients: Sequence[Any] = gradients) -> None:
                _, passed, kept = flights[group[index]]
                gradient = gradients[index]
                if self.sharded is not None:
                    self.sharded.begin_backward(virtual_stage)
                pass_backward(passed.output, None if gradient is None else gradient.to(passed.output.dtype), kept)

            self._run_group([micro_batches[number] for number in group], backward, virtual_stage, "backward")
            for number in group:
                hidden_TD, _, kept = flights[number]
                self.model.stream.key_values.release(kept)
                if hidden_TD is not None:
                    # Zeros rather than nothing: the stage before has posted a receive, whether or not any task wants
                    # the gradient.
                    traffic.put(
                        action, number, torch.zeros_like(hidden_TD) if hidden_TD.grad is None else hidden_TD.grad
                    )
        if self.sharded is not None:
            self.sharded.join_backwards(self._most_passes[action.slot] - len(micro_batches), virtual_stage)

    def _groups(self, numbers: Sequence[int], micro_batches: Sequence[MuxBatch]) -> list[list[int]]:
        """Divide the passes of an action into groups that run in turns, in the order of the action."""
        if self.interleaving is None or is_chained(micro_batches):
            return [[number] for number in numbers]
        groups = self.interleaving.groups([(micro_batches[number],) for number in numbers], keeps_order=True)
        return [[numbers[index] for index in group] for group in groups]

    def _run_group(
        self, passes: Sequence[MuxBatch], act: Callable[[int], T], virtual_stage: int, direction: Direction
    ) -> list[T]:
        """Call `act` for each pass of a group, by its index in the group; in turns if there are several."""
        if self.interleaving is None or len(passes) == 1:
            return [act(index) for index in range(len(passes))]
        layout = self.stage.layout
        stretch = Stretch(
            layout.layer_counts[virtual_stage],
            is_first=virtual_stage == 0,
            is_last=virtual_stage == layout.last_virtual_stage,
            recomputes=self.interleaving.recomputes,
            direction=direction,
        )
        # For the whole group at once: each pass by itself would put modules back that the others still need.
        held = self.stage.only(virtual_stage) if direction == "forward" else None
        return self.interleaving.run([(micro_batch,) for micro_batch in passes], act, held=held, stretch=stretch)

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        """Break the connections if this process fails, so that its neighbours see it at once."""
        try:
            yield
        except BaseException:
            self.links.close()
            # The graphs would outlive the error.
            self._flights = {}
            self.model.stream.key_values.clear()
            raise

    def _share_sums(self, steps: Sequence[StepSums]) -> None:
        """Take losses and statistics from the last stage, which broadcasts them to all stages in one message."""
        steps = [sums for sums in steps if sums.losses]
        if steps:
            packed = [pack(sums.losses, sums.statistics) for sums in steps]
            parts = self.shared(torch.cat(packed)).split([len(figures) for figures in packed])
            for sums, figures in zip(steps, parts, strict=True):
                sums.losses, sums.statistics = unpack(figures, sums.losses, sums.statistics)

    # ------------------------------------------------------------------ sharded weights

    def _most(self, num_passes: int) -> int:
        """Return the passes of the replica that has most of them, if replicas share weights; then all call this."""
        if self.sharded is None:
            return num_passes
        return max(count for (count,) in self.processes.exchange([num_passes]))

    def _agree_on_passes(self, template: PipelineTemplate, slots: Mapping[Slot, Sequence[MuxBatch]]) -> None:
        """Exchange how many passes each replica has in each slot; all processes of the run call this.

        Raises:
            PlanError: if replicas follow different templates; compared once for each plan.
        """
        if template is self.plan.template and not self._compared:
            digests = [digest for (digest,) in self.processes.exchange([crc32(repr(template).encode())])]
            if len(set(digests)) > 1:
                raise PlanError(
                    "processes must follow the same template, because replicas gather the weights of a stage "
                    f"together, got different ones (their digests, by rank: {digests}). Start every process with the "
                    "same tasks, rows and arguments."
                )
            self._compared = True
        counts = self.processes.exchange([len(slots[slot]) for slot in sorted(slots)])
        self._most_passes = dict(zip(sorted(slots), map(max, zip(*counts, strict=True)), strict=True))


class BucketBarriers:
    """Ends the steps of buckets on one stage of a window.

    Args:
        executor: runs the window.
        sync: knows the gradients that this stage counts in norms.
        template: the list of each stage.
        tasks: for each bucket the names of its tasks that take the steps, in stream order; only buckets that have some.
        sums: losses of each step, complete on the last stage once backwards are done.
        update: steps tasks.

    Attributes:
        tasks: names of the tasks that step with each bucket.
        norms: norm of the whole gradient of each task, by step of the window.
    """

    def __init__(
        self,
        executor: PipelineExecutor,
        sync: CellSync,
        template: PipelineTemplate,
        tasks: Mapping[int, Sequence[str]],
        sums: Sequence[StepSums],
        update: UpdateTasks,
    ) -> None:
        self._executor, self._sync, self._links, self._stage = executor, sync, executor.links, executor.stage.stage
        self._is_last = self._stage == template.num_stages - 1
        self._ends, self.tasks = StepEnds.of(template.actions[self._stage]), tasks
        self._sums, self._update = sums, update
        self._dead: set[str] = set()
        self._figures: dict[StepEnd, torch.Tensor] = {}
        self.norms: list[dict[str, torch.Tensor]] = [{} for _ in sums]

    def before(self, action: Action) -> None:
        """Update a bucket's tasks before the first forward of their next step; called before every action."""
        end = self._ends.before.get(action)
        if end is not None:
            self._end_step(end)

    def after(self, action: Action) -> None:
        """Send what is known of a bucket's step down behind its last backward; called after every action."""
        end = self._ends.after.get(action)
        names = None if end is None else self.tasks.get(end.bucket)
        if end is None or names is None:
            return
        squares_N = self._sync.squared_norms(names)
        if self._is_last:
            losses_N = torch.stack([self._sums[end.step].losses[name] for name in names])
            figures = torch.stack([losses_N.to(FIGURES_DTYPE), squares_N])
        else:
            figures = self._links.incoming["B", self._stage + 1].take(end)
            figures[1] += squares_N
        for index, name in enumerate(names):
            # An update may fail on one stage alone. Then no stage may step the task again.
            if name in self._dead:
                figures[1, index] = float("nan")
        if self._stage > 0:
            self._links.outgoing["B", self._stage - 1].put(end, figures)
        else:
            self._figures[end] = figures

    def finish(self) -> None:
        """Update the tasks of all buckets after their last step; called when the list is over."""
        for end in self._ends.last:
            self._end_step(end)

    def _end_step(self, end: StepEnd) -> None:
        """Take losses and norms from the stage before, send them on, and let the tasks of a bucket step."""
        names = self.tasks.get(end.bucket)
        if names is None:
            return
        stage = self._stage
        figures = self._links.incoming["F", stage - 1].take(end) if stage > 0 else self._figures.pop(end)
        if not self._is_last:
            # Before the update, which the next stage can then make at the same time.
            self._links.outgoing["F", stage + 1].put(end, figures)
        losses_N, norms_N = figures[0].float(), figures[1].sqrt().float()
        norms = dict(zip(names, norms_N.unbind(), strict=True))
        self.norms[end.step] |= norms
        self._dead.update(self._update(end.step, dict(zip(names, losses_N.unbind(), strict=True)), norms))
        # Kernels in another dtype read copies of the weights.
        self._executor.model.prepare_pass(names)
