"""What can be wrong with a template, read from its lists alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from peft_mux.scheduler.pipeline.load import BucketLoad, checked_num_stages, per_stage_bytes
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Slot


def check_stages(template: PipelineTemplate, buckets: Sequence[BucketLoad]) -> None:
    """Refuse buckets that are not of this template.

    Args:
        template: the template that is to be run.
        buckets: the loads that it should have been built from.

    Raises:
        ValueError: if the numbers of stages differ.
    """
    num_stages = checked_num_stages(buckets)
    if template.num_stages != num_stages:
        raise ValueError(
            f"the buckets have {num_stages} stages; allowed: {template.num_stages}, as the template has."
            " Build the template from these buckets."
        )


def order_faults(template: PipelineTemplate, buckets: Sequence[BucketLoad]) -> list[str]:
    """Return every action that is missing, doubled, unknown, on a wrong stage, or before what it needs on its stage.

    A backward needs its forward; the forwards of a bucket's step need all backwards of its step before.

    Args:
        template: the template that is judged.
        buckets: the loads of its buckets, in the order in which it was built.
    """
    expected = [
        (kind, Slot(index, number, step), chunk)
        for step in range(template.num_steps)
        for chunk in range(template.num_chunks)
        for index, bucket in enumerate(buckets)
        for number in range(bucket.num_micro_batches)
        for kind in "FB"
    ]
    return [
        f"stage {stage}: {fault}"
        for stage, row in enumerate(template.actions)
        for fault in _faults_of_row(stage, row, expected)
    ]


def _faults_of_row(stage: int, row: Sequence[Action], expected: Sequence[tuple[str, Slot, int]]) -> list[str]:
    faults = [f"{action} belongs to stage {action.stage}" for action in row if action.stage != stage]
    counts = Counter((action.kind, action.slot, action.chunk) for action in row)
    for key in expected:
        count = counts.pop(key, 0)
        if count != 1:
            name = _named(key, stage)
            faults.append(f"{name} is missing" if count == 0 else f"{name} is there {count} times")
    faults += [f"{_named(key, stage)} is not of these buckets" for key in counts]
    return faults + _early(row)


def _named(key: tuple[str, Slot, int], stage: int) -> Action:
    kind, slot, chunk = key
    return Action(kind, slot.bucket, slot.micro_batch, stage, chunk, slot.step)


def _early(row: Sequence[Action]) -> list[str]:
    """Return the backwards before their forwards, and the forwards before their bucket's step before is over."""
    faults = []
    forwarded = set()
    left = Counter((action.bucket, action.step) for action in row if action.kind == "B")
    for action in row:
        if action.kind == "F":
            forwarded.add((action.slot, action.chunk))
            if left[action.bucket, action.step - 1]:
                faults.append(f"{action} comes before the end of step {action.step - 1} of its bucket")
            continue
        left[action.bucket, action.step] -= 1
        if (action.slot, action.chunk) not in forwarded:
            faults.append(f"{action} comes before its forward")
    return faults


def peak_activation_bytes(template: PipelineTemplate, buckets: Sequence[BucketLoad]) -> tuple[int, ...]:
    """Return the most activation bytes that each stage holds at once.

    A device runs one action at a time, so what it holds changes only with the position in its list: the peak is the
    same for all latencies.

    Args:
        template: a template without order faults.
        buckets: the loads of its buckets, in the order in which it was built.
    """
    peaks = []
    for stage, row in enumerate(template.actions):
        held = peak = 0
        for action in row:
            size = buckets[action.bucket].chunk_bytes(stage, action.chunk, template.num_chunks)
            held += size if action.kind == "F" else -size
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def memory_faults(
    template: PipelineTemplate,
    buckets: Sequence[BucketLoad],
    memory_limit_bytes: Sequence[int] | None,
    static_bytes: Sequence[int] | None,
) -> list[str]:
    """Return every stage that holds more than its limit, with the first action at which it does.

    Args:
        template: the template that is judged.
        buckets: the loads of its buckets, in the order in which it was built.
        memory_limit_bytes: bytes that each stage may hold; `None` for no limit.
        static_bytes: bytes that lie on each stage always; `None` for none.
    """
    num_stages = len(template.actions)
    limits = per_stage_bytes("memory_limit_bytes", memory_limit_bytes, num_stages)
    statics = per_stage_bytes("static_bytes", static_bytes, num_stages) or (0,) * num_stages
    if limits is None:
        return []
    faults = []
    for stage, row in enumerate(template.actions):
        held = statics[stage]
        for action in row:
            if not 0 <= action.bucket < len(buckets):
                continue  # named by `order_faults`
            size = buckets[action.bucket].chunk_bytes(stage, action.chunk, template.num_chunks)
            held += size if action.kind == "F" else -size
            if held > limits[stage]:
                faults.append(f"stage {stage}: with {action} it holds {held:,} bytes; the limit is {limits[stage]:,}")
                break
    return faults
