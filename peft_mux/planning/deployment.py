"""Plans the deployment of a run: which replicas train its tasks fastest, and whether moving pays off (L section 4.2).

The counterpart of `Planner` for unequal replicas. It reads shapes and lengths, no weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import ConfigError
from peft_mux.planning.planner import Planner
from peft_mux.planning.replica_facts import LayerProfile, measured_time_model, run_facts, time_model_of
from peft_mux.planning.task_loads import typical_lengths
from peft_mux.scheduler.costs.hardware import Cluster, parse_devices
from peft_mux.scheduler.deployment.baselines import Baseline, lobra_sequential, task_fused, task_sequential
from peft_mux.scheduler.deployment.composed import ComposedDeployment, compose_deployment
from peft_mux.scheduler.deployment.deployment_plan import (
    DEFAULT_RESTART_S,
    DEFAULT_STORAGE_GB_PER_S,
    DeploymentPlan,
    FailureOverhead,
    Redeployment,
    decide_redeployment,
)
from peft_mux.scheduler.deployment.deployment_report import ConfigRow, DeploymentReport
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.deployment.space import (
    DEFAULT_NUM_MICRO_BATCHES,
    MOST_DEPLOYMENTS,
    TaskLengths,
    candidate_configs,
    count_plans,
    joint_sample,
)
from peft_mux.scheduler.dispatching.bucketing import interval_tokens
from peft_mux.scheduler.dispatching.dispatch import dispatch
from peft_mux.scheduler.parallel_layout import ParallelLayout
from peft_mux.scheduler.planner.policies import policy_named
from peft_mux.scheduler.replicas.exchange import GradientExchange
from peft_mux.scheduler.replicas.facts import ReplicaFacts
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel

_NUM_LENGTHS = 4
"""Number of sequence lengths at which configurations are compared."""
_BATCHES_IN_SAMPLE = 100
"""Global batches in a sample of lengths, as in L section 4.2."""
_BUDGET_S = 8.0
"""Time limit for solving with one curve; reports give the possible gain of problems that were not solved to the end."""
_COMPOSED_BUDGET_S = 12.0
"""Time limit for the search that prices replicas by their plans."""
_TIME_LIMIT_S = 2.5
"""Time limit for solving one deployment."""
_BUDGET_S_OF_A_TASK = 2.0
"""Time limit for planning a task alone, which only serves as a comparison."""
_SAVED_BYTES_PER_PARAMETER = 20
"""Bytes that a checkpoint writes for each adapter parameter, in fp32: weights, two moments of AdamW, and two copies of
the weights, the adapter itself and the last one that was good."""


def report_deployment(
    planner: Planner,
    runs: Sequence[ActiveTask],
    devices: str | Cluster | None = None,
    *,
    measured: LayerProfile | None = None,
    free_exchange: bool = False,
    failures_per_day: float | None = None,
    storage_gb_per_s: float = DEFAULT_STORAGE_GB_PER_S,
    restart_s: float = DEFAULT_RESTART_S,
) -> DeploymentReport:
    """Return the replicas that train these tasks fastest (L Eq. 2), and the alternatives.

    Args:
        planner: the planner of the run, whose shapes and arguments are read.
        runs: the tasks that could take steps.
        devices: the devices to plan for, such as "16xA100-40GB", "4x4xA100-40GB" for 4 nodes of 4, or a `Cluster` with
            its own links; by default those that the run was started on.
        measured: times of one layer at several tensor parallel degrees, in place of a profile of one device.
        free_exchange: whether the exchange of gradients between replicas takes no time, as in L.
        failures_per_day: failures of any device in a day, for the overhead of checkpoints and restarts; more than 0.
        storage_gb_per_s: speed at which checkpoints are written; more than 0.
        restart_s: seconds from a failure to the next step; more than 0.

    Raises:
        ConfigError: for unknown devices, files that cannot be read, numbers about failures that are not more than 0, no
            tasks, or tasks that no replica can hold.
    """
    rates = {"failures_per_day": failures_per_day, "storage_gb_per_s": storage_gb_per_s, "restart_s": restart_s}
    for name, rate in rates.items():
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"{name} must be more than 0, such as 2.5, got {rate:g}. Leave it out if nothing fails.")
    try:
        cluster = None if devices is None else parse_devices(devices)
    except ValueError as error:
        raise ConfigError(f"devices: {error}") from error
    num_devices = planner.args.world_size if cluster is None else cluster.num_devices
    if not runs:
        raise ConfigError("plan --deployment needs at least one task that can run, got none. Register one.")
    facts = run_facts(planner, runs, cluster)
    exchange = None if free_exchange else GradientExchange(facts.loads, facts, _gradient_bytes(planner))
    configs = candidate_configs(facts, num_devices)
    curve = measured_time_model(facts, configs, measured) if measured else time_model_of(facts, configs, runs)
    tasks = _sampled_tasks(runs, curve, num_devices)
    interval = interval_tokens(max(length for task in tasks for length in task.lengths))
    single = _searched(tasks, num_devices, curve, interval, exchange)
    fused = task_fused(tasks, num_devices, curve, interval=interval, exchange=exchange)
    sizes = [config.num_gpus for config in curve.configurations if config.num_gpus <= num_devices]
    # A configuration is proposed by its throughput over many full micro-batches (L Appendix A). If equal replicas win,
    # each replica has few, and others may be faster: all are combined, if deployments of them are not too many.
    if fused.gpu_seconds < single.gpu_seconds and count_plans(num_devices, sizes) <= MOST_DEPLOYMENTS:
        wider = _searched(tasks, num_devices, curve, interval, exchange, proposal=False)
        single = min(single, wider, key=lambda plan: plan.gpu_seconds)
    composed = None if measured else _composed(planner, facts, tasks, single, curve, interval, exchange)
    plan, times = (single, curve) if composed is None else (composed.plan, composed.model)
    boundaries = plan.bucketing.boundaries
    places = {len(boundaries) * part // _NUM_LENGTHS - 1 for part in range(1, _NUM_LENGTHS + 1)}
    lengths = tuple(boundaries[place] for place in sorted(places) if place >= 0)
    limits = curve.max_tokens if measured and measured.max_tokens else None
    # The same replicas without balancing: L Figure 4(c).
    by_length = dispatch(plan.groups, plan.bucketing, times, policy="length")
    unbalanced_s = by_length.makespan_s + plan.exchange_s
    alternatives = [Baseline.of("length-based dispatch", [(plan.groups, unbalanced_s)], num_devices)]
    if composed is not None:  # whole plans are compared, and equal replicas are among them
        alternatives.append(Baseline.of("Task-Fused", [(composed.equal.groups, composed.equal.step_s)], num_devices))
    else:
        alternatives.append(fused)
    # One search for each task: with the full time for each, the comparison would outlast the plan.
    quick = {"budget_s": _BUDGET_S_OF_A_TASK, "time_limit_s": _BUDGET_S_OF_A_TASK}
    ways: tuple[tuple[str, Any, dict[str, float]], ...] = (
        ("Task-Sequential", task_sequential, {}),
        ("LobRA-Sequential", lobra_sequential, quick),
    )
    for name, way, options in ways:
        try:
            alternatives.append(way(tasks, num_devices, times, interval=interval, exchange=exchange, **options))
        except ValueError as error:
            # A baseline that cannot hold the sequences is a result too: the table has it with the reason.
            alternatives.append(Baseline(name, note=str(error)))
    return DeploymentReport(
        plan=plan,
        devices=f"{num_devices} x {facts.profile.device if cluster is None else cluster.device.name}",
        times_from=times_from(facts, measured),
        fit_error=max(fit.mean_relative_error for fit in curve.fits.values()),
        limit_bytes=facts.limit_bytes,
        lengths=lengths,
        # L Table 3.
        configs=tuple(
            ConfigRow(
                config,
                facts.memory_tokens(config) if limits is None else limits[config],
                curve.max_tokens[config],
                tuple(curve.throughput(config, length, DEFAULT_NUM_MICRO_BATCHES) for length in lengths),
                config in plan.configurations,
            )
            for config in curve.configurations
        ),
        by_length=by_length,
        alternatives=tuple(alternatives),
        notes=notes_on(facts, plan, fused if composed is None else None, measured, exchange),
        composed=composed,
        failures=None
        if failures_per_day is None
        else FailureOverhead.of(
            failures_per_day,
            _SAVED_BYTES_PER_PARAMETER * sum(load.trainable_parameters for load in facts.loads),
            restart_s,
            storage_gb_per_s,
        ),
    )


def _gradient_bytes(planner: Planner) -> int:
    return 2 if planner.args.reduce_dtype == "bfloat16" else 4


def redeploy(
    planner: Planner, runs: Sequence[ActiveTask], old: ParallelLayout, *, restart_s: float = DEFAULT_RESTART_S
) -> Redeployment:
    """Return whether moving to other replicas would pay off from now on (L section 5.1, dynamic batches).

    Args:
        planner: the planner of the run, whose shapes and arguments are read.
        runs: the tasks that are still to be trained.
        old: the present replicas; the new ones use as many processes.
        restart_s: seconds that saving adapters and starting again cost; measured if it was done before.

    Raises:
        ConfigError: as `report_deployment`.
    """
    if not runs:
        raise ConfigError("redeploy needs at least one task that is still to be trained, got none.")
    facts = run_facts(planner, runs)
    # The present replicas too, even if they are not candidates: both plans need times from one model.
    configs = tuple(dict.fromkeys((*candidate_configs(facts, old.world_size), *old.replicas)))
    curve = time_model_of(facts, configs, runs)
    tasks = _sampled_tasks(runs, curve, old.world_size)
    interval = interval_tokens(max(length for task in tasks for length in task.lengths))
    exchange = GradientExchange(facts.loads, facts, _gradient_bytes(planner))
    plan = _searched(tasks, old.world_size, curve, interval, exchange)
    # Replicas that cannot hold anything have no price.
    present = curve.groups(Counter(old.replicas))
    composed = _composed(planner, facts, tasks, plan, curve, interval, exchange, [present] if present else [])
    return decide_redeployment(
        old.replicas,
        plan if composed is None else composed.plan,
        curve if composed is None else composed.model,
        remaining=[(run.num_steps - run.step, run.loader.tokens_per_step) for run in runs],
        restart_s=restart_s,
        exchange=exchange,
    )


def _sampled_tasks(runs: Sequence[ActiveTask], time_model: ReplicaTimeModel, num_devices: int) -> list[TaskLengths]:
    """Return a sample of each task's lengths; refuse tasks that no replica on these devices holds, by name."""
    most = max(
        (tokens for config, tokens in time_model.max_tokens.items() if config.num_gpus <= num_devices), default=0
    )
    tasks, faults = [], []
    for run in runs:
        rows, batch_size = run.loader.sample_lengths, run.hyper.train_batch_size
        if (longest := max(rows, default=0)) > most:
            faults.append(f'task "{run.name}" has sequences of {longest} tokens')
            continue
        # Quantiles of all lengths, as many as the paper draws. They miss the longest row, which must fit into a replica
        # too.
        sample = typical_lengths(rows, _BATCHES_IN_SAMPLE * batch_size)
        tasks.append(TaskLengths(run.name, (*sample[:-1], longest), batch_size))
    if faults:
        raise ConfigError(
            f"plan --deployment: rows must have at most {most} tokens, the most that a replica on {num_devices} "
            f"devices holds: {'; '.join(faults)}. Set max_length={most}, use more or larger devices, or "
            "gradient_checkpointing=True."
        )
    return tasks


