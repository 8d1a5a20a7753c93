"""`ReplicaPlanner`: how long one replica takes for given rows when MuxTune's plan runs them (M §3.3, §3.4).

L Eq. 10 to 12 price a replica by the curve of one layer over padded micro-batches. A run does not train so: on every
replica `plan_tasks` fuses tasks, packs their rows and orders the passes over stages. Here that plan is the price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.pipeline.template import Schedule
from peft_mux.scheduler.planner.planner import plan_tasks
from peft_mux.scheduler.planner.policies import policy_named
from peft_mux.scheduler.planner.stage_cut import choose_layers
from peft_mux.scheduler.planner.values import Budget, Outcome
from peft_mux.scheduler.replicas.configs import ParallelConfig
from peft_mux.scheduler.replicas.time_model import ReplicaFacts, memory_of, tensor_link, token_limits

Rows = tuple[tuple[int, ...], ...]
"""Lengths of the rows of each task, in the order of the planner's tasks; empty for a task without any."""


class ReplicaPlanner:
    """Plans what single replicas run, and remembers each plan.

    Args:
        facts: what the costs of a replica depend on; its loads are the tasks of the run with their whole batches.
        max_tokens: most tokens of one pass, as the run has it; only a longer sequence makes a longer pass.
        policy: how tasks are put together on each replica, one of `policies.POLICIES`.
        schedule: the schedule of replicas with several stages.

    Raises:
        ValueError: for an unknown policy, or one that runs a single task at a time: then others wait for its end, and
            a step of all tasks has no plan.

    Attributes:
        facts: as given.
        num_plans: plans that were made; those that were remembered do not count.

    Example:
        >>> planner = ReplicaPlanner(facts, max_tokens=4096)  # doctest: +SKIP
        >>> planner.step_s(ParallelConfig(1, 2), [(200, 300), (), (4000,)])  # doctest: +SKIP
    """

    def __init__(
        self, facts: ReplicaFacts, *, max_tokens: int, policy: str = "mux", schedule: Schedule = "mux"
    ) -> None:
        if policy_named(policy).runs_alone:
            raise ValueError(f"policy is {policy!r}; allowed: one that runs all tasks in a step, such as 'mux'.")
        self.facts, self.max_tokens, self.policy = facts, max_tokens, policy
        self.schedule: Schedule = schedule
        self.num_plans = 0
        self._models: dict[ParallelConfig, tuple[CostModel, MemoryModel]] = {}
        self._limits: dict[ParallelConfig, int] = {}
        self._plans: dict[tuple[ParallelConfig, Rows], Outcome | None] = {}

    def step_s(self, config: ParallelConfig, rows: Sequence[Sequence[int]]) -> float:
        """Return the seconds of a step of one replica; 0 without rows, inf where no plan fits into memory.

        Args:
            config: how the replica is spread over devices.
            rows: for each task of the facts, the lengths of its rows on this replica.
        """
        if not any(rows):
            return 0.0
        outcome = self.plan(config, rows)
        if outcome is None:
            return math.inf
        # A replica updates the adapters of all tasks, also of those whose rows of a step lie elsewhere.
        idle = [load for load, own in zip(self.facts.loads, rows, strict=True) if not own]
        return outcome.step_s + self._models_of(config)[0].optimizer_s(idle)

    def plan(self, config: ParallelConfig, rows: Sequence[Sequence[int]]) -> Outcome | None:
        """Return the plan of one replica; `None` where none fits into memory.

        Args:
            config: how the replica is spread over devices.
            rows: for each task of the facts, the lengths of its rows on this replica; some task has one.
        """
        key = config, tuple(tuple(own) for own in rows)
        if key not in self._plans:
            self.num_plans += 1
            self._plans[key] = self._planned(config, key[1])
        return self._plans[key]

    def _planned(self, config: ParallelConfig, rows: Rows) -> Outcome | None:
        longest = self._limit_of(config)
        if longest < max(max(own, default=0) for own in rows):
            return None
        loads = [_share(load, own, longest) for load, own in zip(self.facts.loads, rows, strict=True) if own]
        cost, memory = self._models_of(config)
        limit = self.facts.limit_bytes
        budget = Budget(
            self.max_tokens,
            # The adapters of tasks without rows lie there as well.
            None if limit is None else limit - self._bytes_of_others(memory, loads),
            schedule=self.schedule,
            num_chunks=2 if self.schedule == "interleaved_1f1b" and config.pp > 1 else 1,
            links=self._stage_link(config),
        )
        try:
            # All of them run: whether they fit together was settled with the candidates.
            return plan_tasks(loads, cost, memory, budget, policy=self.policy, running=[load.name for load in loads])
        except ValueError:
            return None  # the planner's word for micro-batches that do not fit, however small

    def _models_of(self, config: ParallelConfig) -> tuple[CostModel, MemoryModel]:
        if config not in self._models:
            facts, link = self.facts, tensor_link(self.facts, config.tp)
            memory = memory_of(facts, config)
            sizes: dict[str, Any] = {"num_stages": config.pp, "devices_per_stage": config.tp}
            even = CostModel(facts.profile, facts.shape, tensor_link=link, **sizes)
            # Weights are cut once, for the batch of all tasks, whatever each step brings.
            layers = choose_layers(facts.loads, even, memory, facts.limit_bytes, max_tokens=self.max_tokens)
            cost = CostModel(facts.profile, facts.shape, tensor_link=link, layers_per_stage=layers, **sizes)
            self._models[config] = cost, replace(memory, layers_per_stage=layers)
        return self._models[config]

    def _limit_of(self, config: ParallelConfig) -> int:
        if config not in self._limits:
            self._limits[config] = token_limits(self.facts, [config]).get(config, 0)
        return self._limits[config]

    def _bytes_of_others(self, memory: MemoryModel, loads: Sequence[TaskLoad]) -> int:
        """Return the static bytes of the tasks that have no rows here, on the stage where they are most."""
        return max(
            int(memory.static_bytes(self.facts.loads, stage) - memory.static_bytes(loads, stage))
            for stage in range(memory.num_stages)
        )

    def _stage_link(self, config: ParallelConfig) -> Link | None:
        if config.pp == 1:
            return None
        links = self.facts.links
        if links is None:
            return self.facts.profile.link
        return links.intra_node if config.num_gpus <= links.devices_per_node else links.inter_node


def _share(load: TaskLoad, rows: tuple[int, ...], longest: int) -> TaskLoad:
    """Return what a task brings into the step of a replica that has some of its rows.

    Args:
        load: what it brings into a step of all replicas.
        rows: lengths of its rows on this replica.
        longest: tokens of the longest row that the replica is ever given.
    """
    return replace(
        load,
        lengths=rows,
        # Rows stand for lengths here; which of them begin alike is known of a task's own rows alone.
        shared=(),
        trie=None,
        num_targets=max(1, round(load.num_targets * sum(rows) / max(1, load.tokens))),
        longest_row_tokens=min(load.longest, longest),
    )
