"""A step as it was planned and as it was measured, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from peft_mux.scheduler.pipeline.svg import Bar, legend, rows_svg, time_end
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.plan_html import bucket_names, planned_bars


class MeasuredPass(NamedTuple):
    """A pass as one process timed it.

    Attributes:
        tasks: names of the tasks in it; of passes in turns, of all of them.
        seconds: seconds of its forward and backward on that process.
    """

    tasks: tuple[str, ...]
    seconds: float


class MeasuredStep(NamedTuple):
    """The last step under a plan as one process timed it.

    Attributes:
        rank: rank of the process.
        stage: stage of the pipeline that it holds.
        replica: replica that it is part of.
        passes: its passes, in the order in which they ended.
    """

    rank: int
    stage: int
    replica: int
    passes: tuple[MeasuredPass, ...]


def timeline_html(plan: Plan | None, steps: Sequence[MeasuredStep]) -> str:
    """Draw the planned step and those that processes have measured; "" for a plan without tasks.

    Args:
        plan: the plan that was followed.
        steps: its last step, as each process timed it.
    """
    if plan is None or plan.template is None:
        return ""
    simulation = plan.timeline()
    rows, end = [], simulation.makespan_s
    for stage in range(simulation.num_stages):
        name = f" stage {stage}" if simulation.num_stages > 1 else ""
        rows.append((f"planned{name}", planned_bars(simulation, stage)))
        for step in steps:
            if step.stage == stage and step.passes:
                bars = _measured(plan, step)
                end = max(end, bars[-1].end)
                who = f" process {step.rank}" if len(steps) > 1 else ""
                rows.append((f"measured{who}", bars))
    return (
        f'<div class="wide">{rows_svg(rows, end, time_end(end))}</div>'
        f"<div>{legend(bucket_names(plan))}</div>"
        "<p class=note>Planned is a typical step, forwards paler than backwards, by the profile "
        f"({plan.profile_source or 'none'}). Measured is the last step that followed this plan: forward and backward "
        "of each pass together, one behind the other, without what lay between them.</p>"
    )


def _measured(plan: Plan, step: MeasuredStep) -> list[Bar]:
    bars, at = [], 0.0
    for one in step.passes:
        bucket = next((found for name in one.tasks if (found := plan.bucket_of(name)) is not None), 0)
        names = ", ".join(one.tasks[:4]) + (f" and {len(one.tasks) - 4} more" if len(one.tasks) > 4 else "")
        bars.append(Bar(at, at + one.seconds, bucket, f"{names}: {time_end(one.seconds)}"))
        at += one.seconds
    return bars
