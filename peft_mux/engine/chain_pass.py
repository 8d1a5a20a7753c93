"""Chains: forward and backward over the parts of long sequences, with exact gradients (M §3.5, Figure 12c; TeraPipe).

Micro-batches that share a sequence form a chain. Their forwards run in order, their backwards in reverse::

    forward  0, forward 1, forward 2, backward 2, backward 1, backward 0

A later part reads the keys and values of the earlier ones; what it adds to their gradients enters the backward of the
pass that computed them, together with that pass's own losses (`peft_mux.modeling.key_values`). So gradients are those
of the unsplit sequence, up to the order of sums.

What is held. From its forward to its backward, each pass of a chain holds its autograd graph, as every pass does; so a
chain holds the graphs of all its passes at its turning point, and frees them one by one from there. With activation
checkpointing that is, for each pass, the inputs of its layers and the keys and values of its parts, and the activations
of one layer of one pass while they are recomputed: much less than an unsplit sequence needs, whose recomputed layer
and whose logits are as long as itself. Without it, attention also holds, for each part, a copy of the keys and values
before it. Gradients of kept keys and values lie in the leaves from the first backward that reaches them to the
backward of their own pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.key_values import Kept, KeyValueStore
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.packed_forward import MuxOutput


class _Precision(Protocol):
    def __call__(self) -> AbstractContextManager[object]: ...


def pass_backward(output: torch.Tensor, gradient: torch.Tensor | None, kept: Sequence[Kept]) -> None:
    """Run one backward from a pass's output and from the keys and values that later parts have read.

    Args:
        output: output of the pass: hidden states `[T, D]`, or losses `[N]`.
        gradient: gradient of the output; ones by default.
        kept: keys and values that the pass has kept for later parts.
    """
    roots: list[tuple[torch.Tensor, torch.Tensor]] = [root for one in kept for root in one.roots()]
    if output.requires_grad:
        roots.append((output, torch.ones_like(output) if gradient is None else gradient))
    if roots:
        # One call for all roots: the losses and the kept keys and values share a graph, which a backward frees.
        tensors, gradients = zip(*roots, strict=True)
        torch.autograd.backward(tensors, gradients)


def run_chain(model: MultiTaskPeftModel, chain: Sequence[MuxBatch], precision: _Precision) -> list[MuxOutput]:
    """Run the passes of a chain forward, and backward in reverse.

    Args:
        model: the model, on its device.
        chain: micro-batches that share sequences, from `peft_mux.data.chains.chains_of`.
        precision: returns the autocast context to compute in.

    Returns:
        What each pass gave, without its graph.
    """
    store = model.stream.key_values
    try:
        return _run(model, chain, precision, store)
    finally:
        store.clear()  # a pass that failed leaves its graph nowhere


def _run(
    model: MultiTaskPeftModel,
    chain: Sequence[MuxBatch],
    precision: _Precision,
    store: KeyValueStore,
) -> list[MuxOutput]:
    flights: list[tuple[MuxOutput, list[Kept]]] = []
    for micro_batch in chain:
        with store.recording() as kept, precision():
            flights.append((model(micro_batch.to(model.device)), kept))
    found = [output.detached() for output, _ in flights]
    while flights:
        # In reverse: later parts must have added to the gradients of kept keys and values before these go on (M section
        # 3.5).
        output, kept = flights.pop()
        pass_backward(output.losses, None, kept)
        store.release(kept)
    return found
