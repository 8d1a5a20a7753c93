"""What one of the two processes of `benchmarks.processes.pipeline` does: one stage, every schedule, round by round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig

from benchmarks.training.workloads import ModelSpec
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.engine.executor import pass_backward
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.optimizer import TaskOptimizer
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.planning.profiling.links import measure_link
from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.pipeline.launch import BucketLoad
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, build_template
from peft_mux.task import Task, resolve

NUM_STAGES = 2
SEQUENCE_TOKENS = 32
SCHEDULES = ("mux", "drained", "1f1b", "gpipe")
"""M's template; 1F1B of one task after another; 1F1B of all, not drained; all forwards, then all backwards."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes:
        model: shapes of the backbone.
        num_tasks: number of tasks, which have equal adapters.
        num_tokens: number of tokens of a micro-batch, T.
        micro_batches: numbers of micro-batches of a task, C; each is measured by itself.
        rounds: number of steps that are timed under each schedule.
        drawn: the number of micro-batches of a task whose timeline is kept.
    """

    model: ModelSpec
    num_tasks: int
    num_tokens: int
    micro_batches: tuple[int, ...]
    rounds: int
    drawn: int

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return tuple(f"task-{index}" for index in range(self.num_tasks))


@dataclass
class Row:
    """One schedule with one number of micro-batches; seconds by the clock of both processes.

    Attributes:
        schedule: name of the schedule, one of `SCHEDULES`.
        num_micro_batches: number of micro-batches of a task, C.
        passes_s: seconds of forward and backward of all tasks, by round.
        steps_s: seconds of the same with sums of norms and updates, by round.
        planned_passes_s: simulated seconds of forward and backward of all tasks.
        planned_steps_s: simulated seconds of the passes, and seconds of the updates as they were profiled.
        most_in_flight: most micro-batches that each stage held at once.
        sent_bytes: bytes of hidden states and of their gradients that each stage sent in a step.
        closed_form_bytes: bytes of hidden states that a stage has to send by the formula.
        summed_bytes: bytes of losses and norms that each stage summed with the other in a step.
        closed_form_summed_bytes: bytes of losses and norms that each stage has to sum by the formula.
    """

    schedule: str
    num_micro_batches: int
    passes_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    planned_passes_s: float = 0.0
    planned_steps_s: float = 0.0
    most_in_flight: list[int] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    closed_form_bytes: int = 0
    summed_bytes: list[int] = field(default_factory=list)
    closed_form_summed_bytes: list[int] = field(default_factory=list)


@dataclass
class Latencies:
    """Seconds that this stage takes, measured while the other stage computes too.

    Attributes:
        forward_s: for each task, seconds of a micro-batch's forward, one a repetition.
        backward_s: for each task, seconds of a micro-batch's backward, one a repetition.
        updates_s: seconds of the updates of all tasks, norms included, one a repetition.
    """

    forward_s: dict[str, list[float]]
    backward_s: dict[str, list[float]]
    updates_s: list[float] = field(default_factory=list)


class CountedOutbox:
    """A channel's sending end that counts bytes."""

    def __init__(self, outbox: Any) -> None:
        self._outbox, self.num_bytes = outbox, 0

    def put(self, key: Any, tensor: torch.Tensor) -> None:
        self.num_bytes += tensor.numel() * tensor.element_size()
        self._outbox.put(key, tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outbox, name)


