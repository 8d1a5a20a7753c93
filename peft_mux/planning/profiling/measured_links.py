"""Measures between processes: the link, and the cost of passes in turns and how much they hide (`Overlap`).

`measure_link` finds how long an empty message takes, and how fast a long one is. `measure_overlap` runs products and
sums alone, in the turns of the engine. Passes through cut layers take more than both; `overlap_of_layers` finds how
much, by the engine's own turns through a cut copy of the backbone's first layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
import torch.distributed as dist

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.processes import Processes
from peft_mux.modeling.stream import temporary_attributes
from peft_mux.parallel.tensor.interleaving import Interleaving, TurnLinks, Turns
from peft_mux.parallel.tensor.parallel import TensorLinks, TensorParallelModel
from peft_mux.planning.model_shape import config_of
from peft_mux.planning.profiling.subject import RANKS, Subject
from peft_mux.scheduler.costs.hardware import MOST_SLOWDOWN, Overlap
from peft_mux.scheduler.costs.latency import ALL_REDUCES_PER_LAYER, CostModel, whole_pass
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.plan import Link
from peft_mux.scheduler.subgraphs import PassTimes, Stretch, TimedSubgraph, pass_times, turns_timeline

_SMALL_ELEMENTS = 2
_LARGE_ELEMENTS = 2**22
_MESSAGES = 7

_TOKENS = 128
_NUM_SUBGRAPHS = 8
_NUM_PASSES = 2
_REPEATS = 9
_HALVINGS = 20

_LENGTHS = (48, 80)
"""Tokens of the sequences of a pass through cut layers; each is of another task."""
_RANK = RANKS[1]


def measure_link(device: torch.device | str) -> Link | None:
    """Return the link from rank 0 to rank 1 of the default process group; `None` if there is no second process.

    Every rank of the group must call this, and each gets the same answer: half of the time of a message there and back.

    Args:
        device: the device of the messages, one that the group's backend supports.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    device = torch.device(device)
    small_s, large_s = (_one_way_s(device, count) for count in (_SMALL_ELEMENTS, _LARGE_ELEMENTS))
    times_s = torch.tensor([small_s, large_s], device=device, dtype=torch.float64)
    # One answer for all: with different times, processes would make different plans.
    dist.broadcast(times_s, src=0)
    small_s, large_s = times_s.tolist()
    num_bytes = 4 * (_LARGE_ELEMENTS - _SMALL_ELEMENTS)
    # The difference of the two, so that the latency is not counted in the bandwidth as well.
    return Link(latency_s=small_s, bytes_per_s=num_bytes / max(large_s - small_s, 1e-9))


def _one_way_s(device: torch.device, count: int) -> float:
    """Return the median seconds of a message of `count` fp32 numbers from rank 0 to rank 1; 0 on other ranks."""
    message = torch.zeros(count, device=device)
    taken = []
    for _ in range(_MESSAGES):
        dist.barrier()  # otherwise the wait for a process that comes late would count
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


