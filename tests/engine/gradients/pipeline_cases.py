"""Pipelines whose sums of gradients are watched: two replicas of two stages in real processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import StepResult, StepWork
from tests.engine.pipeline import stage_cases
from tests.packing.even_rows import even_rows

ORDER = ("c", "a", "b", "d", "e")
LAYOUT = ParallelLayout.of(4, pp=2)


class RecordingSync(GradientSync):
    """Records the calls of an executor.

    Attributes:
        events: in order: "begin", "passed" with the micro-batch, "finish", and actions where the executor's are noted.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[tuple[str, Any]] = []

    def begin(self, work: StepWork) -> None:
        self.events.append(("begin", None))
        super().begin(work)

    def after_backward(self, micro_batch: MuxBatch) -> None:
        self.events.append(("passed", micro_batch))
        super().after_backward(micro_batch)

    def finish(self, result: StepResult) -> StepResult:
        self.events.append(("finish", None))
        return super().finish(result)


class RecordingProcesses(Processes):
    """Writes down the sums that begin.

    Attributes:
        log: "sum" and its ranks, and actions of the pipeline, in order.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log: list[str] = []

    def all_reduce(self, tensor: Any, ranks: tuple[int, ...] | None = None) -> Any:
        self.log.append(f"sum over {ranks} of {tensor.numel()}")
        return super().all_reduce(tensor, ranks)


def work_of_replica(step: int, replica: int, tasks: Sequence[str] = tuple(stage_cases.LENGTHS)) -> StepWork:
    """Return what a replica does of a step; weights of losses are those of the whole global batches."""
    batches = {name: stage_cases.random_batch(name, step, stage_cases.LENGTHS[name]) for name in tasks}
    micro_batches = []
    for htask, most in zip(stage_cases.HTASKS, stage_cases.MAX_TOKENS, strict=True):
        fused = [batches[name] for name in htask if name in batches]
        if fused:
            own = even_rows(fused, LAYOUT.num_replicas)[replica]
            micro_batches += ChunkPackingCollator().micro_batches(fused, max_tokens=most, only=own)
    sizes = {name: one.num_tokens for name, one in batches.items()}
    return StepWork(tuple(batches), tuple(micro_batches), sizes, sync_order=ORDER)


def as_stage_of_replica(rank: int, cases: Sequence[str]) -> dict[str, Any]:
    """Run a step of each case as one stage of one of two replicas; return the results and when sums began."""
    dist.init_process_group("gloo")
    processes = RecordingProcesses(int(os.environ["RANK"]), LAYOUT.world_size, timeout_s=60.0)
    processes.connect()
    place, found = LAYOUT.place(rank), {}
    for name in cases:
        case = stage_cases.CASES[name]
        stages = StageLayout.of(stage_cases.NUM_LAYERS, 2, num_chunks=case.num_chunks)
        stage = StageModel(stage_cases.mux_model(case), stages, place.stage)
        plan = PipelinePlan(stage_cases.template_of(case, 2), stage_cases.HTASKS, stage_cases.BUCKETS)
        sync = GradientSync(stage.model, processes, LAYOUT)
        executor = PipelineExecutor(stage, plan, processes, pipelines=LAYOUT.pipelines, sync=sync)
        processes.log = []
        executor.on_action = lambda action: processes.log.append(f"action {action}")
        result = executor.run(work_of_replica(0, place.replica))
        assert result.norms is not None, "a pipeline holds parts"
        found[name] = {
            "losses": {task: loss.item() for task, loss in result.losses.items()},
            "norms": {task: norm.item() for task, norm in result.norms.items()},
            "gradients": _gradients(stage),
            "log": processes.log,
        }
        executor.close()
    return found


def _gradients(stage: StageModel) -> dict[str, np.ndarray]:
    return {
        f"{name}/{key}": parameter.grad.numpy().copy()
        for name in stage.model.tasks
        for key, parameter in stage.model.task_parameters(name).items()
        if parameter.grad is not None
    }
