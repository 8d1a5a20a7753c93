"""The parts `gain` of `benchmarks.gpu`: what training tasks together gains over one after another, by tokens a task.

It answers the objection that fusing gains nothing once a batch fills the GPU: 8 equal tasks of rank 16 take steps of
512 to 8K tokens each, in rows of 256 tokens, so that no contender pads and all that is gained comes from sharing
passes.

    together     all tasks in one stream, in passes of up to 16K tokens
    alone        peft_mux with one task; the time of one, times 8, as their steps are equal
    packed       PEFT with one task, packed and with Liger, times 8
    hf           PEFT with one task, padded, times 8

Graphs are measured up to 4K tokens a task: beyond it, passes are the same 16K tokens, which take the device several
times as long as the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.gpu import roofline
from benchmarks.gpu.backbones import Backbones
from benchmarks.gpu.report import Deadline, Row
from benchmarks.gpu.roofline import Backbone
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.train import (
    MOST_PASS_TOKENS,
    loss_difference,
    loss_tolerance,
    path_verdicts,
    peak_flops,
    train_safely,
)

NUM_TASKS = 8
RANK = 16
ROW_TOKENS = 256
SECONDS = {4096: 13.3, 512: 5.6, 1024: 6.6, 8192: 7.0, 2048: 8.8}
"""Computed seconds by the tokens of a task's step, the most telling first, as a run may be cut off.

By 40 % of an H100's dense bf16 rate, or by the host's 4 to 6 ms a layer and pass, whichever takes longer."""
GRAPH_TOKENS = 4096
"""Most tokens of a task's step for which graphs are measured."""
SHAPE = roofline.LLAMA_8B.of_layers(8)
"""Eight layers of the 8B's shape, as the gain is that of a layer: more only take longer."""

WAYS = {
    "together": ("mux", NUM_TASKS),
    "alone": ("mux", 1),
    "together_graphs": ("mux_graphs", NUM_TASKS),
    "alone_graphs": ("mux_graphs", 1),
    "packed": ("packed", 1),
    "hf": ("hf", 1),
}
"""Contender and number of tasks of each way to train."""


def sweep_part(settings: Settings, deadline: Deadline, backbones: Backbones) -> Iterator[Row]:
    """Yield a row for each number of tokens, and last the gains alone, side by side."""
    shape = Backbone(32, 1, 48, 4, 64) if settings.is_rehearsal else SHAPE
    gains: dict[str, dict[str, float]] = {}
    for tokens, needs_s in {32: 0.0}.items() if settings.is_rehearsal else SECONDS.items():
        if not deadline.has(needs_s):
            yield f"{tokens} tokens a task", {"skipped": f"the time budget is spent: needs {needs_s:.0f} s"}
            continue
        row = _measured(settings, backbones, shape, tokens)
        yield f"{tokens} tokens a task", row
        gains[str(tokens)] = {key: value for key, value in row.items() if key.startswith("gain")}
    yield "gains by tokens a task", {key: gains[key] for key in sorted(gains, key=int)}


def num_steps(tokens: int) -> int:
    """Return the steps that are taken: one to warm up, and two that are timed, or one of the longest."""
    return 3 if tokens <= GRAPH_TOKENS else 2


def _ways(tokens: int) -> list[str]:
    return [way for way, (contender, _) in WAYS.items() if contender != "mux_graphs" or tokens <= GRAPH_TOKENS]


def _measured(settings: Settings, backbones: Backbones, shape: Backbone, tokens: int) -> dict[str, Any]:
    """Train in every way; return seconds of a step of all tasks, gains, and whether losses and paths are right."""
    row_tokens = 16 if settings.is_rehearsal else ROW_TOKENS
    steps = 2 if settings.is_rehearsal else num_steps(tokens)
    whole = sweep_workload(shape, tokens, row_tokens, steps)
    found: dict[str, Any] = {"tokens_per_step": NUM_TASKS * tokens}
    losses: dict[str, list[list[float]]] = {}
    verdicts: list[bool] = []
    for way in _ways(tokens):
        contender, num_tasks = WAYS[way]
        trained = num_tasks * RANK * shape.rank_weights
        pass_tokens = roofline.pass_tokens(shape, contender, trained, settings.device_bytes, MOST_PASS_TOKENS)
        row = train_safely(settings, backbones, shape, contender, whole(num_tasks), pass_tokens)
        if "steps_s" not in row:
            found[f"{way}: not measured"] = row.get("skipped") or row.get("failed")
            verdicts += [False] * ("failed" in row)
            continue
        found[f"{way}_s"] = statistics.median(row["steps_s"][1:]) * NUM_TASKS / num_tasks
        found[f"{way}_pass_tokens"] = pass_tokens
        losses[way] = [step[:1] for step in row["losses"]]
        verdicts += path_verdicts(settings, row)
    found |= _gains(found)
    if "together_s" in found and (peak := peak_flops(settings.device)) is not None:
        found["mfu"] = NUM_TASKS * tokens * shape.flops_per_token(row_tokens, RANK) / found["together_s"] / peak
    reference = losses.get("hf") or losses.get("alone")
    if reference:
        found["loss_difference"] = max(loss_difference(own, reference) for own in losses.values())
        verdicts.append(all(loss_difference(own, reference) <= loss_tolerance(settings) for own in losses.values()))
    return found | {"is_right": all(verdicts)}


def _gains(found: dict[str, Any]) -> dict[str, float]:
    """Return how much faster all tasks are together than one after another, for each way that was measured."""
    pairs = {
        "gain_over_hf": ("hf_s", "together_s"),
        "gain_over_packed": ("packed_s", "together_s"),
        "gain_over_alone": ("alone_s", "together_s"),
        "gain_over_alone_with_graphs": ("alone_graphs_s", "together_graphs_s"),
    }
    return {
        gain: found[before] / found[after]
        for gain, (before, after) in pairs.items()
        if before in found and after in found
    }


def sweep_workload(shape: Backbone, tokens: int, row_tokens: int, num_steps: int) -> Any:
    """Return what makes the workload of the first so many tasks, of equal rows.

    Args:
        shape: the shape of the backbone, for its words.
        tokens: tokens of a task's step.
        row_tokens: tokens of each row.
        num_steps: steps of each task.
    """
    from benchmarks.training.workloads import random_workload

    whole = random_workload(
        "sweep",
        ranks=[RANK] * NUM_TASKS,
        batch_sizes=[tokens // row_tokens] * NUM_TASKS,
        num_steps=num_steps,
        vocab_size=shape.vocab_size,
        length_of=lambda draw: row_tokens,
        learning_rate=5e-3,
    )
    return lambda num_tasks: replace(whole, tasks=whole.tasks[:num_tasks])
