"""List scheduling of a pipeline: which forward or backward each device runs next on a simulated clock.

One scheduler serves 1F1B, interleaved 1F1B and M's template (M §3.4.1). They differ in the order of micro-batches, in
the clock, and in what a free device does:

* with caps (1F1B), it fills up with forwards to its cap, waiting for those that are on their way, and then alternates;
* without caps (M's template), it runs a backward that is ready, otherwise the next forward whose input has arrived.

In both, a forward starts only if its activations fit; and on the first stage only after the previous step of its bucket
has ended, which its last backward there does.

Why it never deadlocks. Forwards have one order on all devices, and so have backwards. Suppose nothing can start, even
if a device no longer waits for a forward on its way (`stops_waiting`). The least forward that some device has still to
run (on the first such stage) has its input, or is of a step that may not begin yet, so it waits for room or for
backwards, and all forwards before it are done everywhere. The least backward that some device has still to run (on the
last such stage) then waits only for its own forward, so that forward has not begun; it belongs to the last chunk of its
group, as those of earlier chunks come before any backward of the group. What the device holds is then at most the
earlier chunks of one group: (num_chunks - 1) * group size forwards. `group_micro_batches` and the caps leave room for
one more. A group is of one step, so that what a step waits for is in groups before its own.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from peft_mux.scheduler.plan import BucketLoad, Link, Slot

Links = Link | tuple[Link, ...] | None
"""The link between stages: one for all, or that of each to the next, the last one's to the first; `None` or none at all
if messages take no time."""


def message_s(links: Links, source: int, target: int, message_bytes: int) -> float:
    """Return the seconds of a message between two neighbouring stages; none within one, or without a link."""
    if not links or source == target:
        return 0.0
    if isinstance(links, tuple):
        links = links[source if target == (source + 1) % len(links) else target]
    return links.transfer_s(message_bytes)


TICKS_PER_S = 10**12
"""The clock counts whole picoseconds, so that instants that are equal on paper compare as equal."""

Move = tuple[str, int, int]
"""Kind ("F" or "B"), place of the micro-batch in the stream, chunk."""


def next_virtual_stage(kind: str, stage: int, chunk: int, num_stages: int, num_chunks: int) -> tuple[int, int] | None:
    """Return the (stage, chunk) that receives the result of a forward or backward; `None` after the last one.

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


def group_micro_batches(
    stream: Sequence[Slot], buckets: Sequence[BucketLoad], num_chunks: int, room_bytes: Sequence[int] | None
) -> list[range]:
    """Cut the stream into groups that pass through a chunk together, before the next chunk begins.

    Groups have S micro-batches, as in Megatron-LM's interleaved schedule. The rest joins the last group: a group of
    fewer than S would leave stages idle before each of its chunks. If a stage cannot hold all earlier chunks of a group
    plus one last chunk, the group is cut short.

    Args:
        stream: the micro-batches in the order in which they enter the pipeline.
        buckets: the loads of all buckets.
        num_chunks: virtual stages of a device.
        room_bytes: bytes for activations on each stage; `None` for no limit.

    Returns:
        ranges of places in the stream.
    """
    num_stages = buckets[0].num_stages

    def fits(members: range) -> bool:
        if room_bytes is None:
            return True
        for stage, room in enumerate(room_bytes):
            loads = [buckets[stream[place].bucket] for place in members]
            lasts = [load.chunk_bytes(stage, num_chunks - 1, num_chunks) for load in loads]
            if sum(load.activation_bytes[stage] for load in loads) - sum(lasts) + max(lasts) > room:
                return False
        return True

    last_of_step = {slot.step: place for place, slot in enumerate(stream)}
    groups, start = [], 0
    while start < len(stream):
        # Not beyond a step: a later chunk of this group may be what the next step waits for.
        left = last_of_step[stream[start].step] + 1 - start
        # The largest size that fits: all that is left if it makes less than two groups, else S or fewer.
        sizes = [*([left] if left < 2 * num_stages else []), *range(min(num_stages, left), 0, -1)]
        stop = start + next(size for size in sizes if size == 1 or fits(range(start, start + size)))
        groups.append(range(start, stop))
        start = stop
    return groups


@dataclass(slots=True)
class _Device:
    """What one device has run and holds; positions count its forwards and backwards, each in their fixed order."""

    arrived: set[Move] = field(default_factory=set)
    next_forward: int = 0
    next_backward: int = 0
    held_bytes: int = 0
    is_busy: bool = False
    moves: list[Move] = field(default_factory=list)


