"""What people see of a `Plan`: its text, its drawings for terminal, page and picture, and its simulated step.

`drawing.py` draws bars, whatever they mean; here they are passes and memory of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from peft_mux.scheduler.drawing import (
    ALARM,
    Bar,
    MemoryBar,
    Rows,
    gantt_text,
    legend,
    memory_bars_text,
    memory_rows,
    rows_svg,
    save_rows,
)
from peft_mux.scheduler.pipeline.simulator import Simulation, simulate, simulate_one_stage
from peft_mux.scheduler.plan import VIEWS, HTask, Plan
from peft_mux.scheduler.planner.policies import POLICIES
from peft_mux.scheduler.units import bytes_text, seconds_text, step_time_text

_MOST_NOTES = 12
"""Notes of a plan that its text has."""
_NUMBERS_WIDTH = 48
"""Characters of a row of the table without the name of its task."""
_SOURCES = {"measured": "profile measured on this device", "analytic": "analytic profile, not measured"}


class MeasuredStep(NamedTuple):
    """The last step under a plan as one process timed it.

    Attributes:
        rank: rank of the process.
        stage: stage of the pipeline that it holds.
        passes: the names of the tasks in each pass (of passes in turns, of all of them), and the seconds of its forward
            and backward, in the order in which they ended.
    """

    rank: int
    stage: int
    passes: tuple[tuple[tuple[str, ...], float], ...]


def timeline(plan: Plan, steps: Sequence[MeasuredStep] = ()) -> Rows:
    """Return the passes of each stage, in seconds from the start of the step.

    Args:
        plan: a plan with running tasks.
        steps: what processes measured of a step under this plan; in rows below their stage.
    """
    simulation, tasks_of = simulated_step(plan), _bucket_tasks(plan)
    names, rows, end = list(map(_listed, tasks_of)), [], simulation.makespan_s
    bucket_of = {task: bucket for bucket, tasks in enumerate(tasks_of) for task in tasks}
    for stage in range(simulation.num_stages):
        bars = []
        for span in [span for span in simulation.spans if span.device == stage]:
            bucket, is_forward = span.action.bucket, span.action.kind == "F"
            words = f"{names[bucket]}, {'forward' if is_forward else 'backward'}"
            words += f": {seconds_text(span.end_s - span.start_s)}"
            label = f"{bucket}.{span.action.micro_batch}"
            bars.append(Bar(span.start_s, span.end_s, bucket, words, is_forward, label))
        rows.append((f"planned stage {stage}" if simulation.num_stages > 1 else "planned", bars))
        for step in [step for step in steps if step.stage == stage and step.passes]:
            bars, at_s = [], 0.0
            for tasks, seconds in step.passes:
                bucket = next((bucket_of[name] for name in tasks if name in bucket_of), 0)
                bars.append(Bar(at_s, at_s + seconds, bucket, f"{_listed(tasks)}: {seconds_text(seconds)}"))
                at_s += seconds
            end = max(end, at_s)
            rows.append((f"measured process {step.rank}" if len(steps) > 1 else "measured", bars))
    unit = (1.0, "s") if end >= 1 else (1e-3, "ms")
    return Rows(rows, end, unit, [(name, bucket) for bucket, name in enumerate(names)])


def _bucket_tasks(plan: Plan) -> list[list[str]]:
    return [[task for index in bucket for task in plan.htasks[index].tasks] for bucket in plan.buckets]


def _listed(tasks: Sequence[str]) -> str:
    return ", ".join(tasks[:4]) + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else "")


def memory_bar(plan: Plan) -> MemoryBar:
    """Return the parts of the fullest stage's peak, compared with the device or, if that is unknown, with the limit."""
    is_device = plan.device_bytes is not None
    return MemoryBar(tuple(plan.memory.parts.items()), plan.device_bytes or plan.limit_bytes, is_device)


def simulated_step(plan: Plan) -> Simulation:
    """Return when each pass of a step begins and ends on each stage, by simulation.

    Raises:
        ValueError: for a plan without tasks.
    """
    if plan.template is None:
        raise ValueError("the plan must have at least one running task to have a timeline, got none.")
    if plan.num_stages == 1:
        return simulate_one_stage(plan.bucket_loads)
    return simulate(plan.template, plan.bucket_loads, links=plan.links)


