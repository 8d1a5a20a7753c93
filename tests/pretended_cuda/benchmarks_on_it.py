"""Runs parts of `benchmarks.gpu` at their real shapes on the pretended device; prints their results as JSON.

Numbers mean nothing here, so that checks may say what they like: what counts is that each part comes to its end.

Run in a process of its own: `python tests/pretended_cuda/benchmarks_on_it.py LIBRARY FOLDER`.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.pretended_cuda import library

PARTS = ["lora", "cross", "attention", "adamw", "task", "captured", "gain 8B", "end to end 8 uniform x 32", "default"]


class Silent:
    """Stands for a CUDA graph that is captured by running, and replayed by doing nothing."""

    def warm_up(self, run: Any) -> None:
        run()

    def capture(self, run: Any) -> None:
        run()

    def replay(self) -> None: ...


def main(folder: Path) -> None:
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from transformers import TrainingArguments

    from benchmarks.gpu import default_run, sweep, trainers
    from benchmarks.gpu.backbones import Backbones
    from benchmarks.gpu.checks import passes
    from benchmarks.gpu.parts import chosen, plan
    from benchmarks.gpu.report import Report
    from benchmarks.gpu.settings import Settings
    from benchmarks.training.baselines import floor
    from peft_mux.kernels.availability import runs_kernels
    from peft_mux.modeling import last_layer
    from peft_mux.modeling.backbone import liger, probe, shape
    from tests.pretended_cuda.device import PretendedCuda

    pack = floor.pack

    def packed_on_the_host(*args: Any) -> Any:
        with unset_fake_temporarily():  # it asks for numbers of its own
            return pack(*args)

    own_device: Any = TrainingArguments.device

    def on_the_card(args: TrainingArguments) -> torch.device:
        own_device.fget(args)  # accelerate's state, which others read
        return settings.device

    warnings.simplefilter("ignore")
    card = SimpleNamespace(total_memory=85 * 10**9, name="NVIDIA H100 80GB HBM3", major=9, minor=0)
    card.multi_processor_count = 132
    replaced = [
        (torch.cuda, "get_device_properties", lambda device=None: card),
        (torch.cuda, "reset_peak_memory_stats", lambda device=None: None),
        (torch.cuda, "max_memory_allocated", lambda device=None: 1),
        (torch.cuda, "max_memory_reserved", lambda device=None: 2),
        (torch.cuda, "empty_cache", lambda: None),
        (TrainingArguments, "device", property(on_the_card)),
        (shape, "_digest", lambda tensor: ""),
        # Differences of tensors without numbers are 1.
        *((module, "tolerance_of", lambda path: 2.0) for module in (liger, probe, last_layer)),
        (default_run, "BATCH_SIZES", {"4K": 10}),
        (default_run, "TRL_S", 1e9),  # its code is not ours
        (trainers, "graphs_here", lambda settings: Silent),
        (passes, "graphs_here", lambda settings: Silent),
        (floor, "pack", packed_on_the_host),
        (sweep, "SWEEP_TOKENS", (512,)),
    ]
    settings = Settings(torch.device("cuda"), is_rehearsal=False, num_layers=2)
    with ExitStack() as stack:
        for target, name, value in replaced:
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(PretendedCuda().present())
        runs_kernels(settings.device)
        report = Report(folder / "report.json", {})
        report.run(chosen(plan(settings.num_layers), PARTS, settings, Backbones(settings)), 1e6)
    print(json.dumps(report.values["parts"]))


if __name__ == "__main__":
    library.load(sys.argv[1])
    main(Path(sys.argv[2]))
