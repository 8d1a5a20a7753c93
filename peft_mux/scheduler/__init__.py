"""Planning in pure Python: what runs together, when, and in how much memory.

`plan_tasks` decides which tasks share their passes, and in which order stages run them (MuxTune). `plan_deployment`
decides which replicas to deploy, and `dispatch` which of them trains which sequences of a step (LobRA). Each returns a
frozen value. The `Plan` of a run adds what only the run knows, and travels as JSON.

The papers' terms, from a task to a plan, and where they are (`docs/paper_map.md` has every section)::

    MuxTune
      task                 batch lengths and adapter sizes        costs/loads.py       TaskLoad
        | costs            latency, Eq. 3 and 4                   costs/latency.py     CostModel, from a
        |                                                         costs/profile.py     Profile, measured or analytic
        |                  memory, Eq. 5                          costs/memory.py      MemoryModel
        |                  admission (who waits)                  planner/planner.py   admit
        v fusion           Eq. 6: tasks that share every pass     planner/fusion.py    fuse
      hTask                                                       plan.py              HTask
        |                  policies to compare with               planner/policies.py  POLICIES
        v grouping         Eq. 7: hTasks on one clock             planner/fusion.py    group
      bucket               C micro-batches on S stages            plan.py              BucketLoad
        |
        |- between stages, section 3.4.1: pipeline template       pipeline/template.py build_template
        |    its list scheduling; time line, windows, bounds      pipeline/list_scheduler.py, simulator.py
        |- inside a stage, section 3.4.2: Algorithm 1, subgraphs  subgraphs.py         LaunchQueue, turn_groups
        v
      plan                 all of it: planner/planner.py          plan.py              Plan, shown by plan_views.py
    LobRA
      replica              <tensor, pipeline> parallel sizes      parallel_layout.py   ParallelConfig
        |                  step time, Eq. 10 to 12                replicas/            ReplicaTimeModel
        v deployment       Eq. 1 and 2, Theorem 1                 deployment/search.py plan_deployment
      deployment plan                                             deployment/deployment_plan.py DeploymentPlan
        |                  lengths to buckets, Eq. 4              dispatching/bucketing.py
        v                  balanced dispatch of a step, Eq. 3     dispatching/dispatch.py

A bucket is a group of hTasks in MuxTune and a range of sequence lengths in LobRA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft_mux.scheduler.costs.hardware import Cluster, Device, parse_devices
    from peft_mux.scheduler.costs.latency import CostModel
    from peft_mux.scheduler.costs.loads import AdapterLoad, ModelShape, TaskLoad
    from peft_mux.scheduler.costs.memory import MemoryModel
    from peft_mux.scheduler.costs.profile import Profile, analytic_profile
    from peft_mux.scheduler.deployment.deployment_plan import DeploymentPlan
    from peft_mux.scheduler.deployment.search import plan_deployment
    from peft_mux.scheduler.dispatching.bucketing import Bucketing, bucket_boundaries
    from peft_mux.scheduler.dispatching.dispatch import Dispatch, dispatch
    from peft_mux.scheduler.parallel_layout import ParallelConfig
    from peft_mux.scheduler.pipeline.simulator import Simulation
    from peft_mux.scheduler.plan import (
        BucketLoad,
        HTask,
        Link,
        MemoryEstimate,
        PipelineTemplate,
        PlannedPass,
        TaskShare,
        Waiting,
    )
    from peft_mux.scheduler.plan_views import Plan
    from peft_mux.scheduler.planner.planner import Budget, DoesNotFitError, Outcome, plan_tasks
    from peft_mux.scheduler.planner.policies import POLICIES, Partition, Policy, policy_named, register_policy
    from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel

_NAMES = {
    "costs.hardware": "Cluster Device parse_devices",
    "costs.latency": "CostModel",
    "costs.loads": "AdapterLoad ModelShape TaskLoad",
    "costs.memory": "MemoryModel",
    "costs.profile": "Profile analytic_profile",
    "deployment.deployment_plan": "DeploymentPlan",
    "deployment.search": "plan_deployment",
    "dispatching.bucketing": "Bucketing bucket_boundaries",
    "dispatching.dispatch": "Dispatch dispatch",
    "parallel_layout": "ParallelConfig",
    "pipeline.simulator": "Simulation",
    "plan": "BucketLoad HTask Link MemoryEstimate PipelineTemplate PlannedPass TaskShare Waiting",
    "plan_views": "Plan",
    "planner.planner": "Budget DoesNotFitError Outcome plan_tasks",
    "planner.policies": "POLICIES Partition Policy policy_named register_policy",
    "replicas.time_model": "ReplicaGroup ReplicaTimeModel",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

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
    """List the public names, also those not used yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import peft_mux.scheduler` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'peft_mux.scheduler' has no attribute {name!r}")
    return getattr(importlib.import_module(f"peft_mux.scheduler.{_HOMES[name]}"), name)
