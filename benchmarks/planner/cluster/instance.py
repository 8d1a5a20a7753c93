"""Instances of the cluster replay: how fast a set of tasks trains on a few GPUs under each of the compared systems.

An instance is one backbone on a pipeline of `num_stages` GPUs, which is what M's search picks for 4 GPUs (§5.1). All
systems stand on one cost model, one memory model and one pipeline simulator, and each takes the number of micro-batches
that is fastest for it:

    muxtune   up to `max_tasks` share the instance, put together by `plan_tasks`; nothing is padded for others
    sl-peft   as many share it, but all in one batch, every sequence zero-padded to the longest task's length, 1F1B
    nemo      one task at a time, the same kernels, 1F1B
    hf-peft   one task at a time, eager operators (`eager_profile`), GPipe

Not modelled: tensor parallelism inside an instance, loading of backbones and data, checkpoints, faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.planner.cluster.trace import TaskKind
from peft_mux.scheduler.costs.hardware import Cluster, Device
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import ModelShape
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import STREAMING_PART, Curve, Profile, analytic_profile, launch_s
from peft_mux.scheduler.names import Schedule
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.plan import Link
from peft_mux.scheduler.planner.planner import Budget, Outcome, plan_tasks

SYSTEMS = ("hf-peft", "nemo", "sl-peft", "muxtune")

_EAGER_READS = 31
"""Times that eager element-wise operators of a decoder layer read or write a hidden and an MLP state beyond fused ones.

Counted by operator, forward and backward: two norms in fp32 of five operators 80, rotary embedding 40, residuals 12,
all of hidden states; SiLU and product 12 of MLP states. In units of both states together that is 45 for a Llama of 7B,
against the 14 of the analytic profile.
"""
_EAGER_LAUNCHES = 120
"""Launches of a layer beyond the analytic profile's, counted by operator too."""
_EAGER_ADAPTER_READS = 5.5
"""Reads and writes of one adapter beyond fused ones, per feature of its width: scaling and sums are operators of their
own, which makes 8 of 2.5."""
_EAGER_POINTS = np.array([2.0**power for power in range(4, 18)])


