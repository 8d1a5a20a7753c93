"""Sums and gatherings take what a ring of messages takes, simulated round by round."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.costs.latency import all_gather_s, all_reduce_s, layer_all_reduces_s, loss_all_reduces_s
from peft_mux.scheduler.costs.memory import ModelShape

LINK = Link(latency_s=0.01, bytes_per_s=1000.0)
SHAPE = ModelShape(4, 64, 160, 64, 32, 100_000, 10**6, 2)


def ring_rounds(num_devices: int, *, reduces: bool) -> int:
    """Return the rounds after which every device of a ring has every part, counted by passing them on."""
    added = [dict.fromkeys(range(num_devices), 1) for _ in range(num_devices)]
    rounds = 0
    if reduces:
        for round_number in range(num_devices - 1):
            sent = [(device - round_number) % num_devices for device in range(num_devices)]
            counts = [added[device][sent[device]] for device in range(num_devices)]
            for device in range(num_devices):
                added[(device + 1) % num_devices][sent[device]] += counts[device]
            rounds += 1
        whole = [{part for part, count in own.items() if count == num_devices} for own in added]
    else:
        whole = [{device} for device in range(num_devices)]
    while any(len(own) < num_devices for own in whole):
        before = [set(own) for own in whole]
        for device in range(num_devices):
            following = (device + 1) % num_devices
            whole[following].add(next(part for part in (*(before[device] - before[following]), *before[device])))
        rounds += 1
    return rounds


@given(st.integers(2, 9), st.integers(0, 10**6))
def test_a_ring_takes_its_rounds_of_one_part_each(num_devices: int, num_bytes: int) -> None:
    round_s = LINK.transfer_s(num_bytes / num_devices)
    assert all_reduce_s(LINK, num_devices, num_bytes) == pytest.approx(ring_rounds(num_devices, reduces=True) * round_s)
    gather_s = all_gather_s(LINK, num_devices, num_bytes)
    assert gather_s == pytest.approx(ring_rounds(num_devices, reduces=False) * round_s)


def test_one_device_and_an_unknown_link_take_no_time() -> None:
    for call in (all_reduce_s, all_gather_s):
        assert call(LINK, 1, 500) == 0.0
        assert call(None, 4, 500) == 0.0


def test_a_layer_sums_its_hidden_states_four_times() -> None:
    expected = 4 * 2 * LINK.transfer_s(30 * 64 * 2 / 2)
    assert layer_all_reduces_s(LINK, 2, SHAPE, 30) == pytest.approx(expected)


def test_a_loss_sums_three_numbers_a_target_and_shard_for_each_block_and_one_gradient() -> None:
    rows = 384  # of a block on a CPU, with half of the words on each device
    targets = 3 * rows + 1
    blocks = [rows, rows, rows, 1]
    expected = sum(2 * LINK.transfer_s(count * 3 * 2 * 4 / 2) for count in blocks)
    expected += 2 * LINK.transfer_s(targets * 64 * 2 / 2)
    assert loss_all_reduces_s(LINK, 2, SHAPE, targets, "cpu") == pytest.approx(expected)
    both = loss_all_reduces_s(LINK, 2, SHAPE, np.array([0.0, targets]), "cpu")
    assert both.tolist() == pytest.approx([0.0, expected])
