"""Noise of a normal distribution that belongs to a task's tokens, for types that draw it in training (PVeRA)."""

# MERGED: What LoHa and LoKr add, computed from their factors: PEFT makes a change as large as the frozen weight first.
# MERGED: LoHa    (w1a w1b) * (w2a w2b) = B A,   A[i r + j] = w1b[i] * w2b[j],   B[:, i r + j] = w1a[:, i] * w2a[:, j]
# MERGED:     LoKr    (w1 (x) w2) x: w2 on the inner and w1 on the outer features of x, [N, b, d] -> [N, a, c]
# MERGED: The first is of rank r * r, whatever the widths are. All `*` are elementwise.
# MERGED: Shape letters: N rows of one task, D input features, K output features, R rank.
# MERGED: The kinds that entries stand for: `SlicedKind`s, and a few that have something of their own to check or to
# MERGED: draw.

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftType
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from peft_mux.errors import Fault
from peft_mux.kernels import philox
from peft_mux.modeling.adapters.catalogue import ENTRIES, WEIGHTS_ARE_READ, Category, TypeEntry
from peft_mux.modeling.adapters.kind import MultiplexedForward, ReplicaLayout, register_kind
from peft_mux.modeling.adapters.sliced import SlicedAdapter, SlicedKind
from peft_mux.modeling.backbone.modules import adaptable_modules, head_kind_for, is_meta
from peft_mux.modeling.stream import Stream

_WORDS = 2.0**32


class TokenNoise:
    """Takes the place of PVeRA's draw of a normal variable while a stream is read.

    A draw depends on the task's seed and step, on the token's place in its global batch, and on the layer's name; so
    neither neighbours nor micro-batches nor recomputation change it.

    Args:
        layer: PEFT's layer of the type.
        name: the layer's name within the backbone.
        stream: what tells which rows are whose.
    """

    def __init__(self, layer: Any, name: str, stream: Stream) -> None:
        """Remember PEFT's own draw, for forwards that read no stream."""
        self._layer, self._name, self._stream = layer, name, stream
        self._original = layer._reparametrize

    def __call__(self, mean: torch.Tensor, logvar: torch.Tensor, adapter: str) -> torch.Tensor:
        """Return `mean` plus noise of variance `exp(logvar)`, in training; both `[1, T, R]` of one task's rows."""
        if self._stream.is_idle or not self._layer.training:
            return self._original(mean, logvar, adapter)
        (segment,) = self._stream.segments
        noise = normal(segment.draw_seed(self._name), self._stream.places, mean.shape[-1])
        return mean + noise.to(mean).view_as(mean) * torch.exp(0.5 * logvar)


