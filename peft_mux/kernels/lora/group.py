"""Where the adapters of a group of linear layers lie, and the tables by which launches find them.

Shape letters: D features read, K features of a layer, R rank.
"""

# MERGED: The adapters of all tasks in a group of linear layers that read the same activations, and the launches of a
# MERGED: pass.
# MERGED: forward    S = x A^T of all layers, one launch; per layer y = s S_i B_i^T + bias, then the base product on
# MERGED: top
# MERGED: backward   per layer dS_i = s dy_i B_i; dx = dS A of all layers, one launch, then the base products on top;
# MERGED:                dA of all layers, one launch; per layer dB_i
# MERGED: (M §3.4.3; q, k and v, and gate and up, are such groups.) A task whose adapters have dropout draws a mask of
# MERGED: its own for
# MERGED: each layer, so its A work layer by layer, in further launches. Which launches work on a task follows from
# MERGED: that task
# MERGED: alone, so its bits are the same in any company.
# MERGED: Shape letters: T rows of the stream, D features read, K features of a layer, R rank, C columns of S.
# MERGED: The two kinds of `GroupCall`: a group of layers in one pass, through kernels or through products on slices.
# MERGED: Shape letters: T rows of the stream, D features read, K features of a layer.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from peft_mux.kernels import philox
from peft_mux.kernels.lora.launch import Factors
from peft_mux.kernels.lora.reference import LinearSlice, Rows, all_factors, slices_backward, slices_forward
from peft_mux.kernels.lora.tables import MAX_JOINT_RANK, MAX_RANK, RankTable, SegmentTables

_COLUMNS = 8
"""Columns of S, and rows of A that follow each other in memory, come in groups of eight."""


class Adapter(NamedTuple):
    """One task's adapter in one linear layer, where kernels find it.

    Attributes:
        a_RD: values of A; rows up to the next multiple of eight are zeros that belong to it.
        b_RK: values of B transposed.
        da_RD: fp32 gradient of A that a backward pass adds to; `None` where nothing trains.
        db_RK: the same of B transposed.
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
        """Number of columns of S that it takes, the rank rounded up to a multiple of eight."""
        return -(-self.rank // _COLUMNS) * _COLUMNS


class LaunchOfA(NamedTuple):
    """What launches of factors A need, be it those of all layers at once, or those of one layer with its own draws.

    Attributes:
        ranks: rank, scale and dropout of each segment.
        values: where the factors lie.
        gradients: where their gradients lie; `None` where nothing trains.
        module_seed: the layer's half of the dropout key; `None` for no dropout.
    """

    ranks: RankTable
    values: Factors
    gradients: Factors | None
    module_seed: int | None


class LaunchOfB(NamedTuple):
    """What launches of one layer's factors B need.

    Attributes:
        ranks: rank and scale of each segment.
        values: where the factors lie.
        gradients: where their gradients lie; `None` where nothing trains.
    """

    ranks: RankTable
    values: Factors
    gradients: Factors | None


def check_ranks(layers: Sequence[Sequence[Adapter | None]]) -> None:
    """Raise `ValueError` where a rank is greater than kernels can serve."""
    ranks = [adapter.rank for adapters in layers for adapter in adapters if adapter is not None]
    if max(ranks, default=0) > MAX_RANK:
        raise ValueError(f"the largest rank is {max(ranks)}; allowed: 1 to {MAX_RANK}.")


def first_columns(adapters: Sequence[Adapter | None]) -> list[int]:
    """Return the first column of S of each layer's adapter of one task, and where they end."""
    starts = [0]
    for adapter in adapters:
        starts.append(starts[-1] + (0 if adapter is None else adapter.columns))
    return starts


def work_as_one(adapters: Sequence[Adapter | None]) -> bool:
    """Whether the factors A of one task in all layers can work as one: no draws, and side by side in memory."""
    present = [adapter for adapter in adapters if adapter is not None]
    if any(philox.drop_threshold(adapter.dropout) for adapter in present):
        return False
    if sum(adapter.columns for adapter in present) > MAX_JOINT_RANK:
        return False
    return all(
        _follows(one.a_RD, one.columns, other.a_RD) and _follows(one.da_RD, one.columns, other.da_RD)
        for one, other in zip(present[:-1], present[1:], strict=True)
    )


