"""A plan as HTML, which notebooks show in place of its text."""

from __future__ import annotations

from html import escape
from typing import Any

from peft_mux.scheduler.pipeline.simulator import Simulation
from peft_mux.scheduler.pipeline.svg import ALARM, Bar, legend, memory_legend, memory_svg, rows_svg, time_end


def plan_html(plan: Any) -> str:
    """Return the summary of a plan, its time line and its memory.

    Args:
        plan: the `Plan`, which itself imports this.
    """
    text = f"<pre style='line-height:1.3;overflow:auto'>{escape(plan.summary())}</pre>"
    if plan.template is None:
        return text
    red = f"<b style='color:{ALARM}'>more than 95 % is taken</b> "
    words = f"memory of the fullest stage, predicted: {red * plan.memory_bar.is_nearly_full}"
    return (
        f"{text}<div>a step, predicted: {legend(bucket_names(plan))} paler: forward</div>{timeline_svg(plan)}"
        f"<div>{words}{memory_legend(plan.memory.parts)}</div>{planned_memory_svg(plan)}"
    )


def bucket_names(plan: Any) -> list[str]:
    """Return the tasks of each bucket, in words; of many the first ones."""
    names = []
    for bucket in plan.buckets:
        tasks = [task for index in bucket for task in plan.htasks[index].tasks]
        names.append(", ".join(tasks[:4]) + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else ""))
    return names


def timeline_svg(plan: Any) -> str:
    """Draw when each pass of a step runs on each stage, as it was predicted."""
    simulation = plan.timeline()
    rows = [(f"stage {stage}", planned_bars(simulation, stage)) for stage in range(simulation.num_stages)]
    return rows_svg(rows, simulation.makespan_s, time_end(simulation.makespan_s))


def planned_bars(simulation: Simulation, stage: int) -> list[Bar]:
    """Return the forwards and backwards of a stage, in seconds from the beginning of the step."""
    return [
        Bar(
            span.start_s,
            span.end_s,
            span.action.bucket,
            f"{simulation.bucket_names[span.action.bucket]}, {'forward' if span.action.kind == 'F' else 'backward'}: "
            f"{time_end(span.end_s - span.start_s)}",
            is_light=span.action.kind == "F",
        )
        for span in simulation.spans
        if span.device == stage
    ]


def planned_parts(plan: Any) -> list[tuple[str, float]]:
    """Return the names and bytes of what the predicted peak of the fullest stage is made of."""
    return [(name, float(size)) for name, size in plan.memory.parts.items()]


def planned_memory_svg(plan: Any) -> str:
    """Draw what the predicted peak of the fullest stage is made of, against what a device may hold."""
    return memory_svg([("planned", planned_parts(plan))], plan.limit_bytes, plan.device_bytes)
