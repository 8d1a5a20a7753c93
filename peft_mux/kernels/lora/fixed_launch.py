"""`Launch`: a kernel with all of its arguments that are the same in every pass, started without binding them anew.

Below a few thousand tokens it is the host that sets the speed of a pass, and Triton's binder is most of a launch.
"""

from __future__ import annotations

from typing import Any

import torch

from peft_mux.kernels.lora import tunings

_WORD_BYTES = 16  # code for tensors that begin on such moves whole words


class Launch:
    """A kernel with all of its arguments that are the same in every pass.

    Triton would bind the arguments anew in each launch, to find the code that was compiled for such ones; that takes
    the host several times as long as the launch. All that decides it is fixed here, but where tensors begin: the code
    for tensors that begin on 16 bytes is kept from the first launch, and any other launch goes through Triton's binder.

    Args:
        kernel: the Triton kernel that is launched.
        tile: how it is launched.
        fixed: the arguments between those of a call and the constants.
        constants: the kernel's constants, in its own order, which ends with them.
    """

    __slots__ = ("_compiled", "_fixed", "_grid", "_kernel", "_options", "_runner")

    def __init__(self, kernel: Any, tile: tunings.Tiles, *fixed: object, **constants: object) -> None:
        """Remember all of them; nothing is compiled yet."""
        assert tuple(kernel.arg_names[-len(constants) :]) == tuple(constants), "constants are in the kernel's order"
        self._kernel, self._fixed = kernel, (*fixed, *constants.values())
        self._options = {"num_warps": tile.warps, "num_stages": tile.stages}
        self._compiled: Any = None
        # Of the last grid: Triton makes a function for each launch, and passes of one size follow each other.
        self._grid: tuple[int, ...] | None = None
        self._runner: Any = None

    def __call__(
        self,
        grid: tuple[int, ...],
        moving: tuple[torch.Tensor, ...],
        tables: tuple[torch.Tensor, ...],
        *,
        is_aligned: bool = False,
    ) -> None:
        """Start the kernel; all launches go through here.

        Args:
            grid: number of programs in each of three dimensions.
            moving: the kernel's first arguments, tensors that lie elsewhere in each pass.
            tables: the arguments after them, tables of the pass, which begin on 16 bytes.
            is_aligned: whether the caller knows that `moving` begin on 16 bytes, but for those that never move.
        """
        if not is_aligned:
            address = 0
            for tensor in moving:
                address |= tensor.data_ptr()
            is_aligned = address % _WORD_BYTES == 0
        if self._compiled is not None and is_aligned:
            if grid != self._grid:
                self._grid, self._runner = grid, self._compiled[grid]
            self._runner(*moving, *tables, *self._fixed)
            return
        compiled = self._kernel[grid](*moving, *tables, *self._fixed, **self._options)
        # Triton's interpreter compiles nothing, and returns nothing.
        if is_aligned:
            self._compiled = compiled
