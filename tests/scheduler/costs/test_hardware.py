"""Devices, links, and the text that names a cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from peft_mux.scheduler.costs.hardware import DEVICES, parse_devices
from peft_mux.scheduler.pipeline.list_scheduler import message_s
from peft_mux.scheduler.plan import Link


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_count_and_a_name_make_a_cluster_of_nodes_of_eight_unless_said_otherwise(name: str) -> None:
    for text, num_devices, per_node in ((f"5x{name}", 5, 5), (f" 16 * {name.lower()} ", 16, 8), (f"3x4x{name}", 12, 4)):
        cluster = parse_devices(text)
        assert (cluster.device.name, cluster.num_devices, cluster.devices_per_node) == (name, num_devices, per_node)
        assert cluster.link(0, per_node - 1) == cluster.intra_node
        assert cluster.link(per_node - 1, per_node) == cluster.inter_node


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


def test_a_message_takes_the_latency_and_its_bytes_over_the_bandwidth() -> None:
    link = Link(latency_s=1e-5, bytes_per_s=1e9)
    assert link.transfer_s(1e9) == pytest.approx(1.00001)
    assert link.transfer_s(0) == 1e-5
    assert Link(0.25, math.inf).transfer_s(10**12) == 0.25
    assert (message_s(link, 1, 2, 10**9), message_s(link, 2, 2, 10**9)) == (link.transfer_s(10**9), 0.0)

    there, back = (message_s((link, Link(0.0, 1e9), Link(0.0, 5e8)), *ends, 10**9) for ends in ((2, 0), (1, 0)))
    assert (there, back) == (2.0, link.transfer_s(10**9)), "of each stage to the next, the last one's to the first"


@pytest.mark.parametrize(
    ("ports", "tp", "num_stages", "first", "tensor", "stages"),
    [
        # 8 nodes of 8 H100: 380 GB/s within a node, 25 GB/s a port. A ring over whole nodes uses all ports.
        (8, 8, 2, 0, 380, [25, 25]),
        (8, 16, 2, 0, 200, [25, 25]),
        (8, 12, 1, 0, 100, []),  # nodes have 8 and 4 of its ranks: 4 of the ports
        (8, 3, 2, 6, 25, [25, 25]),  # 6 7|8 9 10 11: one rank of the first stage is on the second node
        (2, 16, 2, 0, 50, [6.25, 6.25]),  # 8 senders share 2 ports
        (2, 1, 2, 7, 380, [25, 25]),
        (None, 1, 4, 0, 380, [380] * 4),
        (None, 1, 4, 6, 380, [380, 25, 380, 25]),
        (8, 2, 3, 0, 380, [380] * 3),
        (8, 2, 3, 6, 380, [25, 380, 25]),
        (8, 2, 3, 4, 380, [380, 25, 25]),
        (8, 1, 16, 0, 380, ([380] * 7 + [25]) * 2),
    ],
)
def test_rings_between_nodes_use_all_ports_and_stages_the_links_where_they_lie(
    ports: int | None, tp: int, num_stages: int, first: int, tensor: float, stages: list[float]
) -> None:
    cluster = replace(parse_devices("8x8xH100-80GB"), ports_per_node=ports)
    assert cluster.tensor_link(tp).bytes_per_s == tensor * 1e9
    assert [link.bytes_per_s / 1e9 for link in cluster.stage_links(tp, num_stages, first)] == stages


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
