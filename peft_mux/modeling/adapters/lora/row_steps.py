"""What LoRA adapters do to their task's rows beyond the grouped product `W x + s B A x`.

Most adapters do nothing else, and no layer that holds only such ones pays for the others. Each step works on the rows
of one task, cut out of the stream, so that no other task's numbers take part. In this order: the blocks of
`use_bdlora`, the bias of `lora_bias`, initial factors, DoRA, and the task's own bias of the frozen layer.

DoRA: each output feature of `W + s B A` is scaled to a length of its own, which the task trains::

    y = m / ||W + s B A|| * (W x + s B A x) + b        the norm of each row is a constant to the gradient (DoRA, 4.3)
    ||W + s B A||^2 = ||W||^2 + 2 s <W A^T, B> + s^2 <B (A A^T), B>        row by row, without the matrix `B A`

PiSSA, OLoRA, CorDA and LoRA-GA begin with factors A0 and B0 and take `s B0 A0` out of the weight, so that the model
starts where it was. The weight belongs to all tasks, so it stays as it is, and each layer keeps A0 and B0 with the
adapter. What is trained is the pair A, B; what it adds to the backbone is `s (B A - B0 A0)`, a LoRA of twice the rank,
and as such it is saved (`peft_mux.modeling.adapters.lora.lora_kind.DoubledRank`).

Shape letters: N rows of one task, D input features, K output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from torch.nn import functional as F

from peft_mux.modeling.adapters.trained_parts import own_bias_added, own_biases
from peft_mux.modeling.backbone.modules import frozen_weight

Drop = Callable[[torch.Tensor], torch.Tensor]
"""Returns rows `[N, D]` after the dropout of their task in this layer; the rows themselves if nothing is dropped."""


class RowSteps:
    """What an adapter of a layer does beyond the grouped product; false if that is nothing.

    Args:
        layer: PEFT's layer.
        adapter: internal id of the task's adapter.
    """

    def __init__(self, layer: Any, adapter: str) -> None:
        """Look up the adapter's settings, which do not change after injection."""
        self._layer, self._adapter = layer, adapter
        self._is_here = adapter in layer.lora_A
        # One factor of `use_bdlora` consists of blocks, so the grouped product leaves it out.
        self._has_blocks = self._is_here and not all(
            isinstance(part[adapter], nn.Linear) for part in (layer.lora_A, layer.lora_B)
        )
        self._has_lora_bias = self._is_here and layer.lora_bias.get(adapter, False)
        self._has_magnitude = self._is_here and adapter in layer.lora_magnitude_vector
        self._has_own_bias = adapter in own_biases(layer.get_base_layer())
        # The squares of the frozen weight's rows, with the address and version of the weight that they are of.
        self._squares: tuple[tuple[int, int], torch.Tensor] | None = None

    def __bool__(self) -> bool:
        has_initial = initial_factors(self._layer, self._adapter) is not None
        flags = (self._has_blocks, self._has_lora_bias, self._has_magnitude, self._has_own_bias, has_initial)
        return any(flags)

    def is_grouped(self) -> bool:
        """Return whether the grouped product computes the adapter as well; otherwise the steps do all of it."""
        # DoRA that drops also scales what was not dropped.
        drops = self._has_magnitude and dropout_of(self._layer, self._adapter) > 0.0
        return self._is_here and not self._has_blocks and not drops

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs `[N, K]` of a task's rows, from the layer's inputs `[N, D]` and the outputs so far."""
        layer, adapter = self._layer, self._adapter
        if self._has_blocks:
            a, b = layer.lora_A[adapter], layer.lora_B[adapter]
            y_NK = y_NK + (b(a(drop(x_ND).to(a.weight.dtype))) * layer.scaling[adapter]).to(y_NK.dtype)
        if self._has_lora_bias:  # a bias on B, which is scaled as B is
            y_NK = y_NK + (layer.lora_B[adapter].bias * layer.scaling[adapter]).to(y_NK.dtype)
        y_NK = self.without_initial(x_ND, y_NK)
        if self._has_magnitude:
            y_NK = self._scaled(x_ND, y_NK, drop)
        return own_bias_added(layer.get_base_layer(), adapter, y_NK)

    def without_initial(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return outputs `[..., K]` without `s B0 A0 x`: what the weight computes sees the input before dropout."""
        initial = initial_factors(self._layer, self._adapter)
        if initial is None:
            return y
        a_RD, b_KR = (factor.to(y.dtype) for factor in initial)
        s_NR = F.linear(x.reshape(-1, x.shape[-1]).to(y.dtype), a_RD)
        # Within the product, without another tensor as large as the outputs.
        scale = self._layer.scaling[self._adapter]
        return torch.addmm(y.reshape(-1, y.shape[-1]), s_NR, b_KR.t(), alpha=-scale).view_as(y)

    def _scaled(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs of a DoRA adapter: scales the grouped product, or computes both if inputs are dropped."""
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
            # As in PEFT: the backbone's own part sees the input, and the correction sees the input after dropout.
            x_ND = drop(x_ND).to(y_NK.dtype)
            a_RD, b_KR = (part[adapter].weight.to(y_NK.dtype) for part in (layer.lora_A, layer.lora_B))
            added = F.linear(F.linear(x_ND, a_RD), b_KR) * layer.scaling[adapter]
            return y_NK + (scale_K - 1) * F.linear(x_ND, weight_KD) + scale_K * added

    @torch.no_grad()
    def norms(self, weight_KD: torch.Tensor) -> torch.Tensor:
        """Return the norms `[K]` of the rows of `W + s B A`, in fp32 or fp64, for the frozen weight W."""
        dtype = torch.promote_types(weight_KD.dtype, torch.float32)
        a_RD, b_KR = (part[self._adapter].weight.to(dtype) for part in (self._layer.lora_A, self._layer.lora_B))
        scale, frozen = self._layer.scaling[self._adapter], self._layer.get_base_layer().weight
        # Summed once, and again if the backbone was moved, cast or written to.
        key = (frozen.data_ptr(), frozen._version)
        if self._squares is None or self._squares[0] != key:
            self._squares = key, torch.linalg.vector_norm(weight_KD, dim=1, dtype=dtype).square()
        crossed = (F.linear(a_RD.to(weight_KD.dtype), weight_KD).t().to(dtype) * b_KR).sum(dim=1)
        added = (b_KR @ (a_RD @ a_RD.t()) * b_KR).sum(dim=1)
        # Rounding can take a row of zeros below zero.
        return (self._squares[1] + 2 * scale * crossed + scale**2 * added).clamp_min_(0).sqrt_()


def dropout_of(layer: Any, adapter: str) -> float:
    """Return the probability with which an adapter drops elements of its input now."""
    # PEFT puts an `Identity`, which has no `p`, if nothing is dropped.
    return getattr(layer.lora_dropout[adapter], "p", 0.0) if layer.training else 0.0


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
        setattr(LoraLayer, name, partialmethod(_initialised, method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(LoraLayer, name, method)


def _initialised(layer: Any, method: Callable[..., None], adapter: str, *args: Any) -> None:
    """Run one of PEFT's methods that take factors out of a layer's weight, and put the weight back."""
    base = layer.get_base_layer()
    if method.__name__ == "lora_ga_init" and not hasattr(base, "_peft_loraga_grad"):
        raise ValueError(
            "init_lora_weights='lora_ga' needs gradients that peft.tuners.lora.loraga.preprocess_loraga has "
            "estimated on the backbone, got none; without them, PEFT draws at random."
        )
    frozen = base.weight.data
    whole = frozen.clone()  # PEFT writes into it, or puts another in its place
    try:
        method(layer, adapter, *args)
    finally:
        base.weight.data = frozen.copy_(whole)
    keep_factors(layer, adapter, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)


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
