"""Gathers the facts of a run and has LobRA's planner deploy it: which replicas, and whether others would pay.

The counterpart of `planning` for replicas that are unlike one another (L section 4.2). It reads shapes and lengths, no
weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.engine.replicas.layout import ParallelLayout
from peft_mux.errors import ConfigError
from peft_mux.planning.deployment_notes import (
    alternatives,
    compared_lengths,
    config_rows,
    notes_on,
    planned_replicas,
    times_from,
)
from peft_mux.planning.loads import typical_lengths
from peft_mux.planning.planner import Planner
from peft_mux.planning.replica_facts import LayerProfile, measured_time_model, run_facts, time_model_of
from peft_mux.scheduler.costs.hardware import Cluster, parse_devices
from peft_mux.scheduler.deployment.baselines import Baseline, task_fused
from peft_mux.scheduler.deployment.composed.compose import ComposedDeployment, compose_deployment
from peft_mux.scheduler.deployment.plan import DeploymentPlan
from peft_mux.scheduler.deployment.redeployment import DEFAULT_RESTART_S, Redeployment, decide_redeployment, groups_of
from peft_mux.scheduler.deployment.report import DeploymentReport
from peft_mux.scheduler.deployment.search import plan_deployment as search_deployments
from peft_mux.scheduler.deployment.space import candidate_configs, count_plans
from peft_mux.scheduler.deployment.task_lengths import TaskLengths, joint_sample
from peft_mux.scheduler.dispatching.bucketing import interval_tokens
from peft_mux.scheduler.dispatching.dispatch import dispatch
from peft_mux.scheduler.planner.policies import policy_named
from peft_mux.scheduler.replicas.configs import ReplicaGroup
from peft_mux.scheduler.replicas.costs import ReplicaFacts
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner
from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel
from peft_mux.tasks.task_run import TaskRun

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
