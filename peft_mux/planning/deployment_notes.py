"""What stands beside a planned deployment: configurations, the paper's baselines, and remarks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from peft_mux.planning.replica_facts import LayerProfile
from peft_mux.scheduler.deployment.baselines import Baseline, lobra_sequential, task_fused, task_sequential
from peft_mux.scheduler.deployment.composed.compose import ComposedDeployment
from peft_mux.scheduler.deployment.composed.pricing import PricedDeployment
from peft_mux.scheduler.deployment.plan import DeploymentPlan
from peft_mux.scheduler.deployment.report import Alternative, ConfigRow, PlannedReplicas, ReplicaRow
from peft_mux.scheduler.deployment.space import DEFAULT_NUM_MICRO_BATCHES
from peft_mux.scheduler.deployment.task_lengths import TaskLengths
from peft_mux.scheduler.dispatching.dispatch import dispatch
from peft_mux.scheduler.replicas.configs import DeployableTimeModel
from peft_mux.scheduler.replicas.costs import ReplicaFacts, memory_tokens
from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel

_NUM_LENGTHS = 4
"""At which configurations are compared."""
_BUDGET_S_OF_A_TASK = 2.0
"""For planning a task alone, which only stands beside the plan."""
_DATA_SHEETS = "from data sheets, as no profile was measured: good for comparing plans rather than for seconds"


def compared_lengths(plan: DeploymentPlan) -> tuple[int, ...]:
    """Return some of the expected batch's padded lengths, the longest among them."""
    boundaries = plan.bucketing.boundaries
    places = {len(boundaries) * part // _NUM_LENGTHS - 1 for part in range(1, _NUM_LENGTHS + 1)}
    return tuple(boundaries[place] for place in sorted(places) if place >= 0)


def config_rows(
    facts: ReplicaFacts, plan: DeploymentPlan, time_model: ReplicaTimeModel, measured: LayerProfile | None
) -> tuple[ConfigRow, ...]:
    """Return the table of configurations (L Table 3).

    Args:
        facts: what the costs of the run's replicas depend on.
        plan: the deployment that was chosen.
        time_model: the time model of one replica.
        measured: the files that the time model was read from, if any.
    """
    lengths = compared_lengths(plan)
    is_table = measured is not None and measured.max_tokens is not None
    return tuple(
        ConfigRow(
            config,
            time_model.max_tokens[config] if is_table else memory_tokens(facts, config),
            time_model.max_tokens[config],
            tuple(time_model.throughput(config, length, DEFAULT_NUM_MICRO_BATCHES) for length in lengths),
            config in plan.configurations,
        )
        for config in time_model.configurations
    )


def alternatives(
    tasks: Sequence[TaskLengths],
    plan: DeploymentPlan,
    time_model: DeployableTimeModel,
    interval: int,
    equal: PricedDeployment | None = None,
) -> tuple[Alternative, ...]:
    """Return the baselines of L section 5.1 on the same devices.

    Args:
        tasks: the tasks that are trained, each with a sample of its lengths.
        plan: the deployment that was chosen.
        time_model: the times that it was chosen by, and that the baselines are given.
        interval: distance of candidate boundaries of buckets, in tokens.
        equal: the fastest equal replicas by whole plans, where deployments were compared by these: Task-Fused then.
    """
    num_gpus = plan.num_gpus
    # The same replicas without balancing: L Figure 4(c).
    by_length = dispatch(plan.groups, plan.bucketing, time_model, policy="length")
    found = [
        Alternative("length-based dispatch", (plan.layout,), by_length.makespan_s, by_length.makespan_s * num_gpus)
    ]
    # One search for each task: with the full time for each, the comparison would outlast the plan.
    quick = functools.partial(lobra_sequential, budget_s=_BUDGET_S_OF_A_TASK, time_limit_s=_BUDGET_S_OF_A_TASK)
    ways = {"Task-Fused": task_fused, "Task-Sequential": task_sequential, "LobRA-Sequential": quick}
    if equal is not None:
        found.append(Alternative("Task-Fused", (equal.layout,), equal.step_s, equal.step_s * num_gpus))
        del ways["Task-Fused"]
    for name, way in ways.items():
        try:
            found.append(Alternative.from_baseline(way(tasks, num_gpus, time_model, interval=interval), num_gpus))
        except ValueError as error:
            # That a baseline cannot hold the sequences is a result too, and stands in the table with its reason.
            found.append(Alternative(name, (), None, None, str(error)))
    return tuple(found)


def planned_replicas(composed: ComposedDeployment) -> PlannedReplicas:
    """Return what runs on the replicas, as the report shows it.

    Args:
        composed: the deployment, priced by the plans of its replicas.
    """
    rows = tuple(
        ReplicaRow(
            config=replica.config,
            num_replicas=replica.num_replicas,
            num_sequences=sum(replica.counts),
            htasks=() if (outcome := replica.outcome) is None else tuple(htask.tasks for htask in outcome.htasks),
            micro_batches=() if outcome is None else tuple(htask.micro_batches for htask in outcome.htasks),
            num_buckets=0 if outcome is None else len(outcome.buckets),
            step_s=replica.step_s,
        )
        for replica in composed.chosen.replicas
    )
    return PlannedReplicas(
        rows=rows,
        step_s=composed.chosen.step_s,
        single_layout=composed.single.layout,
        single_step_s=composed.single.step_s,
        fit_error=composed.fit_error,
        num_priced=composed.num_priced,
        num_plans=composed.num_plans,
        num_unplanned=composed.num_unplanned,
        planning_s=composed.planning_s,
    )


def times_from(facts: ReplicaFacts, measured: LayerProfile | None) -> str:
    """Return in words where the times come from."""
    if measured is not None:
        return f"layer times measured, from {Path(measured.layer_times).name}"
    if facts.profile.source == "measured":
        known = "from data sheets" if facts.links is not None else "measured" if facts.profile.link else "not known"
        return f"a profile measured on {facts.profile.device}; links between devices {known}"
    return _DATA_SHEETS


def notes_on(
    facts: ReplicaFacts, plan: DeploymentPlan, fused: Baseline | None, measured: LayerProfile | None
) -> tuple[str, ...]:
    """Return what a reader of the report should know.

    Args:
        facts: what the costs of the run's replicas depend on.
        plan: the deployment that was chosen.
        fused: the best equal replicas, if any hold all sequences.
        measured: the files that the time model was read from, if any.
    """
    notes = []
    if fused is not None and fused.gpu_seconds < plan.gpu_seconds:
        layout = ", ".join(map(str, fused.deployments[0]))
        notes.append(
            f"equal replicas, {layout}, are expected to be faster here: each replica has few sequences, and "
            "deployments are chosen as if it had many (L Appendix A)"
        )
    if facts.limit_bytes is None:
        notes.append("memory is not limited here: every replica holds every sequence; set memory_limit_gib for a limit")
    if measured is None:
        notes.append(
            f"passes hold at most {max(facts.pass_tokens, facts.longest)} tokens (max_tokens_per_micro_batch, or the "
            "longest sequence)"
        )
    if facts.links is None and facts.profile.link is None:
        notes.append(
            "no link between these devices is known, so tensor parallelism looks faster than it is: measure one with"
            " peft-mux profile in several processes, or name the devices"
        )
    notes.append("the exchange of gradients between replicas and of states between stages is in no time, as in L")
    return tuple(notes)
