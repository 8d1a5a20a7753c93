"""`SlotTimes`: seconds of the micro-batches of buckets on each stage, for plans, and for plans at other costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from peft_mux.packing.passes import slot_of
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.sums.pass_parts import PassParts
from peft_mux.scheduler.planner.passes import CutHTask, slot_weights
from peft_mux.scheduler.planner.turn_times import TurnTimes
from peft_mux.scheduler.subgraphs.passes import Direction


class SlotSeconds(NamedTuple):
    """Seconds of the C micro-batches of a bucket on each of the S stages.

    Attributes:
        forward_s: seconds of the forwards, `[C, S]`.
        backward_s: seconds of the backwards, `[C, S]`.
    """

    forward_s: NDArray[Any]
    backward_s: NDArray[Any]

    @property
    def fields(self) -> dict[str, Any]:
        """What a `BucketLoad` holds of them: those of the mean micro-batch, and what each takes over it."""
        return {
            "forward_s": tuple(map(float, self.forward_s.mean(axis=0))),
            "backward_s": tuple(map(float, self.backward_s.mean(axis=0))),
            "weights": slot_weights((self.forward_s + self.backward_s).sum(axis=1)),
        }


class SlotTimes:
    """Prices micro-batches, each of which holds passes of the hTasks of a bucket.

    Args:
        cost: predicts the seconds of each stage.
        width: the most passes of a micro-batch that take turns.
        recomputes: whether activations are recomputed in the backward.

    Attributes:
        turns: what passes in turns take.
    """

    def __init__(self, cost: CostModel, width: int, *, recomputes: bool = False) -> None:
        """Know no hTask yet."""
        self.cost, self.width = cost, width
        self.turns = TurnTimes(cost, recomputes=recomputes)
        self._parts: dict[CutHTask, tuple[PassParts, ...]] = {}
        self._fractions: dict[CutHTask, NDArray[Any]] = {}

    def parts_of(self, cut: CutHTask) -> tuple[PassParts, ...]:
        """Return what a mean pass of an hTask computes between its sums on each stage.

        Of mean passes, as few compositions of a micro-batch are then simulated, each once.

        Args:
            cut: the hTask, cut into passes.
        """
        if cut not in self._parts:
            stages = range(self.cost.num_stages)
            self._parts[cut] = tuple(self.cost.pass_parts(cut.loads, cut.num_passes, stage=stage) for stage in stages)
        return self._parts[cut]

    def bucket_s(self, cuts: Sequence[CutHTask], num_slots: int) -> SlotSeconds:
        """Return the seconds of each micro-batch of a bucket on each stage.

        Args:
            cuts: the hTasks of the bucket, in the order of the work.
            num_slots: C, micro-batches of the bucket.
        """
        if not self.turns.is_known:
            slots_s = [cut.slots_s(num_slots) for cut in cuts]
            pairs = zip(cuts, slots_s, strict=True)
            forward_s = np.sum([self._forward_fractions(cut) * own for cut, own in pairs], axis=0)
            return SlotSeconds(forward_s, np.sum(slots_s, axis=0) - forward_s)
        slots: list[list[CutHTask]] = [[] for _ in range(num_slots)]
        for cut in cuts:
            for chain in cut.chains:
                slots[slot_of(chain[0], len(cut.passes), num_slots)] += [cut] * len(chain)
        return SlotSeconds(self._in_turns_s(slots, "forward"), self._in_turns_s(slots, "backward"))

    def _forward_fractions(self, cut: CutHTask) -> NDArray[Any]:
        if cut not in self._fractions:
            self._fractions[cut] = self.cost.forward_fractions(cut.loads, cut.num_passes)
        return self._fractions[cut]

    def _in_turns_s(self, slots: Sequence[Sequence[CutHTask]], direction: Direction) -> NDArray[Any]:
        stages = range(self.cost.num_stages)
        return np.array([[self._action_s(own, stage, direction) for stage in stages] for own in slots])

    def _action_s(self, passes: Sequence[CutHTask], stage: int, direction: Direction) -> float:
        tasks = [[load.name for load in cut.loads] for cut in passes]
        parts = [self.parts_of(cut)[stage] for cut in passes]
        return self.turns.action_s(tasks, parts, self.width, stage, direction)
