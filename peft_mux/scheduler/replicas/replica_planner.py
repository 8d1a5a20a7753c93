"""`ReplicaPlanner`: how long one replica takes for given rows when MuxTune's plan runs them (M §3.3, §3.4).

L Eq. 10 to 12 price a replica by the curve of one layer. A run does not train so: on every replica `plan_tasks` fuses
tasks, packs their rows and orders the passes over stages. Here that plan is the price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.names import Schedule
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.plan import Link
from peft_mux.scheduler.planner.planner import Budget, Outcome, chunks_per_device, plan_tasks
from peft_mux.scheduler.planner.stage_cut import choose_layers
from peft_mux.scheduler.replicas.facts import ReplicaFacts

Rows = tuple[tuple[int, ...], ...]
"""Lengths of the rows of each task, in the order of the planner's tasks; empty for a task without any."""


class ReplicaPlanner:
    """Plans what single replicas run, and remembers each plan.

    Args:
        facts: what the costs of a replica depend on; its loads are the tasks of the run with their whole batches.
        max_tokens: most tokens of one pass, as the run has it; only a longer sequence makes a longer pass.
        policy: how tasks are put together on each replica, one of `policies.POLICIES` that runs all tasks in a step.
        schedule: the schedule of replicas with several stages.

    Links between stages are `ReplicaFacts.stage_links`; by default those of a replica on the first devices.

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
        self.facts, self.max_tokens, self.policy = facts, max_tokens, policy
        self.schedule: Schedule = schedule
        self.num_plans = 0
        self._models: dict[ParallelConfig, tuple[CostModel, MemoryModel, int]] = {}
        self._plans: dict[tuple[ParallelConfig, Rows, tuple[Link, ...]], Outcome | None] = {}

    def step_s(
        self, config: ParallelConfig, rows: Sequence[Sequence[int]], links: tuple[Link, ...] | None = None
    ) -> float:
        """Return the seconds of a step of one replica; 0 without rows, inf if no plan fits into memory.

        Args:
            config: how the replica is spread over devices.
            rows: for each task of the facts, the lengths of its rows on this replica.
            links: the links between its stages.
        """
        if not any(rows):
            return 0.0
        outcome = self.plan(config, rows, links)
        if outcome is None:
            return math.inf
        # A replica updates the adapters of all tasks, also of those whose rows of a step lie elsewhere.
        idle = [load for load, lengths in zip(self.facts.loads, rows, strict=True) if not lengths]
        return outcome.step_s + self._models_of(config)[0].optimizer_s(idle)

    def plan(
        self, config: ParallelConfig, rows: Sequence[Sequence[int]], links: tuple[Link, ...] | None = None
    ) -> Outcome | None:
        """Return the plan of one replica; `None` if none fits into memory.

        Args:
            config: how the replica is spread over devices.
            rows: for each task of the facts, the lengths of its rows on this replica; some task has one.
            links: the links between its stages.
        """
        key = config, tuple(map(tuple, rows)), self.facts.stage_links(config) if links is None else links
        if key not in self._plans:
            self.num_plans += 1
            self._plans[key] = self._new_plan(*key)
        return self._plans[key]

    def ready_s(
        self, config: ParallelConfig, rows: Sequence[Sequence[int]], links: tuple[Link, ...] | None = None
    ) -> dict[str, float]:
        """Return for each task the seconds until its last backward pass ends, on all stages of one replica.

        Args:
            config: how the replica is spread over devices.
            rows: for each task of the facts, the lengths of its rows on this replica; a task without rows is ready at
                once. The rows have a plan.
            links: the links between its stages.
        """
        ends_s = {load.name: 0.0 for load in self.facts.loads}
        links = self.facts.stage_links(config) if links is None else links
        outcome = self.plan(config, rows, links) if any(rows) else None
        if outcome is None or outcome.template is None:
            return ends_s
        for span in simulate(outcome.template, outcome.bucket_loads, links=links).spans:
            if span.action.kind == "B":
                for htask in outcome.buckets[span.action.bucket]:
                    for name in outcome.htasks[htask].tasks:
                        ends_s[name] = max(ends_s[name], span.end_s)
        return ends_s

    def _new_plan(self, config: ParallelConfig, rows: Rows, links: tuple[Link, ...]) -> Outcome | None:
        facts = self.facts
        cost, memory, longest = self._models_of(config)
        if longest < max(max(lengths, default=0) for lengths in rows):
            return None
        # What each task brings: rows stand for lengths here, and which of them begin with the same tokens is not known.
        loads = [
            replace(
                load,
                lengths=lengths,
                shared=(),
                trie=None,
                num_targets=max(1, round(load.num_targets * sum(lengths) / max(1, load.tokens))),
                longest_row_tokens=min(load.longest, longest),
            )
            for load, lengths in zip(facts.loads, rows, strict=True)
            if lengths
        ]
        limit_bytes = facts.limit_bytes
        if limit_bytes is not None:
            # The adapters of tasks without rows are there as well.
            limit_bytes -= max(
                int(memory.static_bytes(facts.loads, stage) - memory.static_bytes(loads, stage))
                for stage in range(config.pp)
            )
        budget = Budget(
            self.max_tokens,
            limit_bytes,
            schedule=self.schedule,
            num_chunks=chunks_per_device(self.schedule, config.pp),
            links=links,
        )
        try:
            # All of them run: whether they fit together was settled with the candidates.
            return plan_tasks(loads, cost, memory, budget, policy=self.policy, running=[load.name for load in loads])
        except ValueError:
            return None  # micro-batches do not fit, however small

    def _models_of(self, config: ParallelConfig) -> tuple[CostModel, MemoryModel, int]:
        """Return the cost and memory model of a configuration, and the longest row that it holds."""
        if config not in self._models:
            facts = self.facts
            memory = facts.memory_of(config)
            link = facts.tensor_link(config.tp)
            even = CostModel(
                facts.profile, facts.shape, num_stages=config.pp, devices_per_stage=config.tp, tensor_link=link
            )
            # Weights are cut once, for the batch of all tasks, whatever each step brings.
            layers = choose_layers(facts.loads, even, memory, facts.limit_bytes, max_tokens=self.max_tokens)
            cost = replace(even, layers_per_stage=layers)
            longest = facts.token_limits([config]).get(config, 0)
            self._models[config] = cost, replace(memory, layers_per_stage=layers), longest
        return self._models[config]
