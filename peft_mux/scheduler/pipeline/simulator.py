"""Simulates a pipeline template: when each action runs, when devices idle, the memory they hold, and invalid actions.

Each device runs its list in order. An action starts when its device is free and its input has arrived: a forward's from
the stage before, a backward's from the stage after; on the first stage a bucket's step begins when the last backward of
its previous step has ended there. Sends are asynchronous; each direction of a link carries one message at a time, in
the order in which they were sent. As the lists fix every order, the instants follow from the data flow alone.

A template is of one iteration, or a window: several steps between which the pipeline is not drained. A window holds in
flight, on each stage, at most what one step holds, so that it fits into the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peft_mux.scheduler.pipeline.list_scheduler import Links, message_s, next_virtual_stage
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import Action, BucketLoad, PipelineTemplate, Slot

MOST_STEPS = 8
"""Steps of the longest window: the flush at its end costs an eighth of what it would at each step."""
MOST_ACTIONS = 40_000
"""Actions of a window beyond which it is not built: in such long steps, draining between them costs little."""


class Span(NamedTuple):
    """One action on the time axis.

    Attributes:
        device: the stage that ran it.
        action: the forward or backward that ran.
        start_s: seconds from the start of the iteration to that of the action.
        end_s: seconds from the start of the iteration to the end of the action.
    """

    device: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """One iteration of a template, or several steps of one that does not drain between them.

    Attributes:
        makespan_s: seconds from the first start to the last end.
        spans: every action with its instants, by device, then by time.
        busy_s: seconds that each stage spends computing.
        peak_bytes: the most activation bytes that each stage held at once.
        bucket_names: the name of each bucket, by its index.
        num_steps: steps that were run.
    """

    makespan_s: float
    spans: tuple[Span, ...]
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    bucket_names: tuple[str, ...]
    num_steps: int = 1

    @property
    def step_s(self) -> float:
        """Seconds of one of its steps, in the mean."""
        return self.makespan_s / self.num_steps

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.busy_s)

    @property
    def utilization(self) -> float:
        """Share of all device time that is spent computing."""
        return sum(self.busy_s) / (self.makespan_s * self.num_stages) if self.makespan_s else 1.0


def simulate(
    template: PipelineTemplate,
    buckets: Sequence[BucketLoad],
    *,
    links: Links = None,
) -> Simulation:
    """Time all steps of a template.

    A bucket's latency on a stage is shared equally by the chunks (virtual stages) of the device. A message that its
    receiver has not taken yet counts at its sender, whose `activation_bytes` hold the output until the backward.

    Args:
        template: the template to run.
        buckets: the loads of its buckets, in the order in which it was built.
        links: the links between neighbouring stages.

    Raises:
        ValueError: for a template that is not of these buckets, lacks or repeats an action, or comes to a halt.
    """
    num_stages, num_chunks = template.num_stages, template.num_chunks
    if {bucket.num_stages for bucket in buckets} != {num_stages}:
        raise ValueError(
            f"the buckets must have {num_stages} stages, as the template has. Build it from these buckets."
        )
    _refuse(_order_faults(template, buckets))
    spans: list[list[Span]] = [[] for _ in range(num_stages)]
    # An input is known by (kind, slot, chunk) on the device that waits for it.
    arrivals: list[dict[tuple[str, Slot, int], float]] = [{} for _ in range(num_stages)]
    link_free: dict[tuple[int, int], float] = {}
    backwards_left = Counter((a.bucket, a.step) for a in template.actions[0] if a.kind == "B" and a.chunk == 0)

    def open_step(bucket: int, step: int, now: float) -> None:
        for number in range(buckets[bucket].num_micro_batches):
            arrivals[0]["F", Slot(bucket, number, step), 0] = now

    for index in range(len(buckets)):
        open_step(index, 0, 0.0)
    # The order in which devices are advanced does not matter: their lists and the links fix every instant.
    waiting = list(range(num_stages))
    while waiting:
        device = waiting.pop()
        row, ran = template.actions[device], spans[device]
        reached: dict[int, None] = {}
        now = ran[-1].end_s if ran else 0.0
        while len(ran) < len(row):
            action = row[len(ran)]
            slot = action.slot
            arrival = arrivals[device].pop((action.kind, slot, action.chunk), None)
            if arrival is None:
                break
            bucket = buckets[action.bucket]
            seconds = (bucket.forward_s if action.kind == "F" else bucket.backward_s)[device]
            if bucket.weights:
                seconds *= bucket.weights[action.micro_batch]
            start = max(now, arrival)
            # Latencies are of all layers of the device, which its virtual stages share equally.
            now = start + seconds / num_chunks
            ran.append(Span(device, action, start, now))
            target = next_virtual_stage(action.kind, device, action.chunk, num_stages, num_chunks)
            if target is not None:
                sent = now
                taken_s = message_s(links, device, target[0], bucket.output_bytes)
                # A link carries one message at a time in each direction, as in `ListScheduler`.
                if taken_s:
                    sent = max(now, link_free.get((device, target[0]), 0.0)) + taken_s
                    link_free[device, target[0]] = sent
                arrivals[target[0]][action.kind, slot, target[1]] = sent
                # What a device hands to itself it finds in this same loop.
                if target[0] != device:
                    reached[target[0]] = None
            elif action.kind == "F":
                arrivals[device]["B", slot, action.chunk] = now
            else:
                backwards_left[action.bucket, action.step] -= 1
                if not backwards_left[action.bucket, action.step]:
                    open_step(action.bucket, action.step + 1, now)
        waiting.extend(reached)
    _refuse(
        [
            f"stage {stage} comes to a halt before {row[len(ran)]}, whose input never arrives"
            for stage, (row, ran) in enumerate(zip(template.actions, spans, strict=True))
            if len(ran) < len(row)
        ]
    )
    return Simulation(
        makespan_s=max(row[-1].end_s for row in spans),
        spans=tuple(span for row in spans for span in row),
        busy_s=tuple(sum(span.end_s - span.start_s for span in row) for row in spans),
        peak_bytes=peak_activation_bytes(template, buckets),
        bucket_names=tuple(bucket.name for bucket in buckets),
        num_steps=template.num_steps,
    )


def simulate_one_stage(buckets: Sequence[BucketLoad]) -> Simulation:
    """Return the time line of a pipeline of one stage: bucket by bucket, each backward right after its forward.

    It is what `simulate` returns for the template "1f1b" of one stage, with the same bits.
    """
    spans: list[Span] = []
    now = 0.0
    for index, bucket in enumerate(buckets):
        for number in range(bucket.num_micro_batches):
            weight = bucket.weights[number] if bucket.weights else 1.0
            for kind, seconds in (("F", bucket.forward_s[0]), ("B", bucket.backward_s[0])):
                spans.append(Span(0, Action(kind, index, number, 0), now, now + seconds * weight))
                now = spans[-1].end_s
    return Simulation(
        makespan_s=now,
        spans=tuple(spans),
        busy_s=(sum(span.end_s - span.start_s for span in spans),),
        peak_bytes=(max(bucket.activation_bytes[0] for bucket in buckets),),
        bucket_names=tuple(bucket.name for bucket in buckets),
    )


def _refuse(faults: Sequence[str]) -> None:
    """Raise `ValueError` if there is any fault of a template, with all of them."""
    if faults:
        things = "1 thing is" if len(faults) == 1 else f"{len(faults)} things are"
        raise ValueError("\n  ".join([f"template cannot be run; {things} wrong:", *faults]))


def _order_faults(template: PipelineTemplate, buckets: Sequence[BucketLoad]) -> list[str]:
    """Return every action that is missing, doubled, unknown, on a wrong stage, or before what it needs on its stage.

    A backward needs its forward; the forwards of a bucket's step need all backwards of its previous step.
    """
    expected = [
        (kind, index, number, chunk, step)
        for step in range(template.num_steps)
        for chunk in range(template.num_chunks)
        for index, bucket in enumerate(buckets)
        for number in range(bucket.num_micro_batches)
        for kind in "FB"
    ]
    all_faults: list[str] = []
    for stage, row in enumerate(template.actions):
        faults = [f"{action} belongs to stage {action.stage}" for action in row if action.stage != stage]
        counts = Counter((a.kind, a.bucket, a.micro_batch, a.chunk, a.step) for a in row)
        for kind, bucket, number, chunk, step in expected:
            count = counts.pop((kind, bucket, number, chunk, step), 0)
            if count != 1:
                action = Action(kind, bucket, number, stage, chunk, step)
                faults.append(f"{action} is missing" if count == 0 else f"{action} is there {count} times")
        for kind, bucket, number, chunk, step in counts:
            faults.append(f"{Action(kind, bucket, number, stage, chunk, step)} is not of these buckets")
        forwarded = set()
        left = Counter((action.bucket, action.step) for action in row if action.kind == "B")
        for action in row:
            if action.kind == "F":
                forwarded.add(action[1:])  # all fields but the kind, which its backward shares
                if left[action.bucket, action.step - 1]:
                    faults.append(f"{action} comes before the end of step {action.step - 1} of its bucket")
            else:
                left[action.bucket, action.step] -= 1
                if action[1:] not in forwarded:
                    faults.append(f"{action} comes before its forward")
        all_faults += [f"stage {stage}: {fault}" for fault in faults]
    return all_faults


def peak_activation_bytes(template: PipelineTemplate, buckets: Sequence[BucketLoad]) -> tuple[int, ...]:
    """Return the most activation bytes that each stage holds at once.

    A device runs one action at a time, so what it holds changes only with the position in its list: the peak is the
    same for all latencies.

    Args:
        template: a template that can be executed.
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


