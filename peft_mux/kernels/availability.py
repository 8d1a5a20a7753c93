"""Checks whether Triton kernels can run on a device, by launching one.

Triton needs a C compiler, Python headers, an assembler that supports the GPU, and a matching driver. The trial launch
finds missing ones before training starts. If kernels cannot run, everything is computed in torch: slower, but with the
same result. A warning gives the reason once per device.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch

LEAST_CAPABILITY = (8, 0)
"""Older cards have no bf16 products on tensor cores, and compiled kernels keep their blocks in slow memory there."""


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device; otherwise adapters are computed task by task in torch.

    The first call for a CUDA device launches a tiny kernel and waits for it; later ones cost nothing.
    """
    return device.type == "cuda" and _card_runs_kernels(_index(device))


def reason_against_kernels(device: torch.device) -> str | None:
    """Return the reason, as a clause, why Triton kernels cannot run on a device; `None` if they can.

    Args:
        device: a device of this machine. The first call for a CUDA device launches a tiny kernel and waits for it.
    """
    if device.type != "cuda":
        return f"there are none for {device.type}"
    if not has_triton():
        return "Triton is not installed"
    return _reason_against_card(_index(device))


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def try_kernel(device: torch.device) -> None:
    """Compile and launch a kernel, and wait for its result.

    Raises:
        RuntimeError: if it writes a wrong result; errors of Triton are not caught.
    """
    # Imported here, because it needs Triton.
    from peft_mux.kernels.lora.lora_kernels import trial_kernel

    out = torch.zeros(1, dtype=torch.float32, device=device)
    with torch.cuda.device_of(out):  # Triton launches on the current device, not on that of the tensors
        trial_kernel[(1,)](out)
    written = out.tolist()
    if written != [1.0]:
        raise RuntimeError(f"a trial kernel wrote {written} instead of [1.0]")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _card_runs_kernels(index: int) -> bool:
    reason = reason_against_kernels(torch.device("cuda", index))
    if reason is not None:
        warnings.warn(
            "grouped LoRA, bottleneck adapters and the fused loss are computed in torch, task by task, instead of by "
            f"Triton kernels, because {reason}.",
            stacklevel=3,
        )
    return reason is None


@functools.cache
def _reason_against_card(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"{name} has compute capability {'.'.join(map(str, capability))}, but they need {least}"
    try:
        try_kernel(torch.device("cuda", index))
    except Exception as error:  # no C compiler, no Python.h, no driver: Triton raises a different error for each
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return f"a trial kernel cannot be launched ({type(error).__name__}: {first_line})"
    return None
