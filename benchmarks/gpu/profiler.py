"""What the device does in some steps: how long it is busy, idle, or only communicates, and in which kernels.

Numbers come from torch's profiler, which watches the device alone, as watching the host would slow it down and the
device would seem to idle more. The trace is kept only if somebody asks for it (`--traces FOLDER`).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities
from transformers import TrainerCallback

TRACES_VARIABLE = "PEFT_MUX_BENCHMARK_TRACES"
"""Names the folder for traces, if they are kept."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that occupy the device."""
COMMUNICATION = ("nccl", "gloo", "c10d")
"""What the names of communication begin with, or contain after a prefix."""
MOST_KERNELS = 12
GROUPS = {
    "attention": "attention flash fmha",
    "LoRA": "shrink_kernel expand_kernel wgrad_kernel reduce_kernel",
    "loss": "cross_entropy",
    "update": "adam multi_tensor foreach lpnorm",
    "Liger": "_rms_norm _rope _swiglu _geglu _triton_rope liger",
    "communication": "nccl gloo c10d",
    "products": "gemm cutlass nvjet sm90_xmma sm80_xmma cublas aten::mm aten::addmm",
    "copies": "memcpy memset copy index_select gather scatter cat",
}
"""Kernels by what they do: words of which their names contain one, in the order in which they are looked for."""

Span = tuple[float, float]


class Profiler:
    """Profiles one stretch of steps.

    Args:
        device: the device to watch; where torch cannot, as in a rehearsal, operators of the CPU are watched instead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_on_device = device.type == "cuda" and ProfilerActivity.CUDA in supported_activities()

    def start(self) -> None:
        """Begin, once earlier work is done."""
        self._wait()
        self._profile = profile(activities=[ProfilerActivity.CUDA if self._is_on_device else ProfilerActivity.CPU])
        self._profile.start()
        self._start_s = time.perf_counter()

    def stop(self, num_steps: int) -> dict[str, Any]:
        """End, once all work is done; return what `summary` makes of it.

        Args:
            num_steps: number of steps since `start`.
        """
        self._wait()
        wall_s = time.perf_counter() - self._start_s
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            kept = os.environ.get(TRACES_VARIABLE)
            path = Path(kept or folder) / f"trace-{os.getpid()}-{time.monotonic_ns()}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        wanted = ON_DEVICE if self._is_on_device else ("cpu_op",)
        watched = "device" if self._is_on_device else "operators of the host instead"
        return {"watched": watched, **summary(events, wall_s, num_steps, wanted)}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class StepWatch(TrainerCallback):
    """Times the steps of a `MultiTaskTrainer`, keeps the loss of each task, and profiles the last steps.

    Args:
        device: the device to watch.
        num_steps: steps of the run.
        num_profiled: how many of them are profiled; profiled steps take longer.
    """

    def __init__(self, device: torch.device, num_steps: int, num_profiled: int) -> None:
        self.trainer: Any = None
        self.losses: list[list[float]] = []
        self.steps_s: list[float] = []
        self.profile: dict[str, Any] = {}
        self._num_steps, self._num_profiled, self._profiler = num_steps, num_profiled, Profiler(device)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now_s = time.perf_counter()  # the step has read its losses, so its passes are done
        self.steps_s.append(now_s - self._last_s)
        self._last_s = now_s
        self.losses.append([run.last_loss for run in self.trainer.table])
        if self._num_profiled and len(self.losses) == self._num_steps - self._num_profiled:
            self._profiler.start()
        elif self._num_profiled and len(self.losses) == self._num_steps:
            self.profile = self._profiler.stop(self._num_profiled)


def summary(events: Iterable[dict[str, Any]], wall_s: float, num_steps: int, wanted: Sequence[str]) -> dict[str, Any]:
    """Return seconds of a step in which the device is busy, and shares of its time, from events of a Chrome trace.

    Args:
        events: `traceEvents`, with `ts` and `dur` in microseconds.
        wall_s: seconds of all profiled steps.
        num_steps: how many they are.
        wanted: categories that occupy the device.
    """
    spans: list[Span] = []
    computing: list[Span] = []
    by_kernel: Counter[str] = Counter()
    by_group: Counter[str] = Counter()
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in wanted:
            continue
        start = float(event["ts"])
        span = start, start + float(event["dur"])
        spans.append(span)
        by_kernel[str(event["name"])[:90]] += span[1] - span[0]
        by_group[group_of(str(event["name"]))] += span[1] - span[0]
        if not any(word in str(event["name"]).lower() for word in COMMUNICATION):
            computing.append(span)
    busy_s, computing_s = union_s(spans), union_s(computing)
    return {
        "num_steps": num_steps,
        "step_s": wall_s / num_steps,
        "busy_s": busy_s / num_steps,
        "idle_share": 1 - busy_s / wall_s,
        "exposed_communication_s": (busy_s - computing_s) / num_steps,
        "exposed_communication_share": (busy_s - computing_s) / wall_s,
        "launches": len(spans) / num_steps,
        "groups_s": {name: us / 1e6 / num_steps for name, us in by_group.most_common()},
        "kernels_s": {name: us / 1e6 / num_steps for name, us in by_kernel.most_common(MOST_KERNELS)},
    }


def group_of(name: str) -> str:
    """Return what a kernel does, by its name; "elementwise" for what no group names."""
    low = name.lower()
    return next((group for group, words in GROUPS.items() if any(word in low for word in words.split())), "elementwise")


def union_s(spans: Iterable[Span]) -> float:
    """Return the seconds that spans of microseconds cover together; what overlaps counts once."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            covered += stop - max(start, end)
            end = stop
    return covered / 1e6