def _searched(
    tasks: Sequence[TaskLengths],
    num_devices: int,
    curve: ReplicaTimeModel,
    interval: int,
    exchange: GradientExchange | None,
    *,
    proposal: bool = True,
) -> DeploymentPlan:
    """Return the deployment that is fastest by the curve of a layer alone."""
    options = {"interval": interval, "proposal": proposal, "budget_s": _BUDGET_S, "time_limit_s": _TIME_LIMIT_S}
    try:
        return plan_deployment(*joint_sample(tasks), num_devices, curve, exchange=exchange, **options)
    except ValueError as error:
        raise ConfigError(f"plan --deployment: {error}") from error


def _composed(
    planner: Planner,
    facts: ReplicaFacts,
    tasks: Sequence[TaskLengths],
    single: DeploymentPlan,
    curve: ReplicaTimeModel,
    interval: int,
    exchange: GradientExchange | None,
    also: Sequence[tuple[ReplicaGroup, ...]] = (),
) -> ComposedDeployment | None:
    """Return the fastest deployment by the plans of its replicas; `None` if plans cannot be priced this way.

    A policy that runs a single task at a time has no plan for a step of all tasks, so the deployment of the curve is
    used.
    """
    args = planner.args
    if policy_named(args.planner).runs_alone:
        return None
    schedule = args.pipeline_schedule
    replicas = ReplicaPlanner(
        facts,
        max_tokens=args.pass_tokens(facts.memory.device_type),
        policy=args.planner,
        schedule=schedule,  # type: ignore[arg-type]
    )
    options = {"also": also, "budget_s": _COMPOSED_BUDGET_S, "interval": interval, "time_limit_s": _TIME_LIMIT_S}
    try:
        return compose_deployment(tasks, single, curve, replicas, exchange=exchange, **options)
    except ValueError as error:
        raise ConfigError(f"plan --deployment: {error}") from error


