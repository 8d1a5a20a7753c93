"""The kinds of all types that run sliced, and the special cases of a few of them.

LoHa and LoKr: PEFT makes a change as large as the frozen weight first; here it is computed from the factors::

    LoHa    (w1a w1b) * (w2a w2b) = B A,   A[i r + j] = w1b[i] * w2b[j],   B[:, i r + j] = w1a[:, i] * w2a[:, j]
    LoKr    (w1 (x) w2) x: w2 on the inner and w1 on the outer features of x, [N, b, d] -> [N, a, c]

The first is of rank r * r, whatever the widths are. All `*` are elementwise.

Shape letters: N rows of one task, D input features, K output features, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from peft_mux.adapters.catalogue import ENTRIES
from peft_mux.adapters.sliced import SlicedAdapter, SlicedKind
from peft_mux.errors import Fault
from peft_mux.kernels import philox
from peft_mux.modeling.adapters.kind import Category, register_kind
from peft_mux.modeling.backbone.modules import adaptable_modules, is_meta


class FactoredAdapter(SlicedAdapter):
    """A layer of LoHa or LoKr, whose product is computed from its factors if that is less work than the weight."""

    def __init__(self, module: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._peft_product = module._get_delta_activations
        module._get_delta_activations = self.product

    def product(self, adapter: str, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what an adapter adds for `x [..., D]`: `[..., K]`."""
        layer: Any = self.module
        # A mask over the rows of the weight is drawn for the whole of it.
        drops = layer.training and bool(layer.rank_dropout[adapter])
        has_convolutions = adapter in getattr(layer, "hada_t1", ()) or adapter in getattr(layer, "lokr_t2", ())
        is_linear = isinstance(layer.get_base_layer(), nn.Linear) and not has_convolutions
        if self.stream.is_idle or drops or not is_linear:
            return self._peft_product(adapter, x, *args, **kwargs)
        if hasattr(layer, "hada_w1_a"):
            left_1, right_1 = layer.hada_w1_a[adapter], layer.hada_w1_b[adapter]
            left_2, right_2 = layer.hada_w2_a[adapter], layer.hada_w2_b[adapter]
            (num_out, rank), num_in = left_1.shape, right_1.shape[1]
            if rank * rank * (num_in + num_out) >= num_in * num_out:
                return self._peft_product(adapter, x, *args, **kwargs)
            a_RD = (right_1[:, None] * right_2[None]).flatten(0, 1)
            b_KR = (left_1[:, :, None] * left_2[:, None]).flatten(1)
            added = F.linear(F.linear(layer._cast_input_dtype(x, a_RD.dtype), a_RD), b_KR)
        else:
            whole_1, whole_2 = layer.lokr_w1, layer.lokr_w2
            outer = whole_1[adapter] if adapter in whole_1 else layer.lokr_w1_a[adapter] @ layer.lokr_w1_b[adapter]
            inner = whole_2[adapter] if adapter in whole_2 else layer.lokr_w2_a[adapter] @ layer.lokr_w2_b[adapter]
            x = layer._cast_input_dtype(x, outer.dtype)
            z = F.linear(x.unflatten(-1, (outer.shape[1], inner.shape[1])), inner)
            added = F.linear(z.transpose(-1, -2), outer).transpose(-1, -2).flatten(-2)
        return added * layer.scaling[adapter]


class PveraAdapter(SlicedAdapter):
    """A layer of PVeRA, whose noise belongs to each task's tokens while a stream is read.

    A draw depends on the task's seed and step, on the token's place in its global batch, and on the layer's name; so
    neither neighbours nor micro-batches nor recomputation change it.
    """

    def __init__(self, module: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._peft_draw = module._reparametrize
        module._reparametrize = self.draw

    def draw(self, mean: torch.Tensor, logvar: torch.Tensor, adapter: str) -> torch.Tensor:
        """Return `mean` plus noise of variance `exp(logvar)`, in training; both `[1, N, R]` of one task's rows."""
        if self.stream.is_idle or not self.module.training:
            return self._peft_draw(mean, logvar, adapter)
        (segment,) = self.stream.segments
        noise = normal(segment.draw_seed(self.name), self.stream.places, mean.shape[-1])
        return mean + noise.to(mean).view_as(mean) * torch.exp(0.5 * logvar)


def normal(seed: int, places: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return `[N, num_columns]` draws of a normal distribution, by Box and Muller.

    Args:
        seed: 64-bit key of the draws.
        places: int64 `[N]`, place of each row in its task's global batch.
        num_columns: width of the draws.
    """
    calls = -(-num_columns // 2)
    words = philox.philox(seed, places[:, None] * calls + torch.arange(calls, device=places.device))
    # Half a word up, because zero has no logarithm.
    radius = torch.sqrt(-2.0 * torch.log((words[0].double() + 0.5) / 2.0**32))
    angle = 2.0 * math.pi * words[1].double() / 2.0**32
    pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return pairs.reshape(len(places), 2 * calls)[:, :num_columns].float()


class NormKind(SlicedKind):
    """LN tuning, which trains copies of norms."""

    def adaptable(self, backbone: nn.Module) -> Mapping[str, nn.Module]:
        """Return the modules that may be targets: those without children that hold a vector as their weight."""
        others = adaptable_modules(backbone)
        norms = {}
        for name, module in backbone.named_modules():
            name, weight = name.replace(".base_layer", ""), module._parameters.get("weight")
            if name not in others and weight is not None and weight.dim() == 1 and not list(module.children()):
                norms[name] = module
        return norms


class ShiraKind(SlicedKind):
    """SHiRA, which chooses at random which elements of a weight it trains."""

    def complete(self, config: Any, backbone: Any) -> None:
        """Give a model without weights masks on the CPU: how many elements they have needs no weights."""
        super().complete(config, backbone)
        if is_meta(backbone):
            config.mask_fn = _mask_without_weight


def _mask_without_weight(layer: nn.Linear, r: int, **options: Any) -> torch.Tensor:
    """Return a mask of as many elements as SHiRA trains of a layer whose weight has no data: the first ones."""
    rows, columns = layer.weight.shape
    mask = torch.zeros(rows * columns)
    mask[: r * (rows + columns)] = 1.0
    return mask.view(rows, columns)


class TokenKind(SlicedKind):
    """Trainable tokens, whose rows PEFT shares with an output head that is tied to the embedding."""

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Refuse indices that are no tokens."""
        faults = super().backbone_faults(config, backbone, where)
        size, indices = backbone.get_input_embeddings().weight.shape[0], config.token_indices
        if not indices or len(set(indices)) < len(indices) or max(indices) >= size:
            allowed = f"a list of different numbers in [0, {size})"
            faults.append(Fault(f"{where}.token_indices", f"{indices!r:.80}", allowed))
        return faults


_KINDS = {"LN_TUNING": NormKind, "TRAINABLE_TOKENS": TokenKind, "SHIRA": ShiraKind}
_FORWARDS = {"LOHA": FactoredAdapter, "LOKR": FactoredAdapter, "PVERA": PveraAdapter}

for _entry in ENTRIES.values():
    if _entry.category in (Category.SLICED, Category.WEIGHT_SPACE) and _entry.peft_type and _entry.is_importable:
        _kind = _KINDS.get(_entry.name, SlicedKind)(_entry)
        _kind.forward_type = _FORWARDS.get(_entry.name, SlicedAdapter)
        register_kind(_kind)
