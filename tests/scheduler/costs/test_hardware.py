"""Devices, links and the text that names a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.costs.hardware import DEVICES, Cluster, Device, Link, parse_devices


@given(st.sampled_from(sorted(DEVICES)), st.integers(1, 512))
def test_a_count_and_a_name_make_a_cluster_of_that_many_devices(name: str, count: int) -> None:
    cluster = parse_devices(f"{count}x{name}")
    assert (cluster.device.name, cluster.num_devices) == (name, count)
    assert cluster.devices_per_node == min(count, 8)


@pytest.mark.parametrize("text", ["h200", "1xH200", " 1 x h200 ", "1*H200"])
def test_spelling_of_devices_is_taken_lightly(text: str) -> None:
    assert parse_devices(text) == parse_devices("1xH200")


def test_an_unknown_device_names_those_that_are_known_and_the_closest_one() -> None:
    with pytest.raises(ValueError, match=r"'A100-80'.*A40, A100-40GB.*Did you mean A100-80GB\?"):
        parse_devices("4xA100-80")


@pytest.mark.parametrize("text", ["", "four A40", "4x", "x4", "0xA40", "-1xA40"])
def test_text_that_names_no_cluster_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 4xA100-80GB"):
        parse_devices(text)


def test_devices_of_one_node_are_linked_faster_than_those_of_two() -> None:
    cluster = parse_devices("16xH100-80GB")
    assert cluster.link(0, 7) == cluster.intra_node
    assert cluster.link(7, 8) == cluster.inter_node
    assert cluster.link(0, 7).bytes_per_s > cluster.link(7, 8).bytes_per_s


def test_a_link_to_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="second is 4; allowed: 0 to 3"):
        parse_devices("4xA40").link(0, 4)


def test_newer_devices_of_one_maker_are_faster_in_every_number() -> None:
    a40, a100, h100, h200 = (DEVICES[name] for name in ("A40", "A100-80GB", "H100-80GB", "H200"))
    for slower, faster in ((a40, a100), (a100, h100)):
        assert slower.flops_per_s * slower.efficiency < faster.flops_per_s * faster.efficiency
        assert slower.memory_bytes_per_s < faster.memory_bytes_per_s
    assert h100.memory_bytes < h200.memory_bytes


@pytest.mark.parametrize(
    ("field", "value"), [("memory_bytes", 0), ("flops_per_s", -1.0), ("memory_bytes_per_s", 0.0), ("efficiency", 1.5)]
)
def test_a_device_with_an_impossible_number_is_refused_by_field(field: str, value: float) -> None:
    numbers = {"memory_bytes": 1, "flops_per_s": 1.0, "memory_bytes_per_s": 1.0, "efficiency": 0.5}
    with pytest.raises(ValueError, match=f"{field} is {value}; allowed"):
        Device("none", **{**numbers, field: value})


def test_a_cluster_without_devices_is_refused() -> None:
    link = Link(0.0, 1.0)
    with pytest.raises(ValueError, match="num_devices is 0; allowed: 1 or more"):
        Cluster(DEVICES["A40"], 0, 8, link, link)
