"""Keys and values of long sequences between the passes of their parts (M §3.5: KV reuse across chunks).

A part of a sequence attends to the keys and values of all parts before it. What a layer computed them with belongs to
the graph of an earlier pass, so a later pass reads detached copies, leaves of its own graph. Gradients then gather in
the leaves, and the earlier pass takes them up in its own backward::

    part 0   x0 -> k0, v0 ..................... dk0, dv0 -> dx0     third
                    | detached                    ^ what the leaves have gathered
    part 1   x1 -> k1, v1, reads leaves of 0 .. dk1, dv1 -> dx1     second
                    | detached                    ^
    part 2   x2 -> reads leaves of 0 and 1                          first backward

Keys are kept as attention sees them, after rotary embedding. A leaf shares its memory with what the pass computed.

Shape letters: G key-value heads, L tokens of a part, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from peft_mux.data.parts import SequencePart
from peft_mux.errors import UnsupportedModelError


class Kept(NamedTuple):
    """Keys and values of one part in one layer.

    Attributes:
        layer: name of the attention module.
        part: the tokens of a sequence that they are of.
        computed: keys and values `[G, L, C]` in the graph of their pass.
        leaves: the same values, as later parts read them.
    """

    layer: str
    part: SequencePart
    computed: tuple[torch.Tensor, torch.Tensor]
    leaves: tuple[torch.Tensor, torch.Tensor]

    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what later parts add to the backward of this part's pass: tensors and their gradients."""
        pairs = zip(self.computed, self.leaves, strict=True)
        return [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]


class KeyValueStore:
    """Holds, for each layer of a process, what later parts of unfinished sequences will read.

    From the forward of a part to its backward; without gradients, to the forward of the last part.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._kept: dict[tuple[str, tuple[str, int]], dict[int, Kept]] = {}
        self._recorded: list[Kept] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values that are held."""
        leaves = [leaf for parts in self._kept.values() for kept in parts.values() for leaf in kept.leaves]
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves)

    @contextmanager
    def recording(self) -> Iterator[list[Kept]]:
        """Note what a forward pass keeps, in a list that its backward needs, and `release` after it."""
        before, self._recorded = self._recorded, []
        try:
            yield self._recorded
        finally:
            self._recorded = before

    def keep(self, layer: str, part: SequencePart, keys_GLC: torch.Tensor, values_GLC: torch.Tensor) -> None:
        """Keep what later parts will read.

        A pass whose activations are recomputed has kept its keys and values already; then nothing happens.

        Args:
            layer: name of the attention module.
            part: a part that more of its sequence follows.
            keys_GLC: keys `[G, L, C]` after rotary embedding.
            values_GLC: values `[G, L, C']`.

        Raises:
            UnsupportedModelError: if a layer attends twice in one pass.
            RuntimeError: if gradients are wanted, and nobody records what their backward needs.
        """
        parts = self._kept.setdefault((layer, part.sequence), {})
        # Nobody records while activations are recomputed: what the first forward kept still holds.
        if self._recorded is None and torch.is_grad_enabled():
            if part.start in parts:
                return
            raise RuntimeError(
                f'a part of a sequence of task "{part.task}" ran outside a chain, so that gradients would not reach it;'
                " allowed: chains of parts that peft_mux.engine.chain_pass runs, or passes under torch.no_grad()."
            )
        # Kept once more under the same name, the second attention's keys would take the place of the first's.
        if any(kept.layer == layer and kept.part == part for kept in self._recorded or ()):
            raise UnsupportedModelError(
                f"{layer} attends more than once in a pass, so its keys and values cannot be told apart; allowed: one"
                " attention a layer. Set split_long_sequences=False."
            )
        if part.start == 0:
            parts.clear()  # a step that failed may have left something
        computed = keys_GLC, values_GLC
        leaves = _leaf(keys_GLC), _leaf(values_GLC)
        parts[part.start] = kept = Kept(layer, part, computed if torch.is_grad_enabled() else leaves, leaves)
        if self._recorded is not None:
            self._recorded.append(kept)

    def earlier(
        self, layer: str, part: SequencePart, window: int | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values `[G, L, C]` of the parts before one, in order; within its window, if it has one.

        Args:
            layer: name of the attention module.
            part: the part whose queries read them.
            window: a query sees this many tokens, itself included; `None` for all.
        """
        parts = self._kept.get((layer, part.sequence), {})
        earlier = [parts[start] for start in sorted(parts) if start < part.start]
        # A gap would be a wrong result and no error: attention cannot know that keys are missing.
        assert [0, *(kept.part.end for kept in earlier)] == [*(kept.part.start for kept in earlier), part.start], (
            f"parts before token {part.start} of a sequence of {part.task} are missing in {layer}"
        )
        # The oldest key that the part's first query sees; later queries do not see as far back.
        first = 0 if window is None else max(0, part.start - window + 1)
        return [
            (keys[:, max(0, first - kept.part.start) :], values[:, max(0, first - kept.part.start) :])
            for kept in earlier
            if kept.part.end > first
            for keys, values in (kept.leaves,)
        ]

    def forget(self, layer: str, part: SequencePart) -> None:
        """Free what a layer holds of a sequence; where there is no backward, its last part is the last reader."""
        self._kept.pop((layer, part.sequence), None)

    def release(self, recorded: list[Kept]) -> None:
        """Free what a pass has kept, after its backward; all later parts are done then.

        Args:
            recorded: the list of `recording`; it is emptied.
        """
        for kept in recorded:
            parts = self._kept.get((kept.layer, kept.part.sequence), {})
            # Chains run their backwards in reverse, so parts go from the last to the first.
            parts.pop(kept.part.start, None)
            if not parts:
                self.forget(kept.layer, kept.part)
        recorded.clear()

    def clear(self) -> None:
        """Free everything: a step that failed leaves its chains unfinished."""
        self._kept.clear()


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    # Detached, so that the backward of a later part ends here and does not run through the graph of an earlier pass.
    return tensor.detach().requires_grad_(tensor.requires_grad)
