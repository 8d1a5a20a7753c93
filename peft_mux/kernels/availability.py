"""Whether Triton kernels can run here, found out by launching one.

Where they cannot, everything is computed in torch: slower, and to the same result. Why is told once a device.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch

LEAST_CAPABILITY = (8, 0)
"""Older cards have no bf16 products on tensor cores, and compiled kernels keep their blocks in slow memory there."""


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device, else adapters are computed task by task in torch.

    The first call for a CUDA device launches a tiny kernel and waits for it; later ones cost nothing.
    """
    return device.type == "cuda" and _card_runs_kernels(_index(device))


def reason_against_kernels(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on a device, a clause, or `None` where they do.

    Args:
        device: a device of this machine. The first call for a CUDA device launches a tiny kernel and waits for it.
    """
    if device.type != "cuda":
        return f"there are none for {device.type}"
    if not has_triton():
        return "Triton is absent"
    return _reason_against_card(_index(device))


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _card_runs_kernels(index: int) -> bool:
    reason = reason_against_kernels(torch.device("cuda", index))
    if reason is not None:
        warnings.warn(
            "grouped LoRA and bottlenecks, the fused loss and joint AdamW steps are computed in torch, task by task, "
            f"and not by Triton kernels, as {reason}.",
            stacklevel=3,
        )
    return reason is None


@functools.cache
def _reason_against_card(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"{name} has compute capability {'.'.join(map(str, capability))}, and they need {least}"
    try:
        from peft_mux.kernels.trial import try_kernel

        try_kernel(torch.device("cuda", index))
    except Exception as error:  # no C compiler, no Python.h, no driver: Triton has an error of its own for each
        return f"a first one cannot be launched ({type(error).__name__}: {_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
