"""What LoHa and LoKr add, computed from their factors: PEFT makes a change as large as the frozen weight first.

    LoHa    (w1a w1b) * (w2a w2b) = B A,   A[i r + j] = w1b[i] * w2b[j],   B[:, i r + j] = w1a[:, i] * w2a[:, j]
    LoKr    (w1 (x) w2) x: w2 on the inner and w1 on the outer features of x, [N, b, d] -> [N, a, c]

The first is of rank r * r, whatever the widths are. All `*` are elementwise.

Shape letters: N rows of one task, D input features, K output features, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from peft_mux.modeling.stream import Stream


class FactoredProduct:
    """Takes the place of `_get_delta_activations` of PEFT's layer while a stream is read.

    Args:
        layer: PEFT's layer of LoHa or LoKr.
        stream: what tells whether a stream is read.
    """

    def __init__(self, layer: Any, stream: Stream) -> None:
        """Remember PEFT's own way, for forwards that read no stream and for what factors cannot say."""
        self._layer, self._stream = layer, stream
        self._original = layer._get_delta_activations

    def __call__(self, adapter: str, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what an adapter adds for `x [..., D]`: `[..., K]`."""
        layer = self._layer
        # A mask over the rows of the weight is drawn for the whole of it.
        drops = layer.training and bool(layer.rank_dropout[adapter])
        if self._stream.is_idle or drops or not isinstance(layer.get_base_layer(), nn.Linear):
            return self._original(adapter, x, *args, **kwargs)
        is_loha = hasattr(layer, "hada_w1_a")
        added = _hadamard(layer, adapter, x) if is_loha else _kronecker(layer, adapter, x)
        return self._original(adapter, x, *args, **kwargs) if added is None else added * layer.scaling[adapter]


def _hadamard(layer: Any, adapter: str, x: torch.Tensor) -> torch.Tensor | None:
    """Return LoHa's product as one of low rank; `None` where the weight is less work."""
    if adapter in layer.hada_t1:
        return None
    left_1, right_1 = layer.hada_w1_a[adapter], layer.hada_w1_b[adapter]
    left_2, right_2 = layer.hada_w2_a[adapter], layer.hada_w2_b[adapter]
    (num_out, rank), num_in = left_1.shape, right_1.shape[1]
    if rank * rank * (num_in + num_out) >= num_in * num_out:
        return None
    a_RD = (right_1[:, None] * right_2[None]).flatten(0, 1)
    b_KR = (left_1[:, :, None] * left_2[:, None]).flatten(1)
    return F.linear(F.linear(layer._cast_input_dtype(x, a_RD.dtype), a_RD), b_KR)


def _kronecker(layer: Any, adapter: str, x: torch.Tensor) -> torch.Tensor | None:
    """Return LoKr's product, factor by factor; `None` where it has factors of convolutions."""
    if adapter in layer.lokr_t2:
        return None
    whole_1, whole_2 = layer.lokr_w1, layer.lokr_w2
    outer = whole_1[adapter] if adapter in whole_1 else layer.lokr_w1_a[adapter] @ layer.lokr_w1_b[adapter]
    inner = whole_2[adapter] if adapter in whole_2 else layer.lokr_w2_a[adapter] @ layer.lokr_w2_b[adapter]
    x = layer._cast_input_dtype(x, outer.dtype)
    z = F.linear(x.unflatten(-1, (outer.shape[1], inner.shape[1])), inner)
    return F.linear(z.transpose(-1, -2), outer).transpose(-1, -2).flatten(-2)
