"""What is computed slice by slice: whose rows lie where, and which adapters share a product.

Shape letters: T rows of the stream, D input features, K output features, R rank.
"""

# MERGED: A frozen linear layer with the LoRA adapters of many tasks on top, over one packed stream.
# MERGED:     S_g = drop(x_g) A_g^T          y = x W^T + b;    y_g += s_g S_g B_g^T            (M Eq. 1)
# MERGED:     dS_g = s_g dy_g B_g            dB_g = s_g dy_g^T S_g        dA_g = dS_g^T drop(x_g)
# MERGED:     dx = dy W;                     dx_g += mask_g * (dS_g A_g)                       (M Eq. 2)
# MERGED: The base GEMM runs once over all rows; each task touches only its own rows, by slices and never by masks that
# MERGED: multiply, so that a NaN of one task (0 * NaN = NaN) reaches no other.
# MERGED: Shape letters: T rows of the stream, D input features, K output features, R rank.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

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


def grouped_lora_slices(
    x_TD: torch.Tensor,
    slices: Sequence[LinearSlice],
    places: torch.Tensor,
    needed: tuple[Rows, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of several frozen layers that read the same `x`, each with its adapters (M §3.4.3).

    A task's factors A of all slices work as one of their summed rank: `x` is read once a task, and `dx` written once.

    Args:
        x_TD: `[T, D]` activations, sorted by task.
        slices: the frozen layers with their adapters.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        needed: the rows whose gradients a layer below needs, as ranges in order; those of others are 0. All by default.

    Returns:
        One `[T, K]` a slice, in the autocast dtype where autocast is on, else in that of `x`.
    """
    device_type = x_TD.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else x_TD.dtype
    flat = all_factors(slices)
    # The dtype is settled here, once for forward and backward; autocast would cast each product by itself.
    with torch.autocast(device_type, enabled=False):
        return GroupedLoraFunction.apply(x_TD, tuple(slices), places, dtype, needed, *flat)


class GroupedLoraFunction(torch.autograd.Function):
    """Manual forward and backward of `grouped_lora_slices`: in-place `addmm_` on row slices, no copies of activations.

    Skinny products are written so that the rank is their first dimension (`A x^T`, `B^T dy^T`, `S dy`): on CPUs the
    other orientation takes up to ten times as long (docs/log.md).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        slices: tuple[LinearSlice, ...],
        places: torch.Tensor,
        dtype: torch.dtype,
        needed: tuple[Rows, ...] | None,
        *factors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Compute each `y`; save `x` and S."""
        x = x_TD.to(dtype)
        saved = x.new_empty(num_saved(slices))
        ys = slices_forward(x, slices, places, saved)
        ctx.save_for_backward(x, places, saved)
        ctx.slices, ctx.dtype, ctx.input_dtype, ctx.needed = slices, dtype, x_TD.dtype, needed
        return ys

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dys_TK: torch.Tensor) -> tuple[Any, ...]:
        """Compute `dx` and each `dA`, `dB`; the frozen weights get no gradient."""
        x, places, saved = ctx.saved_tensors
        dys = [dy.to(ctx.dtype) for dy in dys_TK]
        # Below the lowest adapter nothing trains, and no dx is needed.
        dx, gradients = slices_backward(
            dys, x, ctx.slices, places, saved, needs_dx=ctx.needs_input_grad[0], needed=ctx.needed
        )
        dx = None if dx is None else dx.to(ctx.input_dtype)
        return (dx, None, None, None, None, *gradients)


def slices_forward(
    x_TD: torch.Tensor, slices: Sequence[LinearSlice], places: torch.Tensor, saved: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return each `y`; autograd sees nothing of it.

    Args:
        x_TD: `[T, D]` activations, in the dtype to compute in.
        slices: the frozen layers with their adapters.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        saved: flat tensor of at least `num_saved` elements, to be filled with S.
    """
    factors = all_factors(slices)
    ys = tuple(_base_output(x_TD, part) for part in slices)
    if x_TD.is_meta:  # a description, of which shapes are asked alone: many tasks' products would take seconds
        return ys
    for bundle, s_RT in bundles_with_s(slices, factors, saved):
        # x is read once for all factors A of the task; S is kept transposed, with the rank first.
        torch.mm(bundle.joint_a(factors, x_TD.dtype), _dropped(x_TD, bundle.segment, places).t(), out=s_RT)
        rows = bundle.rows
        for (index, number, scale), s in zip(bundle.members, bundle.split(s_RT, factors), strict=True):
            # Scaled and added within the product, on the task's own rows: no activation is copied.
            ys[index][rows].addmm_(s.t(), factors[2 * number + 1].to(x_TD.dtype).t(), alpha=scale)
    return ys


def slices_backward(
    dys_TK: Sequence[torch.Tensor],
    x_TD: torch.Tensor,
    slices: Sequence[LinearSlice],
    places: torch.Tensor,
    saved: torch.Tensor,
    *,
    needs_dx: bool,
    needed: tuple[Rows, ...] | None = None,
) -> tuple[torch.Tensor | None, list[Any]]:
    """Return `dx` and the gradient of each factor.

    Where a factor has a gradient already, `dA` and `dB` are added to it in place, by the product itself, and `None` is
    returned for it.

    Args:
        dys_TK: gradient `[T, K]` of each `y`, in the dtype of `x`.
        x_TD: `[T, D]` activations that the forward pass read.
        slices: the frozen layers with their adapters.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        saved: S of all adapters, as `slices_forward` has filled it.
        needs_dx: whether a layer below needs `dx`.
        needed: the rows of `dx` that it needs; all by default.
    """
    factors, dtype = all_factors(slices), x_TD.dtype
    dx = _base_input_gradient(x_TD, dys_TK, [part.weight_KD for part in slices], needed) if needs_dx else None
    gradients: list[Any] = [None] * len(factors)
    for bundle, s_RT in bundles_with_s(slices, factors, saved):
        rows = bundle.rows
        ds_RT = torch.empty_like(s_RT)
        parts = zip(bundle.members, bundle.split(s_RT, factors), bundle.split(ds_RT, factors), strict=True)
        for (index, number, scale), s, ds in parts:
            b, dy_g = factors[2 * number + 1], dys_TK[index][rows]
            torch.mm(b.to(dtype).t().contiguous(), dy_g.t(), out=ds).mul_(scale)
            gradients[2 * number + 1] = _b_gradient(b, s, dy_g, scale)
        # Drawn once more, from seed and place: a mask that was kept would take memory for every layer.
        kept = _kept(x_TD, bundle.segment, places)
        x_g = x_TD[rows] if kept is None else philox.dropped(x_TD[rows], kept, bundle.segment.dropout)
        _write_a_gradients(bundle, factors, ds_RT, x_g, gradients)
        if dx is None or not (needed is None or any(part.start <= rows.start < part.end for part in needed)):
            continue
        a = bundle.joint_a(factors, dtype)
        if kept is None:
            dx[rows].addmm_(ds_RT.t(), a)
        else:
            dx[rows] += philox.dropped(ds_RT.t() @ a, kept, bundle.segment.dropout)
    return dx, gradients


def _adds_in_place(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a product may be added to the parameter's gradient directly: it has one, and no hook wants to see it."""
    is_watched = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return parameter.is_leaf and parameter.grad is not None and parameter.grad.dtype == dtype and not is_watched


def _b_gradient(b: torch.Tensor, s_RT: torch.Tensor, dy_TK: torch.Tensor, scale: float) -> torch.Tensor | None:
    """Return `dB`, or add it to the gradient that is there."""
    if _adds_in_place(b, dy_TK.dtype):
        # B's gradient is [K, R]; its transpose lets the product write it without a copy.
        b.grad.t().addmm_(s_RT, dy_TK, alpha=scale)  # type: ignore[union-attr]
        return None
    return (s_RT @ dy_TK).mul_(scale).t().to(b.dtype, memory_format=torch.contiguous_format)


def _write_a_gradients(
    bundle: Bundle, factors: Sequence[torch.Tensor], ds_RT: torch.Tensor, x_TD: torch.Tensor, gradients: list[Any]
) -> None:
    """Put each `dA` into `gradients`, or add them to the gradients that are there."""
    owners = [factors[2 * number] for _, number, _ in bundle.members]
    are_in_place = all(_adds_in_place(a, x_TD.dtype) for a in owners)
    joint = adjacent([a.grad for a in owners]) if are_in_place else None  # type: ignore[misc]
    if joint is not None:
        # Gradients lie side by side in a task's slab, as the factors A do, and one product adds to all of them.
        joint.addmm_(ds_RT, x_TD)
        return
    da_RD = ds_RT @ x_TD
    for (_, number, _), a, da in zip(bundle.members, owners, bundle.split(da_RD, factors), strict=True):
        if are_in_place and a.grad is not None:
            a.grad.add_(da)
        else:
            gradients[2 * number] = da.to(a.dtype)


def _base_output(x: torch.Tensor, part: LinearSlice) -> torch.Tensor:
    """Return the frozen layer's own output; zeros where the caller adds it."""
    if part.weight_KD is None:
        return x.new_zeros(len(x), part.out_features)
    bias = None if part.bias_K is None else part.bias_K.to(x.dtype)
    return F.linear(x, part.weight_KD.to(x.dtype), bias)


def _base_input_gradient(
    x: torch.Tensor,
    dys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    needed: tuple[Rows, ...] | None = None,
) -> torch.Tensor:
    """Return the sum of `dy W` over the slices that have a frozen weight; 0 in rows that are not needed."""
    if needed is not None:
        if not needed:
            return torch.zeros_like(x)
        together = [take_rows(dy, needed) for dy in dys]
        found = _base_input_gradient(x[: num_rows_in(needed)], together, weights)
        return spread_rows(found, needed, len(x))
    dx = None
    for dy, weight in zip(dys, weights, strict=True):
        if weight is not None:
            dx = dy @ weight.to(x.dtype) if dx is None else dx.addmm_(dy, weight.to(x.dtype))
    return torch.zeros_like(x) if dx is None else dx


def _kept(x: torch.Tensor, segment: LoraSegment, places: torch.Tensor) -> torch.Tensor | None:
    """Return which elements the dropout of a segment keeps in its rows; `None` where it drops none."""
    if segment.dropout == 0.0:
        return None
    rows = slice(segment.start, segment.end)
    return philox.keep_mask(segment.seed, places[rows], x.shape[-1], segment.dropout, segment.window)


def _dropped(x: torch.Tensor, segment: LoraSegment, places: torch.Tensor) -> torch.Tensor:
    """Return the rows of a segment after its dropout."""
    kept, rows = _kept(x, segment, places), x[segment.start : segment.end]
    return rows if kept is None else philox.dropped(rows, kept, segment.dropout)


def reference_grouped_lora(
    x_TD: torch.Tensor,
    weight_KD: torch.Tensor | None,
    bias_K: torch.Tensor | None,
    segments: Sequence[LoraSegment],
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    places: torch.Tensor,
    out_features: int,
) -> torch.Tensor:
    """Return what `grouped_lora_slices` returns of one layer, written for reading and left to autograd.

    Args:
        x_TD: `[T, D]` activations, sorted by task.
        weight_KD: frozen weight `[K, D]`; `None` for the adapters' part alone.
        bias_K: frozen bias `[K]`, or `None`.
        segments: rows of the tasks that have an adapter here.
        factors: `(A [R, D], B [K, R])` per segment; ranks may differ.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        out_features: number of output features, K.
    """
    if weight_KD is None:
        y = x_TD.new_zeros(len(x_TD), out_features)
    else:
        y = F.linear(x_TD, weight_KD, bias_K)
    delta = torch.zeros_like(y)
    # Put together from rows and not masked: 0 * NaN would carry one task's NaN into another.
    for segment, (a, b) in zip(segments, factors, strict=True):
        x_g = _dropped(x_TD, segment, places)
        added = segment.scale * (x_g @ a.t() @ b.t())
        delta = torch.cat((delta[: segment.start], added, delta[segment.end :]))
    return y + delta
