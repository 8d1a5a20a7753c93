"""Latencies of pipelines on paper: closed forms and lower bounds (M Eq. 4, Appendix A)."""

# MERGED: What can be wrong with a template, read from its lists alone.
# MERGED: Execution of a pipeline template on paper: when each action runs, where devices idle, and what they hold.
# MERGED: A template is of one iteration, or of several steps between which the pipeline is not drained.
# MERGED: Each device runs its list in order. An action starts when its device is free and its input has arrived: a
# MERGED: forward's
# MERGED: from the stage before, a backward's from the stage after; on the first stage a bucket's step begins when the
# MERGED: last
# MERGED: backward of its step before has ended there. Sends are asynchronous; each direction of a link carries one
# MERGED: message at a time, in the order in which they were sent. As the lists fix every order, the instants follow
# MERGED: from the
# MERGED: data flow, and no tie is ever to be broken.
# MERGED: Windows: several steps of a template between which the pipeline is not drained.
# MERGED: A window holds in flight, on each stage, at most what one step of the template holds, so that what fits into
# MERGED: memory step
# MERGED: by step fits in windows too.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.pipeline.launch import next_virtual_stage
from peft_mux.scheduler.pipeline.load import BucketLoad, LinkMap, checked_num_stages, per_stage_bytes
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Slot, build_template


def closed_form_1f1b_s(stage_latencies_s: Sequence[float], num_micro_batches: int) -> float:
    """Return the end-to-end latency of one hTask under 1F1B as M Eq. 4 has it.

    L = 2 * sum over s < S of L^(s) + 2 * C * max over s of L^(s), forwards and backwards being equally long and
    messages free. The sum leaves out the last stage, whose work is in the second term. It is exact where the last
    stage is (one of) the slowest, so with equal stages: 2 (S - 1 + C) L^(1). Where an earlier stage is the slowest,
    the first term counts that stage's work again, and stages before and after it as if they ran in turn: the result
    is then too long, never too short.

    Args:
        stage_latencies_s: L^(s), seconds of one forward of one micro-batch on each stage.
        num_micro_batches: C, micro-batches of the hTask.

    Raises:
        ValueError: if there is no stage, a latency is negative or not finite, or C is less than 1.
    """
    _check(stage_latencies_s, num_micro_batches)
    # M Eq. 4.
    return 2 * sum(stage_latencies_s[:-1]) + 2 * num_micro_batches * max(stage_latencies_s)


def closed_form_gpipe_s(forward_s: Sequence[float], backward_s: Sequence[float], num_micro_batches: int) -> float:
    """Return the end-to-end latency of one bucket under GPipe with room for all its micro-batches and free messages.

    Two flow shops of equal jobs, one after the other: sum F + (C - 1) max F + sum B + (C - 1) max B.

    Args:
        forward_s: seconds of a forward of one micro-batch on each stage.
        backward_s: seconds of a backward of one micro-batch on each stage.
        num_micro_batches: C, micro-batches of the bucket.

    Raises:
        ValueError: as `closed_form_1f1b_s`.
    """
    _check(forward_s, num_micro_batches)
    _check(backward_s, num_micro_batches)
    # In a flow shop of equal jobs every job after the first one adds the time of the slowest stage.
    more = num_micro_batches - 1
    return sum(forward_s) + more * max(forward_s) + sum(backward_s) + more * max(backward_s)


def lemma_1_s(buckets: Sequence[BucketLoad]) -> float:
    """Return T_warm + T_steady + T_drain of M's Lemmas 1 and 2, buckets being sorted by first-stage latency.

    (S - 1) t_1 + 2 * sum over buckets of C_i t_i + (S - 1) t_P, with t_i the latency of bucket i on the first stage.
    M states it as the latency. It is one where all buckets are equal. Where they differ it is a lower bound of the
    template's latency: stages before the last may still be at backwards of longer buckets when the last backward
    comes down, so the drain can take longer than (S - 1) t_P.

    Args:
        buckets: the loads of all buckets, in any order.

    Raises:
        ValueError: if there is no bucket, or buckets differ in the number of stages.
    """
    num_stages = checked_num_stages(buckets)
    # The template runs the longest bucket first, so that t_1 is the greatest and t_P the least.
    latencies = [bucket.forward_s[0] for bucket in buckets]
    steady = 2 * sum(bucket.num_micro_batches * bucket.forward_s[0] for bucket in buckets)
    return (num_stages - 1) * (max(latencies) + min(latencies)) + steady


