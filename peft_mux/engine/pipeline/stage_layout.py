"""`StageLayout`: which decoder layers lie in which process of a pipeline.

Virtual stages are numbered along the way of a micro-batch: virtual stage `chunk * S + stage` follows the one before, as
in `peft_mux.scheduler.pipeline.launch`. For 7 layers, S = 2 and 2 chunks a process, with 4 and 3 layers::

    virtual stage   0        1        2        3
    stage           0        1        0        1
    layers          0 1      2 3      4 5      6
    and             embedding                  final norm, head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peft_mux.scheduler.costs.memory import split_layers


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Layers of every virtual stage of a pipeline.

    Attributes:
        num_stages: S, number of processes of the pipeline.
        num_chunks: number of virtual stages of each process.
        layer_counts: number of decoder layers of each virtual stage.
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
            num_layers: decoder layers of the backbone.
            num_stages: S, number of processes of the pipeline.
            num_chunks: number of virtual stages of each process.
            layers_per_stage: decoder layers of each of the S processes; by default as equal as can be.

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
            # Earlier chunks take what is left over, so that virtual stages differ by a layer at most within a process.
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
    def last_virtual_stage(self) -> int:
        """The virtual stage that has the final norm and the head."""
        return len(self.layer_counts) - 1

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the number of the virtual stage that is one chunk of a process."""
        return chunk * self.num_stages + stage

    def virtual_stages_of(self, stage: int) -> tuple[int, ...]:
        """Return the virtual stages of a process, in order."""
        return tuple(self.virtual_stage(stage, chunk) for chunk in range(self.num_chunks))

    def layers_of(self, virtual_stage: int) -> range:
        """Return the indices of the decoder layers of a virtual stage."""
        start = sum(self.layer_counts[:virtual_stage])
        return range(start, start + self.layer_counts[virtual_stage])