def lower_bound_s(buckets: Sequence[BucketLoad], *, num_chunks: int = 1) -> float:
    """Return a time that no order of any schedule on these stages can beat.

    A stage cannot begin before some micro-batch has passed the stages before it, has all its work to do (M Lemma 2,
    for each stage), and after its last action a backward has still to pass the stages before it. The same holds for
    each bucket by itself, and a micro-batch has to pass all stages twice.

    Args:
        buckets: the loads of all buckets; stages may differ, and so may forwards and backwards.
        num_chunks: virtual stages of a device; what passes before a device begins is one chunk of each.

    """
    num_stages = buckets[0].num_stages
    bounds = [max(bucket.weights, default=1.0) * (sum(bucket.forward_s) + sum(bucket.backward_s)) for bucket in buckets]
    shortest = [min(bucket.weights, default=1.0) for bucket in buckets]
    for stage in range(num_stages):
        # Any micro-batch may come first and any may end last, hence the shortest of each bucket.
        heads = [weight * sum(b.forward_s[:stage]) / num_chunks for weight, b in zip(shortest, buckets, strict=True)]
        tails = [weight * sum(b.backward_s[:stage]) / num_chunks for weight, b in zip(shortest, buckets, strict=True)]
        works = [b.num_micro_batches * (b.forward_s[stage] + b.backward_s[stage]) for b in buckets]
        # Any bucket may come first and any may end last, hence the least head and the least tail.
        bounds.append(min(heads) + sum(works) + min(tails))
        # A bucket by itself pays its own head and tail, which may be longer than the least ones.
        bounds += [head + work + tail for head, work, tail in zip(heads, works, tails, strict=True)]
    return max(bounds)


