"""Which decoder layers lie in which process of a pipeline.

A virtual stage is known by its *place* on the way of a micro-batch: place `chunk * S + stage` follows the one before,
as in `peft_mux.scheduler.pipeline_launch`. For 7 layers, S = 2 and 2 chunks a process, with 4 and 3 layers::

    place   0        1        2        3
    stage   0        1        0        1
    layers  0 1      2 3      4 5      6
    and     embedding                  final norm, head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peft_mux.scheduler.memory import split_layers


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Layers of every virtual stage of a pipeline.

    Attributes:
        num_stages: S, processes.
        num_chunks: virtual stages of each process.
        layer_counts: layers of each place, in the order of the way.
    """

    num_stages: int
    num_chunks: int
    layer_counts: tuple[int, ...]

    @classmethod
    def of(
        cls, num_layers: int, num_stages: int, *, num_chunks: int = 1, layers_per_stage: Sequence[int] | None = None
    ) -> StageLayout:
        """Return the layout of a plan; the layers of a process are shared by its chunks as equally as can be.

        Args:
            num_layers: of the backbone.
            num_stages: S.
            num_chunks: virtual stages of each process.
            layers_per_stage: S numbers; by default as equal as can be.

        Raises:
            ValueError: if there are not S numbers that add up, or some process has fewer layers than chunks.
        """
        given = None if layers_per_stage is None else tuple(layers_per_stage)
        counts = split_layers(num_layers, num_stages, given)
        if min(counts) < num_chunks:
            raise ValueError(
                f"layers_per_stage is {counts}; allowed: at least {num_chunks} layers in each stage, one for each of"
                f" its chunks. Take fewer stages or chunks for a backbone of {num_layers} layers."
            )
        shares = [
            counts[stage] // num_chunks + (chunk < counts[stage] % num_chunks)
            for chunk in range(num_chunks)
            for stage in range(num_stages)
        ]
        return cls(num_stages, num_chunks, tuple(shares))

    @property
    def num_layers(self) -> int:
        """Decoder layers of the backbone."""
        return sum(self.layer_counts)

    @property
    def last_place(self) -> int:
        """Place of the final norm and the head."""
        return len(self.layer_counts) - 1

    def place(self, stage: int, chunk: int) -> int:
        """Return where a chunk of a process stands on the way."""
        return chunk * self.num_stages + stage

    def places_of(self, stage: int) -> tuple[int, ...]:
        """Return the places of a process."""
        return tuple(self.place(stage, chunk) for chunk in range(self.num_chunks))

    def layers_of(self, place: int) -> range:
        """Return the indices of the decoder layers of a place."""
        start = sum(self.layer_counts[:place])
        return range(start, start + self.layer_counts[place])
