"""A kernel that only shows whether kernels can be compiled and launched on a device.

Triton needs a C compiler, the headers of Python, an assembler that knows the card, and a driver that fits; what is
missing of these shows at a first launch, and should not do so in the middle of training.

Importing this file imports Triton; only the caller that has chosen it does so.
"""

# MERGED: Whether Triton kernels can run here, found out by launching one.
# MERGED: Where they cannot, everything is computed in torch: slower, and to the same result. Why is told once a device.

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch
import triton
import triton.language as tl


@triton.jit
def _trial_kernel(out_ptr):
    """Write 1."""
    tl.store(out_ptr, 1.0)


def try_kernel(device: torch.device) -> None:
    """Compile and launch a kernel, and wait for what it writes.

    Args:
        device: the CUDA device that it is launched on.

    Raises:
        RuntimeError: if it writes something else; what Triton raises where it cannot launch comes as it is.
    """
    out = torch.zeros(1, dtype=torch.float32, device=device)
    with torch.cuda.device_of(out):  # Triton launches on the current device, whatever the tensors are on
        _trial_kernel[(1,)](out)
    written = out.tolist()
    if written != [1.0]:
        raise RuntimeError(f"a trial kernel wrote {written} instead of [1.0]")


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
            "grouped LoRA and bottlenecks and the fused loss are computed in torch, task by task, "
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
        try_kernel(torch.device("cuda", index))
    except Exception as error:  # no C compiler, no Python.h, no driver: Triton has an error of its own for each
        return f"a first one cannot be launched ({type(error).__name__}: {_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
