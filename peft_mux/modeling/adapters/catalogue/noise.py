"""Noise of a normal distribution that belongs to a task's tokens, for types that draw it in training (PVeRA)."""

from __future__ import annotations

import math
from typing import Any

import torch

from peft_mux.kernels import philox
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
