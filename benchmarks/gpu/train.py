"""The sections `layer` and `end_to_end` of `benchmarks.gpu`: training steps of all contenders, side by side.

MFU = (4 P + 6 P_lora + 7 H C n L) T / seconds / peak: T real tokens, P frozen weights of the linear layers with the
head (forward and input gradients), P_lora trained weights of a token's task, n layers with H heads of C channels on
sequences of mean square length over mean length L (causal attention, its backward 2.5 forwards); peak 989.4 TFLOP/s,
the dense bf16 rate of the H100 and H200 SXM data sheets.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.report import Deadline, Row
from benchmarks.gpu.settings import Settings, free
from benchmarks.gpu.trainers import TRAINERS, Trained
from benchmarks.kernels.problem import greater

PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12, "GH200": 989.4e12}


def layer_section(settings: Settings, deadline: Deadline) -> Iterator[Row]:
    """One decoder layer with a head of 512 entries, forward, backward and updates."""
    from benchmarks.training.workloads import ModelSpec

    spec = ModelSpec(32, 1, 48, 4, 64) if settings.is_dry else ModelSpec(4096, 1, 14336, 32, 512)
    backbone = llama(settings, spec)
    for mix in ("uniform",) if settings.is_dry else ("uniform", "nonuniform"):
        yield from _compare(settings, deadline, backbone, spec, mix, 2 if settings.is_dry else 8)


def end_to_end_section(settings: Settings, deadline: Deadline) -> Iterator[Row]:
    """The whole backbone: both mixes of 8 tasks, then other numbers of tasks."""
    from benchmarks.training.workloads import ModelSpec

    spec = ModelSpec(32, 2, 48, 4, 64) if settings.is_dry else ModelSpec(4096, settings.num_layers, 14336, 32, 128256)
    cases = [("uniform", 8), ("nonuniform", 8), ("uniform", 32), ("uniform", 1), ("nonuniform", 32), ("uniform", 16)]
    backbone = llama(settings, spec)
    for mix, num_tasks in [("nonuniform", 3)] if settings.is_dry else [*cases, ("uniform", 4)]:
        yield from _compare(settings, deadline, backbone, spec, mix, num_tasks)


def _compare(
    settings: Settings, deadline: Deadline, backbone: Any, spec: Any, mix: str, num_tasks: int
) -> Iterator[Row]:
    """Train the same rows with every contender on one backbone, which each leaves as it was."""
    from benchmarks.training.workloads import make_workload

    num_steps = 2 if settings.is_dry else 5
    workload = make_workload(mix, num_tasks=num_tasks, num_steps=num_steps, vocab_size=spec.vocab_size)
    num_tokens = [sum(len(r["input_ids"]) for t in workload.tasks for r in t.batches[s]) for s in range(num_steps)]
    flops = flops_per_token(backbone, workload)
    case = f"{spec.num_layers} layers, {num_tasks} {mix}"
    yield case, {"tokens_per_step": num_tokens, "lengths": workload.length_source, "flops_per_token": flops}
    measured: dict[str, dict[str, Any]] = {}
    for name, run in TRAINERS.items():
        # Adapters are injected layer by layer and task by task; the passes come on top.
        if not settings.is_dry and not deadline.has(5 + 0.02 * num_tasks * spec.num_layers):
            yield f"{case}: {name}", {"skipped": "the time budget is spent"}
            continue
        free(settings.device)
        if settings.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(settings.device)
        try:
            trained = run(settings, backbone, workload)
        except torch.cuda.OutOfMemoryError as error:
            yield f"{case}: {name}", {"skipped": str(error).splitlines()[0]}
            yield f"{case}: note", "what is attached to the backbone is unknown now; the other contenders were left out"
            raise
        row = _rates(settings, trained, num_tokens)
        row |= judged(settings, row, flops, measured)
        measured[name] = row
        yield f"{case}: {name}", row


def _rates(settings: Settings, trained: Trained, num_tokens: list[int]) -> dict[str, Any]:
    """Return what was measured as plain values."""
    # The first steps compile, allocate and make optimizer state.
    warm_up = 1 if settings.is_dry else 2
    rates = [count / s for count, s in zip(num_tokens[warm_up:], trained.steps_s[warm_up:], strict=True)]
    row: dict[str, Any] = {"tokens_per_s": statistics.median(rates)}
    row |= {"steps_s": trained.steps_s, "losses": trained.losses}
    if trained.calls is not None:
        row |= {"path": path_of(trained.calls), "group_calls": trained.calls}
    if settings.device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(settings.device)
    return row


def path_of(calls: dict[str, int]) -> str:
    """Return which path computed the adapters: "kernels", "slices", or "both"; "none" where nobody did."""
    taken = [name for name in ("kernels", "slices") if calls.get(name)]
    return "both" if len(taken) == 2 else (taken or ["none"])[0]


def judged(
    settings: Settings, row: dict[str, Any], flops: float, measured: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return MFU, share of the floor, and whether the row is right.

    That is: the losses of two steps are those of PEFT, and ours ran through the kernels where there are any. The second
    step is the first that an update has changed; later ones drift apart in bf16. The floor has no adapters, so that
    only its first step is held against that of PEFT, which comes after it.
    """
    found: dict[str, Any] = {"mfu": None, "share_of_floor": 1.0 if not measured else None}
    peak = _peak_flops(settings.device)
    if peak is not None:
        found |= {"mfu": flops * row["tokens_per_s"] / peak, "peak_flops_per_s": peak}
    if "floor" in measured:
        found["share_of_floor"] = row["tokens_per_s"] / measured["floor"]["tokens_per_s"]
    verdicts = []
    reference = measured.get("hf") or measured.get("floor")
    if reference:
        found["loss_difference"] = loss_difference(row["losses"], reference["losses"])
        verdicts.append(found["loss_difference"] <= (1e-4 if settings.is_dry else 2e-2))
    if "path" in row:
        wants_kernels = settings.has_kernels or settings.device.type == "cuda"
        verdicts.append(row["path"] == ("kernels" if wants_kernels else "slices"))
    return found | ({"is_right": all(verdicts)} if verdicts else {})


