"""What LoRA adapters do to their task's rows beyond the grouped product `W x + s B A x`.

Most adapters do nothing else, and no layer that holds only such ones pays for the others. Each step works on the rows
of one task, cut out of the stream, so that no other task's numbers take part.

DoRA: each output feature of `W + s B A` is scaled to a length of its own, which the task trains::

    y = m / ||W + s B A|| * (W x + s B A x) + b        the norm of each row is a constant to the gradient (DoRA, 4.3)
    ||W + s B A||^2 = ||W||^2 + 2 s <W A^T, B> + s^2 <B (A A^T), B>        row by row, without the matrix `B A`

PiSSA, OLoRA, CorDA and LoRA-GA begin with factors A0 and B0 and take `s B0 A0` out of the weight, so that the model
starts where it was. The weight belongs to all tasks, so it stays as it is, and each layer keeps A0 and B0 with the
adapter. What is trained is the pair A, B; what it adds to the backbone is `s (B A - B0 A0)`, a LoRA of twice the rank,
and as such it is saved (`peft_mux.modeling.adapters.lora.kind.DoubledRank`).

Shape letters: N rows of one task, D input features, K output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from torch.nn import functional as F

from peft_mux.modeling.adapters.own import own_bias_added, own_biases
from peft_mux.modeling.backbone.modules import frozen_weight

Drop = Callable[[torch.Tensor], torch.Tensor]
"""Returns rows `[N, D]` after the dropout of their task in this layer; the rows themselves if nothing is dropped."""

RowStep = Callable[[torch.Tensor, torch.Tensor, Drop], torch.Tensor]
"""Returns outputs `[N, K]` of a task's rows, from the layer's inputs `[N, D]` and the outputs so far."""


def steps_of(layer: Any, adapter: str) -> tuple[RowStep, ...]:
    """Return what an adapter of a layer does beyond the grouped product, in order; mostly nothing."""
    steps: list[RowStep] = []
    if adapter in layer.lora_A:
        if is_block_diagonal(layer, adapter):
            steps.append(partial(_add_blocks, layer, adapter))
        if layer.lora_bias.get(adapter, False):
            steps.append(partial(_add_lora_bias, layer, adapter))
        if initial_factors(layer, adapter) is not None:
            steps.append(partial(subtract_initial, layer, adapter))
        if adapter in layer.lora_magnitude_vector:
            steps.append(MagnitudeScale(layer, adapter))
    if adapter in own_biases(layer.get_base_layer()):
        steps.append(partial(replace_bias, layer, adapter))
    return tuple(steps)


def is_block_diagonal(layer: Any, adapter: str) -> bool:
    """Return whether a factor of an adapter consists of blocks, so that the grouped product leaves it out."""
    return any(not isinstance(part[adapter], nn.Linear) for part in (layer.lora_A, layer.lora_B))


def dropout_of(layer: Any, adapter: str) -> float:
    """Return the probability with which an adapter drops elements of its input now."""
    # PEFT puts an `Identity`, which has no `p`, if nothing is dropped.
    return getattr(layer.lora_dropout[adapter], "p", 0.0) if layer.training else 0.0


def is_grouped(layer: Any, adapter: str) -> bool:
    """Return whether the grouped product computes an adapter of a layer; otherwise its steps do, if it has any."""
    if adapter not in layer.lora_A or is_block_diagonal(layer, adapter):
        return False
    # DoRA that drops also scales what was not dropped.
    return adapter not in layer.lora_magnitude_vector or dropout_of(layer, adapter) == 0.0


def _add_blocks(layer: Any, adapter: str, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
    """Return the outputs with those of `use_bdlora`, one of whose factors consists of blocks."""
    a, b = layer.lora_A[adapter], layer.lora_B[adapter]
    return y_NK + (b(a(drop(x_ND).to(a.weight.dtype))) * layer.scaling[adapter]).to(y_NK.dtype)


def _add_lora_bias(layer: Any, adapter: str, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
    """Return the outputs with `lora_bias`, a bias on B, which is scaled as B is."""
    return y_NK + (layer.lora_B[adapter].bias * layer.scaling[adapter]).to(y_NK.dtype)


def subtract_initial(layer: Any, adapter: str, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
    """Return the outputs without `s B0 A0 x`: what the weight itself computes sees the input before dropout."""
    a_RD, b_KR = (factor.to(y_NK.dtype) for factor in initial_factors(layer, adapter) or ())
    s_NR = F.linear(x_ND.reshape(-1, x_ND.shape[-1]).to(y_NK.dtype), a_RD)
    # Within the product, without another tensor as large as the outputs.
    rows = torch.addmm(y_NK.reshape(-1, y_NK.shape[-1]), s_NR, b_KR.t(), alpha=-layer.scaling[adapter])
    return rows.view_as(y_NK)


def replace_bias(layer: Any, adapter: str, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
    """Return the outputs with the task's own bias in place of the frozen one."""
    return own_bias_added(layer.get_base_layer(), adapter, y_NK)