def lower_bound_s(buckets: Sequence[BucketLoad], *, num_chunks: int = 1) -> float:
    """Return a time that no order of any schedule on these stages can beat.

    A stage cannot begin before some micro-batch has passed the stages before it, has all its work to do (M Lemma 2,
    for each stage), and after its last action a backward has still to pass the stages before it. The same holds for
    each bucket by itself, and a micro-batch has to pass all stages twice.

    Args:
        buckets: the loads of all buckets; stages may differ, and so may forwards and backwards.
        num_chunks: virtual stages of a device; what passes before a device begins is one chunk of each.

    Raises:
        ValueError: if there is no bucket, buckets differ in the number of stages, or `num_chunks` is less than 1.
    """
    num_stages = checked_num_stages(buckets)
    if num_chunks < 1:
        raise ValueError(f"num_chunks is {num_chunks}; allowed: 1 or more.")
    bounds = [bucket.greatest_weight * (sum(bucket.forward_s) + sum(bucket.backward_s)) for bucket in buckets]
    for stage in range(num_stages):
        # Any micro-batch may come first and any may end last, hence the shortest of each bucket.
        heads = [bucket.least_weight * sum(bucket.forward_s[:stage]) / num_chunks for bucket in buckets]
        tails = [bucket.least_weight * sum(bucket.backward_s[:stage]) / num_chunks for bucket in buckets]
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

    Raises:
        ValueError: as `lower_bound_s`.
    """
    num_stages = checked_num_stages(buckets)
    works = [
        sum(one.num_micro_batches * (one.forward_s[stage] + one.backward_s[stage]) for one in buckets)
        for stage in range(num_stages)
    ]
    return max(*works, *(lower_bound_s([bucket], num_chunks=num_chunks) for bucket in buckets))


def _check(latencies_s: Sequence[float], num_micro_batches: int) -> None:
    if not latencies_s:
        raise ValueError("stage latencies are empty; allowed: seconds of each stage, one or more.")
    bad = [value for value in latencies_s if not math.isfinite(value) or value < 0]
    if bad:
        raise ValueError(f"stage latencies contain {bad[0]}; allowed: finite numbers of 0 or more.")
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches is {num_micro_batches}; allowed: 1 or more.")


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


__all__ = [
    "Simulation",
    "Span",
    "closed_form_1f1b_s",
    "closed_form_gpipe_s",
    "lemma_1_s",
    "lower_bound_s",
    "simulate",
    "verify",
]


@dataclass(frozen=True, slots=True)
class Span:
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
        bubble_s: seconds of internal bubbles of each stage: idle between its first and its last action.
        peak_bytes: the most bytes that each stage held at once, activations and static bytes.
        bucket_names: the name of each bucket, by its index.
        num_steps: steps that were run.
    """

    makespan_s: float
    spans: tuple[Span, ...]
    busy_s: tuple[float, ...]
    bubble_s: tuple[float, ...]
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
    links: Link | Sequence[Link] | None = None,
    static_bytes: Sequence[int] | None = None,
) -> Simulation:
    """Time all steps of a template.

    A bucket's latency on a stage is shared equally by the chunks (virtual stages) of the device. A message that its
    receiver has not taken yet counts at its sender, whose `activation_bytes` hold the output until the backward.

    Args:
        template: the template to run.
        buckets: the loads of its buckets, in the order in which it was built.
        links: none (messages take no time), one for all, or one for each pair of neighbours.
        static_bytes: bytes that lie on each stage always.

    Raises:
        ValueError: for a template that is not of these buckets, lacks or repeats an action, or comes to a halt.
    """
    check_stages(template, buckets)
    link_map = LinkMap.of(links, template.num_stages, template.num_chunks)
    faults = order_faults(template, buckets)
    run = _SimulatedRun(template, buckets, link_map)
    if not faults:
        run.run_all()
        faults = run.stalls()
    if faults:
        raise ValueError(_listed("cannot be run", faults))
    statics = per_stage_bytes("static_bytes", static_bytes, template.num_stages) or (0,) * template.num_stages
    peaks = peak_activation_bytes(template, buckets)
    return Simulation(
        makespan_s=max(row[-1].end_s for row in run.spans),
        spans=tuple(span for row in run.spans for span in row),
        busy_s=tuple(sum(span.end_s - span.start_s for span in row) for row in run.spans),
        bubble_s=tuple(_internal_bubbles_s(row) for row in run.spans),
        peak_bytes=tuple(static + peak for static, peak in zip(statics, peaks, strict=True)),
        bucket_names=tuple(bucket.name for bucket in buckets),
        num_steps=template.num_steps,
    )


def verify(
    template: PipelineTemplate,
    buckets: Sequence[BucketLoad],
    *,
    memory_limit_bytes: Sequence[int] | None = None,
    static_bytes: Sequence[int] | None = None,
) -> None:
    """Prove that a template can be executed, or refuse it.

    Each micro-batch passes each (virtual) stage exactly once in each direction, its forward before its backward; the
    lists of all devices together come to an end; no stage ever holds more than its limit.

    Args:
        template: the template that is judged.
        buckets: the loads of its buckets, in the order in which it was built.
        memory_limit_bytes: bytes that each stage may hold; `None` for no limit.
        static_bytes: bytes that lie on each stage always.

    Raises:
        ValueError: listing every violation, or saying that the template is not of these buckets. Whether the lists come
            to an end is judged where nothing else is wrong with their order.
    """
    check_stages(template, buckets)
    faults = order_faults(template, buckets)
    if not faults:
        # Whether the lists come to an end depends on their order alone: free messages are enough to tell.
        run = _SimulatedRun(template, buckets, LinkMap(()))
        run.run_all()
        faults = run.stalls()
    faults += memory_faults(template, buckets, memory_limit_bytes, static_bytes)
    if faults:
        raise ValueError(_listed("is refused", faults))