def measure_overlap(device: torch.device | str, hidden_size: int) -> Overlap | None:
    """Return the cost of turns and how much they hide; `None` on a GPU, or if there is no second process.

    Two passes of products and sums run in turns and one after another, alternating, as those of a backbone of this
    width do. Sums are over all processes of the default group, and every one of them must call this; each gets the same
    answer. Nothing is measured on a GPU yet, because its turns need streams.

    Args:
        device: the device on which passes run, one that the group's backend supports.
        hidden_size: D, width of the hidden states that are summed.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    device = torch.device(device)
    if device.type != "cpu":
        return None
    hidden = [torch.full((_TOKENS, hidden_size), 1e-3, device=device) for _ in range(_NUM_PASSES)]
    weight_DD = torch.eye(hidden_size, device=device)

    def compute(index: int) -> None:
        for _ in range(4):
            hidden[index] = hidden[index] @ weight_DD

    def begin_sum(index: int) -> Callable[[], object]:
        work = dist.all_reduce(hidden[index].clone(), async_op=True)
        assert work is not None, "an asynchronous collective can be waited for"
        return work.wait

    def one_after_another(*steps: Callable[[int], object]) -> None:
        for index in range(_NUM_PASSES):
            for _ in range(_NUM_SUBGRAPHS):
                for step in steps:
                    step(index)

    def in_turns(step: Callable[[Turns[None], int], None]) -> None:
        turns: Turns[None] = Turns([lambda depth: 1.0] * _NUM_PASSES)

        def whole(index: int) -> None:
            for _ in range(_NUM_SUBGRAPHS):
                step(turns, index)

        turns.run([lambda index=index: whole(index) for index in range(_NUM_PASSES)])

    def compute_and_sum(turns: Turns[None], index: int) -> None:
        compute(index)
        turns.wait(begin_sum(index))

    ways: list[Callable[[], None]] = [
        lambda: one_after_another(compute),
        lambda: one_after_another(lambda index: begin_sum(index)()),
        lambda: one_after_another(compute, lambda index: begin_sum(index)()),
        lambda: in_turns(compute_and_sum),
        lambda: in_turns(lambda turns, index: turns.wait(lambda: None)),  # handing a turn over
    ]
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(_REPEATS):
        for times_of_way, run in zip(times, ways, strict=True):
            dist.barrier()  # otherwise the wait for a process that comes late would count
            start_s = time.perf_counter()
            with torch.no_grad():
                run()
            times_of_way.append(time.perf_counter() - start_s)
    # The first round opens connections and warms caches. All others wait for the slowest process.
    medians = torch.tensor([statistics.median(times_of_way[1:]) for times_of_way in times], dtype=torch.float64)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return fitted_overlap(*(seconds / (_NUM_PASSES * _NUM_SUBGRAPHS) for seconds in medians.tolist()))


def fitted_overlap(compute_s: float, sum_s: float, apart_s: float, turns_s: float, hand_s: float) -> Overlap:
    """Return the overlap with which the simulator predicts the measured times.

    Args:
        compute_s: seconds of one subgraph without any sum.
        sum_s: seconds of one sum without computing.
        apart_s: seconds of a subgraph and its sum, passes running one after another.
        turns_s: the same with two passes in turns.
        hand_s: seconds of handing a turn over.
    """
    skew = max(0.0, apart_s - compute_s - sum_s) / compute_s
    passes = [(TimedSubgraph(compute_s, sum_s),) * _NUM_SUBGRAPHS for _ in range(_NUM_PASSES)]

    def in_turns_s(slowdown: float) -> float:
        makespan_s = turns_timeline(passes, Overlap(skew, slowdown, hand_s)).makespan_s
        return makespan_s / (_NUM_PASSES * _NUM_SUBGRAPHS)

    return Overlap(skew, round(_least_reaching(in_turns_s, turns_s, MOST_SLOWDOWN)[1], 3), hand_s)


def _least_reaching(predicted_s: Callable[[float], float], measured_s: float, most: float) -> tuple[float, float]:
    """Return bounds, found by halving, of the least number in 0..most whose prediction reaches the measured time."""
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted_s(middle) < measured_s else (low, middle)
    return low, high


def overlap_of_layers(
    profile: Profile,
    model: Any,
    processes: Processes,
    groups: Sequence[Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float,
) -> Overlap | None:
    """Return what passes in turns cost and hide; `None` where `measure_overlap` measures nothing.

    Where layers are cut, two passes through the first of them are predicted, with this overlap, to take what they
    really take. Every process of the run must call this; each gets the same answer: the difference between the first
    one's profile and the times of the slowest.

    Args:
        profile: what was measured of whole layers.
        model: the `MultiTaskPeftModel` or backbone; a copy of its first layers is run.
        processes: the processes of the run, connected.
        groups: global ranks of every tensor parallel group of the run.
        device: the device to run on; on a GPU nothing is measured.
        dtype: the dtype to compute in.
        budget_s: seconds that passes through cut layers may take.
    """
    overlap = measure_overlap(device, config_of(model).get_text_config().hidden_size)
    num_devices = max(map(len, groups))
    if overlap is None or num_devices == 1:
        return overlap
    subject = Subject(model, device=device, dtype=dtype)
    names = [name for name in subject.model.tasks if name.startswith(f"r{_RANK}_")][: len(_LENGTHS)]
    # Before anything is cut: the cost model divides widths by itself.
    shape, loads = subject.shape, subject.loads(names, _LENGTHS, _RANK)
    links = TensorLinks(groups, processes)
    try:
        medians = _cut_pass_times(subject, links, names, budget_s)
    finally:
        links.close()
    measured = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    cost = CostModel(replace(profile, overlap=overlap), shape, devices_per_stage=num_devices)
    passes = [
        pass_times(cost.pass_parts(0, cost.pass_work(loads, [whole_pass(loads)])), Stretch(shape.num_layers))
    ] * _NUM_PASSES
    apart_s, turns_s = measured.tolist()
    costs = fitted_costs(overlap, passes, apart_s, turns_s, num_sums=ALL_REDUCES_PER_LAYER * shape.num_layers)
    # Each process has a different profile, and so a different fit: all take the one of the first process.
    agreed = torch.tensor(astuple(costs), dtype=torch.float64)
    dist.broadcast(agreed, src=0)
    return Overlap(*agreed.tolist())


def _cut_pass_times(subject: Subject, links: TensorLinks, names: Sequence[str], budget_s: float) -> list[float]:
    """Return the median seconds of two passes through cut layers, one after another and in turns.

    Returns:
        Zeros on a process whose layers are whole, which waits for the others.
    """
    model: Any = subject.model
    ways: list[Callable[[], object]] = []
    if links.size > 1:
        turn_links = TurnLinks(links)
        TensorParallelModel(subject.model, turn_links)
        interleaving = Interleaving(subject.model, turn_links, width=_NUM_PASSES)
        chains: list[list[MuxBatch]] = [[subject.batch(_LENGTHS, names)] for _ in range(_NUM_PASSES)]

        def run_pass(index: int) -> None:
            with subject.precision(), temporary_attributes(model.objectives, are_rows_made_up=True):
                output = model(chains[index][0])
            output.losses.sum().backward()

        ways = [
            lambda: [run_pass(index) for index in range(_NUM_PASSES)],
            lambda: interleaving.run(chains, run_pass),
        ]
    times: list[list[float]] = [[] for _ in ways]
    begin_s = time.perf_counter()
    for number in range(_REPEATS):
        for times_of_way, run in zip(times, ways, strict=True):
            start_s = time.perf_counter()
            run()
            times_of_way.append(time.perf_counter() - start_s)
        # All of them stop at the same round: otherwise the passes of some would wait for those of others.
        spent_s = torch.tensor(time.perf_counter() - begin_s)
        dist.all_reduce(spent_s, op=dist.ReduceOp.MAX)
        if number and spent_s * (number + 2) / (number + 1) > budget_s:
            break
    # The first round opens connections and warms caches.
    return [statistics.median(times_of_way[1:]) for times_of_way in times] or [0.0, 0.0]


def fitted_costs(
    overlap: Overlap, passes: Sequence[PassTimes], apart_s: float, turns_s: float, *, num_sums: int
) -> Overlap:
    """Return the overlap with which predicted times of passes equal measured ones; never less than without it.

    Args:
        overlap: cost of turns with products and sums alone, and how much they hide.
        passes: prediction of the cost model for each pass, before anything is added for the host.
        apart_s: seconds of the passes, one after another.
        turns_s: seconds of the same passes in turns.
        num_sums: sums of the layers of a pass; the host's time is added before each of them.
    """
    predicted_s = turns_timeline(passes, overlap, in_turns=False).makespan_s
    host_s = max(0.0, apart_s - predicted_s) / (len(passes) * num_sums)
    # Evenly over all that lies between two sums, so that the whole equals what was measured.
    spread_s = host_s * num_sums / len(passes[0])
    with_host = [tuple(part._replace(compute_s=part.compute_s + spread_s) for part in times) for times in passes]

    def in_turns_s(turn_s: float) -> float:
        return turns_timeline(with_host, replace(overlap, turn_s=turn_s)).makespan_s

    turn_s, _ = _least_reaching(in_turns_s, turns_s, max(turns_s, 1e-9))
    return replace(overlap, turn_s=max(overlap.turn_s, turn_s), host_s=host_s)