class ListScheduler:
    """Runs the clock and records the order of each device.

    Args:
        stream: the micro-batches in the order in which they enter the pipeline.
        buckets: the loads of all buckets.
        groups: the places in the stream that pass through a chunk together, as `group_micro_batches` returns them.
        num_chunks: virtual stages of a device; virtual stage `chunk * S + stage` follows the one before.
        links: the links between neighbouring stages.
        caps: chunks of micro-batches in flight on each stage, between which a device alternates, on a clock on which
            each move takes one tick and messages none (the textbook order, whatever the latencies); `None` for as many
            as there is room for, a backward that is ready going first, on the real clock.
        room_bytes: bytes for activations on each stage; `None` for no limit.
    """

    def __init__(
        self,
        stream: Sequence[Slot],
        buckets: Sequence[BucketLoad],
        *,
        groups: Sequence[range],
        num_chunks: int,
        links: Links,
        caps: Sequence[int] | None,
        room_bytes: Sequence[int] | None,
    ) -> None:
        self._stream, self._buckets, self._links = stream, buckets, links
        self._num_stages, self._num_chunks = buckets[0].num_stages, num_chunks
        self._caps, self._room_bytes = caps, room_bytes
        chunks, stages = range(num_chunks), range(self._num_stages)
        self._forwards: list[Move] = [("F", place, chunk) for group in groups for chunk in chunks for place in group]
        # Gradients leave the last chunk first.
        self._backwards: list[Move] = [
            ("B", place, chunk) for group in groups for chunk in reversed(chunks) for place in group
        ]
        self._bytes = [
            [[load.chunk_bytes(stage, chunk, num_chunks) for chunk in chunks] for stage in stages] for load in buckets
        ]
        self._devices = [_Device() for _ in stages]
        self._events: list[tuple[int, int, int, Move]] = []
        """(tick, 0 for an end of a move or 1 for an arrival, device, move)."""
        self._link_free: dict[tuple[int, int], int] = {}
        self._places_of: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, slot in enumerate(stream):
            self._places_of[slot.bucket, slot.step].append(place)
        self._backwards_left = Counter({of: len(places) for of, places in self._places_of.items()})

    def run(self) -> list[list[Move]]:
        """Return what each device runs, in order."""
        # Inputs of the first virtual stage are there from the start; later chunks wait for the last stage.
        for bucket, step in self._places_of:
            if step == 0:
                self._open_step(bucket, step)
        self._start_next(0, 0)
        now = 0
        # If all devices wait, no event is left: then one backward goes ahead (see the top of this file).
        while self._events or any(
            self._start_next(now, index, stops_waiting=True) for index in range(self._num_stages)
        ):
            now = self._events[0][0]
            touched = set()
            # All that happens at one instant is known before anything starts, so that a backward goes first.
            while self._events and self._events[0][0] == now:
                _, is_arrival, device, move = heapq.heappop(self._events)
                if is_arrival:
                    self._devices[device].arrived.add(move)
                else:
                    self._finish(now, device, move)
                touched.add(device)
            for device in sorted(touched):
                self._start_next(now, device)
        assert all(len(device.moves) == 2 * len(self._forwards) for device in self._devices), (
            "scheduling came to a halt"
        )
        return [device.moves for device in self._devices]

    def _start_next(self, now: int, index: int, *, stops_waiting: bool = False) -> bool:
        """Start the next move of a free device and return whether it did; it may have to wait for an input or for room.

        With `stops_waiting` a backward that is ready does not wait for a forward under the caps.
        """
        device = self._devices[index]
        if device.is_busy:
            return False
        forward = self._forwards[device.next_forward] if device.next_forward < len(self._forwards) else None
        if forward is not None and self._caps is not None:
            in_flight = device.next_forward - device.next_backward
            forward = forward if in_flight < self._caps[index] else None
        if forward is not None and self._room_bytes is not None:
            needed_bytes = self._bytes[self._stream[forward[1]].bucket][index][forward[2]]
            forward = forward if device.held_bytes + needed_bytes <= self._room_bytes[index] else None
        waits_for_forward = False
        if forward is not None and self._caps is not None and not stops_waiting:
            # Under caps a device fills up with forwards before it runs backwards (1F1B's warm-up), but it does not wait
            # for a forward of a step that has not begun.
            bucket, _, step = self._stream[forward[1]]
            waits_for_forward = step == 0 or not self._backwards_left[bucket, step - 1]

        backward = self._backwards[device.next_backward] if device.next_backward < len(self._backwards) else None
        if backward is not None and backward in device.arrived and not waits_for_forward:
            move = backward
            device.next_backward += 1
        elif forward is not None and forward in device.arrived:
            move = forward
            device.next_forward += 1
            device.held_bytes += self._bytes[self._stream[move[1]].bucket][index][move[2]]
        else:
            return False
        device.is_busy = True
        device.moves.append(move)
        ticks = 1
        if self._caps is None:
            kind, place, _ = move
            slot = self._stream[place]
            load = self._buckets[slot.bucket]
            ticks = round((load.forward_s if kind == "F" else load.backward_s)[index] * TICKS_PER_S)
            if load.weights:
                ticks = round(ticks * load.weights[slot.micro_batch])
        heapq.heappush(self._events, (now + ticks, 0, index, move))
        return True

    def _finish(self, now: int, index: int, move: Move) -> None:
        """End a move and pass its result on."""
        kind, place, chunk = move
        slot = self._stream[place]
        device = self._devices[index]
        device.is_busy = False
        if kind == "B":
            device.held_bytes -= self._bytes[slot.bucket][index][chunk]
        target = next_virtual_stage(kind, index, chunk, self._num_stages, self._num_chunks)
        if target is not None:
            ticks = 0
            if self._caps is None:
                seconds = message_s(self._links, index, target[0], self._buckets[slot.bucket].output_bytes)
                ticks = round(seconds * TICKS_PER_S)
            # Each direction of a link carries one message at a time, in the order in which they were sent.
            arrival = max(now, self._link_free.get((index, target[0]), 0)) + ticks
            self._link_free[index, target[0]] = arrival
            heapq.heappush(self._events, (arrival, 1, target[0], (kind, place, target[1])))
        elif kind == "F":
            # The backward of the loss can begin on the same device.
            device.arrived.add(("B", place, chunk))
        else:
            self._backwards_left[slot.bucket, slot.step] -= 1
            if not self._backwards_left[slot.bucket, slot.step]:
                self._open_step(slot.bucket, slot.step + 1)

    def _open_step(self, bucket: int, step: int) -> None:
        """Let the first stage launch a bucket's micro-batches of a step."""
        for place in self._places_of.get((bucket, step), ()):
            self._devices[0].arrived.add(("F", place, 0))
