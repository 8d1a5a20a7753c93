"""Whole training steps on the pretended device: passes and updates, eager and captured, and what was seen of them."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import TrainerState

from peft_mux import MultiTaskTrainingArguments, Task
from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.engine.executor import Executor
from peft_mux.engine.tasks.active_task import ActiveTask, BestMetric, TaskTable
from peft_mux.engine.tasks.optimizer import LastFiniteWeights, TaskOptimizer
from peft_mux.engine.tasks.setup import resolve_tasks
from peft_mux.engine.work import StepWork
from peft_mux.kernels import availability
from peft_mux.kernels.lora import tables as tunings
from peft_mux.kernels.lora.group import Base
from peft_mux.modeling.attention import varlen
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.slabs import TaskSlab
from peft_mux.parallel.cuda_graphs import CapturedPasses
from peft_mux.task import TaskStatus
from tests.pretended_cuda import backbones
from tests.pretended_cuda.device import PretendedCuda

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NUM_STEPS = 2


@dataclass(frozen=True)
class Case:
    """A training run of a few steps.

    Attributes:
        architecture: name in `backbones.ARCHITECTURES`.
        dtype: of the backbone's weights.
        autocast: whether passes run under bf16 autocast.
        checkpointing: whether activations are recomputed.
        has_chains: whether long sequences are split over passes.
        adapts_head: whether a task adapts the output head.
        has_bottlenecks: whether there are tasks of Adapter Tuning in addition to those of LoRA.
        has_upper: whether there is a task, too, that adapts the upper layer alone.
        captured: whether passes are captured.
        optim: optimizer of the tasks.
        name: model of the card.
        capability: compute capability of the card.
        has_driver: whether Triton finds a driver.
        num_rows: rows of each task in a step.
        has_short_rows: whether backbones of real widths have rows as short as those of small ones.
        on_side_stream: whether the current stream is not the default one, as in passes that take turns.
    """

    architecture: str = "llama"
    dtype: str = "bf16"
    autocast: bool = False
    checkpointing: bool = False
    has_chains: bool = False
    adapts_head: bool = False
    has_bottlenecks: bool = False
    has_upper: bool = False
    captured: bool = False
    optim: str = "adamw_torch_fused"
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    has_driver: bool = True
    num_rows: int = 2
    on_side_stream: bool = False
    has_short_rows: bool = False


def train(**fields: Any) -> dict[str, Any]:
    """Train a case, given by its fields, for a few steps, and return what was seen.

    Returns:
        `steps` that each task has taken; `num_passes`, the micro-batches of a step; `pass_waits`, waits within passes,
        and `step_waits`, those in the update after them, by step; `blocking_copies`, which held the host up, by place;
        `unsafe`, what was done under capture that no graph can repeat; `num_captures`; `attention`, calls of torch's
        attention operators; `launches` of each kernel in passes and updates; `signatures`, the variants that would have
        been compiled; `said`, the warnings; `rows_left_out`, rows for which products with frozen weights were not made
        in backward passes; `stream_waits`, how often the host waited for a side stream; `refreshed`, how often
        copies of a task's weights were updated.
    """
    case = Case(**fields)
    forget_the_last_card()
    device = PretendedCuda(case.name, tuple(case.capability), has_driver=case.has_driver)
    rows_left_out: list[int] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        batches = [_batches(case, step) for step in range(NUM_STEPS)]
        stream = mock.Mock(stream_id=int(case.on_side_stream))
        current_stream = mock.patch.object(torch.accelerator, "current_stream", return_value=stream)
        refreshing = mock.patch.object(TaskSlab, "refresh_copies", autospec=True, side_effect=TaskSlab.refresh_copies)
        with device.present(), _counting(rows_left_out), current_stream, refreshing as refreshed:
            seen = _train(case, _model(case), device, batches)
    return seen | {
        "attention": dict(device.attention),
        "launches": dict(device.launches.counts),
        "blocking_copies": dict(device.blocking_copies),
        "unsafe": dict(device.unsafe),
        "signatures": list(device.launches.signatures),
        "said": list(dict.fromkeys(str(warning.message) for warning in said)),
        "rows_left_out": sum(rows_left_out),
        "stream_waits": stream.synchronize.call_count,
        "refreshed": refreshed.call_count,
    }


@contextmanager
def _counting(rows_left_out: list[int]) -> Iterator[None]:
    plain = Base.add_input_gradient

    def counted(base: Base, dx_TD: torch.Tensor, dy_TK: torch.Tensor) -> None:
        made = len(dx_TD) if base.needed is None else sum(end - start for start, end in base.needed)
        rows_left_out.append(len(dx_TD) - made)
        plain(base, dx_TD, dy_TK)

    with mock.patch.object(Base, "add_input_gradient", counted):
        yield


def forget_the_last_card() -> None:
    """Let this process repeat what it does only once: cases share a process, and not a card."""
    for once in (varlen.warn_once, availability._card_runs_kernels, availability._reason_against_card):
        once.cache_clear()
    tunings.gpu_model.cache_clear()


# ------------------------------------------------------------------ what is trained


def _model(case: Case) -> MultiTaskPeftModel:
    backbone = backbones.make(case.architecture, DTYPES[case.dtype])
    configs = _adapters(case)
    is_classifier = case.architecture == "bert"
    model = MultiTaskPeftModel(
        backbone,
        configs,  # type: ignore[arg-type]
        seeds={name: index for index, name in enumerate(configs)},
        num_labels=dict.fromkeys(configs, backbones.NUM_LABELS) if is_classifier else None,
        verify=False,
    ).train()
    if case.checkpointing:
        model.activation_checkpointing_enable()
    return model


def _adapters(case: Case) -> dict[str, Any]:
    kinds = {"adapts_head": case.adapts_head, "has_bottlenecks": case.has_bottlenecks, "has_upper": case.has_upper}
    return dict(backbones.adapters(case.architecture, **kinds))


def _batches(case: Case, step: int) -> list[TaskBatch]:
    rng = np.random.default_rng(step)
    names = _adapters(case)
    return [TaskBatch(name, step, 7, tuple(_rows(rng, case))) for name in names]


def _rows(rng: np.random.Generator, case: Case) -> list[TokenSequence]:
    # Long rows too, where a gradient is added up of several parts.
    shortest, longest = (
        (300, 500) if case.architecture in backbones.REAL_WIDTHS and not case.has_short_rows else (5, 70)
    )
    rows = []
    for row, length in enumerate(rng.integers(shortest, longest, size=case.num_rows)):
        ids = rng.integers(1, backbones.VOCABULARY, length).astype(np.int64)
        label = int(rng.integers(0, backbones.NUM_LABELS)) if case.architecture == "bert" else None
        rows.append(TokenSequence(ids, ids.copy(), row, class_label=label))
    return rows


def _streams(case: Case, batches: list[TaskBatch]) -> tuple[MuxBatch, ...]:
    if case.has_chains:
        collator = ChunkPackingCollator(split_long_sequences=True)
        streams = tuple(collator.micro_batches(batches, max_tokens=50))
        assert any(stream.parts for stream in streams), "a row is longer than a pass"
        return streams
    max_tokens = max(200, sum(batch.num_tokens for batch in batches) * 2 // 3)
    return tuple(ChunkPackingCollator().micro_batches(batches, max_tokens=max_tokens))


def _train(
    case: Case, model: MultiTaskPeftModel, device: PretendedCuda, batches: list[list[TaskBatch]]
) -> dict[str, Any]:
    executor = Executor(model, bf16=case.autocast)
    if case.captured:
        executor.runner = CapturedPasses(model, executor.precision, make_graph=lambda: Graph(device))
    table = TaskTable(_active_tasks(case, model))
    availability.runs_kernels(model.device)  # as the packing probe does
    device.forget()  # what loading and moving did
    pass_waits: dict[str, int] = {}
    step_waits: list[dict[str, int]] = []
    for own in batches:
        streams = _streams(case, own)
        result = executor.run(StepWork(tuple(model.tasks), streams, {batch.task: batch.num_tokens for batch in own}))
        pass_waits.update(device.waits)
        device.waits.clear()
        _check_gradients(model)
        table.apply(result)
        step_waits.append(dict(device.waits))
        device.waits.clear()
    return {
        "steps": {task.name: task.step for task in table},
        "num_passes": len(streams),
        "pass_waits": pass_waits,
        "step_waits": step_waits,
        "num_captures": getattr(executor.runner, "num_captures", 0),
    }


def _check_gradients(model: MultiTaskPeftModel) -> None:
    for name in model.tasks:
        for page in model.registry.slab_of(name).pages:
            assert page.values.grad is not None, f"{name} has no gradient"
            assert page.values.grad.device.type == "cuda", f"gradients of {name} lie on {page.values.grad.device}"


def _active_tasks(case: Case, model: MultiTaskPeftModel) -> list[ActiveTask]:
    with tempfile.TemporaryDirectory() as folder:
        args = MultiTaskTrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    runs = []
    for name, config in _adapters(case).items():
        settings: dict[str, Any] = {"learning_rate": 1e-3, "max_steps": 5, "optim": case.optim, "train_batch_size": 1}
        task = Task(name=name, peft_config=config, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}], **settings)
        (resolved,), slab = resolve_tasks([task], args), model.registry.slab_of(name)
        optimizer = TaskOptimizer(name, model.task_parameters(name), resolved.hyper, 5, args, slab)
        runs.append(
            ActiveTask(
                resolved=resolved,
                loader=SimpleNamespace(steps_per_epoch=10),
                eval_data={},
                num_steps=5,
                state=TrainerState(),
                best=BestMetric(task, resolved.hyper),
                status=TaskStatus.RUNNING,
                optimizer=optimizer,
                last_good=LastFiniteWeights({str(index): page.values for index, page in enumerate(slab.pages)}),
            )
        )
    return runs


class Graph:
    """Stands for a CUDA graph: what it captures is run, and looked at."""

    def __init__(self, device: PretendedCuda) -> None:
        self._device = device

    def warm_up(self, run: Callable[[], None]) -> None:
        for _ in range(2):
            run()

    def capture(self, run: Callable[[], None]) -> None:
        with self._device.capturing():
            run()

    def replay(self) -> None: ...
