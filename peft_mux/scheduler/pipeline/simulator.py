"""Execution of a pipeline template on paper: when each action runs, where devices idle, and what they hold.

A template is of one iteration, or of several steps between which the pipeline is not drained.

Each device runs its list in order. An action starts when its device is free and its input has arrived: a forward's
from the stage before, a backward's from the stage after; on the first stage a bucket's step begins when the last
backward of its step before has ended there. Sends are asynchronous; each direction of a link carries one
message at a time, in the order in which they were sent. As the lists fix every order, the instants follow from the
data flow, and no tie is ever to be broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from peft_mux.scheduler.costs.link import Link
from peft_mux.scheduler.pipeline.bounds import (
    closed_form_1f1b_s,
    closed_form_gpipe_s,
    lemma_1_s,
    lower_bound_s,
)
from peft_mux.scheduler.pipeline.checks import check_stages, memory_faults, order_faults, peak_activation_bytes
from peft_mux.scheduler.pipeline.launch import next_virtual_stage
from peft_mux.scheduler.pipeline.load import BucketLoad, LinkMap, per_stage_bytes
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Slot

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
