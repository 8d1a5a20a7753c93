"""LoRA on bare parameters (`target_parameters`), such as the experts and the router of a mixture.

PEFT wraps the module that holds a parameter. Its wrapper computes `W + delta` for one adapter and lets the module run
with it, and wrappers of several parameters of one module lie around one another::

    mlp.experts = ParamWrapper(down_proj, base_layer=ParamWrapper(gate_up_proj, base_layer=Experts))

Here the module runs once for the rows of each task, with PEFT's `W + delta` of its adapter. Experts as transformers
writes them run once for all tasks instead: it keeps those of a layer as one parameter of three dimensions, and computes
a pass over T tokens, each of which goes to k experts, as S = T * k slots sorted by expert. The stream is sorted by
task, and the sort is stable. So the slots of a task lie side by side within each expert too::

    slot      e0: a a a b | e1: a b b | e2: b ...
    frozen    [---------]   [-------]   [---          one product an expert, for all tasks
    adapters  [-----][--]   [--][---]                 one product a pair of expert and task

Both are one call of torch's `grouped_mm` each, whose groups are products of their own: the NaN of one task reaches no
other. `y_e = W_e x + s B_te (A_te x)` is exact; `W + delta` is never made, and so not held for a backward pass either.

Shape letters: T tokens, k experts of a token, S slots, E experts, N tasks, R rank, D input and K output features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.adapters.kind import MultiplexedForward
from peft_mux.modeling.attention.rows import copied_to
from peft_mux.modeling.backbone.modules import put_module
from peft_mux.modeling.slabs import round_up_to_group

_PARAMETERS = frozenset({"gate_up_proj", "up_proj", "down_proj"})
"""Under which transformers keeps the matrices of experts."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STRIDE_BYTES = 16
"""`grouped_mm` wants every row to be a multiple of it."""

_ADVICE = "Leave its parameters out of target_parameters."


class MultiplexedParameters(MultiplexedForward):
    """A module whose parameters tasks adapt: experts or routers, with all arguments that the model calls them with."""

    against_graphs = "adapters on bare parameters are computed as tokens are routed ({name})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns for all rows; a router returns several tensors."""
        if not args:
            raise UnsupportedModelError(
                f"{self.name} must be called with tokens as its first argument, because PEFT's wrapper of a "
                f"parameter does not take arguments by name alone. {_ADVICE}"
            )
        if self.stream.is_idle:
            return self.original(*args, **kwargs)
        layer: Any = self.module
        segments, wrappers, frozen = self.stream.segments, list(chain_of(layer)), layer.get_base_layer()
        adapted = any(segment.adapter in wrapper.lora_A for segment in segments for wrapper in wrappers)
        if layer.disable_adapters or not adapted:
            return frozen(*args, **kwargs)
        if not kwargs and runs_grouped(frozen, args, [wrapper.parameter_name for wrapper in wrappers]):
            self.check_rows(args[0], args[0].shape[-1])
            lengths = tuple(segment.end - segment.start for segment in segments)
            adapters = [segment.adapter for segment in segments]
            return grouped_experts(frozen, args[0], args[1], args[2], factors_of(wrappers, adapters), lengths)
        outputs = []
        for segment in segments:
            own = [self._rows_of(item, segment.start, segment.end) for item in args]
            named = {key: self._rows_of(item, segment.start, segment.end) for key, item in kwargs.items()}
            # Handed in and not registered with the module, as PEFT does it: that would count as a change of the frozen
            # weight, which another task's backward pass needs as it was.
            weights = {
                wrapper.parameter_name: wrapper.get_param() + wrapper.get_delta_weight(segment.adapter)
                for wrapper in wrappers
                if segment.adapter in wrapper.lora_A
            }
            with self.stream.only(segment):
                outputs.append(functional_call(frozen, weights, tuple(own), named))
        return self._joined(outputs, [segment.end - segment.start for segment in segments])

    def _rows_of(self, item: Any, start: int, end: int) -> Any:
        """Return the rows of one task of an argument; an argument without rows is passed on as it is."""
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if not isinstance(item, torch.Tensor):
            raise UnsupportedModelError(
                f"{self.name} must process each token independently, as experts do, got a {type(item).__name__}, which "
                f"cannot be divided among tasks. {_ADVICE}"
            )
        if item.dim() < 2:
            return item  # one number an expert, such as the correction of its scores, is a weight of the model
        return item.narrow(self._dim_of_rows(item, self.stream.num_rows), start, end - start)

    def _dim_of_rows(self, tensor: torch.Tensor, num_rows: int) -> int:
        if tensor.dim() > 2 and tensor.shape[:2] == (1, num_rows):
            return 1
        if len(tensor) == num_rows:
            return 0
        raise UnsupportedModelError(
            f"{self.name} must process each token independently, in order: one row for each of the {num_rows} rows "
            f"of its tasks, got a tensor of shape {list(tensor.shape)}. {_ADVICE}"
        )

    def _joined(self, outputs: Sequence[Any], lengths: Sequence[int]) -> Any:
        """Return the outputs of all tasks in stream order; tuples are joined part by part."""
        first = outputs[0]
        if isinstance(first, tuple):
            return tuple(self._joined(parts, lengths) for parts in zip(*outputs, strict=True))
        if first is None:
            return None
        dims = [(length, self._dim_of_rows(one, length)) for one, length in zip(outputs, lengths, strict=True)]
        # That of the task with most rows, because `[1, 1, ...]` of one with a single row is ambiguous.
        return torch.cat(list(outputs), dim=max(dims)[1])


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
            put_module(backbone, name, module.get_base_layer())  # type: ignore[operator]


