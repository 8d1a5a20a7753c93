"""Everything that needs a GPU, in two calls of at most 8 minutes: right or wrong and whole runs; then fp32 and tables.

    python -m benchmarks.gpu --name h200                  writes benchmarks/results/gpu-h200.json
    python -m benchmarks.gpu --call 2 --name h200-more    the second call
    python -m benchmarks.gpu --parts attention gain       parts whose names begin so
    python -m benchmarks.gpu --list                       all parts with their computed seconds; needs no GPU
    python -m benchmarks.gpu --rehearse                   any machine: all parts of both on tiny shapes, half a minute
    TRITON_INTERPRET=1 python -m benchmarks.gpu --rehearse the same through the Triton kernels, in their interpreter

Parts run in the order of their value, and one whose computed time is more than what is left is skipped. The JSON is
written after every row. Backbones have random weights, made on the device: nothing is downloaded. The exit code is 1
where a part failed, or a check found something wrong or was left out.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

from benchmarks.gpu import roofline
from benchmarks.gpu.backbones import Backbones
from benchmarks.gpu.device import versions
from benchmarks.gpu.parts import chosen, plan
from benchmarks.gpu.profiler import TRACES_VARIABLE
from benchmarks.gpu.report import Part, Report, add_options
from benchmarks.gpu.settings import Settings
from benchmarks.paths import RESULTS

MINUTES = 8.0


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that the command line names; return 1 where something failed or is wrong."""
    options = _options(arguments)
    is_cuda = torch.cuda.is_available()
    settings = Settings(torch.device("cuda" if is_cuda else "cpu"), options.rehearse, options.layers)
    backbones = Backbones(settings)
    planned = plan(settings, backbones)
    if options.list:
        print(listed(planned))
        return 0
    if not is_cuda and not options.rehearse:
        raise SystemExit("a GPU is needed, except for --rehearse and --list")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.traces:
        os.environ[TRACES_VARIABLE] = str(options.traces)
    try:
        parts = chosen(planned, options.parts, None if options.rehearse else options.call)
    except ValueError as error:
        raise SystemExit(f"--parts: {error}") from None
    name = options.name or (torch.cuda.get_device_name().split()[-1].lower() if is_cuda else "rehearsal")
    path = options.output or RESULTS / f"gpu-{name}.json"
    head = {
        "command": sys.argv[1:],
        "is_rehearsal": options.rehearse,
        "has_kernels": settings.has_kernels,
        "versions": versions(settings.device),
        "minutes": options.minutes,
    }
    if not settings.has_kernels:
        print("no GPU, and TRITON_INTERPRET is not 1: slices replace the Triton kernels", flush=True)
    report = Report(path, head, after_failure=lambda: recovered(settings, backbones))
    report.run(parts, 60 * options.minutes - (0 if options.rehearse else roofline.START_S))
    return report.print_faults()


def listed(planned: list[Part]) -> str:
    """Return the parts with their computed seconds, one a line."""
    lines = []
    for call in sorted({part.call for part in planned}):
        own = [part for part in planned if part.call == call]
        total_s = roofline.START_S + sum(part.estimated_s for part in own)
        lines += [f"{part.estimated_s:6.0f} s  {part.name}" for part in own]
        lines.append(f"{total_s:6.0f} s  call {call}, {roofline.START_S:.0f} s of starting included")
    return "\n".join(lines)


def recovered(settings: Settings, backbones: Backbones) -> str | None:
    """Free what a part that failed has held; return why nothing can run on the device any more, or `None`."""
    try:
        backbones.drop()
        if settings.device.type == "cuda":
            torch.cuda.synchronize(settings.device)
    except RuntimeError as error:
        # An illegal access leaves the process without its device; run what is left by name, in a new one.
        return f"the device is lost to this process ({str(error).splitlines()[0][:200]}); run it by --parts"
    return None


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    add_options(parser, MINUTES)
    parser.add_argument("--parts", nargs="+", help="beginnings of the names of the parts to run; by default all")
    parser.add_argument(
        "--call", type=int, choices=(1, 2), default=1, help="which of the two calls; by default the first"
    )
    parser.add_argument("--layers", type=int, default=32, help="layers of `default run`; 32 for Llama-3-8B")
    return parser.parse_args(arguments)
