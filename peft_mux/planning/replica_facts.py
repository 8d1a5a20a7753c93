"""The facts of a run that the costs of its replicas depend on, and the time models that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import ConfigError, UnsupportedModelError
from peft_mux.parallel.families import family_of
from peft_mux.parallel.tensor.cut import blocks_of
from peft_mux.planning.planner import Planner
from peft_mux.planning.targets import data_sheet_cluster, memory_limit_bytes, run_profile
from peft_mux.scheduler.costs.hardware import DEVICES_PER_NODE, Cluster, known_device
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import EAGER, analytic_profile, corrected, with_recomputed_inputs
from peft_mux.scheduler.parallel_layout import ParallelConfig, ParallelLayout
from peft_mux.scheduler.replicas.facts import ReplicaFacts, replica_time_model
from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel, fit_layer, read_layer_profile, read_max_tokens
from peft_mux.scheduler.units import bytes_text


class LayerProfile(NamedTuple):
    """Measurements as LobRA stores them.

    Attributes:
        layer_times: CSV file with columns tp, seq_len, mbs and time in milliseconds.
        max_tokens: CSV file with columns tp, pp and max_tokens; `None` to use the memory model.
    """

    layer_times: str
    max_tokens: str | None = None


def run_facts(planner: Planner, runs: Sequence[ActiveTask], cluster: Cluster | None = None) -> ReplicaFacts:
    """Return what the costs of a replica depend on.

    Args:
        planner: the planner of the run, whose shapes and arguments are read.
        runs: the tasks that could take steps.
        cluster: the devices to plan for; the run's own by default.
    """
    args, shape = planner.args, planner.shape
    loads = tuple(planner.load_of(run, in_chains=False) for run in runs)
    limit, links = memory_limit_bytes(args), cluster
    if cluster is None:
        # With the learnt factors, if plans are made with them: dispatch and re-deployment use the same times as passes.
        factors = planner.correction.factors
        profile = corrected(run_profile(args, shape)[0], factors)
        device_type = args.device.type
        if (
            profile.link is None
            and (links := data_sheet_cluster(profile, max(args.world_size, DEVICES_PER_NODE))) is not None
        ):
            intra_node, inter_node = (
                link.slowed(factors.communication) for link in (links.intra_node, links.inter_node)
            )
            links = replace(links, intra_node=intra_node, inter_node=inter_node)
    else:
        # A stored profile is used if it is of these devices, else numbers from data sheets.
        stored = None if args.cost_profile is None else run_profile(args, shape)[0]
        if stored is not None and (
            stored.device == cluster.device.name
            or known_device(stored.device, cluster.device.memory_bytes) == cluster.device
        ):
            profile = stored
        else:
            profile = analytic_profile(cluster.device, shape, execution=EAGER)  # replicas may be divided
        device_type = "cpu" if cluster.device.name == "cpu" else "cuda"
        # A limit of the user applies to any devices, and takes precedence over their data sheets.
        if args.memory_limit_gib is None:
            limit = cluster.device.memory_bytes
    # Of a stream only the first rows are known; max_length bounds the others.
    most_tokens = (
        run.hyper.max_length if run.loader.steps_per_epoch is None else max(run.loader.sample_lengths, default=0)
        for run in runs
    )
    return ReplicaFacts(
        shape=shape,
        profile=with_recomputed_inputs(profile) if args.selective_recompute else profile,
        loads=loads,
        memory=MemoryModel(
            shape,
            checkpointing=args.uses_checkpointing,
            activation_bytes_per_token=planner.counted_bytes(loads, device_type),
            device_type=device_type,
            # Only whole models share their optimizer states (`supported_configs`), so that all devices do.
            optimizer_shards=(cluster.num_devices if cluster else args.world_size) if args.shard_optimizer else 1,
        ),
        limit_bytes=limit,
        pass_tokens=max(args.pass_tokens(device_type), *most_tokens),
        links=links,
        supports=supported_configs(planner, runs),
    )


def run_time_model(planner: Planner, runs: Sequence[ActiveTask], layout: ParallelLayout) -> ReplicaTimeModel:
    """Return the time model of a run's replicas, for `DispatchedShares`; configurations that hold nothing are left out.

    Raises:
        ConfigError: if none of them holds a token.
    """
    return time_model_of(run_facts(planner, runs), tuple(dict.fromkeys(layout.replicas)), runs)


def time_model_of(
    facts: ReplicaFacts, configs: Sequence[ParallelConfig], runs: Sequence[ActiveTask]
) -> ReplicaTimeModel:
    """Return the time model of these configurations; those that hold nothing are left out.

    Raises:
        ConfigError: if none of them holds a token, naming the tasks.
    """
    try:
        return replica_time_model(facts, configs)
    except ValueError as error:
        names = ", ".join(f'"{run.name}"' for run in runs)
        raise ConfigError(
            f"replicas: the backbone and the adapters of {names} take {bytes_text(facts.least_bytes(configs[-1]))} "
            f"on a device of {configs[-1]}, the most divided of {', '.join(map(str, configs))}, but a plan may fill "
            f"only {bytes_text(facts.limit_bytes or 0)}. Use more or larger devices, or a quantised backbone, or "
            "raise memory_limit_gib; with shard_optimizer=True replicas cannot be divided."
        ) from error


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
        known = [config for config in configs if config.tp in fits]
        limits = facts.token_limits(known)
        if files.max_tokens is not None:
            limits = {config: tokens for config, tokens in read_max_tokens(files.max_tokens).items() if config in known}
        return ReplicaTimeModel(fits, facts.shape.num_layers, limits)
    except (OSError, ValueError) as error:
        where = Path(files.layer_times).name + ("" if files.max_tokens is None else f", {Path(files.max_tokens).name}")
        raise ConfigError(f"layer profile {where}: {error}") from error


def supported_configs(planner: Planner, runs: Sequence[ActiveTask]) -> Callable[[ParallelConfig], bool]:
    """Return a function that says whether the engine can cut the backbone and these tasks' adapters so."""
    model = planner.model
    adapters = [model.peft_config[model.adapter_of(run.name)] for run in runs]
    # Bare parameters, such as experts, can only be adapted in whole models.
    adapts_parameters = any(getattr(config, "target_parameters", None) for config in adapters)

    @cache
    def can_cut(tp: int, is_whole: bool) -> bool:
        try:
            if not is_whole:
                family_of(model.backbone)
            if tp > 1:
                blocks_of(model.backbone, tp)
        except UnsupportedModelError:
            return False
        return is_whole or not (adapts_parameters or planner.args.shard_optimizer)

    return lambda config: can_cut(config.tp, config.num_gpus == 1)