# --------------------------------------------------------- experts of all tasks


class ExpertFactors(NamedTuple):
    """The adapter of one task on one parameter of all experts.

    Attributes:
        a_ERD: `[E, R, D]`, the first factor of each expert.
        b_ERK: `[E, R, K]`, the second one, transposed.
        scaling: factor of their product.
    """

    a_ERD: torch.Tensor
    b_ERK: torch.Tensor
    scaling: float


def factors_of(wrappers: Sequence[Any], adapters: Sequence[str]) -> dict[str, list[ExpertFactors | None]]:
    """Return the factors of each adapter by the name of the parameter; `None` for an adapter without one."""
    found: dict[str, list[ExpertFactors | None]] = {}
    for wrapper in wrappers:
        # A parameter has several wrappers if tasks adapt it together with different others.
        own = found.setdefault(wrapper.parameter_name, [None] * len(adapters))
        for number, adapter in enumerate(adapters):
            if adapter in wrapper.lora_A:
                a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
                # As PEFT reads them: A expert by expert, B rank by rank with the experts innermost.
                a_ERD = a.reshape(wrapper.num_experts, -1, a.shape[-1])
                b_ERK = b.t().reshape(-1, wrapper.num_experts, b.shape[0]).transpose(0, 1)
                own[number] = ExpertFactors(a_ERD, b_ERK, wrapper.scaling[adapter])
    return found


def runs_grouped(experts: Any, args: Sequence[Any], adapted: Sequence[str]) -> bool:
    """Return whether `grouped_experts` can replace a module.

    Args:
        experts: the frozen module.
        args: what the model calls it with.
        adapted: names of its parameters that have adapters.
    """
    # What `transformers.integrations.use_experts_implementation` writes into the modules that it can compute.
    is_known = all(hasattr(experts, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))
    if not is_known or len(args) != 3 or not _PARAMETERS.issuperset(adapted):
        return False
    if getattr(experts, "_is_expert_parallel", False) or experts.num_experts < 2:
        return False  # PEFT takes the adapter of a single expert for that of a plain matrix
    weights = [getattr(experts, name) for name in (_first_name(experts), "down_proj")]
    return all(
        type(weight) is nn.Parameter
        and weight.dtype in _DTYPES
        and not any(size * weight.itemsize % _STRIDE_BYTES for size in weight.shape[1:])
        for weight in weights
    )


