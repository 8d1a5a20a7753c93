"""Measures a `Profile`: how long canonical shapes of a backbone's operators take on a device (M §4, Offline Profiling).

What is run are this package's own paths on a copy of the backbone's first layers with random weights, so that neither
weights nor adapters of the user are read or touched, and a backbone that is only described can be profiled. Profiles
are kept as JSON by a key of device, dtype, shapes and versions, and read again while all of these are the same.

`peft_mux.profiling.memory` counts, without any device, what a pass keeps for its backward.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peft_mux.modeling.backbone.shape import model_shape
from peft_mux.profiling.parts import PartTimes, SmallPass
from peft_mux.profiling.stopwatch import Stopwatch
from peft_mux.profiling.subject import Subject, config_of, plain_backbone
from peft_mux.scheduler.costs.curves import AdapterTable, Curve
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.link import Link, Overlap
from peft_mux.scheduler.costs.profile import Profile, profile_key, shape_signature
from peft_mux.storage.atomic import write_file

_PART_VERSION = "2"
"""Version of what is measured and how; profiles of another version are measured anew."""


def profile_backbone(
    model: Any,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    budget_s: float = 60.0,
    folder: Path | None = None,
    refresh: bool = False,
    link: Link | None = None,
    overlap: Callable[[Profile], Overlap | None] | None = None,
    timer: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Return the profile of a backbone on a device: a stored one where it fits, else measured now.

    Quantised layers are measured as plain ones in `dtype`.

    Args:
        model: `MultiTaskPeftModel` or backbone, possibly without weights; not changed.
        device: the device to measure on.
        dtype: the dtype in which the backbone computes.
        budget_s: seconds that the measurement may take; large shapes are left out where they would not fit, but of
            each part the two smallest are always taken, three times at least. `Profile.reach` says where it stopped.
        folder: folder of stored profiles; `None` to store nothing.
        refresh: whether to measure although a stored profile fits.
        link: link between devices, where there are several, as `profiling.link.measure_link` measures it. It takes
            the place of a stored one.
        overlap: measures what passes in turns cost and hide there, given the rest of the profile; it takes the place of
            a stored one.
        timer: clock that times a CPU; `time.process_time` leaves out what other programs take from one thread.

    Raises:
        ValueError: for a budget that is not above 0.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}; allowed: more than 0. 60 is enough for most devices.")
    device = torch.device(device)
    names = _identity(model, device, dtype)
    path = None if folder is None else Path(folder) / f"{profile_key(**names)}.json"
    stored = None if path is None or refresh else _read_stored(path)
    if stored is not None:
        profile = stored
    else:
        profile = _measure(Subject(model, device=device, dtype=dtype), Stopwatch(device, budget_s, timer), names)
    # Of the processes that there are now, if there are several.
    if link is not None:
        profile = replace(profile, link=link)
    known = None if overlap is None else overlap(profile)
    if known is not None:
        profile = replace(profile, overlap=known)
    if profile != stored:
        _store(profile, path)
    return profile


def _store(profile: Profile, path: Path | None) -> None:
    """Write a profile; nothing where there is no path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, profile.to_json().encode())


def _identity(model: Any, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a profile is found by: device, dtype, shapes of the model, and versions."""
    config = config_of(model)
    shape = model_shape(plain_backbone(model), config, dtype=dtype, activation_dtype=dtype)
    return {
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "model": f"{type(plain_backbone(model)).__name__}-{shape_signature(shape)}",
        "versions": software_versions(device.type),
    }


def software_versions(device: str) -> dict[str, str]:
    """Return the versions of what measured times depend on, by name.

    Args:
        device: name or type of a device; the version of CUDA matters for all but a CPU.
    """
    versions = {"torch": torch.__version__, "profile": _PART_VERSION}
    if not device.startswith("cpu") and torch.version.cuda is not None:
        versions["cuda"] = str(torch.version.cuda)
    return versions


def device_name(device: torch.device) -> str:
    """Return the name of a device as profiles have it; threads are part of what a CPU is."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {_cpu_model()}, {torch.get_num_threads()} threads"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or "CPU"


def _read_stored(path: Path) -> Profile | None:
    """Return a stored profile; `None` where there is none that can be read."""
    try:
        profile = Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # A file that was renamed or edited may be of another device or version.
    return profile if profile.key == path.stem else None


def _measure(subject: Subject, stopwatch: Stopwatch, names: dict[str, Any]) -> Profile:
    parts = PartTimes(subject, stopwatch)
    # Weights that are read for the first time and threads that start would count as the first point.
    stopwatch.measure(lambda: subject.run_layers(64), share=0.02)
    layer, embedding, forward_fraction = parts.layers()
    attention, attention_call_s = parts.attention()
    head, optimizer = parts.head(), parts.optimizer()
    whole = parts.small_pass()
    step_overhead_s = parts.step_overhead_s()
    # Last, as it takes the frozen weights out of the layers.
    ranks, widths, tokens, adapter_s, utilization = parts.adapters()
    profile = Profile(
        device=names["device"],
        dtype=names["dtype"],
        model=names["model"],
        versions=tuple(sorted(names["versions"].items())),
        layer=Curve.measured(*layer),
        attention=Curve.measured(*attention, is_quadratic=True),
        adapter=AdapterTable.measured(ranks, widths, tokens, adapter_s),
        utilization=AdapterTable.measured(ranks, widths, tokens, utilization, level=False),
        head=Curve.measured(*head),
        embedding=Curve.measured(*embedding),
        optimizer=Curve.measured(*optimizer),
        step_overhead_s=step_overhead_s,
        attention_call_s=attention_call_s,
        forward_fraction=forward_fraction,
        source="measured",
    )
    return replace(profile, pass_overhead_s=_unaccounted_s(profile, subject, whole))


def _unaccounted_s(profile: Profile, subject: Subject, whole: SmallPass) -> float:
    """Return what a small pass took beyond its predicted parts: the overhead of each pass."""
    cost = CostModel(profile, subject.shape)
    loads = subject.loads(whole.names, whole.lengths, whole.rank)
    # Parts are medians of their own, whose sum may exceed the whole by noise.
    return max(whole.seconds - cost.pass_s(loads, 1), 0.0)
