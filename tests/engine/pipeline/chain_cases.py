"""Steps with long sequences in parts, through pipelines of real processes and in one process.

Launches, models and templates are those of `stage_cases`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.executor import Executor
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import StepWork
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.storage import load_tensors, save_tensors
from tests.engine.pipeline import stage_cases as stages

LENGTHS = {"a": (60, 9, 17), "b": (31, 4, 58), "c": (45, 7, 30), "d": (25, 3), "e": (64, 9, 41)}
CHUNK, NUM_STEPS = 8, 2

CASES = {
    "llama-gpipe": stages.Case("llama", "gpipe"),
    "mistral-1f1b": stages.Case("mistral", "1f1b"),
    "llama-interleaved": stages.Case("llama", "interleaved_1f1b", num_chunks=2),
    "gpt2-mux": stages.Case("gpt2", "mux"),
    "qwen-mux-chunks": stages.Case("qwen", "mux", num_chunks=2, recomputes=True),
    "llama-mux-limit": stages.Case("llama", "mux", recomputes=True, holds_back=True),
}


def step_work(step: int, *, is_split: bool = True) -> StepWork:
    """Return the passes of a step; unsplit sequences get passes of their own, however long."""
    batches: dict[str, TaskBatch] = {name: stages.random_batch(name, step, rows) for name, rows in LENGTHS.items()}
    collator = ChunkPackingCollator(chunk_size=CHUNK, split_long_sequences=is_split)
    micro_batches: list[MuxBatch] = []
    for htask, most in zip(stages.HTASKS, stages.MAX_TOKENS, strict=True):
        micro_batches += collator.micro_batches([batches[name] for name in htask], max_tokens=most)
    return StepWork(tuple(batches), tuple(micro_batches), {name: one.num_tokens for name, one in batches.items()})


def gradients_of(model: MultiTaskPeftModel) -> dict[str, torch.Tensor]:
    """Return the gradients of all tasks by task and parameter, and take them away."""
    found = {}
    for name in model.tasks:
        for key, parameter in model.task_parameters(name).items():
            if parameter.grad is not None:
                found[f"{name}/{key}"] = parameter.grad.clone()
                parameter.grad.zero_()
    return found


def alone(case: stages.Case, *, is_split: bool) -> list[tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Return the losses and gradients of each step in one process."""
    model = stages.mux_model(case)
    executor, seen = Executor(model), []
    for step in range(NUM_STEPS):
        losses = executor.run(step_work(step, is_split=is_split)).losses
        seen.append(({name: loss.item() for name, loss in losses.items()}, gradients_of(model)))
    return seen


def watch(executor: Any, events: list[str]) -> None:
    """Note each pass and each message of hidden states as they come."""
    forward = executor.stage.forward

    def noted(place: int, batch: MuxBatch, hidden_TD: torch.Tensor | None) -> Any:
        events.append(f"pass {place}: " + " ".join(f"{p.task}{p.row}@{p.start}" for p in batch.parts if not p.is_whole))
        return forward(place, batch, hidden_TD)

    executor.stage.forward = noted
    for (kind, target), outgoing in executor.links.outgoing.items():
        put = outgoing.put

        def sent(key: Any, tensor: torch.Tensor, what: str = f"{kind} to {target}", put: Any = put) -> None:
            events.append(f"{what}: {key.slot.bucket}.{key.slot.micro_batch}.{key.number}/{key.chunk}")
            put(key, tensor)

        outgoing.put = sent


def run_stage(name: str, processes: Processes, folder: Path) -> None:
    """Run the steps of a case as one stage, and leave what was seen."""
    executor, _ = stages.make_stage(CASES[name], processes, folder)
    model, events, losses = executor.model, [], []
    watch(executor, events)
    for step in range(NUM_STEPS):
        result = executor.run(step_work(step))
        losses.append({task: loss.item() for task, loss in result.losses.items()})
        save_tensors(folder / f"{name}-{step}-{processes.rank}.safetensors", gradients_of(model))
    num_events = len(events)
    forward_losses = executor.forward_sums(step_work(NUM_STEPS).micro_batches).losses
    facts = {
        "losses": losses,
        "events": events[:num_events],
        "forward_losses": {task: loss.item() for task, loss in forward_losses.items()},
        "held_bytes": model.stream.key_values.num_bytes,
    }
    (folder / f"{name}-{processes.rank}.json").write_text(json.dumps(facts))
    executor.links.close()


def read_gradients(folder: Path, name: str, step: int, world: int) -> dict[str, torch.Tensor]:
    """Return the gradients of all stages."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(world):
        found |= load_tensors(folder / f"{name}-{step}-{rank}.safetensors")
    return found


stages.COMMANDS["chain"] = run_stage
