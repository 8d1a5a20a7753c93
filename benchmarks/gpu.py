"""Everything that needs a GPU, in one call of at most 9 minutes: correctness, kernels, one layer, end to end.

    python -m benchmarks.gpu --name h200                  writes benchmarks/results/gpu-h200.json
    python -m benchmarks.gpu --sections device kernels    some sections only
    python -m benchmarks.gpu --dry-run                    any machine: all sections on tiny shapes, a minute

Each section has a share of the time; what does not fit is skipped with a note. The JSON is written after every row.
Backbones have random weights, made on the device: nothing is downloaded. The exit code is 1 where a section failed or
a check found something wrong.

MFU = (4 P + 6 P_lora + 7 H C n L) T / seconds / peak: T real tokens, P frozen weights of the linear layers with the
head (forward and input gradients), P_lora trained weights of a token's task, n layers with H heads of C channels on
sequences of mean square length over mean length L (causal attention, its backward 2.5 forwards); peak 989.4 TFLOP/s,
the dense bf16 rate of the H100 and H200 SXM data sheets.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import kernels
from benchmarks.gpu_report import Deadline, Report, Row, Section
from benchmarks.kernels import interleaved_us, relative_error

PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12, "GH200": 989.4e12}
RESULTS = Path(__file__).resolve().parent / "results"
TOTAL_S = 500.0
"""Less than 9 minutes: a section ends after its last measurement, not at its deadline."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What depends on the machine.

    Attributes:
        device: where everything runs.
        is_dry: tiny shapes in fp32.
        num_layers: of the backbone of the last section.
    """

    device: torch.device
    is_dry: bool
    num_layers: int = 32

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and frozen weights."""
        return torch.float32 if self.is_dry else torch.bfloat16


# -------------------------------------------------------------- (a) the device


def device_section(settings: Settings, deadline: Deadline) -> Iterator[Row]:
    """Versions, clocks, copy and product rates, and what beta = 1 costs."""
    yield "versions", _versions(settings.device)
    yield "copy", {"bytes_per_s": kernels.copy_rate(settings.device)}
    size = 64 if settings.is_dry else 8192
    a, b, out = (torch.randn(size, size, device=settings.device, dtype=settings.dtype) for _ in range(3))
    us = interleaved_us({"mm": lambda _: torch.mm(a, b, out=out)}, settings.device, calls=4, rounds=5)["mm"]
    yield f"product of {size}", {"us": us, "flops_per_s": 2 * size**3 / us * 1e6}
    yield "clocks after it", {"nvidia-smi": _nvidia_smi()}
    for num_tokens in (16, 32) if settings.is_dry else (1024, 4096, 16384):
        if not deadline.has():
            yield "note", "time is up: not all beta = 1 products were timed"
            return
        yield f"beta of {num_tokens} rows", _beta_cost(settings, num_tokens, 64 if settings.is_dry else 4096)


def _versions(device: torch.device) -> dict[str, Any]:
    from importlib import metadata

    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "triton", "transformers", "peft", "accelerate", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "multiprocessors": properties.multi_processor_count,
        }
    return found


def _nvidia_smi() -> str:
    query = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not told: {type(error).__name__}"


def _beta_cost(settings: Settings, num_tokens: int, width: int) -> dict[str, float]:
    """Time `out = x W^T` against `out += x W^T`, with inputs that do not stay in the L2."""
    shape = kernels.Shape(width, width, num_tokens, 1, 8)
    problem = kernels.Problem(shape, settings.device, settings.dtype)
    out = torch.zeros(num_tokens, width, device=settings.device, dtype=settings.dtype)

    def without(call: int) -> None:
        x, _, weight = problem.inputs(call)
        torch.mm(x, weight.t(), out=out)

    def with_beta(call: int) -> None:
        x, _, weight = problem.inputs(call)
        torch.addmm(out, x, weight.t(), out=out)

    steps: dict[str, Callable[[int], Any]] = {"beta_0": without, "beta_1": with_beta}
    calls = len(problem.copies)
    times = interleaved_us(steps, settings.device, calls=calls, rounds=11)
    return {f"{name}_us": us for name, us in times.items()} | {
        "cost_percent": 100 * (times["beta_1"] / times["beta_0"] - 1)
    }


