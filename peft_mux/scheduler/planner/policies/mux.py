"""`Mux`: tasks fused by predicted latency, and grouped into buckets by simulation (M §3.3, §3.4)."""

from __future__ import annotations

import numpy as np

from peft_mux.scheduler.pipeline.template import Schedule
from peft_mux.scheduler.planner.fusion import fuse
from peft_mux.scheduler.planner.policies.policy import Partition, apart, together


class Mux:
    """M's planner.

    M plans by one fusion (Eq. 6), which charges an hTask by its share of the steady phase. With few micro-batches, or
    few tasks, keeping all tasks apart or putting all together can be faster than what that finds
    (`benchmarks/planner/choices.py`); both are tried as well, and the simulation decides.
    """

    name = "mux"
    words = "tasks fused and interleaved by predicted cost"
    runs_alone = False
    search_schedule: Schedule | None = "mux"

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> list[Partition]:
        """Return what Eq. 6 fuses and, on several stages, all tasks apart and all together."""
        # On one stage latencies add up and Eq. 6 counts each of them whole: its answer is the best of all partitions.
        others = [] if num_stages == 1 else [apart(len(latency_s)), together(len(latency_s))]
        try:
            fused = fuse(latency_s, num_stages, num_micro_batches=num_micro_batches)
        except ValueError:
            # A task that fills a micro-batch by itself may round to just above its bound, which Eq. 6 refuses.
            if not others:
                raise
            return others
        return [Partition(fused.intervals, is_grouped=True), *others]
