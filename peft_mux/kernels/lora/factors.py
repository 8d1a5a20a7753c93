"""`Factors`: where the A and B of every segment lie in memory.

Shape letters: G segments, R rows of a factor (its rank), D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from peft_mux.kernels.lora.tables import copy_to_device

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What activations and factors may be held in; sums are fp32 in any case."""


class Factors:
    """Where one factor (A, B transposed, or the gradient of either) of each segment lies on the device.

    Owners keep their adapters in memory of their own; a launch is handed one tensor and, for each segment, how far from
    its beginning the segment's factor lies, in elements.

    Attributes:
        base: tensor from whose beginning distances are counted.
        offset_G: int64, distance of each segment's factor from it in elements; multiples of 8 where `width` is one.
        width: number of columns of every factor.
        num_segments: number of segments, G.
        launches: launches of these factors by what they were made for; those who launch keep them here.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor | None],
        width: int,
        *,
        num_segments: int | None = None,
        base: torch.Tensor | None = None,
    ) -> None:
        """Check the factors, and note how far each one lies from the base.

        Args:
            parts: factor of each segment, contiguous `[R, width]`; `None` for a segment without an adapter here.
            width: number of columns of all factors.
            num_segments: number of segments that the table is made for; as many as `parts` by default.
            base: tensor from whose beginning distances are counted; the first factor by default.

        Raises:
            ValueError: if there is no factor and no base, or one differs in width, dtype or device, or does not begin
                on 16 bytes.
        """
        base = next((part for part in parts if part is not None), None) if base is None else base
        if base is None:
            raise ValueError("factors: got none; allowed: at least one segment with an adapter.")
        self.base, self.width = base, width
        size = self.base.element_size()
        # Signed and wide: owners' buffers lie anywhere, before the base as well as behind it.
        offsets = np.zeros(len(parts) if num_segments is None else num_segments, dtype=np.int64)
        for index, part in enumerate(parts):
            if part is not None:
                _check_factor(part, self.base, width)
                offsets[index] = (part.data_ptr() - self.base.data_ptr()) // size
        self.offset_G = torch.empty(len(offsets), dtype=torch.int64, device=self.base.device)
        copy_to_device(offsets, self.offset_G)
        self.num_segments = len(offsets)
        self.launches: dict[tuple[Any, ...], Any] = {}

    @classmethod
    def of_slab(
        cls, slab_RD: torch.Tensor, first_rows: Sequence[int], ranks: Sequence[int], *, num_segments: int | None = None
    ) -> Factors:
        """Return factors that lie below each other in one tensor.

        Args:
            slab_RD: the tensor that holds all factors, contiguous `[rows, D]`.
            first_rows: row of the slab in which each segment's factor begins.
            ranks: number of rows of each factor, 0 for a segment without an adapter here.
            num_segments: number of segments that the table is made for; as many as `ranks` by default.

        Raises:
            ValueError: if a factor reaches out of the slab.
        """
        ends = [row + rank for row, rank in zip(first_rows, ranks, strict=True)]
        if max(ends, default=0) > len(slab_RD) or min(first_rows, default=0) < 0:
            raise ValueError(f"factors end at rows {ends}; allowed: 0 to {len(slab_RD)}, the rows of the slab.")
        parts = [slab_RD[row:end] if end > row else None for row, end in zip(first_rows, ends, strict=True)]
        return cls(parts, slab_RD.shape[1], num_segments=num_segments, base=slab_RD)


def _check_factor(part: torch.Tensor, base: torch.Tensor, width: int) -> None:
    if part.dim() != 2 or part.shape[1] != width or not part.is_contiguous():
        raise ValueError(f"factor of shape {tuple(part.shape)}; allowed: contiguous with {width} columns.")
    if part.dtype != base.dtype or part.device != base.device:
        raise ValueError(f"factor in {part.dtype} on {part.device}; allowed: {base.dtype} on {base.device}, as others.")
    # Rows of other widths begin anywhere, so that loads of whole words are out of the question for them.
    if width % 8 == 0 and part.data_ptr() % 16:
        raise ValueError("a factor does not begin on 16 bytes; allowed: memory that loads of whole words can read.")
