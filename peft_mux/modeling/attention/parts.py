"""How attention sees parts of long sequences: which keys come before a part's own, and where its scores lie.

The queries of a part are the last tokens that its keys are of, so causality is a triangle moved to the right::

    part of tokens 4 to 6          keys    0 1 2 3 | 4 5 6
                         query 4           x x x x | x . .
                         query 5           x x x x | x x .
                         query 6           x x x x | x x x

Shape letters: T tokens, G key-value heads, L tokens of a part, K keys of a part, C channels of a head.
"""

from __future__ import annotations

import numpy as np
import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.parts import SequencePart
from peft_mux.modeling.key_values import KeyValueStore


class PartsInFlight:
    """The parts of long sequences in one micro-batch.

    Args:
        batch: the micro-batch, some of whose sequences are parts of longer ones.
        store: holds the keys and values of earlier parts, and takes those that later ones will read.

    Attributes:
        of_sequence: the parts by index of their sequence in the stream; whole sequences are absent.
    """

    def __init__(self, batch: MuxBatch, store: KeyValueStore) -> None:
        """Find which sequences are parts."""
        self._store = store
        self._lengths = batch.sequence_lengths
        self.of_sequence: dict[int, SequencePart] = {
            index: part for index, part in enumerate(batch.parts) if not part.is_whole
        }

    def keep(self, layer: str, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the keys and values that later parts will read.

        Args:
            layer: name of the attention module.
            key: `[1, G, T, C]`.
            value: `[1, G, T, C']`.
        """
        starts = np.cumsum(self._lengths) - self._lengths
        for index, part in self.of_sequence.items():
            # Nothing reads the keys of a last part after its own pass.
            if part.has_more:
                rows = slice(int(starts[index]), int(starts[index]) + self._lengths[index])
                self._store.keep(layer, part, key[0, :, rows], value[0, :, rows])

    def release_finished(self, layer: str) -> None:
        """Free the keys and values of sequences that end here, where there is no backward pass to wait for.

        Args:
            layer: name of the attention module.
        """
        # With gradients, the backward may read them again, and `release` frees them after it.
        if not torch.is_grad_enabled():
            for part in self.of_sequence.values():
                if not part.has_more:
                    self._store.forget(layer, part)

    def joined(
        self, layer: str, index: int, keys_GLC: torch.Tensor, values_GLC: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a part's keys and values behind those of the parts before it, `[G, K, C]`.

        Args:
            layer: name of the attention module.
            index: number of the part among the sequences of the stream.
            keys_GLC: the part's own keys `[G, L, C]`.
            values_GLC: the part's own values `[G, L, C']`.
            window: a query sees this many tokens, itself included; keys that none sees are left out.
        """
        part = self.of_sequence[index]
        pairs = [*self._store.earlier(layer, part, window), (keys_GLC, values_GLC)]
        if len(pairs) == 1:
            # A first part has nothing before it, and needs no copy.
            return pairs[0]
        return torch.cat([keys for keys, _ in pairs], dim=1), torch.cat([values for _, values in pairs], dim=1)

    def joined_stream(
        self, layer: str, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Return keys and values of all sequences, each behind those before it, and how many keys each one has.

        Args:
            layer: name of the attention module.
            key: `[1, G, T, C]`.
            value: `[1, G, T, C']`.
            window: a query sees this many tokens, itself included; keys that none sees are left out.
        """
        pairs = []
        own = zip(key[0].split(self._lengths, dim=1), value[0].split(self._lengths, dim=1), strict=True)
        for index, (keys_GLC, values_GLC) in enumerate(own):
            is_part = index in self.of_sequence
            pairs.append(self.joined(layer, index, keys_GLC, values_GLC, window) if is_part else (keys_GLC, values_GLC))
        keys, values = (torch.cat(side, dim=1) for side in zip(*pairs, strict=True))
        return keys, values, tuple(keys_GLC.shape[1] for keys_GLC, _ in pairs)


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return bool `[L, K]`, true where a query sees a key, or `None` where plain causality says it all.

    Args:
        num_queries: number L of queries.
        num_keys: number K of keys; the last L of them are of the queries' own tokens.
        window: a query sees this many tokens, itself included; `None` for all.
        device: where the mask is made.
    """
    # Without a mask torch takes its fused kernels, whose own triangle is right where there are as many keys as queries.
    if num_keys == num_queries and (window is None or num_keys <= window):
        return None
    rows = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = rows[:, None] - torch.arange(num_keys, device=device)[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
