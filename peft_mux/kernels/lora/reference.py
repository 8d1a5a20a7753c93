"""A frozen linear layer with the LoRA adapters of many tasks on top, over one packed stream, by products on slices.

    S_g = drop(x_g) A_g^T          y = x W^T + b;    y_g += s_g S_g B_g^T            (M Eq. 1)
    dS_g = s_g dy_g B_g            dB_g = s_g dy_g^T S_g        dA_g = dS_g^T drop(x_g)
    dx = dy W;                     dx_g += mask_g * (dS_g A_g)                       (M Eq. 2)

The base product runs once over all rows. Each task works only on its own rows, by slicing and never by multiplying with
masks, so that a NaN of one task cannot reach others (0 * NaN = NaN).

Shape letters: T rows of the stream, D input features, K output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from peft_mux.kernels import philox

_WHOLE_ROWS = 16
"""With multiples of this number of rows, products on CPUs round the same for each row (measured with MKL)."""


class LoraSegment(NamedTuple):
    """Rows of one task in one layer, and how its adapter acts on them.

    Attributes:
        start: first row of the task in the stream.
        end: one past the task's last row.
        scale: factor of the adapter's output: alpha / rank, or alpha / sqrt(rank).
        dropout: probability of dropping an input element; 0 for none.
        seed: 64-bit key of the dropout draws, from `philox.draw_seed`.
        window: the columns of the whole input that this process holds, if not all; draws are those of the whole input.
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
        segments: rows of the tasks that have an adapter here; other rows get only the base output.
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
    """Return the total number of rows of some ranges."""
    return sum(end - start for start, end in ranges)


def take_rows(x_TD: torch.Tensor, ranges: Sequence[Rows]) -> torch.Tensor:
    """Return some ranges of rows as one tensor; a view if there is at most one range."""
    parts = [x_TD[start:end] for start, end in ranges]
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else x_TD[:0]


def spread_rows(taken_RD: torch.Tensor, ranges: Sequence[Rows], num_rows: int) -> torch.Tensor:
    """Return `num_rows` rows with the given rows at the ranges and 0 elsewhere: the inverse of `take_rows`."""
    whole_TD = taken_RD.new_zeros(num_rows, *taken_RD.shape[1:])
    sizes = [end - start for start, end in ranges]
    for (start, end), part in zip(ranges, taken_RD.split(sizes) if sizes else (), strict=True):
        whole_TD[start:end] = part
    return whole_TD


