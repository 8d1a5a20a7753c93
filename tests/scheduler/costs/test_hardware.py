"""Devices, links, and the text that names a cluster."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.costs.hardware import DEVICES, Link, parse_devices
from peft_mux.scheduler.pipeline.launch import message_s


@given(st.sampled_from(sorted(DEVICES)), st.integers(1, 512))
def test_a_count_and_a_name_make_a_cluster_of_that_many_devices(name: str, count: int) -> None:
    cluster = parse_devices(f"{count}x{name}")
    assert (cluster.device.name, cluster.num_devices) == (name, count)
    assert cluster.devices_per_node == min(count, 8)


def test_nodes_of_a_number_of_devices_may_be_named() -> None:
    cluster = parse_devices("3x4xA100-80GB")
    assert (cluster.num_devices, cluster.devices_per_node) == (12, 4)
    assert cluster.link(3, 4) == cluster.inter_node


@pytest.mark.parametrize("text", ["h200", "1xH200", " 1 x h200 ", "1*H200"])
def test_devices_may_be_spelled_in_several_ways(text: str) -> None:
    assert parse_devices(text) == parse_devices("1xH200")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "4xA100-80",
            r"devices must be.*, got '4xA100-80', whose device 'A100-80' is not known.*Did you mean A100-80GB\?",
        ),
        *(
            (text, "such as 4xA100-80GB")
            for text in ("", "four A40", "4x", "x4", "0xA40", "2x0xA40", "-1xA40", "2x2x2xA40")
        ),
    ],
)
def test_text_that_names_no_cluster_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_devices(text)


def test_devices_of_one_node_are_linked_faster_than_those_of_two() -> None:
    cluster = parse_devices("16xH100-80GB")
    assert cluster.link(0, 7) == cluster.intra_node
    assert cluster.link(7, 8) == cluster.inter_node
    assert cluster.intra_node.bytes_per_s > cluster.inter_node.bytes_per_s


def test_newer_devices_of_one_maker_are_faster_in_every_number() -> None:
    a40, a100, h100, h200 = (DEVICES[name] for name in ("A40", "A100-80GB", "H100-80GB", "H200"))
    for slower, faster in ((a40, a100), (a100, h100)):
        assert slower.flops_per_s * slower.efficiency < faster.flops_per_s * faster.efficiency
        assert slower.memory_bytes_per_s < faster.memory_bytes_per_s
    assert h100.memory_bytes < h200.memory_bytes


def test_a_message_takes_the_latency_and_its_bytes_over_the_bandwidth() -> None:
    link = Link(latency_s=1e-5, bytes_per_s=1e9)
    assert link.transfer_s(1e9) == pytest.approx(1.00001)
    assert link.transfer_s(0) == 1e-5
    assert Link(0.25, math.inf).transfer_s(10**12) == 0.25
    assert (message_s(link, 1, 2, 10**9), message_s(link, 2, 2, 10**9)) == (link.transfer_s(10**9), 0.0)


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "field"),
    [
        (-1.0, 1.0, "latency_s must be .* got -1.0"),
        (math.inf, 1.0, "latency_s must be .* got inf"),
        (0.0, 0.0, "bytes_per_s must be .* got 0.0"),
        (0.0, math.nan, "bytes_per_s must be .* got nan"),
    ],
)
def test_a_link_that_cannot_be_is_refused_by_field(latency_s: float, bytes_per_s: float, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Link(latency_s, bytes_per_s)
