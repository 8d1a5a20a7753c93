"""`ParallelLayout`: which process holds which part of which replica of the backbone.

A replica is one copy of the backbone, spread over `tp * pp` processes; LobRA (section 2.2) writes it <tp,pp>. Replicas
may be unlike one another. Ranks are given out replica by replica, stage by stage, and the shards of a stage, which
speak with each other most, lie side by side. For <2,2>, <1,1>::

    rank      0        1        2        3        4
    replica   0        0        0        0        1
    stage     0        0        1        1        0
    shard     0        1        0        1        0
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from peft_mux.scheduler.replicas import ParallelConfig

_REPLICAS = re.compile(r"<\s*(\d+)\s*,\s*(\d+)\s*>\s*(?:x\s*(\d+))?")


class Place(NamedTuple):
    """Where a process stands.

    Attributes:
        replica: of the backbone.
        stage: of the replica's pipeline.
        shard: of the stage's weights.
    """

    replica: int
    stage: int
    shard: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The replicas of a run, in the order of ranks.

    Attributes:
        replicas: one configuration each.

    Raises:
        ValueError: where there is none.

    Example:
        >>> layout = ParallelLayout.parse("<2,1>, <1,1>x2")
        >>> layout.world_size, layout.place(1), layout.tensor_groups[0]
        (4, Place(replica=0, stage=0, shard=1), (0, 1))
    """

    replicas: tuple[ParallelConfig, ...]

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("replicas is empty; allowed: at least one configuration, such as <1,1>.")

    @classmethod
    def of(cls, world_size: int, *, tp: int = 1, pp: int = 1) -> ParallelLayout:
        """Return as many equal replicas as there are processes for.

        Args:
            world_size: number of processes.
            tp: tensor parallel degree of each replica.
            pp: pipeline stages of each replica.

        Raises:
            ValueError: if the processes cannot be divided so.
        """
        config = ParallelConfig(tp, pp)
        if world_size < 1 or world_size % config.num_gpus:
            raise ValueError(
                f"world_size is {world_size}; allowed: a multiple of tp * pp = {tp} * {pp} = {config.num_gpus}. Start "
                "another number of processes, or set other sizes."
            )
        return cls((config,) * (world_size // config.num_gpus))

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Return the layout that LobRA's notation stands for, such as "<1,1>x2, <2,1>".

        Raises:
            ValueError: for anything else.
        """
        items = [item for item in re.split(r"[;+]|,(?![^<]*>)", text) if item.strip()]
        matches = [_REPLICAS.fullmatch(item.strip()) for item in items]
        if not items or not all(matches):
            raise ValueError(
                f"replicas is {text!r}; allowed: tensor and pipeline degrees of each replica, such as"
                ' "<1,1>x2, <2,1>x1".'
            )
        replicas = []
        for match in matches:
            assert match is not None, "checked above"
            tp, pp, count = match.groups(default="1")
            replicas += [ParallelConfig(int(tp), int(pp))] * int(count)
        return cls(tuple(replicas))

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(replica.num_gpus for replica in self.replicas)

    @property
    def num_replicas(self) -> int:
        """Copies of the backbone."""
        return len(self.replicas)

    @property
    def is_data_parallel(self) -> bool:
        """Whether every process holds a whole copy."""
        return all(replica.num_gpus == 1 for replica in self.replicas)

    @property
    def are_alike(self) -> bool:
        """Whether all replicas have one configuration."""
        return len(set(self.replicas)) == 1

    def place(self, rank: int) -> Place:
        """Return where a process stands.

        Raises:
            ValueError: for a rank that the layout does not have.
        """
        first = 0
        for index, replica in enumerate(self.replicas):
            if first <= rank < first + replica.num_gpus:
                return Place(index, *divmod(rank - first, replica.tp))
            first += replica.num_gpus
        raise ValueError(f"rank is {rank}; allowed: 0 to {self.world_size - 1}, as {self} has.")

    def rank(self, place: Place) -> int:
        """Return the process of a place."""
        first = sum(replica.num_gpus for replica in self.replicas[: place.replica])
        return first + place.stage * self.replicas[place.replica].tp + place.shard

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of the stages of every pipeline: one for each replica and shard."""
        return tuple(
            tuple(self.rank(Place(index, stage, shard)) for stage in range(replica.pp))
            for index, replica in enumerate(self.replicas)
            for shard in range(replica.tp)
        )

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of the shards of every stage: one for each replica and stage."""
        return tuple(
            tuple(self.rank(Place(index, stage, shard)) for shard in range(replica.tp))
            for index, replica in enumerate(self.replicas)
            for stage in range(replica.pp)
        )

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each replica, which speaks for it."""
        return tuple(self.rank(Place(index, 0, 0)) for index in range(self.num_replicas))

    def __str__(self) -> str:
        """Return LobRA's notation."""
        parts: list[tuple[ParallelConfig, int]] = []
        for replica in self.replicas:
            if parts and parts[-1][0] == replica:
                parts[-1] = replica, parts[-1][1] + 1
            else:
                parts.append((replica, 1))
        return ", ".join(f"{config}x{count}" for config, count in parts)
