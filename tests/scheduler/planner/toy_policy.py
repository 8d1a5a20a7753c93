"""A planner policy in one file of its own, as a newcomer would write it."""

from __future__ import annotations

import numpy as np

from peft_mux.scheduler.planner.policies import Partition, Policy


class Pairs(Policy):
    """Neighbours in the order of token counts, two by two."""

    name = "pairs"
    words = "tasks fused two by two"

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> list[Partition]:
        starts = range(0, len(latency_s), 2)
        return [Partition(tuple((start, min(start + 2, len(latency_s))) for start in starts))]
