"""Times functions on a device: warm-up, repetitions within a budget, medians."""

# MERGED: The measurements of a profile, part by part: which shapes are run, and what is taken off what.
# MERGED: Measures a `Profile`: how long canonical shapes of a backbone's operators take on a device (M §4, Offline
# MERGED: Profiling).
# MERGED: What is run are this package's own paths on a copy of the backbone's first layers with random weights, so
# MERGED: that neither
# MERGED: weights nor adapters of the user are read or touched, and a backbone that is only described can be profiled.
# MERGED: Profiles
# MERGED: are kept as JSON by a key of device, dtype, shapes and versions, and read again while all of these are the
# MERGED: same.
# MERGED: `peft_mux.planning.profiling.memory` counts, without any device, what a pass keeps for its backward.

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from peft_mux.kernels.cross_entropy.linear import Head, linear_cross_entropy
from peft_mux.modeling.adapters.lora.layer import LinearGroup
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.backbone.shape import model_shape
from peft_mux.planning.profiling.subject import RANKS, Subject, config_of, plain_backbone
from peft_mux.scheduler.costs.curves import AdapterTable, Curve
from peft_mux.scheduler.costs.hardware import Link, Overlap
from peft_mux.scheduler.costs.latency import CostModel, whole_pass
from peft_mux.scheduler.costs.profile import Profile, profile_key, shape_signature
from peft_mux.storage import write_file

_LEAST_REPEATS = 2
_MOST_REPEATS = 25


