"""What the parts of `benchmarks.gpu` share: where they run, and how large."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import Any

import torch

from benchmarks.kernels.mux import has_kernels


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What depends on the machine.

    Attributes:
        device: the device on which everything runs.
        is_rehearsal: whether shapes are tiny and in fp32, so that any machine can run them.
        num_layers: number of layers of the backbone of the part `default run`.
    """

    device: torch.device
    is_rehearsal: bool
    num_layers: int = 32

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and frozen weights."""
        return torch.float32 if self.is_rehearsal else torch.bfloat16

    @property
    def has_kernels(self) -> bool:
        """Whether Triton kernels run: on a GPU, and in a rehearsal where TRITON_INTERPRET=1 chose its interpreter."""
        return has_kernels(self.device)

    @property
    def wants_kernels(self) -> bool:
        """Whether a path without kernels is a fault."""
        return self.has_kernels or self.device.type == "cuda"

    @property
    def device_bytes(self) -> int | None:
        """Memory of the GPU; `None` on a CPU, where nothing is skipped for its size."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.get_device_properties(self.device).total_memory

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Return what Trainer does for bf16: adapters in fp32, products in bf16."""
        if self.is_rehearsal:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def free(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
