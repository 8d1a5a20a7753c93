"""`PlannedTurns`: what passes in turns follow of a plan: how many, of which buckets, and what their subgraphs take."""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.data.batch import MuxBatch
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.subgraphs.groups import GroupedPass
from peft_mux.scheduler.subgraphs.passes import Latency, Stretch, latency_of, pass_times

Chain = Sequence[MuxBatch]
"""Micro-batches that run as one: most often a single one, else those of long sequences (`peft_mux.data.chains`)."""


class PlannedTurns:
    """The turns of one plan.

    Args:
        plan: the plan that is followed; `None` where there is none yet, and passes are of one bucket.
        width: the most passes in turns where there is no plan.

    Attributes:
        width: the most passes of a group.

    Raises:
        ValueError: for a width below one.
    """

    def __init__(self, plan: Plan | None = None, width: int = 1) -> None:
        """Read the plan."""
        self.width = width if plan is None else plan.passes_in_turns
        if self.width < 1:
            raise ValueError(f"width is {self.width}; allowed: 1 or more passes in turns, 1 for one after another.")
        self._parts = () if plan is None or plan.turns is None else plan.turns.parts
        htasks, buckets = ((), ()) if plan is None else (plan.htasks, plan.buckets)
        self._htask_of = {name: index for index, htask in enumerate(htasks) for name in htask.tasks}
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}

    def grouped(self, chain: Chain) -> GroupedPass:
        """Return a chain as grouping looks at it.

        Args:
            chain: the micro-batches that run as one, which are of one hTask.
        """
        names = tuple(dict.fromkeys(name for micro_batch in chain for name in micro_batch.task_names))
        index = self._htask(chain)
        return GroupedPass(0 if index is None else self._bucket_of.get(index, 0), names)

    def latency(self, chain: Chain, stretch: Stretch | None) -> Latency:
        """Return the predicted latencies of the subgraphs of a chain: the plan's, for as many tokens as there are.

        Where no plan tells them they are in proportion to tokens, which is enough to order subgraphs of one depth that
        are of one layer. The micro-batches of a chain count as the largest of them, and a head counts as one of words
        that no task adapts: others make more sums, or fewer. Turns then have another order than the one that would be
        predicted with all that is known, and one as good as any that all tensor parallel ranks keep to.

        Args:
            chain: the micro-batches that run as one.
            stretch: the part of the model that they go through; `None` where that is not known.
        """
        largest = max(chain, key=lambda micro_batch: micro_batch.num_computed)
        index = self._htask(chain)
        if index is None or index >= len(self._parts) or stretch is None:
            num_tokens = float(largest.num_computed)
            return lambda depth: num_tokens
        parts = self._parts[index].of_size(largest.num_computed, largest.target_offsets[-1])
        return latency_of(pass_times(parts, stretch))

    def _htask(self, chain: Chain) -> int | None:
        return self._htask_of.get(chain[0].task_names[0]) if chain[0].task_names else None
