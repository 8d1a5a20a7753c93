"""Whether a captured pass computes what the eager one does: what `cuda_graphs="auto"` asks before it uses one.

Two things are held against each other, losses and gradients of each task, all from gradients of zero:

* a pass over the padded memory of a graph against the plain one (`reason_against_padding`). A product of another height
  may be rounded otherwise, so they have to agree within the rounding of their dtype.
* a replay against eager passes over the same memory (`reason_against_replay`). Where these agree with each other bit
  for bit, the replay has to as well. Where they do not (flash attention adds up in an order of its own in each backward
  pass), the replay may be as far from them as twice their greatest distance from each other.

Both wait for the device, and leave gradients as they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.cuda_graphs.capture import CapturedPass

_NUM_REPEATS = 3
_SLACK = 2.0
_ROUNDING = {torch.bfloat16: 1e-1, torch.float16: 2e-2}
_FINE_ROUNDING = 1e-4
"""Greatest relative distance from the plain pass: of a whole gradient, through all layers."""

Pass = Callable[[MuxBatch], torch.Tensor]
"""Adds a micro-batch's gradients to those of its tasks, and returns its losses `[N]`."""


def reason_against_padding(captured: CapturedPass, batch: MuxBatch, plain: Pass, dtype: torch.dtype) -> str | None:
    """Return why a pass over padded memory may not take the place of the plain one, or `None`.

    Args:
        captured: the pass, captured or not.
        batch: a micro-batch of its tasks and shape, on the host.
        plain: the eager pass over the micro-batch as it is.
        dtype: what the backbone computes in.

    Raises:
        CannotCaptureError: if the pass depends on more than its inputs' contents.
    """
    with captured.as_they_were():
        padded = _results(captured, batch, captured.compute)
        as_it_is = _results(captured, batch, plain)
    limit = _ROUNDING.get(dtype, _FINE_ROUNDING)
    for index, (mine, theirs) in enumerate(zip(padded, as_it_is, strict=True)):
        distance = _distance(mine, theirs)
        if not distance <= limit:
            return f"padding changes {_what(index)} by {distance:.1e}, more than the rounding of {dtype}"
    return None


def reason_against_replay(captured: CapturedPass, batch: MuxBatch) -> str | None:
    """Return why a replay may not take the place of an eager pass over the same memory, or `None`.

    Args:
        captured: the pass as it was captured.
        batch: a micro-batch of its tasks and shape, on the host.
    """
    with captured.as_they_were():
        replayed = _results(captured, batch, captured.replay)
        repeats = [_results(captured, batch, captured.compute) for _ in range(_NUM_REPEATS)]
    for index, mine in enumerate(replayed):
        theirs = [repeat[index] for repeat in repeats]
        spread = max(_distance(one, other) for one, other in itertools.combinations(theirs, 2))
        distance = min(_distance(mine, one) for one in theirs)
        if not distance <= _SLACK * spread:
            return (
                f"a replay differs from the eager pass by {distance:.1e} of {_what(index)}, where eager passes differ "
                f"from each other by {spread:.1e}"
            )
    return None


def _what(index: int) -> str:
    return "the losses" if index == 0 else "a gradient"


def _results(captured: CapturedPass, batch: MuxBatch, run: Pass) -> Sequence[torch.Tensor]:
    """Return the losses, and then the gradients, of a pass by itself."""
    gradients = captured.gradients()
    for gradient in gradients:
        gradient.zero_()
    return [run(batch).detach().clone(), *(gradient.clone() for gradient in gradients)]


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the relative distance of two tensors; infinite where only one of them is finite in some place."""
    # A task may be poisoned already: what is not finite has to be so in both, and the rest is compared.
    is_finite = one.isfinite()
    if not torch.equal(is_finite, other.isfinite()):
        return float("inf")
    mine, theirs = (torch.where(is_finite, tensor, 0.0).double() for tensor in (one, other))
    difference, norm = float((mine - theirs).norm()), float(theirs.norm())
    return difference / norm if norm > 0 else difference