def _follows(one_RD: torch.Tensor | None, rows: int, other_RD: torch.Tensor | None) -> bool:
    if one_RD is None or other_RD is None:
        return one_RD is other_RD
    end = one_RD.data_ptr() + rows * one_RD.shape[1] * one_RD.element_size()
    # Two storages may follow each other by chance, and a view must not reach from one into the other.
    same_memory = one_RD.untyped_storage().data_ptr() == other_RD.untyped_storage().data_ptr()
    return same_memory and other_RD.data_ptr() == end


def joint_launch(segments: Sequence[Sequence[Adapter | None]], is_joint: Sequence[bool]) -> LaunchOfA | None:
    """Return the launches of the tasks whose factors A work as one."""
    ranks: list[int] = []
    values: list[torch.Tensor | None] = []
    gradients: list[torch.Tensor | None] = []
    for adapters, joins in zip(segments, is_joint, strict=True):
        present = [adapter for adapter in adapters if adapter is not None] if joins else []
        # A group of one keeps its own rank, so that narrow ones stay narrow; of several, each takes whole groups.
        rank = present[0].rank if len(present) == 1 else sum(adapter.columns for adapter in present)
        ranks.append(rank)
        values.append(_rows_from(present[0].a_RD, rank) if present else None)
        gradients.append(_rows_from(present[0].da_RD, rank) if present else None)
    if not any(ranks):
        return None
    width = next(value.shape[1] for value in values if value is not None)
    # Scales of 1: those of the layers may differ, and enter with B.
    table = RankTable(ranks, [1.0] * len(ranks), device=_first_device(values))
    return LaunchOfA(table, Factors(values, width), _gradient_factors(gradients, values, width), None)


def launch_apart(
    adapters: Sequence[Adapter | None], is_joint: Sequence[bool], columns: Sequence[int], module_name: str
) -> LaunchOfA | None:
    """Return the launches of one layer's factors A of the other tasks."""
    own = [None if joins else adapter for adapter, joins in zip(adapters, is_joint, strict=True)]
    layer = launch_of_layer(own, columns, of_a=True)
    return None if layer is None else LaunchOfA(*layer, philox.hash_seed(module_name))


def launch_of_layer(
    adapters: Sequence[Adapter | None], columns: Sequence[int], *, of_a: bool = False
) -> LaunchOfB | None:
    """Return the launches of one layer's factors, B unless `of_a`; `None` where no task has an adapter."""
    values = [None if item is None else (item.a_RD if of_a else item.b_RK) for item in adapters]
    gradients = [None if item is None else (item.da_RD if of_a else item.db_RK) for item in adapters]
    if all(value is None for value in values):
        return None
    width = next(value.shape[1] for value in values if value is not None)
    table = RankTable(
        [0 if item is None else item.rank for item in adapters],
        [0.0 if item is None else 1.0 if of_a else item.scale for item in adapters],
        s_columns=[0 if item is None else column for item, column in zip(adapters, columns, strict=True)],
        dropouts=[0.0 if item is None or not of_a else item.dropout for item in adapters],
        device=_first_device(values),
    )
    return LaunchOfB(table, Factors(values, width), _gradient_factors(gradients, values, width))


def _gradient_factors(
    gradients: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor | None], width: int
) -> Factors | None:
    """Return where gradients lie, or `None` unless every adapter has one."""
    is_bound = all(value is None or gradient is not None for value, gradient in zip(values, gradients, strict=True))
    return Factors(gradients, width) if is_bound else None


