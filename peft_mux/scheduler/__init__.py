"""Planning in pure Python: what runs together, when, and in how much memory.

`plan_tasks` decides which tasks share their passes, and in which order stages run them (MuxTune). `plan_deployment`
decides which replicas to deploy, and `dispatch` which of them trains which sequences of a step (LobRA). Each returns a
frozen value. A run's own `Plan` adds to that of `plan_tasks` what only the run knows, and travels as JSON.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft_mux.scheduler.costs.hardware import Cluster, Device, Link, parse_devices
    from peft_mux.scheduler.costs.latency import CostModel
    from peft_mux.scheduler.costs.loads import AdapterLoad, TaskLoad
    from peft_mux.scheduler.costs.memory import MemoryEstimate, MemoryModel
    from peft_mux.scheduler.costs.model_shape import ModelShape
    from peft_mux.scheduler.costs.profile import Profile, analytic_profile
    from peft_mux.scheduler.deployment.plan import DeploymentPlan
    from peft_mux.scheduler.deployment.search import plan_deployment
    from peft_mux.scheduler.dispatching.bucketing import Bucketing, bucket_boundaries
    from peft_mux.scheduler.dispatching.dispatch import Dispatch, dispatch
    from peft_mux.scheduler.pipeline.load import BucketLoad
    from peft_mux.scheduler.pipeline.simulator import Simulation
    from peft_mux.scheduler.pipeline.template import PipelineTemplate
    from peft_mux.scheduler.plan import Plan
    from peft_mux.scheduler.planner.admission import DoesNotFitError
    from peft_mux.scheduler.planner.planner import plan_tasks
    from peft_mux.scheduler.planner.policies import POLICIES, Partition, Policy, policy_named, register_policy
    from peft_mux.scheduler.planner.values import Budget, HTask, Outcome, PlannedPass, TaskShare, Waiting
    from peft_mux.scheduler.replicas.configs import ParallelConfig, ReplicaGroup
    from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel

_HOMES = {
    "AdapterLoad": "costs.loads",
    "BucketLoad": "pipeline.load",
    "Bucketing": "dispatching.bucketing",
    "Budget": "planner.values",
    "Cluster": "costs.hardware",
    "CostModel": "costs.latency",
    "DeploymentPlan": "deployment.plan",
    "Device": "costs.hardware",
    "Dispatch": "dispatching.dispatch",
    "DoesNotFitError": "planner.admission",
    "HTask": "planner.values",
    "Link": "costs.hardware",
    "MemoryEstimate": "costs.memory",
    "MemoryModel": "costs.memory",
    "ModelShape": "costs.model_shape",
    "Outcome": "planner.values",
    "POLICIES": "planner.policies",
    "ParallelConfig": "replicas.configs",
    "Partition": "planner.policies",
    "PipelineTemplate": "pipeline.template",
    "PlannedPass": "planner.values",
    "Plan": "plan",
    "Policy": "planner.policies",
    "Profile": "costs.profile",
    "ReplicaGroup": "replicas.configs",
    "ReplicaTimeModel": "replicas.time_model",
    "Simulation": "pipeline.simulator",
    "TaskLoad": "costs.loads",
    "TaskShare": "planner.values",
    "Waiting": "planner.values",
    "analytic_profile": "costs.profile",
    "bucket_boundaries": "dispatching.bucketing",
    "dispatch": "dispatching.dispatch",
    "parse_devices": "costs.hardware",
    "plan_deployment": "deployment.search",
    "plan_tasks": "planner.planner",
    "policy_named": "planner.policies",
    "register_policy": "planner.policies",
}

__all__ = [
    "POLICIES",
    "AdapterLoad",
    "BucketLoad",
    "Bucketing",
    "Budget",
    "Cluster",
    "CostModel",
    "DeploymentPlan",
    "Device",
    "Dispatch",
    "DoesNotFitError",
    "HTask",
    "Link",
    "MemoryEstimate",
    "MemoryModel",
    "ModelShape",
    "Outcome",
    "ParallelConfig",
    "Partition",
    "PipelineTemplate",
    "Plan",
    "PlannedPass",
    "Policy",
    "Profile",
    "ReplicaGroup",
    "ReplicaTimeModel",
    "Simulation",
    "TaskLoad",
    "TaskShare",
    "Waiting",
    "analytic_profile",
    "bucket_boundaries",
    "dispatch",
    "parse_devices",
    "plan_deployment",
    "plan_tasks",
    "policy_named",
    "register_policy",
]


def __dir__() -> list[str]:
    """List the public names, used already or not."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import peft_mux.scheduler` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'peft_mux.scheduler' has no attribute {name!r}")
    return getattr(importlib.import_module(f"peft_mux.scheduler.{_HOMES[name]}"), name)