def steady_lower_bound_s(buckets: Sequence[BucketLoad], *, num_chunks: int = 1) -> float:
    """Return seconds of a step that no order can beat in the mean of several steps, even without draining between them.

    Each stage has the work of every step to do, and a bucket's step begins when its step before is over.

    Args:
        buckets: the loads of all buckets; stages may differ, and so may forwards and backwards.
        num_chunks: virtual stages of a device, as in `lower_bound_s`.
    """
    works = [
        sum(bucket.num_micro_batches * (bucket.forward_s[stage] + bucket.backward_s[stage]) for bucket in buckets)
        for stage in range(buckets[0].num_stages)
    ]
    return max(*works, *(lower_bound_s([bucket], num_chunks=num_chunks) for bucket in buckets))


def build_window(
    template: PipelineTemplate,
    buckets: Sequence[BucketLoad],
    num_steps: int,
    *,
    links: Links = None,
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


def window_step_s(template: PipelineTemplate, buckets: Sequence[BucketLoad], *, links: Links = None) -> float:
    """Return seconds of a step in windows of `MOST_STEPS` steps, or of one by itself where that is as fast.

    Args:
        template: a template of one step.
        buckets: the loads of its buckets, in the order in which it was built.
        links: the links that the template was built for.
    """
    flushed_s = simulate(template, buckets, links=links).makespan_s
    # Steps can overlap only if there are several stages, and buckets to fill them with.
    num_actions = MOST_STEPS * sum(map(len, template.actions))
    if template.num_stages == 1 or len(buckets) == 1 or num_actions > MOST_ACTIONS:
        return flushed_s
    window = build_window(template, buckets, MOST_STEPS, links=links)
    return min(flushed_s, simulate(window, buckets, links=links).step_s)
