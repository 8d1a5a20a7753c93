"""How the contenders of `benchmarks.gpu` are run and judged, those of the parts `default run` and `gain`.

MFU = (4 P + 6 P_lora + 7 H C n L) T / seconds / peak: T real tokens, P frozen weights of the linear layers with the
head (forward and input gradients), P_lora trained weights of a token's task, n layers with H heads of C channels on
sequences of mean square length over mean length L (causal attention, its backward 2.5 forwards); peak 989.4 TFLOP/s,
the dense bf16 rate of the H100 and H200 SXM data sheets.

A contender that needs more memory than there is, by `roofline.peak_bytes`, is left out with that number; one that runs
out of memory nevertheless, or fails, is reported, and the next one gets a new backbone.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu import roofline
from benchmarks.gpu.backbones import Backbones
from benchmarks.gpu.roofline import Backbone
from benchmarks.gpu.settings import Settings, free
from benchmarks.gpu.trainers import TRAINERS, Trained
from benchmarks.kernels.problem import greater

MOST_PASS_TOKENS = 16384


def train_safely(
    settings: Settings, backbones: Backbones, shape: Backbone, contender: str, workload: Any, pass_tokens: int
) -> dict[str, Any]:
    """Return what a contender measured, or why it could not; then what was attached to the backbone is gone with it."""
    free(settings.device)
    if settings.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(settings.device)
    try:
        row = plain_values(settings, TRAINERS[contender](settings, backbones.of(shape), workload, pass_tokens))
    except Exception as error:  # the others are still measured
        first_line = (str(error).splitlines() or [""])[0][:300]
        if isinstance(error, torch.cuda.OutOfMemoryError):
            row = {"skipped": f"out of memory: {first_line}"}
        else:
            row = {"failed": f"{type(error).__name__}: {first_line}", "is_right": False}
    if "steps_s" not in row:
        # Here, where the error is gone, and with it the frames that hold tensors.
        backbones.drop()
    return row


def too_large(settings: Settings, shape: Backbone, contender: str, num_tokens: int, trained_weights: int) -> str | None:
    """Return why a contender cannot have the memory that it is computed to need for so many tokens, or `None`."""
    if settings.device_bytes is None:
        return None
    needed = roofline.peak_bytes(shape, contender, num_tokens, trained_weights)
    allowed = roofline.USABLE_SHARE * settings.device_bytes
    if needed <= allowed:
        return None
    return f"needs some {needed / 1e9:.0f} GB for {num_tokens} tokens at once, of {allowed / 1e9:.0f} GB"


def plain_values(settings: Settings, trained: Trained) -> dict[str, Any]:
    """Return what was measured as plain values."""
    row: dict[str, Any] = {"steps_s": trained.steps_s, "losses": trained.losses}
    if trained.calls is not None:
        row |= {"path": path_of(trained.calls), "group_calls": trained.calls}
    if trained.num_captures is not None:
        row["num_captures"] = trained.num_captures
    if settings.device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(settings.device)
    return row


def path_of(calls: dict[str, int]) -> str:
    """Return which path computed the adapters: "kernels", "slices", or "both"; "none" if neither did."""
    taken = [name for name in ("kernels", "slices") if calls.get(name)]
    return "both" if len(taken) == 2 else (taken or ["none"])[0]


def path_verdicts(settings: Settings, row: dict[str, Any]) -> list[bool]:
    """Return whether kernels and graphs served where they can."""
    verdicts = []
    if "path" in row:
        verdicts.append(row["path"] == ("kernels" if settings.wants_kernels else "slices"))
    if "num_captures" in row:
        verdicts.append((row["num_captures"] > 0) == settings.wants_kernels)
    return verdicts


def loss_tolerance(settings: Settings) -> float:
    """Return by how much losses may differ, relative, between two ways to compute them."""
    return 1e-4 if settings.is_rehearsal else 2e-2


def peak_flops(device: torch.device) -> float | None:
    """Return the rate that MFU is compared with, where it is known."""
    words = torch.cuda.get_device_name(device).split() if device.type == "cuda" else []
    return next((roofline.PEAK_FLOPS[word] for word in words if word in roofline.PEAK_FLOPS), None)


def loss_difference(losses: list[list[float]], reference: list[list[float]]) -> float:
    """Return the greatest relative difference over tasks and the first two steps that both have; NaN stays NaN."""
    worst = 0.0
    for own, wanted in zip(losses[:2], reference[:2], strict=False):
        for value, other in zip(own, wanted, strict=True):
            worst = greater(abs(value - other) / abs(other), worst)
    return worst


def flops_per_token(shape: Backbone, workload: Any) -> float:
    """Return what a step has to compute for a real token, averaged; the formula is at the top of the file."""
    lengths = [(len(row["input_ids"]), task.rank) for task in workload.tasks for row in task.rows]
    num_tokens = sum(length for length, _ in lengths)
    rank = sum(length * rank for length, rank in lengths) / num_tokens
    square = sum(length**2 for length, _ in lengths) / num_tokens
    return shape.flops_per_token(square, rank)
