"""A language model that scores few words for a while: what is shown on it need not read its whole head each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def few_words(backbone: Any, count: int) -> Iterator[None]:
    """Let the head of a backbone have the logits of its first words only, for the time of the block.

    Heads that are no plain linear layer (adapted, quantised or sharded ones) stay as they are.

    Args:
        backbone: a transformers model, possibly with adapters.
        count: how many of its words stay; targets must be among them.
    """
    head = backbone.get_output_embeddings()
    if type(head) is not nn.Linear or not _is_plain(head.weight) or len(head.weight) <= count:
        yield
        return
    # In its own table and not by its name, as what is tied to it (the embeddings) keeps all words.
    whole = dict(head._parameters)
    for name, values in whole.items():
        if values is not None:
            head._parameters[name] = nn.Parameter(values.data[:count], requires_grad=False)
    try:
        yield
    finally:
        head._parameters.update(whole)


def _is_plain(weight: Any) -> bool:
    return type(weight) is nn.Parameter and type(weight.data) is torch.Tensor and weight.is_floating_point()
