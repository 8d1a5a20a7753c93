"""A link: what a message takes, and which numbers are refused."""

from __future__ import annotations

import math

import pytest

from peft_mux.scheduler.costs.hardware import Link, parse_devices
from peft_mux.scheduler.pipeline.load import LinkMap


def test_a_message_takes_the_latency_and_its_bytes_over_the_bandwidth() -> None:
    link = Link(latency_s=1e-5, bytes_per_s=1e9)
    assert link.transfer_s(1e9) == pytest.approx(1.00001)
    assert link.transfer_s(0) == 1e-5


def test_a_link_of_infinite_bandwidth_takes_its_latency_alone() -> None:
    assert Link(0.25, math.inf).transfer_s(10**12) == 0.25


def test_a_link_of_a_cluster_joins_the_stages_of_a_pipeline() -> None:
    link = parse_devices("4xA40").intra_node
    assert LinkMap.of(link, 4, 1).seconds(1, 2, 10**9) == link.transfer_s(10**9)
    assert LinkMap.of(link, 4, 1).seconds(2, 2, 10**9) == 0.0


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "field"),
    [
        (-1.0, 1.0, "latency_s is -1.0"),
        (math.inf, 1.0, "latency_s is inf"),
        (math.nan, 1.0, "latency_s is nan"),
        (0.0, 0.0, "bytes_per_s is 0.0"),
        (0.0, math.nan, "bytes_per_s is nan"),
    ],
)
def test_a_link_that_cannot_be_is_refused_by_field(latency_s: float, bytes_per_s: float, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}; allowed: "):
        Link(latency_s, bytes_per_s)
