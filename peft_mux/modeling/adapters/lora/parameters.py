"""LoRA on bare parameters (`target_parameters`): PEFT's `ParamWrapper`, task by task or grouped.

PEFT wraps the module that holds a parameter, such as the experts or the router of a mixture. Its wrapper computes
`W + delta` for one adapter and lets the module run with it, and wrappers of several parameters of one module lie around
one another::

    mlp.experts = ParamWrapper(down_proj, base_layer=ParamWrapper(gate_up_proj, base_layer=Experts))

Here the module runs once for the rows of each task, with PEFT's `W + delta` of its adapter. Experts that
`peft_mux.modeling.adapters.lora.experts` knows run once for all tasks instead, and no `W + delta` is ever made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.func import functional_call

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.adapters.lora.experts import ExpertFactors, grouped_experts, runs_grouped
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.stream import RowSegment

_ADVICE = "Leave its parameters out of target_parameters."


class MultiplexedParameters(MultiplexedForward):
    """A module whose parameters tasks adapt: experts or routers, with all arguments that the model calls them with."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns for all rows; a router returns several tensors."""
        if not args:
            raise UnsupportedModelError(
                f"{self.name} is called with arguments by name alone, which PEFT's wrapper of a parameter does not "
                f"take; allowed: experts, routers and other modules called with tokens first. {_ADVICE}"
            )
        if self.stream.is_idle:
            return self.original(*args, **kwargs)
        layer: Any = self.module
        segments, wrappers = self.stream.segments, list(chain_of(layer))
        adapted = any(segment.adapter in wrapper.lora_A for segment in segments for wrapper in wrappers)
        if layer.disable_adapters or not adapted:
            return layer.get_base_layer()(*args, **kwargs)
        frozen = layer.get_base_layer()
        if not kwargs and runs_grouped(frozen, args, [wrapper.parameter_name for wrapper in wrappers]):
            factors = _factors(wrappers, segments)
            self.check_rows(args[0], args[0].shape[-1])
            lengths = tuple(segment.end - segment.start for segment in segments)
            return grouped_experts(frozen, args[0], args[1], args[2], factors, lengths)
        return self._sliced(args, kwargs, wrappers)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the module's output for one tensor."""
        return self(x)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass can be captured: tasks' rows are counted for each expert as they come."""
        return f"adapters on bare parameters are computed as tokens are routed ({self.name})"

    def _sliced(self, args: tuple[Any, ...], kwargs: dict[str, Any], wrappers: Sequence[Any]) -> Any:
        """Return the module's results, one task after another."""
        num_rows, outputs = self.stream.num_rows, []
        frozen = wrappers[0].get_base_layer()
        for segment in self.stream.segments:
            own = tuple(_sliced(item, segment, num_rows, self.name) for item in args)
            named = {key: _sliced(item, segment, num_rows, self.name) for key, item in kwargs.items()}
            # Handed in and not registered with the module, as PEFT does it: that would count as a change of the frozen
            # weight, which another task's backward pass needs as it was.
            weights = {
                wrapper.parameter_name: wrapper.get_param() + wrapper.get_delta_weight(segment.adapter)
                for wrapper in wrappers
                if segment.adapter in wrapper.lora_A
            }
            with self.stream.only(segment):
                outputs.append(functional_call(frozen, weights, own, named))
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
        is_outermost = isinstance(module, ParamWrapper) and not name.endswith(".base_layer")
        if is_outermost and not any(len(wrapper.lora_A) for wrapper in chain_of(module)):
            parent, _, child = name.rpartition(".")
            setattr(backbone.get_submodule(parent), child, module.get_base_layer())  # type: ignore[operator]


def _factors(wrappers: Sequence[Any], segments: Sequence[RowSegment]) -> dict[str, list[ExpertFactors | None]]:
    """Return the factors of each segment's adapter by the parameter's name; `None` for a task without one."""
    found: dict[str, list[ExpertFactors | None]] = {}
    for wrapper in wrappers:
        # A parameter has several wrappers where tasks adapt it together with different others.
        of_segments = found.setdefault(wrapper.parameter_name, [None] * len(segments))
        for number, segment in enumerate(segments):
            if segment.adapter in wrapper.lora_A:
                of_segments[number] = _factors_of(wrapper, segment.adapter)
    return found


def _factors_of(wrapper: Any, adapter: str) -> ExpertFactors:
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    # As PEFT reads them: A expert by expert, B rank by rank with the experts innermost.
    a_ERD = a.reshape(wrapper.num_experts, -1, a.shape[-1])
    b_ERK = b.t().reshape(-1, wrapper.num_experts, b.shape[0]).transpose(0, 1)
    return ExpertFactors(a_ERD, b_ERK, wrapper.scaling[adapter])


def _sliced(item: Any, segment: RowSegment, num_rows: int, name: str) -> Any:
    """Return the rows of one task of an argument; what has no rows is handed on as it is."""
    # One number an expert, such as the correction of its scores, is a weight of the model.
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if not isinstance(item, torch.Tensor):
        raise UnsupportedModelError(
            f"{name} is called with a {type(item).__name__}, which cannot be divided among tasks; allowed: modules "
            f"that see every token by itself, such as experts. {_ADVICE}"
        )
    if item.dim() < 2:
        return item
    return item.narrow(_dim_of_rows(item, num_rows, name), segment.start, segment.end - segment.start)


def _dim_of_rows(tensor: torch.Tensor, num_rows: int, name: str) -> int:
    if tensor.dim() > 2 and tensor.shape[:2] == (1, num_rows):
        return 1
    if len(tensor) == num_rows:
        return 0
    raise UnsupportedModelError(
        f"{name} takes or returns a tensor of shape {list(tensor.shape)}, which is not one row for each of the "
        f"{num_rows} rows of its tasks; allowed: modules that see every token by itself, in order. {_ADVICE}"
    )


def _joined(outputs: Sequence[Any], lengths: Sequence[int], name: str) -> Any:
    """Return the outputs of all tasks in stream order; tuples are joined part by part."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined([output[index] for output in outputs], lengths, name) for index in range(len(first)))
    if first is None:
        return None
    dims = [(length, _dim_of_rows(output, length, name)) for output, length in zip(outputs, lengths, strict=True)]
    # Of the task with most rows, as `[1, 1, ...]` of one with a single row does not tell.
    return torch.cat(list(outputs), dim=max(dims)[1])
