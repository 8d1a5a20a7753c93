"""What a plan is made for: the run's own processes, or other devices, and the profile to plan with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.allocator import host_memory_bytes
from peft_mux.errors import ConfigError
from peft_mux.modeling.backbone.liger import has_liger
from peft_mux.parallel.cuda_graphs import AUTO_TOKENS
from peft_mux.planning.profiling.backbone import device_name, software_versions
from peft_mux.scheduler.costs.hardware import DEVICES, Cluster, Device, known_device, parse_devices
from peft_mux.scheduler.costs.loads import ModelShape
from peft_mux.scheduler.costs.profile import (
    AS_PROFILED,
    EAGER,
    FUSED,
    Execution,
    Parts,
    Profile,
    analytic_profile,
    corrected,
    shape_signature,
)
from peft_mux.scheduler.plan import Link, TurnPlan
from peft_mux.scheduler.units import bytes_text

_STAND_IN = "A100-80GB"
_MEASURE = 'Measure this device with "peft-mux profile" and give the file as cost_profile.'

_ALL_TOKENS = 2**31
"""More than any pass has."""
_USABLE_SHARE = 0.95
"""Share of a GPU's memory that plans fill; the rest is for what they do not count, such as the CUDA context."""


def run_profile(
    args: MultiTaskTrainingArguments, shape: ModelShape, devices_per_stage: int = 1
) -> tuple[Profile, tuple[str, ...]]:
    """Return the profile that a run plans with, and remarks: a stored file, or numbers from data sheets.

    Args:
        args: the arguments of the run.
        shape: the shape of its backbone.
        devices_per_stage: number of devices that share every layer; with data sheets, smaller matrix products then use
            a device less.

    Raises:
        ConfigError: for a file that cannot be read, or is no profile.
    """
    if args.cost_profile is not None:
        try:
            profile = Profile.from_json(Path(args.cost_profile).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f'args.cost_profile must be a JSON file that "peft-mux profile" wrote, got {args.cost_profile!r} '
                f"({error}). Measure again, or leave cost_profile out."
            ) from error
        notes = _profile_notes(profile, args, shape)
        if profile.layer_host_s:  # times are those of the device, which replays short passes without the host
            num_devices = args.pipeline_parallel_size * devices_per_stage
            profile = replace(profile, graph_tokens=execution_of(args, num_devices, args.world_size).graph_tokens)
        return profile, notes
    if args.device.type != "cuda":
        return analytic_profile(DEVICES["cpu"], shape, devices_per_stage), ()
    known, notes = _gpu_data_sheet(args), ()
    if known is None:
        known, name = DEVICES[_STAND_IN], torch.cuda.get_device_name(args.device)
        notes = (f"no data sheet of {name!r} is known; plans use the times of {_STAND_IN}. {_MEASURE}",)
    execution = execution_of(args, args.pipeline_parallel_size * devices_per_stage, args.world_size)
    return analytic_profile(known, shape, devices_per_stage, execution=execution), (*notes, _facts_note(execution))


def execution_of(args: MultiTaskTrainingArguments, num_devices: int, num_processes: int) -> Execution:
    """Return how a GPU runs this package: with Liger's kernels and as CUDA graphs if the arguments allow it.

    Args:
        args: the arguments of the run.
        num_devices: number of devices of a replica; both run only in a backbone that is whole.
        num_processes: number of devices of all replicas.
    """
    is_whole = num_devices == 1 and not args.shard_backbone
    wants_liger = args.use_liger_kernel is True or (args.use_liger_kernel == "auto" and has_liger())
    graph_tokens = _ALL_TOKENS if args.cuda_graphs is True and is_whole else 0
    if args.cuda_graphs == "auto" and num_processes == 1 and not args.full_determinism:
        graph_tokens = AUTO_TOKENS
    return replace(FUSED if wants_liger and is_whole else EAGER, graph_tokens=graph_tokens)


def has_fused_layers(execution: Execution) -> bool:
    """Return whether layers compute by Liger's kernels."""
    return execution.elementwise_reads == FUSED.elementwise_reads


