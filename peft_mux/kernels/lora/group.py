"""The adapters of all tasks in a group of linear layers that read the same activations (q, k and v; gate and up).

    forward    S = x A^T; y_i = s S_i B_i^T + bias of each layer, then the base products on top
    backward   dS_i = s dy_i B_i; dx = dS A, then the base products on top; dA; dB_i                    (M §3.4.3)

Each of these six products is one launch for all layers of the group, those with B for every three.

A task whose adapters have dropout draws a separate mask for each layer, so its factors A use one additional launch per
layer. The launches that handle a task depend only on that task, so other tasks do not change its bits.

Autograd calls a group through `LoraGroupFunction`, which adds the gradients of the factors in place to the tasks'
gradient buffers. A scalar that requires gradients (the anchor) makes outputs differentiable even if the activations are
not.

Shape letters: T rows of the stream, D features read, K features of a layer, R rank, C columns of S.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from peft_mux.kernels import philox
from peft_mux.kernels.lora.reference import Rows, keep_input, kept_input
from peft_mux.kernels.lora.tables import MAX_JOINT_RANK, MAX_LAYERS, MAX_RANK, Factors, RankTable, SegmentTables

_WORD_BYTES = 16
"""Alignment in bytes that allows vectorised loads; new torch tensors have it."""
_ROW = 16
"""The columns of S are a multiple of sixteen, so that Triton can use vectorised loads at its strides."""


class Adapter(NamedTuple):
    """One task's adapter in one linear layer, in the layout of the kernels.

    Attributes:
        a_RD: values of A; its memory is padded with zero rows to a multiple of eight rows.
        b_RK: values of B transposed.
        da_RD: fp32 gradient of A that a backward pass adds to; `None` if the adapter is not trained.
        db_RK: the same for B transposed.
        scale: alpha / rank, or alpha / sqrt(rank).
        dropout: probability of dropping an element of x.
    """

    a_RD: torch.Tensor
    b_RK: torch.Tensor
    da_RD: torch.Tensor | None
    db_RK: torch.Tensor | None
    scale: float
    dropout: float

    @property
    def rank(self) -> int:
        """Rank of the adapter, R."""
        return len(self.a_RD)

    @property
    def columns(self) -> int:
        """Number of columns of S that the adapter uses: the rank rounded up to a multiple of eight."""
        return -(-self.rank // 8) * 8


class FactorTables(NamedTuple):
    """The launch tables of one factor of each segment.

    Attributes:
        ranks: rank, scale and dropout of each segment.
        values: addresses of the factors.
        gradients: addresses of their gradients; `None` if nothing is trained.
        module_seed: the layer's half of the dropout key; `None` for no dropout.
    """

    ranks: RankTable
    values: Factors
    gradients: Factors | None
    module_seed: int | None = None


class LoraGroup:
    """The tables for the launches of a group; the same for every pass of the same tasks.

    Args:
        layers: for each linear layer, the adapter of each segment of the stream; `None` for a task without one.
        module_names: name of each layer, on which its dropout draws depend.

    Attributes:
        num_columns: number of columns of S, C.
        joint: tables of the tasks whose factors A of all layers work as one; `None` where there is no such task.
        apart: for each layer, tables of the factors A of the other tasks; `None` where there is none.
        parts_of_b: tables of the factors B, each of up to three layers and with their numbers; layers in which no task
            has an adapter are left out.
        parts_of_a: the tables of factors A that there are, in the order of their launches.

    Raises:
        ValueError: if kernels cannot read the memory of the adapters, or a rank is too large.
    """

    def __init__(self, layers: Sequence[Sequence[Adapter | None]], module_names: Sequence[str]) -> None:
        largest = max((adapter.rank for adapters in layers for adapter in adapters if adapter is not None), default=0)
        if largest > MAX_RANK:
            raise ValueError(f"the largest rank must be 1 to {MAX_RANK}, got {largest}.")
        tasks = list(zip(*layers, strict=True))
        # First column of S of each layer's adapter of a task, and where they end.
        columns = [
            list(itertools.accumulate((0 if adapter is None else adapter.columns for adapter in adapters), initial=0))
            for adapters in tasks
        ]
        # Rows of S are aligned for any dtype, so that one compiled variant works for every set of tasks.
        self.num_columns = -(-max((ends[-1] for ends in columns), default=0) // _ROW) * _ROW
        is_joint = [_work_as_one([adapter for adapter in adapters if adapter is not None]) for adapters in tasks]
        self.joint = _joint_tables(tasks, is_joint)
        self.apart: list[FactorTables | None] = []
        for index, (adapters, name) in enumerate(zip(layers, module_names, strict=True)):
            starts = [task_columns[index] for task_columns in columns]
            apart = [None if joins else adapter for adapter, joins in zip(adapters, is_joint, strict=True)]
            self.apart.append(
                _tables(
                    [0 if adapter is None else adapter.rank for adapter in apart],
                    [1.0] * len(apart),
                    [None if adapter is None else adapter.a_RD for adapter in apart],
                    [None if adapter is None else adapter.da_RD for adapter in apart],
                    columns=starts,
                    dropouts=[0.0 if adapter is None else adapter.dropout for adapter in apart],
                    module_seed=philox.hash_seed(name),
                )
            )
        self.parts_of_a = [part for part in (self.joint, *self.apart) if part is not None]
        self.parts_of_b: list[tuple[list[int], FactorTables]] = []
        adapted = [number for number, adapters in enumerate(layers) if any(adapter is not None for adapter in adapters)]
        for first in range(0, len(adapted), MAX_LAYERS):
            numbers = adapted[first : first + MAX_LAYERS]
            members = [
                (adapter, starts[number])
                for number in numbers
                for adapter, starts in zip(layers[number], columns, strict=True)
            ]
            part = _tables(
                [0 if adapter is None else adapter.rank for adapter, _ in members],
                [0.0 if adapter is None else adapter.scale for adapter, _ in members],
                [None if adapter is None else adapter.b_RK for adapter, _ in members],
                [None if adapter is None else adapter.db_RK for adapter, _ in members],
                columns=[column for _, column in members],
                num_layers=len(numbers),
            )
            assert part is not None, "layers without adapters are left out"
            self.parts_of_b.append((numbers, part))
        # Numbers of how the tensors of passes lie: launches that were prepared are found by them.
        self._layouts: dict[tuple[Any, ...], int] = {}

    def layout_of(self, x_TD: torch.Tensor, s_TC: torch.Tensor, segments: SegmentTables) -> int | None:
        """Return a number for everything that decides on the launches of a pass over rows that lie like these.

        Factors, ranks, scales and layers are not part of it, because they are fixed for a group. A launch that draws
        or adds a bias takes no number.

        Returns:
            `None` if tables do not fit the rows, or rows do not begin on 16 bytes: then each launch checks its tensors.
        """
        if segments.num_rows > x_TD.shape[0] or x_TD.data_ptr() % _WORD_BYTES:
            return None
        sizes = segments.block_rows, segments.shrink_rows, segments.chunk_rows, segments.num_segments
        key = x_TD.dtype, x_TD.stride(), s_TC.stride(), sizes
        return self._layouts.setdefault(key, len(self._layouts))


def _tables(
    ranks: Sequence[int],
    scales: Sequence[float],
    values: Sequence[torch.Tensor | None],
    gradients: Sequence[torch.Tensor | None],
    *,
    columns: Sequence[int] | None = None,
    dropouts: Sequence[float] | None = None,
    module_seed: int | None = None,
    num_layers: int = 1,
) -> FactorTables | None:
    """Return the tables of one factor of each segment, layer by layer; `None` if no segment has one."""
    first = next((value for value in values if value is not None), None)
    if first is None:
        return None
    starts = None if columns is None else [start if rank else 0 for start, rank in zip(columns, ranks, strict=True)]
    table = RankTable(ranks, scales, s_columns=starts, dropouts=dropouts, device=first.device)
    size = len(values) // num_layers
    by_layer = [values[start : start + size] for start in range(0, len(values), size)]
    widths = [next(value.shape[1] for value in layer if value is not None) for layer in by_layer]
    trains = all(value is None or gradient is not None for value, gradient in zip(values, gradients, strict=True))
    return FactorTables(table, Factors(values, *widths), Factors(gradients, *widths) if trains else None, module_seed)


def _joint_tables(tasks: Sequence[Sequence[Adapter | None]], is_joint: Sequence[bool]) -> FactorTables | None:
    """Return the tables of the tasks whose factors A are used as one matrix, which starts at the first factor."""
    ranks: list[int] = []
    values: list[torch.Tensor | None] = []
    gradients: list[torch.Tensor | None] = []
    for adapters, joins in zip(tasks, is_joint, strict=True):
        present = [adapter for adapter in adapters if adapter is not None] if joins else []
        # A single factor keeps its own rank, so that narrow ranks stay narrow; several are padded to groups of eight.
        rank = present[0].rank if len(present) == 1 else sum(adapter.columns for adapter in present)
        ranks.append(rank)
        for matrices, first in (
            (values, present[0].a_RD if present else None),
            (gradients, present[0].da_RD if present else None),
        ):
            matrices.append(None if first is None else first.as_strided((rank, first.shape[1]), (first.shape[1], 1)))
    # Scales of 1, because layers may have different scales, which are applied with B.
    return _tables(ranks, [1.0] * len(ranks), values, gradients)


def _work_as_one(adapters: Sequence[Adapter]) -> bool:
    """Whether the factors A of one task in all layers can be used as one matrix: no dropout, adjacent in memory."""
    if any(philox.drop_threshold(adapter.dropout) for adapter in adapters):
        return False
    if sum(adapter.columns for adapter in adapters) > MAX_JOINT_RANK:
        return False
    for adapter, following in itertools.pairwise(adapters):
        for former, latter in ((adapter.a_RD, following.a_RD), (adapter.da_RD, following.da_RD)):
            if former is None and latter is None:
                continue
            if former is None or latter is None:
                return False
            end = former.data_ptr() + adapter.columns * former.shape[1] * former.element_size()
            # Two storages may be adjacent by chance, and a view must not span both.
            is_same_memory = former.untyped_storage().data_ptr() == latter.untyped_storage().data_ptr()
            if not is_same_memory or latter.data_ptr() != end:
                return False
    return True


class Base(NamedTuple):
    """The frozen part of one linear layer.

    Attributes:
        weight_KD: frozen weight `[K, D]`; `None` if the caller adds the base layer's output.
        bias_K: frozen bias `[K]`, or `None`.
        out_features: number of output features, K.
        needed: the rows whose `dx` a layer below needs, as ranges in order; the contribution of this weight is computed
            only for them. `None` for all.
    """

    weight_KD: torch.Tensor | None
    bias_K: torch.Tensor | None
    out_features: int
    needed: tuple[Rows, ...] | None = None

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Return the frozen layer's output; zeros if the caller adds it."""
        if self.weight_KD is None:
            return x.new_zeros((*x.shape[:-1], self.out_features))
        bias = None if self.bias_K is None else _cast(self.bias_K, x.dtype)
        return F.linear(x, _cast(self.weight_KD, x.dtype), bias)

    def add_input_gradient(self, dx_TD: torch.Tensor, dy_TK: torch.Tensor) -> None:
        """Add `dy W` to the needed rows of `dx`; do nothing if the caller adds the base layer's output."""
        if self.weight_KD is None:
            return
        weight_KD = _cast(self.weight_KD, dx_TD.dtype)
        for start, end in ((0, len(dx_TD)),) if self.needed is None else self.needed:
            # Ranges are read in place, because gathering them would take as long as reading them.
            dx_TD[start:end].addmm_(dy_TK[start:end], weight_KD)


