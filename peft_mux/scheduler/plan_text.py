"""A plan in words: its table, what a task shares and waits for, and what changes from one plan to another.

Plans are typed `Any` here, as `Plan` itself imports this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft_mux.scheduler.planner.policies import POLICIES
from peft_mux.scheduler.planner.values import HTask, TaskShare
from peft_mux.scheduler.units import bytes_text, seconds_text, time_band

_MOST_NOTES = 12
"""Notes of a plan that its text has."""


def plan_text(plan: Any) -> str:
    """Return a `Plan` as a table, a row for each task under its hTask."""
    return "\n".join(
        [*_header(plan), *_rows(plan), "", *_times(plan), *_memory(plan)]
        + [f"note  {note}" for note in plan.notes[:_MOST_NOTES]]
        + [f"note  ... and {len(plan.notes) - _MOST_NOTES} more, in notes"] * (len(plan.notes) > _MOST_NOTES)
    )


def task_text(plan: Any, task: str) -> str:
    """Return in sentences what one task of a `Plan` shares, waits for and needs.

    Args:
        plan: the plan.
        task: name of a task that runs or waits.

    Raises:
        ValueError: for a task that the plan does not know.
    """
    waiting = {one.name: one.reason for one in plan.waiting}
    if task in waiting:
        return f"{task} waits: {waiting[task]}"
    index = plan.htask_of(task)
    share = next((share for share in plan.shares if share.name == task), None)
    if index is None or share is None:
        known = ", ".join([share.name for share in plan.shares] + list(waiting))
        raise ValueError(f"task is {task!r}; allowed: {known}.")
    return " ".join(_explanation(plan, share, index))


def changes_text(before: Any, after: Any) -> str:
    """Return what changes from one `Plan` to another, a line each; empty where nothing does."""
    return "\n".join([*_changes_of_tasks(before, after), *_changes_of_numbers(before, after)])


def _header(plan: Any) -> list[str]:
    htasks = f"{len(plan.htasks)} hTask{'' if len(plan.htasks) == 1 else 's'}"
    stages = "" if plan.num_stages == 1 else f", {plan.num_stages} stages, {len(plan.buckets)} buckets"
    return [
        f"plan  {len(plan.shares)} tasks on {plan.device}, {htasks}{stages}, chunks of {plan.chunk_size} tokens",
        f"  {'task':<{_name_width(plan)}}  hTask  batch  tokens/step   steps  trainable",
    ]


def _rows(plan: Any) -> list[str]:
    """Return a row for each task, after those of an hTask its passes, and at the end the tasks that wait."""
    width = _name_width(plan)
    lines = []
    for number, htask in enumerate(plan.htasks, start=1):
        lines += [
            f"  {share.name:<{width}}  {number:>5}  {share.batch_size:>5}  {share.tokens_per_step:>11,.0f}"
            f"  {share.num_steps:>6,}  {share.adapter_parameters:>9,}"
            for share in plan.shares
            if share.name in htask.tasks
        ]
        lines += [
            f"  {share.name:<{width}}  computed / asked tokens {share.computed_share:.0%}: its rows begin alike"
            for share in plan.shares
            if share.name in htask.tasks and share.computed_share < 1
        ]
        size = f" of about {htask.tokens_per_micro_batch:,.0f} tokens" if htask.tokens_per_micro_batch else ""
        bound = f" (at most {plan.max_tokens_per_micro_batch:,})"
        time = f", {seconds_text(htask.pass_s)} each" if htask.pass_s else ""
        lines.append(f"  hTask {number}: {_passes(htask)} a step{size}{bound}{time}")
    return lines + _turns(plan) + [f"  {one.name:<{width}}  waits: {one.reason}" for one in plan.waiting]


def _turns(plan: Any) -> list[str]:
    """Return a line that tells which hTasks take turns; none where passes run one after another."""
    if plan.turns is None:
        return []
    groups = "; ".join(", ".join(str(index + 1) for index in bucket) for bucket in plan.buckets)
    saved = f", which saves {seconds_text(plan.turns.saved_s)} a step" if plan.turns.saved_s else ""
    return [f"  up to {plan.turns.width} passes of a bucket take turns{saved}; hTasks by bucket: {groups}"]


def _name_width(plan: Any) -> int:
    return max(map(len, ["task", *(share.name for share in plan.shares), *(one.name for one in plan.waiting)]))


def _passes(htask: HTask) -> str:
    return f"{htask.micro_batches} pass{'es' if htask.micro_batches > 1 else ''}"


def _times(plan: Any) -> list[str]:
    if not plan.step_s or plan.tokens_per_s is None:
        return []
    source = {"measured": "profile measured on this device", "analytic": "analytic profile, not measured"}
    words = source.get(plan.profile_source, plan.profile_source)
    # A plan may come from a process that knows other policies.
    policy = POLICIES[plan.policy].words if plan.policy in POLICIES else plan.policy
    without = ", without the tasks that wait" if plan.waiting else ""
    return [
        f"time ({words})  {seconds_text(plan.step_s)} a step {time_band(plan.profile_source).words},"
        f" {plan.tokens_per_s:,.0f} tokens/s; {policy}",
        *([] if plan.run_times is None else [f"        {plan.run_times}{without}"]),
    ]


def _memory(plan: Any) -> list[str]:
    """Return the parts of the peak, their bar, and how much of what may be filled they take."""
    lines = [plan.memory.summary(), *plan.memory_bar.lines()]
    if plan.limit_bytes is not None:
        share = plan.memory.peak_bytes / plan.limit_bytes
        lines.append(f"        {share:.0%} of the {bytes_text(plan.limit_bytes)} that a device may use")
    return lines


def _explanation(plan: Any, share: TaskShare, index: int) -> list[str]:
    """Return sentences about a task of the hTask `index`: its company, its passes, its time and its parameters."""
    htask, others = plan.htasks[index], _company(plan, share.name)
    company = f"shares its passes with {', '.join(others)}" if others else "has its passes to itself"
    sentences = [
        f"{share.name} {company} (hTask {index + 1} of {len(plan.htasks)}).",
        f"Each step takes {_passes(htask)} of about"
        f" {htask.tokens_per_micro_batch:,.0f} tokens, {share.tokens_per_step:,.0f} of a step's tokens being its own"
        f" ({share.tokens_per_step / max(plan.tokens_per_step, 1):.0%} of all tasks').",
    ]
    neighbours = _turn_neighbours(plan, index)
    if plan.turns is not None and neighbours:
        sentences.append(
            f"Its passes take turns with those of {', '.join(neighbours)}, up to {plan.turns.width} at a time: one"
            " computes while the sums of the others are under way."
        )
    if share.computed_share < 1:
        sentences.append(
            f"Its rows begin alike: of their tokens {share.computed_share:.0%} are computed where they share one pass."
        )
    if plan.step_s:
        htask_s = htask.micro_batches * htask.pass_s
        sentences.append(
            f"Its hTask takes {seconds_text(htask_s)} of the step's {seconds_text(plan.step_s)};"
            f" {share.num_steps:,} steps take {seconds_text(share.num_steps * plan.step_s)} in this company."
        )
    return [*sentences, f"It trains {share.adapter_parameters:,} parameters of its own."]


def _turn_neighbours(plan: Any, index: int) -> list[str]:
    """Return the tasks of the other hTasks of an hTask's bucket."""
    bucket = next((bucket for bucket in plan.buckets if index in bucket), ())
    return [task for other in bucket if other != index for task in plan.htasks[other].tasks]


