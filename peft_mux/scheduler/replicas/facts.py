"""`ReplicaFacts`: the inputs of a replica's costs, and the limits and time model that follow from them.

LobRA profiles a layer at each tensor parallel degree (L Appendix D). Without such a profile, the times of a layer at
any degree follow from a profile of one device by M Eq. 3 (`CostModel`), and the curve of L Eq. 10 is fitted to these
times in the same way as to measured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peft_mux.scheduler.costs.hardware import Cluster
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import ModelShape, TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.plan import Link
from peft_mux.scheduler.replicas.time_model import LayerTime, ReplicaTimeModel, fit_layer

_LENGTH_POINTS = 8
"""Lengths at which a layer is timed; a fit needs three or more."""
_SIZE_POINTS = 4
"""Micro-batch sizes at which each length is timed, in addition to 1 and 2; a fit needs two or more."""
_SHORTEST_TOKENS = 16
_UNBOUNDED_TOKENS = 2**40
"""As far as `MemoryModel.max_tokens` searches; if so many tokens fit, memory bounds nothing."""


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
        pass_tokens: most tokens that a run puts into one pass; a longer sequence fills a pass alone.
        links: the devices and the links between them; `None` if shards use the link of the profile.
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
    def most_tokens(self) -> int:
        """Most tokens of any pass of the run: a sequence longer than a pass fills one alone."""
        return max(self.pass_tokens, *(load.longest for load in self.loads), 1)

    def memory_of(self, config: ParallelConfig) -> MemoryModel:
        """Return the memory model of one device of a replica, its layers cut as evenly as possible."""
        # A cut of layers that was chosen for another number of stages does not apply.
        return replace(self.memory, num_stages=config.pp, devices_per_stage=config.tp, layers_per_stage=None)

    def memory_tokens(self, config: ParallelConfig) -> int | None:
        """Return the most tokens of a micro-batch that a replica's memory holds; `None` for no limit, 0 if none fits.

        With 1F1B stage s of S holds S - s micro-batches at once; the fullest stage counts.
        """
        if self.limit_bytes is None:
            return None
        model, tokens = self.memory_of(config), _UNBOUNDED_TOKENS
        for stage in range(config.pp):
            in_flight = config.pp - stage
            # One look at a stage that holds as much as the stages before it avoids the search.
            if model.peak_bytes(self.loads, tokens, in_flight=in_flight, stage=stage) > self.limit_bytes:
                tokens = model.max_tokens(self.loads, self.limit_bytes, in_flight=in_flight, stage=stage)
        return None if tokens >= _UNBOUNDED_TOKENS else tokens

    def token_limits(self, configs: Iterable[ParallelConfig]) -> dict[ParallelConfig, int]:
        """Return M of L Eq. 10 by configuration: the tokens that memory holds, at most those of any pass of the run.

        Configurations that hold nothing are left out.
        """
        held = {config: self.memory_tokens(config) for config in configs}
        return {
            config: self.most_tokens if tokens is None else min(self.most_tokens, tokens)
            for config, tokens in held.items()
            if tokens != 0
        }

    def least_bytes(self, config: ParallelConfig) -> int:
        """Return the bytes that the fullest device of a replica holds with micro-batches of one token."""
        model, stages = self.memory_of(config), range(config.pp)
        return max(model.peak_bytes(self.loads, 1, in_flight=config.pp - stage, stage=stage) for stage in stages)

    def tensor_link(self, tp: int) -> Link | None:
        """Return the link of tensor parallel groups of so many devices; `None` if none is known."""
        return self.profile.link if self.links is None else self.links.tensor_link(tp)

    def stage_links(self, config: ParallelConfig, num_replicas: int = 1, first: int = 0) -> tuple[Link, ...]:
        """Return the links between stages of the slowest of equal replicas from device `first` on, if any are known."""
        if self.links is None:
            return (self.profile.link,) * config.pp if self.profile.link is not None and config.pp > 1 else ()
        return self.links.slowest_stage_links(config.tp, config.pp, num_replicas, first)


def replica_time_model(facts: ReplicaFacts, configs: Sequence[ParallelConfig]) -> ReplicaTimeModel:
    """Return the time model of these configurations, fitted to what a profile of one device predicts.

    Raises:
        ValueError: if none of the configurations holds a token.
    """
    limits = facts.token_limits(configs)
    degrees = sorted({config.tp for config in limits})
    most = max(limits.values(), default=_SHORTEST_TOKENS)
    times = [time for tp in degrees for time in layer_times(facts, tp, most)]
    return ReplicaTimeModel(fit_layer(times), facts.shape.num_layers, limits)


def layer_times(facts: ReplicaFacts, tp: int, max_tokens: int) -> list[LayerTime]:
    """Return times of one layer at a tensor parallel degree, over lengths and micro-batch sizes up to `max_tokens`.

    Eq. 10 knows layers only: head, embedding and the overhead of a pass are spread over them.
    """
    # Below this, rounding down would make some of the lengths equal.
    longest = max(max_tokens, _LENGTH_POINTS * _SHORTEST_TOKENS)
    lengths = sorted({int(length) for length in np.geomspace(_SHORTEST_TOKENS, longest, _LENGTH_POINTS)})
    cost = CostModel(facts.profile, facts.shape, devices_per_stage=tp, tensor_link=facts.tensor_link(tp))
    times = []
    for length in lengths:
        # Sizes 1 and 2 are timed at every length, even if two sequences exceed M: without them the terms of Eq. 10
        # with b cannot be told from those without.
        largest = max(2, longest // length)
        for size in sorted({int(size) for size in np.geomspace(1, largest, _SIZE_POINTS)} | {1, 2}):
            seconds = cost.uniform_pass_s(facts.loads, size, length)
            times.append(LayerTime(tp, length, size, seconds / facts.shape.num_layers))
    return times
