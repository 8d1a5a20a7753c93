"""The part `default run` of `benchmarks.gpu`: `MultiTaskTrainer.train()` as users call it, on rows of unequal lengths.

It compares the predicted peak of memory with the measured one, and shows the time of each step with everything that a
user waits for: planning, packing, callbacks and the updates. If liger-kernel is installed, the larger batches are
trained with it as well.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.gpu import roofline
from benchmarks.gpu.backbones import llama
from benchmarks.gpu.rehearsal import stand_ins
from benchmarks.gpu.report import Row
from benchmarks.gpu.roofline import Backbone
from benchmarks.gpu.settings import Settings, free
from peft_mux.modeling.backbone.liger import has_liger

NUM_STEPS = 6
"""The first two compile and allocate."""
BATCH_SIZES = (16, 64)
"""Rows of a task's step: 6,700 and 27,000 tokens of 8 tasks, of which the second exceeds one pass."""


def default_rows(settings: Settings) -> Iterator[Row]:
    """Yield a row for each batch size: predicted and measured memory, seconds of steps, and tokens per second."""
    from benchmarks.training.workloads import make_workload

    shape = Backbone(32, 2, 48, 4, 64) if settings.is_rehearsal else roofline.LLAMA_8B.of_layers(settings.num_layers)
    num_tasks = 3 if settings.is_rehearsal else 8
    for batch_size in (4,) if settings.is_rehearsal else BATCH_SIZES:
        workload = make_workload(
            "nonuniform",
            num_tasks=num_tasks,
            num_steps=NUM_STEPS,
            vocab_size=shape.vocab_size,
            batch_size=batch_size,
        )
        name = f"{shape.num_layers} layers, {num_tasks} nonuniform x {batch_size} rows"
        free(settings.device)
        yield name, _measured(settings, shape, workload, with_liger=False)
        if batch_size == max(BATCH_SIZES) and has_liger():
            free(settings.device)
            yield f"{name}, Liger", _measured(settings, shape, workload, with_liger=True)


class _StepClock(TrainerCallback):
    """Writes down when training begins and when each step ends."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at_s.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at_s.append(time.perf_counter())  # the step has read its losses, so its passes are done


def _measured(settings: Settings, shape: Backbone, workload: Any, *, with_liger: bool) -> dict[str, Any]:
    from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task

    tasks = [
        Task(
            name=own.name,
            peft_config=own.lora_config(),
            train_dataset=list(own.rows),
            train_batch_size=own.batch_size,
            learning_rate=workload.learning_rate,
            max_steps=NUM_STEPS,
            seed=own.seed,
        )
        for own in workload.tasks
    ]
    clock, is_cuda = _StepClock(), settings.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder, stand_ins(settings):
        args = MultiTaskTrainingArguments(
            output_dir=folder,
            use_cpu=not is_cuda,
            bf16=not settings.is_rehearsal,
            use_liger_kernel=with_liger,
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
        )
        trainer = MultiTaskTrainer(llama(settings, shape), args, tasks, callbacks=[clock])
        plan = trainer.plan()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(settings.device)
        trainer.train()
        events = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        shortages = [event for event in events if event.get("event") == "out_of_memory"]
        statuses = sorted({trainer.table[task.name].status.value for task in tasks})
    steps_s = [after - before for before, after in itertools.pairwise(clock.at_s)]
    num_tokens = [sum(len(r["input_ids"]) for own in workload.tasks for r in own.batches[s]) for s in range(NUM_STEPS)]
    found = {
        "steps_s": steps_s,
        "tokens_per_step": num_tokens,
        "tokens_per_s": statistics.median(n / s for n, s in zip(num_tokens[2:], steps_s[2:], strict=True)),
        "planned_passes": sum(htask.micro_batches for htask in plan.htasks),
        "planned_step_s": plan.step_s,
        "predicted_peak_bytes": max(plan.peak_bytes),
        "limit_bytes": plan.limit_bytes,
        "out_of_memory": shortages,
        "is_right": statuses == ["succeeded"],
    }
    if is_cuda:
        found |= {
            "peak_bytes": torch.cuda.max_memory_allocated(settings.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(settings.device),
        }
        found["peak_over_predicted"] = found["peak_bytes"] / found["predicted_peak_bytes"]
    return found