def _changes_of_tasks(before: Any, after: Any) -> list[str]:
    """Return a line for each task that starts, waits or leaves, or shares its passes with others than before."""
    old = {share.name for share in before.shares}
    new = {share.name for share in after.shares}
    waits = {one.name: one.reason for one in after.waiting}
    lines = [f"+ {share.name} starts" for share in after.shares if share.name not in old]
    lines += [
        f"- {share.name} {f'waits: {waits[share.name]}' if share.name in waits else 'leaves'}"
        for share in before.shares
        if share.name not in new
    ]
    for name in (share.name for share in after.shares if share.name in old):
        then, now = _company(before, name), _company(after, name)
        if then != now:
            lines.append(f"~ {name} shares its passes with {_listed(now)}, before with {_listed(then)}")
    return lines


def _changes_of_numbers(before: Any, after: Any) -> list[str]:
    lines = []
    shown = {"step_s": seconds_text, "policy": str, "max_tokens_per_micro_batch": str, "passes_in_turns": str}
    for name, text in shown.items():
        then, now = getattr(before, name), getattr(after, name)
        if then != now:
            lines.append(f"~ {name}: {text(then)} -> {text(now)}")
    peaks = before.memory.peak_bytes, after.memory.peak_bytes
    if peaks[0] != peaks[1]:
        lines.append(f"~ peak memory: {bytes_text(peaks[0])} -> {bytes_text(peaks[1])}")
    return lines


def _company(plan: Any, task: str) -> tuple[str, ...]:
    """Return the other tasks of a task's hTask, none while it waits."""
    index = plan.htask_of(task)
    return () if index is None else tuple(name for name in plan.htasks[index].tasks if name != task)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nobody"
