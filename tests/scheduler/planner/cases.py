"""Loads and models of a 7B Llama on A40s, for tests of the planner."""

from __future__ import annotations

from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import AdapterLoad, ModelShape, TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.pipeline.simulator import Simulation, simulate
from peft_mux.scheduler.planner.planner import Outcome

LLAMA_7B = ModelShape(32, 4096, 11008, 4096, 4096, 32000, 13_400_000_000, 2)
A40 = parse_devices("4xA40")


def load(name: str, length: int = 128, count: int = 8, *, rank: int = 16, priority: int = 0) -> TaskLoad:
    adapters = tuple(AdapterLoad(rank, 8192) for _ in range(4))
    return TaskLoad(name, (length,) * count, length * count // 2, adapters, 1_000_000 * rank, priority=priority)


def loads_of(pairs: list[tuple[int, int]]) -> list[TaskLoad]:
    """Return the loads t0, t1 and so on of these lengths and counts of rows."""
    return [load(f"t{index}", length, count) for index, (length, count) in enumerate(pairs)]


def models(num_stages: int = 1) -> tuple[CostModel, MemoryModel]:
    profile = analytic_profile(A40.device, LLAMA_7B)
    return CostModel(profile, LLAMA_7B, num_stages=num_stages), MemoryModel(LLAMA_7B, num_stages=num_stages)


def simulated(outcome: Outcome) -> Simulation:
    """Return the simulation of an outcome's template."""
    assert outcome.template is not None
    return simulate(outcome.template, outcome.bucket_loads)


def tasks_of(outcome: Outcome) -> list[str]:
    """Return the names of the tasks that run, sorted."""
    return sorted(name for htask in outcome.htasks for name in htask.tasks)