def _internal_bubbles_s(spans: Sequence[Span]) -> float:
    """Return the seconds in which a stage is idle between its first and its last action."""
    return sum((later.start_s - earlier.end_s for earlier, later in zip(spans, spans[1:], strict=False)), 0.0)


def _listed(verdict: str, faults: Sequence[str]) -> str:
    things = "1 thing is" if len(faults) == 1 else f"{len(faults)} things are"
    return f"template {verdict}; {things} wrong:\n" + "\n".join(f"  {fault}" for fault in faults)


class _SimulatedRun:
    """State of one simulated run of a template.

    An input is known by (kind, slot, chunk) on the device that waits for it.
    """

    def __init__(self, template: PipelineTemplate, buckets: Sequence[BucketLoad], links: LinkMap) -> None:
        self._rows = template.actions
        self._num_stages = template.num_stages
        self._num_chunks = template.num_chunks
        self._buckets = buckets
        self._links = links
        self._position = [0] * self._num_stages
        self._arrivals: list[dict[tuple[str, Slot, int], float]] = [{} for _ in range(self._num_stages)]
        first_row = template.actions[0]
        self._backwards_left = Counter((a.bucket, a.step) for a in first_row if a.kind == "B" and a.chunk == 0)
        self._link_free: dict[tuple[int, int], float] = {}
        self.spans: list[list[Span]] = [[] for _ in range(self._num_stages)]

    def run_all(self) -> None:
        """Run every device as far as its inputs allow, until none can go on."""
        for index in range(len(self._buckets)):
            self._open_step(index, 0, 0.0)
        # In which order devices are advanced does not matter: their lists and the links fix every instant.
        waiting = list(range(self._num_stages))
        while waiting:
            device = waiting.pop()
            waiting.extend(self._advance(device))

    def stalls(self) -> list[str]:
        """Return what each device that did not finish waits for."""
        return [
            f"stage {stage} comes to a halt before {row[position]}, whose input never arrives"
            for stage, (row, position) in enumerate(zip(self._rows, self._position, strict=True))
            if position < len(row)
        ]

    def _advance(self, device: int) -> list[int]:
        """Run a device until it lacks an input; return the devices that got something from it."""
        row, spans, arrivals = self._rows[device], self.spans[device], self._arrivals[device]
        reached: dict[int, None] = {}
        position = self._position[device]
        now = spans[-1].end_s if spans else 0.0
        while position < len(row):
            action = row[position]
            arrival = arrivals.pop((action.kind, action.slot, action.chunk), None)
            if arrival is None:
                break
            bucket = self._buckets[action.bucket]
            durations = bucket.forward_s if action.kind == "F" else bucket.backward_s
            start = max(now, arrival)
            # Latencies are of all layers of the device, which its virtual stages share equally.
            now = start + durations[device] * bucket.weight(action.micro_batch) / self._num_chunks
            spans.append(Span(device, action, start, now))
            target = self._send_result(action, now)
            # What a device hands to itself it finds in this same loop.
            if target != device:
                reached[target] = None
            position += 1
        self._position[device] = position
        return list(reached)

    def _send_result(self, action: Action, now: float) -> int:
        """Send a result to the next virtual stage and return its device; a loss stays where it is."""
        target = next_virtual_stage(action.kind, action.stage, action.chunk, self._num_stages, self._num_chunks)
        if target is None:
            if action.kind == "F":
                self._arrivals[action.stage]["B", action.slot, action.chunk] = now
            else:
                self._end_backward(action, now)
            return action.stage
        device, chunk = target
        arrival = now
        duration = self._links.seconds(action.stage, device, self._buckets[action.bucket].output_bytes)
        # A link carries one message at a time in each direction, as in `ListScheduler`.
        if duration:
            way = (action.stage, device)
            arrival = max(now, self._link_free.get(way, 0.0)) + duration
            self._link_free[way] = arrival
        self._arrivals[device][action.kind, action.slot, chunk] = arrival
        return device

    def _end_backward(self, action: Action, now: float) -> None:
        """Let a bucket's next step begin where this was the last backward of the present one on the first stage."""
        self._backwards_left[action.bucket, action.step] -= 1
        if not self._backwards_left[action.bucket, action.step]:
            self._open_step(action.bucket, action.step + 1, now)

    def _open_step(self, bucket: int, step: int, now: float) -> None:
        """Let the first stage launch a bucket's micro-batches of a step."""
        for number in range(self._buckets[bucket].num_micro_batches):
            self._arrivals[0]["F", Slot(bucket, number, step), 0] = now


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
