"""Whether Triton kernels can run here, found out by launching one.

Triton needs a C compiler, the headers of Python, an assembler that knows the card, and a driver that fits; a first
launch shows whether one of these is missing, and it should not do so in the middle of training. Where kernels cannot
run, everything is computed in torch: slower, and with the same result. A warning gives the reason once per device.
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


def try_kernel(device: torch.device) -> None:
    """Compile and launch a kernel, and wait for its result.

    Raises:
        RuntimeError: if it writes something wrong; errors of Triton pass through.
    """
    # Imported here, because it needs Triton.
    from peft_mux.kernels.lora.device import trial_kernel

    out = torch.zeros(1, dtype=torch.float32, device=device)
    with torch.cuda.device_of(out):  # Triton launches on the current device, whatever the tensors are on
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
            "grouped LoRA and bottlenecks and the fused loss are computed in torch, task by task, and not by Triton "
            f"kernels, as {reason}.",
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
    except Exception as error:  # no C compiler, no Python.h, no driver: Triton has a different error for each
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return f"a first one cannot be launched ({type(error).__name__}: {first_line})"
    return None
