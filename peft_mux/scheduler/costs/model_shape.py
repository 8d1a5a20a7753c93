"""`FrozenParts`: which bytes of a frozen backbone lie before, in and after its layers, and what devices hold of them.

M Eq. 5 spreads a backbone evenly over stages. Its embedding lies on the first stage, though, its output head on the
last one; tensor parallelism cuts the linear layers and the head and leaves norms and the embedding whole
(`peft_mux.engine.tensor.parallel`); and FSDP2 gathers one unit after another (`peft_mux.engine.fsdp.backbone`).
"""

# MERGED: `ModelShape`: what estimates of seconds and bytes need to know of a backbone.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

_GATHERED_COPIES = 2
"""A gathered unit, and beside it the message that it is copied out of, or the one that the next unit comes in."""


@dataclass(frozen=True, slots=True)
class FrozenParts:
    """Bytes of the frozen weights of a backbone.

    Attributes:
        before_bytes: bytes of the embeddings, learned positions included; they lie on the first stage.
        layer_bytes: bytes of one layer, as a mean over all layers.
        cut_bytes: the part of `layer_bytes` that tensor parallelism divides; the rest is whole on every device.
        after_bytes: bytes of the last norm and what else follows the layers; they lie on the last stage.
        head_bytes: bytes of the output head, which tensor parallelism divides; they lie on the last stage.
        is_tied: whether the head is the embedding's weight, which takes no room of its own where both lie.

    Raises:
        ValueError: for negative numbers, or more that is cut than a layer has.
    """

    before_bytes: int
    layer_bytes: int
    cut_bytes: int
    after_bytes: int
    head_bytes: int
    is_tied: bool = False

    def __post_init__(self) -> None:
        for field in ("before_bytes", "layer_bytes", "cut_bytes", "after_bytes", "head_bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed: 0 or more. Count the weights anew.")
        if self.cut_bytes > self.layer_bytes:
            raise ValueError(f"cut_bytes is {self.cut_bytes}; allowed: 0 to {self.layer_bytes}, the bytes of a layer.")

    @classmethod
    def even(cls, backbone_bytes: int, num_layers: int) -> FrozenParts:
        """Return a backbone that is nothing but its layers, all of which can be cut.

        Args:
            backbone_bytes: bytes of all frozen weights and buffers.
            num_layers: layers of the backbone, taken to be of equal size.
        """
        layer_bytes = backbone_bytes // num_layers
        # Bytes that do not divide evenly come after the layers, so that the sum is right.
        return cls(0, layer_bytes, layer_bytes, backbone_bytes - num_layers * layer_bytes, 0)

    def device_bytes(self, num_layers: int, *, is_first: bool, is_last: bool, devices: int = 1) -> float:
        """Return the bytes that lie on each device of a stage.

        Args:
            num_layers: layers that the stage has.
            is_first: whether the stage has the embedding.
            is_last: whether the stage has the head.
            devices: devices that share every layer of the stage (tensor parallelism).
        """
        layer = self.layer_bytes - self.cut_bytes + self.cut_bytes / devices
        # On a single stage a tied head is the embedding, which is counted already.
        head = 0.0 if self.is_tied and is_first else self.head_bytes / devices
        return num_layers * layer + is_first * self.before_bytes + is_last * (self.after_bytes + head)

    def gathered_bytes(self, *, is_first: bool = True, is_last: bool = True) -> int:
        """Return what a device holds of whole weights while it computes, where the weights are divided among replicas.

        Args:
            is_first: whether its stage has the embedding.
            is_last: whether its stage has the head.
        """
        before = self.before_bytes if is_first else 0
        after = max(self.after_bytes, self.head_bytes) if is_last else 0
        return _GATHERED_COPIES * max(self.layer_bytes, before, after)

    def units(self, num_layers: int) -> tuple[tuple[float, int], ...]:
        """Return bytes of each kind of gathered unit, and how often one is gathered in a pass and its backward.

        The loss over a frozen head has its gradient in the forward already, and a frozen embedding needs none: both are
        gathered once. Layers, and what is in no other unit, are gathered for the backward again.

        Args:
            num_layers: layers of the whole backbone.
        """
        return (
            (self.layer_bytes, 2 * num_layers),
            (self.before_bytes, 1),
            (self.head_bytes, 1 if self.head_bytes else 0),
            (self.after_bytes, 2 if self.after_bytes else 0),
        )

    def scaled(self, factor: float) -> FrozenParts:
        """Return the same weights in another precision.

        Args:
            factor: bytes in the new precision over bytes in this one.
        """
        layer = int(factor * self.layer_bytes)
        return FrozenParts(
            before_bytes=int(factor * self.before_bytes),
            layer_bytes=layer,
            cut_bytes=min(layer, int(factor * self.cut_bytes)),
            after_bytes=int(factor * self.after_bytes),
            head_bytes=int(factor * self.head_bytes),
            is_tied=self.is_tied,
        )


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
