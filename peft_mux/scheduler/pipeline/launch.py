"""List scheduling of a pipeline: which forward or backward each device runs next, while a clock goes on.

One scheduler serves 1F1B, interleaved 1F1B and M's template (M §3.4.1). They differ in the order of micro-batches, in
the clock, and in what a free device does:

* with caps (1F1B), it fills up with forwards to its cap, waiting for those that are on their way, and then alternates;
* without (M's template), it runs the backward that is ready, otherwise the next forward whose input is there.

In both, a forward starts only where its activations fit; and on the first stage only once the step before it of its
bucket is over, whose last backward ends there.

Why it never deadlocks. Forwards have one order on all devices, and so have backwards. Suppose nothing can start, even
where a device no longer waits for a forward on its way (`_start_any_backward`). The least forward that some device has
still to run (on the first such stage) has its input, or is of a step that may not begin yet, so it waits for room or
for backwards, and all forwards before it are done everywhere. The least backward that some device has still to run (on
the last such stage) then waits only for its own forward, so that forward has not begun; it belongs to the last chunk of
its group, as those of earlier chunks come before any backward of the group. What the device holds is then at most the
earlier chunks of one group: (num_chunks - 1) * group size forwards. `group_micro_batches` and the caps leave room for
one more. A group is of one step, so that what a step waits for is in groups before its own.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peft_mux.scheduler.pipeline.load import BucketLoad, LinkMap

TICKS_PER_S = 10**12
"""The clock counts whole picoseconds, so that instants that are equal on paper compare as equal."""

Move = tuple[str, int, int]
"""Kind ("F" or "B"), place of the micro-batch in the stream, chunk."""


class Launch(NamedTuple):
    """A micro-batch in the stream of those that enter the pipeline.

    Attributes:
        bucket: index of its bucket.
        micro_batch: number of it within the bucket.
        step: step of the template that it belongs to.
    """

    bucket: int
    micro_batch: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Clock:
    """How long each move takes on each device, and each message between devices.

    Attributes:
        forward: ticks of a forward, [bucket][stage].
        backward: ticks of a backward, [bucket][stage].
        links: the links between stages, which say how long messages take.
        weights: by how much each micro-batch takes more or less, [bucket][micro-batch]; empty where all are equal.
    """

    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    links: LinkMap
    weights: tuple[tuple[float, ...], ...] = ()

    def duration(self, kind: str, bucket: int, micro_batch: int, stage: int) -> int:
        """Return the ticks of one step.

        Args:
            kind: "F" for a forward, "B" for a backward.
            bucket: the bucket, counted from 0.
            micro_batch: the micro-batch within the bucket, counted from 0.
            stage: the device that runs it.
        """
        ticks = (self.forward if kind == "F" else self.backward)[bucket][stage]
        own = self.weights[bucket] if self.weights else ()
        return round(ticks * own[micro_batch]) if own else ticks

    @classmethod
    def real(cls, buckets: Sequence[BucketLoad], links: LinkMap) -> Clock:
        """Return the clock of the buckets' own latencies, for one chunk a device.

        Args:
            buckets: the loads of all buckets, whose seconds become ticks.
            links: the links between stages.
        """

        def ticks(seconds: Sequence[float]) -> tuple[int, ...]:
            return tuple(round(value * TICKS_PER_S) for value in seconds)

        return cls(
            tuple(ticks(bucket.forward_s) for bucket in buckets),
            tuple(ticks(bucket.backward_s) for bucket in buckets),
            links,
            tuple(bucket.weights for bucket in buckets),
        )

    @classmethod
    def unit(cls, buckets: Sequence[BucketLoad]) -> Clock:
        """Return the clock on which all moves last one tick: the textbook order, whatever the latencies.

        Args:
            buckets: the loads of all buckets, of which only the number of stages is read.
        """
        ones = tuple((1,) * bucket.num_stages for bucket in buckets)
        return cls(ones, ones, LinkMap(()))


def group_micro_batches(
    stream: Sequence[Launch],
    buckets: Sequence[BucketLoad],
    num_chunks: int,
    room: Sequence[int] | None,
) -> list[range]:
    """Cut the stream into groups that pass through a chunk together, before the next chunk begins.

    Groups have S micro-batches, as in Megatron-LM's interleaved schedule. What is left over joins the last group: a
    group of fewer than S would leave stages idle before each of its chunks. Where a stage cannot hold all earlier
    chunks of a group beside one last chunk, the group is cut short.

    Args:
        stream: the launches in order.
        buckets: the loads of all buckets.
        num_chunks: virtual stages of a device.
        room: bytes for activations on each stage; `None` without a limit.

    Returns:
        ranges of places in the stream.
    """
    num_stages = buckets[0].num_stages

    def fits(members: range) -> bool:
        for stage in range(num_stages):
            loads = [buckets[stream[place].bucket] for place in members]
            lasts = [load.chunk_bytes(stage, num_chunks - 1, num_chunks) for load in loads]
            if sum(load.activation_bytes[stage] for load in loads) - sum(lasts) + max(lasts) > room[stage]:  # type: ignore[index]
                return False
        return True

    last_of_step = {launch.step: place for place, launch in enumerate(stream)}
    groups, start = [], 0
    while start < len(stream):
        # Not beyond a step: a later chunk of this group may be what the next step waits for.
        left = last_of_step[stream[start].step] + 1 - start
        # The largest size that fits: all that is left where it makes less than two groups, else S or fewer.
        sizes = [*([left] if left < 2 * num_stages else []), *range(min(num_stages, left), 0, -1)]
        stop = start + next(size for size in sizes if size == 1 or room is None or fits(range(start, start + size)))
        groups.append(range(start, stop))
        start = stop
    return groups


class _Device:
    """What one device has run and holds."""

    __slots__ = ("backward_arrived", "forward_arrived", "held_bytes", "is_busy", "next_backward", "next_forward", "ran")

    def __init__(self, num_forwards: int) -> None:
        self.next_forward = 0
        self.next_backward = 0
        self.held_bytes = 0
        self.is_busy = False
        self.forward_arrived = bytearray(num_forwards)
        self.backward_arrived = bytearray(num_forwards)
        self.ran: list[Move] = []


class ListScheduler:
    """Runs the clock and writes down the order of each device.

    Args:
        stream: the launches in order.
        buckets: the loads of all buckets.
        groups: the places in the stream that pass through a chunk together, as `group_micro_batches` returns them.
        num_chunks: virtual stages of a device; virtual stage `chunk * S + stage` follows the one before.
        clock: how long moves and messages take.
        caps: chunks of micro-batches in flight on each stage, between which a device alternates; `None` for as many as
            there is room for, a backward that is ready going first.
        room: bytes for activations on each stage; `None` for no limit.
    """

    def __init__(
        self,
        stream: Sequence[Launch],
        buckets: Sequence[BucketLoad],
        *,
        groups: Sequence[range],
        num_chunks: int,
        clock: Clock,
        caps: Sequence[int] | None,
        room: Sequence[int] | None,
    ) -> None:
        self._stream = stream
        self._bucket_of = [launch.bucket for launch in stream]
        self._buckets = buckets
        self._num_stages = buckets[0].num_stages
        self._num_chunks = num_chunks
        self._clock = clock
        self._caps = caps
        self._room = room
        chunks = range(num_chunks)
        self._forwards = [(place, chunk) for group in groups for chunk in chunks for place in group]
        # Gradients leave the last chunk first.
        self._backwards = [(place, chunk) for group in groups for chunk in reversed(chunks) for place in group]
        self._forward_position = {item: position for position, item in enumerate(self._forwards)}
        self._backward_position = {item: position for position, item in enumerate(self._backwards)}
        self._devices = [_Device(len(self._forwards)) for _ in range(self._num_stages)]
        self._events: list[tuple[int, int, int, Move]] = []
        """(tick, 0 for an end of a move or 1 for an arrival, device, move)."""
        self._link_free: dict[tuple[int, int], int] = {}
        self._places_of: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, launch in enumerate(stream):
            self._places_of[launch.bucket, launch.step].append(place)
        self._backwards_left = Counter({of: len(places) for of, places in self._places_of.items()})

    def run(self) -> list[list[Move]]:
        """Return what each device runs, in order."""
        # Inputs of the first virtual stage are there from the start; later chunks wait for the last stage.
        for bucket, step in self._places_of:
            if step == 0:
                self._open_step(bucket, step)
        self._start_next(0, 0)
        now = 0
        # No event is left where all devices wait: one backward sets them going again (see the top of this file).
        while self._events or self._start_any_backward(now):
            now = self._events[0][0]
            touched = set()
            # All that happens at one instant is known before anything starts, so that a backward goes first.
            while self._events and self._events[0][0] == now:
                _, is_arrival, device, move = heapq.heappop(self._events)
                (self._receive if is_arrival else self._finish)(now, device, move)
                touched.add(device)
            for device in sorted(touched):
                self._start_next(now, device)
        ran = [device.ran for device in self._devices]
        assert all(len(moves) == 2 * len(self._forwards) for moves in ran), "list scheduling came to a halt"
        return ran

    def _start_next(self, now: int, index: int) -> None:
        """Start what a free device is to run next; nothing where it has to wait for an input or for room."""
        device = self._devices[index]
        if device.is_busy:
            return
        forward_fits = self._forward_fits(device, index)
        # Under caps a device fills up with forwards first, even where a backward is ready: that is 1F1B's warm-up.
        waits_for_forward = self._caps is not None and forward_fits and self._may_come(device)
        if self._backward_is_ready(device) and not waits_for_forward:
            self._start_backward(now, index)
        elif forward_fits and device.forward_arrived[device.next_forward]:
            self._start_forward(now, index)

    def _start_any_backward(self, now: int) -> bool:
        """Let one device stop waiting for its forward, if all devices wait; return whether there was one."""
        for index, device in enumerate(self._devices):
            if self._backward_is_ready(device):
                self._start_backward(now, index)
                return True
        return False

    def _backward_is_ready(self, device: _Device) -> bool:
        position = device.next_backward
        return position < len(self._backwards) and bool(device.backward_arrived[position])

    def _forward_fits(self, device: _Device, index: int) -> bool:
        """Return whether there is one more forward to run and the device may hold it."""
        position = device.next_forward
        if position == len(self._forwards):
            return False
        if self._caps is not None and position - device.next_backward >= self._caps[index]:
            return False
        return (
            self._room is None or device.held_bytes + self._bytes(index, *self._forwards[position]) <= self._room[index]
        )

    def _may_come(self, device: _Device) -> bool:
        """Return whether the next forward of a device is of a step that has begun."""
        launch = self._stream[self._forwards[device.next_forward][0]]
        return launch.step == 0 or not self._backwards_left[launch.bucket, launch.step - 1]

    def _open_step(self, bucket: int, step: int) -> None:
        """Let the first stage launch a bucket's micro-batches of a step."""
        for place in self._places_of.get((bucket, step), ()):
            self._devices[0].forward_arrived[self._forward_position[place, 0]] = True

    def _start_backward(self, now: int, index: int) -> None:
        device = self._devices[index]
        place, chunk = self._backwards[device.next_backward]
        device.next_backward += 1
        self._start(now, index, ("B", place, chunk))

    def _start_forward(self, now: int, index: int) -> None:
        device = self._devices[index]
        place, chunk = self._forwards[device.next_forward]
        device.next_forward += 1
        device.held_bytes += self._bytes(index, place, chunk)
        self._start(now, index, ("F", place, chunk))

    def _bytes(self, index: int, place: int, chunk: int) -> int:
        return self._buckets[self._bucket_of[place]].chunk_bytes(index, chunk, self._num_chunks)

    def _start(self, now: int, index: int, move: Move) -> None:
        device = self._devices[index]
        device.is_busy = True
        device.ran.append(move)
        launch = self._stream[move[1]]
        duration = self._clock.duration(move[0], launch.bucket, launch.micro_batch, index)
        heapq.heappush(self._events, (now + duration, 0, index, move))

    def _finish(self, now: int, index: int, move: Move) -> None:
        kind, place, chunk = move
        device = self._devices[index]
        device.is_busy = False
        if kind == "B":
            device.held_bytes -= self._bytes(index, place, chunk)
        target = next_virtual_stage(kind, index, chunk, self._num_stages, self._num_chunks)
        if target is not None:
            self._send(now, index, target[0], (kind, place, target[1]))
        elif kind == "F":  # the loss: its own backward can begin
            device.backward_arrived[self._backward_position[place, chunk]] = True
        else:
            self._end_backward(self._stream[place])

    def _end_backward(self, launch: Launch) -> None:
        """Let a bucket's next step begin where this was the last backward of the present one, on the first stage."""
        self._backwards_left[launch.bucket, launch.step] -= 1
        if not self._backwards_left[launch.bucket, launch.step]:
            self._open_step(launch.bucket, launch.step + 1)

    def _send(self, now: int, source: int, target: int, move: Move) -> None:
        message_bytes = self._buckets[self._bucket_of[move[1]]].output_bytes
        duration = round(self._clock.links.seconds(source, target, message_bytes) * TICKS_PER_S)
        # Each direction of a link carries one message at a time, in the order in which they were sent.
        arrival = max(now, self._link_free.get((source, target), 0)) + duration
        self._link_free[source, target] = arrival
        heapq.heappush(self._events, (arrival, 1, target, move))

    def _receive(self, _now: int, index: int, move: Move) -> None:
        kind, place, chunk = move
        if kind == "F":
            self._devices[index].forward_arrived[self._forward_position[place, chunk]] = True
        else:
            self._devices[index].backward_arrived[self._backward_position[place, chunk]] = True


def next_virtual_stage(kind: str, stage: int, chunk: int, num_stages: int, num_chunks: int) -> tuple[int, int] | None:
    """Return the (stage, chunk) to which a forward or a backward hands its result; `None` at the end of its way.

    Args:
        kind: "F" for a forward, which goes up the pipeline, or "B" for a backward, which goes down.
        stage: the device that ran it.
        chunk: the virtual stage on that device.
        num_stages: S, devices of the pipeline.
        num_chunks: virtual stages of a device.
    """
    place = chunk * num_stages + stage + (1 if kind == "F" else -1)
    if not 0 <= place < num_stages * num_chunks:
        return None
    return place % num_stages, place // num_stages