def _first_name(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


class _Slots(NamedTuple):
    """Where the slots of a pass lie once they are sorted.

    Attributes:
        order: int64 `[S]`, which slot lies at each place.
        expert: int64 `[S]`, the expert of each place.
        expert_ends: int32 `[E]`, where the slots of each expert end.
        pair_ends: int32 `[E * N]`, where those of each expert and task end.
    """

    order: torch.Tensor
    expert: torch.Tensor
    expert_ends: torch.Tensor
    pair_ends: torch.Tensor


def grouped_experts(
    experts: Any,
    hidden_TD: torch.Tensor,
    index_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    factors: Mapping[str, Sequence[ExpertFactors | None]],
    lengths: tuple[int, ...],
) -> torch.Tensor:
    """Return the experts' output for each token, with the adapter of the token's task.

    Args:
        experts: the frozen module, as `runs_grouped` wants it.
        hidden_TD: `[T, D]`, the activations.
        index_Tk: int64 `[T, k]`, the experts of each token.
        weights_Tk: `[T, k]`, the weight of each of them in the token's result.
        factors: adapters of the N tasks by the name of the parameter; `None` for a task without one.
        lengths: tokens of each of the N tasks, in stream order.
    """
    num_tokens, num_chosen = index_Tk.shape
    num_tasks, num_experts, device = len(lengths), experts.num_experts, index_Tk.device
    pair_of_slot = (index_Tk * num_tasks + _task_of_token(lengths, device).unsqueeze(1)).reshape(-1)
    pairs, order = torch.sort(pair_of_slot, stable=True)
    # By search and not by counting, which would wait for the device.
    ends = torch.searchsorted(pairs, torch.arange(num_experts * num_tasks, device=device), right=True).to(torch.int32)
    slots = _Slots(order, pairs // num_tasks, ends[num_tasks - 1 :: num_tasks].contiguous(), ends)
    first = _first_name(experts)
    x = hidden_TD.index_select(0, order // num_chosen)
    y = _linear(experts, first, x, slots, factors.get(first, ()))
    y = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
    y = _linear(experts, "down_proj", y, slots, factors.get("down_proj", ()))
    if getattr(experts, "has_post_expert_norm", False):
        y = experts.post_expert_norm(y)
    y = y * weights_Tk.reshape(-1).index_select(0, order).unsqueeze(-1)
    # Back in the order of tokens, so that the sum over a token's experts needs no addition by index.
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(y), device=device))
    return y.index_select(0, back).view(num_tokens, num_chosen, -1).sum(dim=1).to(hidden_TD.dtype)


@lru_cache(maxsize=8)
def _task_of_token(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return int64 `[T]`, the number of each token's task; kept, because all layers of a pass ask for it."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return copied_to(numbers, device)


def _linear(
    experts: Any, name: str, x_SD: torch.Tensor, slots: _Slots, factors: Sequence[ExpertFactors | None]
) -> torch.Tensor:
    """Return `[S, K]`: the frozen matrix of each slot's expert, and the adapter of its expert and task."""
    weight = getattr(experts, name)
    # `grouped_mm` ignores autocast, so experts compute in the dtype of their weights, as in transformers.
    x_SD = x_SD.to(weight.dtype)
    y_SK = F.grouped_mm(x_SD, weight if experts.is_transposed else weight.transpose(1, 2), offs=slots.expert_ends)
    if experts.has_bias:
        y_SK = y_SK + getattr(experts, f"{name}_bias").index_select(0, slots.expert)
    present = [item for item in factors if item is not None]
    if not present:
        return y_SK
    # Factors of all pairs, padded with zeros to the greatest rank. Experts first, as the slots lie: the tasks of one
    # expert are neighbours.
    rank = round_up_to_group(max(item.a_ERD.shape[1] for item in present))
    a_parts, b_parts = [], []
    for item in factors:
        for parts, factor in zip((a_parts, b_parts), (item or present[0])[:2], strict=True):
            num_experts, own_rank, width = factor.shape
            if item is None:
                parts.append(factor.new_zeros(num_experts, rank, width, dtype=weight.dtype))
            else:
                parts.append(F.pad(factor.to(weight.dtype), (0, 0, 0, rank - own_rank)))
        if item is not None:
            b_parts[-1] = b_parts[-1] * item.scaling
    a_PRD, b_PRK = (torch.stack(parts, dim=1).flatten(0, 1) for parts in (a_parts, b_parts))
    s_SR = F.grouped_mm(x_SD, a_PRD.transpose(1, 2), offs=slots.pair_ends)
    return y_SK + F.grouped_mm(s_SR, b_PRK, offs=slots.pair_ends)
