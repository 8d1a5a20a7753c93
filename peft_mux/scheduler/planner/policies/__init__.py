"""How tasks are put together: one file a policy, found by name.

To add one, write its class in a file of its own, with the attributes and the method of `policy.Policy`, and add it to
the tuple below. `plan_tasks`, the argument `planner` of a run and printed plans then know it; no other file names one.
"""

from __future__ import annotations

from peft_mux.scheduler.planner.policies.baselines import Interleaved, Sequential, Together
from peft_mux.scheduler.planner.policies.mux import Mux
from peft_mux.scheduler.planner.policies.policy import (
    Partition,
    Policy,
    policy_named,
    policy_names,
    policy_words,
    register_policy,
    unregister_policy,
)

__all__ = [
    "POLICIES",
    "Partition",
    "Policy",
    "policy_named",
    "policy_names",
    "policy_words",
    "register_policy",
    "unregister_policy",
]

for _policy in (Mux(), Together(), Interleaved(), Sequential()):
    register_policy(_policy)

POLICIES = policy_names()
"""The policies that come with the package; `policy_names()` also lists those that were registered since."""
