"""Adapter Tuning (Houlsby et al., 2019; M §2.1): a small network behind each of some linear layers.

    out = y + up(f(down(drop(y))) + b) + c        y is the output of the frozen layer

PEFT lacks it, so its configuration and tuner stand here as well. For many tasks, the frozen layer runs once over the
stream, and each task's bottleneck on its own rows. On a GPU, `down` and `up` of all tasks are the grouped launches of
LoRA (`down` in the place of A, `up` transposed in that of B), with the nonlinearity in torch between them.

Shape letters: T rows of the stream, N of one task, K features of the frozen layer's output, M of a bottleneck, C
columns of P, for the widest bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from peft import PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional as F

from peft_mux.adapters.registration import (
    OwnMethodConfig,
    OwnMethodKind,
    OwnMethodModel,
    own_peft_type,
    register_method,
)
from peft_mux.errors import ConfigError, Fault, is_real, shown
from peft_mux.kernels import philox
from peft_mux.kernels.lora.group import KernelCall, more_arguments, rows_of
from peft_mux.modeling.adapters.kind import Category, MultiplexedForward, TypeEntry, register_kind
from peft_mux.modeling.adapters.lora.lora_pass import GroupedAdapter, LoraGroups, LoraPass
from peft_mux.modeling.backbone.quantized import base_output
from peft_mux.modeling.slabs import Slot, plain_slot
from peft_mux.modeling.stream import Stream

BOTTLENECK = own_peft_type("BOTTLENECK")

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}

DEFAULT_SIZE = 64
"""Features of a bottleneck if neither field sets it: the middle one of the sizes that the paper tries for GLUE."""


@dataclass
class BottleneckConfig(OwnMethodConfig):
    """Configuration of Adapter Tuning (Houlsby et al., 2019, "Parameter-Efficient Transfer Learning for NLP").

    A bottleneck stands behind the output `y` of each targeted linear layer: `y + up(f(down(y)))`. In the paper that is
    the projection behind the attention and that behind the feed-forward layer of every block, as in
    `target_modules=["o_proj", "down_proj"]`, which is also the default for known architectures.

    Args:
        bottleneck_size: features between `down` and `up`; 64 if `reduction_factor` does not set it either.
        reduction_factor: the layer's output features divided by those of the bottleneck, in place of a size.
        non_linearity: "relu", "gelu", "silu" or "tanh".
        adapter_dropout: probability of dropping an element of the input of `down`.
        down_bias: whether `down` has a bias.
        up_bias: whether `up` has a bias.
        init_weights: begin with `up` at zero, so that an untrained adapter changes nothing; `False` draws it.
        target_modules: names of linear layers, a regular expression over full names, or "all-linear".
        exclude_modules: names of layers, or a regular expression, that are left out.
        layers_to_transform: numbers of the blocks that are adapted; all by default.
        layers_pattern: name of the list of blocks, if it has an unusual one.
        modules_to_save: modules whose trained copy is saved with the adapter, such as a new head.

    Raises:
        ConfigError: naming each field with what it may hold.

    Example:
        >>> from peft_mux import BottleneckConfig
        >>> BottleneckConfig(bottleneck_size=32, target_modules=["o_proj", "down_proj"]).size_for(4096)
        32
    """

    own_type: ClassVar[PeftType] = BOTTLENECK
    bottleneck_size: int | None = None
    reduction_factor: float | None = None
    non_linearity: Literal["relu", "gelu", "silu", "tanh"] = "gelu"
    adapter_dropout: float = 0.0
    down_bias: bool = True
    up_bias: bool = True
    init_weights: bool = True

    def faults(self, where: str) -> list[Fault]:
        """Return what is wrong with the values of the fields, beyond their types; `where` is their prefix."""
        faults, size, factor = super().faults(where), self.bottleneck_size, self.reduction_factor
        if factor is not None and (not is_real(factor) or factor < 1):
            faults.append(Fault(f"{where}.reduction_factor", shown(factor), "a finite number of at least 1, or None"))
        if size is not None and factor is not None:
            faults.append(Fault(f"{where}.reduction_factor", shown(factor), "None where bottleneck_size is set"))
        return faults

    def size_for(self, out_features: int) -> int:
        """Return the features of the bottleneck behind a layer of so many output features."""
        if self.reduction_factor is not None:
            return max(1, int(out_features / self.reduction_factor))
        return DEFAULT_SIZE if self.bottleneck_size is None else self.bottleneck_size


class BottleneckLinear(nn.Module, BaseTunerLayer):
    """A linear layer to whose output each active adapter adds `up(f(down(y)))`, as PEFT runs it.

    Attributes:
        bottleneck_down: `[M, K]` weight and bias by adapter.
        bottleneck_up: `[K, M]` weight and bias by adapter.
    """

    adapter_layer_names: tuple[str, ...] = ("bottleneck_down", "bottleneck_up")
    other_param_names: tuple[str, ...] = ("bottleneck_dropout", "non_linearity")

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: BottleneckConfig, shape: tuple[int, int], name: str = ""
    ) -> None:
        super().__init__()
        self.base_layer, self.out_features = base_layer, shape[0]
        self.bottleneck_down, self.bottleneck_up = nn.ModuleDict(), nn.ModuleDict()
        self.bottleneck_dropout = nn.ModuleDict()
        self.non_linearity: dict[str, str] = {}
        self.merged_adapters: list[str] = []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config, name)

    def update_layer(self, adapter_name: str, config: BottleneckConfig, name: str) -> None:
        """Add an adapter."""
        size, width = config.size_for(self.out_features), self.out_features
        self.bottleneck_down[adapter_name] = nn.Linear(width, size, bias=config.down_bias)
        self.bottleneck_up[adapter_name] = nn.Linear(size, width, bias=config.up_bias)
        self.bottleneck_dropout[adapter_name] = nn.Dropout(config.adapter_dropout)
        self.non_linearity[adapter_name] = config.non_linearity
        if config.init_weights:
            # Near-identity, as in the paper: exactly the frozen model before the first step.
            for parameter in self.bottleneck_up[adapter_name].parameters():
                nn.init.zeros_(parameter)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `[..., K]`: the frozen layer's output plus those of its active adapters."""
        y = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return y
        added: Any = 0
        # All read the frozen layer's output, so that the order of the adapters does not matter.
        for name in self.active_adapters:
            if name in self.non_linearity:
                down, up = self.bottleneck_down[name], self.bottleneck_up[name]
                read = self.bottleneck_dropout[name](self._cast_input_dtype(y, down.weight.dtype))  # type: ignore[arg-type]
                added = added + up(ACTIVATIONS[self.non_linearity[name]](down(read))).to(y.dtype)
        return y + added


