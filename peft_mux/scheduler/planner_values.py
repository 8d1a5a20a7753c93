"""What the planner is given and what it returns, apart from loads and models."""

from __future__ import annotations

from dataclasses import dataclass

from peft_mux.scheduler.link import Link
from peft_mux.scheduler.memory import MemoryEstimate
from peft_mux.scheduler.pipeline_load import BucketLoad
from peft_mux.scheduler.pipeline_template import PipelineTemplate, Schedule
from peft_mux.scheduler.plan import HTask, Waiting

MICRO_BATCHES_PER_STAGE = 4
"""C over S, where nothing else is asked for (M Appendix A)."""
MOST_DOUBLINGS = 5
"""Numbers of micro-batches that are tried, each twice the one before, until one fits into memory."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan may use.

    Attributes:
        max_tokens: of one pass.
        limit_bytes: of a device; `None` for no limit.
        num_micro_batches: C on several stages; by default four for each stage, as is common (M Appendix A), and more
            where that does not fit into memory.
        schedule: of the pipeline. Policy "mux" chooses its buckets by its own template in any case; another schedule is
            then built over these buckets.
        num_chunks: virtual stages of a device.
        links: between stages.
    """

    max_tokens: int
    limit_bytes: int | None = None
    num_micro_batches: int | None = None
    schedule: Schedule = "mux"
    num_chunks: int = 1
    links: Link | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the planner decided, without the particulars of a run that `Plan` adds.

    Attributes:
        htasks: in the order in which they run.
        buckets: hTasks, by index.
        template: of all stages.
        bucket_loads: that it was timed with.
        step_s: predicted.
        peak_bytes: of each stage.
        waiting: tasks left out, with reasons.
        max_tokens: that a pass may hold, as asked for or as fits into memory; more only where one sequence is longer.
        memory: of the fullest stage, by part; `None` where nothing runs.
    """

    htasks: tuple[HTask, ...]
    buckets: tuple[tuple[int, ...], ...]
    template: PipelineTemplate | None
    bucket_loads: tuple[BucketLoad, ...]
    step_s: float
    peak_bytes: tuple[int, ...]
    waiting: tuple[Waiting, ...]
    max_tokens: int
    memory: MemoryEstimate | None
