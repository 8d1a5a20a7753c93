"""Measures the link between processes: how long an empty message takes, and how fast a long one goes."""

# MERGED: Measures what passes in turns cost and hide among processes: `Overlap`, by the turns that the engine takes.
# MERGED: What real passes cost and take in turns where layers are cut: `Overlap` held to a few layers of the backbone.
# MERGED: `profiling.overlap` measures turns of products and sums alone, and a profile is measured on whole layers.
# MERGED: What passes
# MERGED: through cut layers take beyond both is found here, by the engine's own turns through a cut copy of the first
# MERGED: layers.

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.processes import Processes
from peft_mux.engine.tensor.interleaving import Interleaving, TurnLinks, Turns
from peft_mux.engine.tensor.parallel import TensorLinks, cut_model
from peft_mux.planning.profiling.subject import RANKS, Subject, config_of
from peft_mux.scheduler.costs.hardware import MOST_SLOWDOWN, Link, Overlap
from peft_mux.scheduler.costs.latency import ALL_REDUCES_PER_LAYER, CostModel, whole_pass
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.subgraphs.passes import PassTimes, Stretch, TimedSubgraph, pass_times, turns_timeline

_SMALL_ELEMENTS = 2
_LARGE_ELEMENTS = 2**22
_REPEATS = 7


def measure_link(device: torch.device | str) -> Link | None:
    """Return the link from rank 0 to rank 1 of the default process group; `None` where there is no second process.

    Every rank of the group must call this, and each gets the same answer: half of the time of a message there and back.

    Args:
        device: the device on which messages lie, one that the group's backend serves.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    device = torch.device(device)
    small_s, large_s = (_one_way_s(device, count) for count in (_SMALL_ELEMENTS, _LARGE_ELEMENTS))
    found = torch.tensor([small_s, large_s], device=device, dtype=torch.float64)
    # One answer for all: with times of their own, processes would make different plans.
    dist.broadcast(found, src=0)
    small_s, large_s = found.tolist()
    num_bytes = 4 * (_LARGE_ELEMENTS - _SMALL_ELEMENTS)
    # The difference of the two, so that the latency is not counted in the bandwidth as well.
    return Link(latency_s=small_s, bytes_per_s=num_bytes / max(large_s - small_s, 1e-9))


def _one_way_s(device: torch.device, count: int) -> float:
    """Return the median seconds of a message of `count` fp32 numbers from rank 0 to rank 1; 0 on other ranks."""
    message = torch.zeros(count, device=device)
    taken = []
    for _ in range(_REPEATS):
        dist.barrier()  # else the wait for a process that comes late would count
        start_s = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        elif dist.get_rank() == 1:
            dist.recv(message, 0)
            dist.send(message, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - start_s) / 2)
    # The first message opens the connection.
    return statistics.median(taken[1:]) if dist.get_rank() == 0 else 0.0


_TOKENS = 128
_NUM_SUBGRAPHS = 8
_NUM_PASSES = 2
_REPEATS_overlap = 9
_HALVINGS = 12


def measure_overlap(device: torch.device | str, hidden_size: int) -> Overlap | None:
    """Return what turns cost and hide; `None` on a GPU, and where there is no second process.

    Two passes of products and sums run in turns and one after another, alternating, as those of a backbone of this
    width do. Sums are over all processes of the default group, and every one of them must call this; each gets the same
    answer. Of a GPU nothing is measured yet, as its turns need streams.

    Args:
        device: the device on which passes run, one that the group's backend serves.
        hidden_size: D, width of the hidden states that are summed.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    device = torch.device(device)
    if device.type != "cpu":
        return None
    passes = [_Pass(device, hidden_size) for _ in range(_NUM_PASSES)]
    times: dict[str, list[float]] = {"compute": [], "sum": [], "apart": [], "turns": [], "hand": []}
    for _ in range(_REPEATS_overlap):
        for name, run in _ways(passes).items():
            times[name].append(_timed(run))
    # The first round opens connections and warms caches. The slowest process is the one that all others wait for.
    medians = torch.tensor([statistics.median(seconds[1:]) for seconds in times.values()], dtype=torch.float64)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return fitted_overlap(*(seconds / (_NUM_PASSES * _NUM_SUBGRAPHS) for seconds in medians.tolist()))


def fitted_overlap(compute_s: float, sum_s: float, apart_s: float, turns_s: float, hand_s: float) -> Overlap:
    """Return the overlap with which the simulator comes to what was measured.

    Args:
        compute_s: seconds of one subgraph without any sum.
        sum_s: seconds of one sum without any computing.
        apart_s: seconds of a subgraph and its sum, passes running one after another.
        turns_s: the same with two passes in turns.
        hand_s: seconds of handing a turn over.
    """
    skew = max(0.0, apart_s - compute_s - sum_s) / compute_s
    passes = [(TimedSubgraph(compute_s, sum_s),) * _NUM_SUBGRAPHS for _ in range(_NUM_PASSES)]
    low, high = 0.0, MOST_SLOWDOWN
    # The more computing is slowed down the longer turns take, so that halving finds what they took.
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        known = Overlap(skew, middle, hand_s)
        low, high = (middle, high) if _predicted_s(passes, known) < turns_s else (low, middle)
    return Overlap(skew, round(high, 3), hand_s)