def summary(plan: Plan, columns: int | None = None) -> str:
    """Return the plan as a table, a row for each task under its hTask, of `columns` characters if they are given."""
    width = max(map(len, ["task", *(share.name for share in plan.shares), *(later.name for later in plan.waiting)]))
    width = width if columns is None else min(width, max(columns - _NUMBERS_WIDTH, 4))
    htasks = f"{len(plan.htasks)} hTask{'' if len(plan.htasks) == 1 else 's'}"
    stages = "" if plan.num_stages == 1 else f", {plan.num_stages} stages, {len(plan.buckets)} buckets"
    lines = [
        f"plan  {len(plan.shares)} tasks on {plan.device}, {htasks}{stages}, chunks of {plan.chunk_size} tokens",
        f"  {'task':<{width}}  hTask  batch  tokens/step   steps  trainable",
    ]
    for number, htask in enumerate(plan.htasks, start=1):
        shares = [share for share in plan.shares if share.name in htask.tasks]
        lines += [
            f"  {_cell(share.name, width)}  {number:>5}  {share.batch_size:>5}  {share.tokens_per_step:>11,.0f}"
            f"  {share.num_steps:>6,}  {share.adapter_parameters:>9,}"
            for share in shares
        ]
        lines += [
            f"  {share.name:<{width}}  prefix sharing: computes {share.computed_share:.0%} of its tokens"
            for share in shares
            if share.computed_share < 1
        ]
        size = f" of about {htask.tokens_per_micro_batch:,.0f} tokens" if htask.tokens_per_micro_batch else ""
        bound = f" (at most {plan.max_tokens_per_micro_batch:,})"
        time = f", {seconds_text(htask.pass_s)} each" if htask.pass_s else ""
        lines.append(f"  hTask {number}: {_passes(htask)} a step{size}{bound}{time}")
    if plan.turns is not None:
        groups = "; ".join(", ".join(str(index + 1) for index in bucket) for bucket in plan.buckets)
        saved = f", which saves {seconds_text(plan.turns.saved_s)} a step" if plan.turns.saved_s else ""
        lines.append(f"  up to {plan.turns.width} passes of a bucket take turns{saved}; hTasks by bucket: {groups}")
    lines += [f"  {_cell(later.name, width)}  waits: {later.reason}" for later in plan.waiting]
    lines.append("")
    if plan.step_s and plan.tokens_per_s is not None:
        source = _SOURCES.get(plan.profile_source, plan.profile_source)
        # A plan may come from a process that knows other policies.
        policy = POLICIES[plan.policy].words if plan.policy in POLICIES else plan.policy
        is_measured = plan.profile_source == "measured"
        rate = plan.tokens_per_s if is_measured else float(f"{plan.tokens_per_s:.1g}")
        step = step_time_text(plan.step_s, plan.profile_source)
        lines.append(f"time ({source})  {step}, {rate:,.0f} tokens/s; {policy}")
        # Without a measured profile, what is gained is less than what the times may be off.
        if plan.run_times is not None and is_measured:
            without = ", without the tasks that wait" if plan.waiting else ""
            lines.append(f"        {plan.run_times}{without}")
    lines += [plan.memory.summary(), *memory_bar(plan).lines()]
    if plan.limit_bytes is not None:
        share = plan.memory.peak_bytes / plan.limit_bytes
        lines.append(f"        {share:.0%} of the {bytes_text(plan.limit_bytes)} that a device may use")
    lines += [f"note  {note}" for note in plan.notes[:_MOST_NOTES]]
    if len(plan.notes) > _MOST_NOTES:
        lines.append(f"note  ... and {len(plan.notes) - _MOST_NOTES} more, in notes")
    return "\n".join(lines)


def explain(plan: Plan, task: str) -> str:
    """Return in sentences what one task shares, waits for and needs; raises `ValueError` for an unknown task."""
    waiting = {later.name: later.reason for later in plan.waiting}
    if task in waiting:
        return f"{task} waits: {waiting[task]}"
    index = plan.htask_of(task)
    share = next((share for share in plan.shares if share.name == task), None)
    if index is None or share is None:
        known = ", ".join([share.name for share in plan.shares] + list(waiting))
        raise ValueError(f"task must be {known}, got {task!r}.")

    htask, others = plan.htasks[index], plan.company_of(task)
    company = f"shares its passes with {', '.join(others)}" if others else "has its passes to itself"
    sentences = [
        f"{task} {company} (hTask {index + 1} of {len(plan.htasks)}).",
        f"Each step takes {_passes(htask)} of about {htask.tokens_per_micro_batch:,.0f} tokens,"
        f" {share.tokens_per_step:,.0f} of a step's tokens being its own"
        f" ({share.tokens_per_step / max(plan.tokens_per_step, 1):.0%} of all tasks').",
    ]
    bucket = next((bucket for bucket in plan.buckets if index in bucket), ())
    neighbours = [name for other in bucket if other != index for name in plan.htasks[other].tasks]
    if plan.turns is not None and neighbours:
        sentences.append(
            f"Its passes take turns with those of {', '.join(neighbours)}, up to {plan.turns.width} at a time: one"
            " computes while the sums of the others are in progress."
        )
    if share.computed_share < 1:
        sentences.append(
            f"Its rows share prefixes: {share.computed_share:.0%} of their tokens are computed where they share one"
            " pass."
        )
    if plan.step_s:
        sentences.append(
            f"Its hTask takes {seconds_text(htask.micro_batches * htask.pass_s)} of the step's"
            f" {seconds_text(plan.step_s)}; {share.num_steps:,} steps take"
            f" {seconds_text(share.num_steps * plan.step_s)} in this company."
        )
    return " ".join([*sentences, f"It trains {share.adapter_parameters:,} parameters of its own."])


