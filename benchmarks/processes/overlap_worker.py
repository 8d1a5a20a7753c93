"""One of the two processes of `benchmarks.processes.overlap`: a shard, the same passes in turns and one by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig

from benchmarks.planner.subgraphs.schedule import communication_busy_s
from benchmarks.training.workloads import ModelSpec
from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.engine.processes import Processes
from peft_mux.engine.tensor.interleaving import Interleaving, TurnLinks, Turns
from peft_mux.engine.tensor.parallel import TensorLinks, TensorParallelModel
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.subgraphs import PassTimes, TimedSubgraph, latency_of, turns_timeline

NUM_SHARDS = 2
TOKENS = (256, 192, 224, 160)
"""Tokens of each hTask, which has one task; unequal, as those of a bucket are."""
NOTICED_S = 1e-4
"""A sum that is waited for longer than this was not there before."""
NUM_PICTURED = 9
"""Number of steps that are run for the picture, the fastest of which is drawn."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a link: a sum of n bytes takes latency_s + n / bytes_per_s behind the one before."""

    latency_s: float
    bytes_per_s: float

    def sum_s(self, num_bytes: int) -> float:
        """Return the seconds of one sum."""
        return self.latency_s + num_bytes / self.bytes_per_s


AT_ONCE = Speed(0.0, float("inf"))


@dataclass
class Row:
    """One setting of the link and one number of hTasks; times of one step of all hTasks, the slower shard's."""

    num_htasks: int
    latency_s: float
    bytes_per_s: float
    communication_share: float
    in_turns_s: list[float] = field(default_factory=list)
    one_by_one_s: list[float] = field(default_factory=list)
    planned_in_turns_s: float = 0.0
    planned_one_by_one_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Median over rounds of one by one / in turns, both of one round."""
        return statistics.median(b / a for a, b in zip(self.in_turns_s, self.one_by_one_s, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values, for JSON."""
        return {**asdict(self), "ratio": self.ratio}


class SlowSum(NamedTuple):
    """A sum in transit on slow links, and done no sooner than their speed allows."""

    pending: Any
    links: SlowLinks
    index: int

    def wait(self) -> None:
        waits_from_s = time.perf_counter()
        self.pending.wait()
        there_s = time.perf_counter()
        begin_s, end_s, num_bytes = self.links.sums[self.index]
        time.sleep(max(0.0, end_s - there_s))
        if there_s - waits_from_s > NOTICED_S:
            self.links.sums[self.index] = begin_s, max(end_s, there_s), num_bytes


class SlowLinks:
    """Links that take longer than they do; one sum at a time is on the way, in order, as on a GPU's own stream."""

    def __init__(self, links: TensorLinks) -> None:
        self.links, self.speed = links, AT_ONCE
        self.index, self.size = links.index, links.size
        self.sums: list[tuple[float, float, int]] = []
        self._free_s = 0.0

    def clear(self) -> None:
        """Forget the sums so far, as a step begins."""
        self.sums, self._free_s = [], 0.0

    def all_reduce(self, tensor: torch.Tensor) -> SlowSum:
        num_bytes = tensor.numel() * tensor.element_size()
        begin_s = max(time.perf_counter(), self._free_s)
        self._free_s = begin_s + self.speed.sum_s(num_bytes)
        self.sums.append((begin_s, self._free_s, num_bytes))
        return SlowSum(self.links.all_reduce(tensor), self, len(self.sums) - 1)


class Profile(NamedTuple):
    """What one hTask's pass is made of.

    Attributes:
        compute_s: seconds of computing before each sum, and last those that remain after the last sum.
        sum_s: seconds of each sum, with the link at its own speed.
        num_bytes: bytes of each sum.
    """

    compute_s: list[float]
    sum_s: list[float]
    num_bytes: list[int]


def htask_names() -> list[str]:
    """Return the names of the tasks, one an hTask."""
    return [f"task{index}" for index in range(len(TOKENS))]


