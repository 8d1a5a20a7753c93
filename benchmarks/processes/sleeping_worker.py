"""A rank of `benchmarks.processes.sleeping`: it trains on a device that sleeps for as long as it would compute.

The engine is the real one over gloo: trainer, dispatch, plans, pipelines, passes in turns, sums of gradients. Around it

* every stretch of a pass (a forward or backward of a stage; with tensor parallelism what lies between two sums) ends
  when the profile's seconds have passed since it began. What the tiny model itself computes is within them;
* a message between stages arrives when its link has carried it: latency, bytes over bandwidth, one at a time in each
  direction;
* a sum ends the seconds of a ring after its last rank has begun it, and a rank makes one sum of gradients at a time.

What is timed are the steps from a barrier before the first pass to the end of the updates. What the trainer does
between steps is left out: here all ranks do it on the same few cores.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

import peft_mux.engine.executor as executor_module
import peft_mux.parallel.pipeline.executor as pipeline_module
from benchmarks.training.mux import quiet_arguments
from peft_mux import MultiTaskTrainer, Task
from peft_mux.data.batch import MuxBatch
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import rows_of
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel.pipeline.links import Channel
from peft_mux.parallel.pipeline.stage import StageModel
from peft_mux.parallel.tensor.parallel import TensorLinks
from peft_mux.scheduler.costs.hardware import Cluster
from peft_mux.scheduler.costs.latency import CostModel, all_reduce_s, whole_pass
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.plan import Link
from peft_mux.scheduler.subgraphs import Direction, PassTimes, Stretch, pass_times


@dataclass(frozen=True)
class Load:
    """One task: the lengths of the rows of each of its steps, and the rank of its adapters."""

    name: str
    lengths: tuple[int, ...]
    rank: int


@dataclass(frozen=True)
class Settings:
    """What all ranks of a run are given.

    Attributes:
        layout: the replicas, in LobRA's notation.
        folder: an empty folder, with `profile.json` in it.
        cluster: the devices and their links, for the bytes of the tiny model.
        loads: the tasks; every step has the same rows.
        num_layers: decoder layers of the tiny model.
        max_tokens: most tokens of a pass.
        num_steps: steps to take.
        lowest_layer: the lowest layer with adapters.
        is_cut_evenly: whether stages are cut as if all layers had adapters.
        arguments: further arguments of the run.
    """

    layout: str
    folder: Path
    cluster: Cluster
    loads: tuple[Load, ...]
    num_layers: int
    max_tokens: int
    num_steps: int
    lowest_layer: int = 0
    is_cut_evenly: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


WIDTH, MLP, HEADS, VOCABULARY = 32, 88, 8, 250
"""Widths of the tiny model: those of a Llama with hidden states of 4,096 over 128."""
LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trainer_of(settings: Settings, **arguments: Any) -> MultiTaskTrainer:
    """Return the trainer of the tiny model, in this process or as one of several."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=4 * settings.max_tokens,
    )
    layers = list(range(settings.lowest_layer, settings.num_layers))
    tasks = [
        Task(
            name=load.name,
            peft_config=LoraConfig(r=load.rank, target_modules=LINEAR_LAYERS, layers_to_transform=layers),
            train_dataset=[{"input_ids": [1 + place % 97 for place in range(length)]} for length in load.lengths],
            train_batch_size=len(load.lengths),
            max_steps=settings.num_steps,
            learning_rate=1e-4,
        )
        for load in settings.loads
    ]
    args = quiet_arguments(
        str(settings.folder / "run"),
        cost_profile=str(settings.folder / "profile.json"),
        max_tokens_per_micro_batch=settings.max_tokens,
        pipeline_flush="every_step",
        share_prefixes=False,
        ddp_timeout=600,
        **{"interleaved_passes": 1, **settings.arguments, **arguments},
    )
    return MultiTaskTrainer(LlamaForCausalLM(config), args, tasks)


def sleep_until(moment_s: float) -> None:
    """Sleep until a moment of `time.perf_counter`, which all processes of a machine share."""
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