def times_from(facts: ReplicaFacts, measured: LayerProfile | None) -> str:
    """Return in words where the times come from."""
    if measured is not None:
        return f"layer times measured, from {Path(measured.layer_times).name}"
    if facts.profile.source == "measured":
        known = "from data sheets" if facts.links is not None else "measured" if facts.profile.link else "not known"
        return f"a profile measured on {facts.profile.device}; links between devices {known}"
    return "from data sheets, as no profile was measured: good for comparing plans rather than for seconds"


def notes_on(
    facts: ReplicaFacts,
    plan: DeploymentPlan,
    fused: Baseline | None,
    measured: LayerProfile | None,
    exchange: GradientExchange | None = None,
) -> tuple[str, ...]:
    """Return the notes of the report; `fused` are the best equal replicas, if any can hold all rows."""
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
            f"passes hold at most {facts.most_tokens} tokens (max_tokens_per_micro_batch, or the longest sequence)"
        )
    if facts.links is None and facts.profile.link is None:
        notes.append(
            "no link between these devices is known, so tensor parallelism looks faster than it is: measure one with"
            " peft-mux profile in several processes, or name the devices"
        )
    if exchange is None:
        notes.append("times do not include the exchange of gradients between replicas, as in L")
    else:
        most_bytes = max(sum(exchange.device_bytes(group.config)) for group in plan.groups)
        notes.append(
            f"times include {plan.exchange_s:.4f} s a step in which replicas add their gradients and no pass runs; "
            f"adding all of them, up to {most_bytes / 1e9:.3g} GB on a device, takes "
            f"{exchange.seconds_of(plan.groups):.4f} s"
        )
    return tuple(notes)
