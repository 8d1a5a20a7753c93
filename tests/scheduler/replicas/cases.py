"""A backbone, devices and tasks whose replicas the tests of costs and deployment share."""

from __future__ import annotations

from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.costs.loads import AdapterLoad, ModelShape, TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.facts import ReplicaFacts

SHAPE_7B = ModelShape(32, 4096, 11008, 4096, 4096, 32000, backbone_bytes=13_476_839_424, activation_bytes=2)
CLUSTER = parse_devices("16xA100-40GB")
ONE, TWO, EIGHT = ParallelConfig(1, 1), ParallelConfig(2, 1), ParallelConfig(8, 1)


def load(name: str, lengths: tuple[int, ...], rank: int = 16) -> TaskLoad:
    adapters = tuple(AdapterLoad(rank, 8192) for _ in range(4))
    return TaskLoad(name, lengths, sum(lengths) // 2, adapters, 32 * 4 * rank * 8192)


LOADS = (load("chat", (200, 300, 90, 120) * 16), load("books", (16000, 4000, 700, 900)))
FACTS = ReplicaFacts(
    SHAPE_7B,
    analytic_profile(CLUSTER.device, SHAPE_7B),
    LOADS,
    MemoryModel(SHAPE_7B),
    CLUSTER.device.memory_bytes,
    pass_tokens=4096,
    links=CLUSTER,
)