_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "smollm3")
DEFAULT_TARGETS: dict[str, list[str]] = {
    **{name: ["o_proj", "down_proj"] for name in _LLAMA_LIKE},
    "gpt2": ["attn.c_proj", "mlp.c_proj"],
    "gpt_neox": ["attention.dense", "dense_4h_to_h"],
    "opt": ["out_proj", "fc2"],
    "bert": ["output.dense"],
    "roberta": ["output.dense"],
}
"""As in the paper, behind the attention and behind the feed-forward layer, by type of the backbone."""


class BottleneckModel(OwnMethodModel):
    """Puts bottlenecks behind linear layers of a model; see `BottleneckConfig`."""

    prefix: str = "bottleneck_"
    tuner_layer_cls = BottleneckLinear
    target_module_mapping = DEFAULT_TARGETS

    def _check_merge_allowed(self) -> None:
        """Refuse before the adapter is removed: a nonlinearity cannot become part of a weight."""
        raise ConfigError(
            "merge needs an adapter that adds to a weight, such as LORA or DIFF_PRUNING, got BOTTLENECK (Adapter "
            "Tuning), which has a nonlinearity. Keep it next to the backbone, or remove it with unload()."
        )


register_method(BOTTLENECK, BottleneckConfig, BottleneckModel)


