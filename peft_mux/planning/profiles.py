"""Which profile a run plans with: a stored file or a data sheet, and what the reader of a plan should know about it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.errors import ConfigError
from peft_mux.profiling.backbone import device_name, software_versions
from peft_mux.scheduler.costs.hardware import DEVICES, Cluster, known_device, parse_devices
from peft_mux.scheduler.costs.memory import ModelShape
from peft_mux.scheduler.costs.profile import Profile, analytic_profile, shape_signature

_STAND_IN = "A100-80GB"
_MEASURE = 'Measure this device with "peft-mux profile" and give the file as cost_profile.'


class RunProfile(NamedTuple):
    """A profile, and remarks for the plans that are made with it.

    Attributes:
        profile: the profile to plan with.
        notes: what about the profile does not fit the run; empty where all does.
    """

    profile: Profile
    notes: tuple[str, ...] = ()


def run_profile(args: MultiTaskTrainingArguments, shape: ModelShape, devices_per_stage: int = 1) -> RunProfile:
    """Return the profile that a run plans with: a stored file, or numbers from data sheets.

    Args:
        args: the arguments of the run.
        shape: the shape of its backbone.
        devices_per_stage: number of devices that share every layer; data sheets then tell that smaller products fill a
            device less.

    Raises:
        ConfigError: for a file that cannot be read, or is no profile.
    """
    if args.cost_profile is not None:
        profile = _stored_profile(args.cost_profile)
        return RunProfile(profile, _misfits(profile, args, shape))
    if args.device.type != "cuda":
        return RunProfile(analytic_profile(DEVICES["cpu"], shape, devices_per_stage))
    name = torch.cuda.get_device_name(args.device)
    # By memory too, as several devices of one name differ in it alone.
    known = known_device(name, torch.cuda.get_device_properties(args.device).total_memory)
    if known is not None:
        return RunProfile(analytic_profile(known, shape, devices_per_stage))
    note = f"no data sheet of {name!r} is known here; times are planned as of {_STAND_IN}. {_MEASURE}"
    return RunProfile(analytic_profile(DEVICES[_STAND_IN], shape, devices_per_stage), (note,))


def data_sheet_cluster(profile: Profile, num_devices: int) -> Cluster | None:
    """Return devices such as a profile was made for, with their links; `None` where there is no data sheet of them.

    Args:
        profile: a profile, measured or from a data sheet.
        num_devices: number of devices of the cluster.
    """
    name = next((known for known in DEVICES if profile.device == known), None)
    if name is None:
        device = known_device(profile.device, 0)
        name = "cpu" if profile.device.startswith("cpu") else None if device is None else device.name
    return None if name is None else parse_devices(f"{num_devices}x{name}")


def _stored_profile(path: str) -> Profile:
    try:
        return Profile.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"args.cost_profile: {path!r} is not a profile ({error}); allowed: a JSON file that"
            ' "peft-mux profile" wrote. Measure anew, or leave cost_profile out.'
        ) from error


def _misfits(profile: Profile, args: MultiTaskTrainingArguments, shape: ModelShape) -> tuple[str, ...]:
    """Return remarks on a stored profile that was made for something else than this run."""
    notes = []
    # The bytes of the weights depend on how they are held, not on what is computed.
    own_shapes = shape_signature(shape).rpartition("-W")[0]
    model = profile.model.rpartition("-W")[0] or profile.model
    if model != own_shapes and not model.endswith(f"-{own_shapes}"):
        notes.append(f"cost_profile is of another backbone ({profile.model}; this one is {own_shapes}). {_MEASURE}")
    devices = {device_name(args.device), args.device.type}
    if args.device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(args.device).total_memory
        known = known_device(torch.cuda.get_device_name(args.device), total_bytes)
        devices |= set() if known is None else {known.name}
    if profile.device not in devices:
        notes.append(
            f"cost_profile is of another device ({profile.device}; this one is {device_name(args.device)}). {_MEASURE}"
        )
    if profile.source == "measured":
        notes += _measured_otherwise(profile, shape)
    return tuple(notes)


def _measured_otherwise(profile: Profile, shape: ModelShape) -> list[str]:
    """Return remarks on times that were measured in another data type, or with other software."""
    notes = []
    measured_bytes = getattr(torch, profile.dtype, torch.float32).itemsize
    if measured_bytes != shape.activation_bytes:
        notes.append(
            f"cost_profile was measured in {profile.dtype}; this run computes in {8 * shape.activation_bytes} bits. "
            f"{_MEASURE}"
        )
    now = software_versions(profile.device)
    others = [f"{name} {version}" for name, version in profile.versions if now.get(name, version) != version]
    if others:
        here = ", ".join(f"{name} {version}" for name, version in now.items())
        notes.append(f"cost_profile was measured with {', '.join(others)}; here are {here}. {_MEASURE}")
    return notes
