"""A kernel that only shows whether kernels can be compiled and launched on a device.

Triton needs a C compiler, the headers of Python, an assembler that knows the card, and a driver that fits; what is
missing of these shows at a first launch, and should not do so in the middle of training.

Importing this file imports Triton; only the caller that has chosen it does so.
"""

from __future__ import annotations

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