class Timeline:
    """Takes the moments at which actions computed, without what they waited for, which is at their beginning."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.clear()

    def clear(self) -> None:
        """Forget all spans, as a step begins."""
        self._before_s, self._waited_s = time.perf_counter(), self.processes.waited_s
        self.spans: list[tuple[str, int, int, float, float]] = []

    def take(self, action: Action) -> None:
        """Note an action that is done."""
        end_s, waited_s = time.perf_counter(), self.processes.waited_s
        start_s = self._before_s + waited_s - self._waited_s
        self.spans.append((action.kind, action.bucket, action.micro_batch, start_s, end_s))
        self._before_s, self._waited_s = end_s, waited_s


def drained_1f1b(loads: Sequence[BucketLoad]) -> PipelineTemplate:
    """Return 1F1B of each bucket by itself; the pipeline runs empty before the next one begins.

    The first stage ends a bucket with its last backward, for which every other stage must be done with the bucket.
    """
    rows: list[list[Action]] = [[] for _ in range(loads[0].num_stages)]
    for bucket, load in enumerate(loads):
        for row, actions in zip(rows, build_template([load], "1f1b").actions, strict=True):
            row += [Action(one.kind, bucket, one.micro_batch, one.stage) for one in actions]
    return PipelineTemplate("1f1b", len(rows), 1, tuple(tuple(row) for row in rows))


def template_of(schedule: str, loads: Sequence[BucketLoad], link: Link) -> PipelineTemplate:
    """Return the template of one of `SCHEDULES`."""
    if schedule == "drained":
        return drained_1f1b(loads)
    return build_template(loads, schedule, links=link)  # type: ignore[arg-type]


class Worker:
    """One stage of the pipeline."""

    def __init__(self, rank: int, settings: Settings) -> None:
        """Meet the other one, and build the stage."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        self.rank, self.settings = rank, settings
        self.processes = Processes(rank, NUM_STAGES, timeout_s=120)
        self.processes.connect()
        link = measure_link("cpu")
        assert link is not None, "there are two processes"
        self.link = link
        configs = {name: LoraConfig(r=16, target_modules="all-linear") for name in settings.tasks}
        layout = StageLayout.of(settings.model.num_layers, NUM_STAGES)
        whole = MultiTaskPeftModel(settings.model.build(), configs, verify=False).train()
        self.stage = StageModel(whole, layout, rank)
        self.model = self.stage.model
        self.sync = GradientSync(self.model, self.processes, ParallelLayout.of(NUM_STAGES, pp=NUM_STAGES))
        unmeasured = self.loads(1, [(1.0,) * 2] * settings.num_tasks)
        self.executor = PipelineExecutor(self.stage, self._plan("1f1b", unmeasured), self.processes)
        self.outboxes = [CountedOutbox(outbox) for outbox in self.executor.links.outgoing.values()]
        self.executor.links.outgoing = dict(zip(self.executor.links.outgoing, self.outboxes, strict=True))
        self.timeline = Timeline(self.processes)
        self.executor.on_action = self.timeline.take
        args = MultiTaskTrainingArguments("unused", use_cpu=True, report_to="none", save_strategy="no")
        self.optimizers = {name: self._optimizer(name, args) for name in settings.tasks}

    def _optimizer(self, name: str, args: MultiTaskTrainingArguments) -> TaskOptimizer:
        task = Task(name="task", peft_config=LoraConfig(), train_dataset=[{"input_ids": [1, 2]}], max_steps=10**6)
        return TaskOptimizer(
            name, self.model.task_parameters(name), resolve(task, args), 10**6, args, self.model.registry.slab_of(name)
        )

    def work(self, num_micro_batches: int) -> StepWork:
        """Return C micro-batches of T tokens of every task; the same in both processes."""
        micro_batches: list[MuxBatch] = []
        for index, name in enumerate(self.settings.tasks):
            draw = np.random.default_rng(index)
            count = num_micro_batches * self.settings.num_tokens // SEQUENCE_TOKENS
            ids = [draw.integers(1, self.settings.model.vocab_size, size=SEQUENCE_TOKENS) for _ in range(count)]
            sequences = tuple(TokenSequence(one, one, row) for row, one in enumerate(ids))
            batch = TaskBatch(name, 0, index, sequences)
            own = ChunkPackingCollator().micro_batches([batch], max_tokens=self.settings.num_tokens)
            assert len(own) == num_micro_batches, "rows fill micro-batches evenly"
            micro_batches += own
        tokens = num_micro_batches * self.settings.num_tokens
        return StepWork(self.settings.tasks, tuple(micro_batches), dict.fromkeys(self.settings.tasks, tokens))

    def loads(
        self,
        num_micro_batches: int,
        forward_s: Sequence[tuple[float, ...]],
        backward_s: Sequence[tuple[float, ...]] | None = None,
    ) -> list[BucketLoad]:
        """Return the load of every task: a bucket of its own."""
        settings = self.settings
        return [
            BucketLoad(
                name=name,
                forward_s=forward_s[index],
                backward_s=() if backward_s is None else backward_s[index],
                activation_bytes=(0,) * NUM_STAGES,
                output_bytes=4 * settings.num_tokens * settings.model.hidden_size,
                num_micro_batches=num_micro_batches,
            )
            for index, name in enumerate(settings.tasks)
        ]

    def profile(self, work: StepWork, seen: Latencies) -> None:
        """Take forward and backward of a micro-batch of every task on this stage, while the other does the same."""
        first = {batch.task_names[0]: batch for batch in reversed(work.micro_batches)}
        self.model.prepare_pass(work.tasks)
        hidden_TD = None
        if self.rank > 0:
            hidden_TD = torch.randn(self.settings.num_tokens, self.stage.hidden_size).requires_grad_()
        self.processes.wait_for_all()
        for name, batch in first.items():
            begin_s = time.perf_counter()
            output = self.stage.forward(self.rank, batch, hidden_TD).output
            middle_s = time.perf_counter()
            pass_backward(output, torch.ones_like(output), [])
            seen.forward_s[name].append(middle_s - begin_s)
            seen.backward_s[name].append(time.perf_counter() - middle_s)
        self.processes.wait_for_all()  # else the update would count what the other stage takes longer
        begin_s = time.perf_counter()
        self._update(work, StepResult({name: torch.zeros(()) for name in work.tasks}, {}, 0))
        seen.updates_s.append(time.perf_counter() - begin_s)

    def measured_loads(self, num_micro_batches: int, seen: Latencies) -> tuple[list[BucketLoad], float]:
        """Return the median load of every task on both stages, and the seconds of the updates on the slower one."""
        own = [
            [statistics.median(times[name]) for name in self.settings.tasks]
            for times in (seen.forward_s, seen.backward_s)
        ]
        found = self.processes.gather((own, statistics.median(seen.updates_s)))
        forward_s, backward_s = (list(zip(*(stage[0][kind] for stage in found), strict=True)) for kind in (0, 1))
        return self.loads(num_micro_batches, forward_s, backward_s), max(stage[1] for stage in found)

    def measure(self) -> dict[str, Any]:
        """Measure everything; return plain values."""
        rows: list[Row] = []
        loads: dict[int, Any] = {}
        timelines: dict[str, Any] = {}
        for count in self.settings.micro_batches:
            found, drawn, loads[count] = self._measure(count)
            rows += found
            if count == self.settings.drawn:
                timelines = drawn
        return {
            "link": asdict(self.link),
            "profile": loads,
            "rows": [asdict(row) for row in rows],
            "timelines": timelines,
        }

    def _measure(self, count: int) -> tuple[list[Row], dict[str, Any], Any]:
        work = self.work(count)
        rows = {schedule: Row(schedule, count) for schedule in SCHEDULES}
        spans: dict[str, list[Any]] = {schedule: [] for schedule in SCHEDULES}
        warm, seen = self._latencies(), self._latencies()
        for _ in range(3):
            self.profile(work, warm)
        loads, _ = self.measured_loads(count, warm)
        plans = {schedule: self._plan(schedule, loads) for schedule in SCHEDULES}
        for number in range(self.settings.rounds + 1):
            for schedule in SCHEDULES[:: 1 if number % 2 else -1]:
                row = rows[schedule] if number else Row(schedule, count)  # the first round is a warm-up
                self.executor.follow(plans[schedule])
                timeline = self._step(work, row)
                if number:
                    spans[schedule].append(timeline)
            for _ in range(3):
                self.profile(work, seen)
        loads, updates_s = self.measured_loads(count, seen)
        for schedule, row in rows.items():
            row.planned_passes_s = simulate(plans[schedule].template, loads, links=self.link).makespan_s
            row.planned_steps_s = row.planned_passes_s + updates_s
            self._closed_forms(work, row)
        facts = [asdict(load) for load in loads]
        return list(rows.values()), self._timelines(rows, spans, plans, loads), {"loads": facts, "updates_s": updates_s}

    def _latencies(self) -> Latencies:
        return Latencies({name: [] for name in self.settings.tasks}, {name: [] for name in self.settings.tasks})

    def _plan(self, schedule: str, loads: Sequence[BucketLoad]) -> PipelinePlan:
        tasks = tuple((name,) for name in self.settings.tasks)
        return PipelinePlan(template_of(schedule, loads, self.link), tasks, tuple((i,) for i in range(len(tasks))))

    def _step(self, work: StepWork, row: Row) -> list[list[Any]]:
        """Take one step; return what each stage ran when, in seconds since it began."""
        for outbox in self.outboxes:
            outbox.num_bytes = 0
        self.processes.wait_for_all()
        self.timeline.clear()
        begin_s = time.perf_counter()
        result = self.executor.run(work)
        middle_s = time.perf_counter()
        self._update(work, result)
        end_s, sent_bytes = time.perf_counter(), sum(outbox.num_bytes for outbox in self.outboxes)
        counts = (self.executor.most_in_flight, sent_bytes, self.sync.num_bytes)
        found = self.processes.gather((begin_s, middle_s, end_s, self.timeline.spans, *counts))
        # Both clocks are the machine's own, so that moments of one process hold in the other.
        start_s = min(one[0] for one in found)
        row.passes_s.append(max(one[1] for one in found) - start_s)
        row.steps_s.append(max(one[2] for one in found) - start_s)
        row.most_in_flight, row.sent_bytes, row.summed_bytes = ([one[kind] for one in found] for kind in (4, 5, 6))
        return [[(*span[:3], span[3] - start_s, span[4] - start_s) for span in one[3]] for one in found]

    def _update(self, work: StepWork, result: StepResult) -> None:
        """Sum norms over the stages, and step every task's part that lies here."""
        self.sync.begin(work)
        for micro_batch in work.micro_batches:
            self.sync.after_backward(micro_batch)
        norms = self.sync.finish(result).norms
        assert norms is not None, "stages hold parts"
        for name, optimizer in self.optimizers.items():
            optimizer.step(norms[name])

    def _closed_forms(self, work: StepWork, row: Row) -> None:
        """Note what a step of this work has to send, whatever the schedule."""
        settings = self.settings
        # Gradients that both stages hold, and 12 bytes for the loss and the norm of each task.
        cells = [self.sync.cells_of(name) for name in work.tasks]
        own_bytes = sum(bundle.num_bytes for one in cells for bundle in one.bundles) + 12 * len(work.tasks)
        row.closed_form_summed_bytes = self.processes.gather(own_bytes)
        # T D 4 bytes for each micro-batch, forward over the cut by one stage and back by the other.
        row.closed_form_bytes = len(work.micro_batches) * settings.num_tokens * settings.model.hidden_size * 4

    def _timelines(
        self, rows: dict[str, Row], spans: dict[str, list[Any]], plans: dict[str, PipelinePlan], loads: Any
    ) -> dict[str, Any]:
        """Return planned and measured spans of each schedule: of the round whose passes took the median time."""
        found = {}
        for schedule, row in rows.items():
            order = sorted(range(len(row.passes_s)), key=row.passes_s.__getitem__)
            planned: list[list[Any]] = [[] for _ in range(NUM_STAGES)]
            for span in simulate(plans[schedule].template, loads, links=self.link).spans:
                action = span.action
                planned[span.device].append((action.kind, action.bucket, action.micro_batch, span.start_s, span.end_s))
            found[schedule] = {"planned": planned, "measured": spans[schedule][order[len(order) // 2]]}
        return found