def _predicted_s(passes: list[PassTimes], overlap: Overlap) -> float:
    return turns_timeline(passes, overlap).makespan_s / (_NUM_PASSES * _NUM_SUBGRAPHS)


class _Pass:
    """Products as those of a layer, and a sum of hidden states behind each."""

    def __init__(self, device: torch.device, hidden_size: int) -> None:
        self.hidden_TD = torch.full((_TOKENS, hidden_size), 1e-3, device=device)
        self.weight_DD = torch.eye(hidden_size, device=device)

    def compute(self) -> None:
        for _ in range(4):
            self.hidden_TD = self.hidden_TD @ self.weight_DD

    def begin_sum(self) -> Callable[[], object]:
        work = dist.all_reduce(self.hidden_TD.clone(), async_op=True)
        assert work is not None, "an asynchronous collective can be waited for"
        return work.wait

    def run(self, wait: Callable[[Callable[[], object]], object]) -> None:
        for _ in range(_NUM_SUBGRAPHS):
            self.compute()
            wait(self.begin_sum())


def _ways(passes: list[_Pass]) -> dict[str, Callable[[], None]]:
    """Return what is timed, by name."""
    return {
        "compute": partial(_each, passes, lambda one: one.compute()),
        "sum": partial(_each, passes, lambda one: one.begin_sum()()),
        "apart": lambda: [one.run(lambda wait: wait()) for one in passes].clear(),
        "turns": partial(_in_turns, len(passes), lambda turns, index: passes[index].run(turns.wait)),
        "hand": partial(_in_turns, len(passes), _hand_over),
    }


def _each(passes: list[_Pass], act: Callable[[_Pass], object]) -> None:
    for one in passes:
        for _ in range(_NUM_SUBGRAPHS):
            act(one)


def _in_turns(count: int, act: Callable[[Turns[None], int], None]) -> None:
    turns: Turns[None] = Turns([lambda depth: 1.0] * count)
    turns.run([partial(act, turns, index) for index in range(count)])


def _hand_over(turns: Turns[None], index: int) -> None:
    for _ in range(_NUM_SUBGRAPHS):
        turns.wait(lambda: None)


def _timed(run: Callable[[], None]) -> float:
    dist.barrier()  # else the wait for a process that comes late would count
    start_s = time.perf_counter()
    with torch.no_grad():
        run()
    return time.perf_counter() - start_s


_NUM_PASSES_turn_costs = 2
_LENGTHS = (48, 80)
"""Tokens of the sequences of a pass; each is of another task."""
_RANK = RANKS[1]
_REPEATS_turn_costs = 9
_HALVINGS_turn_costs = 20


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
    passes = [
        pass_times(cost.pass_parts(loads, [whole_pass(loads)]), Stretch(shape.num_layers))
    ] * _NUM_PASSES_turn_costs
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
    for _ in range(_HALVINGS_turn_costs):
        middle = (low + high) / 2
        low, high = (middle, high) if in_turns_s(middle) < turns_s else (low, middle)
    return replace(overlap, turn_s=max(overlap.turn_s, low), host_s=host_s)


class _Trial:
    """Two passes through cut layers."""

    def __init__(self, subject: Subject, links: TensorLinks, names: Sequence[str]) -> None:
        self.subject, turn_links = subject, TurnLinks(links)
        cut_model(subject.model, turn_links)
        self.interleaving = Interleaving(subject.model, turn_links, width=_NUM_PASSES_turn_costs)
        self.chains: list[list[MuxBatch]] = [[subject.batch(_LENGTHS, names)] for _ in range(_NUM_PASSES_turn_costs)]

    def apart(self) -> None:
        """Run one pass after another."""
        for index in range(_NUM_PASSES_turn_costs):
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
    for number in range(_REPEATS_turn_costs):
        for own, run in zip(times, ways, strict=True):
            own.append(_timed_turn_costs(run))
        # All of them stop at the same round: the passes of some would else wait for those of others.
        spent_s = torch.tensor(time.perf_counter() - begin_s)
        dist.all_reduce(spent_s, op=dist.ReduceOp.MAX)
        if number and spent_s * (number + 2) / (number + 1) > budget_s:
            break
    # The first round opens connections and warms caches.
    return [statistics.median(own[1:]) for own in times] or [0.0, 0.0]


def _timed_turn_costs(run: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s