def _peak_flops(device: torch.device) -> float | None:
    words = torch.cuda.get_device_name(device).split() if device.type == "cuda" else []
    return next((PEAK_FLOPS[word] for word in words if word in PEAK_FLOPS), None)


def loss_difference(losses: list[list[float]], reference: list[list[float]]) -> float:
    """Return the greatest relative difference over tasks and the first two steps that both have; NaN stays NaN."""
    worst = 0.0
    for own, wanted in zip(losses[:2], reference[:2], strict=False):
        for value, other in zip(own, wanted, strict=True):
            worst = greater(abs(value - other) / abs(other), worst)
    return worst


def flops_per_token(backbone: Any, workload: Any) -> float:
    """Return what a step has to compute for a real token, averaged; the formula stands at the top of the file."""
    layers = [module for module in backbone.modules() if isinstance(module, torch.nn.Linear)]
    frozen = sum(layer.weight.numel() for layer in layers)
    widths = sum(layer.in_features + layer.out_features for layer in layers if layer is not backbone.lm_head)
    lengths = [(len(row["input_ids"]), task.rank) for task in workload.tasks for row in task.rows]
    num_tokens = sum(length for length, _ in lengths)
    lora = sum(length * rank for length, rank in lengths) / num_tokens * widths
    square = sum(length**2 for length, _ in lengths) / num_tokens
    return 4 * frozen + 6 * lora + 7 * backbone.config.hidden_size * backbone.config.num_hidden_layers * square


def llama(settings: Settings, spec: Any) -> Any:
    """Return a Llama of random weights on the device, with 8 key-value heads for 32 heads as Llama-3-8B has them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=max(1, spec.num_heads // 4),
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_tokens,
        pad_token_id=None,
        use_cache=False,
    )
    free(settings.device)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(settings.dtype)
    try:
        with settings.device:
            return LlamaForCausalLM(config).requires_grad_(False).train()
    finally:
        torch.set_default_dtype(before)
