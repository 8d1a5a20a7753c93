"""What stands beside a planned deployment: configurations, the paper's baselines, and remarks."""

# MERGED: Gathers the facts of a run and has LobRA's planner deploy it: which replicas, and whether others would pay.
# MERGED: The counterpart of `planning` for replicas that are unlike one another (L section 4.2). It reads shapes and
# MERGED: lengths, no
# MERGED: weights.

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.errors import ConfigError
from peft_mux.planning.loads import typical_lengths
from peft_mux.planning.planner import Planner
from peft_mux.planning.replica_facts import LayerProfile, measured_time_model, run_facts, time_model_of
from peft_mux.scheduler.costs.hardware import Cluster, parse_devices
from peft_mux.scheduler.deployment.baselines import Baseline, lobra_sequential, task_fused, task_sequential
from peft_mux.scheduler.deployment.composed import ComposedDeployment, PricedDeployment, compose_deployment
from peft_mux.scheduler.deployment.plan import (
    DEFAULT_RESTART_S,
    DeploymentPlan,
    Redeployment,
    decide_redeployment,
    groups_of,
)
from peft_mux.scheduler.deployment.report import Alternative, ConfigRow, DeploymentReport, PlannedReplicas, ReplicaRow
from peft_mux.scheduler.deployment.search import plan_deployment as search_deployments
from peft_mux.scheduler.deployment.space import (
    DEFAULT_NUM_MICRO_BATCHES,
    TaskLengths,
    candidate_configs,
    count_plans,
    joint_sample,
)
from peft_mux.scheduler.dispatching.bucketing import interval_tokens
from peft_mux.scheduler.dispatching.dispatch import dispatch
from peft_mux.scheduler.planner.policies import policy_named
from peft_mux.scheduler.replicas.configs import DeployableTimeModel, ReplicaGroup
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner
from peft_mux.scheduler.replicas.time_model import ReplicaFacts, ReplicaTimeModel, memory_tokens

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


_BATCHES_IN_SAMPLE = 100
"""As in L section 4.2."""
_BUDGET_S = 8.0
"""For solving by one curve; reports say by how much what was not solved to the end could be faster."""
_COMPOSED_BUDGET_S = 12.0
"""For the search that prices replicas by their plans."""
_TIME_LIMIT_S = 2.5
"""Likewise, of one deployment."""
_PLANS_WITHOUT_PROPOSAL = 20_000
"""Deployments that are searched in a few seconds."""


def report_deployment(
    planner: Planner,
    runs: Sequence[TaskRun],
    devices: str | None = None,
    *,
    measured: LayerProfile | None = None,
    workers: int = 1,
) -> DeploymentReport:
    """Return the replicas that train these tasks fastest (L Eq. 2), and what stands beside them.

    Args:
        planner: the planner of the run, whose shapes and arguments are read.
        runs: the tasks that could take steps.
        devices: the devices to plan for, such as "16xA100-40GB"; by default those that the run was started on.
        measured: times of one layer at several tensor parallel degrees, in place of a profile of one device.
        workers: number of processes that solve.

    Raises:
        ConfigError: for unknown devices, files that cannot be read, no tasks, or tasks that no replica can hold.
    """
    cluster, num_devices = _devices(planner, devices)
    if not runs:
        raise ConfigError("plan --deployment: got no task that could run; allowed: one or more. Register one.")
    facts = run_facts(planner, runs, cluster)
    configs = candidate_configs(facts, num_devices)
    curve = measured_time_model(facts, configs, measured) if measured else time_model_of(facts, configs, runs)
    _require_room(curve, runs, num_devices)
    tasks = [_task_lengths(run) for run in runs]
    interval = interval_tokens(max(length for task in tasks for length in task.lengths))
    fused = _fused(tasks, num_devices, curve, interval)
    single = _by_curve(tasks, num_devices, curve, fused, interval=interval, workers=workers)
    also = [] if fused is None else [fused.deployments[0]]
    composed = None if measured else _composed(planner, facts, tasks, single, curve, also, interval, workers)
    plan, times = (single, curve) if composed is None else (composed.plan, composed.model)
    return DeploymentReport(
        plan=plan,
        devices=f"{num_devices} x {facts.profile.device if cluster is None else cluster.device.name}",
        times_from=times_from(facts, measured),
        fit_error=max(fit.mean_relative_error for fit in curve.fits.values()),
        limit_bytes=facts.limit_bytes,
        lengths=compared_lengths(plan),
        configs=config_rows(facts, plan, curve, measured),
        by_length=dispatch(plan.groups, plan.bucketing, times, policy="length"),
        alternatives=alternatives(tasks, plan, times, interval, None if composed is None else composed.equal),
        # Where whole plans are compared, equal replicas are among them.
        notes=notes_on(facts, plan, fused if composed is None else None, measured),
        planned=None if composed is None else planned_replicas(composed),
    )