def _facts_note(execution: Execution) -> str:
    """Return the remark on times that no profile measured."""
    layers = "Liger's kernels" if has_fused_layers(execution) else "transformers' own layers"
    return (
        f"times are computed from the data sheet and what one H100 showed of this package, for {layers} and"
        f' {1e3 * execution.layer_host_s:.2g} ms of the host a layer; "peft-mux profile" measures them'
    )


def _gpu_data_sheet(args: MultiTaskTrainingArguments) -> Device | None:
    """Return the data sheet of the run's GPU; by its memory too, as several devices of one name differ only in it."""
    total_bytes = torch.cuda.get_device_properties(args.device).total_memory
    return known_device(torch.cuda.get_device_name(args.device), total_bytes)


def _profile_notes(profile: Profile, args: MultiTaskTrainingArguments, shape: ModelShape) -> tuple[str, ...]:
    """Return remarks on a stored profile that was made for something else than this run."""
    notes = []
    # The bytes of the weights depend on how they are held, not on what is computed.
    run_shapes = shape_signature(shape).rpartition("-W")[0]
    model = profile.model.rpartition("-W")[0] or profile.model
    if model != run_shapes and not model.endswith(f"-{run_shapes}"):
        notes.append(f"cost_profile is of another backbone ({profile.model}; this one is {run_shapes}). {_MEASURE}")
    name = device_name(args.device)
    known = _gpu_data_sheet(args) if args.device.type == "cuda" else None
    if profile.device not in {name, args.device.type, None if known is None else known.name}:
        notes.append(f"cost_profile is of another device ({profile.device}; this one is {name}). {_MEASURE}")
    if profile.source != "measured":
        return tuple(notes)
    if getattr(torch, profile.dtype, torch.float32).itemsize != shape.activation_bytes:
        notes.append(
            f"cost_profile was measured in {profile.dtype}; this run computes in {8 * shape.activation_bytes} bits. "
            f"{_MEASURE}"
        )
    now = software_versions(profile.device)
    others = [f"{name} {version}" for name, version in profile.versions if now.get(name, version) != version]
    if others:
        here = ", ".join(f"{name} {version}" for name, version in now.items())
        notes.append(f"cost_profile was measured with {', '.join(others)}; here are {here}. {_MEASURE}")
    return tuple(notes)