def diff(plan: Plan, other: Plan) -> str:
    """Return what changes from a plan to the one that replaces it, a line each: tasks first, then numbers."""
    old = {share.name for share in plan.shares}
    new = {share.name for share in other.shares}
    waits = {later.name: later.reason for later in other.waiting}
    lines = [f"+ {share.name} starts" for share in other.shares if share.name not in old]
    lines += [
        f"- {share.name} {f'waits: {waits[share.name]}' if share.name in waits else 'leaves'}"
        for share in plan.shares
        if share.name not in new
    ]
    for name in (share.name for share in other.shares if share.name in old):
        then, now = (", ".join(shown.company_of(name)) or "no other task" for shown in (plan, other))
        if then != now:
            lines.append(f"~ {name} shares its passes with {now}, before with {then}")
    shown = {"step_s": seconds_text, "policy": str, "max_tokens_per_micro_batch": str, "passes_in_turns": str}
    for name, text in shown.items():
        if getattr(plan, name) != getattr(other, name):
            lines.append(f"~ {name}: {text(getattr(plan, name))} -> {text(getattr(other, name))}")
    peaks = plan.memory.peak_bytes, other.memory.peak_bytes
    if peaks[0] != peaks[1]:
        lines.append(f"~ peak memory: {bytes_text(peaks[0])} -> {bytes_text(peaks[1])}")
    return "\n".join(lines)


def gantt(plan: Plan, width: int = 100) -> str:
    """Return a drawing of a step for the terminal, in rows of `width` characters."""
    return gantt_text(simulated_step(plan), width)


def save_gantt(plan: Plan, path: str | Path) -> Path:
    """Draw a step, and its memory below, into a .png or .svg file."""
    memory = memory_rows({"planned": plan.memory.parts}, plan.limit_bytes, plan.device_bytes)
    title = f"memory of the fullest stage: {memory_bar(plan).words or bytes_text(plan.memory.peak_bytes)}"
    passes = "pipeline (light: forward, dark: backward)"
    return save_rows(Path(path), {passes: timeline(plan), title: memory})


def memory_bars(plan: Plan) -> str:
    """Return a bar for the peak of each stage, relative to the limit or, without one, to the fullest stage."""
    peaks = plan.peak_bytes or (plan.memory.peak_bytes,)
    return memory_bars_text(peaks, plan.limit_bytes or max(peaks))


def timeline_html(plan: Plan | None, steps: Sequence[MeasuredStep] = ()) -> str:
    """Draw the planned step of a `Plan` above what processes measured of one; return "" for a plan without tasks."""
    if plan is None or plan.template is None:
        return ""
    rows = timeline(plan, steps)
    names = [(", ".join(tasks), bucket) for bucket, tasks in enumerate(_bucket_tasks(plan))]
    measured = (
        " Measured is the last step that followed this plan: forward and backward of each pass together, one after "
        "another, without the time between them."
    )
    return (
        f'<div class="wide">{rows_svg(rows)}</div><div>{legend(names)}</div>'
        "<p class=note>Planned is a typical step, forwards paler than backwards, by the profile "
        f"({plan.profile_source or 'none'}).{measured if steps else ''}</p>"
    )


def memory_html(plan: Plan, measured: Mapping[str, Mapping[str, float]] | None = None, note: str = "") -> str:
    """Draw the memory of a `Plan` above rows of measured memory (as in `memory_rows`), and a note on these."""
    rows = memory_rows({"planned": plan.memory.parts, **(measured or {})}, plan.limit_bytes, plan.device_bytes)
    red = f" <b style='color:{ALARM}'>more than 95 % is taken</b>" if memory_bar(plan).is_nearly_full else ""
    return (
        f'<div class="wide">{rows_svg(rows)}</div><div>{legend(rows.legend)}{red}</div>'
        f"<p class=note>Planned is the memory of the fullest stage at its peak, an analytic estimate. {note}</p>"
    )


def html(plan: Plan) -> str:
    """Return what a notebook shows: the summary, the time line of a step, and its memory."""
    drawn = "" if plan.template is None else timeline_html(plan) + memory_html(plan)
    return f"<pre style='line-height:1.3;overflow:auto'>{escape(summary(plan))}</pre>{drawn}"


def _cell(name: str, width: int) -> str:
    """Return a name as the first cell of a row; a name that is too long gets a line of its own above the row."""
    return name.ljust(width) if len(name) <= width else f"{name}\n  {'':<{width}}"


def _passes(htask: HTask) -> str:
    return f"{htask.micro_batches} pass{'es' if htask.micro_batches > 1 else ''}"


VIEWS.update(summary=summary, explain=explain, diff=diff, gantt=gantt, save_gantt=save_gantt, html=html)
