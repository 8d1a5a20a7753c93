"""Tile choices of the grouped LoRA kernels, as a plain table.

Nothing is tuned at run time: that would synchronise, break graph capture, and let two runs differ. What decides the
order of sums follows from the device, the width of the layer and the task's own rank, never from the ranks of others:
ranks up to 16 and greater ones are launched apart, each with its own block size and its own depth of pipelining.

The choices were made from compiled code (registers, shared memory, instructions) and byte counts, not from timings.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

NARROW_RANK = 16
"""Ranks up to this are worked on in one block of 16, the smallest a tensor core takes."""

WIDE_BLOCK = 64
"""Greater ranks are worked on in blocks of this many."""


class Tiles(NamedTuple):
    """How one kernel is launched.

    Attributes:
        columns: columns of the activation that are worked on at a time.
        warps: number of warps of a program.
        stages: number of loads in flight in a loop.
    """

    columns: int
    warps: int
    stages: int


class KernelTiles(NamedTuple):
    """Columns and warps of one kernel, and its pipeline depth for small and for greater ranks.

    Attributes:
        columns: columns of the activation that are worked on at a time, for 16-bit elements.
        warps: number of warps of a program.
        narrow_stages: loads in flight, for ranks up to 16.
        wide_stages: loads in flight, for greater ranks; blocks are larger, so fewer fit into shared memory.
    """

    columns: int
    warps: int
    narrow_stages: int
    wide_stages: int


# At most 48 KiB of shared memory in 16 bits: fits every GPU that has bf16.
_DEFAULT = {
    "shrink": KernelTiles(columns=64, warps=4, narrow_stages=3, wide_stages=2),
    "expand": KernelTiles(columns=128, warps=4, narrow_stages=2, wide_stages=2),
    "wgrad": KernelTiles(columns=128, warps=4, narrow_stages=2, wide_stages=2),
    "reduce": KernelTiles(columns=256, warps=4, narrow_stages=2, wide_stages=2),
}

_HOPPER = {
    "shrink": KernelTiles(columns=128, warps=4, narrow_stages=4, wide_stages=3),
    "expand": KernelTiles(columns=128, warps=4, narrow_stages=2, wide_stages=2),
    "wgrad": KernelTiles(columns=128, warps=4, narrow_stages=4, wide_stages=3),
    "reduce": KernelTiles(columns=256, warps=4, narrow_stages=2, wide_stages=2),
}

_ANY_WIDTH = 0

_TABLE: dict[tuple[str, int], dict[str, KernelTiles]] = {
    (name, _ANY_WIDTH): _HOPPER for name in ("H100", "H200", "H20", "GH200")
}
"""By model of the device and width of the activation."""


def tiles(kernel: str, device_name: str, width: int, block_ranks: int, element_size: int) -> Tiles:
    """Return how to launch a kernel.

    Args:
        kernel: "shrink", "expand", "wgrad" or "reduce".
        device_name: model of the GPU, as the function `gpu_model` returns it.
        width: number of columns of the activation.
        block_ranks: number of ranks of a block, 16 or 64.
        element_size: bytes of an element; 4-byte ones get half as many columns in the same shared memory, and
                with great ranks more warps.
    """
    by_kernel = _TABLE.get((device_name, width)) or _TABLE.get((device_name, _ANY_WIDTH)) or _DEFAULT
    choice = by_kernel[kernel]
    # The reduction keeps its blocks in registers, so shared memory does not bound its columns.
    columns = choice.columns if element_size <= 2 or kernel == "reduce" else choice.columns // 2
    if block_ranks <= NARROW_RANK:
        return Tiles(columns, choice.warps, choice.narrow_stages)
    if element_size <= 2:
        return Tiles(columns, choice.warps, choice.wide_stages)
    # Products in fp32 use no tensor cores, so a thread holds more of them: with 4 warps an A100 has to spill, and in
    # wgrad with two loads in flight still.
    return Tiles(columns, 2 * choice.warps, choice.wide_stages - (kernel == "wgrad"))


def gpu_model(device: torch.device) -> str:
    """Return the model of a GPU, "H200" for "NVIDIA H200"; "" for any device but a GPU."""
    if device.type != "cuda":
        return ""
    return _cuda_device_name(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_device_name(index: int) -> str:
    words = torch.cuda.get_device_name(index).split()
    return next((word for word in words if word in {name for name, _ in _TABLE}), " ".join(words))
