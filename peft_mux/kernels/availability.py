"""Whether Triton kernels can run here."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported; says so once where it cannot."""
    if importlib.util.find_spec("triton") is not None:
        return True
    warnings.warn("adapters are computed task by task, as Triton is absent.", stacklevel=2)
    return False


def runs_kernels(device: torch.device) -> bool:
    """Whether grouped Triton kernels run on a device, else adapters are computed task by task in torch."""
    return device.type == "cuda" and has_triton()
