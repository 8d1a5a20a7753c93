"""The differences of many tasks on one frozen layer, over one packed stream.

    y_g += x_g delta_g^T          dx_g = dy_g delta_g          ddelta_g = dy_g^T x_g

No sum of a frozen weight and a difference is ever made. A difference is computed of its trained tensors where it is
multiplied with, forward and backward, and freed at once: between the two a pass holds nothing of its size.

Shape letters: T rows of the stream, D input and K output features of the frozen layer.
"""

# MERGED: The multiplexed layer of Diff Pruning: the frozen layer once over the stream, each task's difference on its
# MERGED: rows.
# MERGED: Diff Pruning as a kind of adapters: differences on frozen layers, those of all tasks in one pass.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn

from peft_mux.errors import Fault
from peft_mux.kernels import philox
from peft_mux.modeling.adapters.diff_pruning.peft_tuner import (
    DIFF_PRUNING,
    DiffPruningConfig,
    Noise,
    Relaxed,
    Stretch,
    diff_pruning_faults,
    expected_l0,
    gated_delta,
    total,
)
from peft_mux.modeling.adapters.kind import MultiplexedForward, ReplicaLayout, register_kind
from peft_mux.modeling.adapters.sliced import SlicedKind
from peft_mux.modeling.backbone.quantized import base_output
from peft_mux.modeling.stream import RowSegment, Stream


class DiffSegment(NamedTuple):
    """Rows of one task on one layer, and how its difference comes about.

    Attributes:
        start: first row of the task in the stream.
        end: one past the task's last row.
        delta: returns the difference `[K, D]` of the trained tensors, the same each time in one step.
        parts: the trained tensors.
    """

    start: int
    end: int
    delta: Callable[..., torch.Tensor]
    parts: tuple[torch.Tensor, ...]


def grouped_deltas(y_TK: torch.Tensor, x_TD: torch.Tensor, segments: Sequence[DiffSegment]) -> torch.Tensor:
    """Return `[T, K]`, a frozen layer's output with every task's difference applied to its own rows.

    Args:
        y_TK: the frozen layer's output, sorted by task.
        x_TD: what the frozen layer has read.
        segments: rows of the tasks that have a difference here; rows of no segment stay as they are.
    """
    flat = [part for segment in segments for part in segment.parts]
    # The frozen layer has settled the dtype; autocast would cast each product by itself.
    with torch.autocast(y_TK.device.type, enabled=False):
        return DiffPruningFunction.apply(y_TK, x_TD.to(y_TK.dtype), tuple(segments), *flat)


class DiffPruningFunction(torch.autograd.Function):
    """Manual forward and backward of `grouped_deltas`, in place on row slices."""

    @staticmethod
    def forward(
        ctx: Any, y_TK: torch.Tensor, x_TD: torch.Tensor, segments: tuple[DiffSegment, ...], *flat: torch.Tensor
    ) -> torch.Tensor:
        """Compute the output; save `x`."""
        out = y_TK.clone()
        for segment, parts in _with_parts(segments, flat):
            rows = slice(segment.start, segment.end)
            out[rows].addmm_(x_TD[rows], segment.delta(*parts).to(out.dtype).t())
        ctx.save_for_backward(x_TD)
        ctx.segments, ctx.flat = segments, flat
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_TK: torch.Tensor) -> tuple[Any, ...]:
        """Compute `dx` and the gradient of each trained tensor."""
        (x_TD,) = ctx.saved_tensors
        # Below the lowest adapter nothing trains, and no dx is needed.
        dx_TD = torch.zeros_like(x_TD) if ctx.needs_input_grad[1] else None
        gradients: list[torch.Tensor] = []
        for segment, parts in _with_parts(ctx.segments, ctx.flat):
            rows = slice(segment.start, segment.end)
            leaves = [part.detach().requires_grad_() for part in parts]
            with torch.enable_grad():
                delta_KD = segment.delta(*leaves)
            if dx_TD is not None:
                torch.mm(dy_TK[rows], delta_KD.detach().to(dy_TK.dtype), out=dx_TD[rows])
            ddelta_KD = (dy_TK[rows].t() @ x_TD[rows]).to(delta_KD.dtype)
            gradients += torch.autograd.grad(delta_KD, leaves, ddelta_KD)
        return dy_TK, dx_TD, None, *gradients


def _with_parts(
    segments: Sequence[DiffSegment], flat: Sequence[torch.Tensor]
) -> Iterator[tuple[DiffSegment, Sequence[torch.Tensor]]]:
    start = 0
    for segment in segments:
        yield segment, flat[start : start + len(segment.parts)]
        start += len(segment.parts)