def micro_batches() -> list[MuxBatch]:
    """Return one micro-batch of each hTask; the same in both processes."""
    found = []
    for index, (name, num_tokens) in enumerate(zip(htask_names(), TOKENS, strict=True)):
        draw = np.random.default_rng(index)
        rows = [draw.integers(1, 4096, size=32) for _ in range(num_tokens // 32)]
        sequences = tuple(TokenSequence(ids, ids, row) for row, ids in enumerate(rows))
        found += ChunkPackingCollator().micro_batches([TaskBatch(name, 0, index, sequences)], max_tokens=num_tokens)
    return found


class Worker:
    """One shard and its links."""

    def __init__(self, rank: int, num_layers: int, init_method: str) -> None:
        torch.set_num_threads(1)
        timeout = timedelta(seconds=120)
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=NUM_SHARDS, timeout=timeout)
        self.processes = Processes(rank, NUM_SHARDS, timeout_s=120)
        self.processes.connect()
        self.slow = SlowLinks(TensorLinks([range(NUM_SHARDS)], self.processes))
        self.links = TurnLinks(self.slow)
        configs = {name: LoraConfig(r=16, target_modules="all-linear") for name in htask_names()}
        spec = ModelSpec(num_layers=num_layers)
        self.model = MultiTaskPeftModel(spec.build(), configs, verify=False).train()
        TensorParallelModel(self.model, self.links)
        self.batches = micro_batches()
        assert len(self.batches) == len(TOKENS)
        self.interleaving = Interleaving(self.model, self.links, width=len(TOKENS))

    def one_pass(self, index: int) -> None:
        """Run forward and backward of one hTask."""
        self.model(self.batches[index]).losses.sum().backward()

    def in_turns(self, count: int) -> None:
        """Run the first hTasks in turns: one computes while the sums of others are on the way."""
        self.interleaving.run([(batch,) for batch in self.batches[:count]], self.one_pass)

    def one_by_one(self, count: int) -> None:
        """Run the first hTasks one after another."""
        for index in range(count):
            self.one_pass(index)

    def timed(self, act: Any, count: int) -> float:
        """Return seconds of the slower shard."""
        self.slow.clear()
        self.processes.wait_for_all()
        begin_s = time.perf_counter()
        act(count)
        return max(self.processes.gather(time.perf_counter() - begin_s))

    def profile(self, index: int, repeats: int) -> Profile:
        """Return the least times of each subgraph of a pass, of the slower shard, with the link at its own speed."""
        self.slow.speed = AT_ONCE
        seen: list[tuple[list[float], list[float]]] = []
        for _ in range(repeats):
            self.slow.clear()
            self.processes.wait_for_all()
            turns: Turns[None] = Turns([lambda depth: 1.0])
            self.links.turns = turns
            turns.run([lambda: self.one_pass(index)])
            self.links.turns = None
            spans = turns.spans
            compute_s = [span.end_s - span.compute_start_s for span in spans]
            seen.append((compute_s, [span.compute_start_s - span.start_s for span in spans[1:]]))
        compute_s, sum_s = (np.min(np.array([one[kind] for one in seen]), axis=0) for kind in (0, 1))
        found = self.processes.gather((compute_s.tolist(), sum_s.tolist()))
        slower = [np.max(np.array([one[kind] for one in found]), axis=0).tolist() for kind in (0, 1)]
        return Profile(slower[0], slower[1], [one[2] for one in self.slow.sums])

    def measure(self, speeds: Sequence[Speed], counts: Sequence[int], rounds: int) -> list[Row]:
        """Measure all settings, both ways in every round, by turns first and last."""
        profiles = [self.profile(index, 5) for index in range(len(TOKENS))]
        rows = []
        for speed in speeds:
            self.slow.speed = speed
            for count in counts:
                rows.append(row := planned_row(profiles[:count], speed))
                for number in range(rounds):
                    for act in (self.in_turns, self.one_by_one)[:: 1 if number % 2 else -1]:
                        seconds = row.in_turns_s if act == self.in_turns else row.one_by_one_s
                        seconds.append(self.timed(act, count))
        return rows

    def timeline(self, speed: Speed, count: int) -> dict[str, Any]:
        """Return what was planned for one step in turns, and what happened, for a picture."""
        profiles = [self.profile(index, 5) for index in range(count)]
        passes = [times_of(profile, speed) for profile in profiles]
        self.slow.speed = speed
        measured = {id(batch): latency_of(times) for batch, times in zip(self.batches, passes, strict=False)}
        self.interleaving.latency = lambda chain, stretch: measured[id(chain[0])]
        seen = []
        for _ in range(NUM_PICTURED):
            seconds = self.timed(self.in_turns, count)
            begin_s = self.slow.sums[0][0] - self.interleaving.spans[0].end_s
            sums = [(begin - begin_s, end - begin_s) for begin, end, _ in self.slow.sums]
            seen.append((seconds, [tuple(span) for span in self.interleaving.spans], sums))
        _, turns, sums = min(seen)
        planned = [tuple(asdict(span).values()) for span in turns_timeline(passes).spans]
        return {"planned": planned, "turns": turns, "sums": sums}


def times_of(profile: Profile, speed: Speed) -> PassTimes:
    """Return a pass as it was measured, on another link."""
    sums_s = [max(own_s, speed.sum_s(size)) for own_s, size in zip(profile.sum_s, profile.num_bytes, strict=True)]
    return tuple(
        TimedSubgraph(compute_s, sum_s) for compute_s, sum_s in zip(profile.compute_s, [*sums_s, 0.0], strict=True)
    )


def planned_row(profiles: Sequence[Profile], speed: Speed) -> Row:
    """Return a row with what the simulator predicts, to be filled with what is measured."""
    passes = [times_of(profile, speed) for profile in profiles]
    together, apart = turns_timeline(passes), turns_timeline(passes, in_turns=False)
    row = Row(len(profiles), speed.latency_s, speed.bytes_per_s, communication_busy_s(apart) / apart.makespan_s)
    row.planned_in_turns_s, row.planned_one_by_one_s = together.makespan_s, apart.makespan_s
    return row
