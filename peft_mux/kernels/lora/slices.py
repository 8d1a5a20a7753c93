"""What is computed slice by slice: whose rows lie where, and which adapters share a product.

Shape letters: T rows of the stream, D input features, K output features, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from peft_mux.kernels import philox


class LoraSegment(NamedTuple):
    """Rows of one task in one layer, and how its adapter acts on them.

    Attributes:
        start: first row of the task in the stream.
        end: one past the task's last row.
        scale: what the adapter's output is multiplied by: alpha / rank, or alpha / sqrt(rank).
        dropout: probability of dropping an input element; 0 for none.
        seed: 64-bit key of the dropout draws, from `philox.draw_seed`.
        window: which columns of the whole input lie here, where not all do; dropout draws are those of the whole.
    """

    start: int
    end: int
    scale: float
    dropout: float = 0.0
    seed: int = 0
    window: philox.Window | None = None


class LinearSlice(NamedTuple):
    """One frozen linear layer of several that read the same activations (q, k and v; gate and up).

    Attributes:
        weight_KD: frozen weight `[K, D]`; `None` for the adapters' part alone (the base is added by the caller).
        bias_K: frozen bias `[K]`, or `None`.
        out_features: number of output features, K.
        segments: rows of the tasks that have an adapter here; rows of no segment get the base alone.
        factors: `(A [R, D], B [K, R])` per segment; ranks may differ.
    """

    weight_KD: torch.Tensor | None
    bias_K: torch.Tensor | None
    out_features: int
    segments: Sequence[LoraSegment]
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]]


class Rows(NamedTuple):
    """Consecutive rows of a stream: from `start` to before `end`."""

    start: int
    end: int


def num_rows_in(ranges: Sequence[Rows]) -> int:
    """Return how many rows some ranges have together."""
    return sum(end - start for start, end in ranges)


def take_rows(x_TD: torch.Tensor, ranges: Sequence[Rows]) -> torch.Tensor:
    """Return some ranges of rows as one tensor; a view where there is one range, or none."""
    parts = [x_TD[start:end] for start, end in ranges]
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else x_TD[:0]


def spread_rows(taken_RD: torch.Tensor, ranges: Sequence[Rows], num_rows: int) -> torch.Tensor:
    """Return `num_rows` rows with those of the ranges in their places, and 0 in all others: `take_rows` undone."""
    whole_TD = taken_RD.new_zeros(num_rows, *taken_RD.shape[1:])
    sizes = [end - start for start, end in ranges]
    for (start, end), part in zip(ranges, taken_RD.split(sizes) if sizes else (), strict=True):
        whole_TD[start:end] = part
    return whole_TD


class Bundle(NamedTuple):
    """Adapters of one task that read the same rows of `x`, with the same draws: one product for all of their A.

    Attributes:
        segment: the rows that they read, and their dropout.
        members: for each adapter, the index of its slice, its number among all adapters, and its scale.
    """

    segment: LoraSegment
    members: tuple[tuple[int, int, float], ...]

    @property
    def rows(self) -> slice:
        """The rows that the adapters read."""
        return slice(self.segment.start, self.segment.end)

    def split(self, x_R: torch.Tensor, factors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return each member's rows of a tensor whose first dimension is the summed rank."""
        return x_R.split([len(factors[2 * number]) for _, number, _ in self.members])

    def joint_a(self, factors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the members' factors A as one `[summed R, D]`; a view where they lie side by side."""
        owners = [factors[2 * number].detach() for _, number, _ in self.members]
        joint = adjacent(owners)
        return torch.cat([a.to(dtype) for a in owners]) if joint is None else joint.to(dtype)


def bundles(slices: Sequence[LinearSlice]) -> list[Bundle]:
    """Gather the adapters of each task; one with dropout stands alone, as its draws are its own."""
    shared: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    alone: list[Bundle] = []
    number = 0
    for index, part in enumerate(slices):
        for segment in part.segments:
            member = (index, number, segment.scale)
            if segment.dropout == 0.0:
                # Equal rows belong to one task, as the segments of a stream do not overlap.
                shared.setdefault((segment.start, segment.end), []).append(member)
            else:
                alone.append(Bundle(segment, (member,)))
            number += 1
    return [Bundle(LoraSegment(*rows, 1.0), tuple(members)) for rows, members in shared.items()] + alone


def num_saved(slices: Sequence[LinearSlice]) -> int:
    """Return how many elements of S `slices_forward` writes."""
    return sum(
        len(a) * (segment.end - segment.start)
        for part in slices
        for segment, (a, _) in zip(part.segments, part.factors, strict=True)
    )


def all_factors(slices: Sequence[LinearSlice]) -> list[torch.Tensor]:
    """Return A and B of all adapters, slice by slice: those of adapter n are factors 2n and 2n + 1."""
    return [factor for part in slices for pair in part.factors for factor in pair]


def bundles_with_s(
    slices: Sequence[LinearSlice], factors: Sequence[torch.Tensor], saved: torch.Tensor
) -> Iterator[tuple[Bundle, torch.Tensor]]:
    """Yield each bundle with its `S [R, rows]`, a part of `saved`."""
    offset = 0
    for bundle in bundles(slices):
        rank = sum(len(factors[2 * number]) for _, number, _ in bundle.members)
        num_rows = bundle.segment.end - bundle.segment.start
        yield bundle, saved[offset : offset + rank * num_rows].view(rank, num_rows)
        offset += rank * num_rows


def adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return matrices that follow each other in memory as one, without a copy; `None` where they do not."""
    first = parts[0]
    if len(parts) == 1:
        return first
    end = first.data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end:
            return None
        end += part.numel() * part.element_size()
    size = sum(len(part) for part in parts)
    # Parts that follow each other by chance lie in storages of their own, where a view could not reach the next.
    if first.storage_offset() + size * first.shape[1] > first.untyped_storage().nbytes() // first.element_size():
        return None
    return first.as_strided((size, first.shape[1]), (first.shape[1], 1))
