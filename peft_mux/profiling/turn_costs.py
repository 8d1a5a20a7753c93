"""What real passes cost and take in turns where layers are cut: `Overlap` held to a few layers of the backbone.

`profiling.overlap` measures turns of products and sums alone, and a profile is measured on whole layers. What passes
through cut layers take beyond both is found here, by the engine's own turns through a cut copy of the first layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.processes.processes import Processes
from peft_mux.engine.tensor.interleaving import Interleaving
from peft_mux.engine.tensor.links import TensorLinks
from peft_mux.engine.tensor.parallel import cut_model
from peft_mux.engine.tensor.turn_links import TurnLinks
from peft_mux.profiling.overlap import measure_overlap
from peft_mux.profiling.subject import RANKS, Subject, config_of
from peft_mux.scheduler.costs.collectives import ALL_REDUCES_PER_LAYER
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.link import Overlap
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.subgraphs.passes import PassTimes, Stretch, pass_times, turns_timeline

_NUM_PASSES = 2
_LENGTHS = (48, 80)
"""Tokens of the sequences of a pass; each is of another task."""
_RANK = RANKS[1]
_REPEATS = 9
_HALVINGS = 20


class Shards(NamedTuple):
    """Processes among which layers are cut.

    Attributes:
        processes: the processes of the run, connected.
        groups: global ranks of every tensor parallel group of the run.
    """

    processes: Processes
    groups: Sequence[Sequence[int]]

    @property
    def devices(self) -> int:
        """Ranks of the largest group."""
        return max(len(group) for group in self.groups)


def overlap_among(
    shards: Shards, model: Any, *, device: torch.device, dtype: torch.dtype, budget_s: float
) -> Callable[[Profile], Overlap | None]:
    """Return what measures, for a profile of whole layers, what passes in turns cost and hide; all processes call it.

    Args:
        shards: the processes of the run, and which of them share layers.
        model: the `MultiTaskPeftModel` or backbone of which a copy of the first layers is run.
        device: the device to run on; of a GPU nothing is measured.
        dtype: the dtype to compute in.
        budget_s: seconds that passes through cut layers may take.
    """

    def measured(profile: Profile) -> Overlap | None:
        hidden_size = config_of(model).get_text_config().hidden_size
        overlap = measure_overlap(device, hidden_size)
        if overlap is None or shards.devices == 1:
            return overlap
        subject = Subject(model, device=device, dtype=dtype)
        return held_to_passes(overlap, profile, subject, shards, budget_s=budget_s)

    return measured


def held_to_passes(overlap: Overlap, profile: Profile, subject: Subject, shards: Shards, *, budget_s: float) -> Overlap:
    """Return the overlap with which two passes are predicted to take what they take, apart and in turns.

    Every process of the run must call this; each gets the same answer: what the first
    one's profile lacks to the times of the slowest.

    Args:
        overlap: what turns of products and sums alone cost and hide.
        profile: the times of whole layers on this device, and of the link.
        subject: the layers that are run; they are cut in place.
        shards: the processes that share layers.
        budget_s: seconds that the passes may take; each is run twice at least.

    Raises:
        UnsupportedModelError: for an architecture, or a number of ranks, that cannot be cut.
    """
    names = [name for name in subject.model.tasks if name.startswith(f"r{_RANK}_")][: len(_LENGTHS)]
    # Before anything is cut: the cost model divides widths by itself.
    shape, loads = subject.shape, subject.loads(names, _LENGTHS, _RANK)
    links = TensorLinks(shards.groups, shards.processes)
    try:
        trial = _Trial(subject, links, names) if links.size > 1 else None
        measured = torch.tensor(_medians(trial, budget_s), dtype=torch.float64)
    finally:
        links.close()
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    cost = CostModel(replace(profile, overlap=overlap), shape, devices_per_stage=shards.devices)
    passes = [pass_times(cost.pass_parts(loads, 1), Stretch(shape.num_layers))] * _NUM_PASSES
    apart_s, turns_s = measured.tolist()
    found = fitted_costs(overlap, passes, apart_s, turns_s, num_sums=ALL_REDUCES_PER_LAYER * shape.num_layers)
    # Each process has a profile of its own, and so another fit: the first one's is that of all.
    agreed = torch.tensor(astuple(found), dtype=torch.float64)
    dist.broadcast(agreed, src=0)
    return Overlap(*agreed.tolist())


def fitted_costs(
    overlap: Overlap, passes: Sequence[PassTimes], apart_s: float, turns_s: float, *, num_sums: int
) -> Overlap:
    """Return the overlap with which passes are predicted to take what was measured; never less than without it.

    Args:
        overlap: what turns of products and sums alone cost and hide.
        passes: what the cost model predicts of each pass, before anything is added for the host.
        apart_s: seconds of the passes, one after another.
        turns_s: seconds of the same passes in turns.
        num_sums: sums of the layers of a pass, before each of which the host's time is added.
    """
    predicted_s = turns_timeline(passes, overlap, in_turns=False).makespan_s
    host_s = max(0.0, apart_s - predicted_s) / (len(passes) * num_sums)
    # Evenly over all that lies between two sums, so that the whole comes out as it was measured.
    spread_s = host_s * num_sums / len(passes[0])
    with_host = [tuple(one._replace(compute_s=one.compute_s + spread_s) for one in times) for times in passes]

    def in_turns_s(turn_s: float) -> float:
        return turns_timeline(with_host, replace(overlap, turn_s=turn_s)).makespan_s

    low, high = 0.0, max(turns_s, 1e-9)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if in_turns_s(middle) < turns_s else (low, middle)
    return replace(overlap, turn_s=max(overlap.turn_s, low), host_s=host_s)


class _Trial:
    """Two passes through cut layers."""

    def __init__(self, subject: Subject, links: TensorLinks, names: Sequence[str]) -> None:
        self.subject, turn_links = subject, TurnLinks(links)
        cut_model(subject.model, turn_links)
        self.interleaving = Interleaving(subject.model, turn_links, width=_NUM_PASSES)
        self.chains: list[list[MuxBatch]] = [[subject.batch(_LENGTHS, names)] for _ in range(_NUM_PASSES)]

    def apart(self) -> None:
        """Run one pass after another."""
        for index in range(_NUM_PASSES):
            self._pass(index)

    def in_turns(self) -> None:
        """Run the passes in turns."""
        self.interleaving.run(self.chains, self._pass)

    def _pass(self, index: int) -> None:
        model: Any = self.subject.model
        with self.subject.precision(), model.objectives.of_made_up_rows():
            output = model(self.chains[index][0])
        output.losses.sum().backward()


def _medians(trial: _Trial | None, budget_s: float) -> list[float]:
    """Return the median seconds of both ways; zeros on a process whose layers are whole, which waits for the others."""
    ways: list[Callable[[], None]] = [] if trial is None else [trial.apart, trial.in_turns]
    times: list[list[float]] = [[] for _ in ways]
    begin_s = time.perf_counter()
    for number in range(_REPEATS):
        for own, run in zip(times, ways, strict=True):
            own.append(_timed(run))
        # All of them stop at the same round: the passes of some would else wait for those of others.
        spent_s = torch.tensor(time.perf_counter() - begin_s)
        dist.all_reduce(spent_s, op=dist.ReduceOp.MAX)
        if number and spent_s * (number + 2) / (number + 1) > budget_s:
            break
    # The first round opens connections and warms caches.
    return [statistics.median(own[1:]) for own in times] or [0.0, 0.0]


def _timed(run: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s
