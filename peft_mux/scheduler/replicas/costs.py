"""A `ReplicaTimeModel` from what MuxTune's planner knows: a profile of one device and the memory model.

LobRA profiles a layer at each tensor parallel degree (L Appendix D). Where that was not done, the times of a layer at
any degree follow from a profile of one device by M Eq. 3, as `CostModel` has it. The curve of Eq. 10 is then fitted to
these times as to measured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peft_mux.scheduler.costs.hardware import Cluster
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.link import Link
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel, ModelShape
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.replicas.configs import ParallelConfig
from peft_mux.scheduler.replicas.time_model import LayerTime, ReplicaTimeModel, fit_layer

_LENGTH_POINTS = 8
"""Lengths at which a layer is timed; a fit needs three or more."""
_SIZE_POINTS = 4
"""Micro-batch sizes at which each length is timed, besides 1 and 2; a fit needs two or more."""
_SHORTEST_TOKENS = 16
_UNBOUNDED_TOKENS = 2**40
"""As far as `MemoryModel.max_tokens` searches; where so many tokens fit, memory bounds nothing."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What the costs of a replica depend on.

    Attributes:
        shape: layers and widths of the backbone.
        profile: times of one layer on one device.
        loads: what each task that is trained brings into a step.
        memory: memory model of one device that holds the whole backbone; each configuration puts its own numbers of
            stages and of devices a stage in place of the model's.
        limit_bytes: memory of one device that may be filled; `None` for no limit.
        pass_tokens: most tokens that a run puts into one pass; a longer sequence makes a pass of its own.
        links: the devices and the links between them; `None` where shards use the link of the profile.
        supports: says whether the engine can divide the backbone as a configuration does; by default it always can.
    """

    shape: ModelShape
    profile: Profile
    loads: tuple[TaskLoad, ...]
    memory: MemoryModel
    limit_bytes: int | None
    pass_tokens: int
    links: Cluster | None = None
    supports: Callable[[ParallelConfig], bool] = lambda config: True

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of all tasks; 1 where there are none."""
        return max((load.longest for load in self.loads), default=1) or 1


def memory_tokens(facts: ReplicaFacts, config: ParallelConfig) -> int | None:
    """Return the most tokens of a micro-batch that a replica's memory holds; `None` for no limit, 0 for none at all.

    With 1F1B stage s of S holds S - s micro-batches at once; the fullest stage counts.
    """
    if facts.limit_bytes is None:
        return None
    model, limit = memory_of(facts, config), facts.limit_bytes
    tokens = min(
        model.max_tokens(facts.loads, limit, in_flight=config.pp - stage, stage=stage) for stage in range(config.pp)
    )
    return None if tokens >= _UNBOUNDED_TOKENS else tokens


def least_bytes(facts: ReplicaFacts, config: ParallelConfig) -> int:
    """Return the bytes that the fullest device of a replica holds with micro-batches of one token."""
    model = memory_of(facts, config)
    return max(model.peak_bytes(facts.loads, 1, in_flight=config.pp - stage, stage=stage) for stage in range(config.pp))


def memory_of(facts: ReplicaFacts, config: ParallelConfig) -> MemoryModel:
    """Return the memory model of one device of a replica, its layers cut as evenly as can be."""
    # A cut of layers that was chosen for another number of stages does not apply.
    return replace(facts.memory, num_stages=config.pp, devices_per_stage=config.tp, layers_per_stage=None)


def token_limits(facts: ReplicaFacts, configs: Iterable[ParallelConfig]) -> dict[ParallelConfig, int]:
    """Return M of L Eq. 10 by configuration: the tokens that memory holds, and no more than a pass of the run ever has.

    Configurations that hold nothing are left out.
    """
    # A sequence longer than a pass makes a pass of its own.
    most = max(facts.pass_tokens, facts.longest)
    limits: dict[ParallelConfig, int] = {}
    for config in configs:
        tokens = memory_tokens(facts, config)
        if tokens != 0:
            limits[config] = most if tokens is None else min(most, tokens)
    return limits


def replica_time_model(facts: ReplicaFacts, configs: Sequence[ParallelConfig]) -> ReplicaTimeModel:
    """Return the time model of these configurations, made from the profile.

    Raises:
        ValueError: where not one of the configurations holds a token.
    """
    limits = token_limits(facts, configs)
    degrees = sorted({config.tp for config in limits})
    most = max(limits.values(), default=_SHORTEST_TOKENS)
    times = [time for tp in degrees for time in layer_times(facts, tp, most)]
    return ReplicaTimeModel(fit_layer(times), facts.shape.num_layers, limits)


def layer_times(facts: ReplicaFacts, tp: int, max_tokens: int) -> list[LayerTime]:
    """Return forward and backward times of one layer at a tensor parallel degree, over lengths and micro-batch sizes.

    Eq. 10 knows layers only: head, embedding and the overhead of a pass are spread over them.

    Args:
        facts: what the costs of the run's replicas depend on.
        tp: tensor parallel degree at which the layer runs.
        max_tokens: tokens of the largest micro-batch that any configuration may have.
    """
    # Below this, rounding down would make some of the lengths equal.
    longest = max(max_tokens, _LENGTH_POINTS * _SHORTEST_TOKENS)
    lengths = sorted({int(length) for length in np.geomspace(_SHORTEST_TOKENS, longest, _LENGTH_POINTS)})
    cost = CostModel(facts.profile, facts.shape, devices_per_stage=tp, tensor_link=tensor_link(facts, tp))
    times = []
    for length in lengths:
        # Sizes 1 and 2 are timed at every length, even where two sequences exceed M: without them the terms of Eq. 10
        # with b cannot be told from those without.
        largest = max(2, longest // length)
        for size in sorted({int(size) for size in np.geomspace(1, largest, _SIZE_POINTS)} | {1, 2}):
            terms = cost.uniform_terms(facts.loads, size, length)
            seconds = terms.stage_s(0, facts.shape.num_layers) + facts.profile.pass_overhead_s
            times.append(LayerTime(tp, length, size, seconds / facts.shape.num_layers))
    return times


def tensor_link(facts: ReplicaFacts, tp: int) -> Link | None:
    """Return the link between the devices that share every layer; `None` where none is known.

    Args:
        facts: what the costs of the run's replicas depend on.
        tp: tensor parallel degree.
    """
    if facts.links is None:
        return facts.profile.link
    # The shards of a layer are neighbours: they leave a node only where it has too few devices.
    return facts.links.intra_node if tp <= facts.links.devices_per_node else facts.links.inter_node
