"""Computed against asked tokens: what tasks spare whose rows begin alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from peft_mux.data.batch import MuxBatch


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of the passes of a run, by task.

    Attributes:
        asked: tokens of the rows of each task.
        computed: those of them that went through the backbone; the others stood in a row that was computed already.
    """

    asked: Mapping[str, int] = field(default_factory=dict)
    computed: Mapping[str, int] = field(default_factory=dict)

    @property
    def sharing(self) -> dict[str, tuple[int, int]]:
        """Computed and asked tokens of each task that shared some."""
        return {name: (self.computed[name], asked) for name, asked in self.asked.items() if self.computed[name] < asked}

    def after(self, micro_batches: Iterable[MuxBatch]) -> TokenCounts:
        """Return the counts after more passes.

        Args:
            micro_batches: what one process of a replica ran.
        """
        asked, computed = dict(self.asked), dict(self.computed)
        for batch in micro_batches:
            for counts, offsets in ((asked, batch.task_offsets), (computed, batch.computed_offsets)):
                for name, (start, end) in zip(batch.task_names, pairwise(offsets), strict=True):
                    counts[name] = counts.get(name, 0) + end - start
        return TokenCounts(asked, computed)

    def __str__(self) -> str:
        """Return one line; "" where nothing was shared."""
        told = [f"{name} {own:,} of {asked:,} ({own / asked:.0%})" for name, (own, asked) in self.sharing.items()]
        return (
            f"computed / asked tokens  {', '.join(told)}; what rows begin with alike is computed once" if told else ""
        )


def summed_counts(counts: Iterable[TokenCounts]) -> TokenCounts:
    """Return the counts of all replicas together.

    Args:
        counts: those of one process of each replica.
    """
    asked: dict[str, int] = {}
    computed: dict[str, int] = {}
    for one in counts:
        for total, own in ((asked, one.asked), (computed, one.computed)):
            for name, tokens in own.items():
                total[name] = total.get(name, 0) + tokens
    return TokenCounts(asked, computed)