def redeploy(
    planner: Planner, runs: Sequence[TaskRun], old: ParallelLayout, *, restart_s: float = DEFAULT_RESTART_S
) -> Redeployment:
    """Say whether other replicas would pay from now on (L section 5.1, dynamic batches).

    Args:
        planner: the planner of the run, whose shapes and arguments are read.
        runs: the tasks that are still to be trained.
        old: the replicas that there are; the new ones use as many processes.
        restart_s: seconds that saving adapters and starting anew cost; measured where it was done before.

    Raises:
        ConfigError: as `report_deployment`.
    """
    if not runs:
        raise ConfigError("redeploy: got no task that is still to be trained; allowed: one or more.")
    facts = run_facts(planner, runs)
    # The replicas that there are too, though they may be no candidates: both plans need times from one model.
    configs = tuple(dict.fromkeys((*candidate_configs(facts, old.world_size), *old.replicas)))
    curve = time_model_of(facts, configs, runs)
    _require_room(curve, runs, old.world_size)
    tasks = [_task_lengths(run) for run in runs]
    lengths, global_batch = joint_sample(tasks)
    interval = interval_tokens(max(lengths))
    plan = _searched(lengths, global_batch, old.world_size, curve, interval=interval)
    # What there is is priced too; replicas that hold nothing have no price.
    also = [groups] if (groups := groups_of(old.replicas, curve)) else []
    composed = _composed(planner, facts, tasks, plan, curve, also, interval)
    plan, times = (plan, curve) if composed is None else (composed.plan, composed.model)
    return decide_redeployment(
        old.replicas,
        plan,
        times,
        remaining=[(run.num_steps - run.step, run.loader.tokens_per_step) for run in runs],
        restart_s=restart_s,
    )


# ---------------------------------------------------------------------- internal


def _devices(planner: Planner, devices: str | None) -> tuple[Cluster | None, int]:
    if devices is None:
        return None, planner.args.world_size
    try:
        cluster = parse_devices(devices)
    except ValueError as error:
        raise ConfigError(f"devices: {error}") from error
    return cluster, cluster.num_devices


def _task_lengths(run: TaskRun) -> TaskLengths:
    """Return a sample of a task's lengths: quantiles of all, as many as the paper draws, and the longest row."""
    rows, batch_size = run.loader.sample_lengths, run.hyper.train_batch_size
    sample = typical_lengths(rows, _BATCHES_IN_SAMPLE * batch_size)
    # Quantiles leave the longest row out, which must fit into a replica all the same.
    return TaskLengths(run.name, (*sample[:-1], max(rows)), batch_size)


def _require_room(time_model: ReplicaTimeModel, runs: Sequence[TaskRun], num_devices: int) -> None:
    """Refuse tasks that no replica on these devices holds, by name."""
    fitting = [tokens for config, tokens in time_model.max_tokens.items() if config.num_gpus <= num_devices]
    most = max(fitting, default=0)
    faults = [
        f'task "{run.name}" has sequences of {longest} tokens'
        for run in runs
        if (longest := max(run.loader.sample_lengths, default=0)) > most
    ]
    if faults:
        raise ConfigError(
            f"plan --deployment: {'; '.join(faults)}; allowed: at most {most}, the most that a replica on "
            f"{num_devices} devices holds. Set max_length={most}, use more or larger devices, or "
            "gradient_checkpointing=True."
        )


