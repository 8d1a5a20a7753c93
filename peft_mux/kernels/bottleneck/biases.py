"""Where the biases of many tasks lie, as kernels are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from peft_mux.kernels.lora.tables import copy_to_device


class Biases(NamedTuple):
    """Where the bias of each segment lies; G segments.

    Attributes:
        base: tensor from whose beginning distances are counted.
        offset_G: int64, distance of each segment's bias from it in elements.
        size_G: int32, elements of each segment's bias; 0 for none.
    """

    base: torch.Tensor
    offset_G: torch.Tensor
    size_G: torch.Tensor


def biases_of(values: Sequence[torch.Tensor | None], spare: torch.Tensor) -> Biases:
    """Return where biases lie.

    Args:
        values: the bias of each segment, or `None`.
        spare: stands for them where there is none, and is not read then.
    """
    base = next((value for value in values if value is not None), spare)
    size = base.element_size()
    offsets = [0 if value is None else (value.data_ptr() - base.data_ptr()) // size for value in values]
    sizes = [0 if value is None else value.numel() for value in values]
    return Biases(base, on_device(offsets, np.int64, base.device), on_device(sizes, np.int32, base.device))


def on_device(numbers: Sequence[int], dtype: type[np.integer[Any]], device: torch.device) -> torch.Tensor:
    """Return whole numbers on a device, without waiting for it."""
    host = np.array(numbers, dtype=dtype)
    held = torch.empty(len(host), dtype=getattr(torch, host.dtype.name), device=device)
    copy_to_device(host, held)
    return held
