"""`ModelShape`: what estimates of seconds and bytes need to know of a backbone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from peft_mux.scheduler.costs.frozen_parts import FrozenParts

MOST_READ = 0.75
"""Part of a pass's rows above which the last layer computes all of them, those too that no loss reads."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the estimate needs to know of a backbone.

    Attributes:
        num_layers: decoder or encoder layers.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP; of a mixture, that of all experts of a token together.
        attention_size: query heads times channels.
        key_value_size: key-value heads times channels.
        vocab_size: rows of the output head.
        backbone_bytes: bytes of all backbone parameters and buffers as they are held.
        activation_bytes: bytes of one element of an activation.
        parts: where the bytes of the backbone lie; `None` spreads them evenly, as Eq. 5 does.
        held_intermediate_size: width of all experts of a layer together, of which a token passes through some; `None`
            where it passes through all that there is.
        routed_share: part of the experts of a layer that a token passes through.
        read_share: part of a layer's products that the last layer makes for the rows alone that a loss reads; 0 where
            it makes all of them for all rows.
        caps_logits: whether logits are bounded smoothly (Gemma 2).
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    attention_size: int
    key_value_size: int
    vocab_size: int
    backbone_bytes: int
    activation_bytes: int
    parts: FrozenParts | None = None
    held_intermediate_size: int | None = None
    routed_share: float = 1.0
    read_share: float = 0.0
    caps_logits: bool = False

    @property
    def layer_elements(self) -> int:
        """Elements of the frozen matrices that a token is multiplied with in one layer."""
        return self.hidden_size * (2 * self.attention_size + 2 * self.key_value_size + 3 * self.intermediate_size)

    def at_targets(self, *, has_own_queries: bool = True) -> ModelShape:
        """Return the shape where the last layer computes keys and values of all rows, and all else of those read.

        Args:
            has_own_queries: whether a projection makes queries alone; one that makes keys and values too is computed
                for all rows.
        """
        features = (1 + has_own_queries) * self.attention_size + 3 * self.intermediate_size
        return replace(self, read_share=features * self.hidden_size / self.layer_elements)

    def in_precision(self, factor: float) -> ModelShape:
        """Return the shape with frozen weights that take `factor` times the bytes.

        Args:
            factor: bytes of the frozen weights in the new precision over their bytes in this one.
        """
        parts = None if self.parts is None else self.parts.scaled(factor)
        return replace(self, backbone_bytes=int(factor * self.backbone_bytes), parts=parts)


class StageSize(NamedTuple):
    """How the layers of a backbone are divided.

    Attributes:
        layers: layers of each of the S stages.
        devices: devices that share each layer of a stage.
    """

    layers: tuple[int, ...]
    devices: int


def split_layers(num_layers: int, num_stages: int, layers_per_stage: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the layers of each stage: those given, or as equal as can be, the first stages taking one more.

    Args:
        num_layers: layers of the backbone.
        num_stages: S, stages of the pipeline.
        layers_per_stage: the layers of each stage as someone chose them, or `None`.

    Raises:
        ValueError: for stages without layers, or numbers that do not add up.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"num_stages is {num_stages}; allowed: 1 to {num_layers}, the layers of the backbone.")
    if layers_per_stage is None:
        each, rest = divmod(num_layers, num_stages)
        return tuple(each + (stage < rest) for stage in range(num_stages))
    if len(layers_per_stage) != num_stages or sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
        raise ValueError(
            f"layers_per_stage is {layers_per_stage}; allowed: {num_stages} numbers of 1 or more that add up to "
            f"{num_layers}."
        )
    return tuple(layers_per_stage)