class MultiplexedDiff(MultiplexedForward):
    """The frozen layer once over the stream, and each task's difference applied to its own rows.

    In training the gates are drawn once for a task's step and layer: all micro-batches of a global batch, on all
    processes, see the same ones, and neighbours do not come into it.
    """

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        super().__init__(module, name, stream)
        self._drawn: dict[str, tuple[int, Noise]] = {}

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]`."""
        layer: Any = self.module
        self.check_rows(x, x.shape[-1])
        y = base_output(layer.base_layer, x, self.name)
        segments = [self._segment(rows) for rows in self.stream.segments if rows.adapter in layer.diff_pruning_delta]
        if layer.disable_adapters or not segments:
            return y
        y_TK, x_TD = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (y, x))
        return grouped_deltas(y_TK, x_TD, segments).view_as(y)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this layer can be captured: how many rows a task has differs from pass to pass."""
        return f"differences are applied to each task's own rows ({self.name})"

    def noise(self, rows: RowSegment) -> Noise:
        """Return what a task's gates are drawn with in this step."""
        seed = rows.draw_seed(self.name)
        drawn_for, noise = self._drawn.get(rows.adapter, (None, None))
        layer: Any = self.module
        device = layer.diff_pruning_delta[rows.adapter].device
        # Of this step, and here: a model may be moved between two passes.
        if noise is None or drawn_for != seed or noise.noise_KD.device != device:
            # Kept for the step, in 2 bytes an element, beside the 32 that AdamW holds of it.
            noise = self._draw(rows, seed, device)
            self._drawn[rows.adapter] = seed, noise
            self._drawn = {adapter: own for adapter, own in self._drawn.items() if adapter in layer.diff_pruning_delta}
        return noise

    def _draw(self, rows: RowSegment, seed: int, device: torch.device) -> Noise:
        layer: Any = self.module
        num_rows, num_columns = layer.shape
        uniform_KD = philox.uniform(seed, num_rows, num_columns, device)
        if rows.adapter not in layer.diff_pruning_row_alpha:
            return Noise(uniform_KD.logit_().half())
        uniform_K = philox.uniform(rows.draw_seed(f"{self.name}.rows"), 1, num_rows, device)[0]
        return Noise(uniform_KD.logit_().half(), uniform_K.logit_().half())

    def _segment(self, rows: RowSegment) -> DiffSegment:
        layer: Any = self.module
        parts, stretch = layer.parts_of(rows.adapter), layer.stretches[rows.adapter]
        noise = self.noise(rows) if layer.training else None

        def delta(*tensors: torch.Tensor) -> torch.Tensor:
            return gated_delta(Relaxed(*tensors), stretch, noise)

        return DiffSegment(rows.start, rows.end, delta, tuple(part for part in parts if part is not None))


_UNSUPPORTED = {
    "modules_to_save": "it trains a copy of a backbone module; classification heads are added without it",
    "kept": "the adapter was pruned, which is for serving: load it with PeftModel.from_pretrained, or train the one"
    " that it was pruned from",
}


class DiffPruningKind(SlicedKind):
    """What the product asks of Diff Pruning; see `peft_mux.modeling.adapters.kind.AdapterKind`."""

    draws_itself = True
    lies_apart = False

    def __init__(self) -> None:
        """Read the fields off the configuration."""
        names = {field.name for field in fields(DiffPruningConfig)} - _UNSUPPORTED.keys()
        targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        super().__init__(DIFF_PRUNING, fields=names, reasons=_UNSUPPORTED, default_targets=targets)
        self.title = "Diff Pruning"

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return what is wrong with the fields of a configuration, whatever the backbone."""
        return [*super().faults(config, where), *diff_pruning_faults(config, where)]

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return the forward of all tasks' differences."""
        return MultiplexedDiff(module, name, stream)

    def penalty(self, config: Any, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the penalty on gates that are expected to be open.

        Args:
            config: the adapter configuration of the task.
            parameters: the task's parameters, by their PEFT names without the adapter id.
        """
        stretch = Stretch(config.concrete_lower, config.concrete_upper)
        counts = []
        for name, delta_KD in parameters.items():
            site, mark, part = name.partition(self._mark)
            if mark and part == "delta":
                rows = parameters.get(f"{site}{mark}row_alpha")
                counts.append(expected_l0(Relaxed(delta_KD, parameters[f"{site}{mark}alpha"], rows), stretch))
        return config.l0_weight * total(counts)

    def refusals(self, layout: ReplicaLayout, where: str) -> list[Fault]:
        """Refuse layouts on which a process holds a part of the model."""
        if layout.is_data_parallel or layout.is_tensor_parallel:
            return super().refusals(layout, where)
        return [
            Fault(
                f"{where}.peft_config",
                f"{self.title} with replicas {layout}",
                "another PEFT type with this layout",
                "The penalty of layers on one stage does not reach the loss on another; give every process the whole"
                " model.",
            )
        ]


register_kind(DiffPruningKind())
