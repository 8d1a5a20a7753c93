"""LoRA on bare parameters (`target_parameters`): PEFT's `ParamWrapper`, task by task or grouped.

PEFT wraps the module that holds a parameter, such as the experts or the router of a mixture. Its wrapper computes
`W + delta` for one adapter and lets the module run with it, and wrappers of several parameters of one module lie around
one another::

    mlp.experts = ParamWrapper(down_proj, base_layer=ParamWrapper(gate_up_proj, base_layer=Experts))

Here the module runs once for the rows of each task that has an adapter in it, in PEFT's own way. Experts of the families
that `peft_mux.modeling.adapters.lora.experts` knows run once for all tasks instead, and no `W + delta` is ever made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.adapters.lora.experts import ExpertFactors, grouped_experts, runs_grouped
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.stream import RowSegment


class MultiplexedParameters(MultiplexedForward):
    """A module whose parameters tasks adapt: experts or routers, with all arguments that the model calls them with."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns for all rows; a router returns several tensors."""
        if self.stream.is_idle:
            return self.original(*args, **kwargs)
        layer: Any = self.module
        segments, wrappers = self.stream.segments, list(chain_of(layer))
        adapted = [segment for segment in segments if not layer.disable_adapters and _is_adapted(segment, wrappers)]
        if not adapted:
            return layer.get_base_layer()(*args, **kwargs)
        frozen = layer.get_base_layer()
        if not kwargs and runs_grouped(frozen, args, [wrapper.parameter_name for wrapper in wrappers]):
            factors = {wrapper.parameter_name: _factors(wrapper, segments) for wrapper in wrappers}
            self.check_rows(args[0], args[0].shape[-1])
            return grouped_experts(frozen, *args, factors, tuple(row.end - row.start for row in segments))
        return self._sliced(args, kwargs, wrappers)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the module's output for one tensor."""
        return self(x)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass can be captured: tasks' rows are counted for each expert as they come."""
        return f"adapters on bare parameters are computed as tokens are routed ({self.name})"

    def _sliced(self, args: tuple[Any, ...], kwargs: dict[str, Any], wrappers: Sequence[Any]) -> Any:
        """Return PEFT's own results, one task after another; wrappers within come here again, one task at a time."""
        num_rows, outputs = self.stream.num_rows, []
        before = [wrapper._active_adapter for wrapper in wrappers]
        try:
            for segment in self.stream.segments:
                for wrapper in wrappers:
                    # The attribute, as PEFT's `set_adapter` would switch gradients on and off as well.
                    wrapper._active_adapter = [segment.adapter]
                own = [_sliced(item, segment, num_rows, self.name) for item in args]
                named = {key: _sliced(item, segment, num_rows, self.name) for key, item in kwargs.items()}
                run = self.original if _is_adapted(segment, wrappers) else self.module.get_base_layer()  # type: ignore[operator]
                with self.stream.only(segment):
                    outputs.append(run(*own, **named))
        finally:
            for wrapper, adapter in zip(wrappers, before, strict=True):
                wrapper._active_adapter = adapter
        lengths = [segment.end - segment.start for segment in self.stream.segments]
        return _joined(outputs, lengths, self.name)


def chain_of(layer: Any) -> Iterator[Any]:
    """Yield the wrappers of a module's parameters, the outermost first."""
    while isinstance(layer, ParamWrapper):
        yield layer
        layer = layer.base_layer


def drop_unused_wrappers(backbone: nn.Module) -> None:
    """Take out wrappers in which no adapter is left: PEFT would lay new ones around them, under other names."""
    # A list, as modules are replaced on the way.
    for name, module in list(backbone.named_modules()):
        if isinstance(module, ParamWrapper) and not name.endswith(".base_layer"):
            if not any(len(wrapper.lora_A) for wrapper in chain_of(module)):
                parent, _, child = name.rpartition(".")
                setattr(backbone.get_submodule(parent), child, module.get_base_layer())


def _is_adapted(segment: RowSegment, wrappers: Sequence[Any]) -> bool:
    return any(segment.adapter in wrapper.lora_A for wrapper in wrappers)


def _factors(wrapper: Any, segments: Sequence[RowSegment]) -> list[ExpertFactors | None]:
    """Return the factors of each segment's adapter, expert by expert; `None` for a task without one."""
    found: list[ExpertFactors | None] = []
    for segment in segments:
        if segment.adapter not in wrapper.lora_A:
            found.append(None)
            continue
        a, b = (factor[segment.adapter].weight for factor in (wrapper.lora_A, wrapper.lora_B))
        # As PEFT reads them: A expert by expert, B rank by rank with the experts innermost.
        a_ERD = a.reshape(wrapper.num_experts, -1, a.shape[-1])
        b_ERK = b.t().reshape(-1, wrapper.num_experts, b.shape[0]).transpose(0, 1)
        found.append(ExpertFactors(a_ERD, b_ERK, wrapper.scaling[segment.adapter]))
    return found


def _sliced(item: Any, segment: RowSegment, num_rows: int, name: str) -> Any:
    """Return the rows of one task of an argument; what has no rows is handed on as it is."""
    # One number an expert, such as the correction of its scores, is a weight of the model.
    if not isinstance(item, torch.Tensor) or item.dim() < 2:
        return item
    return item.narrow(_dim_of_rows(item, num_rows, name), segment.start, segment.end - segment.start)


def _dim_of_rows(tensor: torch.Tensor, num_rows: int, name: str) -> int:
    for dim in (0, 1):
        if tensor.dim() > dim and tensor.shape[dim] == num_rows and (dim == 0 or len(tensor) == 1):
            return dim
    raise UnsupportedModelError(
        f"{name} takes or returns a tensor of shape {list(tensor.shape)}, which is not one row for each of the "
        f"{num_rows} rows of its tasks; allowed: modules that see every token by itself, in order. Leave its parameters "
        "out of target_parameters."
    )


def _joined(outputs: Sequence[Any], lengths: Sequence[int], name: str) -> Any:
    """Return the outputs of all tasks in stream order; tuples are joined part by part."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined([output[index] for output in outputs], lengths, name) for index in range(len(first)))
    if first is None:
        return None
    dims = {_dim_of_rows(output, length, name) for output, length in zip(outputs, lengths, strict=True)}
    # Of a task with one row `[1, ...]` tells nothing.
    return torch.cat(list(outputs), dim=max(dims))