# ------------------------------------------------------------ (b) correctness


LORA_TASKS = ((37, 8, 0.0), (0, 16, 0.0), (150, 24, 0.1), (1, 3, 0.5), (620, 200, 0.0), (97, 64, 0.05), (9, 4, 0.0))
"""Length, rank and dropout; a segment that is empty, one of a single token, ranks 3 to 200."""


def correctness_section(settings: Settings, deadline: Deadline) -> Iterator[Row]:
    """Hold every kernel against float64, and each task together against the task alone."""
    widths = (40, 56) if settings.is_dry else (4096, 1024)
    tasks = [(min(length, 40), rank, p) for length, rank, p in LORA_TASKS] if settings.is_dry else list(LORA_TASKS)
    for dtype in (torch.float32,) if settings.is_dry else (torch.bfloat16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        together = _lora_pass(settings.device, tasks, widths, dtype, range(len(tasks)))
        found: dict[str, float] = dict.fromkeys(("y", "dx", "da", "db"), 0.0)
        for index, result in together.items():
            wanted = _lora_wanted(settings.device, tasks, widths, dtype, index)
            for name, value in result.items():
                found[name] = kernels.greater(relative_error(value, wanted[name]), found[name])
        limit = kernels.TOLERANCES[dtype]
        is_right = all(error <= limit for error in found.values())
        yield f"lora {kind}", {**found, "tolerance": limit, "is_right": is_right}
        differing = []
        companies = [[index] for index in range(len(tasks))] + [[2, 4, 6], [0, 3, 5]]
        for company in companies[:4:2] + companies[-1:] if settings.is_dry else companies:
            alone = _lora_pass(settings.device, tasks, widths, dtype, company)
            differing += [
                f"task {index} {name} among {company}"
                for index, result in alone.items()
                for name, value in result.items()
                if not torch.equal(value, together[index][name])
            ]
        yield f"lora {kind} co-location", {"differing": ", ".join(differing), "is_right": not differing}
    yield from _cross_entropy_rows(settings)
    for is_causal in (True, False):
        yield from _varlen_rows(settings, is_causal)


def _lora_task(
    device: torch.device, task: tuple[int, int, float], widths: tuple[int, int], dtype: torch.dtype, index: int
) -> dict[str, torch.Tensor]:
    """Return one task's own tensors, the same in any company."""
    length, rank, _ = task
    generator = torch.Generator().manual_seed(100 + index)
    sizes = {"x": (length, widths[0]), "dy": (length, widths[1]), "a": (rank, widths[0]), "bt": (rank, widths[1])}
    drawn = {name: torch.randn(*size, generator=generator) for name, size in sizes.items()}
    drawn["a"] /= widths[0] ** 0.5
    drawn["bt"] /= rank**0.5
    return {name: value.to(device, dtype) for name, value in drawn.items()}


def _lora_seeds(index: int) -> tuple[int, int]:
    from peft_mux.kernels import philox

    return philox.hash_seed("task", index, 7), philox.hash_seed("layers.0.q_proj")


def _lora_pass(
    device: torch.device, tasks: list[Any], widths: tuple[int, int], dtype: torch.dtype, company: Any
) -> dict[int, dict[str, torch.Tensor]]:
    """Return y, dx (adapters' part), da and db of each task of `company`, from memory that was NaN."""
    from peft_mux.kernels import grouped_lora_triton as lora
    from peft_mux.kernels.tables import RankTable, SegmentTables

    company = list(company)
    data = [_lora_task(device, tasks[index], widths, dtype, index) for index in company]
    lengths, ranks = [tasks[index][0] for index in company], [tasks[index][1] for index in company]
    first_rows = [sum(ranks[:place]) for place in range(len(ranks))]
    tables = SegmentTables(lengths, [_lora_seeds(index)[0] for index in company], device=device)
    scales, dropouts = [0.5 + index for index in company], [tasks[index][2] for index in company]
    table = RankTable(ranks, scales, first_rows, dropouts=dropouts, device=device)
    x, dy, a, bt = (torch.cat([one[name] for one in data]) for name in ("x", "dy", "a", "bt"))
    places = torch.cat([torch.arange(length, device=device) for length in lengths])

    def blank(like: torch.Tensor, columns: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.full((len(like), columns), float("nan"), device=device, dtype=kind)

    s, ds = blank(x, table.num_columns), blank(x, table.num_columns)
    y, dx = torch.full_like(dy, float("nan")), torch.full_like(x, float("nan"))
    da, db = blank(a, widths[0], torch.float32), blank(bt, widths[1], torch.float32)
    drop: dict[str, Any] = {"places": places, "module_seed": _lora_seeds(0)[1]}
    lora.shrink(x, a, s, tables, table, scaled=False, **drop)
    lora.expand(s, bt, y, tables, table, scaled=True)
    lora.shrink(dy, bt, ds, tables, table, scaled=True)
    lora.expand(ds, a, dx, tables, table, scaled=False, **drop)
    lora.wgrad(ds, x, da, tables, table, scaled=False, **drop)
    lora.wgrad(s, dy, db, tables, table, scaled=True)
    parts = [y.split(lengths), dx.split(lengths), da.split(ranks), db.split(ranks)]
    names = ("y", "dx", "da", "db")
    return {index: dict(zip(names, of_task, strict=True)) for index, *of_task in zip(company, *parts, strict=True)}


def _lora_wanted(
    device: torch.device, tasks: list[Any], widths: tuple[int, int], dtype: torch.dtype, index: int
) -> dict[str, torch.Tensor]:
    from peft_mux.kernels import philox

    x, dy, a, bt = (value.double() for value in _lora_task(device, tasks[index], widths, dtype, index).values())
    scale, probability = 0.5 + index, tasks[index][2]
    mask = torch.ones_like(x)
    if probability:
        step_seed, module_seed = _lora_seeds(index)
        keep = philox.keep_mask(step_seed ^ module_seed, torch.arange(len(x), device=device), x.shape[1], probability)
        mask = keep.double() * philox.keep_scale(probability)
    s, ds = (x * mask) @ a.t(), scale * (dy @ bt.t())
    return {"y": scale * (s @ bt), "dx": mask * (ds @ a), "da": ds.t() @ (x * mask), "db": scale * (s.t() @ dy)}


def _cross_entropy_rows(settings: Settings) -> Iterator[Row]:
    from peft_mux.kernels.cross_entropy_triton import cross_entropy_, row_stride

    num_rows, vocab_size = (5, 97) if settings.is_dry else (300, 128256)
    for dtype in (torch.float32,) if settings.is_dry else (torch.bfloat16, torch.float32):
        storage = 3 * torch.randn(num_rows, row_stride(vocab_size), device=settings.device)
        logits = storage.to(dtype)[:, :vocab_size]
        targets = torch.randint(vocab_size, (num_rows,), device=settings.device)
        leaf = logits.double().requires_grad_()
        wanted = F.cross_entropy(leaf, targets, reduction="none")
        (gradient,) = torch.autograd.grad(wanted.sum(), leaf)
        mine = logits.clone()
        losses = cross_entropy_(mine, targets)
        single = logits[2:3].clone()
        same = torch.equal(cross_entropy_(single, targets[2:3]), losses[2:3]) and torch.equal(single, mine[2:3])
        found = {"loss": relative_error(losses, wanted.detach()), "gradient": relative_error(mine, gradient)}
        is_right = found["loss"] <= 1e-5 and found["gradient"] <= kernels.TOLERANCES[dtype] and same
        kind = str(dtype).removeprefix("torch.")
        yield f"cross entropy {kind}", {**found, "is_same_alone": same, "is_right": is_right}


def _stand_in_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention sequence by sequence, where a dry run has no kernel: it tests the check, not the kernel."""
    return _per_sequence(q, k, v, cu_q.tolist(), window_size[1] == 0, scale)


def _per_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], is_causal: bool, scale: float
) -> torch.Tensor:
    parts = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        q_1, k_1, v_1 = (tensor[None, start:end].transpose(1, 2) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(q_1, k_1, v_1, is_causal=is_causal, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _varlen_rows(settings: Settings, is_causal: bool) -> Iterator[Row]:
    """Forward and backward against float64 per sequence; a sequence alone; a sequence of NaN beside others."""
    from peft_mux.modeling.varlen import as_kernel, varlen_attention, varlen_support

    name = f"varlen {'causal' if is_causal else 'both directions'}"
    heads, groups, channels = (4, 2, 8) if settings.is_dry else (32, 8, 128)
    lengths = [5, 1, 9, 3] if settings.is_dry else [300, 1, 17, 1024, 64, 129]
    reason = varlen_support(settings.device, settings.dtype, channels)
    if reason is not None and not settings.is_dry:
        yield name, {"skipped": reason, "is_right": False}
        return
    kernel = None if reason is None else as_kernel("torch", _stand_in_varlen)
    bounds = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    scale, num_tokens = channels**-0.5, bounds[-1]

    def draw(count: int) -> torch.Tensor:
        return torch.randn(num_tokens, count, channels, device=settings.device).to(settings.dtype)

    q, k, v, d_out = draw(heads), draw(groups), draw(groups), draw(heads)

    def attend(start: int, end: int, poisoned: slice | None = None) -> list[torch.Tensor]:
        leaves = [tensor[start:end].clone() for tensor in (q, k, v)]
        for leaf in leaves if poisoned is not None else ():
            leaf[poisoned] = float("nan")
        inside = [bound - start for bound in bounds if start <= bound <= end]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        cu = torch.tensor(inside, dtype=torch.int32, device=settings.device)
        longest = max(b - a for a, b in zip(inside[:-1], inside[1:], strict=True))
        options: dict[str, Any] = {"is_causal": is_causal, "window": None, "scaling": scale, "kernel": kernel}
        out = varlen_attention(leaves[0], leaves[1], leaves[2], cu, longest, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out[start:end])]

    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    out = _per_sequence(exact[0], exact[1], exact[2], bounds, is_causal, scale)
    wanted = [out.detach(), *torch.autograd.grad(out, exact, d_out.double())]
    parts = ("out", "dq", "dk", "dv")
    together = attend(0, num_tokens)
    found = {part: relative_error(a, b) for part, a, b in zip(parts, together, wanted, strict=True)}
    limit = kernels.TOLERANCES[settings.dtype]
    yield name, {**found, "tolerance": limit, "is_right": all(error <= limit for error in found.values())}

    differing = {}
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        for part, mine, theirs in zip(parts, attend(start, end), together, strict=True):
            differing[part] = differing.get(part, 0) + int(not torch.equal(mine, theirs[start:end]))
    # The backward adds up in an order that differs from run to run: only the forward has to keep its bits.
    yield (
        f"{name} co-location",
        {f"differing_{k}": n for k, n in differing.items()} | {"is_right": differing["out"] == 0},
    )

    bad = slice(bounds[2], bounds[3])
    poisoned = attend(0, num_tokens, bad)
    healthy = torch.ones(num_tokens, dtype=torch.bool, device=settings.device)
    healthy[bad] = False
    leaks = {part: int((~tensor[healthy].isfinite()).sum()) for part, tensor in zip(parts, poisoned, strict=True)}
    same = torch.equal(poisoned[0][healthy], together[0][healthy])
    is_right = not any(leaks.values()) and same and bool(poisoned[0][bad].isnan().all())
    yield (
        f"{name} NaN isolation",
        {f"leaks_{k}": n for k, n in leaks.items()}
        | {
            "is_same_out": same,
            "is_right": is_right,
        },
    )


# ---------------------------------------------------------------- (c) kernels


def kernel_section(settings: Settings, deadline: Deadline) -> Iterator[Row]:
    """The table of `benchmarks.kernels` for the main shapes, the most telling first."""
    rate = kernels.copy_rate(settings.device)
    for shape in _kernel_shapes(settings):
        # Compilation takes the longest; without it a shape takes a few seconds.
        names = [name for name in kernels.CONTENDERS if name != "peft_compiled" or deadline.has(60) or settings.is_dry]
        if not deadline.has(5):
            yield "note", "time is up: the remaining shapes were not measured"
            return
        rounds = 1 if settings.is_dry else 7
        found = kernels.measure(shape, settings.device, settings.dtype, names=names, rounds=rounds, bytes_per_s=rate)
        print(kernels.describe(found), flush=True)
        found["is_right"] = not kernels.wrong_contenders(found)
        numbers = dataclasses.astuple(shape)
        yield "{}->{} T{} G{} r{}".format(*numbers), found
        _free(settings.device)


def _kernel_shapes(settings: Settings) -> list[kernels.Shape]:
    if settings.is_dry:
        return list(kernels.DRY_SHAPES[1:2])
    main = [kernels.Shape(d, k, 4096, 8, 16) for d, k in kernels.LLAMA_LAYERS]
    main += [kernels.Shape(4096, 4096, t, 8, 16) for t in (1024, 16384)]
    main += [kernels.Shape(4096, 4096, 4096, g, 16) for g in (32, 1, 4)]
    main += [kernels.Shape(4096, 4096, 4096, 8, r) for r in (64, 8)]
    return main + [kernels.Shape(4096, 4096, t, 32, 64) for t in (4096, 16384, 1024)]


# ------------------------------------------------- (d) a layer, (e) end to end


def layer_section(settings: Settings, deadline: Deadline) -> Iterator[Row]:
    """One decoder layer with a head of 512 entries, forward, backward and updates."""
    from benchmarks.workloads import ModelSpec

    spec = ModelSpec(32, 1, 48, 4, 64) if settings.is_dry else ModelSpec(4096, 1, 14336, 32, 512)
    backbone = llama(settings, spec)
    for mix in ("uniform", "nonuniform"):
        yield from _compare(settings, deadline, backbone, spec, mix, 2 if settings.is_dry else 8)


def end_to_end_section(settings: Settings, deadline: Deadline) -> Iterator[Row]:
    """The whole backbone: both mixes of 8 tasks, then other numbers of tasks."""
    from benchmarks.workloads import ModelSpec

    spec = ModelSpec(32, 2, 48, 4, 64) if settings.is_dry else ModelSpec(4096, settings.num_layers, 14336, 32, 128256)
    cases = [("uniform", 8), ("nonuniform", 8), ("uniform", 32), ("uniform", 1), ("nonuniform", 32), ("uniform", 16)]
    backbone = llama(settings, spec)
    for mix, num_tasks in [("nonuniform", 3)] if settings.is_dry else [*cases, ("uniform", 4)]:
        yield from _compare(settings, deadline, backbone, spec, mix, num_tasks)


def _compare(
    settings: Settings, deadline: Deadline, backbone: Any, spec: Any, mix: str, num_tasks: int
) -> Iterator[Row]:
    """Train the same rows with every contender on one backbone, which each leaves as it was."""
    from benchmarks.workloads import make_workload

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
        _free(settings.device)
        if settings.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(settings.device)
        try:
            steps_s, losses = run(settings, backbone, workload)
        except torch.cuda.OutOfMemoryError as error:
            yield f"{case}: {name}", {"skipped": str(error).splitlines()[0]}
            yield f"{case}: note", "what is attached to the backbone is unknown now; the other contenders were left out"
            raise
        # The first steps compile, allocate and make optimizer state.
        warm_up = 1 if settings.is_dry else 2
        rates = [count / s for count, s in zip(num_tokens[warm_up:], steps_s[warm_up:], strict=True)]
        row: dict[str, Any] = {"tokens_per_s": statistics.median(rates), "steps_s": steps_s, "losses": losses}
        if settings.device.type == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated(settings.device)
        row |= _judged(settings, row, flops, measured)
        measured[name] = row
        yield f"{case}: {name}", row


def _judged(
    settings: Settings, row: dict[str, Any], flops: float, measured: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return MFU, share of the floor, and whether the losses of two steps are those of PEFT.

    The second step is the first that an update has changed; later ones drift apart in bf16. The floor has no
    adapters, so that only its first step is held against that of PEFT, which comes after it.
    """
    found: dict[str, Any] = {"mfu": None, "share_of_floor": 1.0 if not measured else None}
    gpu = torch.cuda.get_device_name(settings.device).split() if settings.device.type == "cuda" else []
    peak = next((PEAK_FLOPS[word] for word in gpu if word in PEAK_FLOPS), None)
    if peak is not None:
        found |= {"mfu": flops * row["tokens_per_s"] / peak, "peak_flops_per_s": peak}
    if "floor" in measured:
        found["share_of_floor"] = row["tokens_per_s"] / measured["floor"]["tokens_per_s"]
    reference = measured.get("hf") or measured.get("floor")
    if reference:
        found["loss_difference"] = loss_difference(row["losses"], reference["losses"])
        found["is_right"] = found["loss_difference"] <= (1e-4 if settings.is_dry else 2e-2)
    return found


def loss_difference(losses: list[list[float]], reference: list[list[float]]) -> float:
    """Return the greatest relative difference over tasks and the first two steps that both have; NaN stays NaN."""
    worst = 0.0
    for own, wanted in zip(losses[:2], reference[:2], strict=False):
        for value, other in zip(own, wanted, strict=True):
            worst = kernels.greater(abs(value - other) / abs(other), worst)
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
    _free(settings.device)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(settings.dtype)
    try:
        with settings.device:
            return LlamaForCausalLM(config).requires_grad_(False).train()
    finally:
        torch.set_default_dtype(before)


Trained = tuple[list[float], list[list[float]]]
"""Seconds of each step (all tasks), and the losses of all tasks at each step; the first alone from the floor."""


def _precision(settings: Settings) -> contextlib.AbstractContextManager[Any]:
    """Return what Trainer does for bf16: adapters in fp32, products in bf16."""
    if settings.is_dry:
        return contextlib.nullcontext()
    return torch.autocast(settings.device.type, dtype=torch.bfloat16)


def train_floor(settings: Settings, backbone: Any, workload: Any) -> Trained:
    """The packed tokens through the frozen backbone, forward and input gradients; attention in one call on a GPU."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from benchmarks.baselines import floor
    from peft_mux.kernels.linear_cross_entropy import Head, linear_cross_entropy

    AttentionInterface.register("benchmark_gpu_floor", _floor_attention)
    AttentionMaskInterface.register("benchmark_gpu_floor", lambda *args, **kwargs: None)
    before = backbone.config._attn_implementation
    backbone.set_attn_implementation("benchmark_gpu_floor")
    packed = [[_moved(part, settings) for part in floor.pack(workload.tasks, s, 16384)]
              for s in range(workload.num_steps)]  # fmt: skip
    losses = torch.zeros(len(workload.tasks), device=settings.device)
    clock = _Clock(settings.device)
    for step in range(workload.num_steps):
        for part, bounds in packed[step]:
            embeddings = backbone.get_input_embeddings()(part.input_ids).requires_grad_()
            hidden = backbone.model(
                inputs_embeds=embeddings,
                position_ids=part.position_ids,
                use_cache=False,
                floor_rectangles=part.rectangles,
                floor_bounds=bounds,
            ).last_hidden_state[0]
            head = Head(backbone.lm_head.weight)
            terms = linear_cross_entropy(hidden.index_select(0, part.target_rows), head, part.targets) * part.weights
            terms.sum().backward()
            if step == 0:
                losses.index_add_(0, part.task_of_target, terms.detach().float())
        clock.tick()
    backbone.set_attn_implementation(before)
    return clock.steps_s, [losses.tolist()]


def _moved(part: Any, settings: Settings) -> tuple[Any, torch.Tensor]:
    """Return the packed tokens on the device, and where each sequence begins and the last one ends."""
    moved = {
        field.name: value.to(settings.device)
        for field in dataclasses.fields(part)
        if isinstance(value := getattr(part, field.name), torch.Tensor)
    }
    bounds = [0]
    for count, length in part.rectangles:
        for _ in range(count):
            bounds.append(bounds[-1] + length)
    return dataclasses.replace(part, **moved), torch.tensor(bounds, dtype=torch.int32, device=settings.device)


def _floor_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
    floor_rectangles: Any = (), floor_bounds: Any = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    from benchmarks.baselines.floor import rectangle_attention
    from peft_mux.modeling.varlen import varlen_attention, varlen_support

    scale: float = query.shape[-1] ** -0.5 if scaling is None else scaling
    if varlen_support(query.device, query.dtype, query.shape[-1]) is not None:
        return rectangle_attention(module, query, key, value, attention_mask, scale, floor_rectangles)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    longest = max(length for _, length in floor_rectangles)
    out = varlen_attention(q, k, v, floor_bounds, longest, is_causal=True, window=None, scaling=scale)
    return out[None], None


def train_mux(settings: Settings, backbone: Any, workload: Any) -> Trained:
    """The model and executor of the package, with one AdamW a task over its slab."""
    import numpy as np

    from peft_mux.data.batch import TaskBatch, TokenSequence
    from peft_mux.data.collator import ChunkPackingCollator
    from peft_mux.engine.executor import Executor
    from peft_mux.engine.work import StepWork
    from peft_mux.modeling.layers import detach
    from peft_mux.modeling.model import MultiTaskPeftModel

    def batch(task: Any, step: int) -> TaskBatch:
        rows = [
            TokenSequence(np.asarray(row["input_ids"], np.int64), np.asarray(row["labels"], np.int64), index)
            for index, row in enumerate(task.batches[step])
        ]
        return TaskBatch(task.name, step, task.seed, tuple(rows))

    configs = {task.name: task.lora_config() for task in workload.tasks}
    seeds = {task.name: task.seed for task in workload.tasks}
    model = MultiTaskPeftModel(backbone, configs, seeds=seeds, verify=False)
    model.train()
    optimizers = {}
    for name in configs:
        model.task_slab(name).bind_gradients()
        optimizers[name] = _adamw([page.values for page in model.task_slab(name).pages], workload)
    executor, collator, losses = Executor(model, bf16=not settings.is_dry), ChunkPackingCollator(), []
    clock = _Clock(settings.device)
    for step in range(workload.num_steps):
        batches = [batch(task, step) for task in workload.tasks]
        streams = tuple(collator.micro_batches(batches, max_tokens=16384))
        work = StepWork(tuple(configs), streams, {item.task: item.num_tokens for item in batches})
        result = executor.run(work)
        losses.append(torch.stack([result.losses[name] for name in configs]).tolist())
        for name, optimizer in optimizers.items():
            pages = [page.values for page in model.task_slab(name).pages]
            torch.nn.utils.clip_grad_norm_(pages, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        clock.tick()
    detach(backbone)
    return clock.steps_s, losses


def train_hf(settings: Settings, backbone: Any, workload: Any) -> Trained:
    """PEFT, one task after the other, batches padded to their longest row."""
    from peft import get_peft_model

    totals = [0.0] * workload.num_steps
    losses: list[list[float]] = [[] for _ in totals]
    for task in workload.tasks:
        torch.manual_seed(task.seed)
        model = get_peft_model(backbone, task.lora_config())
        model.train()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = _adamw(parameters, workload)
        clock = _Clock(settings.device)
        for step, rows in enumerate(task.batches):
            batch = _padded(rows, settings.device)
            with _precision(settings):
                loss = model(**batch).loss
            loss.backward()
            losses[step].append(loss.detach().item())
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()
        totals = [total + own for total, own in zip(totals, clock.steps_s, strict=True)]
        backbone = model.unload()
        vars(backbone).pop("peft_config", None)
    return totals, losses


def train_padded(settings: Settings, backbone: Any, workload: Any) -> Trained:
    """All tasks in one padded batch with LoRA by `bmm`."""
    from benchmarks.baselines import padded_joint

    plain = {name: module for name, module in backbone.named_modules() if isinstance(module, torch.nn.Linear)}
    model = padded_joint.attach_batched_lora(backbone, workload)
    vars(model).pop("peft_config", None)
    wrapped = [item for item in model.named_modules() if isinstance(item[1], padded_joint.BatchedLoraLinear)]
    for _, module in wrapped:
        module.to(settings.device)
        module.scaling_N11 = module.scaling_N11.to(settings.device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = _adamw(parameters, workload), []
    clock = _Clock(settings.device)
    for batches in zip(*(task.batches for task in workload.tasks), strict=True):
        batch = _padded([row for rows in batches for row in rows], settings.device)
        with _precision(settings):
            losses_N = padded_joint.task_losses(model, batch, len(batches))
        losses_N.sum().backward()
        losses.append(losses_N.tolist())
        padded_joint.clip_per_task(parameters, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    for name, _ in wrapped:
        owner, _, child = name.rpartition(".")
        setattr(backbone.get_submodule(owner), child, plain[name])
    return clock.steps_s, losses


TRAINERS: dict[str, Callable[[Settings, Any, Any], Trained]] = {
    "floor": train_floor,
    "hf": train_hf,
    "mux": train_mux,
    "padded": train_padded,
}


def _padded(rows: Any, device: torch.device) -> dict[str, torch.Tensor]:
    from benchmarks.baselines.hf_trainer import PadToLongest

    return {name: tensor.to(device) for name, tensor in PadToLongest()(list(rows)).items()}


def _adamw(parameters: list[Any], workload: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=workload.learning_rate, weight_decay=0.0, fused=True)


class _Clock:
    """Seconds of steps, each with all of its work on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps_s = device, []
        self._wait()
        self._last_s = time.perf_counter()

    def tick(self) -> None:
        self._wait()
        now_s = time.perf_counter()
        self.steps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _free(device: torch.device) -> None:
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------ main


SECTIONS: dict[str, tuple[float, Callable[[Settings, Deadline], Iterator[Row]]]] = {
    "device": (25.0, device_section),
    "correctness": (75.0, correctness_section),
    "kernels": (170.0, kernel_section),
    "layer": (50.0, layer_section),
    "end_to_end": (170.0, end_to_end_section),
}
"""Share of the time in seconds, and what is run."""


def main(arguments: list[str] | None = None) -> int:
    """Run the sections that the command line names; return 1 where something failed or is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--name", default=None, help="of the result file; by default that of the device")
    add("--output", type=Path, help="JSON file to write; default benchmarks/results/gpu-<name>.json")
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add("--layers", type=int, default=32, help="of the backbone of the last section; 32 for Llama-3-8B")
    add("--seconds", type=float, default=TOTAL_S, help="after which no measurement begins")
    add("--dry-run", action="store_true", help="tiny shapes in fp32, on any machine")
    options = parser.parse_args(arguments)
    is_cuda = torch.cuda.is_available()
    if not is_cuda and not options.dry_run:
        raise SystemExit("no GPU here; allowed without one: --dry-run")
    if not is_cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = Settings(torch.device("cuda" if is_cuda else "cpu"), options.dry_run, options.layers)
    name = options.name or (torch.cuda.get_device_name().split()[-1].lower() if is_cuda else "dry-run")
    path = options.output or RESULTS / f"gpu-{name}.json"
    report = Report(path, {"command": sys.argv, "is_dry_run": options.dry_run, "seconds": options.seconds})
    scale = options.seconds / TOTAL_S
    chosen = []
    for section in options.sections:
        seconds, run = SECTIONS[section]
        chosen.append(Section(section, seconds * scale, lambda deadline, run=run: run(settings, deadline)))
    report.run(chosen, options.seconds)
    for fault in report.faults():
        print(f"FAULT {fault}", flush=True)
    print(f"\nwritten to {path}")
    return 1 if report.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