class MagnitudeScale:
    """The step of a DoRA adapter: scales the grouped product, or computes both if inputs are dropped.

    Args:
        layer: PEFT's layer.
        adapter: internal id of the task's adapter.
    """

    def __init__(self, layer: Any, adapter: str) -> None:
        """Start without the squares of the frozen weight, which are summed when they are first needed."""
        self._layer, self._adapter = layer, adapter
        self._squares: tuple[tuple[int, int], torch.Tensor] | None = None

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs of the task's rows; see `RowStep`."""
        layer, adapter = self._layer, self._adapter
        magnitude, base = layer.lora_magnitude_vector[adapter].weight, layer.get_base_layer()
        weight_KD, bias_K = frozen_weight(base)
        if weight_KD is None:
            weight_KD, bias_K = dequantize_module_weight(base), base.bias
        weight_KD = weight_KD.to(y_NK.dtype)
        with torch.autocast(y_NK.device.type, enabled=False):
            scale_K = (magnitude / self.norms(weight_KD).to(magnitude.dtype)).to(y_NK.dtype)
            if dropout_of(layer, adapter) == 0.0:
                # The grouped product has added s B A x already; the frozen bias is not scaled.
                if bias_K is None:
                    return y_NK * scale_K
                return (y_NK - bias_K.to(y_NK.dtype)) * scale_K + bias_K.to(y_NK.dtype)
            # As in PEFT: the backbone's own part sees the input, and what is added to it sees the dropped one.
            x_ND = drop(x_ND).to(y_NK.dtype)
            a_RD, b_KR = (part[adapter].weight.to(y_NK.dtype) for part in (layer.lora_A, layer.lora_B))
            added = F.linear(F.linear(x_ND, a_RD), b_KR) * layer.scaling[adapter]
            return y_NK + (scale_K - 1) * F.linear(x_ND, weight_KD) + scale_K * added

    @torch.no_grad()
    def norms(self, weight_KD: torch.Tensor) -> torch.Tensor:
        """Return the norms `[K]` of the rows of `W + s B A`, in fp32, for the frozen weight W."""
        a_RD, b_KR = (part[self._adapter].weight.float() for part in (self._layer.lora_A, self._layer.lora_B))
        scale, frozen = self._layer.scaling[self._adapter], self._layer.get_base_layer().weight
        # Summed once, and again if the backbone was moved, cast or written to.
        key = (frozen.data_ptr(), frozen._version)
        if self._squares is None or self._squares[0] != key:
            self._squares = key, torch.linalg.vector_norm(weight_KD, dim=1, dtype=torch.float32).square()
        crossed = (F.linear(a_RD.to(weight_KD.dtype), weight_KD).t().float() * b_KR).sum(dim=1)
        added = (b_KR @ (a_RD @ a_RD.t()) * b_KR).sum(dim=1)
        # Rounding can take a row of zeros below zero.
        return (self._squares[1] + 2 * scale * crossed + scale**2 * added).clamp_min_(0).sqrt_()


# ------------------------------------------------------------- initial factors

_INITIALISERS = ("pissa_init", "olora_init", "corda_init", "lora_ga_init")
"""Methods of PEFT's layer that write into the frozen weight."""

_KEPT = ("lora_initial_A", "lora_initial_B")
"""The attributes in which a layer keeps A0 and B0 of each adapter."""


@contextmanager
def backbone_kept() -> Iterator[None]:
    """Let PEFT initialise adapters from the backbone's weights without changing these, in the `with` block."""
    # On the class, for the time of one injection: PEFT creates and initialises its layers in one go, and draws random
    # numbers on the way, so that what a seed gives depends on every layer before.
    before: dict[str, Any] = {name: getattr(LoraLayer, name) for name in _INITIALISERS}
    for name, method in before.items():
        setattr(LoraLayer, name, _keeping(name, method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(LoraLayer, name, method)


def _keeping(name: str, method: Callable[..., None]) -> Callable[..., None]:
    def initialise(layer: Any, adapter: str, *args: Any) -> None:
        base = layer.get_base_layer()
        if name == "lora_ga_init" and not hasattr(base, "_peft_loraga_grad"):
            raise ValueError(
                "init_lora_weights='lora_ga' found no gradients on the backbone, without which PEFT draws at random; "
                "allowed: a backbone that peft.tuners.lora.loraga.preprocess_loraga has estimated them on."
            )
        frozen = base.weight.data
        whole = frozen.clone()  # PEFT writes into it, or puts another in its place
        try:
            method(layer, adapter, *args)
        finally:
            base.weight.data = frozen.copy_(whole)
        keep_factors(layer, adapter, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)

    return initialise


def keep_factors(layer: Any, adapter: str, a_RD: torch.Tensor, b_KR: torch.Tensor) -> None:
    """Keep copies of A0 and B0 with an adapter; PEFT moves and deletes them with it."""
    for name, factor in zip(_KEPT, (a_RD, b_KR), strict=True):
        if not hasattr(layer, name):
            # Not persistent: the adapter's files have them in another form.
            setattr(layer, name, BufferDict({}, persistent=False))
            layer.other_param_names = (*layer.other_param_names, name)
        getattr(layer, name)[adapter] = factor.detach().clone()


def initial_factors(layer: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return A0 `[R, D]` and B0 `[K, R]` of an adapter; `None` if it began without taking from the weight."""
    kept = getattr(layer, _KEPT[0], None)
    if kept is None or adapter not in kept:
        return None
    return kept[adapter], getattr(layer, _KEPT[1])[adapter]