class MultiplexedBottleneck(MultiplexedForward):
    """The frozen layer once over the stream, and each task's bottleneck behind its own rows.

    It is a group of one layer to `peft_mux.modeling.adapters.lora.lora_pass`, which keeps the tables of its launches.
    """

    against_graphs = "bottlenecks run behind each task's own rows ({name})"

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        super().__init__(module, name, stream)
        self.members = (self,)
        self.number = stream.makers[NAME].enroll(self)

    def grouped(self, adapter: str) -> GroupedAdapter | None:
        """Return the bottleneck of an adapter as one of LoRA; `None` if the adapter has none here."""
        layer: Any = self.module
        if adapter not in layer.bottleneck_down:
            return None
        dropout = layer.bottleneck_dropout[adapter].p if layer.training else 0.0
        return GroupedAdapter(layer.bottleneck_down[adapter].weight, layer.bottleneck_up[adapter].weight, 1.0, dropout)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]`."""
        layer: Any = self.module
        self.check_rows(x, x.shape[-1])
        y = base_output(layer.base_layer, x, self.name)
        if layer.disable_adapters or not any(self.grouped(segment.adapter) for segment in self.stream.segments):
            return y
        y_TK = rows_of(y)
        launches: KernelCall | None = None
        p_parts: Sequence[Any] = [None] * len(self.stream.segments)
        own_pass: LoraPass | None = self.stream.passes.get(NAME)
        if own_pass is not None and (tables := own_pass.tables_of(self, y.dtype)) is not None:
            assert own_pass.segment_tables is not None, "kernels run where there are tables"
            launches = KernelCall(tables, (), own_pass.segment_tables, own_pass.places)
            p_parts = self.by_segment(_Shrink.apply(y_TK, None if y.requires_grad else own_pass.anchor, launches))
        parts, hidden = [], []
        # The frozen layer has settled the dtype; autocast would cast each product separately.
        with torch.autocast(y.device.type, enabled=False):
            for (segment, y_NK), p_NC in zip(self.each_task(y_TK), p_parts, strict=True):
                bottleneck = self.grouped(segment.adapter)
                if bottleneck is None:
                    parts.append(y_NK)
                    hidden.append(y_NK[:, :0])
                    continue
                down, up = layer.bottleneck_down[segment.adapter], layer.bottleneck_up[segment.adapter]
                b_M, c_K = (None if linear.bias is None else linear.bias.to(y.dtype) for linear in (down, up))
                activation = ACTIVATIONS[layer.non_linearity[segment.adapter]]
                if launches is not None and p_NC is not None:
                    # Columns beyond the task's own are not initialised.
                    p_NM = p_NC[:, : down.out_features]
                    h_NM = activation(p_NM if b_M is None else p_NM + b_M)
                    parts.append(y_NK if c_K is None else y_NK + c_K)
                    hidden.append(h_NM)
                    continue
                a_MK = down.weight.to(y.dtype)
                if bottleneck.dropout:
                    draws = (
                        self.stream.places[segment.start : segment.end],
                        bottleneck.dropout,
                        segment.draw_seed(self.name),
                    )
                    h_NM = activation(_DroppedLinear.apply(y_NK, a_MK, b_M, *draws))
                else:
                    h_NM = activation(F.linear(y_NK, a_MK, b_M))
                parts.append(y_NK + F.linear(h_NM, up.weight.to(y.dtype), c_K))
            out = torch.cat(parts)
            if launches is not None:
                h_TC = torch.cat([F.pad(h_NM, (0, launches.group.num_columns - h_NM.shape[1])) for h_NM in hidden])
                out = out + _Expand.apply(h_TC, launches, out.shape[1])
        return out.view_as(y)


class _DroppedLinear(torch.autograd.Function):
    """`drop(y) down^T + b` of one task; the backward pass draws the dropout again, instead of keeping mask and copy."""

    @staticmethod
    def forward(
        ctx: Any, y_NK: torch.Tensor, down_MK: torch.Tensor, b_M: Any, places: torch.Tensor, dropout: float, seed: int
    ) -> torch.Tensor:
        ctx.save_for_backward(y_NK, down_MK, places)
        ctx.draws = dropout, seed
        return F.linear(philox.dropout(y_NK, places, dropout, seed), down_MK, b_M)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dp_NM: torch.Tensor) -> tuple[Any, ...]:
        y_NK, down_MK, places = ctx.saved_tensors
        needs_dy, needs_down, needs_b, *_ = ctx.needs_input_grad
        return (
            philox.dropout(dp_NM @ down_MK, places, *ctx.draws) if needs_dy else None,
            dp_NM.t() @ philox.dropout(y_NK, places, *ctx.draws) if needs_down else None,
            dp_NM.sum(0) if needs_b else None,
            *(None, None, None),
        )


class _Shrink(torch.autograd.Function):
    """`P = drop(y) down^T` `[T, C]` of all tasks; adds to the gradients of `down` in place."""

    @staticmethod
    def forward(ctx: Any, y_TK: torch.Tensor, anchor: torch.Tensor | None, launches: KernelCall) -> torch.Tensor:
        from peft_mux.kernels.lora import launch as kernels  # it needs Triton

        p_TC = y_TK.new_empty(len(y_TK), launches.group.num_columns)
        for part in launches.group.parts_of_a:
            more = more_arguments(part, launches.places, None)
            kernels.shrink(y_TK, part.values, p_TC, launches.segments, part.ranks, scaled=False, **more)
        ctx.save_for_backward(y_TK)
        ctx.launches = launches
        return p_TC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dp_TC: torch.Tensor) -> tuple[Any, ...]:
        from peft_mux.kernels.lora import launch as kernels

        (y_TK,) = ctx.saved_tensors
        launches, dp_TC = ctx.launches, rows_of(dp_TC)
        dy_TK = torch.zeros_like(y_TK) if ctx.needs_input_grad[0] else None
        for part in launches.group.parts_of_a:
            more = {"scaled": False, **more_arguments(part, launches.places, None)}
            if dy_TK is not None:
                kernels.expand(dp_TC, part.values, dy_TK, launches.segments, part.ranks, add=True, **more)
            if part.gradients is not None:
                kernels.wgrad(dp_TC, y_TK, part.gradients, launches.segments, part.ranks, accumulate=True, **more)
        return dy_TK, None, None


class _Expand(torch.autograd.Function):
    """`H up^T` `[T, K]` of all tasks, zero in rows of tasks without a bottleneck; adds to the gradients of `up`."""

    @staticmethod
    def forward(ctx: Any, h_TC: torch.Tensor, launches: KernelCall, width: int) -> torch.Tensor:
        from peft_mux.kernels.lora import launch as kernels

        _, part = launches.group.parts_of_b[0]
        out_TK = h_TC.new_empty(len(h_TC), width)
        kernels.expand(h_TC, part.values, out_TK, launches.segments, part.ranks, scaled=False)
        ctx.save_for_backward(h_TC)
        ctx.launches = launches
        return out_TK

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_TK: torch.Tensor) -> tuple[Any, ...]:
        from peft_mux.kernels.lora import launch as kernels

        (h_TC,) = ctx.saved_tensors
        launches, dout_TK = ctx.launches, rows_of(dout_TK)
        _, part = launches.group.parts_of_b[0]
        dh_TC = torch.empty_like(h_TC)
        kernels.shrink(dout_TK, part.values, dh_TC, launches.segments, part.ranks, scaled=False)
        if part.gradients is not None:
            kernels.wgrad(h_TC, dout_TK, part.gradients, launches.segments, part.ranks, scaled=False, accumulate=True)
        return dh_TC, None, None


class BottleneckKind(OwnMethodKind):
    """Adapter Tuning as a kind of adapters."""

    forward_type = MultiplexedBottleneck
    pass_maker = LoraGroups

    def slot(self, name: str, parameter: nn.Parameter) -> Slot:
        """Return how a parameter of a task is laid out in its slab: `up` transposed, as kernels read it."""
        return plain_slot(name, parameter)._replace(is_transposed=name.endswith(".bottleneck_up.weight"))


NAME = register_kind(BottleneckKind(TypeEntry("BOTTLENECK", Category.FUSED), "Adapter Tuning")).name
"""The key under which streams hold the passes of bottlenecks."""