def normal(seed: int, places: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return `[L, num_columns]` draws of a normal distribution, by Box and Muller.

    Args:
        seed: 64-bit key of the draws.
        places: int64 `[L]`, place of each row in its task's global batch.
        num_columns: width of the draws.
    """
    calls = -(-num_columns // 2)
    words = philox.philox(seed, places[:, None] * calls + torch.arange(calls, device=places.device))
    # Half a word up, as the logarithm of zero is none.
    radius = torch.sqrt(-2.0 * torch.log((words[0].double() + 0.5) / _WORDS))
    angle = 2.0 * math.pi * words[1].double() / _WORDS
    pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return pairs.reshape(len(places), 2 * calls)[:, :num_columns].float()


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


_REASONS = {
    "bias": "it trains the backbone's own biases, which all tasks share",
    "modules_to_save": "it trains a copy of a backbone module",
}


class CatalogueKind(SlicedKind):
    """A PEFT type that an entry tells of; see `SlicedKind`.

    Args:
        entry: what is known of the type.
    """

    def __init__(self, entry: TypeEntry) -> None:
        """Look the type up in PEFT."""
        super().__init__(
            PeftType[entry.name],
            fields=frozenset({*entry.fields, "fan_in_fan_out"}),
            reasons={**_REASONS, **entry.reasons},
            draws=entry.draws,
            shares_base=entry.shares_base,
        )
        self.entry = entry

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return a fault for every field that is set and not supported, and for a head that PEFT would not save."""
        faults = super().faults(config, where)
        if head_kind_for(config.task_type).trained_modules and not hasattr(type(config), "modules_to_save"):
            fix = "Its configuration has no modules_to_save, so that the head would be in no file."
            faults.append(Fault(f"{where}.task_type", str(config.task_type), "CAUSAL_LM or None", fix))
        return faults

    def refusals(self, layout: ReplicaLayout, where: str) -> list[Fault]:
        """Refuse layouts on which a process holds a part of what the type needs whole."""
        reason = self.entry.spans_layers or (WEIGHTS_ARE_READ if self.entry.reads_weights else "")
        return super().refusals(layout, where) if not reason else self.refuse_parts(layout, where, reason)

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Refuse backbones without the whole weights that the type begins with."""
        if self.entry.needs_weights and is_meta(backbone):
            fix = "What it begins with is computed from them; load the model with from_pretrained and hand it over."
            return [Fault(where, f"{self.title} on a model without weights", "a model that is loaded", fix)]
        if not (self.entry.reads_weights and isinstance(backbone.base_model, FSDPModule)):
            return []
        got, allowed = f"{self.title} on a backbone that is sharded", "a task of this type from the beginning of a run"
        return [
            Fault(where, got, allowed, f"For {WEIGHTS_ARE_READ}; begin a run with it, or set shard_backbone=False.")
        ]


class NormKind(CatalogueKind):
    """LN tuning, which trains copies of norms."""

    def adaptable(self, backbone: nn.Module) -> Mapping[str, nn.Module]:
        """Return the modules that may be targets: everything small that has a weight and is no linear layer."""
        others = adaptable_modules(backbone)
        return {
            name.replace(".base_layer", ""): module
            for name, module in backbone.named_modules()
            if name.replace(".base_layer", "") not in others and _is_norm(module)
        }


class Ia3Kind(CatalogueKind):
    """IA3, which scales the outputs of some layers, and the inputs of those behind a nonlinearity."""

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return PEFT's own forward, sliced; the frozen layer runs once where outputs are scaled."""
        return SlicedAdapter(module, name, stream, shares_base=not module.is_feedforward)


class ProductKind(CatalogueKind):
    """LoHa and LoKr, whose products are computed from their factors where that is less work than making a weight."""

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return PEFT's own forward, sliced, with another way to the same sums."""
        module._get_delta_activations = FactoredProduct(module, stream)  # type: ignore[assignment]
        return super().attach(module, name, stream)


class PveraKind(CatalogueKind):
    """PVeRA, whose layers draw noise for every token."""

    draws_noise = True

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return PEFT's own forward, sliced, with noise that belongs to each task's tokens."""
        forward = super().attach(module, name, stream)
        assert forward is not None, "sliced kinds attach to every layer"
        module._reparametrize = TokenNoise(module, forward.name, stream)  # type: ignore[assignment]
        return forward


class ShiraKind(CatalogueKind):
    """SHiRA, which chooses at random which elements of a weight it trains."""

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Refuse masks that a saved configuration does not tell of."""
        faults = super().faults(config, where)
        if not faults and config.mask_type != "random":
            fix = "A function of yours is not in the files, so that training could not go on from them."
            faults.append(Fault(f"{where}.mask_type", f"{config.mask_type!r:.60}", '"random"', fix))
        return faults

    def complete(self, config: Any, backbone: Any) -> None:
        """Let a model without weights have its masks on the CPU: which elements they are needs none."""
        super().complete(config, backbone)
        if is_meta(backbone):
            config.mask_fn = _mask_without_weight


class TokenKind(CatalogueKind):
    """Trainable tokens, which tied output heads would have to share."""

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Refuse backbones whose head is their embedding, and indices that are no tokens."""
        faults = super().backbone_faults(config, backbone, where)
        if getattr(backbone.config.get_text_config(), "tie_word_embeddings", False):
            fix = "Its new rows would have to reach the head as well. Use LORA with target_modules=['embed_tokens']."
            return [*faults, Fault(where, "tied embeddings", "a backbone whose head is not its token embedding", fix)]
        size = backbone.get_input_embeddings().weight.shape[0]
        indices = config.token_indices
        is_right = isinstance(indices, list) and bool(indices) and len(set(indices)) == len(indices)
        if is_right and all(isinstance(index, int) and 0 <= index < size for index in indices):
            return faults
        return [
            *faults,
            Fault(f"{where}.token_indices", f"{indices!r:.80}", f"a list of different numbers in [0, {size})"),
        ]


def _mask_without_weight(layer: nn.Linear, r: int, **options: Any) -> torch.Tensor:
    """Return a mask of as many elements as SHiRA trains of a layer whose weight has no data: the first ones."""
    rows, columns = layer.weight.shape
    mask = torch.zeros(rows * columns)
    mask[: r * (rows + columns)] = 1.0
    return mask.view(rows, columns)


def _is_norm(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return "weight" in own and own["weight"].dim() == 1 and not list(module.children())


_CLASSES: Mapping[str, type[CatalogueKind]] = {
    "IA3": Ia3Kind,
    "LN_TUNING": NormKind,
    "LOHA": ProductKind,
    "LOKR": ProductKind,
    "TRAINABLE_TOKENS": TokenKind,
    "PVERA": PveraKind,
    "SHIRA": ShiraKind,
}

for _entry in ENTRIES.values():
    if _entry.category in (Category.SLICED, Category.WEIGHT_SPACE) and _entry.peft_type and _entry.is_importable:
        register_kind(_CLASSES.get(_entry.name, CatalogueKind)(_entry))
