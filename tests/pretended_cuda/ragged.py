"""Steps of tasks whose rows have unequal lengths, on the pretended device: what is made again for each set of tasks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
from peft import LoraConfig

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.engine.cuda_graphs import CapturedPasses
from peft_mux.engine.executor import Executor
from peft_mux.engine.work import StepWork
from peft_mux.kernels import availability
from peft_mux.modeling.adapters.lora.lora_pass import LoraGroups
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.pretended_cuda import backbones
from tests.pretended_cuda.device import PretendedCuda
from tests.pretended_cuda.steps import Graph, forget_the_last_card

_PASSES_OF_A_CAPTURE = 3
"""Two that warm up, and the one that is captured."""


def train(
    tasks: int, rows: int, mean: int, sigma: float, max_tokens: int, steps: int, captured: bool = False
) -> dict[str, Any]:
    """Return counts of `steps` steps of tasks with lognormal lengths.

    Returns:
        `micro_batches`; `sets`, how many sets of tasks they held; `misses`, in how many of them tables were made;
        `captures`; `passes` through the backbone, replays and what captures take included.
    """
    forget_the_last_card()
    device = PretendedCuda("NVIDIA H100 80GB HBM3", (9, 0), has_driver=True)
    sets: set[tuple[str, ...]] = set()
    passes_with_tables: set[int] = set()
    make_tables, num_micro_batches = LoraGroups.make_tables, 0

    def noted(groups: LoraGroups, *args: Any) -> Any:
        passes_with_tables.add(model.stream.num_passes)
        return make_tables(groups, *args)

    with device.present(), mock.patch.object(LoraGroups, "make_tables", noted):
        names = [f"t{number}" for number in range(tasks)]
        configs = {name: LoraConfig(r=8, target_modules="all-linear") for name in names}
        seeds = {name: number for number, name in enumerate(names)}
        backbone = backbones.make("llama", torch.bfloat16)
        model = MultiTaskPeftModel(backbone, configs, seeds=seeds, verify=False).train()
        executor = Executor(model)
        if captured:
            executor.captured = CapturedPasses(model, executor.precision, make_graph=lambda: Graph(device))
        availability.runs_kernels(model.device)
        for step in range(steps):
            batches = [TaskBatch(name, step, 7, _rows(seeds[name], step, rows, mean, sigma)) for name in names]
            num_tokens = sum(batch.num_tokens for batch in batches)
            streams = ChunkPackingCollator().micro_batches(
                batches, max_tokens=max_tokens, num_passes=-(-num_tokens // max_tokens)
            )
            sets |= {stream.task_names for stream in streams}
            num_micro_batches += len(streams)
            executor.run(StepWork(tuple(names), tuple(streams), {one.task: one.num_tokens for one in batches}))
    captures = 0 if executor.captured is None else executor.captured.num_captures
    return {
        "micro_batches": num_micro_batches,
        "sets": len(sets),
        "misses": len(passes_with_tables),
        "captures": captures,
        "passes": num_micro_batches + _PASSES_OF_A_CAPTURE * captures,
    }


def _rows(task: int, step: int, count: int, mean: int, sigma: float) -> tuple[TokenSequence, ...]:
    rng = np.random.default_rng([task, step])
    lengths = np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), 16, 1024).astype(int)
    rows = []
    for row, length in enumerate(lengths):
        labels = np.ones(length, np.int64)
        labels[: length * 3 // 10] = -100
        rows.append(TokenSequence(np.ones(length, np.int64), labels, row))
    return tuple(rows)
