"""A `ReplicaTimeModel` from what MuxTune's planner knows: a profile of one device and the memory model.

LobRA profiles a layer at each tensor parallel degree (L Appendix D). Where that was not done, the times of a layer at
any degree follow from a profile of one device by M Eq. 3, as `cost_model` has it. The curve of Eq. 10 is then fitted to
these times as to measured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peft_mux.scheduler.cost_model import CostModel
from peft_mux.scheduler.deployment_space import count_plans
from peft_mux.scheduler.hardware import Cluster
from peft_mux.scheduler.link import Link
from peft_mux.scheduler.loads import TaskLoad
from peft_mux.scheduler.memory import MemoryModel, ModelShape
from peft_mux.scheduler.profile import Profile
from peft_mux.scheduler.replica_time import LayerTime, ReplicaTimeModel, fit_layer
from peft_mux.scheduler.replicas import ParallelConfig

_LENGTH_POINTS = 8
_SIZE_POINTS = 4
_SHORTEST_TOKENS = 16
_LEAST_INTERVAL_TOKENS = 16
_MOST_INTERVAL_TOKENS = 256
"""Of L section 4.3."""
_INTERVALS = 64
_MOST_DEPLOYMENTS = 20_000
"""Of which all can be gone through in seconds."""
_MANY_TOKENS = 2**40


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What the costs of a replica depend on.

    Attributes:
        shape: of the backbone.
        profile: of one layer on one device.
        loads: of the tasks that are trained.
        memory: of one device that holds everything; its stages and devices are replaced by each configuration's.
        limit_bytes: of one device; `None` for no limit.
        pass_tokens: most tokens that a run puts into one pass; a longer sequence makes a pass of its own.
        links: the devices and their links; `None` for the link of the profile.
        supports: whether the backbone can be cut so; by default any way is taken to be possible.
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


def interval_tokens(longest: int) -> int:
    """Return the width of an interval of bucketing: 256 tokens as in L section 4.3, finer for short sequences.

    Args:
        longest: sequence of the batch, in tokens.
    """
    width = 2 ** max(0, (longest // _INTERVALS).bit_length() - 1)
    return min(_MOST_INTERVAL_TOKENS, max(_LEAST_INTERVAL_TOKENS, width))


def candidate_configs(facts: ReplicaFacts, num_devices: int) -> tuple[ParallelConfig, ...]:
    """Return the configurations that can be deployed: shards by powers of two, on at most `num_devices`.

    Depths of pipelines are all those that leave the largest stage fewer layers than the next smaller depth does, as in
    L's <1,6> (Table 2). Where deployments that mix replicas of so many sizes are too many to go through, depths are
    powers of two as well.
    """
    most = min(num_devices, facts.shape.num_layers)
    layers = [-(-facts.shape.num_layers // depth) for depth in range(1, most + 1)]
    depths = [depth for depth in range(1, most + 1) if depth == 1 or layers[depth - 1] < layers[depth - 2]]
    configs = _configs(facts, num_devices, depths)
    if configs and count_plans(num_devices, [config.num_gpus for config in configs]) <= _MOST_DEPLOYMENTS:
        return configs
    return _configs(facts, num_devices, _powers_of_two(most))


def _configs(facts: ReplicaFacts, num_devices: int, depths: Sequence[int]) -> tuple[ParallelConfig, ...]:
    every = (ParallelConfig(tp, pp) for tp in _powers_of_two(num_devices) for pp in depths if tp * pp <= num_devices)
    return tuple(sorted(filter(facts.supports, every), key=lambda config: (config.num_gpus, config)))


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def memory_tokens(facts: ReplicaFacts, config: ParallelConfig) -> int | None:
    """Return the most tokens of a micro-batch that a replica's memory holds; `None` for no limit, 0 for none at all.

    With 1F1B stage s of S holds S - s micro-batches at once; the fullest stage counts.
    """
    if facts.limit_bytes is None:
        return None
    model, limit = _memory_of(facts, config), facts.limit_bytes
    tokens = min(
        model.max_tokens(facts.loads, limit, in_flight=config.pp - stage, stage=stage) for stage in range(config.pp)
    )
    return None if tokens >= _MANY_TOKENS else tokens


def least_bytes(facts: ReplicaFacts, config: ParallelConfig) -> int:
    """Return what the fullest device of a replica holds with micro-batches of one token."""
    model = _memory_of(facts, config)
    return max(model.peak_bytes(facts.loads, 1, in_flight=config.pp - stage, stage=stage) for stage in range(config.pp))


def _memory_of(facts: ReplicaFacts, config: ParallelConfig) -> MemoryModel:
    return replace(facts.memory, num_stages=config.pp, devices_per_stage=config.tp, layers_per_stage=None)


def token_limits(facts: ReplicaFacts, configs: Iterable[ParallelConfig]) -> dict[ParallelConfig, int]:
    """Return M of each configuration: what memory holds, and no more than a pass of the run ever has.

    Configurations that hold nothing are left out.
    """
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
        facts: of the run.
        tp: tensor parallel degree.
        max_tokens: of the largest micro-batch.
    """
    longest = max(max_tokens, _LENGTH_POINTS * _SHORTEST_TOKENS)
    lengths = sorted({int(length) for length in np.geomspace(_SHORTEST_TOKENS, longest, _LENGTH_POINTS)})
    cost = CostModel(facts.profile, facts.shape, devices_per_stage=tp, tensor_link=_tensor_link(facts, tp))
    times = []
    for length in lengths:
        largest = max(2, longest // length)
        for size in sorted({int(size) for size in np.geomspace(1, largest, _SIZE_POINTS)} | {1, 2}):
            terms = cost.uniform_terms(facts.loads, size, length)
            spread_s = terms.first_s + terms.last_s + facts.profile.pass_overhead_s
            times.append(LayerTime(tp, length, size, terms.layer_s + spread_s / facts.shape.num_layers))
    return times


def _tensor_link(facts: ReplicaFacts, tp: int) -> Link | None:
    if facts.links is None:
        return facts.profile.link
    return facts.links.intra_node if tp <= facts.links.devices_per_node else facts.links.inter_node