class Stopwatch:
    """Times functions, and keeps a budget of seconds for doing so.

    Args:
        device: the device on which the functions run; on CUDA they are timed by events.
        budget_s: seconds for all measurements together.
        timer: the clock that times functions on a CPU, in seconds.
        wall: the clock by which the budget is kept, in seconds.

    Attributes:
        device: the device on which the functions run.
        budget_s: seconds for all measurements together.
        least_s: seconds that all measurements so far would have taken at the fewest repetitions.
    """

    def __init__(
        self,
        device: torch.device,
        budget_s: float,
        timer: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the budget now."""
        self._timer = timer
        self._wall = wall
        self.device = device
        self.budget_s = budget_s
        self.least_s = 0.0
        self._start_s = wall()

    @property
    def remaining_s(self) -> float:
        """Seconds that are left of the budget."""
        return self.budget_s - (self._wall() - self._start_s)

    def measure(self, run: Callable[[], Any], *, share: float) -> float:
        """Return the median seconds of a function.

        Args:
            run: called once to warm up, at least twice to measure, and more often while its share lasts.
            share: part of the budget that may be spent, in (0, 1].
        """
        return self.measure_all([run], share=share)[0]

    def measure_all(self, runs: list[Callable[[], Any]], *, share: float) -> list[float]:
        """Return the median seconds of functions that are taken in turns, so that noise meets all alike.

        Args:
            runs: each is called once to warm up, at least twice to measure, and more often while the share lasts.
            share: part of the budget that may be spent on all of them, in (0, 1].
        """
        start_s = self._wall()
        taken: list[list[float]] = [[] for _ in runs]
        for run in runs:
            self._time_once(run)
        for count in range(_MOST_REPEATS):
            if count == _LEAST_REPEATS:
                self.least_s += self._wall() - start_s
            if count >= _LEAST_REPEATS and self._wall() - start_s > share * self.budget_s:
                break
            for seconds, run in zip(taken, runs, strict=True):
                seconds.append(self._time_once(run))
        # Not the mean: other programs on the machine make single runs several times as long.
        return [statistics.median(seconds) for seconds in taken]

    def _time_once(self, run: Callable[[], Any]) -> float:
        """Return the seconds of one call."""
        if self.device.type != "cuda":
            start_s = self._timer()
            run()
            return self._timer() - start_s
        # Events stand in the stream itself, so that the host's own time between launches is not counted.
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / 1000


_TOKENS = (16, 64, 256, 1024, 2048)
_LENGTHS = (16, 64, 128, 256, 512, 1024)
_ADAPTER_TOKENS = (16, 64, 256, 1024)
_TARGETS = (16, 64, 256, 1024, 2048)
_PARAMETERS = (10_000, 100_000, 1_000_000, 4_000_000)
_ATTENTION_TOKENS = 1024

Points = tuple[list[float], list[float]]
"""Counts (of tokens, targets or parameters) and the seconds that each takes."""


@dataclass(frozen=True, slots=True)
class SmallPass:
    """One whole pass, and what was in it.

    Attributes:
        rank: rank of all adapters in it.
        names: names of the tasks in it.
        lengths: number of tokens of each task's one sequence.
        seconds: how long forward and backward took.
    """

    rank: int
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    seconds: float


class PartTimes:
    """Times the parts of a subject.

    Args:
        subject: the layers that are run.
        stopwatch: times them, and keeps the budget of the whole measurement.
    """

    def __init__(self, subject: Subject, stopwatch: Stopwatch) -> None:
        """Keep what to run and what to time it with."""
        self.subject = subject
        self.stopwatch = stopwatch

    def layers(self) -> tuple[Points, Points, float]:
        """Return one layer's seconds over tokens, those of what surrounds the layers, and the part of the forward."""
        layer_s, embedding_s, counts, forward_s = [], [], [], 0.5
        for tokens in self._affordable(_TOKENS, part=0.25):
            whole, around, forward = self.stopwatch.measure_all(
                [
                    self.subject.layers_runner(tokens),
                    self.subject.layers_runner(tokens, has_layers=False),
                    self.subject.layers_runner(tokens, forward_only=True),
                ],
                share=0.2 / len(_TOKENS),
            )
            counts.append(float(tokens))
            embedding_s.append(around)
            # Measured in turns, so that what lies around the layers is taken off under the same noise.
            layer_s.append(max(whole - around, 0.0) / self.subject.num_layers)
            forward_s = forward / whole
        # Of the largest shape, in which noise weighs least, and within bounds that any noise must respect.
        return (counts, layer_s), (counts, embedding_s), min(max(forward_s, 0.1), 0.9)

    def attention(self) -> tuple[Points, float]:
        """Return seconds of one sequence's attention product over its length, and those of a further call."""
        counts, seconds = [], []
        for length in self._affordable(_LENGTHS, part=0.1):
            # As many tokens at every length: one short sequence alone would tell of the launch rather than of the
            # product.
            count = max(1, _ATTENTION_TOKENS // length)
            counts.append(float(length))
            seconds.append(self.stopwatch.measure(self._attention_runner([length] * count), share=0.01) / count)
        # In steps of 16, to which attention rounds lengths up: so each of these is a call of its own.
        mixed = [16 * number for number in range(1, 9)]
        together_s = self.stopwatch.measure(self._attention_runner(mixed), share=0.02)
        expected_s = float(np.interp(mixed, counts, seconds).sum())
        return (counts, seconds), max(together_s - expected_s, 0.0) / len(mixed)

    def adapters(self) -> tuple[Sequence[float], Sequence[float], Sequence[float], Any, Any]:
        """Return ranks, widths, tokens, and [ranks, widths, tokens] of seconds alone and of utilisation.

        Adapters of several tasks run together, and on a GPU also one alone: n of them that take as long as m
        one after another keep m / n of the device busy each.
        """
        subject, groups = self.subject, self._groups_of_one_layer()
        # So that the base products, many times longer, do not drown the adapters in noise.
        subject.drop_base_weights()
        widths = sorted({_width(group) for group in groups})
        shape = len(RANKS), len(widths), len(_ADAPTER_TOKENS)
        alone_s, utilization = np.zeros(shape), np.ones(shape)
        share = 0.2 / (len(RANKS) * len(_ADAPTER_TOKENS))
        tokens: list[float] = []
        for t, count in enumerate(self._affordable(_ADAPTER_TOKENS, part=0.25)):
            tokens.append(float(count))
            for r, rank in enumerate(RANKS):
                times = self._adapter_times(groups, rank, count, share)
                for w, width in enumerate(widths):
                    own = [number for number, group in enumerate(groups) if _width(group) == width]
                    linears = sum(len(groups[number].members) for number in own)
                    # A group is launched as one, so its time is shared out among its layers.
                    together, alone = (sum(times[kind][n] for n in own) / linears for kind in ("together", "alone"))
                    alone_s[r, w, t] = alone
                    if subject.device.type == "cuda":
                        utilization[r, w, t] = np.clip(
                            together / (subject.tasks_per_rank * max(alone, 1e-9)), 0.01, 1.0
                        )
        return RANKS, widths, tokens, alone_s[..., : len(tokens)], utilization[..., : len(tokens)]

    def head(self) -> Points:
        """Return seconds of output head and loss over targets."""
        module = self.subject.model.backbone.get_output_embeddings()
        if module is None:  # a classifier, whose heads are small
            return [1.0], [0.0]
        weight = getattr(module, "base_layer", module).weight.detach()
        counts, seconds = [], []
        for count in self._affordable(_TARGETS, part=0.1):
            hidden = torch.randn(count, weight.shape[1], device=weight.device, dtype=weight.dtype, requires_grad=True)
            targets = torch.zeros(count, dtype=torch.int64, device=weight.device)

            def run(hidden: torch.Tensor = hidden, targets: torch.Tensor = targets) -> None:
                linear_cross_entropy(hidden, Head(weight, None, 1.0, None), targets).sum().backward()

            counts.append(float(count))
            seconds.append(self.stopwatch.measure(run, share=0.015))
        return counts, seconds

    def optimizer(self) -> Points:
        """Return seconds of one task's update over its parameters."""
        counts, seconds = [], []
        for count in self._affordable(_PARAMETERS, part=0.05):
            counts.append(float(count))
            seconds.append(self.stopwatch.measure(self._update_runner(count), share=0.01))
        return counts, seconds

    def small_pass(self) -> SmallPass:
        """Return seconds of a whole pass of two short sequences, in which overheads weigh most."""
        rank, lengths = RANKS[0], (16, 32)
        names = tuple(f"r{rank}_{number}" for number in range(len(lengths)))
        return SmallPass(
            rank, names, lengths, self.stopwatch.measure(self.subject.pass_runner(lengths, names), share=0.02)
        )

    def step_overhead_s(self) -> float:
        """Return seconds of collating a step of some tasks."""
        names = [name for name in self.subject.model.tasks[:4] for _ in range(8)]
        return self.stopwatch.measure(lambda: self.subject.batch([64] * len(names), names), share=0.01)

    def _affordable(self, points: Sequence[int], *, part: float) -> Any:
        """Yield points in ascending order; from the third on only those that should fit into a part of the budget.

        A point is taken to need what the one before it needed at the fewest repetitions, times the ratio of the two.
        """
        stopwatch, before, needed_s = self.stopwatch, 0, 0.0
        remaining_at_end_s = max(0.0, stopwatch.remaining_s - part * stopwatch.budget_s)
        for number, point in enumerate(points):
            # The two smallest always: a line through fewer points tells no slope.
            if number >= 2 and stopwatch.remaining_s - needed_s * point / before < remaining_at_end_s:
                return
            least_s = stopwatch.least_s
            yield point
            before, needed_s = point, stopwatch.least_s - least_s

    def _groups_of_one_layer(self) -> list[LinearGroup]:
        """Return the groups of the first layer, and of further layers those of a width that the first has not."""
        groups = self.subject.linear_groups()
        count = len(groups) // self.subject.num_layers
        known = {_width(group) for group in groups[:count]}
        others = {_width(group): group for group in reversed(groups[count:]) if _width(group) not in known}
        return groups[:count] + list(others.values())

    def _attention_runner(self, lengths: Sequence[int]) -> Callable[[], None]:
        """Return a function that runs one layer's attention product over sequences, forward and backward."""
        subject = self.subject
        batch = subject.batch(lengths, [subject.model.tasks[0]] * len(lengths))
        stream = AttentionStream(subject.model.stream, batch, subject.model.module_names)
        assert subject.attention_call is not None, "layers are run before attention"
        tensors = []
        for shape in subject.attention_call[1]:
            x = torch.randn(1, sum(lengths), shape[1], shape[3], device=subject.device, dtype=subject.dtype)
            tensors.append(x.transpose(1, 2).requires_grad_())

        def run() -> None:
            with subject.model.multiplexing(batch):
                out = subject.run_attention(tensors[0], tensors[1], tensors[2], stream)
            torch.autograd.grad(out, tensors, torch.ones_like(out))

        return run

    def _adapter_times(
        self, groups: Sequence[LinearGroup], rank: int, tokens: int, share: float
    ) -> dict[str, list[float]]:
        """Return seconds of all groups, of one adapter of each linear layer: "together" with others, and "alone"."""
        subject = self.subject
        names = [f"r{rank}_{number}" for number in range(subject.tasks_per_rank)]
        together = self._seconds_of_groups(groups, names, tokens, share)
        if subject.device.type == "cpu":
            each = [seconds / len(names) for seconds in together]
            return {"together": each, "alone": each}
        return {"together": together, "alone": self._seconds_of_groups(groups, names[:1], tokens, share)}

    def _seconds_of_groups(
        self, groups: Sequence[LinearGroup], names: Sequence[str], tokens: int, share: float
    ) -> list[float]:
        """Return seconds of the adapters of each group, less what is there without adapters."""
        batch = self.subject.batch([tokens] * len(names), names)
        seconds = []
        for group in groups:
            layer: Any = group.members[0].module
            x = torch.randn(batch.num_tokens, layer.in_features, device=self.subject.device, dtype=self.subject.dtype)
            with_s, without_s = self.stopwatch.measure_all(
                [self._group_runner(group, batch, x), self._group_runner(group, batch, x, has_adapters=False)],
                share=share / len(groups),
            )
            seconds.append(max(with_s - without_s, 0.0))
        return seconds

    def _group_runner(
        self, group: LinearGroup, batch: Any, x_TD: torch.Tensor, *, has_adapters: bool = True
    ) -> Callable[[], None]:
        """Return a function that runs a group of linear layers, forward and backward."""
        model = self.subject.model
        x_TD = x_TD.requires_grad_()
        layers: list[Any] = [member.module for member in group.members]
        gradients = [x_TD.new_ones(len(x_TD), layer.out_features) for layer in layers]

        def run() -> None:
            for layer in layers:
                layer._disable_adapters = not has_adapters
            with model.multiplexing(batch), self.subject.precision():
                torch.autograd.backward(group.outputs(x_TD), gradients, inputs=[x_TD])
            for layer in layers:
                layer._disable_adapters = False

        return run

    def _update_runner(self, count: int) -> Callable[[], None]:
        """Return a function that does to one page what a step of a task does."""
        page = nn.Parameter(torch.zeros(count, device=self.subject.device))
        page.grad = torch.full_like(page, 1e-3)
        copy = page.detach().clone()
        optimizer = torch.optim.AdamW([page], lr=1e-4)

        def run() -> None:
            nn.utils.get_total_norm([page.grad])  # type: ignore[list-item]
            torch._foreach_copy_([copy], [page.detach()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return run


def _width(group: LinearGroup) -> float:
    """Return input plus output features of a group's linear layers, in the mean."""
    layers: list[Any] = [member.module for member in group.members]
    return sum(layer.in_features + layer.out_features for layer in layers) / len(layers)


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
    return max(whole.seconds - float(cost.passes_s(loads, [whole_pass(loads)]).sum()), 0.0)
