"""Measures a `Profile`: the times of canonical shapes of a backbone's operators on a device (M §4, Offline Profiling).

The package's own paths run on a copy of the backbone's first layers with random weights. So weights and adapters of the
user are neither read nor changed, and a backbone without weights can be profiled too. Profiles are stored as JSON by a
key of device, dtype, shapes and versions, and read again while all of these are the same.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from peft_mux.kernels.cross_entropy.linear import Head, linear_cross_entropy
from peft_mux.modeling.adapters.lora.layer import LinearGroup
from peft_mux.modeling.backbone.modules import first_layers
from peft_mux.planning.model_shape import config_of, model_shape, plain_backbone
from peft_mux.planning.profiling.subject import RANKS, Subject
from peft_mux.scheduler.costs.hardware import Overlap
from peft_mux.scheduler.costs.latency import CostModel, whole_pass
from peft_mux.scheduler.costs.profile import AdapterTable, Curve, Profile, profile_key, shape_signature
from peft_mux.scheduler.plan import Link
from peft_mux.storage import write_file

_PART_VERSION = "3"
"""Version of what is measured and how; profiles of another version are measured again."""
_LEAST_REPEATS = 2
_MOST_REPEATS = 25
_TOKENS = (16, 64, 256, 1024, 2048)
_LENGTHS = (16, 64, 80, 128, 256, 512, 1024)  # on a GPU, rows of up to 64 tokens have kernels of their own
_ADAPTER_TOKENS = (16, 64, 256, 1024)
_TARGETS = (16, 64, 256, 1024, 2048)
_PARAMETERS = (10_000, 100_000, 1_000_000, 4_000_000)
_ATTENTION_TOKENS = 1024
_MOST_CYCLES_PER_S = 3e9
"""More than the clock of any GPU."""

Points = tuple[list[float], list[float]]
"""Counts (of tokens, targets or parameters) and the seconds that each takes."""


class Stopwatch:
    """Times functions on a device: warm-up, repetitions within a budget of seconds, medians.

    `torch.utils.benchmark.Timer` does not replace it: functions that are compared run in turns here, so that both meet
    the same noise, and on CUDA the host's time between launches is left out: events lie around the work of a function,
    which the device begins once all of it is launched.

    Args:
        device: the device on which the functions run; on CUDA they are timed by events.
        budget_s: seconds for all measurements together.
        timer: the clock that times functions on a CPU, in seconds.
        wall: the clock for the budget, in seconds.
    """

    def __init__(
        self,
        device: torch.device,
        budget_s: float,
        timer: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device, self._budget_s, self._timer, self._wall = device, budget_s, timer, wall
        self._start_s = wall()
        # Seconds that all measurements so far would have taken with the fewest repetitions.
        self._least_s = 0.0

    def measure(self, *runs: Callable[[], Any], share: float, is_on_device: bool = True) -> list[float]:
        """Return the median seconds of functions that run in turns.

        Args:
            runs: each is called once to warm up, at least twice to measure, and more often while the share lasts.
            share: part of the budget that may be spent on all of them, in (0, 1].
            is_on_device: whether time in which a GPU waits for the host is left out.
        """
        start_s = self._wall()
        taken: list[list[float]] = [[] for _ in runs]
        for run in runs:
            self._time_once(run)
        hosts_s = [self.host_s(run) for run in runs] if is_on_device else [0.0] * len(runs)
        for count in range(_MOST_REPEATS):
            if count == _LEAST_REPEATS:
                self._least_s += self._wall() - start_s
            if count >= _LEAST_REPEATS and self._wall() - start_s > share * self._budget_s:
                break
            for seconds, run, host_s in zip(taken, runs, hosts_s, strict=True):
                seconds.append(self._time_once(run, host_s))
        # Not the mean: other programs on the machine make single runs several times as long.
        return [statistics.median(seconds) for seconds in taken]

    def host_s(self, run: Callable[[], Any]) -> float:
        """Return the seconds that the host takes to launch the work of a function; 0 on a CPU, which does it too."""
        if self._device.type != "cuda":
            return 0.0
        torch.cuda.synchronize(self._device)
        start_s = self._timer()
        run()
        return self._timer() - start_s

    def affordable(self, points: Sequence[int], *, part: float) -> Iterator[int]:
        """Yield points in ascending order; from the third on only those that should fit into a part of the budget.

        A point is assumed to need as much as the one before with the fewest repetitions, times the ratio of the two.
        """
        before, needed_s = 0, 0.0
        remaining_at_end_s = max(0.0, self._remaining_s() - part * self._budget_s)
        for number, point in enumerate(points):
            # The two smallest always: a line through fewer points has no slope.
            if number >= 2 and self._remaining_s() - needed_s * point / before < remaining_at_end_s:
                return
            least_s = self._least_s
            yield point
            before, needed_s = point, self._least_s - least_s

    def _remaining_s(self) -> float:
        return self._budget_s - (self._wall() - self._start_s)

    def _time_once(self, run: Callable[[], Any], host_s: float = 0.0) -> float:
        """Return the seconds of one call; a GPU begins only after `host_s`."""
        if self._device.type != "cuda":
            start_s = self._timer()
            run()
            return self._timer() - start_s
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        if host_s:
            torch.cuda._sleep(int(host_s * _MOST_CYCLES_PER_S))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(self._device)
        return begin.elapsed_time(end) / 1000


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
    """Return the profile of a backbone on a device: a stored one if it fits, otherwise a measured one.

    Quantised layers are measured as plain ones in `dtype`.

    Args:
        model: `MultiTaskPeftModel` or backbone, possibly without weights; not changed.
        device: the device to measure on.
        dtype: the dtype in which the backbone computes.
        budget_s: seconds that the measurement may take; large shapes are left out if they would not fit, but of each
            part the two smallest are always taken, three times at least. `Profile.reach` says where it stopped.
        folder: folder of stored profiles; `None` to store nothing.
        refresh: whether to measure although a stored profile fits.
        link: link between devices, if there are several, as `measure_link` of
            `peft_mux.planning.profiling.measured_links` measures it. It replaces a stored one.
        overlap: measures the cost of passes in turns, and how much they hide, given the rest of the profile; it
            replaces a stored one.
        timer: clock that times a CPU; `time.process_time` leaves out what other programs take from one thread.

    Raises:
        ValueError: for a budget that is not above 0.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s must be more than 0, got {budget_s}. 60 is enough for most devices.")
    device = torch.device(device)
    names = _identity(model, device, dtype)
    path = None if folder is None else Path(folder) / f"{profile_key(**names)}.json"
    stored = None
    if path is not None and not refresh:
        with suppress(OSError, ValueError):
            on_disk = Profile.from_json(path.read_text(encoding="utf-8"))
            # A file that was renamed or edited may be of another device or version.
            stored = on_disk if on_disk.key == path.stem else None
    profile = stored
    if profile is None:
        profile = _measure(Subject(model, device=device, dtype=dtype), Stopwatch(device, budget_s, timer), names)
    # Of the present processes, if there are several.
    if link is not None:
        profile = replace(profile, link=link)
    known = None if overlap is None else overlap(profile)
    if known is not None:
        profile = replace(profile, overlap=known)
    if profile != stored and path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, profile.to_json().encode())
    return profile


