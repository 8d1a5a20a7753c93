"""`ParallelLayout`: which process holds which part of which replica of the backbone.

A replica is one copy of the backbone, spread over `tp * pp` processes; LobRA (section 2.2) writes it <tp,pp>. Replicas
may differ. Ranks are assigned replica by replica and stage by stage. The tensor parallel ranks of a stage, which
communicate most and usually share a node, are consecutive. For <2,2>, <1,1>::

    rank      0        1        2        3        4
    replica   0        0        0        0        1
    stage     0        0        1        1        0
    tp rank   0        1        0        1        0

`peft_mux.parallel.layout` makes layouts from the arguments of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, order=True)
class ParallelConfig:
    """How one replica is spread over GPUs; orders by tensor, then by pipeline parallel degree.

    Attributes:
        tp: tensor parallel degree: devices among which every layer is divided.
        pp: pipeline parallel degree: stages among which the layers are divided.

    Raises:
        ValueError: if a degree is below 1.
    """

    tp: int
    pp: int

    def __post_init__(self) -> None:
        for name, degree in (("tp", self.tp), ("pp", self.pp)):
            if degree < 1:
                raise ValueError(f"{name} must be 1 or more, got {degree}. Use 1 for no such parallelism.")

    @property
    def num_gpus(self) -> int:
        """GPUs of one replica (n_i in L)."""
        return self.tp * self.pp

    def __str__(self) -> str:
        """Return the paper's notation, such as <2,1>."""
        return f"<{self.tp},{self.pp}>"


class Place(NamedTuple):
    """The coordinates of a process in a layout.

    Attributes:
        replica: index of the replica of the backbone that the process belongs to.
        stage: pipeline stage within the replica.
        tp_rank: tensor parallel rank within the stage.
    """

    replica: int
    stage: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The replicas of a run, in the order of ranks.

    Attributes:
        replicas: tensor and pipeline parallel degrees of each replica.

    Raises:
        ValueError: if there is no replica.

    Example:
        >>> layout = ParallelLayout.of(4, tp=2)
        >>> layout.num_replicas, layout.place(1), layout.tensor_groups[0]
        (2, Place(replica=0, stage=0, tp_rank=1), (0, 1))
    """

    replicas: tuple[ParallelConfig, ...]

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("replicas must have at least one configuration, such as <1,1>.")

    @classmethod
    def of(cls, world_size: int, *, tp: int = 1, pp: int = 1) -> ParallelLayout:
        """Return the layout of equal replicas that uses all processes.

        Raises:
            ValueError: if the number of processes is not a multiple of `tp * pp`.
        """
        config = ParallelConfig(tp, pp)
        if world_size < 1 or world_size % config.num_gpus:
            raise ValueError(
                f"world_size must be a multiple of tp * pp = {tp} * {pp} = {config.num_gpus}, got {world_size}. "
                "Start another number of processes, or set other sizes."
            )
        return cls((config,) * (world_size // config.num_gpus))

    @property
    def world_size(self) -> int:
        """Number of processes over all replicas."""
        return sum(replica.num_gpus for replica in self.replicas)

    @property
    def num_replicas(self) -> int:
        """Number of copies of the backbone."""
        return len(self.replicas)

    @property
    def is_data_parallel(self) -> bool:
        """Whether every process holds a whole copy."""
        return all(replica.num_gpus == 1 for replica in self.replicas)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether any replica uses tensor parallelism."""
        return any(replica.tp > 1 for replica in self.replicas)

    @property
    def are_alike(self) -> bool:
        """Whether all replicas have the same configuration."""
        return len(set(self.replicas)) == 1

    @property
    def places(self) -> tuple[Place, ...]:
        """The coordinates of each process, by rank."""
        return tuple(
            Place(index, stage, tp_rank)
            for index, replica in enumerate(self.replicas)
            for stage in range(replica.pp)
            for tp_rank in range(replica.tp)
        )

    def place(self, rank: int) -> Place:
        """Return the coordinates of a process.

        Raises:
            ValueError: if the layout does not have this rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be 0 to {self.world_size - 1}, as {self} has, got {rank}.")
        return self.places[rank]

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of the stages of every pipeline: one pipeline for each replica and tensor parallel rank."""
        return self.ranks_by("replica", "tp_rank")

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of every tensor parallel group: one group for each replica and stage."""
        return self.ranks_by("replica", "stage")

    def ranks_by(self, *coordinates: str) -> tuple[tuple[int, ...], ...]:
        """Group the ranks by some of their coordinates, in rank order."""
        groups: dict[Any, list[int]] = {}
        for rank, place in enumerate(self.places):
            groups.setdefault(attrgetter(*coordinates)(place), []).append(rank)
        return tuple(map(tuple, groups.values()))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each replica, whose losses count for the replica."""
        return tuple(rank for rank, place in enumerate(self.places) if place.stage == place.tp_rank == 0)

    def __str__(self) -> str:
        """Return LobRA's notation."""
        runs = ((config, len(list(run))) for config, run in groupby(self.replicas))
        return ", ".join(f"{config}x{count}" for config, count in runs)