class Timed(NamedTuple):
    """A sum over shards that ends at a moment."""

    pending: Any
    end_s: float
    device: SleepingDevice

    def wait(self) -> None:
        """Wait for the real sum, and for that moment; the next stretch begins."""
        before_s = time.perf_counter()
        self.pending.wait()
        # The wait for the other ranks of the stage too: all have the same work.
        self.device.late_s += max(0.0, time.perf_counter() - max(before_s, self.end_s))
        sleep_until(self.end_s)
        self.device.own.resumed_s = time.perf_counter()


class TimedSum(NamedTuple):
    """A sum of gradients that takes some seconds from when its last rank has begun it."""

    pending: Any
    stamp: torch.Tensor
    stamped: Any
    seconds: float
    device: SleepingDevice

    def wait(self) -> None:
        """Wait for the real sum, and for the seconds; a rank makes one sum at a time, in the order of its waits."""
        self.pending.wait()
        self.stamped.wait()
        self.device.sums_free_s = max(float(self.stamp), self.device.sums_free_s) + self.seconds
        sleep_until(self.device.sums_free_s)


@dataclass
class SleepingDevice:
    """The device of this rank, and the links from it.

    Attributes:
        settings: what all ranks are given.
        trainer: the trainer of this rank.
        marks: beginning and end of each step.
        planned_s: what the plan of each step predicts for it.
        summed_s: seconds that sums over shards are on the link, in all steps.
        passed_s: seconds of each step until the passes of this rank are done.
        late_s: seconds by which stretches, and sums over shards, ended later than the profile says, as the cores were
            busy.
        counts: of all steps: passes, their tokens, stretches; sums over shards that the cost model does not know, and
            stretches of it that no sum ended.
    """

    settings: Settings
    trainer: MultiTaskTrainer
    marks: list[tuple[float, float]] = field(default_factory=list)
    planned_s: list[float] = field(default_factory=list)
    summed_s: float = 0.0
    passed_s: list[float] = field(default_factory=list)
    late_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    plan: Any = None
    own: Any = field(default_factory=threading.local)
    sums_free_s: float = 0.0
    shards_free_s: float = 0.0
    begun_s: float = 0.0
    is_on: bool = False

    def start(self) -> None:
        """Read the place of this rank, once the model is cut."""
        trainer, settings = self.trainer, self.settings
        layout, self.rank = trainer._run.layout, trainer._run.processes.rank
        place = layout.place(self.rank)
        config, self.stage = layout.replicas[place.replica], place.stage
        self.num_stages = config.pp
        self.shards = next(group for group in layout.tensor_groups if self.rank in group)
        stage: StageModel | None = getattr(trainer._placement.executor, "stage", None)
        assert stage is None or stage.layout.num_chunks == 1, "one chunk of layers for each process"
        planner = trainer._plans.planner
        profile = Profile.from_json((settings.folder / "profile.json").read_text(encoding="utf-8"))
        self.cost = CostModel(
            profile,
            planner.shape,
            num_stages=config.pp,
            devices_per_stage=config.tp,
            layers_per_stage=stage.layout.layer_counts if stage else (planner.shape.num_layers,),
            tensor_link=self.ring_link(self.shards),
        )
        self.loads = {run.name: planner.load_of(run) for run in trainer._run.table}
        held = [sum(weight.numel() for weight in trainer.model.task_parameters(name).values()) for name in self.loads]
        self.update_s = sum(float(profile.optimizer(count)) for count in held) + profile.step_overhead_s
        self.plan = trainer._plans.current
        self.is_on = True

    # ------------------------------------------------------------------ computing

    def chain(self, batch: MuxBatch, direction: Direction) -> PassTimes:
        """Return the stretches of a pass here, by the tokens that it really has."""
        loads = [
            replace(
                self.loads[row.task],
                lengths=row.lengths,
                shared=row.shared,
                num_targets=row.num_targets,
                longest_row_tokens=0,
                trie=None,
            )
            for row in rows_of(batch)
        ]
        parts = self.cost.pass_parts(self.stage, self.cost.pass_work(loads, [whole_pass(loads)]))
        stretch = Stretch(
            self.cost.layers_per_stage[self.stage],
            is_first=self.stage == 0,
            is_last=self.stage == self.num_stages - 1,
            direction=direction,
        )
        return pass_times(parts, stretch)

    def compute(self, batch: MuxBatch, direction: Direction, act: Callable[[], Any]) -> Any:
        """Run what a pass computes; it ends when the seconds of all its stretches have passed."""
        state = self.own
        if direction == "forward":
            self.counts.update(passes=1, tokens=batch.num_computed)
        state.chain, state.depth, state.resumed_s = deque(self.chain(batch, direction)), 0, time.perf_counter()
        try:
            result = act()
            if len(self.shards) > 1:
                self.counts["missing"] += sum(stretch.compute_s > 0 for stretch in list(state.chain)[1:])
            self._end_stretch(sum(stretch.compute_s for stretch in state.chain))
        finally:
            state.chain = None
        return result

    def _end_stretch(self, seconds: float) -> None:
        end_s = self.own.resumed_s + seconds
        self.late_s += max(0.0, time.perf_counter() - end_s)
        self.counts["stretches"] += 1
        sleep_until(end_s)

    # ------------------------------------------------------------------ links

    def sum_shards(self, tensor: torch.Tensor, start: Callable[[], Any]) -> Any:
        """End a stretch, and begin the sum over the devices of a stage."""
        chain = getattr(self.own, "chain", None)
        if chain is None:
            return start()
        self.counts["unknown"] += not chain
        self._end_stretch(chain.popleft().compute_s if chain else 0.0)
        seconds = float(all_reduce_s(self.cost.tensor_link, len(self.shards), tensor.nbytes))
        self.shards_free_s = max(time.perf_counter(), self.shards_free_s) + seconds
        self.summed_s += seconds
        return Timed(start(), self.shards_free_s, self)

    def sum_gradients(self, processes: Processes, tensor: torch.Tensor, ranks: Any, start: Callable[[], Any]) -> Any:
        """Begin a sum over processes."""
        members = tuple(range(processes.world_size)) if ranks is None else ranks
        if len(members) == 1:
            return start()
        whole = len(members) == processes.world_size
        group = processes._device_group if whole else processes._groups[members]
        pending, stamp = start(), torch.tensor([time.perf_counter()], dtype=torch.float64)
        stamped = dist.all_reduce(stamp, op=dist.ReduceOp.MAX, group=group, async_op=True)
        seconds = float(all_reduce_s(self.ring_link(members), len(members), tensor.nbytes))
        return TimedSum(pending, stamp, stamped, seconds, self)

    def ring_link(self, ranks: Sequence[int]) -> Link:
        """Return the pace of a ring; between nodes, every rank of the ring uses the port of its device."""
        cluster = self.settings.cluster
        by_node = Counter(rank // cluster.devices_per_node for rank in ranks)
        if len(by_node) == 1:
            return cluster.intra_node
        network = cluster.inter_node.bytes_per_s * min(by_node.values())
        return Link(cluster.inter_node.latency_s, min(network, cluster.intra_node.bytes_per_s))

    def arrival_s(self, channel: Channel, num_bytes: int) -> float:
        """Return when a message that is sent now arrives: a channel carries one at a time."""
        link = self.settings.cluster.link(self.rank, channel._peer)
        free_s = max(time.perf_counter(), getattr(channel, "free_s", 0.0)) + link.transfer_s(num_bytes)
        channel.free_s = free_s  # type: ignore[attr-defined]
        return free_s

    # ------------------------------------------------------------------ the engine

    def patch(self) -> None:
        """Put this device under the engine of this process, for as long as it lives."""
        device = self

        def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
            """Have a function of the engine called by another one, which gets it first, and then its arguments."""
            inner = getattr(owner, name)
            setattr(owner, name, lambda *args, **kwargs: around(inner, *args, **kwargs))

        def runs(batch: Any) -> bool:
            return device.is_on and torch.is_grad_enabled() and isinstance(batch, MuxBatch)

        def whole_forward(inner: Any, model: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not runs(batch):
                return inner(model, batch, *args, **kwargs)
            output = device.compute(batch, "forward", lambda: inner(model, batch, *args, **kwargs))
            output.losses.slept_for = batch
            return output

        def stage_forward(inner: Any, stage: Any, virtual_stage: int, batch: Any, hidden_TD: Any) -> Any:
            if not runs(batch):
                return inner(stage, virtual_stage, batch, hidden_TD)
            passed = device.compute(batch, "forward", lambda: inner(stage, virtual_stage, batch, hidden_TD))
            passed.output.slept_for = batch
            return passed

        def backward(inner: Any, output: Any, gradient: Any, kept: Any) -> None:
            batch = getattr(output, "slept_for", None)
            if batch is None:
                inner(output, gradient, kept)
            else:
                device.compute(batch, "backward", lambda: inner(output, gradient, kept))

        def begin(inner: Any, sync: Any, work: Any) -> None:
            inner(sync, work)
            if device.is_on:
                sync.processes.wait_for_all()
                device.begun_s = time.perf_counter()

        def finish(inner: Any, sync: Any, result: Any) -> Any:
            passed_s = time.perf_counter()
            outcome = inner(sync, result)
            if device.is_on:
                device.passed_s.append(passed_s - device.begun_s)
                sleep_until(time.perf_counter() + device.update_s)
                device.marks.append((device.begun_s, time.perf_counter()))
                device.planned_s.append(device.trainer._plans.current.step_s)
            return outcome

        def shards(inner: Any, links: Any, tensor: torch.Tensor) -> Any:
            if device.is_on and links.size > 1:
                return device.sum_shards(tensor, lambda: inner(links, tensor))
            return inner(links, tensor)

        def gradients(inner: Any, processes: Any, tensor: torch.Tensor, ranks: Any = None) -> Any:
            if device.is_on:
                return device.sum_gradients(processes, tensor, ranks, lambda: inner(processes, tensor, ranks))
            return inner(processes, tensor, ranks)

        def put(inner: Any, channel: Any, key: Any, tensor: torch.Tensor) -> None:
            if channel._group is not None:
                stamp = torch.tensor([device.arrival_s(channel, tensor.nbytes)], dtype=torch.float64)
                sent = dist.isend(stamp, dst=channel._peer, group=channel._group)
                channel.__dict__.setdefault("stamps", []).append((stamp, sent))
            inner(channel, key, tensor)

        def post(inner: Any, channel: Any) -> None:
            if channel._expected:
                stamp = torch.empty(1, dtype=torch.float64)
                work = dist.irecv(stamp, src=channel._peer, group=channel._group)
                channel.__dict__.setdefault("arrivals", {})[channel._expected[0].key] = stamp, work
            inner(channel)

        def take(inner: Any, channel: Any, key: Any) -> torch.Tensor:
            message = inner(channel, key)
            stamp, work = channel.__dict__.get("arrivals", {}).pop(key, (None, None))
            if stamp is not None:
                work.wait()
                sleep_until(float(stamp))
            return message

        wrap(MultiTaskPeftModel, "forward", whole_forward)
        wrap(StageModel, "forward", stage_forward)
        wrap(executor_module, "pass_backward", backward)
        wrap(pipeline_module, "pass_backward", backward)
        wrap(GradientSync, "begin", begin)
        wrap(GradientSync, "finish", finish)
        wrap(TensorLinks, "all_reduce", shards)
        wrap(Processes, "all_reduce", gradients)
        wrap(Channel, "put", put)
        wrap(Channel, "_post", post)
        wrap(Channel, "take", take)


class _Starts(TrainerCallback):
    """Switches the device on when the first step begins, as plans have been made by then."""

    def __init__(self, device: SleepingDevice, as_planned: contextlib.ExitStack) -> None:
        self.device, self.as_planned = device, as_planned

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.device.is_on:
            self.as_planned.close()
            self.device.start()


def train(settings: Settings) -> dict[str, Any]:
    """Train as one rank, whose place is in the environment; return plain values."""
    torch.set_num_threads(1)
    trainer = trainer_of(settings, replicas=settings.layout)
    device = SleepingDevice(settings, trainer)
    device.patch()
    with contextlib.ExitStack() as as_planned:
        if settings.is_cut_evenly:
            as_planned.enter_context(mock.patch("peft_mux.planning.task_loads.lowest_layer", return_value=0))
        trainer.add_callback(_Starts(device, as_planned))
        trainer.train()
    return {
        "marks": device.marks,
        "passed_s": device.passed_s,
        "late_s": device.late_s,
        "counts": dict(device.counts),
        "update_s": device.update_s,
        "turns": device.plan.passes_in_turns,
        "run_plan_s": device.planned_s,
        "layers": device.plan.layers_per_stage,
        "summed_s": device.summed_s,
        "failed": [run.name for run in trainer._run.table if run.status.value != "succeeded"],
    }
