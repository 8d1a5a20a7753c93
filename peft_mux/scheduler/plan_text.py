"""A plan in words: the table that `print(plan)` shows, one task explained, and what changes between two plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peft_mux.scheduler.units import bytes_text

if TYPE_CHECKING:
    from peft_mux.scheduler.plan import Plan, TaskShare

_POLICY_WORDS = {
    "mux": "tasks fused and interleaved by predicted cost",
    "together": "all tasks in one batch",
    "interleaved": "every task by itself, one after another in each step",
    "sequential": "one task at a time",
}


def summary(plan: Plan) -> str:
    """Return the table.

    Args:
        plan: to be shown.
    """
    width = max([len("task"), *(len(share.name) for share in plan.shares), *(len(one.name) for one in plan.waiting)])
    htasks = f"{len(plan.htasks)} hTask{'' if len(plan.htasks) == 1 else 's'}"
    stages = "" if plan.num_stages == 1 else f", {plan.num_stages} stages, {len(plan.buckets)} buckets"
    lines = [
        f"plan  {len(plan.shares)} tasks on {plan.device}, {htasks}{stages}, chunks of {plan.chunk_size} tokens",
        f"  {'task':<{width}}  hTask  batch  tokens/step   steps  trainable",
    ]
    for number, htask in enumerate(plan.htasks, start=1):
        for share in plan.shares:
            if share.name in htask.tasks:
                lines.append(f"  {share.name:<{width}}  {number:>5}  {_columns(share)}")
        passes = f"{htask.micro_batches} pass{'es' if htask.micro_batches > 1 else ''} a step"
        size = f" of about {htask.tokens_per_micro_batch:,.0f} tokens" if htask.tokens_per_micro_batch else ""
        bound = f" (at most {plan.max_tokens_per_micro_batch:,})"
        time = f", {_time(htask.pass_s)} each" if htask.pass_s else ""
        lines.append(f"  hTask {number}: {passes}{size}{bound}{time}")
    lines += [f"  {one.name:<{width}}  waits: {one.reason}" for one in plan.waiting]
    lines += ["", *_predictions(plan), plan.memory.summary(), *_limit(plan)]
    lines += [f"note  {note}" for note in plan.notes]
    return "\n".join(lines)


def _columns(share: TaskShare) -> str:
    return (
        f"{share.batch_size:>5}  {share.tokens_per_step:>11,.0f}  {share.num_steps:>6,}  {share.adapter_parameters:>9,}"
    )


def _predictions(plan: Plan) -> list[str]:
    if not plan.step_s or plan.tokens_per_s is None:
        return []
    source = {"measured": "profile measured on this device", "analytic": "analytic profile, not measured"}
    words = source.get(plan.profile_source, plan.profile_source)
    return [
        f"time ({words})  {_time(plan.step_s)} a step, {plan.tokens_per_s:,.0f} tokens/s;"
        f" {_POLICY_WORDS.get(plan.policy, plan.policy)}"
    ]


def _limit(plan: Plan) -> list[str]:
    if plan.limit_bytes is None:
        return []
    share = plan.memory.peak_bytes / plan.limit_bytes
    return [f"        {share:.0%} of the {bytes_text(plan.limit_bytes)} that a device may use"]


def explain(plan: Plan, task: str) -> str:
    """Return in sentences what one task shares, waits for and needs.

    Args:
        plan: that holds it.
        task: its name.

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
    htask = plan.htasks[index]
    others = [name for name in htask.tasks if name != task]
    company = f"shares its passes with {', '.join(others)}" if others else "has its passes to itself"
    sentences = [
        f"{task} {company} (hTask {index + 1} of {len(plan.htasks)}).",
        f"Each step takes {htask.micro_batches} pass{'es' if htask.micro_batches > 1 else ''} of about"
        f" {htask.tokens_per_micro_batch:,.0f} tokens, {share.tokens_per_step:,.0f} of a step's tokens being its own"
        f" ({share.tokens_per_step / max(plan.tokens_per_step, 1):.0%} of all tasks').",
    ]
    if plan.step_s:
        alone = htask.micro_batches * htask.pass_s
        sentences.append(
            f"Its hTask takes {_time(alone)} of the step's {_time(plan.step_s)}; {share.num_steps:,} steps take"
            f" {_time(share.num_steps * plan.step_s)} in this company."
        )
    sentences.append(f"It trains {share.adapter_parameters:,} parameters of its own.")
    return " ".join(sentences)


def diff(before: Plan, after: Plan) -> str:
    """Return what changes from one plan to another, a line each; empty where nothing does.

    Args:
        before: the plan that was.
        after: the plan that is.
    """
    lines = []
    old = {share.name for share in before.shares}
    new = {share.name for share in after.shares}
    waits = {one.name: one.reason for one in after.waiting}
    lines += [f"+ {share.name} starts" for share in after.shares if share.name not in old]
    lines += [
        f"- {share.name} {f'waits: {waits[share.name]}' if share.name in waits else 'leaves'}"
        for share in before.shares
        if share.name not in new
    ]
    for share in after.shares:
        if share.name in old:
            then, now = _company(before, share.name), _company(after, share.name)
            if then != now:
                lines.append(f"~ {share.name} shares its passes with {_names(now)}, before with {_names(then)}")
    for name, unit in (("step_s", _time), ("policy", str), ("max_tokens_per_micro_batch", str)):
        then, now = getattr(before, name), getattr(after, name)
        if then != now:
            lines.append(f"~ {name}: {unit(then)} -> {unit(now)}")
    peaks = before.memory.peak_bytes, after.memory.peak_bytes
    if peaks[0] != peaks[1]:
        lines.append(f"~ peak memory: {bytes_text(peaks[0])} -> {bytes_text(peaks[1])}")
    return "\n".join(lines)


def _company(plan: Plan, task: str) -> tuple[str, ...]:
    index = plan.htask_of(task)
    return () if index is None else tuple(name for name in plan.htasks[index].tasks if name != task)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nobody"


def _time(seconds: float) -> str:
    if seconds < 1.0:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120.0:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
