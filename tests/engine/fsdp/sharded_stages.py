"""Two replicas of two stages in real processes, which share the weights of each stage, for the tests of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.executor import Executor
from peft_mux.engine.fsdp import shard_backbone
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import StepWork
from tests.engine.families.family_cases import gather_weights
from tests.engine.fsdp.cases import bytes_per_pass, frozen_bytes, local_bytes
from tests.engine.pipeline import stage_cases
from tests.engine.pipeline.stage_cases import BUCKETS, HTASKS, LENGTHS, MAX_TOKENS, NUM_LAYERS, NUM_STEPS, Case, Seen
from tests.engine.processes.cases import connected

LAYOUT = ParallelLayout.of(4, pp=2)


@dataclass
class Shown:
    """What a run showed to one process.

    Attributes:
        seen: losses, norms and failures.
        weights: final ones, whole, by task and name.
        num_passes: passes of this process in a step.
        held: bytes of frozen weights between passes.
        stage_bytes: those of its whole stage.
        received: bytes of frozen weights that the last step has brought.
        bytes_per_pass: of one forward and backward, the closed form.
        most_passes: passes of a step, if in each place there are those of the replica that has more.
        evaluated: losses of this replica's rows in a forward pass, after training.
    """

    seen: Seen
    num_passes: int = 0
    held: int = 0
    stage_bytes: int = 0
    received: int = 0
    bytes_per_pass: int = 0
    most_passes: int = 0
    evaluated: dict[str, float] = field(default_factory=dict)
    weights: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)


def train(rank: int, case: Case, folder: Path) -> Shown:
    """Train a case as one stage of one of two replicas, which have rows of different tasks."""
    processes, place = connected(), LAYOUT.place(rank)
    layout = StageLayout.of(NUM_LAYERS, 2, num_chunks=case.num_chunks, layers_per_stage=case.layers_per_stage)
    stage = StageModel(stage_cases.mux_model(case), layout, place.stage)
    shown = Shown(Seen(), stage_bytes=frozen_bytes(stage.model))
    plan = PipelinePlan(stage_cases.template_of(case, 2), HTASKS, BUCKETS, tuple(stage_cases.loads_of(2, (1000, 700))))
    executor = make_executor(stage, plan, processes)
    backbone, sync = executor.sharded, executor.sync
    assert backbone is not None, "it was made with one"
    optimizers = {name: stage_cases.optimizer_of(stage.model, name, folder) for name in stage.model.tasks}
    for step in range(NUM_STEPS):
        if case.poison and step == 1:
            stage_cases.poison(stage.model)
        before = backbone.num_bytes
        tasks = [name for name in optimizers if name not in shown.seen.failures]
        work = step_work(step, tasks, place.replica)
        stage_cases.take_step(executor.run(work), tasks, optimizers, shown.seen)
        shown.received = backbone.num_bytes - before
    both = [plan.slots(step_work(step, tasks, replica).micro_batches) for replica in (0, 1)]
    shown.most_passes = sum(max(len(one), len(other)) for one, other in zip(*map(dict.values, both), strict=True))
    shown.num_passes, shown.held = len(work.micro_batches), local_bytes(stage.model)
    shown.bytes_per_pass = sum(bytes_per_pass(backbone, 2, number) for number in stage.virtual_stages)
    rows = step_work(NUM_STEPS, list(optimizers), place.replica).micro_batches
    shown.evaluated = {name: loss.item() for name, loss in executor.forward_sums(rows).losses.items()}
    shown.weights = {name: gather_weights(stage.model, name, sync) for name in optimizers}
    executor.links.close()
    return shown


def make_executor(stage: StageModel, plan: PipelinePlan, processes: Processes) -> PipelineExecutor:
    """Divide the weights of a stage among the replicas, and return what runs it."""
    backbone = shard_backbone(stage.model, processes, stage, LAYOUT)
    sync = GradientSync(stage.model, processes, LAYOUT, is_deferred=True)
    return PipelineExecutor(stage, plan, processes, pipelines=LAYOUT.pipelines, sync=sync, sharded=backbone)


def follow_apart(rank: int, case: Case) -> None:
    """Take a step in which the second replica follows another template."""
    processes, place = connected(), LAYOUT.place(rank)
    stage = StageModel(stage_cases.mux_model(case), StageLayout.of(NUM_LAYERS, 2), place.stage)
    other = stage_cases.CASES["llama-gpipe" if place.replica else "llama-1f1b"]
    plan = PipelinePlan(stage_cases.template_of(other, 2), HTASKS, BUCKETS)
    executor = make_executor(stage, plan, processes)
    executor.run(step_work(0, list(stage.model.tasks), place.replica))


def step_work(step: int, tasks: list[str], replica: int) -> StepWork:
    """Return the rows of a replica in a step: those of the first hTask for the first one, all others for the second."""
    batches = {name: stage_cases.random_batch(name, step, LENGTHS[name]) for name in tasks}
    micro_batches: list[MuxBatch] = []
    for htask, most in zip(HTASKS, MAX_TOKENS, strict=True):
        fused = [batches[name] for name in htask if name in batches]
        if fused and (htask == HTASKS[0]) == (replica == 0):
            micro_batches += ChunkPackingCollator().micro_batches(fused, max_tokens=most)
    counts = {name: one.num_tokens for name, one in batches.items()}
    return StepWork(tuple(batches), tuple(micro_batches), counts)


def evaluated_alone(case: Case, weights: Any) -> dict[str, float]:
    """Return the losses that one process with the same adapters finds for the same rows."""
    model = stage_cases.mux_model(case)
    with torch.no_grad():
        for name, own in weights.items():
            for key, parameter in model.task_parameters(name).items():
                parameter.copy_(torch.from_numpy(own[key]))
    found = Executor(model).forward_sums(stage_cases.step_work(NUM_STEPS, list(LENGTHS)).micro_batches).losses
    return {name: loss.item() for name, loss in found.items()}