def _biases_of(bases: Sequence[Base], x_TD: torch.Tensor) -> list[torch.Tensor]:
    """Return the bias of each layer, zeros for one that has none; nothing if no layer has one."""
    if all(base.bias_K is None for base in bases):
        return []
    return [
        x_TD.new_zeros(base.out_features) if base.bias_K is None else _cast(base.bias_K, x_TD.dtype) for base in bases
    ]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Compared first, because a cast to the same dtype costs the host as much as a small launch.
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return `x [..., D]` as `[T, D]`, copied (once for all layers) only if its columns are not adjacent."""
    # The gradient of `expand` or `sum` has strides of 0, and tensors after a convolution are transposed.
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def more_arguments(part: FactorTables, places: torch.Tensor, layout: int | None) -> dict[str, Any]:
    """Return the arguments of launches of A that depend on whether they have dropout."""
    # Launches with dropout check the places in every pass, and therefore its whole layout.
    return {"layout": layout} if part.module_seed is None else {"places": places, "module_seed": part.module_seed}


class KernelCall(NamedTuple):
    """A group in a pass, computed by the kernels.

    Attributes:
        group: the tables of the group.
        bases: the frozen part of each of its layers.
        segments: which rows of the stream belong to which task.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
    """

    group: LoraGroup
    bases: Sequence[Base]
    segments: SegmentTables
    places: torch.Tensor

    def forward(self, x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return each layer's `y [..., K]` of `x [..., D]`, in the factors' dtype, and S for the backward pass."""
        # Imported here, because this file must be importable without Triton.
        from peft_mux.kernels.lora import launch as kernels

        group, segments, places = self.group, self.segments, self.places
        lead, x_TD = x.shape[:-1], rows_of(x)
        # Not zeroed, because no kernel reads columns of S that its segment has not written.
        s_TC = x_TD.new_empty((x_TD.shape[0], group.num_columns))
        layout = group.layout_of(x_TD, s_TC, segments)
        for part in group.parts_of_a:
            more = more_arguments(part, places, layout)
            kernels.shrink(x_TD, part.values, s_TC, segments, part.ranks, scaled=False, **more)
        # The adapters' part first, so that the base product adds it in its epilogue and no kernel needs to read y.
        ys: dict[int, torch.Tensor] = {}
        for numbers, part in group.parts_of_b:
            bases = [self.bases[number] for number in numbers]
            for number, base in zip(numbers, bases, strict=True):
                ys[number] = x_TD.new_empty((*lead, base.out_features))
            y_TK, *others = (rows_of(ys[number]) for number in numbers)
            biases = _biases_of(bases, x_TD)
            more = {"others": others, "biases": biases, "layout": None if biases else layout}
            kernels.expand(s_TC, part.values, y_TK, segments, part.ranks, scaled=True, **more)
        outputs = []
        for number, base in enumerate(self.bases):
            if number in ys and base.weight_KD is not None:
                rows_of(ys[number]).addmm_(x_TD, _cast(base.weight_KD, x_TD.dtype).t())
            outputs.append(ys[number] if number in ys else base.output(x))
        return tuple(outputs), s_TC

    def backward(
        self, dys: Sequence[torch.Tensor], x: torch.Tensor, saved: torch.Tensor, *, needs_dx: bool
    ) -> torch.Tensor | None:
        """Add to the gradients of the factors, and return `dx [..., D]` if a layer below needs it.

        Args:
            dys: gradient `[..., K]` of each layer's output.
            x: `[..., D]` activations that the forward pass read.
            saved: the S `[T, C]` that the forward pass returned.
            needs_dx: whether a layer below needs `dx`.
        """
        from peft_mux.kernels.lora import launch as kernels

        group, segments, places = self.group, self.segments, self.places
        x_TD = rows_of(x)
        dys_TK = [rows_of(dy) for dy in dys]
        # dS comes first, because dx and dA both read it (M Eq. 2).
        ds_TC = torch.empty_like(saved)
        layout = group.layout_of(x_TD, saved, segments)
        # Gradients with the layout of new tensors use the layout number of x.
        are_new = all(
            dy.dtype is x_TD.dtype and dy.is_contiguous() and not dy.data_ptr() % _WORD_BYTES for dy in dys_TK
        )
        of_b = []
        for numbers, part in group.parts_of_b:
            dy_TK, *others = (dys_TK[number] for number in numbers)
            of_b.append((part, dy_TK, {"scaled": True, "others": others, "layout": layout if are_new else None}))
        for part, dy_TK, more in of_b:
            kernels.shrink(dy_TK, part.values, ds_TC, segments, part.ranks, **more)
        dx = None
        if needs_dx:
            # A new tensor with aligned rows, whatever the layout of x.
            # The joint launch writes every row; without it, launches of single layers add to zeros.
            dx = x_TD.new_zeros(x.shape) if group.joint is None else x_TD.new_empty(x.shape)
            dx_TD = rows_of(dx)
            # The adapters' part first, then the base's, in the same order for any set of tasks.
            for part in group.parts_of_a:
                more = more_arguments(part, places, layout)
                add = part is not group.joint
                kernels.expand(ds_TC, part.values, dx_TD, segments, part.ranks, scaled=False, add=add, **more)
            for dy, base in zip(dys_TK, self.bases, strict=True):
                base.add_input_gradient(dx_TD, dy)
        for part in group.parts_of_a:
            if part.gradients is not None:
                more = more_arguments(part, places, layout)
                kernels.wgrad(ds_TC, x_TD, part.gradients, segments, part.ranks, scaled=False, accumulate=True, **more)
        for part, dy_TK, more in of_b:
            if part.gradients is not None:
                kernels.wgrad(saved, dy_TK, part.gradients, segments, part.ranks, accumulate=True, **more)
        return dx