@dataclass(frozen=True, slots=True)
class Speed:
    """How a set of tasks trains on an instance.

    Attributes:
        step_s: seconds in which each of them takes one optimizer step.
        num_micro_batches: micro-batches of each task in a step (C in M).
        utilization: part of the instance's GPU time in which a stage computes, padding included.
        computed_tokens: tokens that a step computes, padding included.
        peak_bytes: most memory that the fullest GPU holds at once.
    """

    step_s: float
    num_micro_batches: int
    utilization: float
    computed_tokens: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What every instance of a cluster is made of.

    Attributes:
        devices: one instance's GPUs; each is a stage.
        shape: layers and widths of the backbone.
        max_tasks: most tasks that share an instance, where the system shares at all.
        micro_batch_counts: numbers of micro-batches (C in M) to choose from; none is used that exceeds the smallest
            batch.
        max_tokens: most tokens of one pass.
    """

    devices: Cluster
    shape: ModelShape
    max_tasks: int = 8
    micro_batch_counts: tuple[int, ...] = (4, 8, 16)
    max_tokens: int = 65536


@dataclass(slots=True)
class InstanceModel:
    """Predicts an instance of one system; answers are remembered by the multiset of kinds.

    Attributes:
        system: name of the system, one of `SYSTEMS`.
        spec: what every instance is made of.
    """

    system: str
    spec: InstanceSpec
    _speeds: dict[tuple[TaskKind, ...], Speed | None] = field(default_factory=dict, repr=False)
    _cost: CostModel = field(init=False, repr=False)
    _memory: MemoryModel = field(init=False, repr=False)

    def __post_init__(self) -> None:
        devices, shape = self.spec.devices, self.spec.shape
        profile = analytic_profile(devices.device, shape, link=devices.intra_node)
        # HF-PEFT alone runs a model operator by operator.
        if self.system == "hf-peft":
            profile = eager_profile(profile, devices.device, shape)
        self._cost = CostModel(profile, shape, num_stages=devices.num_devices)
        self._memory = MemoryModel(shape, num_stages=devices.num_devices)

    @property
    def max_tasks(self) -> int:
        """Tasks that an instance may hold."""
        return self.spec.max_tasks if self.system in ("sl-peft", "muxtune") else 1

    def fits(self, kinds: Sequence[TaskKind]) -> bool:
        """Return whether an instance holds these tasks at once, by number and by memory."""
        return len(kinds) <= self.max_tasks and self._remembered_speed(kinds) is not None

    def speed(self, kinds: Sequence[TaskKind]) -> Speed:
        """Return how these tasks, which fit, train together."""
        speed = self._remembered_speed(kinds)
        assert speed is not None, f"{kinds} fit an instance of {self.system}"
        return speed

    def _remembered_speed(self, kinds: Sequence[TaskKind]) -> Speed | None:
        """Return how these tasks train together, planned on the first call; `None` if memory does not hold them."""
        # Tasks of one kind are equal to the planner: the multiset decides.
        key = tuple(sorted(kinds))
        if key not in self._speeds:
            self._speeds[key] = self._fastest(key)
        return self._speeds[key]

    def _fastest(self, kinds: tuple[TaskKind, ...]) -> Speed | None:
        """Return the speed with the best number of micro-batches, or `None` where memory does not hold the tasks."""
        smallest = min(kind.batch_size for kind in kinds)
        # A batch smaller than every count is cut into single sequences.
        counts = [count for count in self.spec.micro_batch_counts if count <= smallest] or [smallest]
        tried = [self._speed_with(kinds, count) for count in counts]
        fitting = [speed for speed in tried if speed is not None]
        return min(fitting, key=lambda speed: (speed.step_s, speed.num_micro_batches)) if fitting else None

    def _speed_with(self, kinds: tuple[TaskKind, ...], num_micro_batches: int) -> Speed | None:
        """Return the speed with C micro-batches, or None where memory does not hold them."""
        longest = max(kind.tokens_per_sequence for kind in kinds)
        # SL-PEFT puts all tasks into one batch, and so pads every sequence to the longest.
        padded_to = longest if self.system == "sl-peft" else None
        loads = [kind.load(f"{index}", self.spec.shape, padded_to=padded_to) for index, kind in enumerate(kinds)]
        policy, schedule = _PLANS[self.system]
        tokens = sum(load.tokens for load in loads) / num_micro_batches
        budget = Budget(
            # A bound below the micro-batches asked for would make more of them.
            max(self.spec.max_tokens, math.ceil(tokens)),
            self.spec.devices.device.memory_bytes,
            num_micro_batches=num_micro_batches,
            schedule=schedule,
            links=self.spec.devices.intra_node,
        )
        try:
            outcome = plan_tasks(loads, self._cost, self._memory, budget, policy=policy)
        except ValueError:  # not even one task, or one micro-batch, fits into memory
            return None
        # The planner cuts rows into more passes where as many as were asked for do not fit.
        if outcome.waiting or any(htask.micro_batches > num_micro_batches for htask in outcome.htasks):
            return None
        return Speed(
            outcome.step_s,
            num_micro_batches,
            _utilization(outcome, budget.links),
            sum(load.tokens for load in loads),
            max(outcome.peak_bytes),
        )


_PLANS: dict[str, tuple[str, Schedule]] = {
    "hf-peft": ("sequential", "gpipe"),
    "nemo": ("sequential", "1f1b"),
    "sl-peft": ("together", "1f1b"),
    "muxtune": ("mux", "mux"),
}


def eager_profile(profile: Profile, device: Device, shape: ModelShape) -> Profile:
    """Return a profile of unfused operators: what Hugging Face models and PEFT run without compilation.

    Base products and the attention product stay as they are; element-wise operators move more bytes and are launched
    one by one, and each adapter scales and adds in operators of its own. Counts are this module's constants, by reading
    the operators of a decoder layer; none is measured.

    Args:
        profile: analytic profile of fused operators.
        device: data sheet of the same device.
        shape: layers and widths of the backbone.
    """
    bytes_per_token = _EAGER_READS * (shape.hidden_size + shape.intermediate_size) * shape.activation_bytes
    # Adapters are in the tasks' loads by width; PEFT's extra reads are added for the four projections of attention.
    widths = 4 * shape.hidden_size + 2 * (shape.attention_size + shape.key_value_size)
    bytes_per_token += _EAGER_ADAPTER_READS * widths * shape.activation_bytes
    bytes_per_s = STREAMING_PART * device.memory_bytes_per_s
    extra_s = _EAGER_POINTS * bytes_per_token / bytes_per_s + _EAGER_LAUNCHES * launch_s(device)
    layer = Curve.measured(_EAGER_POINTS, profile.layer(_EAGER_POINTS) + extra_s)
    return replace(profile, layer=layer, versions=(*profile.versions, ("operators", "eager")))


def _utilization(outcome: Outcome, links: Link | None) -> float:
    """Return the busy part of all stages over a step; between the pipeline and the next step lie the updates."""
    assert outcome.template is not None, "there is a task"
    busy_s = sum(simulate(outcome.template, outcome.bucket_loads, links=links).busy_s)
    return busy_s / (outcome.step_s * len(outcome.peak_bytes))
