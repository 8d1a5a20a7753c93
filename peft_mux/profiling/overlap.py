"""Measures what passes in turns cost and hide among processes: `Overlap`, by the turns that the engine takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from peft_mux.engine.tensor.turns import Turns
from peft_mux.scheduler.costs.link import MOST_SLOWDOWN, Overlap
from peft_mux.scheduler.subgraphs.passes import PassTimes, TimedSubgraph, turns_timeline

_TOKENS = 128
_NUM_SUBGRAPHS = 8
_NUM_PASSES = 2
_REPEATS = 9
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
    for _ in range(_REPEATS):
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
