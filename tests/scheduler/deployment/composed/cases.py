"""Small backbones, tasks and devices whose deployments the tests of the composed search share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.costs.memory import MemoryModel, ModelShape
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.deployment.composed import ComposedDeployment, compose_deployment
from peft_mux.scheduler.deployment.plan import DeploymentPlan
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.deployment.space import TaskLengths, joint_sample
from peft_mux.scheduler.replicas.configs import ParallelConfig
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner
from peft_mux.scheduler.replicas.time_model import ReplicaFacts, ReplicaTimeModel, replica_time_model
from tests.scheduler.replicas.cases import load

SHAPE = ModelShape(16, 2048, 5632, 2048, 2048, 32000, backbone_bytes=1_500_000_000, activation_bytes=2)
DEVICES = parse_devices("4xA100-40GB")
CONFIGS = tuple(ParallelConfig(tp, pp) for tp, pp in ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)))
INTERVAL = 256


class Case(NamedTuple):
    """What is planned for, and what one curve chooses."""

    tasks: list[TaskLengths]
    facts: ReplicaFacts
    curve: ReplicaTimeModel
    single: DeploymentPlan

    def planner(self, policy: str = "mux") -> ReplicaPlanner:
        return ReplicaPlanner(self.facts, max_tokens=self.facts.pass_tokens, policy=policy)

    def composed(self, **options: object) -> ComposedDeployment:
        return compose_deployment(
            self.tasks,
            self.single,
            self.curve,
            self.planner(),
            **{"interval": INTERVAL, "budget_s": 600.0, **options},  # type: ignore[arg-type]
        )


def make_case(
    batches: Sequence[Sequence[int]], *, num_gpus: int = 4, limit_bytes: int = 8 * 10**9, pass_tokens: int = 2048
) -> Case:
    """Return the case of these lengths of each task's batch.

    Args:
        batches: the lengths of one typical batch of each task, in tokens.
        num_gpus: devices that may be used.
        limit_bytes: memory of a device.
        pass_tokens: most tokens of a pass.
    """
    loads = tuple(load(f"task-{number}", tuple(lengths)) for number, lengths in enumerate(batches))
    facts = ReplicaFacts(
        SHAPE,
        analytic_profile(DEVICES.device, SHAPE),
        loads,
        MemoryModel(SHAPE),
        limit_bytes,
        pass_tokens=pass_tokens,
        links=DEVICES,
    )
    tasks = [TaskLengths(one.name, one.lengths, len(one.lengths)) for one in loads]
    curve = replica_time_model(facts, [config for config in CONFIGS if config.num_gpus <= num_gpus])
    single = plan_deployment(*joint_sample(tasks), num_gpus, curve, interval=INTERVAL, proposal=False)
    return Case(tasks, facts, curve, single)