def _searched(
    lengths: Sequence[int],
    global_batch: int,
    num_devices: int,
    time_model: ReplicaTimeModel,
    *,
    interval: int,
    workers: int = 1,
    proposal: bool = True,
) -> DeploymentPlan:
    try:
        return search_deployments(
            lengths,
            global_batch,
            num_devices,
            time_model,
            interval=interval,
            workers=workers,
            proposal=proposal,
            budget_s=_BUDGET_S,
            time_limit_s=_TIME_LIMIT_S,
        )
    except ValueError as error:
        raise ConfigError(f"plan --deployment: {error}") from error


def _by_curve(
    tasks: Sequence[TaskLengths],
    num_devices: int,
    curve: ReplicaTimeModel,
    fused: Baseline | None,
    *,
    interval: int,
    workers: int,
) -> DeploymentPlan:
    """Return the deployment that is fastest by the curve of a layer alone."""
    lengths, global_batch = joint_sample(tasks)
    plan = _searched(lengths, global_batch, num_devices, curve, interval=interval, workers=workers)
    # Proposals assume many full micro-batches (L Appendix A); where equal replicas win, that did not hold here.
    if fused is not None and fused.gpu_seconds < plan.gpu_seconds:
        return _wider(plan, lengths, curve, interval=interval, workers=workers)
    return plan


def _composed(
    planner: Planner,
    facts: ReplicaFacts,
    tasks: Sequence[TaskLengths],
    single: DeploymentPlan,
    curve: ReplicaTimeModel,
    also: Sequence[tuple[ReplicaGroup, ...]],
    interval: int,
    workers: int = 1,
) -> ComposedDeployment | None:
    """Return the deployment that is fastest by the plans that its replicas run; `None` where plans have no such price.

    A policy that runs a single task at a time has no plan for a step of all tasks, and so leaves the curve's.
    """
    args = planner.args
    if policy_named(args.planner).runs_alone:
        return None
    replicas = ReplicaPlanner(
        facts,
        max_tokens=args.max_tokens_per_micro_batch,
        policy=args.planner,
        schedule=args.pipeline_schedule,  # type: ignore[arg-type]
    )
    try:
        return compose_deployment(
            tasks,
            single,
            curve,
            replicas,
            also=also,
            budget_s=_COMPOSED_BUDGET_S,
            interval=interval,
            workers=workers,
            time_limit_s=_TIME_LIMIT_S,
        )
    except ValueError as error:
        raise ConfigError(f"plan --deployment: {error}") from error


def _fused(
    tasks: Sequence[TaskLengths], num_devices: int, time_model: ReplicaTimeModel, interval: int
) -> Baseline | None:
    """Return the best equal replicas; `None` where no configuration holds all sequences."""
    try:
        return task_fused(tasks, num_devices, time_model, interval=interval)
    except ValueError:
        return None


def _wider(
    plan: DeploymentPlan, lengths: Sequence[int], time_model: ReplicaTimeModel, *, interval: int, workers: int
) -> DeploymentPlan:
    """Return the better of a plan and one over all configurations, where there are not too many deployments of them.

    A configuration is proposed by its throughput over many full micro-batches (L Appendix A). With few sequences for
    each replica another one may be faster.
    """
    sizes = [config.num_gpus for config in time_model.configurations if config.num_gpus <= plan.num_gpus]
    # Without a proposal the search goes over all deployments, which grow fast with the number of devices.
    if count_plans(plan.num_gpus, sizes) > _PLANS_WITHOUT_PROPOSAL:
        return plan
    other = _searched(
        lengths, plan.global_batch, plan.num_gpus, time_model, interval=interval, workers=workers, proposal=False
    )
    return min((plan, other), key=lambda one: one.gpu_seconds)