def _identity(model: Any, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the key of a profile: device, dtype, shapes of the model, and versions."""
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
        device: name or type of a device; the version of CUDA matters for all except a CPU.
    """
    versions = {"torch": torch.__version__, "profile": _PART_VERSION}
    if not device.startswith("cpu") and torch.version.cuda is not None:
        versions["cuda"] = str(torch.version.cuda)
    return versions


def device_name(device: torch.device) -> str:
    """Return the name of a device as profiles have it; for a CPU the number of threads is part of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else platform.processor() or "CPU"
    return f"{platform.machine()} {cpu}, {torch.get_num_threads()} threads"


def _measure(subject: Subject, stopwatch: Stopwatch, names: dict[str, Any]) -> Profile:
    # Weights that are read for the first time and threads that start would count as the first point.
    stopwatch.measure(subject.layers_runner(64), share=0.02)
    layer, embedding, recompute, forward_fraction = _layer_times(subject, stopwatch)
    attention, attention_call_s = _attention_times(subject, stopwatch)
    head = _head_times(subject, stopwatch)
    parameters, update_s = [], []
    for count in stopwatch.affordable(_PARAMETERS, part=0.05):
        parameters.append(float(count))
        update_s += stopwatch.measure(subject.update_runner(count), share=0.01, is_on_device=False)
    # A whole pass of two short sequences, where overheads have the largest share.
    rank, lengths = RANKS[0], (16, 32)
    small_names = tuple(f"r{rank}_{number}" for number in range(len(lengths)))
    small_pass = subject.pass_runner(lengths, small_names)
    (small_pass_s,) = stopwatch.measure(small_pass, share=0.02, is_on_device=False)
    # The host's time of layers, without what it takes around them, is that of the second half of them.
    first_half, host_s = max(1, subject.num_layers // 2), []
    for count in (first_half, subject.num_layers):
        with first_layers(subject.model.backbone, count):
            host_s.append(statistics.median(stopwatch.host_s(small_pass) for _ in range(_LEAST_REPEATS + 1)))
    layer_host_s = max(host_s[1] - host_s[0], 0.0) / max(1, subject.num_layers - first_half)
    step_names = [name for name in subject.model.tasks[:4] for _ in range(8)]
    (step_overhead_s,) = stopwatch.measure(
        lambda: subject.batch([64] * len(step_names), step_names), share=0.01, is_on_device=False
    )
    adapter, utilization = _adapter_times(subject, stopwatch)
    profile = Profile(
        device=names["device"],
        dtype=names["dtype"],
        model=names["model"],
        versions=tuple(sorted(names["versions"].items())),
        layer=Curve.measured(*layer),
        attention=Curve.measured(*attention, is_quadratic=True),
        adapter=adapter,
        utilization=utilization,
        head=Curve.measured(*head),
        embedding=Curve.measured(*embedding),
        optimizer=Curve.measured(parameters, update_s),
        step_overhead_s=step_overhead_s,
        attention_call_s=attention_call_s,
        forward_fraction=forward_fraction,
        layer_host_s=layer_host_s,
        recompute=Curve.measured(*recompute),
        recompute_host_s=stopwatch.host_s(subject.recompute_runner(_TOKENS[0])) / subject.num_layers,
        source="measured",
    )
    # What the small pass took in addition to its predicted parts is the overhead of each pass. Parts are medians by
    # themselves, whose sum may exceed the whole by noise.
    cost = CostModel(profile, subject.shape)
    loads = subject.loads(small_names, lengths, rank)
    return replace(
        profile, pass_overhead_s=max(small_pass_s - float(cost.passes_s(loads, [whole_pass(loads)]).sum()), 0.0)
    )


def _layer_times(subject: Subject, stopwatch: Stopwatch) -> tuple[Points, Points, Points, float]:
    """Return seconds of a layer, outside of layers and of what `selective_recompute` adds, and the forward's share."""
    layer_s, embedding_s, recompute_s, counts, forward_part = [], [], [], [], 0.5
    for tokens in stopwatch.affordable(_TOKENS, part=0.25):
        whole, around, forward, again = stopwatch.measure(
            subject.layers_runner(tokens),
            subject.layers_runner(tokens, has_layers=False),
            subject.layers_runner(tokens, forward_only=True),
            subject.recompute_runner(tokens),
            share=0.2 / len(_TOKENS),
        )
        counts.append(float(tokens))
        embedding_s.append(around)
        # Measured in turns, so that what surrounds the layers is subtracted under the same noise.
        layer_s.append(max(whole - around, 0.0) / subject.num_layers)
        recompute_s.append(again / subject.num_layers)
        forward_part = forward / whole
    # From the largest shape, where noise has the smallest share, and clamped to plausible bounds.
    points = (counts, layer_s), (counts, embedding_s), (counts, recompute_s)
    return *points, min(max(forward_part, 0.1), 0.9)


def _attention_times(subject: Subject, stopwatch: Stopwatch) -> tuple[Points, float]:
    """Return seconds of one sequence's attention product over its length, and of a further call."""
    counts, seconds = [], []
    for length in stopwatch.affordable(_LENGTHS, part=0.1):
        # As many tokens at every length: one short sequence alone would show the launch rather than the product.
        count = max(1, _ATTENTION_TOKENS // length)
        counts.append(float(length))
        (taken_s,) = stopwatch.measure(subject.attention_runner([length] * count), share=0.01)
        seconds.append(taken_s / count)
    # In steps of 16, to which attention rounds lengths up: so each of these is a separate call.
    mixed = [16 * number for number in range(1, 9)]
    (together_s,) = stopwatch.measure(subject.attention_runner(mixed), share=0.02)
    expected_s = float(np.interp(mixed, counts, seconds).sum())
    return (counts, seconds), max(together_s - expected_s, 0.0) / len(mixed)


def _head_times(subject: Subject, stopwatch: Stopwatch) -> Points:
    """Return seconds of output head and loss over targets."""
    module = subject.model.backbone.get_output_embeddings()
    if module is None:  # a classifier, whose heads are small
        return [1.0], [0.0]
    weight = getattr(module, "base_layer", module).weight.detach()
    counts, seconds = [], []
    for count in stopwatch.affordable(_TARGETS, part=0.1):
        hidden = torch.randn(count, weight.shape[1], device=weight.device, dtype=weight.dtype, requires_grad=True)
        targets = torch.zeros(count, dtype=torch.int64, device=weight.device)

        def run(hidden: torch.Tensor = hidden, targets: torch.Tensor = targets) -> None:
            linear_cross_entropy(hidden, Head(weight, None, 1.0, None), targets).sum().backward()

        counts.append(float(count))
        seconds += stopwatch.measure(run, share=0.015)
    return counts, seconds


def _adapter_times(subject: Subject, stopwatch: Stopwatch) -> tuple[AdapterTable, AdapterTable]:
    """Return seconds of one adapter alone, and its utilization of the device, by rank, width and tokens.

    Adapters of several tasks run together, and on a GPU also one alone: n of them that take as long as m one after
    another keep m / n of the device busy each. The frozen weights are taken out of the layers first, so that the base
    products, many times longer, do not drown the adapters in noise.
    """
    groups = _groups_of_one_layer(subject)
    for group in subject.groups:
        for member in group.members:
            member.module.base_layer = nn.Identity()
    widths = sorted({_width(group) for group in groups})
    shape = len(RANKS), len(widths), len(_ADAPTER_TOKENS)
    alone_s, utilization = np.zeros(shape), np.ones(shape)
    share = 0.2 / (len(RANKS) * len(_ADAPTER_TOKENS) * len(groups))
    counts: list[float] = []
    for t, tokens in enumerate(stopwatch.affordable(_ADAPTER_TOKENS, part=0.25)):
        counts.append(float(tokens))
        for r, rank in enumerate(RANKS):
            names = [f"r{rank}_{number}" for number in range(subject.tasks_per_rank)]
            together = _group_times(subject, stopwatch, groups, names, tokens, share)
            if subject.device.type == "cpu":
                alone = [seconds / len(names) for seconds in together]
            else:
                alone = _group_times(subject, stopwatch, groups, names[:1], tokens, share)
            for w, width in enumerate(widths):
                numbers = [number for number, group in enumerate(groups) if _width(group) == width]
                # A group is one launch, so its time is divided among its layers.
                linears = sum(len(groups[number].members) for number in numbers)
                alone_s[r, w, t] = sum(alone[number] for number in numbers) / linears
                if subject.device.type == "cuda":
                    together_s = sum(together[number] for number in numbers) / linears
                    busy = together_s / (len(names) * max(alone_s[r, w, t], 1e-9))
                    utilization[r, w, t] = np.clip(busy, 0.01, 1.0)
    measured = slice(0, len(counts))
    return (
        AdapterTable.measured(RANKS, widths, counts, alone_s[..., measured]),
        AdapterTable.measured(RANKS, widths, counts, utilization[..., measured], level=False),
    )


def _group_times(
    subject: Subject,
    stopwatch: Stopwatch,
    groups: Sequence[LinearGroup],
    names: Sequence[str],
    tokens: int,
    share: float,
) -> list[float]:
    """Return seconds of the adapters of each group, minus the time without adapters."""
    batch = subject.batch([tokens] * len(names), names)
    seconds = []
    for group in groups:
        layer: Any = group.members[0].module
        x = torch.randn(batch.num_tokens, layer.in_features, device=subject.device, dtype=subject.dtype)
        with_s, without_s = stopwatch.measure(
            subject.group_runner(group, batch, x),
            subject.group_runner(group, batch, x, has_adapters=False),
            share=share,
        )
        seconds.append(max(with_s - without_s, 0.0))
    return seconds


def _groups_of_one_layer(subject: Subject) -> list[LinearGroup]:
    """Return the groups of the first layer, and those of other layers whose width the first layer does not have."""
    groups = subject.groups
    count = len(groups) // subject.num_layers
    known = {_width(group) for group in groups[:count]}
    others = {_width(group): group for group in reversed(groups[count:]) if _width(group) not in known}
    return groups[:count] + list(others.values())


def _width(group: LinearGroup) -> float:
    """Return the mean over a group's linear layers of input plus output features."""
    layers: list[Any] = [member.module for member in group.members]
    return sum(layer.in_features + layer.out_features for layer in layers) / len(layers)