def _rows_from(first_RD: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """Return a matrix of more rows that begins where another does."""
    return None if first_RD is None else first_RD.as_strided((rows, first_RD.shape[1]), (first_RD.shape[1], 1))


def _first_device(values: Sequence[torch.Tensor | None]) -> torch.device:
    return next(value.device for value in values if value is not None)


_WORD_BYTES = 16
"""Tensors that begin on such are read by whole words; new ones of torch's do."""
_ROW = 16
"""Columns of a row of S come in groups of sixteen, by which Triton tells strides that it may load whole words at."""


class Layouts:
    """Numbers for how the tensors of passes lie, by which launches that were prepared are found again."""

    def __init__(self) -> None:
        """Begin without any."""
        self._numbers: dict[tuple[Any, ...], int] = {}

    def of(self, x_TD: torch.Tensor, s_TC: torch.Tensor, segments: SegmentTables) -> int | None:
        """Return a number for all that decides on the launches of a pass over rows that lie like these.

        Beside it that is fixed: factors, ranks, scales and layers belong to the group; a launch that draws, or adds a
        bias, looks for itself.

        Returns:
            `None` where tables do not fit the rows, or these begin anywhere: then each launch looks for itself.
        """
        if segments.num_rows > x_TD.shape[0] or x_TD.data_ptr() % _WORD_BYTES:
            return None
        key = x_TD.dtype, x_TD.stride(), s_TC.stride(), segments.block_rows, segments.chunk_rows, segments.num_segments
        return self._numbers.setdefault(key, len(self._numbers))


class LoraGroup:
    """What the launches of a group need to know of its adapters; the same for every pass of the same tasks.

    Args:
        layers: for each linear layer, the adapter of each segment of the stream; `None` for a task without one.
        module_names: name of each layer, on which its dropout draws depend.

    Attributes:
        num_columns: number of columns of S, C.
        joint: launches of the tasks whose factors A of all layers work as one; `None` where there is no such task.
        apart: for each layer, launches of the factors A of the other tasks; `None` where there is none.
        layers: for each layer, launches of the factors B; `None` where no task has an adapter in it.

    Raises:
        ValueError: if the adapters lie where kernels cannot read them, or a rank is too great.
    """

    def __init__(self, layers: Sequence[Sequence[Adapter | None]], module_names: Sequence[str]) -> None:
        """Decide which launches each task takes part in, and build their tables."""
        segments = list(zip(*layers, strict=True))
        check_ranks(layers)
        columns = [first_columns(adapters) for adapters in segments]
        # Whole words of any dtype in a row of S, so that one compiled variant serves every set of tasks.
        self.num_columns = -(-max((ends[-1] for ends in columns), default=0) // _ROW) * _ROW
        is_joint = [work_as_one(adapters) for adapters in segments]
        self.joint = joint_launch(segments, is_joint)
        self.apart = [
            launch_apart(adapters, is_joint, [starts[index] for starts in columns], name)
            for index, (adapters, name) in enumerate(zip(layers, module_names, strict=True))
        ]
        self.layers = [
            launch_of_layer(adapters, [starts[index] for starts in columns]) for index, adapters in enumerate(layers)
        ]
        self._launches_of_a = [part for part in (self.joint, *self.apart) if part is not None]
        self._layouts = Layouts()

    def forward(
        self,
        x: torch.Tensor,
        bases: Sequence[Base],
        segments: SegmentTables,
        places: torch.Tensor,
        *,
        num_columns: int | None = None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return each layer's `y [..., K]`, and S for the backward pass.

        Args:
            x: `[..., D]` activations, T rows, in the dtype of the factors.
            bases: the frozen part of each layer.
            segments: which rows of the stream belong to which task.
            places: int64 `[T]`, place of each row in its task's global batch, for dropout.
            num_columns: number of columns of S, where it shall be wider than needed.
        """
        # Imported here, as it needs Triton, without which this file has to be importable.
        from peft_mux.kernels.lora import launch as kernels

        lead, x_TD = x.shape[:-1], rows_of(x)
        # Not zeroed: no kernel reads columns of S that its segment has not written.
        s_TC = x_TD.new_empty((x_TD.shape[0], num_columns or self.num_columns))
        layout = self._layouts.of(x_TD, s_TC, segments)
        for part in self._launches_of_a:
            more = _arguments_of_a(part, places, layout)
            kernels.shrink(x_TD, part.values, s_TC, segments, part.ranks, scaled=False, **more)
        outputs = []
        for layer, base in zip(self.layers, bases, strict=True):
            if layer is None:
                outputs.append(base.output(x))
                continue
            y = x_TD.new_empty((*lead, base.out_features))
            y_TK = rows_of(y)
            bias = None if base.bias_K is None else _cast(base.bias_K, x_TD.dtype)
            of_y = layout if bias is None else None
            # The adapters' part first: the base product adds it in its own epilogue, and no kernel has to read y.
            kernels.expand(s_TC, layer.values, y_TK, segments, layer.ranks, scaled=True, bias=bias, layout=of_y)
            if base.weight_KD is not None:
                y_TK.addmm_(x_TD, _cast(base.weight_KD, x_TD.dtype).t())
            outputs.append(y)
        return tuple(outputs), s_TC

    def backward(
        self,
        dys: Sequence[torch.Tensor],
        x: torch.Tensor,
        s_TC: torch.Tensor,
        bases: Sequence[Base],
        segments: SegmentTables,
        places: torch.Tensor,
        *,
        needs_dx: bool,
    ) -> torch.Tensor | None:
        """Add to the gradients of the factors, and return `dx [..., D]`.

        Args:
            dys: gradient `[..., K]` of each layer's output.
            x: `[..., D]` activations that the forward pass read.
            s_TC: the S `[T, C]` that the forward pass returned.
            bases: the frozen part of each layer.
            segments: which rows of the stream belong to which task.
            places: int64 `[T]`, place of each row in its task's global batch, for dropout.
            needs_dx: whether a layer below needs `dx`.
        """
        from peft_mux.kernels.lora import launch as kernels

        x_TD = rows_of(x)
        dys_TK = [rows_of(dy) for dy in dys]
        # dS comes first, as dx and dA both read it (M Eq. 2).
        ds_TC = torch.empty_like(s_TC)
        layout = self._layouts.of(x_TD, s_TC, segments)
        layouts = [layout if lies_like_new(dy, x_TD.dtype) else None for dy in dys_TK]
        for layer, dy, of_dy in zip(self.layers, dys_TK, layouts, strict=True):
            if layer is not None:
                kernels.shrink(dy, layer.values, ds_TC, segments, layer.ranks, scaled=True, layout=of_dy)
        dx = None
        if needs_dx:
            # Rows of their own, whatever the layout of x: kernels write whole words of a row.
            # The joint launch writes every row; without it, launches of single layers add to zeros.
            dx = x_TD.new_empty(x.shape) if self.joint is not None else x_TD.new_zeros(x.shape)
            self._input_gradient(rows_of(dx), dys_TK, ds_TC, bases, segments, places, layout)
        for part in self._launches_of_a:
            if part.gradients is not None:
                more = _arguments_of_a(part, places, layout)
                kernels.wgrad(ds_TC, x_TD, part.gradients, segments, part.ranks, scaled=False, accumulate=True, **more)
        for layer, dy, of_dy in zip(self.layers, dys_TK, layouts, strict=True):
            if layer is not None and layer.gradients is not None:
                kernels.wgrad(
                    s_TC, dy, layer.gradients, segments, layer.ranks, scaled=True, accumulate=True, layout=of_dy
                )
        return dx

    def _input_gradient(
        self,
        dx_TD: torch.Tensor,
        dys_TK: Sequence[torch.Tensor],
        ds_TC: torch.Tensor,
        bases: Sequence[Base],
        segments: SegmentTables,
        places: torch.Tensor,
        layout: int | None,
    ) -> None:
        """Write dx: the adapters' part first, the base's on top; in this order in any company."""
        from peft_mux.kernels.lora import launch as kernels

        if self.joint is not None:
            kernels.expand(ds_TC, self.joint.values, dx_TD, segments, self.joint.ranks, scaled=False, layout=layout)
        for part in self.apart:
            if part is not None:
                more = _arguments_of_a(part, places, layout)
                kernels.expand(ds_TC, part.values, dx_TD, segments, part.ranks, scaled=False, add=True, **more)
        for dy, base in zip(dys_TK, bases, strict=True):
            base.add_input_gradient(dx_TD, dy)


class Base(NamedTuple):
    """The frozen part of one linear layer.

    Attributes:
        weight_KD: frozen weight `[K, D]`; `None` where the caller adds the base's output.
        bias_K: frozen bias `[K]`, or `None`.
        out_features: number of output features, K.
        needed: the rows whose `dx` a layer below needs, as ranges in order, the others being left without the part of
            this weight; `None` for all.
    """

    weight_KD: torch.Tensor | None
    bias_K: torch.Tensor | None
    out_features: int
    needed: tuple[Rows, ...] | None = None

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Return the frozen layer's own output; zeros where the caller adds it."""
        if self.weight_KD is None:
            return x.new_zeros((*x.shape[:-1], self.out_features))
        bias = None if self.bias_K is None else _cast(self.bias_K, x.dtype)
        return F.linear(x, _cast(self.weight_KD, x.dtype), bias)

    def add_input_gradient(self, dx_TD: torch.Tensor, dy_TK: torch.Tensor) -> None:
        """Add `dy W` to `dx`, in the rows that are needed; nothing where the caller adds the base's output."""
        if self.weight_KD is None:
            return
        weight_KD = _cast(self.weight_KD, dx_TD.dtype)
        for start, end in ((0, len(dx_TD)),) if self.needed is None else self.needed:
            # Ranges lie as they are: to gather them would take as long as reading them.
            dx_TD[start:end].addmm_(dy_TK[start:end], weight_KD)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Asked first: a cast to the dtype that it has costs the host as much as a small launch.
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return `x [..., D]` as `[T, D]`, copied only where its columns are not adjacent: once, for all readers."""
    # A gradient of `expand` or `sum` has strides of 0, and what follows a convolution is transposed.
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def lies_like_new(dy_TK: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a gradient lies as a new tensor of a dtype would, so that the layout of x tells that of its launches."""
    return dy_TK.dtype is dtype and dy_TK.is_contiguous() and not dy_TK.data_ptr() % _WORD_BYTES


def _arguments_of_a(part: LaunchOfA, places: torch.Tensor, layout: int | None) -> dict[str, Any]:
    # Launches that draw check the places of every pass, and so all of its layout.
    return {"layout": layout} if part.module_seed is None else {"places": places, "module_seed": part.module_seed}


class KernelCall(NamedTuple):
    """A group in a pass, through the kernels.

    Attributes:
        group: the tables of the group.
        bases: the frozen part of each of its layers.
        segments: which rows of the stream belong to which task.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        num_columns: columns that are kept of each row for the backward pass; by default as many as these tasks need.
    """

    group: LoraGroup
    bases: Sequence[Base]
    segments: SegmentTables
    places: torch.Tensor
    num_columns: int | None = None

    def forward(self, x_TD: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return each layer's output `[T, K]`, and what the backward pass needs besides `x_TD`."""
        return self.group.forward(x_TD, self.bases, self.segments, self.places, num_columns=self.num_columns)

    def backward(
        self, dys_TK: Sequence[torch.Tensor], x_TD: torch.Tensor, saved: torch.Tensor, *, needs_dx: bool
    ) -> torch.Tensor | None:
        """Add to the gradients of the adapters, and return that of `x_TD` where a layer below needs it."""
        return self.group.backward(dys_TK, x_TD, saved, self.bases, self.segments, self.places, needs_dx=needs_dx)


class SliceCall(NamedTuple):
    """A group in a pass, through products on slices; adds to the parameters' own gradients.

    Attributes:
        slices: the layers of the group with their adapters.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        num_columns: columns that are kept of each row for the backward pass.
    """

    slices: Sequence[LinearSlice]
    places: torch.Tensor
    num_columns: int

    def forward(self, x_TD: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return each layer's output `[T, K]`, and what the backward pass needs besides `x_TD`."""
        # As wide as the compiled graph was told, which may be more than these tasks fill.
        saved = x_TD.new_zeros(len(x_TD) * self.num_columns)
        return slices_forward(x_TD, self.slices, self.places, saved), saved

    def backward(
        self, dys_TK: Sequence[torch.Tensor], x_TD: torch.Tensor, saved: torch.Tensor, *, needs_dx: bool
    ) -> torch.Tensor | None:
        """Add to the gradients of the adapters, and return that of `x_TD` where a layer below needs it."""
        factors = all_factors(self.slices)
        dx, gradients = slices_backward(dys_TK, x_TD, self.slices, self.places, saved.reshape(-1), needs_dx=needs_dx)
        for factor, gradient in zip(factors, gradients, strict=True):
            if gradient is not None:
                # By hand, as autograd sees the whole group as one operator without factors.
                factor.grad = gradient if factor.grad is None else factor.grad.add_(gradient)
        return dx
