"""Windows: several steps of a template between which the pipeline is not drained.

A window holds in flight, on each stage, at most what one step of the template holds, so that what fits into memory step
by step fits in windows too.
"""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.scheduler.costs.link import Link
from peft_mux.scheduler.pipeline.checks import peak_activation_bytes
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.pipeline.template import PipelineTemplate, build_template

MOST_STEPS = 8
"""Steps of the longest window: the flush at its end costs an eighth of what it would at each step."""
MOST_ACTIONS = 40_000
"""Actions of a window beyond which it is not built: where steps are so long, draining between them costs little."""


def build_window(
    template: PipelineTemplate,
    buckets: Sequence[BucketLoad],
    num_steps: int,
    *,
    links: Link | Sequence[Link] | None = None,
) -> PipelineTemplate:
    """Return several steps of a template, by its own schedule, in the memory that one step takes.

    Args:
        template: a template of one step.
        buckets: the loads of its buckets, in the order in which it was built.
        num_steps: steps between which the pipeline is not drained.
        links: the links that the template was built for.

    Raises:
        ValueError: if the template is of other buckets, or `num_steps` is less than 1.
    """
    return build_template(
        buckets,
        template.schedule,  # type: ignore[arg-type]
        num_chunks=template.num_chunks,
        memory_limit_bytes=peak_activation_bytes(template, buckets),
        links=links,
        num_steps=num_steps,
    )


def window_step_s(
    template: PipelineTemplate, buckets: Sequence[BucketLoad], *, links: Link | Sequence[Link] | None = None
) -> float:
    """Return seconds of a step in windows of `MOST_STEPS` steps, or of one by itself where that is as fast.

    Args:
        template: a template of one step.
        buckets: the loads of its buckets, in the order in which it was built.
        links: the links that the template was built for.
    """
    flushed_s = simulate(template, buckets, links=links).makespan_s
    if not can_overlap(template, len(buckets)):
        return flushed_s
    window = build_window(template, buckets, MOST_STEPS, links=links)
    return min(flushed_s, simulate(window, buckets, links=links).step_s)


def can_overlap(template: PipelineTemplate, num_buckets: int) -> bool:
    """Return whether steps of a template could overlap: there are several stages, and buckets to fill them with.

    Args:
        template: a template of one step.
        num_buckets: number of its buckets.
    """
    num_actions = MOST_STEPS * sum(map(len, template.actions))
    return template.num_stages > 1 and num_buckets > 1 and num_actions <= MOST_ACTIONS
