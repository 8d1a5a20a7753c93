"""A plan in words: its table, what a task shares and waits for, and what changes from one plan to another.

Plans are typed `Any` here, because the module of `Plan` imports this one.
"""

from __future__ import annotations

from typing import Any

from peft_mux.scheduler.planner.policies import POLICIES
from peft_mux.scheduler.planner.values import HTask
from peft_mux.scheduler.units import bytes_text, seconds_text, time_band

_MOST_NOTES = 12
"""Notes of a plan that its text has."""
_SOURCES = {"measured": "profile measured on this device", "analytic": "analytic profile, not measured"}


def plan_text(plan: Any) -> str:
    """Return a `Plan` as a table, a row for each task under its hTask, and its predicted times and memory."""
    width = max(map(len, ["task", *(share.name for share in plan.shares), *(one.name for one in plan.waiting)]))
    htasks = f"{len(plan.htasks)} hTask{'' if len(plan.htasks) == 1 else 's'}"
    stages = "" if plan.num_stages == 1 else f", {plan.num_stages} stages, {len(plan.buckets)} buckets"
    lines = [
        f"plan  {len(plan.shares)} tasks on {plan.device}, {htasks}{stages}, chunks of {plan.chunk_size} tokens",
        f"  {'task':<{width}}  hTask  batch  tokens/step   steps  trainable",
    ]
    for number, htask in enumerate(plan.htasks, start=1):
        shares = [share for share in plan.shares if share.name in htask.tasks]
        lines += [
            f"  {share.name:<{width}}  {number:>5}  {share.batch_size:>5}  {share.tokens_per_step:>11,.0f}"
            f"  {share.num_steps:>6,}  {share.adapter_parameters:>9,}"
            for share in shares
        ]
        lines += [
            f"  {share.name:<{width}}  computed / asked tokens {share.computed_share:.0%}: its rows begin alike"
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
    lines += [f"  {one.name:<{width}}  waits: {one.reason}" for one in plan.waiting]
    lines.append("")
    if plan.step_s and plan.tokens_per_s is not None:
        source = _SOURCES.get(plan.profile_source, plan.profile_source)
        # A plan may come from a process that knows other policies.
        policy = POLICIES[plan.policy].words if plan.policy in POLICIES else plan.policy
        lines.append(
            f"time ({source})  {seconds_text(plan.step_s)} a step {time_band(plan.profile_source).words},"
            f" {plan.tokens_per_s:,.0f} tokens/s; {policy}"
        )
        if plan.run_times is not None:
            without = ", without the tasks that wait" if plan.waiting else ""
            lines.append(f"        {plan.run_times}{without}")
    lines += [plan.memory.summary(), *plan.memory_bar.lines()]
    if plan.limit_bytes is not None:
        share = plan.memory.peak_bytes / plan.limit_bytes
        lines.append(f"        {share:.0%} of the {bytes_text(plan.limit_bytes)} that a device may use")
    lines += [f"note  {note}" for note in plan.notes[:_MOST_NOTES]]
    if len(plan.notes) > _MOST_NOTES:
        lines.append(f"note  ... and {len(plan.notes) - _MOST_NOTES} more, in notes")
    return "\n".join(lines)


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

    htask, others = plan.htasks[index], _company(plan, task)
    company = f"shares its passes with {', '.join(others)}" if others else "has its passes to itself"
    sentences = [
        f"{task} {company} (hTask {index + 1} of {len(plan.htasks)}).",
        f"Each step takes {_passes(htask)} of about"
        f" {htask.tokens_per_micro_batch:,.0f} tokens, {share.tokens_per_step:,.0f} of a step's tokens being its own"
        f" ({share.tokens_per_step / max(plan.tokens_per_step, 1):.0%} of all tasks').",
    ]
    bucket = next((bucket for bucket in plan.buckets if index in bucket), ())
    neighbours = [name for other in bucket if other != index for name in plan.htasks[other].tasks]
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
        sentences.append(
            f"Its hTask takes {seconds_text(htask.micro_batches * htask.pass_s)} of the step's"
            f" {seconds_text(plan.step_s)}; {share.num_steps:,} steps take"
            f" {seconds_text(share.num_steps * plan.step_s)} in this company."
        )
    return " ".join([*sentences, f"It trains {share.adapter_parameters:,} parameters of its own."])


def changes_text(before: Any, after: Any) -> str:
    """Return what changes from one `Plan` to another, a line each; empty if nothing does.

    First the tasks that start, wait or leave, or share their passes with other tasks than before, then numbers.
    """
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
        then, now = (", ".join(_company(plan, name)) or "nobody" for plan in (before, after))
        if then != now:
            lines.append(f"~ {name} shares its passes with {now}, before with {then}")
    shown = {"step_s": seconds_text, "policy": str, "max_tokens_per_micro_batch": str, "passes_in_turns": str}
    for name, text in shown.items():
        if getattr(before, name) != getattr(after, name):
            lines.append(f"~ {name}: {text(getattr(before, name))} -> {text(getattr(after, name))}")
    peaks = before.memory.peak_bytes, after.memory.peak_bytes
    if peaks[0] != peaks[1]:
        lines.append(f"~ peak memory: {bytes_text(peaks[0])} -> {bytes_text(peaks[1])}")
    return "\n".join(lines)


def _passes(htask: HTask) -> str:
    return f"{htask.micro_batches} pass{'es' if htask.micro_batches > 1 else ''}"


def _company(plan: Any, task: str) -> tuple[str, ...]:
    """Return the other tasks of a task's hTask, none while it waits."""
    index = plan.htask_of(task)
    return () if index is None else tuple(name for name in plan.htasks[index].tasks if name != task)
