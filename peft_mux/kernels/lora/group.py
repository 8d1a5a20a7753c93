"""The adapters of all tasks in a group of linear layers that read the same activations, and the launches of a pass.

    forward    S = x A^T of all layers, one launch; per layer y = s S_i B_i^T + bias, then the base product on top
    backward   per layer dS_i = s dy_i B_i; dx = dS A of all layers, one launch, then the base products on top;
               dA of all layers, one launch; per layer dB_i

(M §3.4.3; q, k and v, and gate and up, are such groups.) A task whose adapters have dropout draws a mask of its own for
each layer, so its A work layer by layer, in further launches. Which launches work on a task follows from that task
alone, so its bits are the same in any company.

Shape letters: T rows of the stream, D features read, K features of a layer, R rank, C columns of S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from peft_mux.kernels.lora.adapters import (
    Adapter,
    LaunchOfA,
    check_ranks,
    first_columns,
    joint_launch,
    launch_apart,
    launch_of_layer,
    work_as_one,
)
from peft_mux.kernels.lora.slices import Rows
from peft_mux.kernels.lora.tables import SegmentTables

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