class Bundle(NamedTuple):
    """Adapters of one task that read the same rows of `x` with the same dropout mask: one product for all their A.

    Attributes:
        segment: the rows that they read, and their dropout.
        members: for each adapter, the index of its slice, its number among all adapters, and its scale.
    """

    segment: LoraSegment
    members: tuple[tuple[int, int, float], ...]

    def split(self, x_R: torch.Tensor, factors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return each member's rows of a tensor whose first dimension is the summed rank."""
        return x_R.split([len(factors[2 * number]) for _, number, _ in self.members])

    def joint_a(self, factors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the members' factors A as one `[summed R, D]`; a view if they are adjacent in memory."""
        owners = [factors[2 * number].detach() for _, number, _ in self.members]
        joint = _adjacent(owners)
        return torch.cat([a.to(dtype) for a in owners]) if joint is None else joint.to(dtype)


def all_factors(slices: Sequence[LinearSlice]) -> list[torch.Tensor]:
    """Return A and B of all adapters, slice by slice: those of adapter n are factors 2n and 2n + 1."""
    return [factor for part in slices for pair in part.factors for factor in pair]


def _bundles(slices: Sequence[LinearSlice]) -> list[Bundle]:
    """Gather the adapters of each task. An adapter with dropout is its own bundle, because it has its own mask."""
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


def bundles_with_s(
    slices: Sequence[LinearSlice], factors: Sequence[torch.Tensor], saved: torch.Tensor
) -> Iterator[tuple[Bundle, torch.Tensor]]:
    """Yield the bundles of adapters, each with its `S [R, rows]`, a part of `saved`."""
    offset = 0
    for bundle in _bundles(slices):
        rank = sum(len(factors[2 * number]) for _, number, _ in bundle.members)
        num_rows = bundle.segment.end - bundle.segment.start
        yield bundle, saved[offset : offset + rank * num_rows].view(rank, num_rows)
        offset += rank * num_rows


def _adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return matrices that are adjacent in memory as one, without a copy; `None` if they are not adjacent."""
    first = parts[0]
    if len(parts) == 1:
        return first
    end = first.data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end:
            return None
        end += part.numel() * part.element_size()
    size = sum(len(part) for part in parts)
    # Parts in separate storages may be adjacent by chance, but a view cannot span both.
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

    A task's factors A of all slices are used as one factor of the summed rank, so `x` is read and `dx` written once per
    task.

    Args:
        x_TD: `[T, D]` activations, sorted by task.
        slices: the frozen layers with their adapters.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        needed: the rows whose gradients a layer below needs, as ranges in order; the gradients of others are 0. By
            default all.

    Returns:
        One `[T, K]` per slice, in the autocast dtype if autocast is on, else in the dtype of `x`.
    """
    device_type = x_TD.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else x_TD.dtype
    flat = all_factors(slices)
    is_inference = device_type == "cpu" and not torch.is_grad_enabled()
    # The dtype is chosen here, once for forward and backward; autocast would cast each product separately.
    with torch.autocast(device_type, enabled=False):
        if is_inference and not any(segment.dropout for part in slices for segment in part.segments):
            return _inference(x_TD.to(dtype), slices, places)
        return GroupedLoraFunction.apply(x_TD, tuple(slices), places, dtype, needed, *flat)


class Recomputed(NamedTuple):
    """How the backward pass computes an input of linear layers again; the input has it as its attribute `recomputed`.

    Attributes:
        compute: returns the input, given `sources`.
        sources: tensors that are kept anyway.
    """

    compute: Callable[..., torch.Tensor]
    sources: tuple[torch.Tensor, ...]


def keep_input(ctx: Any, given: torch.Tensor, x: torch.Tensor, *saved: torch.Tensor) -> None:
    """Save what a backward pass needs: of the input what was `given`, or `x`, the same in the dtype of the products."""
    recomputed = vars(given).get("recomputed")  # getattr would raise and catch in every pass
    ctx.compute, ctx.shape, kept = None, x.shape, (x,)
    if recomputed is not None:
        ctx.compute, kept = recomputed
    ctx.save_for_backward(*saved, *kept)


def kept_input(ctx: Any, num_saved: int) -> tuple[torch.Tensor, ...]:
    """Return the input, computed again if it was not kept, and the other tensors that `keep_input` has saved."""
    tensors = ctx.saved_tensors  # read once, as they may be recomputed themselves
    saved, kept = tensors[:num_saved], tensors[num_saved:]
    return (kept[0] if ctx.compute is None else ctx.compute(*kept).to(ctx.dtype).view(ctx.shape), *saved)


class GroupedLoraFunction(torch.autograd.Function):
    """Manual forward and backward of `grouped_lora_slices`: in-place `addmm_` on row slices, no copies of activations.

    Skinny products are written so that the rank is their first dimension (`A x^T`, `B^T dy^T`, `S dy`): on CPUs the
    other orientation is up to ten times as slow (docs/log.md).
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
        num_saved = sum(
            len(a) * (segment.end - segment.start)
            for part in slices
            for segment, (a, _) in zip(part.segments, part.factors, strict=True)
        )
        saved = x.new_empty(num_saved)
        ys = slices_forward(x, slices, places, saved)
        keep_input(ctx, x_TD, x, places, saved)
        ctx.slices, ctx.dtype, ctx.input_dtype, ctx.needed = slices, dtype, x_TD.dtype, needed
        return ys

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dys_TK: torch.Tensor) -> tuple[Any, ...]:
        """Compute `dx` and each `dA`, `dB`; the frozen weights get no gradient."""
        x, places, saved = kept_input(ctx, 2)
        dys = [dy.to(ctx.dtype) for dy in dys_TK]
        # Below the lowest adapter nothing is trained, so no dx is needed.
        dx, gradients = slices_backward(
            dys, x, ctx.slices, places, saved, needs_dx=ctx.needs_input_grad[0], needed=ctx.needed
        )
        dx = None if dx is None else dx.to(ctx.input_dtype)
        return (dx, None, None, None, None, *gradients)


def slices_forward(
    x_TD: torch.Tensor, slices: Sequence[LinearSlice], places: torch.Tensor, saved: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return each `y`, without autograd.

    Args:
        x_TD: `[T, D]` activations, in the dtype to compute in.
        slices: the frozen layers with their adapters.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        saved: flat tensor that receives S: for each adapter its rank times its rows, or more.
    """
    factors, dtype = all_factors(slices), x_TD.dtype
    ys = []
    for part in slices:
        if part.weight_KD is None:
            ys.append(x_TD.new_zeros(len(x_TD), part.out_features))
        else:
            ys.append(F.linear(x_TD, part.weight_KD.to(dtype), None if part.bias_K is None else part.bias_K.to(dtype)))
    if x_TD.is_meta:  # only shapes are asked for: the products of many tasks would take seconds
        return tuple(ys)
    for bundle, s_RT in bundles_with_s(slices, factors, saved):
        rows = slice(bundle.segment.start, bundle.segment.end)
        kept = _kept(x_TD, bundle.segment, places)
        x_g = x_TD[rows] if kept is None else philox.dropped(x_TD[rows], kept, bundle.segment.dropout)
        # x is read once for all factors A of the task; S is kept transposed, with the rank first.
        torch.mm(bundle.joint_a(factors, dtype), x_g.t(), out=s_RT)
        for (index, number, scale), s in zip(bundle.members, bundle.split(s_RT, factors), strict=True):
            # Scaled and added within the product, on the task's own rows: no activation is copied.
            ys[index][rows].addmm_(s.t(), factors[2 * number + 1].to(dtype).t(), alpha=scale)
    return tuple(ys)


def _inference(x_TD: torch.Tensor, slices: Sequence[LinearSlice], places: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return each `y` on a CPU, without dropout and backward: no row depends on how many others its task has.

    How products round depends on the number of rows if it is small or odd, so rows around those of a task are computed
    with them, and left out again.
    """
    factors = all_factors(slices)
    ys = slices_forward(x_TD, [part._replace(segments=(), factors=()) for part in slices], places, x_TD)
    for bundle in _bundles(slices):
        start, end = bundle.segment.start, bundle.segment.end
        size = -(-(end - start) // _WHOLE_ROWS) * _WHOLE_ROWS
        first = max(0, min(start, len(x_TD) - size))
        around, inside = slice(first, first + size), slice(start - first, end - first)
        s_RT = bundle.joint_a(factors, x_TD.dtype) @ x_TD[around].t()
        for (index, number, scale), s in zip(bundle.members, bundle.split(s_RT, factors), strict=True):
            b = factors[2 * number + 1].to(x_TD.dtype)
            ys[index][start:end] = torch.addmm(ys[index][around], s.t(), b.t(), alpha=scale)[inside]
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

    If a factor already has a gradient, the product adds `dA` or `dB` to it in place, and `None` is returned for it.

    Args:
        dys_TK: gradient `[T, K]` of each `y`, in the dtype of `x`.
        x_TD: `[T, D]` activations that the forward pass read.
        slices: the frozen layers with their adapters.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        saved: S of all adapters, as filled by `slices_forward`.
        needs_dx: whether a layer below needs `dx`.
        needed: the rows of `dx` that it needs; all by default.
    """
    factors, dtype = all_factors(slices), x_TD.dtype
    dx = _base_input_gradient(x_TD, dys_TK, [part.weight_KD for part in slices], needed) if needs_dx else None
    gradients: list[Any] = [None] * len(factors)
    for bundle, s_RT in bundles_with_s(slices, factors, saved):
        rows = slice(bundle.segment.start, bundle.segment.end)
        ds_RT = torch.empty_like(s_RT)
        parts = zip(bundle.members, bundle.split(s_RT, factors), bundle.split(ds_RT, factors), strict=True)
        for (index, number, scale), s, ds in parts:
            b, dy_g = factors[2 * number + 1], dys_TK[index][rows]
            torch.mm(b.to(dtype).t().contiguous(), dy_g.t(), out=ds).mul_(scale)
            if _adds_in_place(b, dtype):
                # B's gradient is [K, R]; its transpose lets the product write it without a copy.
                b.grad.t().addmm_(s, dy_g, alpha=scale)  # type: ignore[union-attr]
            else:
                db = (s @ dy_g).mul_(scale).t()
                gradients[2 * number + 1] = db.to(b.dtype, memory_format=torch.contiguous_format)
        # Drawn again from seed and place, because keeping the mask would take memory for every layer.
        kept = _kept(x_TD, bundle.segment, places)
        x_g = x_TD[rows] if kept is None else philox.dropped(x_TD[rows], kept, bundle.segment.dropout)
        owners = [factors[2 * number] for _, number, _ in bundle.members]
        are_in_place = all(_adds_in_place(a, dtype) for a in owners)
        joint = _adjacent([a.grad for a in owners]) if are_in_place else None  # type: ignore[misc]
        if joint is not None:
            # Gradients are adjacent in a task's slab, like the factors A, and one product adds to all of them.
            joint.addmm_(ds_RT, x_g)
        else:
            for (_, number, _), da in zip(bundle.members, bundle.split(ds_RT @ x_g, factors), strict=True):
                a = factors[2 * number]
                if are_in_place:
                    a.grad.add_(da)  # type: ignore[union-attr]
                else:
                    gradients[2 * number] = da.to(a.dtype)
        if dx is None or not (needed is None or any(part.start <= rows.start < part.end for part in needed)):
            continue
        a_RD = bundle.joint_a(factors, dtype)
        if kept is None:
            dx[rows].addmm_(ds_RT.t(), a_RD)
        else:
            dx[rows] += philox.dropped(ds_RT.t() @ a_RD, kept, bundle.segment.dropout)
    return dx, gradients


def _adds_in_place(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a product may be added to the parameter's gradient directly: the gradient exists and has no hooks."""
    is_watched = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return parameter.is_leaf and parameter.grad is not None and parameter.grad.dtype == dtype and not is_watched


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
        dx_of_needed = _base_input_gradient(x[: num_rows_in(needed)], together, weights)
        return spread_rows(dx_of_needed, needed, len(x))
    dx = None
    for dy, weight in zip(dys, weights, strict=True):
        if weight is not None:
            dx = dy @ weight.to(x.dtype) if dx is None else dx.addmm_(dy, weight.to(x.dtype))
    return torch.zeros_like(x) if dx is None else dx


def _kept(x: torch.Tensor, segment: LoraSegment, places: torch.Tensor) -> torch.Tensor | None:
    """Return which elements the dropout of a segment keeps in its rows; `None` if it drops none."""
    if segment.dropout == 0.0:
        return None
    rows = slice(segment.start, segment.end)
    return philox.keep_mask(segment.seed, places[rows], x.shape[-1], segment.dropout, segment.window)