def data_sheet_cluster(profile: Profile, num_devices: int) -> Cluster | None:
    """Return devices of the kind that a profile was made for, with their links; `None` without a data sheet of them."""
    name = "cpu" if profile.device.startswith("cpu") else profile.device
    device = DEVICES.get(name) or known_device(name, 0)
    return None if device is None else parse_devices(f"{num_devices}x{device.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a plan is made for.

    Attributes:
        device: the devices as the plan names them.
        device_type: kind of the devices, "cuda" or "cpu".
        num_stages: S, number of pipeline stages of each replica.
        devices_per_stage: number of devices that share every layer (tensor parallelism).
        num_replicas: number of replicas that divide each global batch.
        backbone_shards: number of replicas that divide the frozen weights of each stage; 1 if each has all of them.
        limit_bytes: bytes that a plan may fill on each device; `None` for no limit.
        profile: the profile of one device.
        tensor_link: the link of rings over the devices of a stage, or over the replicas that divide its weights; `None`
            for one device.
        stage_links: the link from each stage to the next, and from the last to the first, of the replica whose messages
            take longest; empty for one stage.
        notes: remarks on the profile, for the reader of the plan.
        is_own: whether these are the run's own devices.
        device_bytes: memory of each device; `None` if that is not known.
    """

    device: str
    device_type: str
    num_stages: int
    devices_per_stage: int
    num_replicas: int
    backbone_shards: int
    limit_bytes: int | None
    profile: Profile
    tensor_link: Link | None
    stage_links: tuple[Link, ...]
    notes: tuple[str, ...]
    is_own: bool
    device_bytes: int | None = None

    def corrected(self, factors: Parts) -> Target:
        """Return the same devices with all times multiplied by `factors`, links from data sheets included."""
        if factors == AS_PROFILED:
            return self
        tensor_link = self.tensor_link and self.tensor_link.slowed(factors.communication)
        stage_links = tuple(link.slowed(factors.communication) for link in self.stage_links)
        return replace(self, profile=corrected(self.profile, factors), tensor_link=tensor_link, stage_links=stage_links)


def run_target(
    args: MultiTaskTrainingArguments,
    profile: Profile,
    notes: tuple[str, ...],
    *,
    num_stages: int,
    devices_per_stage: int,
    num_replicas: int,
) -> Target:
    """Return the run's own devices.

    Args:
        args: the arguments of the run.
        profile: the profile of one device.
        notes: remarks on it.
        num_stages: number of pipeline stages of this process's replica.
        devices_per_stage: number of devices that share every layer of this process's replica.
        num_replicas: number of replicas of the run.
    """
    num_devices = num_stages * devices_per_stage
    shards = num_replicas if args.shard_backbone else 1
    tensor_link, stage_links = None, ()
    if num_devices * num_replicas > 1:
        cluster = data_sheet_cluster(profile, num_devices * num_replicas)
        tensor_link, stage_links = _links(cluster, devices_per_stage, num_stages, shards)
    # A link that was measured here comes before the ones of a data sheet.
    if profile.link is not None:
        tensor_link, stage_links = profile.link, (profile.link,) * (num_stages if num_stages > 1 else 0)
    return Target(
        device=str(args.device) if num_devices == 1 else f"{num_devices} x {args.device.type}",
        device_type=args.device.type,
        num_stages=num_stages,
        devices_per_stage=devices_per_stage,
        num_replicas=num_replicas,
        backbone_shards=shards,
        limit_bytes=memory_limit_bytes(args),
        profile=profile,
        tensor_link=tensor_link,
        stage_links=stage_links,
        notes=notes,
        is_own=True,
        device_bytes=device_memory_bytes(args.device),
    )


def other_target(
    args: MultiTaskTrainingArguments,
    shape: ModelShape,
    devices: str | Cluster,
    *,
    num_stages: int | None,
    devices_per_stage: int,
) -> Target:
    """Return devices other than the run's own, by their data sheets.

    Args:
        args: the arguments of the run.
        shape: the shape of the backbone.
        devices: the devices to plan for, such as "4xA100-80GB".
        num_stages: number of stages of each pipeline; `None` for one pipeline of all devices, or with `shard_backbone`
            none at all: then every device is a replica.
        devices_per_stage: number of devices that share every layer.

    Raises:
        ConfigError: for unknown devices, a number of them that cannot be divided so, or two ways to divide weights.
    """
    try:
        cluster = parse_devices(devices)
    except ValueError as error:
        raise ConfigError(f"devices: {error}") from error
    if args.shard_backbone and devices_per_stage > 1:
        raise ConfigError(
            f"plan: tensor_parallel_size must be 1 with shard_backbone=True, got {devices_per_stage}. Leave one of "
            "the two out."
        )
    name, unit = cluster.device.name, devices_per_stage * (num_stages or 1)
    if cluster.num_devices % unit:
        sizes = {"tensor_parallel_size": devices_per_stage, "pipeline_parallel_size": num_stages or 1}
        divided = " and ".join(f"{size_name}={size}" for size_name, size in sizes.items() if size > 1)
        raise ConfigError(
            f"plan: the number of devices must be a multiple of {unit}, got {cluster.num_devices} x {name} with "
            f"{divided}. Plan for {unit * -(-cluster.num_devices // unit)}x{name}, or set other sizes."
        )
    num_replicas = cluster.num_devices // unit
    # With sharded weights replicas divide the backbone, unless stages are asked for too.
    if num_stages is None:
        num_stages, num_replicas = (1, num_replicas) if args.shard_backbone else (num_replicas, 1)
    shards = num_replicas if args.shard_backbone else 1
    tensor_link, stage_links = _links(cluster, devices_per_stage, num_stages, shards)
    execution = execution_of(args, num_stages * devices_per_stage, cluster.num_devices)
    return Target(
        device=f"{num_stages * devices_per_stage} x {name}",
        device_type="cuda" if name != "cpu" else "cpu",
        num_stages=num_stages,
        devices_per_stage=devices_per_stage,
        num_replicas=num_replicas,
        backbone_shards=shards,
        limit_bytes=int((1.0 if name == "cpu" else _USABLE_SHARE) * cluster.device.memory_bytes),
        profile=analytic_profile(cluster.device, shape, devices_per_stage, link=tensor_link, execution=execution),
        tensor_link=tensor_link,
        stage_links=stage_links,
        notes=() if name == "cpu" else (_facts_note(execution),),
        is_own=False,
        device_bytes=cluster.device.memory_bytes,
    )


def _links(
    cluster: Cluster | None, devices_per_stage: int, num_stages: int, shards: int
) -> tuple[Link | None, tuple[Link, ...]]:
    """Return the link of rings over what a stage's weights are divided over, and the links from stage to stage.

    Tensor parallel ranks of a stage are adjacent; replicas that share its weights are one whole replica apart.
    """
    if cluster is None or cluster.num_devices == 1:
        return None, ()
    replica_devices = devices_per_stage * num_stages
    stage_links = cluster.slowest_stage_links(devices_per_stage, num_stages, cluster.num_devices // replica_devices)
    if shards > 1 and cluster.num_devices > cluster.devices_per_node:
        return cluster.network(1 / min(num_stages, cluster.devices_per_node)), stage_links
    return cluster.tensor_link(devices_per_stage), stage_links


def memory_limit_bytes(args: MultiTaskTrainingArguments) -> int | None:
    """Return the bytes that a plan may fill: the limit of the arguments, else the GPU minus a margin, else no limit."""
    if args.memory_limit_gib is not None:
        return int(args.memory_limit_gib * 2**30)
    if args.device.type != "cuda":
        return None
    return int(_USABLE_SHARE * torch.cuda.get_device_properties(args.device).total_memory)


def device_memory_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU, or what this process may have of the host; `None` if it is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory_bytes() if device.type == "cpu" else None


def interleaved_passes(args: MultiTaskTrainingArguments, target: Target) -> int | str:
    """Return how many passes may take turns on a target: as in the arguments, or "auto" if the planner can decide."""
    # Unequal replicas plan as if none were cut, though some of them may be.
    has_sums = target.devices_per_stage > 1 or (target.is_own and args.replicas is not None)
    if not has_sums:
        return 1
    # On the run's own devices turns are chosen only by what was measured there.
    is_unknown = target.is_own and target.profile.source != "measured"
    return 1 if args.interleaved_passes == "auto" and is_unknown else args.interleaved_passes


def target_notes(
    target: Target, layers_per_stage: Sequence[int], shape: ModelShape, turns: TurnPlan | None = None
) -> tuple[str, ...]:
    """Return remarks on how a target's devices share the backbone, given the number of layers of each stage."""
    notes, link = [], target.tensor_link
    figures = (
        "" if link is None else f"at {link.bytes_per_s / 1e9:,.3g} GB/s and {1e6 * link.latency_s:,.3g} us a message"
    )

    def charged(what: str) -> str:
        return f"nothing for {what}, as no link is known" if link is None else f"{what} in full, {figures}"

    if target.num_replicas > 1:
        notes.append(
            f"each global batch is divided among {target.num_replicas} replicas; passes and times are those of the one"
            " with most rows"
        )
    if target.devices_per_stage > 1:
        is_measured, hidden = target.profile.source == "measured", ""
        if turns is None:
            if target.is_own and (not is_measured or target.profile.overlap is None):
                hidden = "; passes run one after another, as no cost_profile has measured here how much turns hide"
        elif target.profile.overlap is None:
            hidden = ", as no profile says how much of them turns hide"
        else:
            hidden = f", minus the part that turns hide{'' if is_measured else ', by a data sheet'}"
        notes.append(
            f"{target.devices_per_stage} devices share every layer (tensor parallelism): memory is that of one of them,"
            f" and times include {charged('every all-reduce over them')}{hidden}"
        )
    if target.backbone_shards > 1:
        over_stages = f", over {target.num_stages} stages" if target.num_stages > 1 else ""
        notes.append(
            f"the frozen weights ({bytes_text(shape.backbone_bytes)}{over_stages}) are divided among"
            f" {target.backbone_shards} replicas: memory is that of one of them with the gathered layer,"
            f" and times include {charged('every all-gather')}"
        )
    if max(layers_per_stage) - min(layers_per_stage) > 1:
        notes.append(
            f"stages have {', '.join(map(str, layers_per_stage))} layers: balanced by predicted cost, embedding and"
            " head included, within the memory of each"
        )
    if target.device_type != "cpu":
        notes.append("the error bands of time and memory were measured on CPUs only")
    return tuple(notes)
