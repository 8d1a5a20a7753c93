"""The facts of a run that the costs of its replicas depend on, and the time models that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.engine.tensor.cut import blocks_of
from peft_mux.errors import ConfigError, UnsupportedModelError
from peft_mux.modeling.backbone.families import family_of
from peft_mux.planning.loads import task_load
from peft_mux.planning.planner import Planner
from peft_mux.planning.targets import data_sheet_cluster, memory_limit_bytes, run_profile
from peft_mux.scheduler.costs.hardware import Cluster, known_device
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import Profile, analytic_profile, corrected
from peft_mux.scheduler.replicas.configs import ParallelConfig
from peft_mux.scheduler.replicas.time_model import (
    ReplicaFacts,
    ReplicaTimeModel,
    fit_layer,
    least_bytes,
    read_layer_profile,
    read_max_tokens,
    replica_time_model,
    token_limits,
)
from peft_mux.scheduler.units import bytes_text

_DEVICES_PER_NODE = 8


class LayerProfile(NamedTuple):
    """Measurements as LobRA stores them.

    Attributes:
        layer_times: CSV file with columns tp, seq_len, mbs and time in milliseconds.
        max_tokens: CSV file with columns tp, pp and max_tokens; `None` to use the memory model.
    """

    layer_times: str
    max_tokens: str | None = None


def run_facts(planner: Planner, runs: Sequence[TaskRun], cluster: Cluster | None = None) -> ReplicaFacts:
    """Return what the costs of a replica depend on.

    Args:
        planner: the planner of the run, whose shapes and arguments are read.
        runs: the tasks that could take steps.
        cluster: the devices to plan for; the run's own by default.
    """
    args, shape = planner.args, planner.shape
    loads = tuple(
        task_load(
            run,
            planner.shapes_of(run.name),
            shape.num_layers,
            cut=planner.cut_layers,
            routed_share=shape.routed_share,
        )
        for run in runs
    )
    if cluster is None:
        # With what was learnt of it, where that decides: dispatch and re-deployment plan as passes do.
        profile = corrected(run_profile(args, shape).profile, planner.correction.factors)
        limit = memory_limit_bytes(args)
        device_type = args.device.type
    else:
        profile, limit = _profile_of(planner, cluster), cluster.device.memory_bytes
        device_type = "cpu" if cluster.device.name == "cpu" else "cuda"
    # What the user asks for counts on any devices, before their data sheets.
    if args.memory_limit_gib is not None:
        limit = memory_limit_bytes(args)
    return ReplicaFacts(
        shape=shape,
        profile=profile,
        loads=loads,
        memory=MemoryModel(
            shape,
            checkpointing=args.uses_checkpointing,
            activation_bytes_per_token=planner.counted_bytes(loads, device_type),
            device_type=device_type,
        ),
        limit_bytes=limit,
        # Of a stream only the first rows are known; max_length bounds the others.
        pass_tokens=max(args.max_tokens_per_micro_batch, *(_most_tokens(run) for run in runs)),
        links=cluster or _own_links(profile, planner.correction.factors.communication),
        supports=partial(_is_supported, planner.model.backbone, adapts_parameters=_adapt_parameters(planner, runs)),
    )


def run_time_model(planner: Planner, runs: Sequence[TaskRun], layout: ParallelLayout) -> ReplicaTimeModel:
    """Return the time model of a run's replicas, for `DispatchedShares`; configurations that hold nothing are left out.

    Raises:
        ConfigError: where none of them holds a token.
    """
    facts = run_facts(planner, runs)
    return time_model_of(facts, tuple(dict.fromkeys(layout.replicas)), runs)


def time_model_of(facts: ReplicaFacts, configs: Sequence[ParallelConfig], runs: Sequence[TaskRun]) -> ReplicaTimeModel:
    """Return the time model of these configurations; those that hold nothing are left out.

    Raises:
        ConfigError: where none of them holds a token, naming the tasks.
    """
    if not token_limits(facts, configs):
        config = configs[-1]
        names = ", ".join(f'"{run.name}"' for run in runs)
        least = least_bytes(facts, config)
        raise ConfigError(
            f"replicas: the backbone and the adapters of {names} take {bytes_text(least)} on a device of {config}, the "
            f"most divided of {', '.join(map(str, configs))}; allowed: up to {bytes_text(facts.limit_bytes or 0)}, the "
            "memory that a plan may fill. Use more or larger devices, or a quantised backbone, or raise "
            "memory_limit_gib."
        )
    return replica_time_model(facts, configs)


def measured_time_model(
    facts: ReplicaFacts, configs: Sequence[ParallelConfig], files: LayerProfile
) -> ReplicaTimeModel:
    """Return the time model of LobRA's stored measurements, over those of `configs` that they know.

    Raises:
        ConfigError: for files that cannot be read.
    """
    try:
        fits = fit_layer(read_layer_profile(files.layer_times))
        # Times were measured for each tensor parallel degree; pipelines are made of the same layers.
        known = tuple(config for config in configs if config.tp in fits)
        if files.max_tokens is None:
            limits = dict(replica_time_model(facts, known).max_tokens) if known else {}
        else:
            limits = {config: tokens for config, tokens in read_max_tokens(files.max_tokens).items() if config in known}
        return ReplicaTimeModel(fits, facts.shape.num_layers, limits)
    except (OSError, ValueError) as error:
        where = Path(files.layer_times).name + ("" if files.max_tokens is None else f", {Path(files.max_tokens).name}")
        raise ConfigError(f"layer profile {where}: {error}") from error


def _profile_of(planner: Planner, cluster: Cluster) -> Profile:
    """Return the stored profile of a run if it is of these devices, else numbers from data sheets."""
    if planner.args.cost_profile is not None:
        stored = run_profile(planner.args, planner.shape).profile
        if (
            stored.device == cluster.device.name
            or known_device(stored.device, cluster.device.memory_bytes) == cluster.device
        ):
            return stored
    return analytic_profile(cluster.device, planner.shape)


def _most_tokens(run: TaskRun) -> int:
    return run.hyper.max_length if run.loader.steps_per_epoch is None else max(run.loader.sample_lengths, default=0)


def _own_links(profile: Profile, factor: float) -> Cluster | None:
    """Return the links of a device that was not measured together with one, so many times as slow."""
    cluster = None if profile.link is not None else data_sheet_cluster(profile, _DEVICES_PER_NODE)
    if cluster is None or factor == 1.0:
        return cluster
    return replace(cluster, intra_node=cluster.intra_node.slowed(factor), inter_node=cluster.inter_node.slowed(factor))


def _adapt_parameters(planner: Planner, runs: Sequence[TaskRun]) -> bool:
    """Return whether some task adapts bare parameters, such as experts, which only whole models hold."""
    model = planner.model
    configs = (model.peft_config[model.adapter_of(run.name)] for run in runs)
    return any(getattr(config, "target_parameters", None) for config in configs)


def _is_supported(backbone: Any, config: ParallelConfig, *, adapts_parameters: bool) -> bool:
    """Return whether the engine can cut the backbone so."""
    try:
        if config.num_gpus > 1:
            if adapts_parameters:
                return False
            family_of(backbone)
        if config.tp > 1:
            blocks_of(backbone, config.tp)
    except UnsupportedModelError:
        return False
    return True
