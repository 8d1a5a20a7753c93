"""Learnt keys and values in front of the sequences of a task (prefix tuning), in every layer.

A prefix is no token: it has no queries, and stands before the first token of each of its task's sequences::

    prefix of 2 keys     keys    p p | 0 1 2
                  query 0        x x | x . .
                  query 1        x x | x x .
                  query 2        x x | x x x

Shape letters: S sequences, n sequences of a rectangle, G key-value heads, V keys of a prefix, L keys of a sequence, C
channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from peft_mux.errors import UnsupportedModelError


class Prefixes:
    """The prefixes of one pass.

    Args:
        of_sequence: number of the prefix of each of the S sequences of the stream; `None` for those without.
        key_values: of each prefix, the keys and values of all layers, `[2 * layers, G, V, C]`: keys of a layer before
            its values.
    """

    def __init__(self, of_sequence: Sequence[int | None], key_values: Sequence[torch.Tensor]) -> None:
        """Take the layers apart, once for all of them."""
        self.of_sequence = tuple(of_sequence)
        self._layers = [stacked.unbind() for stacked in key_values]

    def num_keys(self, index: int) -> int:
        """Return the number V of keys before the first token of a sequence, by its number in the stream."""
        number = self.of_sequence[index]
        return 0 if number is None else self._layers[number][0].shape[1]

    def before(
        self, module: nn.Module, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values behind those of their prefix, `[n, G, V + L, C]`.

        Where attention slides a window, a later part of a long row has only the keys of earlier ones that it sees; then
        the prefix is beyond the window, and stays so.

        Args:
            module: the attention module that attends.
            index: number in the stream of one of the n sequences, which have one prefix.
            keys: keys `[n, G, L, C]`, of earlier parts of the sequence too.
            values: values `[n, G, L, C']`.

        Raises:
            UnsupportedModelError: if the layer has other heads than the prefix.
        """
        number = self.of_sequence[index]
        if number is None:
            return keys, values
        layer = 2 * self._layer_of(module, number)
        pair = []
        for prefix_GVC, own in zip(self._layers[number][layer : layer + 2], (keys, values), strict=True):
            self._check(module, prefix_GVC, own)
            # Expanded, so that the backward is one sum over the sequences, in their order.
            shared = prefix_GVC.to(own.dtype).expand(own.shape[0], -1, -1, -1)
            pair.append(torch.cat([shared, own], dim=2))
        return pair[0], pair[1]

    def before_all(
        self,
        module: nn.Module,
        keys_GKC: torch.Tensor,
        values_GKC: torch.Tensor,
        num_keys: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Return keys and values of a whole stream, those of each sequence behind its prefix, and how many each has.

        Args:
            module: the attention module that attends.
            keys_GKC: keys of all sequences one after another, with those of earlier parts.
            values_GKC: their values.
            num_keys: number of keys of each of the S sequences.
        """
        own = zip(keys_GKC.split(num_keys, dim=1), values_GKC.split(num_keys, dim=1), strict=True)
        pairs = [self.before(module, index, k[None], v[None]) for index, (k, v) in enumerate(own)]
        keys, values = (torch.cat(side, dim=2)[0] for side in zip(*pairs, strict=True))
        return keys, values, tuple(pair[0].shape[2] for pair in pairs)

    def _layer_of(self, module: nn.Module, number: int) -> int:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not 0 <= 2 * layer < len(self._layers[number]):
            raise UnsupportedModelError(
                f"{type(module).__name__} has layer number {layer}, for which a prefix has no keys; allowed: models"
                " whose attention modules are numbered from 0. Use PROMPT_TUNING, which needs no layers."
            )
        return layer

    def _check(self, module: nn.Module, prefix_GVC: torch.Tensor, own: torch.Tensor) -> None:
        heads, channels = prefix_GVC.shape[0], prefix_GVC.shape[2]
        if (heads, channels) != (own.shape[1], own.shape[3]):
            raise UnsupportedModelError(
                f"{type(module).__name__} (layer {module.layer_idx}) has {own.shape[1]} heads of {own.shape[3]}"
                f" channels, and the prefix {heads} of {channels}; allowed: models whose layers all have the heads that"
                " their configuration tells. Use PROMPT_TUNING, which needs no layers."
            )
