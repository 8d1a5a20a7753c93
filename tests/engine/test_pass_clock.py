"""What passes took: each with its rows, parts of a pipeline added up, and nothing of the step before."""

from __future__ import annotations

import time

import torch

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.work import PassClock, TaskInPass, rows_of
from tests.parallel.replicas.dispatch_cases import batches_of


def test_a_pass_is_timed_with_the_rows_of_each_of_its_tasks() -> None:
    micro_batches = ChunkPackingCollator().micro_batches(batches_of({"a": [5, 3], "b": [4]}), max_tokens=64)
    clock = PassClock(torch.device("cpu"))
    for micro_batch in micro_batches:
        with clock.timing([micro_batch]):
            time.sleep(0.002)
    times = clock.take()
    (one,) = times.passes
    # The first token of a sequence is predicted by none.
    assert one.passes == ((TaskInPass("a", (5, 3), 6), TaskInPass("b", (4,), 3)),)
    assert times.span_s >= one.seconds >= 0.002
    assert clock.take().passes == (), "a step is reported once"


def test_what_a_pass_waits_for_sums_is_separated_if_it_is_known() -> None:
    (micro_batch,) = ChunkPackingCollator().micro_batches(batches_of({"a": [5]}), max_tokens=64)
    clock, waited_s = PassClock(torch.device("cpu")), [1.0]
    for added_s in (0.0, 2.5):
        with clock.timing([micro_batch], lambda: waited_s[0]):
            waited_s[0] += added_s
    with clock.timing([micro_batch]):
        waited_s[0] += 9.0
    assert [one.waited_s for one in clock.take().passes] == [0.0, 2.5, None]


def test_parts_of_a_pass_add_up_and_a_step_forgets_what_was_not_ended() -> None:
    (micro_batch,) = ChunkPackingCollator().micro_batches(batches_of({"a": [5]}), max_tokens=64)
    clock = PassClock(torch.device("cpu"))
    clock.add((0, 0), 1.0)
    clock.add((0, 1), 9.0)
    clock.add((0, 0), 2.0)
    clock.end((0, 0), [micro_batch])
    clock.spanned(20.0)
    times = clock.take()
    assert [(one.seconds, one.passes) for one in times.passes] == [(3.0, (rows_of(micro_batch),))]
    assert times.span_s == 20.0
    clock.end((0, 1), [micro_batch])
    assert clock.take().passes[0].seconds == 0.0
