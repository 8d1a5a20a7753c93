"""Everything that needs a GPU, in one call of at most 9 minutes: correctness, kernels, one layer, end to end.

    python -m benchmarks.gpu --name h200                  writes benchmarks/results/gpu-h200.json
    python -m benchmarks.gpu --sections device kernels    some sections only
    python -m benchmarks.gpu --dry-run                    any machine: all sections on tiny shapes, a minute
    TRITON_INTERPRET=1 python -m benchmarks.gpu --dry-run the same through the Triton kernels, in their interpreter

Each section has a share of the time; what does not fit is skipped with a note. The JSON is written after every row.
Backbones have random weights, made on the device: nothing is downloaded. The exit code is 1 where a section failed or
a check found something wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks import correctness_section
from benchmarks.gpu.report import Deadline, Report, Row, Section
from benchmarks.gpu.settings import Settings, free
from benchmarks.gpu.train import end_to_end_section, layer_section
from benchmarks.kernels import run as kernels
from benchmarks.kernels.contenders import CONTENDERS
from benchmarks.kernels.problem import Problem, Shape
from benchmarks.kernels.timing import copy_rate, interleaved_us
from benchmarks.paths import RESULTS

TOTAL_S = 500.0
"""Less than 9 minutes: a section ends after its last measurement, not at its deadline."""


def device_section(settings: Settings, deadline: Deadline) -> Iterator[Row]:
    """Versions, clocks, copy and product rates, and what beta = 1 costs."""
    yield "versions", _versions(settings.device)
    yield "copy", {"bytes_per_s": copy_rate(settings.device)}
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
    shape = Shape(width, (width,), num_tokens, 1, 8)
    problem = Problem(shape, settings.device, settings.dtype)
    out = torch.zeros(num_tokens, width, device=settings.device, dtype=settings.dtype)

    def without(call: int) -> None:
        x, _, (weight,) = problem.inputs(call)
        torch.mm(x, weight.t(), out=out)

    def with_beta(call: int) -> None:
        x, _, (weight,) = problem.inputs(call)
        torch.addmm(out, x, weight.t(), out=out)

    steps: dict[str, Callable[[int], Any]] = {"beta_0": without, "beta_1": with_beta}
    calls = len(problem.copies)
    times = interleaved_us(steps, settings.device, calls=calls, rounds=11)
    return {f"{name}_us": us for name, us in times.items()} | {
        "cost_percent": 100 * (times["beta_1"] / times["beta_0"] - 1)
    }


def kernel_section(settings: Settings, deadline: Deadline) -> Iterator[Row]:
    """The table of `benchmarks.kernels` for the main shapes, the most telling first."""
    rate = copy_rate(settings.device)
    groups, others = _kernel_shapes(settings)
    results = []
    for shape in [*groups, *others]:
        # Compilation takes the longest; without it a shape takes a few seconds.
        names = [name for name in CONTENDERS if name != "peft_compiled" or deadline.has(60) or settings.is_dry]
        if not deadline.has(5):
            yield "note", "time is up: the remaining shapes were not measured"
            return
        rounds = 1 if settings.is_dry else 7
        found = kernels.measure(shape, settings.device, settings.dtype, names=names, rounds=rounds, bytes_per_s=rate)
        print(kernels.describe(found), flush=True)
        found["is_right"] = not kernels.wrong_contenders(found)
        yield str(shape), found
        results.append(found)
        if len(results) == len(groups):
            yield "all linear layers of a block", kernels.layer_totals(results)
        free(settings.device)


def _kernel_shapes(settings: Settings) -> tuple[list[Shape], list[Shape]]:
    """Return the groups that make up one block of the model, and what else is measured."""
    if settings.is_dry:
        return list(kernels.DRY_SHAPES[:2]), []
    groups = [Shape(*layer, 4096, 8, 16) for layer in kernels.LLAMA_LAYER]
    more = [Shape(*kernels.LLAMA_O, t, 8, 16) for t in (1024, 16384)]
    more += [Shape(*kernels.LLAMA_QKV, 4096, g, 16) for g in (32, 1)]
    more += [Shape(*kernels.LLAMA_QKV, 4096, 8, r) for r in (64, 8)]
    more += [Shape(*kernels.LLAMA_QKV, t, 32, 64) for t in (4096, 16384, 1024)]
    more += [Shape(*layer, 4096, 8, 16) for layer in kernels.LLAMA_SINGLE]
    return groups, [*more, Shape(*kernels.LLAMA_O, 4096, 4, 16)]


SECTIONS: dict[str, tuple[float, Callable[[Settings, Deadline], Iterator[Row]]]] = {
    "device": (25.0, device_section),
    "correctness": (75.0, correctness_section),
    "kernels": (170.0, kernel_section),
    "layer": (50.0, layer_section),
    "end_to_end": (170.0, end_to_end_section),
}
"""For each section, its share of the time in seconds, and what is run."""


def main(arguments: list[str] | None = None) -> int:
    """Run the sections that the command line names; return 1 where something failed or is wrong."""
    options = _options(arguments)
    is_cuda = torch.cuda.is_available()
    if not is_cuda and not options.dry_run:
        raise SystemExit("no GPU here; allowed without one: --dry-run")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = Settings(torch.device("cuda" if is_cuda else "cpu"), options.dry_run, options.layers)
    name = options.name or (torch.cuda.get_device_name().split()[-1].lower() if is_cuda else "dry-run")
    path = options.output or RESULTS / f"gpu-{name}.json"
    head = {"command": sys.argv[1:], "is_dry_run": options.dry_run, "has_kernels": settings.has_kernels}
    report = Report(path, {**head, "seconds": options.seconds})
    if not settings.has_kernels:
        print("no GPU, and TRITON_INTERPRET is not 1: slices stand in for the Triton kernels", flush=True)
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


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--name", default=None, help="ends the result file's name; by default the device's own")
    add("--output", type=Path, help="JSON file to write; default benchmarks/results/gpu-<name>.json")
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    add("--layers", type=int, default=32, help="layers of the last section's backbone; 32 for Llama-3-8B")
    add("--seconds", type=float, default=TOTAL_S, help="seconds after which no measurement begins")
    add("--dry-run", action="store_true", help="tiny shapes in fp32, on any machine")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
