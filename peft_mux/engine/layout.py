"""`ParallelLayout`: which process holds which part of which replica of the backbone.

A replica is one copy of the backbone, spread over `tp * pp` processes; LobRA (section 2.2) writes it <tp,pp>. Replicas
may differ. Ranks are assigned replica by replica, stage by stage, and the tensor parallel ranks of a stage, which
communicate most and mostly share a node, are neighbours. For <2,2>, <1,1>::

    rank      0        1        2        3        4
    replica   0        0        0        0        1
    stage     0        0        1        1        0
    tp rank   0        1        0        1        0
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.errors import ConfigError
from peft_mux.scheduler.replicas.configs import ParallelConfig

_MOST_DIGITS = 5
_REPLICAS = re.compile(r"<\s*(\d+)\s*,\s*(\d+)\s*>\s*(?:x\s*(\d+))?")


class Place(NamedTuple):
    """Where a process stands in a layout: its coordinates.

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
        >>> layout = ParallelLayout.parse("<2,1>, <1,1>x2")
        >>> layout.world_size, layout.place(1), layout.tensor_groups[0]
        (4, Place(replica=0, stage=0, tp_rank=1), (0, 1))
    """

    replicas: tuple[ParallelConfig, ...]

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("replicas is empty; allowed: at least one configuration, such as <1,1>.")

    @classmethod
    def of(cls, world_size: int, *, tp: int = 1, pp: int = 1) -> ParallelLayout:
        """Return as many equal replicas as there are processes for.

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
            ValueError: for a text that is not in that notation.
        """
        # A comma within <tp,pp> separates degrees, not replicas.
        items = [item.strip() for item in re.split(r"[;+]|,(?![^<]*>)", text) if item.strip()]
        matches = [match for item in items if (match := _REPLICAS.fullmatch(item))]
        if not items or len(matches) < len(items):
            raise ValueError(
                f"replicas is {text!r}; allowed: tensor and pipeline degrees of each replica, such as"
                ' "<1,1>x2, <2,1>x1".'
            )
        replicas = []
        for match in matches:
            tp, pp, count = match.groups(default="1")
            # Before a list is made of so many: no run has them, and it would fill the memory.
            if max(map(len, (tp, pp, count))) > _MOST_DIGITS:
                raise ValueError(f"replicas is {text!r}; allowed: numbers of at most {_MOST_DIGITS} digits.")
            replicas += [ParallelConfig(int(tp), int(pp))] * int(count)
        return cls(tuple(replicas))

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
        """Whether some copy's layers are cut among processes."""
        return any(replica.tp > 1 for replica in self.replicas)

    @property
    def are_alike(self) -> bool:
        """Whether all replicas have one configuration."""
        return len(set(self.replicas)) == 1

    @property
    def places(self) -> tuple[Place, ...]:
        """Where each process stands, by rank."""
        return tuple(
            Place(index, stage, tp_rank)
            for index, replica in enumerate(self.replicas)
            for stage in range(replica.pp)
            for tp_rank in range(replica.tp)
        )

    def place(self, rank: int) -> Place:
        """Return where a process stands.

        Raises:
            ValueError: for a rank that the layout does not have.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}; allowed: 0 to {self.world_size - 1}, as {self} has.")
        return self.places[rank]

    def rank(self, place: Place) -> int:
        """Return the global rank of the process at a place."""
        return self.places.index(place)

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of the stages of every pipeline: one pipeline for each replica and tensor parallel rank."""
        return self._ranks_by("replica", "tp_rank")

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of every tensor parallel group: one group for each replica and stage."""
        return self._ranks_by("replica", "stage")

    @property
    def stage_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same weights, if replicas are equal: one group for each stage and rank of it."""
        return self._ranks_by("stage", "tp_rank")

    def _ranks_by(self, *coordinates: str) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of places that have some coordinates in common, in the order of ranks."""
        groups: dict[Any, list[int]] = {}
        for rank, place in enumerate(self.places):
            groups.setdefault(attrgetter(*coordinates)(place), []).append(rank)
        return tuple(map(tuple, groups.values()))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each replica, whose losses count for all of it."""
        return tuple(self.rank(Place(index, 0, 0)) for index in range(self.num_replicas))

    def __str__(self) -> str:
        """Return LobRA's notation."""
        runs = ((config, len(list(run))) for config, run in groupby(self.replicas))
        return ", ".join(f"{config}x{count}" for config, count in runs)


def layout_of(args: MultiTaskTrainingArguments) -> ParallelLayout:
    """Return how the processes of a run are laid out, as its arguments say.

    Raises:
        ConfigError: if they cannot be divided so.
    """
    tp, pp, world_size = args.tensor_parallel_size, args.pipeline_parallel_size, args.world_size
    if args.replicas is None:
        unit = tp * pp
        if world_size % unit:
            raise ConfigError(
                f"args.tensor_parallel_size, args.pipeline_parallel_size: got {tp} and {pp} in a run of {world_size}"
                f" processes; allowed: sizes whose product divides the number of processes. Start {unit} processes or a"
                f" multiple: torchrun --nproc-per-node {unit} script.py, or accelerate launch --multi_gpu"
                f" --num_processes {unit} script.py."
            )
        return ParallelLayout.of(world_size, tp=tp, pp=pp)
    if (tp, pp) != (1, 1):
        raise ConfigError(
            f"args.replicas: got {args.replicas!r} beside tensor_parallel_size={tp} and pipeline_parallel_size={pp};"
            " allowed: either the one or the others. Leave the two sizes at 1: replicas has its own."
        )
    return layout_of_text(args.replicas, world_size)


def layout_of_text(replicas: str, world_size: int) -> ParallelLayout:
    """Return the layout that LobRA's notation stands for, such as "<1,1>x2, <2,1>".

    Raises:
        ConfigError: if it cannot be read, or is of another number of processes than `world_size`.
    """
    try:
        layout = ParallelLayout.parse(replicas)
    except ValueError as error:
        raise ConfigError(f"args.{error}") from error
    if layout.world_size != world_size:
        raise ConfigError(
            f"args.replicas: got {layout}, which takes {layout.world_size} processes, in a run of {world_size};"
            f" allowed: as many as there are. Start {layout.world_size} processes, or name other replicas."
        )
    return layout
