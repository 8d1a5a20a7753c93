"""One contender alone in a fresh process: its peak memory, and its first losses.

The losses show that contenders do equal work; `benchmarks.training.throughput` compares them. The memory is

    highest resident set during the run  -  resident set before it,

where "before" is after all imports and a complete run on a tiny model, so that it holds the libraries, the
rows and nothing else. The highest resident set is the kernel's own count (`VmHWM`, set back before the run
where the kernel allows it). It is not taken from `getrusage`: on Linux `ru_maxrss` of a child starts at the
size of the process that started it. Where there is no /proc, `ru_maxrss` is what is left.

It is resident memory as the operating system sees it: what the allocator keeps back counts as well.

Run by `benchmarks.training.throughput`; by hand: `python -m benchmarks.training.audit hf "$CASE_AS_JSON" NUM_THREADS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.harness import hand_over, in_own_process
from benchmarks.training.baselines import CONTENDERS, contender
from benchmarks.training.workloads import Case, ModelSpec

T = TypeVar("T")
NUM_STEPS = 2
"""The second step is the first that holds activations and optimizer state, and that adapters change."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What a contender took and computed.

    Attributes:
        peak_bytes: bytes that the run took at most, see above.
        backbone_bytes: bytes of the weights of one backbone.
        adapter_state_bytes: bytes of weights, gradients and the two moments of AdamW of each task's adapter.
        losses: for each task, the loss at each step.
    """

    peak_bytes: int
    backbone_bytes: int
    adapter_state_bytes: list[int]
    losses: dict[str, list[float]]

    @property
    def replicated_bytes(self) -> int:
        """Memory if every task kept its own backbone and adapter state at once, as in M Fig. 17; computed.

        The measured peak of training one task after the other, plus a backbone for each further task and the
        adapter states that the peak does not hold (all but the largest). Activations are counted once, so it
        is a lower bound.
        """
        further_states = sum(self.adapter_state_bytes) - max(self.adapter_state_bytes)
        return self.peak_bytes + (len(self.adapter_state_bytes) - 1) * self.backbone_bytes + further_states


def audit(name: str, case: Case, num_threads: int) -> Audit:
    """Run a contender for its first steps in a fresh process.

    Args:
        name: name of the contender.
        case: what to train on; only the first steps are run.
        num_threads: number of torch's threads.

    Raises:
        RuntimeError: with the end of its output, if the process fails.
    """
    case = dataclasses.replace(case, num_steps=NUM_STEPS)
    figures = in_own_process("benchmarks.training.audit", name, case.to_json(), str(num_threads))
    return Audit(**figures)


def run_audit(name: str, case: Case) -> Audit:
    """Run a contender for its first steps in this process, which must be a fresh one."""
    run = contender(name)
    tiny = ModelSpec(hidden_size=32, num_layers=1, intermediate_size=32, num_heads=2, vocab_size=64)
    tiny_case = dataclasses.replace(case, model=tiny, num_tasks=2, num_steps=1)
    run(tiny.build, tiny_case.workload(), True)
    workload = case.workload()
    losses, peak_bytes = measured_peak(lambda: run(case.model.build, workload, True).losses)
    backbone_bytes, state_bytes = _weights_bytes(case)
    return Audit(peak_bytes, backbone_bytes, state_bytes, losses)


def measured_peak(act: Callable[[], T]) -> tuple[T, int]:
    """Return what something returns, and by how many bytes it raises the resident set at most.

    Args:
        act: what is done; something like it must have been done before, so that the libraries are there.
    """
    gc.collect()
    _return_free_memory()
    before_bytes = _resident_bytes()
    _reset_peak()
    result = act()
    return result, _peak_bytes() - before_bytes


def _weights_bytes(case: Case) -> tuple[int, list[int]]:
    """Return the bytes of one backbone, and of the adapter state of each task."""
    from torch import nn

    backbone = case.model.build()
    backbone_bytes = sum(parameter.numel() * parameter.element_size() for parameter in backbone.parameters())
    layers = [module for module in backbone.model.modules() if isinstance(module, nn.Linear)]
    bytes_per_rank = 4 * sum(4 * (layer.in_features + layer.out_features) for layer in layers)
    return backbone_bytes, [bytes_per_rank * task.rank for task in case.workload().tasks]


def _status_bytes(field: str) -> int | None:
    status = Path("/proc/self/status")
    match = re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return None if match is None else int(match[1]) * 1024


def _resident_bytes() -> int:
    resident = _status_bytes("VmRSS")
    return _peak_bytes() if resident is None else resident


def _peak_bytes() -> int:
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _return_free_memory() -> None:
    """Let glibc give back what the imports freed, which the run would otherwise fill unseen."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> None:
    # Where this is not Linux, or not allowed, the peak of the imports stays; a real backbone exceeds it.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Audit what the command line names; and hand the result over."""
    name, case, num_threads = sys.argv[1:]
    if name not in CONTENDERS:
        raise SystemExit(f"contender must be one of {', '.join(CONTENDERS)}, got {name!r}")
    os.environ["OMP_NUM_THREADS"] = num_threads
    import torch

    torch.set_num_threads(int(num_threads))
    hand_over(asdict(run_audit(name, Case.from_json(case))))


if __name__ == "__main__":
    main()