class LoraGroupFunction(torch.autograd.Function):
    """One group of layers, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor | None, call: KernelCall, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Compute each `y [..., K]` of `x [..., D]`; save `x` and the tensors that the call needs."""
        ctx.call, ctx.dtype, ctx.input_dtype, given = call, dtype, x.dtype, x
        # x may have any shape, because a view outside this function would add two autograd nodes per layer.
        x, device_type = x if x.dtype is dtype else x.to(dtype), x.device.type
        # The dtype is already chosen; autocast would cast each product separately. These two calls do the same as
        # `torch.autocast`, which would cost as much as several launches.
        autocast = torch.is_autocast_enabled(device_type)
        torch.set_autocast_enabled(device_type, False)
        try:
            outputs, saved = call.forward(x)
        finally:
            torch.set_autocast_enabled(device_type, autocast)
        keep_input(ctx, given, x, saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        """Return `dx`, and add to the gradients of the factors."""
        # Checked here, because `once_differentiable` uses a context that costs as much as a launch in every layer.
        return (_once_differentiable if torch.is_grad_enabled() else _gradients)(ctx, *dys)


def _gradients(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
    x, saved = kept_input(ctx, 1)
    dtype, input_dtype = ctx.dtype, ctx.input_dtype
    dys = tuple(dy if dy.dtype is dtype else dy.to(dtype) for dy in dys)
    dx = ctx.call.backward(dys, x, saved, needs_dx=ctx.needs_input_grad[0])
    # None for the anchor: the gradients of the factors are already in their buffers.
    return dx if dx is None or input_dtype is dtype else dx.to(input_dtype), None, None, None


_once_differentiable = torch.autograd.function.once_differentiable(_gradients)
