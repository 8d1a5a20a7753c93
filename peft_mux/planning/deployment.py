"""Gathers the facts of a run and has LobRA's planner deploy it: which replicas, and whether others would pay.

The counterpart of `planning` for replicas that are unlike one another (L section 4.2). It reads shapes and lengths, no
weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.engine.replicas.layout import ParallelLayout
from peft_mux.errors import ConfigError
from peft_mux.planning.deployment_notes import alternatives, compared_lengths, config_rows, notes_on, times_from
from peft_mux.planning.loads import typical_lengths
from peft_mux.planning.planner import Planner
from peft_mux.planning.replica_facts import LayerProfile, measured_time_model, run_facts, time_model_of
from peft_mux.scheduler.costs.hardware import Cluster, parse_devices
from peft_mux.scheduler.deployment.baselines import (
    Baseline,
    TaskLengths,
    joint_sample,
    task_fused,
)
from peft_mux.scheduler.deployment.plan import DeploymentPlan
from peft_mux.scheduler.deployment.redeployment import DEFAULT_RESTART_S, Redeployment, decide_redeployment
from peft_mux.scheduler.deployment.report import DeploymentReport
from peft_mux.scheduler.deployment.search import plan_deployment as search_deployments
from peft_mux.scheduler.deployment.space import candidate_configs, count_plans
from peft_mux.scheduler.dispatching.bucketing import interval_tokens
from peft_mux.scheduler.dispatching.dispatch import dispatch
from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel
from peft_mux.tasks.task_run import TaskRun

_BATCHES_IN_SAMPLE = 100
"""As in L section 4.2."""
_BUDGET_S = 20.0
"""For solving; reports say by how much what was not solved to the end could be faster."""
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
    time_model = measured_time_model(facts, configs, measured) if measured else time_model_of(facts, configs, runs)
    _require_room(time_model, runs, num_devices)
    tasks = [_task_lengths(run) for run in runs]
    lengths, global_batch = joint_sample(tasks)
    interval = interval_tokens(max(lengths))
    plan = _searched(lengths, global_batch, num_devices, time_model, interval=interval, workers=workers)
    fused = _fused(tasks, num_devices, time_model, interval)
    # Proposals assume many full micro-batches (L Appendix A); where equal replicas win, that did not hold here.
    if fused is not None and fused.gpu_seconds < plan.gpu_seconds:
        plan = _wider(plan, lengths, time_model, interval=interval, workers=workers)
    return DeploymentReport(
        plan=plan,
        devices=f"{num_devices} x {facts.profile.device if cluster is None else cluster.device.name}",
        times_from=times_from(facts, measured),
        fit_error=max(fit.mean_relative_error for fit in time_model.fits.values()),
        limit_bytes=facts.limit_bytes,
        lengths=compared_lengths(plan),
        configs=config_rows(facts, plan, time_model, measured),
        by_length=dispatch(plan.groups, plan.bucketing, time_model, policy="length"),
        alternatives=alternatives(tasks, plan, time_model, interval),
        notes=notes_on(facts, plan, fused, measured),
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
    time_model = time_model_of(facts, configs, runs)
    _require_room(time_model, runs, old.world_size)
    lengths, global_batch = joint_sample([_task_lengths(run) for run in runs])
    plan = _searched(lengths, global_batch, old.world_size, time_model, interval=interval_tokens(max(lengths)))
    return decide_redeployment(
        old.replicas,
        plan,
        time_model,
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
