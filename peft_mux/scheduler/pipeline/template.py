"""The pipeline template: what each stage runs, in order, over all buckets (M §3.4.1, Figure 10).

A template is a value: the engine executes its lists, the simulator times them, drawings show them. Memory depends
on the order alone, so a template that fits in simulation fits whatever the real latencies are.

`gpipe`: all forwards, then all backwards, in the given order of buckets; under a memory limit in waves, each as
long as every stage can hold. `1f1b`: the micro-batches of all buckets one after another in the given order, not
drained between buckets, at most S - s of them in flight on stage s (counted from 0). `interleaved_1f1b`:
Megatron-LM's order with `num_chunks` virtual stages per device, at most 2 (S - 1 - s) + (num_chunks - 1) g + 1
chunks in flight, g being the longest group (`group_micro_batches`; S in Megatron-LM). `mux`: M's template:

1. buckets by first-stage latency, longest first (ties by index);
2. micro-batches of a bucket one after another;
3. forwards launched eagerly, as many in flight as memory holds, a backward that is ready going first.

M delays a launch at the first stage if any stage would run out of memory. Here each stage delays its own
forwards, which never launches later than M's rule and keeps the same limits. M does not say what its template is
on virtual stages: here `mux` with several chunks keeps rules 1 and 2 in the interleaved order with its bound on
chunks in flight. Launching more eagerly there put forwards of later groups before chunks that others wait for,
and made simulated iterations longer.

A template of several steps is not drained between them, as M's is after each iteration. Adapters of tasks are disjoint,
so before the forwards of a bucket's step k + 1 only step k of that bucket has to end, while other buckets may still run
theirs. Its last backward on the first stage ends it on all stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.scheduler.names import SCHEDULES, Schedule
from peft_mux.scheduler.pipeline.list_scheduler import Links, ListScheduler, Move, group_micro_batches
from peft_mux.scheduler.plan import Action, BucketLoad, PipelineTemplate, Slot


def build_template(
    buckets: Sequence[BucketLoad],
    schedule: Schedule,
    *,
    num_chunks: int = 1,
    memory_limit_bytes: Sequence[int] | None = None,
    static_bytes: Sequence[int] | None = None,
    links: Links = None,
    num_steps: int = 1,
) -> PipelineTemplate:
    """Order the micro-batches of all buckets on all stages, as the schedule says (see the top of this file).

    Args:
        buckets: the loads of all buckets, all with the same number of stages.
        schedule: the rule that orders actions, one of `SCHEDULES`.
        num_chunks: virtual stages a device; 2 or more for `interleaved_1f1b`, any number for `mux`, 1 for the others.
        memory_limit_bytes: bytes that each stage may hold; `None` for no limit.
        static_bytes: bytes that are always on each stage (weights, adapters, optimizer states); they count against the
            limit.
        links: the links between neighbouring stages, which matters to the order of `mux` with one chunk alone.
        num_steps: steps between which the pipeline is not drained.

    Raises:
        ValueError: for an unknown schedule, loads that disagree, or a memory limit under which one micro-batch of some
            bucket does not fit on some stage.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be {', '.join(SCHEDULES)}, got {schedule!r}.")
    if len({bucket.num_stages for bucket in buckets}) != 1:
        stages = ", ".join(f"{bucket.name!r} with {bucket.num_stages}" for bucket in buckets)
        raise ValueError(f"buckets must be one or more with the same number of stages, got {stages or 'none'}.")
    num_stages = buckets[0].num_stages
    room_bytes = None
    if memory_limit_bytes is not None:
        statics = static_bytes or (0,) * num_stages
        room_bytes = [limit - static for limit, static in zip(memory_limit_bytes, statics, strict=True)]
        for bucket in buckets:
            for stage, room in enumerate(room_bytes):
                if bucket.activation_bytes[stage] > room:
                    raise ValueError(
                        f"bucket {bucket.name!r} on stage {stage}: one micro-batch must take at most {room:,} bytes "
                        f"(memory limit {memory_limit_bytes[stage]:,} less {statics[stage]:,} static), got "
                        f"{bucket.activation_bytes[stage]:,}. Take smaller micro-batches, put fewer tasks into the "
                        "bucket, or use more stages."
                    )
    order = range(len(buckets))
    if schedule == "mux":  # rule 1; a stable sort keeps ties in the order of buckets
        order = sorted(order, key=lambda index: -buckets[index].forward_s[0])
    stream = [
        Slot(index, number, step)
        for step in range(num_steps)
        for index in order
        for number in range(buckets[index].num_micro_batches)
    ]
    if schedule == "gpipe":
        # A wave fits on every stage, so that all stages run the same order.
        orders = [_waves(stream, buckets, room_bytes)] * num_stages
    else:
        # With virtual stages, eager launches made simulated iterations longer (see the top of this file).
        is_eager = schedule == "mux" and num_chunks == 1
        groups = group_micro_batches(stream, buckets, num_chunks, room_bytes)
        # The most chunks in flight on each stage: the warm-up forwards of 1F1B, by Megatron-LM's formula, and the one
        # that alternates with backwards. Groups differ in size; the longest needs most.
        caps = [num_stages - stage for stage in range(num_stages)]
        if num_chunks > 1:
            most = (num_chunks - 1) * max(map(len, groups))
            caps = [2 * (num_stages - 1 - stage) + most + 1 for stage in range(num_stages)]
        # 1F1B orders by counts alone, as in textbooks; what M's template launches depends on the real latencies.
        orders = ListScheduler(
            stream,
            buckets,
            groups=groups,
            num_chunks=num_chunks,
            links=links,
            caps=None if is_eager else caps,
            room_bytes=room_bytes,
        ).run()
    rows = tuple(
        tuple(
            Action(kind, stream[place].bucket, stream[place].micro_batch, stage, chunk, stream[place].step)
            for kind, place, chunk in moves
        )
        for stage, moves in enumerate(orders)
    )
    return PipelineTemplate(schedule, num_stages, num_chunks, rows, num_steps)


def _waves(stream: Sequence[Slot], buckets: Sequence[BucketLoad], room_bytes: Sequence[int] | None) -> list[Move]:
    """Return GPipe's order: all forwards of a step, all backwards; under a limit, in waves that all stages can hold."""
    waves: list[list[int]] = []
    held: list[int] = []
    for place, slot in enumerate(stream):
        needs = buckets[slot.bucket].activation_bytes
        is_new = not waves or stream[waves[-1][-1]].step != slot.step
        if not is_new and room_bytes is not None:
            is_new = any(has + need > room for has, need, room in zip(held, needs, room_bytes, strict=True))
        if is_new:
            waves.append([])
            held = [0] * len(needs)
        waves[-1].append(place)
        held = [has + need for has, need in zip(held, needs, strict=True)]
    return [(kind, place, 0) for wave in waves for kind in "FB" for place in wave]
